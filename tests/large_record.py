"""Write the record of a long run, for measurements of time and memory."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import fake_run

from nsa_lab.runs import directory
from nsa_lab.runs.history import get_monitor_settings


def write_long_run(folder: Path, n_bytes: int, log_every: int = 1, stats_every: int = 20, n_attempts: int = 1) -> Path:
    """Write a healthy run whose events.jsonl has about `n_bytes` bytes, in `n_attempts` attempts. Return its directory."""
    steps = _count_steps(n_bytes, log_every, stats_every)
    config = fake_run.make_config(
        train__steps=steps,
        train__log_every=log_every,
        train__stats_every=stats_every,
        train__eval_every=steps // 20,
        train__save_every=steps // 4,
    )
    run_dir = fake_run.write_run(folder, config, spoil=lambda events: [event for event in events if event["step"] == 0])
    rng, attempt = random.Random(0), 1
    with open(run_dir / directory.EVENTS, "a", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            own = [{**event, "attempt": attempt} for event in _make_events(step, config, rng)]
            if step < steps and step * n_attempts // steps >= attempt:
                own += _make_resume_events(step, attempt, config)
                attempt += 1
            for event in own:
                envelope = {"v": 1, "t": 2000.0 + step / 2, "run": run_dir.name, "tokens": config.train.tokens_until(step)}
                file.write(json.dumps({**envelope, **event}, separators=(",", ":")) + "\n")
    status = {"status": directory.DONE, "attempt": attempt, "step": steps, "exit_code": 0, "updated": 2000.0 + steps / 2}
    directory.write_status(run_dir, run=run_dir.name, **status)
    return run_dir


def _make_resume_events(step: int, attempt: int, config: fake_run.RunConfig) -> list[fake_run.Event]:
    """Return the events of an attempt that stops on request after a step, and of the next one that continues."""
    end = {"kind": "end", "status": directory.PREEMPTED, "exit_code": directory.EXIT_STOPPED, "reason": "SIGTERM"}
    settings = {"config_hash": config.hash(), "steps": config.train.steps, "settings": get_monitor_settings(config)}
    resume = {"kind": "resume", "from_step": step, **settings, **fake_run.make_attempt_facts()}
    return [{**end, "attempt": attempt, "step": step}, {**resume, "attempt": attempt + 1, "step": step}]


def _make_events(step: int, config: fake_run.RunConfig, rng: random.Random) -> list[fake_run.Event]:
    train, events = config.train, []
    if step % train.log_every == 0 or step in (1, train.steps):
        event = fake_run.make_step_event(step, config)
        event["sel_reuse"] = fake_run.make_layers(0.93) if "sel_reuse" in event else []
        event = {name: value for name, value in event.items() if value != []}
        event["bpb"] += rng.gauss(0, 0.01)
        dt_s = 0.5 + rng.gauss(0, 1e-3)
        event |= {"dt_s": dt_s, "tokens_per_s": train.stage_at(step).tokens_per_step / dt_s}
        event |= {"loss": event["bpb"] * math.log(2), "grad_norm": 0.8 + rng.random() / 10}
        if "grad_norm_layers" in event:
            event["grad_norm_layers"] = fake_run.make_layers(0.2, 0.01)
        if "gate_update" in event:  # an optimizer moves weights by about the learning rate
            event["gate_update"] = fake_run.make_layers(0.02 * (event["lr"] / train.lr + 0.02))
        for name in [name for name, value in event.items() if isinstance(value, list) and name != "gate_update"]:
            # The same for all layers, so their order stays. Gate shares add up to 1.
            noise = rng.gauss(0, 1e-4 if name.startswith("gate_") else 1e-3 * event[name][0])
            event[name] = [value + noise for value in event[name]]
        events.append(event)
    if step % 20 == 0:
        beat = {"phase": "step", "phase_age_s": 0.1, "rss_bytes": 10**9 + step % 1000, "gpu_util": None}
        events.append({"kind": "heartbeat", "attempt": 1, "step": step, **beat})
    if step % train.eval_every == 0 or step == train.steps:
        events += [fake_run.make_eval_event(step, 2.1 + 5.9 * math.exp(-step / 40) + rng.gauss(0, 0.001))]
        events += [fake_run.make_reach_event(step)]
    if step % train.save_every == 0:
        events.append(fake_run.make_checkpoint_event(step))
    if step == train.steps:
        end = {"status": directory.DONE, "exit_code": 0, "reason": directory.format_done_reason(step)}
        events.append({"kind": "end", "attempt": 1, "step": step, **end})
    return events


def _count_steps(n_bytes: int, log_every: int, stats_every: int) -> int:
    """Return the number of steps whose events take about `n_bytes`."""
    bytes_per_step = 300 / log_every + 1100 / stats_every + 9
    return int(n_bytes / bytes_per_step) // 100 * 100
