"""Edits of the first event of a recorded run, and of its environment.json, fail their check; the record itself passes."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_run import Event, edit_history

from nsa_lab.config import RunConfig
from nsa_lab.health import LIMITS, Limits, Verdict
from nsa_lab.health.consistency_checks import check_consistent
from nsa_lab.health.record_checks import check_one_run
from nsa_lab.health.run_checks import check_finite
from nsa_lab.health.start_checks import find_contradiction
from nsa_lab.runs import directory, resolve
from nsa_lab.runs.history import History

OUTPUTS = resolve.get_root() / "outputs"
CHECKS: dict[str, Callable[[History, Limits], Verdict]] = {
    "one run": check_one_run,
    "consistent numbers": check_consistent,
    "finite numbers": check_finite,
}
# A run with all fields of today; one of several stages; one of two attempts, before settings and packing were recorded.
RECENT, STAGED, OLD = (
    *("whole4-20261126T030637Z-8c93", "long_64k-20261126T122445Z-0d29"),
    "production_50k-20261121T141448Z-afd3",
)


@pytest.fixture(scope="module")
def records() -> dict[str, History]:
    return {name: History.read(OUTPUTS / name) for name in (RECENT, STAGED, OLD)}


def get_verdict(history: History, name: str) -> Verdict:
    return CHECKS[name](history, LIMITS)


def change_start(get_values: Callable[[Event], Event]) -> Callable[[list[Event]], None]:
    def edit(events: list[Event]) -> None:
        for event in (event for event in events if event["kind"] in ("start", "resume")):
            event.update(get_values(event))

    return edit


def set_backends(name: str) -> Callable[[Event], Event]:
    return lambda e: {"backend": {part: choice | {"backend": name} for part, choice in e["backend"].items()}}


def scale(name: str, factor: float) -> Callable[[Event], Event]:
    return lambda e: {
        name: {key: value * factor for key, value in e[name].items()}
        if isinstance(e[name], dict)
        else int(e[name] * factor)
    }


def set_packing(**values: Any) -> Callable[[Event], Event]:
    return lambda e: {"packing": [counts | values for counts in e["packing"]]}


def test_contradictory_starts_fail(records: dict[str, History]) -> None:
    for record, get_values, name, text in (
        (
            RECENT,
            lambda e: {"device": "cpu"},
            "one run",
            "device of attempt 1 is cpu, which contradicts heartbeats of a GPU",
        ),
        (OLD, lambda e: {"device": "cpu", "gpu_util": "off"}, "one run", "contradicts heartbeats of a GPU"),
        (RECENT, set_backends("torch"), "one run", "contradicts its device: NVIDIA H200"),
        (STAGED, set_backends("reference"), "one run", "contradicts its device: NVIDIA H100 80GB HBM3"),
        (STAGED, lambda e: {"ranks": 65_536}, "one run", "ranks of attempt 1 is 65536, which contradicts config.yaml"),
        (
            RECENT,
            scale("params", 2),
            "consistent numbers",
            "79,011,072 weights, but attempt 1 records 158,022,144 parameters",
        ),
        (RECENT, scale("flops_per_token", 0.1), "consistent numbers", "16,329,198 FLOPs per token of dense"),
        (OLD, scale("flops_per_token", 0.1), "consistent numbers", "FLOPs per token of dense"),
        (RECENT, scale("flops_per_token", 10), "consistent numbers", "FLOPs per token of dense"),
        (RECENT, set_packing(rows=10), "consistent numbers", "22,114 documents in 10 rows of at most 5"),
        (
            RECENT,
            set_packing(cut_share=0.1),
            "consistent numbers",
            "19,705 of 22,114 documents are cut, but their share is 0.1",
        ),
        (STAGED, set_packing(padded_tokens=10**7), "consistent numbers", "tokens are padding, but their share is 0"),
    ):
        verdict = get_verdict(edit_history(records[record], change_start(get_values)), name)
        assert verdict.ok is False and text in verdict.text, verdict.text


def test_configured_device_and_backend_are_those_of_the_last_attempt(records: dict[str, History]) -> None:
    def configure(name: str, **values: Any) -> Verdict:
        sections = records[name].config.to_dict()
        config = RunConfig.from_dict(sections | {"runtime": sections["runtime"] | values})
        return get_verdict(replace(records[name], config=config), "one run")

    on_cpu = {"compile": False, "cuda_graph": False, "device": "cpu"}
    assert "which contradicts runtime.device of config.yaml: cpu" in configure(OLD, **on_cpu).text
    assert "which contradicts runtime.backend of config.yaml: torch" in configure(RECENT, backend="torch").text

    def request(events: list[Event]) -> None:
        event = next(event for event in events if event["kind"] == "resume")
        event["backend"] = {part: {"backend": "torch", "reason": "requested by name"} for part in event["backend"]}

    sections = records[OLD].config.to_dict()
    config = RunConfig.from_dict(sections | {"runtime": sections["runtime"] | {"backend": "torch"}})
    edited = replace(edit_history(records[OLD], request), config=config)
    assert find_contradiction(edited) is None
    assert find_contradiction(replace(edited, config=records[OLD].config)) is None  # auto


def test_sizes_of_the_optimizer(records: dict[str, History]) -> None:
    def edit(events: list[Event]) -> None:
        for event in (event for event in events if "optimizer_bytes" in event):
            event["optimizer_bytes"] = {"float32": event["optimizer_bytes"]["float32"] // 10}

    verdict = get_verdict(edit_history(records[RECENT], edit), "consistent numbers")
    assert verdict.ok is False and "0.18 moments per weight, expected 1 to 2 (muon)" in verdict.text

    def shard(events: list[Event]) -> None:
        """Pretend that eight ranks share the weights."""
        change_start(lambda e: {"ranks": 8})(events)
        for event in (event for event in events if "weight_bytes" in event):
            event["weight_bytes"] = {"float32": event["weight_bytes"]["float32"] // 8}

    sections = records[RECENT].config.to_dict()
    sharded = RunConfig.from_dict(sections | {"runtime": sections["runtime"] | {"parallel": "fsdp"}})
    assert get_verdict(replace(edit_history(records[RECENT], shard), config=sharded), "consistent numbers").ok


def test_resident_memory_of_a_page_is_impossible(records: dict[str, History]) -> None:
    def edit(events: list[Event]) -> None:
        for event in (event for event in events if "rss_bytes" in event):
            event["rss_bytes"] = 1000

    assert "rss_bytes is 1000" in get_verdict(edit_history(records[RECENT], edit), "finite numbers").text


def test_other_code_and_machine_than_those_of_the_creation_are_a_warning(records: dict[str, History]) -> None:
    """A run may be created with one code on one machine, and start with another code on another."""
    for get_values, text in (
        (lambda e: {"code": e["code"] | {"source": "f" * 16}}, "code.source of attempt 1 is ffffffffffffffff, which"),
        (lambda e: {"code": e["code"] | {"commit": "a" * 40}}, "code.commit of attempt 1"),
        (lambda e: {"versions": e["versions"] | {"torch": "2.9.1+cu130"}}, "versions of attempt 1"),
        (lambda e: json.loads(json.dumps(e).replace("H100 80GB", "A100 80GB")), "environment.json: ['NVIDIA H100"),
    ):
        verdict = get_verdict(edit_history(records[STAGED], change_start(get_values)), "one run")
        assert verdict.level == "warning" and text in verdict.text, verdict.text
    assert get_verdict(records[STAGED], "one run").level == "passed"


def test_damaged_environments(records: dict[str, History], tmp_path: Path) -> None:
    for record, environment, level, text in (
        (RECENT, "[1, 2]", "failed", "environment.json: expected a JSON object"),
        (RECENT, '"text"', "failed", "environment.json: expected a JSON object"),
        (RECENT, {"config_hash": None}, "failed", "environment.json has no config_hash"),
        (OLD, {"config_hash": None}, "unknown", "environment.json does not record its configuration"),
        (RECENT, {"gpus": []}, "unknown", "environment.json lists no GPU"),
        (RECENT, {"gpus": [3], "code": 4, "versions": "none"}, "warning", "device of attempt 1"),
        (RECENT, None, "unknown", "environment.json is missing"),
    ):
        copied = tmp_path / record
        shutil.copytree(OUTPUTS / record, copied)
        file = copied / directory.ENVIRONMENT
        if isinstance(environment, str):
            file.write_text(environment)
        elif environment is None:
            file.unlink()
        else:
            edited = copy.deepcopy(records[record].environment) | environment
            file.write_text(json.dumps({name: value for name, value in edited.items() if value is not None}))
        verdict = get_verdict(History.read(copied), "one run")
        assert (verdict.level, text in verdict.text) == (level, True), verdict.text
        shutil.rmtree(copied)
