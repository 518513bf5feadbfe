"""Write the run directory of a healthy run, which a test then changes in one place."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nsa_lab.config import BRANCHES, RunConfig
from nsa_lab.health.digest_checks import check_unchanged
from nsa_lab.health.record_checks import check_record_format
from nsa_lab.health.verdict import LIMITS, PASSED
from nsa_lab.runs import checkpoint_files, directory
from nsa_lab.runs import events as event_log
from nsa_lab.runs.history import History

Event = dict[str, Any]
LAYERS = 3


def make_config(**overrides: Any) -> RunConfig:
    """Return a configuration with 200 steps of 2 x 2048 bytes, long enough that selection has candidates to select from."""
    sections: dict[str, Any] = {
        "name": "fake",
        "model": {"dim": 32, "n_layers": LAYERS, "n_heads": 2, "n_kv_groups": 1, "d_k": 16, "d_v": 16},
        "train": {
            "steps": 200,
            "seq_len": 2048,
            "batch_size": 2,
            "lr": 1e-3,
            "warmup_steps": 20,
            "log_every": 10,
            "stats_every": 20,
            "eval_every": 50,
            "save_every": 100,
        },
    }
    for key, value in overrides.items():
        section, _, name = key.partition("__")
        sections.setdefault(section, {})[name] = value
    return RunConfig.from_dict(sections)


def compute_lr(step: int, config: RunConfig) -> float:
    """Return the learning rate, implemented independently: linear warm-up, then half a cosine to zero."""
    t = config.train
    if step < t.warmup_steps:
        return t.lr * step / t.warmup_steps
    return 0.5 * t.lr * (1 + math.cos(math.pi * (step - t.warmup_steps) / (t.steps - t.warmup_steps)))


SPREAD = 2e-5  # between layers, which are never equal


def make_layers(value: float, spread: float = SPREAD) -> list[float]:
    """Return a value for each layer, almost equal."""
    return [value + layer * spread for layer in range(LAYERS)]


def set_constant_times(events: Iterable[Event]) -> None:
    """Set the times of steps and waits to 0.5 and 0.005 s, without noise, so that sums of them are exact."""
    for event in events:
        if event["kind"] == "step":
            event.update(dt_s=0.5, data_s=0.005)


def make_step_event(step: int, config: RunConfig, attempt: int = 1) -> Event:
    noise = 1e-3 * math.sin(step * step)  # as measured numbers have
    bpb = 2.0 + 6.0 * math.exp(-step / 40)
    train = config.train
    dt_s = 0.5 * (1 + 0.05 * noise)
    event = {
        "kind": "step",
        "attempt": attempt,
        "step": step,
        "loss": bpb * math.log(2),
        "bpb": bpb,
        "lr": compute_lr(step, config),
        "grad_norm": 0.8 + noise,
        "dt_s": dt_s,
        "data_s": 0.005 * (1 + noise),
        "tokens_per_s": train.stage_at(step).tokens_per_step / dt_s,
        "mem_peak_bytes": 2 * 10**9,
    }
    if step % train.stats_every == 0:
        event |= {"grad_norm_layers": make_layers(0.2 + noise, 0.01)}
    if step % train.stats_every == 0 and config.model.attention == "nsa":
        drift = step / train.steps / 10
        event |= {
            "gate_share_cmp": make_layers(0.30 + drift),
            "gate_share_sel": make_layers(0.35, 0.0),
            "gate_share_win": make_layers(0.35 - drift, -SPREAD),
            "gate_entropy": make_layers(1.0 - drift),
            "gate_saturation": make_layers(0.01),
            # About proportional to the learning rate, as of an optimizer.
            "gate_update": make_layers((0.002 + 0.02 * event["lr"] / train.lr) * (1 + noise)),
            "sel_reuse": make_layers(0.93 - noise),
            "sel_distance": make_layers(min(8.5, 0.5 * (train.longest_stage.seq_len // config.nsa.l_sel)) + noise),
            "sel_sink_share": make_layers(0.15 + noise),
            "sel_window_overlap": make_layers(0.45 + noise),
            "norm_cmp": make_layers(0.4 + noise),
            "norm_sel": make_layers(0.5 + noise),
            "norm_win": make_layers(0.6 + noise),
        }
        restrict_to_branches(event, config.model.branches)
    return event


def restrict_to_branches(event: Event, branches: Sequence[str]) -> None:
    """Remove the statistics of branches that a model does not have, and scale the shares of the others to a sum of 1."""
    absent = [name for name in BRANCHES if name not in branches]
    fields = [f"{field}_{name}" for name in absent for field in ("gate_share", "norm")]
    fields += [name for name in event if name.startswith("sel_") and "sel" in absent]
    fields += ["sel_window_overlap"] if "win" in absent else []
    fields += [name for name in event if name.startswith("gate_") and len(branches) == 1]
    for name in fields:
        event.pop(name, None)
    if absent and len(branches) > 1:
        shares = [f"gate_share_{name}" for name in branches]
        total = sum(event[name][0] for name in shares)
        event |= {name: [value / total for value in event[name]] for name in shares}
        event["gate_entropy"] = [value * 0.6 for value in event["gate_entropy"]]


def make_attempt_facts() -> Event:
    """Return the fields of the first event of an attempt, other than steps and configuration."""
    return {
        "tensorboard": "on",
        "gpu_util": "the device is a CPU",
        "data_identity": "d" * 64,
        "code": {"source": "0123456789abcdef", "commit": None, "dirty": None},
        "versions": {"python": "3.11.0", "torch": "2.11.0"},
        "device": "cpu",
        "ranks": 1,
        "threads": 2,
        "params": 123_456,
        "backend": {"window": {"backend": "torch", "reason": "the device is cpu, not cuda"}},
        "flops_per_token": {"nsa": 1e6, "dense": 9e5},
    }


def make_healthy_events(config: RunConfig) -> list[Event]:
    """Return the events of one attempt from the first step to the last, in the order in which a trainer writes them."""
    train = config.train
    events: list[Event] = [
        {
            "kind": "start",
            "attempt": 1,
            "step": 0,
            "from_step": 0,
            "steps": train.steps,
            "config_hash": config.hash(),
            **make_attempt_facts(),
        }
    ]
    events += [
        {"kind": "reference", "attempt": 1, "step": 0, "name": f"order-{order} entropy", "bytes": 1 << 20, "bpb": bpb}
        for order, bpb in ((0, 4.9), (1, 3.5))
    ]
    events += [
        {"kind": "preflight", "attempt": 1, "step": 0, "name": name, "ok": True, "value": "fine", "limit": "fine"}
        for name in ("data", "initial loss")
    ]
    events.append(make_eval_event(0, 8.0))
    for step in range(1, train.steps + 1):
        if step == 1 or step % train.log_every == 0:
            events.append(make_step_event(step, config))
            events.append(
                {
                    "kind": "heartbeat",
                    "attempt": 1,
                    "step": step,
                    "phase": "step",
                    "phase_age_s": 0.1,
                    "rss_bytes": 10**9 + step,
                    "gpu_util": None,
                }
            )
        if step % train.eval_every == 0:
            events.append(make_eval_event(step, 2.1 + 5.9 * math.exp(-step / 40)))
            if config.model.attention == "nsa" and "sel" in config.model.branches:
                events.append(make_reach_event(step))
        if train.save_every and step % train.save_every == 0:
            events.append(make_checkpoint_event(step))
    end = {"kind": "end", "attempt": 1, "step": train.steps, "status": directory.DONE, "exit_code": 0}
    return [*events, end | {"reason": directory.format_done_reason(train.steps)}]


def make_eval_event(step: int, bpb: float, attempt: int = 1) -> Event:
    text = {"windows": 8, "text": "0123456789abcdef"}
    losses = {"loss": bpb * math.log(2), "bpb": bpb}
    return {"kind": "eval", "attempt": attempt, "step": step, "split": "validation", **text, **losses}


def make_reach_event(step: int, attempt: int = 1, **losses: float | None) -> Event:
    """Return a `reach` event of a run whose selection finds the needles."""
    loss = {"chosen": 0.2 + step * 1e-9, "random": 3.1, "nearest": 3.5, "no_sel": 4.0, **losses}
    accuracy = {name: float(value is not None and value < 1.0) for name, value in loss.items()}
    fields = {"length": 2048, "sequences": 4, "answer_loss": loss, "accuracy": accuracy}
    return {"kind": "reach", "attempt": attempt, "step": step, **fields}


def make_checkpoint_event(step: int, attempt: int = 1) -> Event:
    return {
        "kind": "checkpoint",
        "attempt": attempt,
        "step": step,
        "path": f"checkpoints/step-{step:08d}",
        "bytes": 5 * 10**6,
        "seconds": 0.1,
        "pruned": [],
    }


def write_run(
    folder: Path,
    config: RunConfig | None = None,
    spoil: Callable[[list[Event]], list[Event] | None] | None = None,
    status: dict[str, Any] | None = None,
    name: str = "fake",
) -> Path:
    """Write a run directory in `folder`. `spoil` changes the events in place or returns other events."""
    config = config or make_config()
    run_dir = folder / f"{name}-20260101T000000Z-abcd"
    run_dir.mkdir(parents=True)
    (run_dir / directory.CONFIG).write_text(config.to_yaml(), encoding="utf-8")
    events = make_healthy_events(config)
    if spoil:
        events = spoil(events) or events
    first = next((event for event in events if isinstance(event, dict) and event.get("kind") in ("start", "resume")), {})
    environment = {"versions": {"python": "3.11.0"}, "config_hash": first.get("config_hash") or config.hash()}
    (run_dir / directory.ENVIRONMENT).write_text(json.dumps(environment), encoding="utf-8")
    last_time = 0.0
    with open(run_dir / directory.EVENTS, "w", encoding="utf-8") as file:
        for index, event in enumerate(events):
            tokens = config.train.tokens_until(event["step"])
            # About the time of the steps: two events every ten steps of 0.5 s.
            envelope = {"v": 1, "t": 1000.0 + 2 * index, "run": run_dir.name, "tokens": tokens}
            written = {**envelope, **event}
            last_time = max(last_time, written["t"]) if isinstance(written["t"], float) else last_time
            file.write(json.dumps(written) + "\n")
    done = {"status": directory.DONE, "reason": directory.format_done_reason(config.train.steps), "updated": last_time}
    directory.write_status(run_dir, run=run_dir.name, **{**done, **(status or {})})
    return run_dir


def sign_record(run_dir: Path, every: int = 1 << 30) -> None:
    """Replace the digest events of a record: one after `every` lines, and one at the end, which status.json names.

    An independent implementation of what a trainer does (`nsa_lab.runs.segment_digests`). For records that a test edits,
    so that the other checks judge the edit.
    """
    path = run_dir / directory.EVENTS
    lines = [line for line in path.read_bytes().splitlines(keepends=True) if b'"kind":"digest"' not in line]
    signed: list[bytes] = []
    start = 0
    for number, line in enumerate(lines, 1):
        signed.append(line)
        if number % every == 0 or number == len(lines):
            segment, event = b"".join(signed[start:]), json.loads(line)
            start = len(signed)
            envelope = {name: event[name] for name in ("v", "t", "run", "attempt", "step", "tokens")}
            values = {"kind": "digest", "bytes": len(segment), "sha256": hashlib.sha256(segment).hexdigest()}
            signed.append(json.dumps({**envelope, **values}, separators=(",", ":")).encode() + b"\n")
    path.write_bytes(b"".join(signed))
    status = directory.read_status(run_dir)
    digest = hashlib.sha256(signed[-1].rstrip(b"\n")).hexdigest()
    directory.write_status(run_dir, **{**status, "events_digest": digest})


def assert_unchanged(run_dir: Path) -> None:
    """Assert that no check takes the record of a trainer for one that was changed or damaged."""
    history = History.read(run_dir)
    for check in (check_unchanged, check_record_format):
        verdict = check(history, LIMITS)
        assert verdict is None or verdict.ok is None or (verdict.ok and verdict.level == PASSED), verdict


NO_WEIGHTS = (2).to_bytes(8, "little") + b"{}"  # .safetensors without a tensor


def write_checkpoint(run_dir: Path, step: int, content: bytes = NO_WEIGHTS) -> Path:
    """Write a checkpoint folder with a valid manifest."""
    folder = run_dir / directory.CHECKPOINTS / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)
    entry = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = {"v": 1, "step": step, "files": {"model.safetensors": entry}}
    (folder / "MANIFEST.json").write_text(json.dumps({**manifest, "digest": checkpoint_files.compute_digest(manifest)}))
    return folder


def edit_history(history: History, edit: Callable[[list[Event]], list[Event] | None]) -> History:
    """Return the record with edited events. `edit` changes the events in place or returns other events."""
    events = copy.deepcopy(history.events)
    events = edit(events) or events
    steps, evaluations = event_log.get_step_events(events), event_log.get_eval_events(events)
    return replace(history, events=events, steps=steps, evaluations=evaluations)
