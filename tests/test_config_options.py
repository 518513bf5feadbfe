"""No documented option crashes: each value of the configuration trains, or raises an error that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pydantic
import pytest
import torch
from looping import looped

from nsa_lab.attention import BackendError, resolve_backend
from nsa_lab.config import ConfigError, RunConfig, list_keys
from nsa_lab.data import Dataset, prepare
from nsa_lab.runs import events, lifecycle
from nsa_lab.train.attempt import run
from nsa_lab.train.build import Builders, select_device
from nsa_lab.train.distributed import World

# Without an indexer, its options are not used.
INDEXER = {"indexer_block": 4, "selection_loss": 0.05}
SECTIONS: dict[str, Any] = {
    "name": "options",
    "model": {"dim": 16, "n_layers": 1, "n_heads": 2, "n_kv_groups": 1, "d_k": 4, "d_v": 4, **INDEXER},
    "nsa": {"l": 8, "d": 4, "l_sel": 8, "n_sel": 3, "w": 16},
    "runtime": {"device": "cpu", "heartbeat_s": 60.0},
    "data": {"source": "synthetic", "max_tokens": 20_000, "val_fraction": 0.3},
    "train": {"steps": 2, "seq_len": 288, "batch_size": 1, "eval_every": 0, "save_every": 0, "log_every": 1},
}
# Options that a CPU does not support, with a part of their error; and options that other tests train with.
REJECTED = {
    ("runtime.device", "cuda"): "runtime.device",
    ("runtime.backend", "flash"): "flash-attn needs a CUDA device",
    ("runtime.backend", "triton"): "the kernels take head widths",
    ("runtime.cuda_graph", True): "runtime.cuda_graph = True needs runtime.device: cuda",
}
N_RUNS = 8
TESTED_ELSEWHERE = {
    ("data.source", "fineweb_edu"): "tests/data/test_fineweb_edu.py",
    ("data.source", "local"): "tests/data/test_sources.py",
    ("data.source", "stdlib"): "tests/data/test_build_shards.py",
    ("runtime.compile", True): "tests/train/test_train_gpu.py",
    ("runtime.profile", "production"): "tests/train/test_preflight.py",
    ("train.trainable", "indexer"): "tests/convert/test_conversion_run.py",
}


def list_options() -> dict[str, tuple[Any, ...]]:
    """Return the keys with a fixed set of values (names or booleans), and their values."""
    found = {}
    for key in list_keys(RunConfig):
        *sections, leaf = key.split(".")
        kind: type[pydantic.BaseModel] = RunConfig
        for section in ["model", "nsa"] if sections == ["nsa"] else sections:
            kind = kind.model_fields[section].annotation  # pyright: ignore[reportAssignmentType]
        annotation = kind.model_fields[leaf].annotation
        if annotation is bool:
            found[key] = (False, True)
        elif get_origin(annotation) is Literal:
            found[key] = get_args(annotation)
    return found


VALUES = [(key, value) for key, values in list_options().items() for value in values]


def list_usable_values() -> dict[str, list[Any]]:
    """Return the values of each key that can be trained with on this CPU."""
    left = {
        key: [v for v in values if (key, v) not in {*REJECTED, *TESTED_ELSEWHERE}] for key, values in list_options().items()
    }
    return {key: values for key, values in left.items() if values}


def make_config(number: int) -> tuple[dict[str, Any], RunConfig]:
    """Return the options and configuration of run `number`, which takes the values of every key in turn.

    Together the runs use all values. The last run is dense, because NSA keys need the others. Every other run inserts
    facts, so their keys change half as often. Muon alternates with sharding, because they are incompatible.
    """
    turns = dict.fromkeys(("data.names", "data.distance", "data.values", "data.wordings"), number // 2)
    turns |= {"model.attention": number // (N_RUNS - 1), "train.optimizer": number + 1}
    options_of_run = {key: values[turns.get(key, number) % len(values)] for key, values in list_usable_values().items()}
    sections = {name: dict(keys) if isinstance(keys, dict) else keys for name, keys in SECTIONS.items()}
    for key, value in options_of_run.items():
        section, leaf = key.split(".")
        if section != "data" or leaf == "source" or options_of_run["data.source"] == "recall":
            sections[section][leaf] = value
    return options_of_run, RunConfig.from_dict(sections)


@pytest.fixture(scope="module")
def builders(tmp_path_factory: pytest.TempPathFactory) -> Builders:
    cache = tmp_path_factory.mktemp("shards")

    def data(*arguments: Any) -> Dataset:
        return prepare(*arguments, cache=cache)

    return Builders(data=data)


def test_exceptions_are_existing_options() -> None:
    assert {*REJECTED, *TESTED_ELSEWHERE} <= set(VALUES)
    assert all((Path(__file__).parents[1] / file).is_file() for file in TESTED_ELSEWHERE.values())
    assert {"nsa.phi", "nsa.gate", "model.mlp", "runtime.precision", "train.lr_schedule", "data.distance"} <= set(
        list_options()
    )


@pytest.mark.slow
@looped
@pytest.mark.parametrize(
    "number", [n if n in (0, N_RUNS - 1) else pytest.param(n, marks=pytest.mark.nightly) for n in range(N_RUNS)]
)
def test_every_option_trains(number: int, builders: Builders, tmp_path: Path) -> None:
    options_of_run, config = make_config(number)
    run_dir = lifecycle.create_run(config, tmp_path)
    assert run(run_dir, builders=builders) == 0, options_of_run
    losses = [event["loss"] for event in events.read_events(run_dir) if event["kind"] == "step"]
    assert len(losses) == 2 and all(0 < loss < 20 for loss in losses)


def test_every_value_is_used_in_one_of_the_runs() -> None:
    configs = [make_config(number)[1] for number in range(N_RUNS)]
    used = {item for config in configs for item in _list_used_values(config).items()}
    sparse = {item for config in configs if config.model.attention == "nsa" for item in _list_used_values(config).items()}
    assert {item for item in used if item[0].startswith("nsa.")} <= sparse
    assert {(key, value) for key, values in list_usable_values().items() for value in values} <= used


def _list_used_values(config: RunConfig) -> dict[str, Any]:
    """Return the values that the run uses of these keys, including defaults that are not written to YAML."""
    sections = {name: getattr(config, name) for name in ("model", "runtime", "train", "data")} | {"nsa": config.model.nsa}
    return {
        f"{name}.{leaf}": value
        for name, section in sections.items()
        for leaf, value in section.model_dump(mode="json").items()
        if f"{name}.{leaf}" in list_options() and leaf not in getattr(section, "unused_keys", ())
    }


@looped
@pytest.mark.parametrize(("key", "value"), REJECTED, ids=str)
def test_an_unsupported_option_is_named(key: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    section, leaf = key.split(".")
    with pytest.raises((ConfigError, BackendError, NotImplementedError)) as caught:
        config = RunConfig.from_dict({**SECTIONS, section: {**SECTIONS[section], leaf: value}})
        device = select_device(config, World())
        resolve_backend(device, torch.float32, config.nsa, config.model, config.runtime.backend)
    assert REJECTED[key, value] in str(caught.value)
