"""Both parsers of PyYAML give the same value, or the error of the slower one; small texts cannot become large values."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import yaml

from nsa_lab.config import ConfigError, RunConfig, yaml_text

ROOT = Path(__file__).parents[1]


def parse_slowly(text: str) -> object:
    return yaml.load(text, Loader=yaml_text._Loader)


def test_fast_parser_equals_the_other() -> None:
    if yaml_text._FastLoader is None:
        pytest.skip("PyYAML without libyaml")
    files = [*(ROOT / "params").rglob("*.yaml"), *(ROOT / "outputs").glob("*/config.yaml")]
    texts = [file.read_text(encoding="utf-8") for file in files]
    question = yaml_text.dump({"question": "\nQ: What is the {name}? A: ", "others": ["a: b?", "it's: what?"]})
    assert yaml_text._parse_simple(f"# a comment?\n{question}")["others"] == ["a: b?", "it's: what?"]
    assert sum(map(yaml_text._is_simple, texts)) >= 6
    texts += [question] * 5
    rng, characters, n_compared = random.Random(0), list(" \n:-#'\"[]{},abc10.e~?\\*"), 0
    for number in range(6000):
        text = list(rng.choice(texts)[: rng.randrange(1, 200)] if number % 2 else "")
        for _ in range(rng.randrange(20)):
            text.insert(rng.randrange(len(text) + 1), rng.choice(characters))
        edited = "".join(text)
        if not yaml_text._is_simple(edited):
            continue
        try:
            value = yaml_text._parse_simple(edited)
        except (yaml.YAMLError, yaml_text.YAMLTextError):
            continue  # the other parser decides
        n_compared += 1
        assert repr(value) == repr(parse_slowly(edited)), edited
    assert n_compared > 1000
    for text in texts:
        assert yaml_text.parse(text) == parse_slowly(text)


# Question marks in brackets, next to quotes and signs of comments that could be taken to enclose them.
ONE_PARSER_TEXTS = [
    "[ca?\n]",
    "{.?,}",
    "a: [b '?']",
    "{b\n'?'}",
    "[b - '?']",
    "a: b, 'x\nc: [a?\n, ' z']",
    "- 'a #'\n- [b?]",
]


@pytest.mark.parametrize("text", ["? a\n: b", '["\\x3f", b?]', *ONE_PARSER_TEXTS])
def test_fast_parser_leaves_question_marks_on_which_the_parsers_differ(text: str) -> None:
    if yaml_text._FastLoader is None:
        pytest.skip("PyYAML without libyaml")
    with pytest.raises((yaml.YAMLError, yaml_text.YAMLTextError)):
        yaml_text._parse_simple(text)


def test_parsers_agree_on_short_texts_with_question_marks() -> None:
    if yaml_text._FastLoader is None:
        pytest.skip("PyYAML without libyaml")
    rng, n_compared = random.Random(1), 0
    pieces = [*"\"'#? \n,:[]{}-ab", "'?'", "'a ?'", "a: ", "- ", "# ?", "b ", "?\n"]
    for _ in range(8000):
        text = "".join(rng.choices(pieces, k=rng.randrange(1, 9)))
        if "?" in text and yaml_text._is_simple(text):
            try:
                value = yaml_text._parse_simple(text)
            except (yaml.YAMLError, yaml_text.YAMLTextError):
                continue
            n_compared += 1
            assert repr(value) == repr(parse_slowly(text)), text
    assert n_compared > 500


def test_merges_cannot_multiply_a_small_text(tmp_path: Path) -> None:
    levels = ["a0: &a0 {x: 1, y: 2}"]
    levels += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 16)]
    path = tmp_path / "config.yaml"
    path.write_text("\n".join(levels))
    with pytest.raises(ConfigError, match="keys after merges"):
        RunConfig.from_yaml(path)


@pytest.mark.parametrize("digits", ["00110000", "FFFFFFFF"])
def test_an_escape_that_is_no_character_is_reported_with_its_position(digits: str) -> None:
    with pytest.raises(yaml_text.YAMLTextError, match=r"^line 2, column 8: an escape"):
        yaml_text.parse(f'a: 1\nb: "x\\U{digits}"')
    assert yaml_text.parse('"\\U0010FFFF"') == chr(0x10FFFF)


@pytest.mark.timeout(30)
def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.yaml")
    (tmp_path / "large.yaml").write_bytes(b"# \n" * (1 << 20))
    for name, problem in (("fifo", "expected a regular file"), ("large", "larger than"), ("missing", "no such")):
        with pytest.raises(ConfigError, match=problem):
            RunConfig.from_yaml(tmp_path / f"{name}.yaml")
    with pytest.raises(ConfigError, match="got a folder"):
        RunConfig.from_yaml(tmp_path)
