"""A run's plan beside what happened: worked out again from the configuration, which is all that a plan needs."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_lab.health import LIMITS, Limits, Verdict
from nsa_lab.runs.history import History, facts
from nsa_lab.runs.summary import duration, size_text, time_of
from nsa_lab.train.plan import Plan, compare, plan

SHOWN = {
    "memory_bytes": ("memory at the peak", size_text),
    "hours": ("time of the steps alone, at the median speed", lambda hours: duration(3600 * hours)),
}
# The two are no measure of each other, and a reader who divides them should know why.
ON_CPU = "planned are tensors alone, measured is the whole process, with Python and torch"


@dataclass(frozen=True)
class Outcome:
    """A plan, the run that followed it, and the verdicts on how well it foresaw memory and time."""

    planned: Plan
    lines: list[str]
    verdicts: list[Verdict]

    def __str__(self) -> str:
        return "\n".join([str(self.planned), "", *self.lines, "", *(str(verdict) for verdict in self.verdicts)])


def outcome(history: History, tokens_per_s: float | None = None, limits: Limits = LIMITS) -> Outcome:
    """What was planned and what the record says.

    `tokens_per_s` is the speed that was reckoned with, by default what preflight measured before the first step, else the
    throughput gate of the configuration; without any of them no time was planned.
    """
    begin = next(iter(history.of_kind("start", "resume")), {})
    planned = plan(history.config, tokens_per_s or _measured_before(history), begin.get("ranks", 1))
    measured = {name: (expected, found) for name, expected, found, _ in compare(planned, history.steps)}
    lines = [
        f"{SHOWN[name][0]}: planned {SHOWN[name][1](expected)}, measured {SHOWN[name][1](found)}, "
        f"ratio {found / expected:.2f}"
        for name, (expected, found) in measured.items()
    ]
    if begin.get("device") == "cpu":
        lines = [f"{line}; {ON_CPU}" if line.startswith(SHOWN["memory_bytes"][0]) else line for line in lines]
    told = begin.get("params")
    lines.append(f"parameters: planned {planned.params:,}, trained {'not recorded' if told is None else f'{told:,}'}")
    peak = measured.get("memory_bytes", (0.0, None))[1]
    return Outcome(planned, lines, [_memory(planned, peak, begin.get("device"), limits), _time(planned, history, limits)])


def _measured_before(history: History) -> float | None:
    speeds = [event.get("numbers", {}).get("tokens_per_s") for event in history.of_kind("preflight")]
    return next(filter(None, speeds), None)


def _memory(planned: Plan, peak: float | None, device: str | None, limits: Limits) -> Verdict:
    if peak is None or device in (None, "cpu"):
        unknown = peak is None or device is None
        why = "not recorded" if unknown else "the plan counts tensors, and a run on a CPU records the whole process"
        return Verdict("memory as planned", None, None, limits.plan_memory, why)
    off = peak / planned.memory_bytes - 1
    return Verdict(
        "memory as planned",
        abs(off) <= limits.plan_memory,
        off,
        limits.plan_memory,
        f"{size_text(peak)} at the peak, {size_text(planned.memory_bytes)} planned: {off:+.1%} "
        f"(within {limits.plan_memory:.0%} asked)",
    )


def _time(planned: Plan, history: History, limits: Limits) -> Verdict:
    """All attempts on the clock: evaluation, saves, compilation and steps done twice are part of what a run takes."""
    known = facts(history)
    took_s = known.wall_s
    if planned.hours is None or took_s is None or not history.done:
        why = (
            "not recorded"
            if took_s is None
            else "the plan named no speed"
            if planned.hours is None
            else f"step {history.reached:,} of {planned.steps:,}: not finished"
        )
        return Verdict("time as planned", None, None, limits.plan_time, why)
    off = took_s / 3600 / planned.hours - 1
    return Verdict(
        "time as planned",
        abs(off) <= limits.plan_time,
        off,
        limits.plan_time,
        f"{time_of(known)}; {duration(3600 * planned.hours)} planned at {planned.tokens_per_s:,.0f} tokens/s: "
        f"{off:+.1%} (within {limits.plan_time:.0%} asked)",
    )
