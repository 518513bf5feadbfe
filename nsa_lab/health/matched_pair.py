"""Checks that compare an NSA run with its dense baseline, a run with the same training except for attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nsa_lab.config import RunConfig
from nsa_lab.health.verdict import LIMITS, Limits, Verdict
from nsa_lab.runs.history import History, collect_facts, have_different_eval_texts
from nsa_lab.runs.summary import format_duration, format_size

# Settings that may differ in a matched pair: attention, the indexer and its loss (a dense model has neither), the MLP width
# that gives the dense baseline the same number of parameters, monitoring, saving and paths.
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
# Fields of `RunFacts` in the side-by-side table, and their formats, equal to those on a run's page.
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
    """Return (NSA run, dense run) of two runs; None if they are not one of each."""
    by_attention = {history.config.model.attention: history for history in runs}
    return (by_attention["nsa"], by_attention["dense"]) if len(runs) == 2 and len(by_attention) == 2 else None


def check_matched_pair(nsa: History, dense: History, limits: Limits = LIMITS) -> list[Verdict]:
    """Check that the two runs had the same training, and that the NSA run is as good as the dense run."""
    return [check_same_training(nsa, dense), check_gap_to_dense(nsa, dense, limits)]


def check_same_training(nsa: History, dense: History) -> Verdict:
    """Check that both runs have the same training settings, training data and evaluation text."""
    nsa_settings, dense_settings = _get_shared_settings(nsa.config), _get_shared_settings(dense.config)
    differences = sorted(
        key for key in {*nsa_settings, *dense_settings} if nsa_settings.get(key) != dense_settings.get(key)
    )
    texts = [get_data_digests(run) for run in (nsa, dense)]
    if all(texts) and texts[0] != texts[1]:
        differences.append("the data")
    elif have_different_eval_texts((nsa, dense)):
        differences.append("the evaluated text")
    equal_text = "; ".join(["same configuration except for attention", *_describe_size_differences(nsa, dense)])
    text = f"different: {', '.join(differences)}" if differences else equal_text
    return Verdict("same training", not differences, len(differences), 0, text)


def _describe_size_differences(nsa: History, dense: History) -> list[str]:
    """Return the MLP widths, parameters and FLOPs of both runs, without values that a run did not record."""
    widths = [run.config.model.hidden_width for run in (nsa, dense)]
    lines = [] if widths[0] == widths[1] else [f"MLP width {widths[0]:,}, dense {widths[1]:,}"]
    counts = [collect_facts(run).parameters for run in (nsa, dense)]
    flops = [_get_mflops(run) for run in (nsa, dense)]
    for name, (nsa_value, dense_value), form in (("parameters", counts, "{:,}"), ("MFLOPs per token", flops, "{:,.1f}")):
        if nsa_value and dense_value:
            lines.append(
                f"{name} {form.format(nsa_value)}, dense {form.format(dense_value)} ({nsa_value / dense_value - 1:+.1%})"
            )
    return lines


def _get_mflops(run: History) -> float | None:
    first_event = next(iter(run.events_of_kind("start", "resume")), {})
    flops = (first_event.get("flops_per_token") or {}).get(run.config.model.attention)
    return flops and flops / 1e6


def check_gap_to_dense(nsa: History, dense: History, limits: Limits) -> Verdict:
    """Check the validation bpb relative to the dense run at the last step that both evaluated. Better than dense passes."""
    nsa_bpb, dense_bpb = (dict(zip(*(values.tolist() for values in run.validation()), strict=True)) for run in (nsa, dense))
    step = max((step for step in nsa_bpb if step in dense_bpb), default=0)
    if step == 0:
        return Verdict(
            "as good as dense", None, None, limits.dense_gap, "no step after the start was evaluated in both runs"
        )
    if (
        len({run.describe_eval_text(event) for run in (nsa, dense) for event in run.evaluations if event["step"] == step})
        > 1
    ):
        text = f"at step {step:,} the runs were evaluated on different texts, so their losses are not comparable"
        return Verdict("as good as dense", None, None, limits.dense_gap, text)
    gap = nsa_bpb[step] / dense_bpb[step] - 1
    text = (
        f"validation {nsa_bpb[step]:.4f}, dense {dense_bpb[step]:.4f} bits per byte at step {step:,}: {gap:+.2%} "
        f"(required: at most {limits.dense_gap:+.0%})"
    )
    return Verdict("as good as dense", bool(gap <= limits.dense_gap), gap, limits.dense_gap, text)


def build_side_by_side(nsa: History, dense: History) -> list[tuple[str, str | None, str | None, float | None]]:
    """Return rows (name, NSA value, dense value, NSA / dense) of the key numbers, values formatted.

    None: a run did not record the value, or the ratio is of losses on different texts.
    """
    facts = collect_facts(nsa), collect_facts(dense)
    has_other_text = have_different_eval_texts((nsa, dense))
    rows = []
    for name, (key, format_value) in SHOWN_FACTS.items():
        nsa_value, dense_value = (getattr(run_facts, key) for run_facts in facts)
        is_incomparable = has_other_text and "validation" in key
        ratio = nsa_value / dense_value if nsa_value is not None and dense_value and not is_incomparable else None
        rows.append((name, *(None if value is None else format_value(value) for value in (nsa_value, dense_value)), ratio))
    return rows


def get_data_digests(run: History) -> set[str]:
    """Return the digests of the training texts of all attempts; empty if none was recorded."""
    return {event["data_identity"] for event in run.events_of_kind("start", "resume") if "data_identity" in event}


def get_training_settings(config: RunConfig) -> dict[str, object]:
    """Return the settings that affect the result of training, by dotted key. Of `runtime`, that is only the precision."""
    sections = config.settings()
    if stages := sections.get("train.stages"):
        sections["train.stages"] = [{key: value for key, value in stage.items() if key != "cuda_graph"} for stage in stages]
    return {k: v for k, v in sections.items() if not k.startswith("runtime.") or k == "runtime.precision"}


def _get_shared_settings(config: RunConfig) -> dict[str, object]:
    """Return the settings that must be equal in a matched pair, by dotted key."""
    return {key: value for key, value in get_training_settings(config).items() if key not in ALLOWED_DIFFERENCES}
