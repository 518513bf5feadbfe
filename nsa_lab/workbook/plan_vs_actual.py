"""Compare the plan of a run with what happened. The plan is computed again from the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from nsa_lab.health import LIMITS, Limits, Verdict
from nsa_lab.runs.history import History, collect_facts
from nsa_lab.runs.summary import format_duration, format_size, format_training_time
from nsa_lab.train.estimate import ResourceEstimate, compare_with_measured, estimate_resources

QUANTITIES = {
    "memory_bytes": ("peak memory", format_size),
    "hours": ("step time, at the median throughput", lambda hours: format_duration(3600 * hours)),
}
# The two numbers measure different things, and a reader who divides them should know why.
CPU_NOTE = "the plan counts tensors only; the measured value is the whole process, with Python and torch"


@dataclass(frozen=True)
class PlanComparison:
    """The plan of a run, its comparison with the record, and checks of the planned memory and time."""

    plan: ResourceEstimate
    lines: list[str]
    verdicts: list[Verdict]

    def __str__(self) -> str:
        return "\n".join([str(self.plan), "", *self.lines, "", *(str(verdict) for verdict in self.verdicts)])


def compare_plan_with_run(history: History, tokens_per_s: float | None = None, limits: Limits = LIMITS) -> PlanComparison:
    """Return the plan of a run and what its record says.

    `tokens_per_s` is the planned throughput: by default what preflight measured before the first step, otherwise the
    minimum throughput in the configuration. Without any of these, no time was planned.
    """
    start_event = next(iter(history.events_of_kind("start", "resume")), {})
    plan = estimate_resources(history.config, tokens_per_s or _read_preflight_speed(history), start_event.get("ranks", 1))
    measured = {name: (expected, actual) for name, expected, actual, _ in compare_with_measured(plan, history.steps)}
    lines = [
        f"{QUANTITIES[name][0]}: planned {QUANTITIES[name][1](expected)}, measured {QUANTITIES[name][1](actual)}, "
        f"ratio {actual / expected:.2f}"
        for name, (expected, actual) in measured.items()
    ]
    if start_event.get("device") == "cpu":
        lines = [f"{line}; {CPU_NOTE}" if line.startswith(QUANTITIES["memory_bytes"][0]) else line for line in lines]
    recorded_params = start_event.get("params")
    trained = "not recorded" if recorded_params is None else f"{recorded_params:,}"
    lines.append(f"parameters: planned {plan.params:,}, trained {trained}")
    peak = measured.get("memory_bytes", (0.0, None))[1]
    return PlanComparison(
        plan, lines, [_check_memory(plan, peak, start_event.get("device"), limits), _check_time(plan, history, limits)]
    )


def _read_preflight_speed(history: History) -> float | None:
    speeds = [event.get("numbers", {}).get("tokens_per_s") for event in history.events_of_kind("preflight")]
    return next(filter(None, speeds), None)


def _check_memory(plan: ResourceEstimate, peak: float | None, device: str | None, limits: Limits) -> Verdict:
    if peak is None or device in (None, "cpu"):
        is_unknown = peak is None or device is None
        reason = "not recorded" if is_unknown else "the plan counts tensors, and a run on a CPU records the whole process"
        return Verdict("memory as planned", None, None, limits.plan_memory, reason)
    deviation = peak / plan.memory_bytes - 1
    return Verdict(
        "memory as planned",
        abs(deviation) <= limits.plan_memory,
        deviation,
        limits.plan_memory,
        f"{format_size(peak)} at the peak, {format_size(plan.memory_bytes)} planned: {deviation:+.1%} "
        f"(limit {limits.plan_memory:.0%})",
    )


def _check_time(plan: ResourceEstimate, history: History, limits: Limits) -> Verdict:
    """Check the total time of all attempts, including evaluation, checkpoints, compilation and repeated steps."""
    facts = collect_facts(history)
    wall_s = facts.wall_s
    if plan.hours is None or wall_s is None or not history.is_done:
        reason = (
            "not recorded"
            if wall_s is None
            else "the plan has no throughput"
            if plan.hours is None
            else f"step {history.last_step:,} of {plan.steps:,}: not finished"
        )
        return Verdict("time as planned", None, None, limits.plan_time, reason)
    deviation = wall_s / 3600 / plan.hours - 1
    return Verdict(
        "time as planned",
        abs(deviation) <= limits.plan_time,
        deviation,
        limits.plan_time,
        f"{format_training_time(facts)}; {format_duration(3600 * plan.hours)} planned at {plan.tokens_per_s:,.0f} "
        f"tokens/s: {deviation:+.1%} (limit {limits.plan_time:.0%})",
    )
