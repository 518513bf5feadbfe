"""Verdicts on the run as a whole: its end, its losses, its steps, its checkpoints, its pace.

What is judged here is written down independently of the trainer: the learning rate, the steps that must have been
logged, the checkpoints that must exist.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from nsa_lab.config import StageConfig, TrainConfig
from nsa_lab.health.verdict import Limits, Verdict, one_line
from nsa_lab.runs import directory
from nsa_lab.runs.checkpoints import verify
from nsa_lab.runs.history import Attempt, History

UNIFORM_NOISE_BITS = math.log2(255)  # of the synthetic source: 255 equal bytes


def expected_learning_rate(step: int, train: TrainConfig) -> float:
    """What the configuration promises for optimiser step `step`, counted from 1.

    In every stage anew: linear to `lr` at step `warmup_steps` (step 1 without warm-up), then half a cosine down to `min_lr`
    at the last step.
    """
    for stage in train.stages[:-1]:
        if step <= stage.steps:
            return _rate_within(step, stage)
        step -= stage.steps
    return _rate_within(step, train.plan[-1])


def _rate_within(step: int, train: StageConfig) -> float:
    peak = max(train.warmup_steps, 1)
    if step <= peak:
        return train.lr * step / peak
    if train.lr_schedule == "constant":
        return train.lr
    turn = math.pi * (step - peak) / (train.steps - peak)
    return train.min_lr + (train.lr - train.min_lr) * (1 + math.cos(turn)) / 2


def expected_log_steps(train: TrainConfig, reached: int) -> set[int]:
    """The steps that a run which did `reached` steps must have written a `step` event for."""
    regular = {step for every in (train.log_every, train.stats_every) for step in range(every, reached + 1, every)}
    return regular | {step for step in (*train.first_steps, train.steps) if step <= reached}


def finished(history: History, limits: Limits) -> Verdict:
    status, steps = history.status, history.config.train.steps
    state, at = status.get("status", "unknown"), f"step {history.reached:,} of {steps:,}"
    reason = one_line(status.get("reason"))
    if state == directory.DONE:
        ok = history.reached == steps
        return Verdict("finished", ok, history.reached, steps, at if ok else f"called DONE at {at}")
    if state == directory.PREEMPTED:
        text = f"{at}: {reason or 'stopped on request'}; resume it to finish"
        return Verdict("finished", None, history.reached, steps, text)
    if state == directory.RUNNING and history.alive:
        return Verdict("finished", None, history.reached, steps, f"running, {at}")
    if state == directory.RUNNING:
        return Verdict("finished", False, history.reached, steps, f"the trainer is gone without a word at {at}; resume it")
    return Verdict("finished", False, history.reached, steps, f"{state} at {at}: {reason or 'no reason given'}")


def guards(history: History, limits: Limits) -> Verdict:
    fired = [event for event in history.current("guard") if event.get("action") != "quarantined"]
    # A halt explains itself better than the warnings that came before it.
    fired.sort(key=lambda event: event.get("action") != "halt")
    if not fired:
        return Verdict("guards", True, 0, 0, "no guard fired")
    first = fired[0]
    text = first.get("text") or f"step {first['step']}: value {first.get('value')}, limit {first.get('limit')}"
    more = f" (and {len(fired) - 1} more)" if len(fired) > 1 else ""
    return Verdict("guards", False, len(fired), 0, f"{first['rule']} ({first.get('action')}): {one_line(text)}{more}")


def finite(history: History, limits: Limits) -> Verdict:
    bad = [(event["step"], name) for event in history.current("step", "eval") for name in event.get("nonfinite", ())]
    if not bad:
        return Verdict("finite numbers", True, 0, 0, "every recorded number is finite")
    step, name = bad[0]
    return Verdict("finite numbers", False, len(bad), 0, f"{name} is not finite at step {step:,} ({len(bad)} such numbers)")


def errors(history: History, limits: Limits) -> Verdict:
    """Errors of the last attempt; those that a later attempt got over are part of the attempts' story."""
    last = max((event["attempt"] for event in history.events), default=0)
    found = [event for event in history.of_kind("error") if event["attempt"] == last and event.get("where") != "save"]
    if not found:
        return Verdict("errors", True, 0, 0, "none")
    first = found[0]
    text = f"{first.get('type', 'error')} at step {first['step']:,}: {one_line(first.get('message'))}"
    return Verdict("errors", False, len(found), 0, text)


def stalls(history: History, limits: Limits) -> Verdict:
    found = history.of_kind("stall")
    if not found:
        return Verdict("stalls", True, 0, 0, "none")
    worst = max(found, key=lambda event: event.get("phase_age_s") or 0)
    text = (
        f"{len(found)}; the longest in phase {worst.get('phase')} at step {worst['step']:,}, "
        f"noticed after {worst.get('phase_age_s', 0):.0f} s"
    )
    return Verdict("stalls", False, len(found), 0, text)


def preflight(history: History, limits: Limits) -> Verdict:
    found = history.of_kind("preflight")
    bad = [event for event in found if event.get("ok") is False]
    if not found:
        return Verdict("preflight", None, None, None, "no check was recorded")
    if not bad:
        return Verdict("preflight", True, len(found), len(found), f"{len(found)} checks passed")
    text = f"{bad[0]['name']}: {bad[0].get('value')}, limit {bad[0].get('limit')} ({len(bad)} of {len(found)} failed)"
    return Verdict("preflight", False, len(found) - len(bad), len(found), one_line(text))


def loss_fell(history: History, limits: Limits) -> Verdict | None:
    if history.config.data.source == "synthetic":
        return None
    steps, bpb = history.validation()
    if len(bpb) < 2 or steps[-1] == 0:
        return Verdict("loss fell", None, None, None, "validation was not evaluated after training")
    # What can be asked of a short run is less: the limit grows to its full height over the first hundred steps.
    limit = limits.validation_fall * min(1.0, history.reached / 100)
    fall = 1 - bpb[-1] / bpb[0]
    change = f"{abs(fall):.1%} {'below' if fall >= 0 else 'above'} the start"
    text = f"validation from {bpb[0]:.3f} to {bpb[-1]:.3f} bits per byte, {change} (at least {limit:.1%} below asked)"
    return Verdict("loss fell", bool(fall >= limit), float(fall), limit, text)


def loss_kept(history: History, limits: Limits) -> Verdict:
    steps, bpb = _at_the_last_length(history, *history.validation())
    if len(bpb) < 3:
        return Verdict("loss kept", None, None, limits.best_kept, "fewer than three evaluations")
    best = int(np.nanargmin(bpb))
    ratio = bpb[-1] / bpb[best]
    text = f"last validation {bpb[-1]:.3f} bits per byte, best {bpb[best]:.3f} at step {steps[best]:,}"
    return Verdict("loss kept", bool(ratio <= limits.best_kept), ratio, limits.best_kept, text)


def _at_the_last_length(history: History, steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The readings of stages that are as long as the one the run is in: a longer past makes text easier to predict."""
    train = history.config.train
    length = train.stage_at(history.reached).seq_len
    same = np.array([train.stage_at(int(step)).seq_len == length for step in steps], dtype=bool)
    return steps[same], values[same]


def no_leak(history: History, limits: Limits) -> Verdict:
    """A loss below what the text can give means that the model sees what it is asked to predict."""
    noise = history.config.data.source == "synthetic"
    limit = UNIFORM_NOISE_BITS - limits.noise_slack_bits if noise else limits.floor_bpb
    steps, bpb = history.series("bpb")
    eval_steps, held_out = history.validation()
    steps, bpb = np.concatenate([steps, eval_steps]), np.concatenate([bpb, held_out])
    if not np.isfinite(bpb).any():
        return Verdict("no leak", None, None, limit, "no loss was recorded")
    lowest = int(np.nanargmin(bpb))
    where = "noise cannot be predicted" if noise else "text is not that predictable"
    text = (
        f"lowest {bpb[lowest]:.3f} bits per byte, at step {steps[lowest]:,}; below {limit:.2f} it would be a leak: {where}"
    )
    return Verdict("no leak", bool(bpb[lowest] >= limit), float(bpb[lowest]), limit, text)


def generalises(history: History, limits: Limits) -> Verdict:
    _, train = _at_the_last_length(history, *history.series("bpb"))
    _, held_out = _at_the_last_length(history, *history.validation())
    if len(held_out) < 2 or len(train) < 5:
        return Verdict("generalises", None, None, limits.validation_gap, "too few losses to compare")
    recent = float(np.nanmean(train[-max(5, len(train) // 10) :]))
    ratio = held_out[-1] / recent
    text = f"validation {held_out[-1]:.3f} against training {recent:.3f} bits per byte, ratio {ratio:.3f}"
    return Verdict("generalises", bool(ratio <= limits.validation_gap), ratio, limits.validation_gap, text)


def learning_rate(history: History, limits: Limits) -> Verdict:
    steps, rates = history.series("lr")
    if not len(steps):
        return Verdict("learning rate", None, None, None, "none was recorded")
    wanted = np.array([expected_learning_rate(int(step), history.config.train) for step in steps])
    off = np.abs(rates - wanted) / max(stage.lr for stage in history.config.train.plan)
    worst = int(np.argmax(off))
    schedule = " and ".join(dict.fromkeys(stage.lr_schedule for stage in history.config.train.plan))
    text = f"follows the configured {schedule} schedule at {len(steps)} logged steps"
    if off[worst] > limits.lr_error:
        text = f"{rates[worst]:.4g} at step {steps[worst]:,}, where the configuration says {wanted[worst]:.4g}"
    return Verdict("learning rate", bool(off[worst] <= limits.lr_error), float(off[worst]), limits.lr_error, text)


def steps_counted_once(history: History, limits: Limits) -> Verdict:
    """No step lost, none doubled, and tokens that fit the steps, over all attempts."""
    logged = history.current("step")
    seen = [event["step"] for event in logged]
    lost = sorted(expected_log_steps(history.config.train, history.reached) - set(seen))
    doubled = sorted({step for step in seen if seen.count(step) > 1}) if len(set(seen)) < len(seen) else []
    tokens_by = history.config.train.tokens_by
    miscounted = [event["step"] for event in logged if event["tokens"] != tokens_by(event["step"])]
    story = _story(history.attempts())
    for what, which in (("lost", lost), ("doubled", doubled), ("counted with wrong tokens", miscounted)):
        if which:
            shown = ", ".join(str(step) for step in which[:5]) + (" …" if len(which) > 5 else "")
            return Verdict("every step once", False, len(which), 0, f"steps {what}: {shown}; {story}")
    return Verdict("every step once", True, 0, 0, f"none lost, none doubled; {story}")


def _story(attempts: list[Attempt]) -> str:
    if len(attempts) <= 1:
        return "one attempt"
    parts = [f"attempt {a.number} {a.ending} at step {a.last_step:,}" for a in attempts[:-1]]
    last = attempts[-1]
    return f"{len(attempts)} attempts: {', '.join(parts)}, attempt {last.number} went on from step {last.from_step:,}"


def checkpoints(history: History, limits: Limits) -> Verdict:
    train = history.config.train
    saved = {event["step"]: event for event in history.current("checkpoint")}
    failed = [event for event in history.of_kind("error") if event.get("where") == "save"]
    quarantined = [event for event in history.of_kind("guard") if event.get("action") == "quarantined"]
    wanted = set(range(train.save_every, history.reached + 1, train.save_every)) if train.save_every else set()
    missing = sorted(step for step in wanted - set(saved) if step < history.reached or history.done)
    for problem in (*failed, *quarantined):
        text = problem.get("text") or f"a save failed at step {problem['step']:,}: {problem.get('message')}"
        return Verdict("checkpoints", False, len(saved), len(wanted), one_line(text))
    if missing:
        text = f"none was saved at step {missing[0]:,} ({len(missing)} missing)"
        return Verdict("checkpoints", False, len(saved), len(wanted), text)
    if not saved:
        return Verdict("checkpoints", None, 0, len(wanted), "none was due yet")
    return _on_disk(history, saved, len(wanted))


def _on_disk(history: History, saved: dict[int, dict], wanted: int) -> Verdict:
    """The record decides; files that are there must be whole. A copy without them is judged as the run itself was."""
    folder = history.run_dir / directory.CHECKPOINTS
    if not folder.is_dir():
        text = f"{len(saved)} saved, each when it was due; their files are not kept with this copy"
        return Verdict("checkpoints", True, len(saved), wanted, text)
    pruned = {name for event in history.of_kind("checkpoint") for name in event.get("pruned") or ()}
    kept = sorted(step for step, event in saved.items() if Path(event["path"]).name not in pruned)
    newest = kept[-1] if kept else None
    for step in kept:
        problems = verify(history.run_dir / saved[step]["path"], hashes=step == newest)
        if problems:
            return Verdict("checkpoints", False, len(saved), wanted, f"step {step:,}: {', '.join(problems)}")
    text = f"{len(saved)} saved, each when it was due; {len(kept)} kept, all whole"
    return Verdict("checkpoints", True, len(saved), wanted, text)


def throughput(history: History, limits: Limits) -> Verdict:
    """Against the run's own median, stage by stage, without the first interval of each attempt, which holds compilation."""
    paces = _paces(history, limits.pace_window_s)
    if len(paces) < 5:
        return Verdict("throughput", None, None, limits.slow_share, "too short to judge how steady it was")
    stages, speed = np.array([stage for stage, _ in paces]), np.array([pace for _, pace in paces])
    # A stage of longer texts is slower by its nature.
    medians = {int(stage): float(np.median(speed[stages == stage])) for stage in np.unique(stages)}
    slow = speed < limits.slow_factor * np.array([medians[stage] for stage, _ in paces])
    share = float(slow.mean())
    text = (
        f"median {', then '.join(f'{median:,.0f}' for median in medians.values())} tokens/s; "
        f"{share:.1%} of the time windows below {limits.slow_factor:.0%} of it "
        f"(slowest {speed.min():,.0f})"
    )
    return Verdict("throughput", bool(slow.sum() <= 1 or share <= limits.slow_share), share, limits.slow_share, text)


def _paces(history: History, window_s: float) -> list[tuple[int, float]]:
    """Stage, and tokens per second over windows of at least `window_s` of training time within it."""
    paces: list[tuple[int, float]] = []
    train = history.config.train
    stretch, before, steps, took_s = (0, 0), 0, 0, 0.0
    for event in history.steps:
        stage = train.at(event["step"])[0]
        if (event["attempt"], stage) != stretch:
            stretch, steps, took_s = (event["attempt"], stage), 0, 0.0
        else:
            steps, took_s = steps + event["step"] - before, took_s + (event["step"] - before) * event["dt_s"]
        before = event["step"]
        if took_s >= window_s:
            paces.append((stage, steps * train.plan[stage].tokens_per_step / took_s))
            steps, took_s = 0, 0.0
    return paces


def data_wait(history: History, limits: Limits) -> Verdict:
    steps, waited = history.series("data_s")
    _, took = history.series("dt_s")
    if not len(steps) or len(took) != len(waited):
        return Verdict("data wait", None, None, limits.data_wait, "not recorded")
    # Both are means over the steps since the reading before.
    weight = np.diff(steps, prepend=0)
    share = float((waited * weight).sum() / (took * weight).sum())
    return Verdict(
        "data wait",
        share <= limits.data_wait,
        share,
        limits.data_wait,
        f"{share:.1%} of the training time was spent waiting for data",
    )


def memory(history: History, limits: Limits) -> Verdict:
    resident = [event["rss_bytes"] for event in history.of_kind("heartbeat") if event.get("rss_bytes")]
    if len(resident) < 8:
        return Verdict("memory", None, None, limits.memory_growth, "too few heartbeats to see growth")
    early, late = max(resident[: len(resident) // 2]), max(resident[len(resident) // 2 :])
    return Verdict(
        "memory",
        late / early <= limits.memory_growth,
        late / early,
        limits.memory_growth,
        f"resident memory at most {early / 1e9:.2f} GB in the first half, {late / 1e9:.2f} GB in the second",
    )
