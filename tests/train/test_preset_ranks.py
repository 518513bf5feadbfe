"""The production presets start on 1, 2, 4 and 8 ranks with their batch sizes, and the ranks train as one rank does."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from looping import looped

from nsa_lab.config import RunConfig
from nsa_lab.runs import events, lifecycle
from nsa_lab.runs.directory import LOG

PARAMS = Path(__file__).parents[2] / "params"
PRESETS = ("production_50k", "production_fast", "long_64k", "long_64k_dense")
# Sizes for a run of seconds on a CPU, with lengths that no number of ranks divides. All other settings are unchanged.
SMALL = {"dim": 24, "n_layers": 1, "d_k": 4, "d_v": 4, "mlp_hidden": 32}
SMALL_NGRAMS = {"ngram_rows": 500, "ngram_width": 4}
NSA = {"l": 8, "d": 4, "l_sel": 16, "n_sel": 4, "w": 32}
LENGTHS = {2048: 323, 8192: 643, 65536: 1283}
LOSS_TOLERANCE = 2e-3  # rounding may change a selected block


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of 60 to 900 letters, one per line."""
    rng, path = random.Random(3), tmp_path_factory.mktemp("texts") / "some.jsonl"
    lines = ["".join(rng.choices("abcdefgh ", k=rng.choice([60, 300, 900]))) for _ in range(200)]
    path.write_text("\n".join(f'{{"text": "{line}"}}' for line in lines))
    return str(path)


def shrink(name: str, text_file: str, n_ranks: int) -> RunConfig:
    preset = RunConfig.from_yaml(PARAMS / f"{name}.yaml")
    sections: dict[str, Any] = preset.to_dict()
    sections["model"] |= {**SMALL, **(SMALL_NGRAMS if preset.model.ngrams else {})}
    sections["nsa"] |= NSA
    sections["runtime"] |= {"precision": "fp32", "compile": False, "profile": "smoke", "device": "auto"}
    if n_ranks == 1:  # the device is a CPU, so one rank is refused
        sections["runtime"]["cuda_graph"] = False
        for stage in sections["train"].get("stages", ()):
            stage["cuda_graph"] = False
    source = "recall" if preset.data.source == "recall" else "local"
    sections["data"] |= {"source": source, "path": text_file, "max_tokens": 50_000, "val_fraction": 0.3}
    if source == "recall":
        sections["data"]["bytes_per_fact"] = 260
    train = sections["train"]
    train |= {"eval_batches": 2, "eval_every": 4, "save_every": 4, "log_every": 1, "stats_every": 2, "spike_sigma": 0.0}
    train |= {"min_tokens_per_s": 0.0, "keep_every": 0}
    for stage in train.get("stages") or [train]:
        stage |= {"steps": 2, "seq_len": LENGTHS[stage["seq_len"]], "warmup_steps": 1}
        if stage.get("min_document_tokens"):
            stage["min_document_tokens"] = 300
    return RunConfig.from_dict(sections)


def train(name: str, text_file: str, n_ranks: int, outputs: Path) -> tuple[list[float], str]:
    """Train a shrunk preset. Return its losses, then its held-out losses, and its log."""
    run_dir = lifecycle.create_run(shrink(name, text_file, n_ranks), outputs)
    with open(run_dir / LOG, "ab") as log:
        command = [sys.executable, "-m", "nsa_lab.train", run_dir, *(["--ranks", str(n_ranks)] if n_ranks > 1 else [])]
        result = subprocess.run(command, stdout=log, stderr=log, check=False)
    text = (run_dir / LOG).read_text()
    assert result.returncode == 0, text[-4000:]
    record = events.read_events(run_dir)
    losses = [event["loss"] for event in events.get_step_events(record)]
    assert len(losses) == shrink(name, text_file, n_ranks).train.steps
    return [*losses, *(event["loss"] for event in events.get_eval_events(record))], text


def test_presets_keep_their_configuration_and_share_sequences_where_ranks_exceed_them() -> None:
    sizes = {
        "production_50k": {1: [1], 2: [1], 4: [1], 8: [2]},
        "production_fast": {1: [1], 2: [1], 4: [1], 8: [1]},
        "long_64k": {1: [1, 1, 1], 2: [1, 1, 2], 4: [1, 1, 4], 8: [1, 2, 8]},
    }
    sizes["long_64k_dense"] = sizes["long_64k"]
    for name in PRESETS:
        config = RunConfig.from_yaml(PARAMS / f"{name}.yaml")
        for n_ranks, expected in sizes[name].items():
            config.check_ranks(n_ranks)
            assert config.list_context_sizes(n_ranks) == expected, (name, n_ranks)
        assert "context_parallel" not in config.to_yaml(), "so the hashes of older runs are unchanged"


@pytest.mark.nightly
@pytest.mark.timeout(900)
@looped
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_trains_on_one_to_eight_ranks(name: str, text_file: str, tmp_path: Path) -> None:
    expected, _ = train(name, text_file, 1, tmp_path / name / "1")
    for n_ranks in (2, 4, 8):
        losses, log = train(name, text_file, n_ranks, tmp_path / name / str(n_ranks))
        assert losses == pytest.approx(expected, abs=LOSS_TOLERANCE), n_ranks
        assert f"cuda_graph = True with {n_ranks} ranks means auto" in log
        is_shared = max(shrink(name, text_file, n_ranks).list_context_sizes(n_ranks)) > 1
        assert ("ranks share each sequence (context parallelism)" in log) == is_shared
