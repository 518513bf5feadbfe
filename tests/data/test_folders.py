"""Folders of text: links are followed, each folder is read once, and folders that are not read are named."""

from __future__ import annotations

import errno
import glob
import logging
import os
import re
from pathlib import Path

import pytest
import unprivileged

from nsa_lab.data import DataError
from nsa_lab.data.file_search import find_matches
from nsa_lab.data.sources import local
from nsa_lab.data.sources.local import LocalSource, find_files


@pytest.fixture(autouse=True)
def forget_warnings() -> None:
    local._warn_of_left_out.cache_clear()


def write_text(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"text of {path.name}")
    return path


def list_names(folder: Path, path: str | None = None) -> list[str]:
    return [str(file.relative_to(folder)) for file in find_files(path or str(folder))]


def test_links_to_folders_are_followed(tmp_path: Path) -> None:
    texts, elsewhere = tmp_path / "texts", tmp_path / "elsewhere"
    write_text(texts / "own" / "b.txt")
    write_text(elsewhere / "deep" / "a.txt")
    write_text(elsewhere / "c.jsonl").write_text('{"text": "x"}\n')
    (texts / "linked").symlink_to(elsewhere)
    (texts / "file.txt").symlink_to(elsewhere / "deep" / "a.txt")
    expected = ["file.txt", "linked/c.jsonl", "linked/deep/a.txt", "own/b.txt"]
    assert list_names(texts) == expected
    assert [document.text for document in LocalSource(str(texts)).documents()][2] == "text of a.txt"
    (tmp_path / "link").symlink_to(texts)
    assert list_names(tmp_path / "link") == expected


def test_loops_and_second_names_are_read_once_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """`a` comes before `z` in the order of names, but is a link: the folder keeps its own name."""
    write_text(tmp_path / "z" / "one.txt")
    write_text(tmp_path / "z" / "y" / "two.txt")
    (tmp_path / "a").symlink_to(tmp_path / "z")
    (tmp_path / "z" / "up").symlink_to(tmp_path)
    (tmp_path / "z" / "y" / "self").symlink_to(".")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with caplog.at_level(logging.WARNING):
        assert list_names(tmp_path) == ["z/one.txt", "z/y/two.txt"]
    for name in (
        "/a (the same folder as",
        "/z/up (",
        "/z/y/self (",
        "/nowhere (a link to nothing)",
        "/circle (a link to nothing)",
    ):
        assert name in caplog.text


def test_patterns_follow_each_link_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: `**` read a text once for each of the 40 links that the system follows, and with two links 2^40 times."""
    write_text(tmp_path / "a" / "one.txt")
    for name in ("loop", "loop2"):
        (tmp_path / "a" / name).symlink_to(".")
    (tmp_path / "second").symlink_to("a")
    with caplog.at_level(logging.WARNING):
        for pattern in ("**/*.txt", "**", "*/*.txt", "**/**/one.*", "*/../a/*.txt", "a/**/*"):
            assert list_names(tmp_path, f"{tmp_path}/{pattern}") in (["a/one.txt"], ["a/../a/one.txt"]), pattern
    assert "/a/loop (the same folder as" in caplog.text and "/second (the same folder as" in caplog.text


def test_patterns_match_the_files_that_glob_finds(tmp_path: Path) -> None:
    for name in (
        "one.txt",
        "a/one.txt",
        "a/b/two.txt",
        "a/b/.three.txt",
        "a/.b/two.txt",
        "b[1]/a/b/c/one.txt",
        "x.txt/y.txt",
    ):
        write_text(tmp_path / name)
    patterns = (
        *("*", "**", "*.txt", "**/*", "**/*.txt", "*/*.txt", "a/**", "**/b/*", "**/b/**", "**/a/**/b/**/*.txt", "?/*/*"),
        *(
            "[ab]/**/t*.txt",
            "*/../*.txt",
            "**/.b/*",
            "**/.*",
            "*/.b/../*/*.txt",
            "none/*",
            "one.txt/*",
            "b[[]1]/**/one.txt",
        ),
        *("**/**/one.txt", "*/**/*/one.txt", "a/*/two.txt/", "*/b", "a*b/*", "**b/*"),
    )
    for pattern in patterns:
        path = tmp_path / pattern
        found = {os.path.abspath(file) for file in find_matches(path).files}
        expected = {os.path.abspath(file) for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file()}
        assert found == expected, pattern
    assert [file.name for file in find_matches(tmp_path / "b[1]/**/*.txt").files] == ["one.txt"], "a name, not a pattern"


def test_a_path_without_a_text_is_an_error_that_names_the_cause(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "broken.txt").symlink_to("absent")
    (tmp_path / "folder").mkdir()
    for path, cause in (
        ("pipe.txt", "pipe.txt (not a regular file)"),
        ("broken.txt", "broken.txt (a link to nothing)"),
        ("folder", "found nothing"),
        ("fold*", "folder (a folder)"),
        ("none", "nothing at"),
    ):
        with pytest.raises(DataError, match=re.escape(cause)):
            find_files(str(tmp_path / path))


def test_a_text_that_is_removed_while_it_is_read_is_a_data_error(tmp_path: Path) -> None:
    for name, text in (("a.txt", "text"), ("b.txt", "more"), ("c.jsonl", '{"text": "x"}\n')):
        (tmp_path / name).write_text(text)
    source = LocalSource(str(tmp_path))
    for name in ("b.txt", "c.jsonl"):
        (tmp_path / name).rename(tmp_path / "gone")
        with pytest.raises(DataError, match=f"{name}: cannot be read .no such file or directory.; restore"):
            list(source.documents())
        (tmp_path / "gone").rename(tmp_path / name)


def test_hidden_folders_and_texts_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_text(tmp_path / "one.txt")
    write_text(tmp_path / "sub" / ".git" / "two.txt")
    write_text(tmp_path / ".three.txt")
    write_text(tmp_path / ".DS_Store")
    with caplog.at_level(logging.WARNING):
        assert list_names(tmp_path) == ["one.txt"]
        assert list_names(tmp_path) == ["one.txt"]
    assert caplog.text.count(".git (hidden)") == caplog.text.count(".three.txt (hidden)") == 1, "named once"
    assert ".DS_Store" not in caplog.text


def test_a_hidden_folder_that_the_pattern_names_is_not_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_text(tmp_path / "sub" / ".kept" / "one.txt")
    write_text(tmp_path / ".other" / "two.txt")
    with caplog.at_level(logging.WARNING):
        assert list_names(tmp_path, f"{tmp_path}/**/.kept/*.txt") == ["sub/.kept/one.txt"]
    assert ".other (hidden)" in caplog.text and ".kept (hidden)" not in caplog.text


def test_a_path_that_is_too_long_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_text(tmp_path / "one.txt")
    folder = os.open(tmp_path, os.O_RDONLY)
    for _ in range(os.pathconf(tmp_path, "PC_PATH_MAX") // 200 + 1):  # the whole path is longer than any that can be opened
        os.mkdir("d" * 200, dir_fd=folder)
        inner = os.open("d" * 200, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    with caplog.at_level(logging.WARNING):
        assert list_names(tmp_path) == ["one.txt"]
    assert "d (file name too long)" in caplog.text


def test_folders_that_a_glob_does_not_enter_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_text(tmp_path / "one.txt")
    write_text(tmp_path / "sub" / "two.txt")
    with caplog.at_level(logging.WARNING):
        assert list_names(tmp_path, f"{tmp_path}/*") == ["one.txt"]
    assert f"{tmp_path / 'sub'} (a folder)" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert list_names(tmp_path, f"{tmp_path}/**/*.txt") == ["one.txt", "sub/two.txt"]
    assert not caplog.text


def test_many_folders_are_named_in_one_short_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_text(tmp_path / "one.txt")
    for number in range(50):
        (tmp_path / f"link{number:02d}").symlink_to(tmp_path / "absent")
    with caplog.at_level(logging.WARNING):
        find_files(str(tmp_path))
    assert "and 45 more" in caplog.text and len(caplog.records) == 1


@pytest.mark.slow
def test_unreadable_folders_are_named_and_unreadable_files_are_an_error(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    write_text(texts / "open" / "one.txt")
    write_text(texts / "private" / "two.txt")
    unprivileged.make_private(texts / "private")
    code = (
        "import sys\nfrom nsa_lab.data import DataError\nfrom nsa_lab.data.sources.local import find_files\n"
        "try:\n    print([file.name for file in find_files(sys.argv[1])])\nexcept DataError as error:\n    print(error)"
    )
    for path in (texts, f"{texts}/**/*.txt", f"{texts}/*/*.txt"):
        result = unprivileged.run_python("-c", code, path, cwd=tmp_path)
        assert result.stdout == "['one.txt']\n", result
        assert f"left out: {texts / 'private'} (permission denied)" in result.stderr
    unprivileged.make_private(texts / "open" / "one.txt")
    result = unprivileged.run_python("-c", code, texts, cwd=tmp_path)
    assert "permission denied" in result.stdout and "one.txt; change their permissions" in result.stdout
    (texts / "private").chmod(0o700)


def test_folders_that_are_not_searched_are_named_for_folders_and_patterns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("open", "private"):
        write_text(tmp_path / name / "one.txt")
    list_folder = os.listdir

    def list_open_folder(path: Path) -> list[str]:
        if path.name == "private":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return list_folder(path)

    monkeypatch.setattr(os, "listdir", list_open_folder)
    for pattern in ("", "*/*.txt", "**/*.txt", "[op]*/one*"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert list_names(tmp_path, f"{tmp_path}/{pattern}") == ["open/one.txt"]
        assert "/private (permission denied)" in caplog.text, pattern
    for path in (tmp_path / "private", tmp_path / "private" / "*.txt"):
        with pytest.raises(DataError, match=r"permission denied: .*private; change"):
            find_files(str(path))


def test_unreadable_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write_text(tmp_path / f"{name}.txt") for name in "abcdefgh"]
    monkeypatch.setattr(os, "access", lambda path, mode: path == files[0])
    with pytest.raises(DataError, match=r"b\.txt, .* and 2 more"):
        find_files(str(tmp_path))


def test_files_of_other_kinds_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_text(tmp_path / "one.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    with caplog.at_level(logging.WARNING):
        assert [file.name for file in find_files(str(tmp_path))] == ["one.txt"]
    assert "pipe.txt (not a regular file), " in caplog.text and "zero.txt (not a regular file)" in caplog.text
