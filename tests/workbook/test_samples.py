"""Samples, held-out text from the run's cached text, and the check of cached decoding."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_run import make_config, write_checkpoint, write_run
from safetensors.torch import save

from nsa_lab.config import RunConfig
from nsa_lab.data import dataset, prepare
from nsa_lab.inference import NoCheckpoint
from nsa_lab.inference.cache import attention_cache
from nsa_lab.model import NSATransformer
from nsa_lab.workbook import samples
from nsa_lab.workbook.samples import TextColumns, read_held_out_text

SMALL = {"train__seq_len": 64, "nsa__l": 8, "nsa__d": 4, "nsa__l_sel": 8, "nsa__n_sel": 4, "nsa__w": 8}
LINES = [f"line {n} of the text\n" for n in range(400)]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Return the configuration of a run on 60 documents, with a separate cache."""
    monkeypatch.setattr(dataset, "get_cache_folder", lambda: tmp_path / "cache")
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text(f"document {number}\n" + "".join(LINES))
    return make_config(data__source="local", data__path=str(tmp_path / "*.txt"), data__val_fraction=0.1)


def test_held_out_text_starts_at_a_line(config: RunConfig, tmp_path: Path) -> None:
    prepare(config.data)
    text = read_held_out_text(write_run(tmp_path / "run", config), 60)
    assert len(text) == 60 and (text.splitlines(keepends=True)[0] in LINES or text.startswith("document"))


def test_held_out_text_is_from_the_middle(config: RunConfig, tmp_path: Path) -> None:
    dataset = prepare(config.data)
    middle = len(dataset.validation) // 2
    text = dataset.tokenizer.decode(dataset.validation.read(middle, 200).tolist())
    assert read_held_out_text(write_run(tmp_path / "run", config), 60) == text.partition("\n")[2][:60]


def test_held_out_text_builds_nothing(config: RunConfig, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", config)
    for _ in range(2):
        assert read_held_out_text(run, 60) == "not shown: the run's text is not in this machine's cache"


def test_text_columns() -> None:
    columns = TextColumns({"before <step>": "<b>&", "after": "words"})
    assert "&lt;b&gt;&amp;</pre>" in columns._repr_html_() and "before &lt;step&gt;" in columns._repr_html_()
    assert repr(columns) == "before <step>\n-------------\n<b>&\n\nafter\n-----\nwords"


@pytest.fixture
def with_checkpoint(tmp_path):
    """Return a run with untrained weights."""
    run = write_run(tmp_path, make_config(**SMALL))
    model = NSATransformer(make_config(**SMALL).model, seed=3)
    write_checkpoint(run, 200, save({name: value.contiguous() for name, value in model.state_dict().items()}))
    return run


def test_cached_decoding_is_exact(with_checkpoint):
    verdict = samples.check_decoding(with_checkpoint)
    assert verdict.ok is True and verdict.value < 1e-12 and "32 tokens at once, 32 one by one" in verdict.text


def test_wrong_decoding_fails(with_checkpoint, monkeypatch):
    right = attention_cache.attend_and_select

    def a_token_late(q, gates, layer, lengths, nsa, **index):
        return right(q, gates, layer, lengths - 1, nsa, **index)

    monkeypatch.setattr(attention_cache, "attend_and_select", a_token_late)
    assert samples.check_decoding(with_checkpoint).ok is False


def test_decoding_without_a_checkpoint_is_unknown(tmp_path):
    run = write_run(tmp_path)
    assert samples.check_decoding(run).ok is None
    with pytest.raises(NoCheckpoint):
        samples.observe_blocks(run)
