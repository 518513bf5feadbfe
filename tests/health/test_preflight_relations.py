"""A preflight records each of its checks once, and the number of a passed check satisfies its limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fake_run import make_config, write_run

from nsa_lab.health import LIMITS
from nsa_lab.health.preflight_relations import REQUIRED
from nsa_lab.health.run_checks import check_preflight
from nsa_lab.runs.history import History

Event = dict[str, Any]
NUMBERS: dict[str, Event] = {
    "memory": {"limit": "95% of 100.00 GB; estimate 50.00 GB", "numbers": {"peak_bytes": 5e10, "planned_bytes": 5e10}},
    "throughput": {"limit": "20,000 tokens/s", "numbers": {"tokens_per_s": 20_000.4}},
}
NEW = "5.5458 (ln V + s^2/2) ± 0.0411; s from 0.028 to 0.044"
ERROR = "2x (forward) and 3x (backward) the error of plain low precision against float64"
TRUE_TEXTS = (
    ("disk", "8.62 GB free", "8.62 GB for 9 checkpoints"),
    ("disk", "0.60 GB free", "314.68 MB for 1 checkpoints"),
    ("causality", "logits before token 1024 move by 0 when later tokens change", "0"),
    ("kernel_parity", "1.00 of the allowed error (selected, output)", ERROR),
    ("kernel_parity", "dense attention", "no NSA kernels"),
    ("gradients", "all", "all parameters"),
    ("checkpoint", "0.74 GB saved in 2.91 s; the probe is equal after loading", "equal logits"),
    ("checkpoint", "313.87 MB saved in 0.92 s; the probe is the same after loading", "the same logits"),
    ("initial_loss", "5.6560", "5.5452 (ln V) within 2 %"),
    ("initial_loss", "5.5445; standard deviation of the logits 0.044", NEW),
    ("initial_loss", "2.3391", "below 10.8027 (ln V): pretrained weights"),
    ("profile", "123,456 parameters, a checkpoint every 100 steps, local data", "smoke: any"),
    ("units", "200 optimiser steps x 4,096 tokens = 819,200 tokens, 0.44 epochs", "the peak rate"),
)
FALSE_TEXTS = (
    ("disk", "0.10 GB free", "8.62 GB for 9 checkpoints", "disk passed with 0.10 GB free, limit 8.62 GB for 9 checkpoints"),
    ("disk", "300.00 MB free", "0.74 GB for 1 checkpoints", "disk passed with 300.00 MB free"),
    ("causality", "logits before token 1024 change by 0.53 when later tokens change", "0", "change by 0.53 when"),
    ("causality", "logits before token 1024 move by nan when later tokens change", "0", "move by nan when"),
    ("kernel_parity", "37.20 of what is allowed (compressed, gradient of q)", ERROR, "kernel_parity passed with 37.20 of"),
    ("gradients", "12 of 90 parameters have no gradient", "all parameters", "gradients passed with 12 of 90 parameters"),
    ("checkpoint", "0.74 GB saved in 2.91 s; the probe differs after loading", "equal logits", "the probe differs after"),
    ("initial_loss", "7.9000", "5.5452 (ln V) within 2%", "initial_loss passed with 7.9000, limit 5.5452"),
    ("initial_loss", "5.6000; standard deviation of the logits 0.036", NEW, "initial_loss passed with 5.6000"),
    ("initial_loss", "5.5445; standard deviation of the logits 0.060", NEW, "of the logits 0.060"),
    ("initial_loss", "10.9000", "below 10.8027 (ln V): pretrained weights", "initial_loss passed with 10.9000"),
    (
        "profile",
        "9,848 parameters, a checkpoint every 100 steps",
        "production: at least 50,000,000 parameters",
        "9,848 par",
    ),
    (
        "profile",
        "60,000 parameters, a checkpoint every 100 steps",
        "smoke: any",
        "60,000 parameters, the first event has 123,456",
    ),
    (
        "units",
        "90 optimizer steps x 4,096 tokens",
        "train.lr",
        "units has 90 steps of 4,096 tokens, but config.yaml has 200",
    ),
    (
        "units",
        "200 optimizer steps x 4,096 tokens + 5 optimizer steps x 9 tokens",
        "train.lr",
        "2 stages, but config.yaml has 1",
    ),
)


def make_checks(*names: str, **changes: Event) -> list[Event]:
    """Return passed checks. `changes`: fields of a check by its name."""
    common = {"kind": "preflight", "attempt": 1, "step": 0, "ok": True, "value": "fine", "limit": "fine", "seconds": 0.1}
    return [common | {"name": name} | NUMBERS.get(name, {}) | changes.get(name, {}) for name in names]


def examine(folder: Path, checks: list[Event], documents: str = "cross") -> tuple[bool | None, str]:
    def edit(events: list[Event]) -> list[Event]:
        others = [event for event in events if event["kind"] != "preflight"]
        return [others[0], *checks, *others[1:]]

    verdict = check_preflight(History.read(write_run(folder, make_config(data__documents=documents), edit)), LIMITS)
    return verdict.ok, verdict.text


def test_checks_of_a_preflight(tmp_path: Path) -> None:
    """Older versions, without durations, ran other checks. A size and a speed are rounded in the limit."""
    old_limit: dict[str, Event] = {"memory": {"limit": "95 % of 100.00 GiB", "numbers": {"peak_bytes": 1e11}}}
    no_minimum: dict[str, Event] = {"throughput": {"limit": "no minimum", "numbers": {"tokens_per_s": 3.0}}}
    cpu: dict[str, Event] = {
        "memory": {"limit": "50.00 MB of tensors estimated, for a GPU", "numbers": {}},
        "throughput": {"numbers": {}},
    }
    passed: list[tuple[list[Event], str]] = [
        (make_checks(*REQUIRED), "cross"),
        (make_checks(*REQUIRED, "documents"), "mask"),
        ([{key: value for key, value in check.items() if key != "seconds"} for check in make_checks("data")], "mask"),
        (make_checks(*REQUIRED, **old_limit), "cross"),
        (make_checks(*REQUIRED, **no_minimum), "cross"),
        (make_checks(*REQUIRED, **cpu), "cross"),
    ]
    passed += [
        (make_checks(*REQUIRED, **{name: {"value": value, "limit": limit}}), "cross") for name, value, limit in TRUE_TEXTS
    ]
    for number, (checks, documents) in enumerate(passed):
        assert examine(tmp_path / f"passed-{number}", checks, documents) == (True, f"{len(checks)} checks passed")

    slow = {"throughput": {"numbers": {"tokens_per_s": 19_000.0}}}
    large = {"memory": {"numbers": {"peak_bytes": 9.7e10}}}
    cases: list[tuple[list[Event], str, str]] = [
        (make_checks(*REQUIRED, "data"), "cross", "data is recorded 2 times"),
        (make_checks(*REQUIRED), "mask", "documents is missing"),
        (make_checks(*(name for name in REQUIRED if name != "causality")), "cross", "causality is missing"),
        (
            make_checks(*REQUIRED, **large),
            "cross",
            "memory passed with a peak of 97,000,000,000 bytes, limit 95",
        ),
        (make_checks(*REQUIRED, **slow), "cross", "throughput passed with 19,000 tokens/s, limit 20,000"),
    ]
    cases += [
        (make_checks(*REQUIRED, **{name: {"value": value, "limit": limit}}), "cross", text)
        for name, value, limit, text in FALSE_TEXTS
    ]
    for number, (checks, documents, text) in enumerate(cases):
        ok, found = examine(tmp_path / f"failed-{number}", checks, documents)
        assert ok is False and text in found, (text, found)
