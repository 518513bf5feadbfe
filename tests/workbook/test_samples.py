"""Held-out text beside samples: from the run's own text, and never fetched for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_run import make_config, write_run

from nsa_lab.config import RunConfig
from nsa_lab.data import dataset, prepare
from nsa_lab.workbook.beside import TextColumns, read_held_out_text

LINES = [f"line {n} of the text\n" for n in range(400)]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run on sixty documents of one folder, with a cache of its own."""
    monkeypatch.setattr(dataset, "get_cache_folder", lambda: tmp_path / "cache")
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text(f"document {number}\n" + "".join(LINES))
    return make_config(data__source="local", data__path=str(tmp_path / "*.txt"), data__val_fraction=0.1)


def test_the_text_is_what_validation_reads_from_a_line_on(config: RunConfig, tmp_path: Path) -> None:
    prepare(config.data)
    told = read_held_out_text(write_run(tmp_path / "run", config), 60)
    assert len(told) == 60 and (told.splitlines(keepends=True)[0] in LINES or told.startswith("document"))


def test_the_text_is_from_the_middle(config: RunConfig, tmp_path: Path) -> None:
    found = prepare(config.data)
    middle = len(found.validation) // 2
    text = found.tokenizer.decode(found.validation.read(middle, 200).tolist())
    assert read_held_out_text(write_run(tmp_path / "run", config), 60) == text.partition("\n")[2][:60]


def test_nothing_is_filled_for_it(config: RunConfig, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", config)
    for _ in range(2):
        assert read_held_out_text(run, 60) == "not shown: the run's text is not in this machine's cache"


def test_columns_are_markup_of_their_own_and_text_in_a_terminal() -> None:
    columns = TextColumns({"before <step>": "<b>&", "after": "words"})
    assert "&lt;b&gt;&amp;</pre>" in columns._repr_html_() and "before &lt;step&gt;" in columns._repr_html_()
    assert repr(columns) == "before <step>\n-------------\n<b>&\n\nafter\n-----\nwords"
