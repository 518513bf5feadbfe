"""Verdicts on an NSA run beside its dense twin, the same training in everything but attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nsa_lab.config import RunConfig
from nsa_lab.health.verdict import LIMITS, Limits, Verdict
from nsa_lab.runs.history import History, collect_facts, have_different_eval_texts
from nsa_lab.runs.summary import format_duration, format_size

# What twins may differ in: attention itself, an indexer and what teaches it, of which a dense model has none, the width
# that gives a dense twin as many parameters, and what is watched, saved and where.
ALLOWED_DIFFERENCES = frozenset(
    {
        "model.attention",
        "model.mlp_hidden",
        "model.selection_loss",
        "model.indexer_block",
        "model.indexer_width",
        "data.path",
        "data.timeout_s",
        "train.micro_batch_size",
        "train.log_every",
        "train.stats_every",
        "train.eval_every",
        "train.save_every",
        "train.keep_last",
        "train.keep_every",
        "train.spike_sigma",
        "train.min_tokens_per_s",
        "train.stall_action",
    }
)
# Of `history.Facts`, and how each is written: as on every page of a run.
SHOWN_FACTS: dict[str, tuple[str, Callable[[float], str]]] = {
    "steps": ("step", "{:,}".format),
    "validation, bits per byte": ("last_validation_bpb", "{:.3f}".format),
    "best validation, bits per byte": ("best_validation_bpb", "{:.3f}".format),
    "tokens per second, median": ("tokens_per_s", "{:,.0f}".format),
    "training time": ("wall_s", format_duration),
    "peak memory": ("memory_peak_bytes", format_size),
    "parameters": ("parameters", "{:,}".format),
}


def find_matched_pair(runs: Sequence[History]) -> tuple[History, History] | None:
    """The NSA run and the dense run among two runs; None if they are not one of each."""
    by_attention = {history.config.model.attention: history for history in runs}
    return (by_attention["nsa"], by_attention["dense"]) if len(runs) == 2 and len(by_attention) == 2 else None


def check_matched_pair(nsa: History, dense: History, limits: Limits = LIMITS) -> list[Verdict]:
    """Are they twins, and is the NSA run as good?"""
    return [check_same_training(nsa, dense), check_gap_to_dense(nsa, dense, limits)]


def check_same_training(nsa: History, dense: History) -> Verdict:
    """One configuration, and one text."""
    ours, theirs = _get_shared_settings(nsa.config), _get_shared_settings(dense.config)
    differ = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))
    texts = [get_data_digests(run) for run in (nsa, dense)]
    if all(texts) and texts[0] != texts[1]:
        differ.append("the data")
    elif have_different_eval_texts((nsa, dense)):
        differ.append("the text that was evaluated")
    alike = "; ".join(["the same configuration but for attention", *_describe_size_differences(nsa, dense)])
    text = f"they differ in {', '.join(differ)}" if differ else alike
    return Verdict("twins", not differ, len(differ), 0, text)


def _describe_size_differences(nsa: History, dense: History) -> list[str]:
    """What twins cannot have in common, or need not: width of the MLP, parameters and FLOPs; what a run does not say is
    left out."""
    widths = [run.config.model.hidden_width for run in (nsa, dense)]
    lines = [] if widths[0] == widths[1] else [f"an MLP of {widths[0]:,} against {widths[1]:,}"]
    counts = [collect_facts(run).parameters for run in (nsa, dense)]
    flops = [_get_mflops(run) for run in (nsa, dense)]
    for name, (ours, theirs), form in (("parameters", counts, "{:,}"), ("MFLOPs per token", flops, "{:,.1f}")):
        if ours and theirs:
            lines.append(f"{name} {form.format(ours)} against {form.format(theirs)}, {ours / theirs - 1:+.1%}")
    return lines


def _get_mflops(run: History) -> float | None:
    begun = next(iter(run.events_of_kind("start", "resume")), {})
    flops = (begun.get("flops_per_token") or {}).get(run.config.model.attention)
    return flops and flops / 1e6


def check_gap_to_dense(nsa: History, dense: History, limits: Limits) -> Verdict:
    """Bits per byte on the held-out text at the last step that both evaluated; better than dense is good, too."""
    ours, theirs = (dict(zip(*(values.tolist() for values in run.validation()), strict=True)) for run in (nsa, dense))
    step = max((step for step in ours if step in theirs), default=0)
    if step == 0:
        return Verdict("as good as dense", None, None, limits.dense_gap, "no step was evaluated in both runs but the start")
    if (
        len({run.describe_eval_text(event) for run in (nsa, dense) for event in run.evaluations if event["step"] == step})
        > 1
    ):
        text = f"at step {step:,} they were evaluated on different texts, which cannot be compared"
        return Verdict("as good as dense", None, None, limits.dense_gap, text)
    gap = ours[step] / theirs[step] - 1
    text = (
        f"validation {ours[step]:.4f} against {theirs[step]:.4f} bits per byte at step {step:,}: {gap:+.2%} "
        f"(at most {limits.dense_gap:+.0%} asked)"
    )
    return Verdict("as good as dense", bool(gap <= limits.dense_gap), gap, limits.dense_gap, text)


def build_side_by_side(nsa: History, dense: History) -> list[tuple[str, str | None, str | None, float | None]]:
    """Name, NSA and dense as they are written, and NSA/dense, of the numbers that a reader asks for; None where a run does
    not say, and for the ratio of losses on different texts."""
    known = collect_facts(nsa), collect_facts(dense)
    apart = have_different_eval_texts((nsa, dense))
    rows = []
    for name, (key, write) in SHOWN_FACTS.items():
        ours, theirs = (getattr(one, key) for one in known)
        unlike = apart and "validation" in key
        ratio = ours / theirs if ours is not None and theirs and not unlike else None
        rows.append((name, *(None if value is None else write(value) for value in (ours, theirs)), ratio))
    return rows


def get_data_digests(run: History) -> set[str]:
    """The texts that its attempts were trained on, each by its digest; empty where a record does not say."""
    return {event["data_identity"] for event in run.events_of_kind("start", "resume") if "data_identity" in event}


def get_training_settings(config: RunConfig) -> dict[str, object]:
    """The settings that decide what is learned, by dotted keys: of how it is computed, the precision alone."""
    sections = config.settings()
    if stages := sections.get("train.stages"):
        sections["train.stages"] = [{key: value for key, value in stage.items() if key != "cuda_graph"} for stage in stages]
    return {k: v for k, v in sections.items() if not k.startswith("runtime.") or k == "runtime.precision"}


def _get_shared_settings(config: RunConfig) -> dict[str, object]:
    """What twins have in common, by dotted keys."""
    return {key: value for key, value in get_training_settings(config).items() if key not in ALLOWED_DIFFERENCES}
