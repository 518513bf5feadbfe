"""What stands at the top of a report: what was trained, what came out against what, the verdict, and what went wrong.

Every verdict stands there once: the first that fails in the banner, those that answer a reader's questions in the cards,
and the others in a table.
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
from nsa_lab.health.verdict import Verdict, join_lines
from nsa_lab.runs import directory
from nsa_lab.runs.evaluation import read_evaluation
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

MOODS = {True: "ok", False: "bad", None: "open"}

RUNNING_NOTE = "This page shows the run as it was when the page was made: nsa-lab follow {run} shows it live."
KINDS = {"nsa": "NSA", "dense": "Dense attention"}
# Stand above the table of facts, in figures of their own.
SHOWN_ABOVE = frozenset({"tokens per second, median", "training time"})

# The exception by which a notebook says that it cannot go on (`workbook.notebook.Stop`), as an executed one names it.
STOP_EXCEPTION = "Stop"
# By whether the notebook itself found that it cannot go on.
NOTEBOOK_ADVICE = {
    True: "Nothing in the notebook is broken: the line above says what it met. What to do about a run stands with its "
    "verdict; what came before is below.",
    False: "What came before it stands below. A run that it started is not hurt by this: its own verdict, if there is one, "
    "follows.",
}


def summarize_run(run: Any, *, with_plots: bool = True) -> dict[str, Any]:
    """The header of one run, ready for the template."""
    history = History.read(run)
    health, known, others = examine(history), collect_facts(history), find_references(history) if with_plots else []
    untrained = not any(event["step"] for event in history.evaluations)
    return {
        "name": history.run,
        "settings": format_settings(history.config),
        "trained": describe_training(known, history),
        "figures": _list_headline_numbers(known, history, [] if untrained else others),
        "headline": health.headline,
        "worth": describe_loss(known, others, untrained),
        "mood": get_mood(health, history),
        "advice": [RUNNING_NOTE.format(run=history.run)] if history.state == directory.RUNNING else list_advice(history),
        "cards": [_make_row(card) for card in _select_cards(health, history)],
        "facts": format_facts(history),
        "numbers": known,
        "unlike": {},
        "other_facts": [(name, value) for name, value in format_facts(history) if name not in SHOWN_ABOVE],
        "pictures": _embed_figures(plot_report_panels(history, others)) if with_plots and history.steps else [],
        "evaluation": summarize_evaluation(history) if with_plots else None,
        "counts": health.counts,
        "verdicts": [_make_row(verdict) for verdict in _select_table_rows(health)],
        "said": _list_printed_lines(health, history),
        "config": history.config.to_yaml(),
        "environment": json.dumps(history.environment, indent=1),
    }


def describe_training(known: RunFacts, history: History) -> str:
    """What was trained, on what, in a line."""
    config, size = history.config, f"{known.parameters:,} parameters, " if known.parameters else ""
    model = f"{KINDS[known.attention]}, {size}{config.model.n_layers} layers of width {config.model.dim:,}"
    where = f"{config.runtime.precision}{f' on {known.device}' if known.device else ''}"
    return f"{model}: {format_steps(config.train)} tokens, {SOURCE_NAMES[known.source]}, {where}"


def describe_loss(known: RunFacts, reference_values: Sequence[Reference], is_untrained: bool = False) -> str:
    """`0.922 bits per byte; dense twin 0.925`, or that there is no loss of the model that was trained."""
    if known.last_validation_bpb is None or is_untrained:
        return "not evaluated since training began"
    return "; ".join([f"{known.last_validation_bpb:,.3f} bits per byte", ", ".join(map(str, reference_values))]).rstrip(
        "; "
    )


def get_mood(health: Health, history: History) -> str:
    """A run that is not over, and a trial, are neither good nor bad."""
    if health.failed:
        return "bad"
    return "ok" if history.is_done and not health.trial_reason else "open"


def _list_headline_numbers(
    known: RunFacts, history: History, reference_values: Sequence[Reference]
) -> list[dict[str, Any]]:
    """The numbers that a reader asks for first: value, unit, and what to hold it against."""
    first, last = known.first_validation_bpb, known.last_validation_bpb
    at = history.evaluations[-1]["step"] if history.evaluations else 0
    before = [f"untrained {first or 0:.3f}"] if at else []
    what = "bits per byte on held-out text" + ("" if at else ", untrained")
    shown = [
        (last, f"{last or 0:,.3f}", what, [*before, *_format_references(reference_values)]),
        (known.tokens_per_s, format_speed(history), "tokens per second, median", []),
        (known.wall_s, *_split_time(known)),
    ]
    return [{"value": value, "unit": unit, "notes": notes} for there, value, unit, notes in shown if there is not None]


def _split_time(known: RunFacts) -> tuple[str, str, list[str]]:
    took, _, rest = (format_training_time(known) or "").partition("; ")
    value, _, attempts = took.partition(" over ")
    return value, f"training time{f', {attempts}' if attempts else ''}", [rest] if rest else []


def _format_references(reference_values: Sequence[Reference]) -> list[str]:
    return [f"{other} ({other.note})" for other in reference_values]


def _embed_figures(figures: Sequence[Figure]) -> list[tuple[str, str]]:
    return [(base64.b64encode(render_png(figure)).decode(), get_title(figure)) for figure in figures]


def build_comparison_rows(runs: list[dict[str, Any]], has_different_texts: bool = False) -> list[tuple[str, list[str]]]:
    """Facts of several runs as rows of a table: a name, the value in each, how each differs from the first.

    A dash where a run does not say. `apart` says that they were evaluated on different texts, and so does the row of
    validation, which then gives no difference.
    """
    known = [{"verdict": run["headline"].partition(":")[0], **dict(run["facts"]), **run["unlike"]} for run in runs]
    for run in runs[1:]:
        told = format_differences(runs[0]["numbers"], run["numbers"])
        known.append(
            {name: much for name, much in told.items() if not (has_different_texts and name.startswith("validation"))}
        )
    names = dict.fromkeys(name for facts in known for name in facts)
    note = " (of different texts: not to be compared)" if has_different_texts else ""
    return [(name + note * name.startswith("validation"), [facts.get(name, "–") for facts in known]) for name in names]


def list_different_settings(runs: Sequence[History]) -> list[dict[str, str]]:
    """Of each run, the settings in which one of the runs differs from the first, as rows of `beside`."""
    keys = {key for run in runs[1:] for key, *_ in diff_settings(runs[0].config, run.config)}
    return [
        {key: str(run.config.to_dict()[key.partition(".")[0]].get(key.partition(".")[2])) for key in sorted(keys)}
        for run in runs
    ]


def summarize_evaluation(history: History) -> dict[str, Any] | None:
    """What `nsa-lab evaluate` found: pictures, and a table of the interventions. None where there is no evaluation."""
    found = read_evaluation(history.run_dir)
    if found is None:
        return None
    return {
        "told": f"Checkpoint of step {found['step']:,}, seed {found['seed']}, {found['device']}, {found['dtype']}; "
        "text that was held out of training.",
        "pictures": _embed_figures([draw(found) for draw in (plot_retrieval, plot_loss_by_position)]),
        "interventions": [
            (f"{part['length']:,}", effect["name"], f"{effect['accuracy']:.0%}", f"{effect['d_loss']:+.4f}")
            for part in found["selection"]
            for effect in part["interventions"]
        ],
        "documents": _describe_documents(found.get("documents")),
        "not_asked": [f"{row['task']} at {row['length']:,}: {row['why']}" for row in found["not_asked"]],
    }


def _describe_documents(documents: dict[str, Any] | None) -> str | None:
    """A sentence; None for an evaluation that was made before documents were asked for."""
    if documents is None:
        return None
    bits = {
        key: f"{documents[key] / math.log(2):.4f}" for key in ("alone", "across", "first_alone", "first_across", "error")
    }
    return (
        f"Whole documents, {documents['documents']:,} in {documents['rows']:,} rows of {documents['length']:,} tokens: "
        f"{bits['alone']} bits per byte with each read alone, {bits['across']} behind the others in its row "
        f"(difference {documents['difference'] / math.log(2):+.4f} ± {bits['error']}, a standard error over rows); their first "
        f"bytes {bits['first_alone']} and {bits['first_across']}."
    )


def _make_row(verdict: Verdict) -> dict[str, str]:
    return {"name": verdict.name, "mood": MOODS[verdict.ok], "mark": verdict.mark, "text": verdict.text}


def _select_cards(health: Health, history: History) -> list[Verdict]:
    """A reader's questions. What fails is told in the banner and in the table, and here by its name alone."""
    asked = [answer for answer in answer_questions(health.verdicts) if not _does_not_apply(answer, history)]
    return [answer if answer.ok is not False else _name_failed_checks(answer, health) for answer in asked]


def _name_failed_checks(answer: Verdict, health: Health) -> Verdict:
    names = [
        verdict.name for verdict in health.failed if _is_first_question(answer) or verdict.name in QUESTIONS[answer.name]
    ]
    return Verdict(answer.name, False, None, None, f"{', '.join(names)}: see the verdict")


def _is_first_question(answer: Verdict) -> bool:
    """Whether it is the question that every verdict answers."""
    return answer.name == next(iter(QUESTIONS))


def _select_table_rows(health: Health) -> list[Verdict]:
    """The verdicts that neither the banner nor a card tells."""
    in_cards = {
        name for answer in answer_questions(health.verdicts) if answer.ok is not False for name in QUESTIONS[answer.name]
    }
    return [verdict for verdict in health.verdicts if verdict.name not in in_cards and verdict not in health.failed[:1]]


def _list_printed_lines(health: Health, history: History) -> set[str]:
    """Lines that a notebook may print and that the header says already, with single spaces."""
    lines = [str(verdict) for verdict in health.verdicts]
    lines += [f"{answer.mark} {answer.name} {answer.text}" for answer in answer_questions(health.verdicts)]
    lines += [f"{name} {value}" for name, value in format_facts(history)]
    lines += list_advice(history)
    return {" ".join(line.split()) for line in [*lines, health.headline]}


def _does_not_apply(answer: Verdict, history: History) -> bool:
    """A dense run is not asked about gates and selection."""
    return history.config.model.attention == "dense" and answer.ok is None and answer.name in BRANCH_QUESTIONS


def find_notebook_error(notebook: Any) -> dict[str, str] | None:
    """The first error among a notebook's outputs: headline, advice, and the id of its cell."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, 1):
        for output in cell.outputs:
            if output.output_type == "error":
                meant = output.ename == STOP_EXCEPTION
                return {
                    "headline": f"The notebook stopped in code cell {number} of {len(code)}: "
                    f"{'' if meant else f'{output.ename}: '}{join_lines(output.evalue)[:500]}",
                    "advice": NOTEBOOK_ADVICE[meant],
                    "cell": cell.get("id", ""),
                }
    return None
