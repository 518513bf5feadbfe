"""The presets for long texts: NSA and dense baseline match in size and text, and a similar run resumes as the same run."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nsa_lab.config import RunConfig
from nsa_lab.data import Batch
from nsa_lab.evaluate import measure_selection_benefit
from nsa_lab.runs import events, lifecycle
from nsa_lab.train import validation
from nsa_lab.train.estimate import build_meta_model, estimate_resources
from nsa_lab.train.matched_baseline import compute_matched_hidden
from nsa_lab.train.trainer import Trainer

PARAMS = Path(__file__).parents[2] / "params"
NSA, THREE_BRANCHES, DENSE = (
    RunConfig.from_yaml(PARAMS / f"long_64k{form}.yaml") for form in ("", "_three_branches", "_dense")
)
# Sizes for a run of one minute on a CPU; all other settings are those of the presets.
SHRUNK = [(3, 320, 2), (2, 640, 2), (4, 1280, 1)]
SMALL = {"dim": 24, "n_layers": 1, "d_k": 4, "d_v": 4, "mlp_hidden": 32, "ngram_rows": 500, "ngram_width": 4}


def test_the_dense_preset_is_the_matched_baseline() -> None:
    """The MLP width is the next multiple of 8 of the width that `nsa-lab plan long_64k_three_branches --twin` prints."""
    assert DENSE.model.hidden_width == 8 * -(-compute_matched_hidden(THREE_BRANCHES) // 8) == 2456
    counts = [build_meta_model(config.model).parameter_count() for config in (NSA, THREE_BRANCHES, DENSE)]
    assert counts == [78_597_632, 78_397_184, 78_447_872]
    assert all(abs(count / counts[-1] - 1) < 0.002 for count in counts)
    labels = {"name": DENSE.name, "description": DENSE.description}
    dense = {"attention": "dense", "mlp_hidden": DENSE.model.hidden_width}
    model = THREE_BRANCHES.model.model_copy(update=dense)
    assert THREE_BRANCHES.model_copy(update={**labels, "model": model}) == DENSE


def test_the_presets_differ_only_in_their_attention_and_width() -> None:
    changed = ("branches", "indexer_keys", "indexer_heads", "indexer_dtype", "mlp_hidden")
    model = THREE_BRANCHES.model.model_copy(update={name: getattr(NSA.model, name) for name in changed})
    labels = {"name": NSA.name, "description": NSA.description}
    assert THREE_BRANCHES.model_copy(update={**labels, "model": model}) == NSA


def test_the_presets_grow_to_64k_with_masking_and_end_on_long_documents() -> None:
    stages = NSA.train.plan
    assert [stage.seq_len for stage in stages] == [2048, 8192, 65536] and NSA.data.documents == "mask"
    assert [stage.min_document_tokens for stage in stages] == [0, 0, 32768]
    assert [stage.planted_share for stage in stages] == [1, 1, 0.5]
    assert estimate_resources(NSA).tokens == estimate_resources(DENSE).tokens == (786 + 1046 + 2 * 750) * 32768


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of 300 to 3,000 letters, one per line; a third of them have 1,500 or more."""
    rng, path = random.Random(3), tmp_path_factory.mktemp("texts") / "some.jsonl"
    lines = ["".join(rng.choices("abcdefgh ", k=rng.choice([300, 900, 3000]))) for _ in range(120)]
    path.write_text("\n".join(f'{{"text": "{line}"}}' for line in lines))
    return str(path)


def shrunk(config: RunConfig, text_file: str) -> RunConfig:
    stages = [
        {**stage.model_dump(), "steps": steps, "seq_len": length, "batch_size": size, "warmup_steps": 1}
        for stage, (steps, length, size) in zip(config.train.plan, SHRUNK, strict=True)
    ]
    stages[2]["min_document_tokens"] = 1500
    sections = config.to_dict()
    retained = {"log_every": 1, "stats_every": 3, "eval_every": 4, "eval_batches": 1, "save_every": 2}
    return RunConfig.from_dict(
        {
            **sections,
            "model": sections["model"] | SMALL,
            "nsa": sections["nsa"] | {"l": 8, "d": 4, "l_sel": 16, "n_sel": 4, "w": 32},
            "runtime": {"device": "cpu", "heartbeat_s": 60.0},
            "train": sections["train"] | retained | {"stages": stages},
            "data": sections["data"] | {"path": text_file, "val_fraction": 0.3, "bytes_per_fact": 260},
        }
    )


@pytest.mark.nightly
@pytest.mark.parametrize("config", [NSA, DENSE], ids=lambda config: config.name)
def test_a_similar_run_that_is_killed_resumes_as_the_same_run(
    config: RunConfig, text_file: str, train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the second stage, and in the last, which has its own text and needles."""

    class Killed(BaseException):
        pass

    # Two facts instead of sixteen per evaluation: retrieval is not tested here, and takes most of the time.
    monkeypatch.setattr(validation, "measure_selection_benefit", partial(measure_selection_benefit, sequences=2))
    after = Trainer._finish_step
    whole, parted = (lifecycle.create_run(shrunk(config, text_file), tmp_path / name) for name in ("whole", "parted"))
    assert train(whole) == 0
    for cut in (5, 7):

        def die(self: Trainer, step: int, batch: Batch, phase: str, cut: int = cut) -> None:
            after(self, step, batch, phase)
            if step == cut:
                raise Killed

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Trainer, "_finish_step", die)
            train(parted)
    assert train(parted) == 0
    ours, theirs = (load_file(run_dir / "checkpoints/step-00000009/model.safetensors") for run_dir in (parted, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    recorded = [
        [_numbers(event) for event in events.get_step_events(events.read_events(run_dir))] for run_dir in (whole, parted)
    ]
    assert recorded[0] == recorded[1]
    # In the last stage every second sequence has answers; in other stages all have.
    assert ["marked_loss" in event for event in recorded[0]] == [True] * 5 + [False, True, False, True]


def _numbers(event: dict[str, Any]) -> dict[str, Any]:
    return {key: event[key] for key in ("step", "tokens", "loss", "lr", "grad_norm", "marked_loss") if key in event}
