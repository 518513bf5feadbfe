"""Collect the header of a report: model, loss compared with the references, verdict, and errors.

Each check appears once in the header. The first failed check is in the banner, the checks that answer the headline
questions are in the cards, and the others are in a table.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from nsa_lab.figures import plot_loss_by_position, plot_report_panels, plot_retrieval
from nsa_lab.figures.style import get_title, render_png
from nsa_lab.health import Health, examine
from nsa_lab.health.headline_questions import BRANCH_QUESTIONS, QUESTIONS, answer_questions
from nsa_lab.health.next_actions import list_advice
from nsa_lab.health.references import Reference, find_references
from nsa_lab.health.summary_sentence import describe_outcome, describe_purpose
from nsa_lab.health.verdict import Verdict, join_lines
from nsa_lab.runs import directory
from nsa_lab.runs.evaluation import read_evaluation, read_ruler
from nsa_lab.runs.history import History, RunFacts, collect_facts
from nsa_lab.runs.summary import (
    SOURCE_NAMES,
    diff_settings,
    format_differences,
    format_facts,
    format_settings,
    format_speed,
    format_steps,
    format_training_time,
)
from nsa_lab.runs.tables import EMPTY_CELL

STATUS_CLASSES = {"passed": "ok", "warning": "warn", "failed": "bad", "unknown": "open"}

RUNNING_NOTE = "This page shows the run at the time the page was written; nsa-lab follow {run} shows it live."
KINDS = {"nsa": "NSA", "dense": "Dense attention"}
# Shown above the table of facts, as headline numbers.
SHOWN_ABOVE = frozenset({"tokens per second, median", "training time"})

# Name of the exception with which a notebook stops on purpose (`workbook.notebook.Stop`).
STOP_EXCEPTION = "Stop"
# Advice by whether the notebook stopped on purpose.
NOTEBOOK_ADVICE = {
    True: "The notebook itself has no error; the line above gives the reason. Advice for the run is with its verdict, and "
    "the earlier output is below.",
    False: "The earlier output is below. The error does not affect a run that the notebook started. If the run has a "
    "verdict, it follows.",
}


def summarize_run(run: Any, *, with_plots: bool = True) -> dict[str, Any]:
    """Return the header of one run for the template."""
    history = History.read(run)
    health, run_facts, reference_values = (
        examine(history),
        collect_facts(history),
        find_references(history) if with_plots else [],
    )
    is_untrained = not any(event["step"] for event in history.evaluations)
    return {
        "name": history.run,
        "description": describe_purpose(history.config),
        "outcome": describe_outcome(history, health.verdicts),
        "settings": format_settings(history.config),
        "model": describe_training(run_facts, history),
        "headline_numbers": _list_headline_numbers(run_facts, history, [] if is_untrained else reference_values),
        "headline": health.headline,
        "loss": describe_loss(run_facts, reference_values, is_untrained),
        "status_class": get_status_class(health, history),
        "advice": [RUNNING_NOTE.format(run=history.run)] if history.state == directory.RUNNING else list_advice(history),
        "cards": [_make_row(card) for card in _select_cards(health, history)],
        "facts": format_facts(history),
        "numbers": run_facts,
        "different_settings": {},
        "other_facts": [(name, value) for name, value in format_facts(history) if name not in SHOWN_ABOVE],
        "pictures": _embed_figures(plot_report_panels(history, reference_values)) if with_plots and history.steps else [],
        "evaluation": summarize_evaluation(history) if with_plots else None,
        "ruler": summarize_ruler(history) if with_plots else None,
        "counts": health.counts,
        "verdicts": [_make_row(verdict) for verdict in _select_table_rows(health)],
        "config": history.config.to_yaml(),
        "environment": json.dumps(history.environment, indent=1),
    }


def describe_training(facts: RunFacts, history: History) -> str:
    """Return one line that names the model, the number of tokens, the text and the hardware."""
    config, size = history.config, f"{facts.parameters:,} parameters, " if facts.parameters else ""
    model = f"{KINDS[facts.attention]}, {size}{config.model.n_layers} layers of width {config.model.dim:,}"
    hardware = f"{config.runtime.precision}{f' on {facts.device}' if facts.device else ''}"
    return f"{model}: {format_steps(config.train)} tokens, {SOURCE_NAMES[facts.source]}, {hardware}"


def describe_loss(facts: RunFacts, reference_values: Sequence[Reference], is_untrained: bool = False) -> str:
    """Return for example `0.922 bits per byte; dense baseline 0.925`, or that the trained model was not evaluated."""
    if facts.last_validation_bpb is None or is_untrained:
        return "not evaluated since training started"
    return "; ".join([f"{facts.last_validation_bpb:,.3f} bits per byte", ", ".join(map(str, reference_values))]).rstrip(
        "; "
    )


def get_status_class(health: Health, history: History) -> str:
    """Return `bad` if a check failed, `open` for a trial or an unfinished run, `warn` if a check warns, else `ok`."""
    if health.failed:
        return "bad"
    if not history.is_done or health.trial_reason:
        return "open"
    return "warn" if health.warnings else "ok"


def _list_headline_numbers(
    facts: RunFacts, history: History, reference_values: Sequence[Reference]
) -> list[dict[str, Any]]:
    """Return the most important numbers: value, unit, and notes to compare with."""
    first, last = facts.first_validation_bpb, facts.last_validation_bpb
    last_step = history.evaluations[-1]["step"] if history.evaluations else 0
    loss_notes = [f"untrained {first or 0:.3f}"] if last_step else []
    unit = "bits per byte on held-out text" + ("" if last_step else ", untrained")
    shown = [
        (last, f"{last or 0:,.3f}", unit, [*loss_notes, *_format_references(reference_values)]),
        (facts.tokens_per_s, format_speed(history), "tokens per second, median", []),
        (facts.wall_s, *_split_time(facts)),
    ]
    return [{"value": value, "unit": label, "notes": notes} for number, value, label, notes in shown if number is not None]


def _split_time(facts: RunFacts) -> tuple[str, str, list[str]]:
    duration, _, total = (format_training_time(facts) or "").partition("; ")
    value, _, attempts = duration.partition(" over ")
    return value, f"training time{f', {attempts}' if attempts else ''}", [total] if total else []


def _format_references(reference_values: Sequence[Reference]) -> list[str]:
    return [f"{reference} ({reference.note})" for reference in reference_values]


def _embed_figures(figures: Sequence[Figure]) -> list[tuple[str, str]]:
    return [(base64.b64encode(render_png(figure)).decode(), get_title(figure)) for figure in figures]


def build_comparison_rows(runs: list[dict[str, Any]], has_different_texts: bool = False) -> list[tuple[str, list[str]]]:
    """Return table rows of several runs: a name, the value of each run, and the difference of each run from the first.

    A value that a run has not recorded is a dash. With `has_different_texts`, the runs were evaluated on different texts:
    the row of the validation loss states this and has no difference.
    """
    columns = [
        {"verdict": run["headline"].partition(":")[0], **dict(run["facts"]), **run["different_settings"]} for run in runs
    ]
    for run in runs[1:]:
        differences = format_differences(runs[0]["numbers"], run["numbers"])
        columns.append(
            {
                name: difference
                for name, difference in differences.items()
                if not (has_different_texts and name.startswith("validation"))
            }
        )
    names = dict.fromkeys(name for column in columns for name in column)
    note = " (on different texts, not comparable)" if has_different_texts else ""
    return [(name + note * name.startswith("validation"), [column.get(name, "–") for column in columns]) for name in names]


def list_different_settings(runs: Sequence[History]) -> list[dict[str, str]]:
    """Return, for each run, the settings in which any run differs from the first, as columns of `build_comparison_rows`."""
    keys = {key for run in runs[1:] for key, *_ in diff_settings(runs[0].config, run.config)}
    return [
        {key: str(run.config.to_dict()[key.partition(".")[0]].get(key.partition(".")[2])) for key in sorted(keys)}
        for run in runs
    ]


def summarize_evaluation(history: History) -> dict[str, Any] | None:
    """Return the results of `nsa-lab evaluate` for the template, or None without an evaluation."""
    evaluation = read_evaluation(history.run_dir)
    if evaluation is None:
        return None
    return {
        "description": f"Checkpoint of step {evaluation['step']:,}, seed {evaluation['seed']}, {evaluation['device']}, "
        f"{evaluation['dtype']}; held-out text.",
        "pictures": _embed_figures([plot(evaluation) for plot in (plot_retrieval, plot_loss_by_position)]),
        "ablations": list_ablations(evaluation),
        "documents": _describe_documents(evaluation.get("documents")),
        "skipped": [f"{row['task']} at {row['length']:,}: {row['why']}" for row in evaluation["not_asked"]],
    }


def summarize_ruler(history: History) -> dict[str, Any] | None:
    """Return the scores of RULER's tasks: a description, and a table by task and length; None without `ruler.json`."""
    record = read_ruler(history.run_dir)
    if record is None:
        return None
    cells = {(cell["task"], cell["length"]): cell for cell in record["results"]}
    tasks, lengths = (list(dict.fromkeys(keys)) for keys in (zip(*cells, strict=True) if cells else ((), ())))
    rows = [[task, *(_format_ruler_score(cells.get((task, length))) for length in lengths)] for task in tasks]
    return {
        "description": f"Checkpoint of step {record['step']:,}, seed {record['seed']}, {record['device']}, "
        f"{record['dtype']}. Score from 0 to 100: the percentage of answers that occur in the generated text [95% "
        "interval], by length in tokens.",
        "head": ["task", *(f"{length:,}" for length in lengths)],
        "rows": rows,
        "skipped": [f"{row['task']} at {row['length']:,}: {row['why']}" for row in record["not_asked"]],
    }


def _format_ruler_score(cell: dict[str, Any] | None) -> str:
    return EMPTY_CELL if cell is None else f"{cell['score']:.1f} [{cell['low']:.0f}, {cell['high']:.0f}]"


def list_ablations(evaluation: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return the rows of the table of ablations: length, name, accuracy, change of the text's loss in nats per token."""
    return [
        (f"{part['length']:,}", effect["name"], f"{effect['accuracy']:.0%}", f"{effect['d_loss']:+.4f}")
        for part in evaluation["selection"]
        for effect in part["interventions"]
    ]


def _describe_documents(documents: dict[str, Any] | None) -> str | None:
    """Return a sentence on whole documents, or None for an evaluation without them."""
    if documents is None:
        return None
    bpb = {
        key: f"{documents[key] / math.log(2):.4f}" for key in ("alone", "across", "first_alone", "first_across", "error")
    }
    return (
        f"{documents['documents']:,} whole documents in {documents['rows']:,} sequences of {documents['length']:,} tokens: "
        f"{bpb['alone']} bits per byte with each as a separate sequence, {bpb['across']} if preceded by the others "
        f"(difference {documents['difference'] / math.log(2):+.4f} ± {bpb['error']}, one standard error over sequences). "
        f"On their first bytes: {bpb['first_alone']} and {bpb['first_across']}."
    )


def _make_row(verdict: Verdict) -> dict[str, str]:
    status_class = STATUS_CLASSES[verdict.level]
    return {"name": verdict.name, "status_class": status_class, "mark": verdict.mark, "text": verdict.text}


def _select_cards(health: Health, history: History) -> list[Verdict]:
    """Return the answers to the headline questions.

    A failed answer shows names only, because the banner and the table have the text.
    """
    selected = [answer for answer in answer_questions(health.verdicts) if not _does_not_apply(answer, history)]
    return [answer if answer.ok is not False else _name_failed_checks(answer, health) for answer in selected]


def _name_failed_checks(answer: Verdict, health: Health) -> Verdict:
    names = [
        verdict.name for verdict in health.failed if _is_first_question(answer) or verdict.name in QUESTIONS[answer.name]
    ]
    return Verdict(answer.name, False, None, None, f"{', '.join(names)}: see the verdict")


def _is_first_question(answer: Verdict) -> bool:
    """Return whether this is the question that all checks answer."""
    return answer.name == next(iter(QUESTIONS))


def _select_table_rows(health: Health) -> list[Verdict]:
    """Return the checks that neither the banner nor a card shows."""
    in_cards = {
        name for answer in answer_questions(health.verdicts) if answer.ok is not False for name in QUESTIONS[answer.name]
    }
    return [verdict for verdict in health.verdicts if verdict.name not in in_cards and verdict not in health.failed[:1]]


def _does_not_apply(answer: Verdict, history: History) -> bool:
    """Return whether this is a question on gates or selection of a dense run."""
    return history.config.model.attention == "dense" and answer.ok is None and answer.name in BRANCH_QUESTIONS


def find_notebook_error(notebook: Any) -> dict[str, str] | None:
    """Return the first error in a notebook's outputs (headline, advice, and the id of its cell), or None."""
    code_cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code_cells, 1):
        for output in cell.outputs:
            if output.output_type == "error":
                is_stop = output.ename == STOP_EXCEPTION
                return {
                    "headline": f"The notebook stopped in code cell {number} of {len(code_cells)}: "
                    f"{'' if is_stop else f'{output.ename}: '}{join_lines(output.evalue)[:500]}",
                    "advice": NOTEBOOK_ADVICE[is_stop],
                    "cell": cell.get("id", ""),
                }
    return None
