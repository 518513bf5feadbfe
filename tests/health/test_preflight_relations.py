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
    for number, (checks, documents, text) in enumerate(cases):
        ok, found = examine(tmp_path / f"failed-{number}", checks, documents)
        assert ok is False and text in found, (text, found)
