"""A run's plan beside what happened: worked out again from the configuration, which is all that a plan needs."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_lab.health import LIMITS, Limits, Verdict
from nsa_lab.runs.history import History, collect_facts
from nsa_lab.runs.summary import format_duration, format_size, format_training_time
from nsa_lab.train.estimate import ResourceEstimate, compare_with_measured, estimate_resources

QUANTITIES = {
    "memory_bytes": ("memory at the peak", format_size),
    "hours": ("time of the steps alone, at the median speed", lambda hours: format_duration(3600 * hours)),
}
# The two are no measure of each other, and a reader who divides them should know why.
CPU_NOTE = "planned are tensors alone, measured is the whole process, with Python and torch"


@dataclass(frozen=True)
class PlanComparison:
    """A plan, the run that followed it, and the verdicts on how well it foresaw memory and time."""

    plan: ResourceEstimate
    lines: list[str]
    verdicts: list[Verdict]

    def __str__(self) -> str:
        return "\n".join([str(self.plan), "", *self.lines, "", *(str(verdict) for verdict in self.verdicts)])


def compare_plan_with_run(history: History, tokens_per_s: float | None = None, limits: Limits = LIMITS) -> PlanComparison:
    """What was planned and what the record says.

    `tokens_per_s` is the speed that was reckoned with, by default what preflight measured before the first step, else the
    throughput gate of the configuration; without any of them no time was planned.
    """
    begin = next(iter(history.events_of_kind("start", "resume")), {})
    planned = estimate_resources(history.config, tokens_per_s or _read_preflight_speed(history), begin.get("ranks", 1))
    measured = {name: (expected, found) for name, expected, found, _ in compare_with_measured(planned, history.steps)}
    lines = [
        f"{QUANTITIES[name][0]}: planned {QUANTITIES[name][1](expected)}, measured {QUANTITIES[name][1](found)}, "
        f"ratio {found / expected:.2f}"
        for name, (expected, found) in measured.items()
    ]
    if begin.get("device") == "cpu":
        lines = [f"{line}; {CPU_NOTE}" if line.startswith(QUANTITIES["memory_bytes"][0]) else line for line in lines]
    told = begin.get("params")
    lines.append(f"parameters: planned {planned.params:,}, trained {'not recorded' if told is None else f'{told:,}'}")
    peak = measured.get("memory_bytes", (0.0, None))[1]
    return PlanComparison(
        planned, lines, [_check_memory(planned, peak, begin.get("device"), limits), _check_time(planned, history, limits)]
    )


def _read_preflight_speed(history: History) -> float | None:
    speeds = [event.get("numbers", {}).get("tokens_per_s") for event in history.events_of_kind("preflight")]
    return next(filter(None, speeds), None)


def _check_memory(planned: ResourceEstimate, peak: float | None, device: str | None, limits: Limits) -> Verdict:
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
        f"{format_size(peak)} at the peak, {format_size(planned.memory_bytes)} planned: {off:+.1%} "
        f"(within {limits.plan_memory:.0%} asked)",
    )


def _check_time(planned: ResourceEstimate, history: History, limits: Limits) -> Verdict:
    """All attempts on the clock: evaluation, saves, compilation and steps done twice are part of what a run takes."""
    known = collect_facts(history)
    took_s = known.wall_s
    if planned.hours is None or took_s is None or not history.is_done:
        why = (
            "not recorded"
            if took_s is None
            else "the plan named no speed"
            if planned.hours is None
            else f"step {history.last_step:,} of {planned.steps:,}: not finished"
        )
        return Verdict("time as planned", None, None, limits.plan_time, why)
    off = took_s / 3600 / planned.hours - 1
    return Verdict(
        "time as planned",
        abs(off) <= limits.plan_time,
        off,
        limits.plan_time,
        f"{format_training_time(known)}; {format_duration(3600 * planned.hours)} planned at {planned.tokens_per_s:,.0f} tokens/s: "
        f"{off:+.1%} (within {limits.plan_time:.0%} asked)",
    )
