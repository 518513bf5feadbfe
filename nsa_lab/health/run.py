"""Verdicts on the run as a whole: its end, its losses, its steps, its checkpoints, its pace.

The last attempt is judged, and the whole record of steps. Troubles of an attempt that a later one got over are told, and
no longer held against the run.

What is judged here is written down independently of the trainer: the learning rate, the steps that must have been
logged, the checkpoints that must exist.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import groupby
from typing import Any

import numpy as np

from nsa_lab.config import StageConfig, TrainConfig
from nsa_lab.health.record import if_told, owed
from nsa_lab.health.verdict import Limits, Verdict, one_line
from nsa_lab.runs import directory
from nsa_lab.runs.checkpoints import folder_of, path_of, verify
from nsa_lab.runs.checkpoints import steps as steps_on_disk
from nsa_lab.runs.events import Event
from nsa_lab.runs.history import Attempt, History
from nsa_lab.runs.summary import guards_of

# What every `step` event says, and every `eval` event.
TOLD = {"step": ("loss", "bpb", "lr", "grad_norm", "dt_s", "tokens_per_s"), "eval": ("loss", "bpb")}
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


def expected_log_steps(history: History) -> set[int]:
    """The steps that the run must have written a `step` event for."""
    regular = owed(history, lambda train: train.log_every) | owed(history, lambda train: train.stats_every)
    train = history.config.train
    return regular | {step for step in (*train.first_steps, train.steps) if step <= history.reached}


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
    fired, overcome = _by_attempt(history, [e for e in history.current("guard") if e.get("action") != "quarantined"])
    # A halt explains itself better than the warnings that came before it.
    fired.sort(key=lambda event: event.get("action") != "halt")

    def told(event: Event) -> str:
        text = event.get("text") or f"step {event['step']}: value {event.get('value')}, limit {event.get('limit')}"
        return f"{event.get('rule', 'a rule')} ({event.get('action')}): {one_line(text)}"

    if not fired:
        config = history.config_of(history.last_attempt)
        worth = guards_of(config.train) if config else "which of them were on is not known"
        return _silent("guards", history, f"no guard fired; {worth}" + _got_over(overcome, told))
    return Verdict("guards", False, len(fired), 0, told(fired[0]) + _more(fired))


def finite(history: History, limits: Limits) -> Verdict:
    """Of what was written, and of what every event must say: null without a word about it is no number either."""
    bad = [(event["step"], name) for event in history.current("step", "eval") for name in _not_numbers(event)]
    if not bad and not history.current("step", "eval"):
        return Verdict("finite numbers", None, 0, 0, "no number was recorded")
    if not bad:
        return Verdict("finite numbers", True, 0, 0, "every recorded number is finite")
    step, name = bad[0]
    return Verdict("finite numbers", False, len(bad), 0, f"{name} is not finite at step {step:,} ({len(bad)} such numbers)")


def _not_numbers(event: Event) -> list[str]:
    named = _names(event.get("nonfinite"))
    said = {name: value for name, value in event.items() if name != "nonfinite"}
    said = dict.fromkeys(TOLD[event["kind"]]) | said
    for name, value in said.items():
        entries = enumerate(value) if isinstance(value, list) else [(None, value)]
        for index, entry in entries:
            if entry is None or (isinstance(entry, float) and not math.isfinite(entry)):
                named.append(name if index is None else f"{name}[{index}]")
    return list(dict.fromkeys(named))


# Of errors that ended nothing: what failed beside training, and left the record whole.
BESIDE = frozenset({"status", "tensorboard", "diagnosis"})


def errors(history: History, limits: Limits) -> Verdict:
    """An error that ended the run, or left a hole in its record, fails; what failed beside training is told.

    Where several processes died of one cause, that one speaks; a failed save is a matter of `checkpoints`.
    """
    found, overcome = _by_attempt(history, [e for e in history.of_kind("error") if _fatal(e) or e.get("where") != "save"])
    found.sort(key=lambda event: (event.get("cause") is not True, not _fatal(event)))

    def told(event: Event) -> str:
        kind = event.get("type", "error")
        kind = kind if _fatal(event) else f"{kind} ({event.get('where', 'unknown')})"
        return f"{kind} at step {event['step']:,}: {one_line(event.get('message'))}"

    bad = [event for event in found if _fatal(event) or event.get("where") not in BESIDE]
    if bad:
        return Verdict("errors", False, len(bad), 0, told(bad[0]) + _more(bad))
    if found:
        text = f"none that ended the run; {told(found[0])}{_more(found)}"
        return Verdict("errors", True, 0, 0, text + _got_over(overcome, told))
    return _silent("errors", history, "none" + _got_over(overcome, told))


def _fatal(event: Event) -> bool:
    return event.get("fatal") is not False


def _more(found: list[Event]) -> str:
    return f" (and {len(found) - 1} more)" if len(found) > 1 else ""


def _silent(name: str, history: History, text: str) -> Verdict:
    """Nothing was recorded against the run: good, unless nothing was recorded at all."""
    return Verdict(name, True, 0, 0, text) if history.events else Verdict(name, None, 0, 0, "no event was written yet")


def stalls(history: History, limits: Limits) -> Verdict:
    found, overcome = _by_attempt(history, history.of_kind("stall"))

    def told(event: Event) -> str:
        age_s = event.get("phase_age_s")
        noticed = "noticed" if age_s is None else f"noticed after {age_s:.0f} s"
        return f"in phase {event.get('phase')} at step {event['step']:,}, {noticed}"

    if not found:
        return _silent("stalls", history, "none" + _got_over(overcome, told))
    worst = max(found, key=lambda event: event.get("phase_age_s") or 0)
    return Verdict("stalls", False, len(found), 0, f"{len(found)}; the longest {told(worst)}")


def preflight(history: History, limits: Limits) -> Verdict:
    """Of the last attempt that began at step 0: the others go on from what that one checked."""
    every = history.of_kind("preflight")
    last = max((event["attempt"] for event in every), default=0)
    found = [event for event in every if event["attempt"] == last]
    bad = [event for event in found if event.get("ok") is False]
    unclear = [event for event in found if event.get("ok") not in (True, False)]

    def told(event: Event) -> str:
        return one_line(f"{event.get('name', 'a check')}: {event.get('value')}, limit {event.get('limit')}")

    if not found:
        trained = history.reached > 0
        text = "no check was recorded before the first step" if trained else "no check was recorded"
        return Verdict("preflight", False if trained else None, 0, None, text)
    if bad:
        text = f"{told(bad[0])} ({len(bad)} of {len(found)} failed)"
        return Verdict("preflight", False, len(found) - len(bad), len(found), text)
    if unclear:
        return Verdict("preflight", None, None, len(found), f"{told(unclear[0])}: it says neither passed nor failed")
    overcome = [event for event in every if event["attempt"] != last and event.get("ok") is False]
    return Verdict("preflight", True, len(found), len(found), f"{len(found)} checks passed" + _got_over(overcome, told))


def _by_attempt(history: History, found: list[Event]) -> tuple[list[Event], list[Event]]:
    """Those of the last attempt, and those that a later attempt got over."""
    last = history.last_attempt
    return [event for event in found if event["attempt"] == last], [event for event in found if event["attempt"] != last]


def _got_over(found: list[Event], told: Callable[[Event], str]) -> str:
    """Earlier troubles, for the end of a sentence; empty if there were none."""
    if not found:
        return ""
    shown = "; ".join(f"attempt {event['attempt']}: {told(event)}" for event in found[:3])
    return f" (got over: {shown}{' …' if len(found) > 3 else ''})"


def loss_fell(history: History, limits: Limits) -> Verdict | None:
    if history.config.data.source == "synthetic":
        return None
    steps, bpb = _numbers_of(*history.validation())
    if len(bpb) < 2 or steps[-1] == 0:
        return Verdict("loss fell", None, None, None, "validation was not evaluated after training")
    limit = _asked_of(history, limits.validation_fall)
    fall = 1 - bpb[-1] / bpb[0]
    change = f"{abs(fall):.1%} {'below' if fall >= 0 else 'above'} the start"
    text = f"validation from {bpb[0]:.3f} to {bpb[-1]:.3f} bits per byte, {change} (at least {limit:.1%} below asked)"
    return Verdict("loss fell", bool(fall >= limit), float(fall), limit, text)


def _asked_of(history: History, fall: float) -> float:
    """What can be asked of a short run is less: the limit grows to its full height over the first hundred steps."""
    return fall * min(1.0, history.reached / 100)


def training_loss(history: History, limits: Limits) -> Verdict | None:
    """The loss that is trained on moves, and falls."""
    if history.config.data.source == "synthetic":
        return None
    limit = _asked_of(history, limits.training_fall)
    falls: list[tuple[float, str]] = []
    for name, unit in (("loss", "nats per token"), ("bpb", "bits per byte")):
        steps, values = _numbers_of(*history.series(name))
        if len(values) < 5:
            return Verdict("training loss", None, None, limit, "too few readings to see it fall")
        still, where = _longest_still(steps, values[:, None])
        if still >= limits.equal_losses:
            text = f"{name} is the same to the last bit in {still} readings in a row, up to step {where:,}"
            return Verdict("training loss", False, still, limits.equal_losses, text)
        last = float(np.mean(values[-max(1, min(50, len(values) // 10)) :]))
        falls.append((1 - last / values[0], f"from {values[0]:.3f} to {last:.3f} {unit}"))
    fall, text = min(falls)
    return Verdict("training loss", bool(fall >= limit), fall, limit, f"{text} (at least {limit:.1%} below asked)")


def _longest_still(steps: np.ndarray, values: np.ndarray) -> tuple[int, int]:
    """The most readings `[n, ...]` in a row that are equal to the last bit, and the step of the last of them."""
    longest, where, row = min(len(values), 1), int(steps[-1]) if len(steps) else 0, 1
    for index in range(1, len(values)):
        row = row + 1 if np.array_equal(values[index], values[index - 1]) else 1
        if row > longest:
            longest, where = row, int(steps[index])
    return longest, where


def _numbers_of(steps: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Without the readings that are no numbers; `finite` speaks of those."""
    known = np.isfinite(values)
    return steps[known], values[known]


def gradients(history: History, limits: Limits) -> Verdict:
    """Every step has a gradient, in every layer, and none that clipping had to make a thousand times smaller."""
    steps, norms = _numbers_of(*history.series("grad_norm"))
    limit = limits.gradient_norm * max(1.0, history.config.train.grad_clip)
    if not len(norms):
        return Verdict("gradients", None, None, limit, "none was recorded")
    if (none := norms == 0).any():
        text = f"the gradient is 0 at {none.sum()} logged steps, the first {steps[none.argmax()]:,}"
        return Verdict("gradients", False, 0.0, 0.0, text)
    at, layers = history.layers("grad_norm_layers")
    if len(layers) and (none := layers == 0).any():
        reading, layer = np.argwhere(none)[0]
        text = f"no gradient reaches layer {layer} at step {at[reading]:,} ({none.sum()} such readings)"
        return Verdict("gradients", False, 0.0, 0.0, text)
    largest = int(norms.argmax())
    text = f"norm {norms.min():.3g} to {norms[largest]:.3g}, the largest at step {steps[largest]:,}"
    return Verdict("gradients", bool(norms[largest] <= limit), float(norms[largest]), limit, text)


def loss_kept(history: History, limits: Limits) -> Verdict:
    steps, bpb = _at_the_last_length(history, *_numbers_of(*history.validation()))
    if len(bpb) < 3:
        return Verdict("loss kept", None, None, limits.best_kept, "fewer than three evaluations")
    best = int(bpb.argmin())
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
    _, train = _at_the_last_length(history, *_numbers_of(*history.series("bpb")))
    _, held_out = _at_the_last_length(history, *_numbers_of(*history.validation()))
    if len(held_out) < 2 or len(train) < 5:
        return Verdict("generalises", None, None, limits.validation_gap, "too few losses to compare")
    recent = float(np.mean(train[-max(5, len(train) // 10) :]))
    ratio = held_out[-1] / recent
    text = f"validation {held_out[-1]:.3f} against training {recent:.3f} bits per byte, ratio {ratio:.3f}"
    return Verdict("generalises", bool(ratio <= limits.validation_gap), ratio, limits.validation_gap, text)


def learning_rate(history: History, limits: Limits) -> Verdict:
    steps, rates = history.series("lr")
    if not len(steps):
        return Verdict("learning rate", None, None, None, "none was recorded")
    wanted = np.array([expected_learning_rate(int(step), history.config.train) for step in steps])
    off = np.abs(rates - wanted) / max(stage.lr for stage in history.config.train.plan)
    # A rate that is no number is as far off as any can be.
    off[~np.isfinite(off)] = np.inf
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
    lost = sorted(expected_log_steps(history) - set(seen))
    doubled = sorted({step for step in seen if seen.count(step) > 1}) if len(set(seen)) < len(seen) else []
    tokens_by = history.config.train.tokens_by
    miscounted = [event["step"] for event in logged if event.get("tokens") != tokens_by(event["step"])]
    story = _story(history.attempts())
    if not logged and not lost:
        return Verdict("every step once", None, 0, 0, "no step was logged yet")
    for what, which in (("lost", lost), ("doubled", doubled), ("counted with wrong tokens", miscounted)):
        if which:
            shown = ", ".join(str(step) for step in which[:5]) + (" …" if len(which) > 5 else "")
            return Verdict("every step once", False, len(which), 0, f"steps {what}: {shown}; {story}")
    return if_told(history, Verdict("every step once", True, 0, 0, f"none lost, none doubled; {story}"))


def _story(attempts: list[Attempt]) -> str:
    if len(attempts) <= 1:
        return "one attempt"
    parts = [f"attempt {a.number} {a.ending} at step {a.last_step:,}" for a in attempts[:-1]]
    last = attempts[-1]
    return f"{len(attempts)} attempts: {', '.join(parts)}, attempt {last.number} went on from step {last.from_step:,}"


def checkpoints(history: History, limits: Limits) -> Verdict:
    """Each that was due is there. One that an attempt went on from, or that lies there whole, was saved, also if the
    trainer was killed before it could say so."""
    recorded = {event["step"] for event in history.current("checkpoint")}
    failed, overcome = _by_attempt(history, [e for e in history.of_kind("error") if e.get("where") == "save"])
    damaged, quarantined = _by_attempt(history, [e for e in history.of_kind("guard") if e.get("action") == "quarantined"])
    resumed = {event["from_step"] for event in history.of_kind("resume") if event.get("from_step")}
    saved = resumed | _whole_on_disk(history) | recorded
    wanted = owed(history, lambda train: train.save_every)
    excused = {event["step"] for event in overcome}
    missing = sorted(step for step in wanted - saved - excused if step < history.reached or history.done)
    for problem in (*failed, *damaged):
        return Verdict("checkpoints", False, len(saved), len(wanted), _failed_save(problem))
    if missing:
        text = f"none was saved at step {missing[0]:,} ({len(missing)} missing)"
        return Verdict("checkpoints", False, len(saved), len(wanted), text)
    if not saved:
        return if_told(history, Verdict("checkpoints", None, 0, len(wanted), "none was due yet"))
    told = _got_over([*overcome, *quarantined], _failed_save)
    return _on_disk(history, saved, recorded, len(wanted), told)


def _failed_save(problem: Event) -> str:
    said = problem.get("text") or f"a save failed at step {problem['step']:,}: {problem.get('message')}"
    return one_line(said)


def _whole_on_disk(history: History) -> set[int]:
    """Steps of the run, up to the one it is at, whose checkpoint lies there whole; contents are not read."""
    folder = folder_of(history.run_dir)
    there = [step for step in steps_on_disk(folder) if step <= history.reached] if folder.is_dir() else []
    return {step for step in there if not verify(path_of(folder, step), hashes=False)}


def _on_disk(history: History, saved: set[int], recorded: set[int], wanted: int, told: str) -> Verdict:
    """The record decides; files that are there must be whole. A copy without them is judged as the run itself was."""
    folder = folder_of(history.run_dir)
    if not folder.is_dir():
        text = f"{len(saved)} saved, each when it was due; their files are not kept with this copy"
        return if_told(history, Verdict("checkpoints", True, len(saved), wanted, text + told))
    pruned = {name for event in history.of_kind("checkpoint") for name in _names(event.get("pruned"))}
    kept = sorted(step for step in recorded if path_of(folder, step).name not in pruned)
    newest = kept[-1] if kept else None
    for step in kept:
        problems = verify(path_of(folder, step), hashes=step == newest)
        if problems:
            return Verdict("checkpoints", False, len(saved), wanted, f"step {step:,}: {', '.join(problems)}")
    text = f"{len(saved)} saved, each when it was due; {len(kept)} kept, all whole"
    return if_told(history, Verdict("checkpoints", True, len(saved), wanted, text + told))


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def throughput(history: History, limits: Limits) -> Verdict:
    """Against the run's own best tenth, stage by stage. The first interval of each attempt, which holds compilation, is
    left out.

    The windows that are compared are equal in work: a half of the run that is ten times slower is half of them.
    """
    windows = _windows(history, limits.pace_window_s)
    if len(windows) < 5:
        return Verdict("throughput", None, None, limits.slow_share, "too short to judge how steady it was")
    stages, speed, took_s = (np.array(column) for column in zip(*windows, strict=True))
    # A stage of longer texts is slower by its nature.
    medians, best = ({int(n): of(speed[stages == n]) for n in np.unique(stages)} for of in (np.median, _best_tenth))
    slow = speed < limits.slow_factor * np.array([best[stage] for stage in stages])
    share, slow_s = float(slow.mean()), float(took_s[slow].sum())
    text = (
        f"median {', then '.join(f'{median:,.0f}' for median in medians.values())} tokens/s; "
        f"{share:.1%} of the work below {limits.slow_factor:.0%} of the best tenth's pace, "
        f"{', then '.join(f'{pace:,.0f}' for pace in best.values())} (slowest {speed.min():,.0f})"
    )
    ok = share <= limits.slow_share or slow_s < limits.slow_for_s
    return Verdict("throughput", ok, share, limits.slow_share, text)


def _best_tenth(speed: np.ndarray) -> float:
    """The highest median among ten parts of the run, fewer where a part would have less than three windows."""
    return max(float(np.median(part)) for part in np.array_split(speed, min(10, max(1, len(speed) // 3))))


def _windows(history: History, window_s: float) -> list[tuple[int, float, float]]:
    """Stage, tokens per second and seconds of stretches of training equal in work, within a stage and an attempt.

    Each takes `window_s` at the median pace of its stage.
    """
    train = history.config.train
    intervals = _intervals(history)
    windows: list[tuple[int, float, float]] = []
    for stage, of_stage in ((n, [i for i in intervals if i[1] == n]) for n in range(len(train.plan))):
        if not of_stage:
            continue
        enough = window_s / float(np.median([took_s / steps for *_, steps, took_s in of_stage]))
        for _, stretch in groupby(of_stage, key=lambda interval: interval[0]):
            steps, took_s = 0, 0.0
            for *_, more_steps, more_s in stretch:
                steps, took_s = steps + more_steps, took_s + more_s
                if steps >= enough:
                    windows.append((stage, steps * train.plan[stage].tokens_per_step / took_s, took_s))
                    steps, took_s = 0, 0.0
    return windows


def _intervals(history: History) -> list[tuple[int, int, int, float]]:
    """Attempt, stage, steps and seconds between one log point and the next, within a stage and an attempt."""
    intervals: list[tuple[int, int, int, float]] = []
    train = history.config.train
    stretch, before = (0, 0), 0
    for event in history.steps:
        stage = train.at(event["step"])[0]
        steps, tokens = event["step"] - before, train.plan[stage].tokens_per_step
        took = [_positive(event.get("dt_s")), tokens / _positive(event.get("tokens_per_s"), math.inf)]
        if (event["attempt"], stage) == stretch and max(took) > 0:
            # The two say the same; where they do not, the slower is believed.
            intervals.append((event["attempt"], stage, steps, steps * max(took)))
        stretch, before = (event["attempt"], stage), event["step"]
    return intervals


def _positive(value: Any, otherwise: float = 0.0) -> float:
    return value if isinstance(value, (int, float)) and math.isfinite(value) and value > 0 else otherwise


def data_wait(history: History, limits: Limits) -> Verdict:
    """Of the readings that say both, each a mean over the steps since the reading before."""
    waited_s = took_s = 0.0
    before = 0
    for event in history.steps:
        took, waited = _positive(event.get("dt_s")), event.get("data_s")
        if took and waited is not None and math.isfinite(waited):
            waited_s += (event["step"] - before) * waited
            took_s += (event["step"] - before) * took
        before = event["step"]
    if not took_s:
        return Verdict("data wait", None, None, limits.data_wait, "not recorded")
    share = waited_s / took_s
    text = f"{share:.1%} of the training time was spent waiting for data"
    return Verdict("data wait", share <= limits.data_wait, share, limits.data_wait, text)


def memory(history: History, limits: Limits) -> Verdict:
    resident = [held for event in history.of_kind("heartbeat") if (held := _positive(event.get("rss_bytes")))]
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
