"""What stands at the top of a report: the verdict, the numbers that a reader asks for first, and what went wrong."""

from __future__ import annotations

import base64
import json
from typing import Any

from nsa_lab.figures import loss_by_position, overview, retrieval_map
from nsa_lab.figures.style import png, title
from nsa_lab.health import Health, examine
from nsa_lab.health.answers import BRANCH_QUESTIONS, answers
from nsa_lab.health.verdict import Verdict, one_line
from nsa_lab.runs import directory
from nsa_lab.runs.evaluation import read_evaluation
from nsa_lab.runs.history import History
from nsa_lab.runs.summary import settings_of, shown_facts

MOODS = {True: "ok", False: "bad", None: "open"}

ADVICE = {
    directory.HALTED: "The weights are those of step {step:,}, the last good one. The newest halt-… folder of the run "
    "holds the diagnosis. If the cause lies outside, in data or machine, mend it and go on: nsa-lab resume {run}. "
    "If it is a value of the configuration, train anew with another: nsa-lab run NAME -p section.key=value",
    directory.PREEMPTED: "Nothing is lost: nsa-lab resume {run} goes on from step {step:,}.",
    directory.RUNNING: "This page shows the run as it was when the page was made: nsa-lab follow {run} shows it live.",
    "DEAD": "The trainer was killed; the last recorded step is {step:,}. nsa-lab resume {run} goes on from the newest "
    "checkpoint.",
}

# The exception by which a notebook says that it cannot go on (`workbook.notebook.Stop`), as an executed one names it.
STOP = "Stop"
# By whether the notebook itself found that it cannot go on.
NOTEBOOK_ADVICE = {
    True: "Nothing in the notebook is broken: the line above says what it met and what to do. What came before is below.",
    False: "What came before it stands below. A run that it started is not hurt by this: its own verdict, if there is one, "
    "follows.",
}


def run_summary(run: Any, *, picture: bool = True) -> dict[str, Any]:
    """The header of one run, ready for the template."""
    history = History.read(run)
    health = examine(history)
    return {
        "name": history.run,
        "settings": settings_of(history.config),
        "headline": health.headline,
        "mood": "bad" if health.failed else "ok" if history.done else "open",
        "advice": _advice(history),
        "answers": [_row(answer) for answer in answers(health.verdicts) if not _beside_the_point(answer, history)],
        "facts": shown_facts(history),
        "picture": base64.b64encode(png(overview(history))).decode() if picture and history.steps else None,
        "picture_alt": f"Loss, gates, selection and throughput of {history.run} over its steps",
        "evaluation": evaluation_shown(history) if picture else None,
        "counts": _counts(health),
        "verdicts": [_row(verdict) for verdict in health.verdicts],
        "config": history.config.to_yaml(),
        "environment": json.dumps(history.environment, indent=1),
    }


def beside(runs: list[dict[str, Any]], apart: bool = False) -> list[tuple[str, list[str]]]:
    """Facts of several runs as rows of a table: a name, and the value in each; a dash where a run does not say.

    `apart` says that they were evaluated on different texts, and so does the row.
    """
    known = [{"verdict": run["headline"], **dict(run["facts"])} for run in runs]
    names = dict.fromkeys(name for facts in known for name in facts)
    note = " (of different texts: not to be compared)" if apart else ""
    return [(name + note * name.startswith("validation"), [facts.get(name, "–") for facts in known]) for name in names]


def evaluation_shown(history: History) -> dict[str, Any] | None:
    """What `nsa-lab evaluate` found: pictures, and a table of the interventions. None where there is no evaluation."""
    found = read_evaluation(history.run_dir)
    if found is None:
        return None
    drawn = [draw(found) for draw in (retrieval_map, loss_by_position)]
    return {
        "told": f"Checkpoint of step {found['step']:,}, seed {found['seed']}, {found['device']}, {found['dtype']}; "
        "text that was held out of training.",
        "pictures": [(base64.b64encode(png(figure)).decode(), title(figure)) for figure in drawn],
        "interventions": [
            (f"{part['length']:,}", effect["name"], f"{effect['accuracy']:.0%}", f"{effect['d_loss']:+.4f}")
            for part in found["selection"]
            for effect in part["interventions"]
        ],
        "not_asked": [f"{row['task']} at {row['length']:,}: {row['why']}" for row in found["not_asked"]],
    }


def _row(verdict: Verdict) -> dict[str, str]:
    return {"name": verdict.name, "mood": MOODS[verdict.ok], "mark": verdict.mark, "text": verdict.text}


def _beside_the_point(answer: Verdict, history: History) -> bool:
    """A dense run is not asked about gates and selection."""
    return history.config.model.attention == "dense" and answer.ok is None and answer.name in BRANCH_QUESTIONS


def notebook_error(notebook: Any) -> dict[str, str] | None:
    """The first error among a notebook's outputs: headline, advice, and the id of its cell."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, 1):
        for output in cell.outputs:
            if output.output_type == "error":
                meant = output.ename == STOP
                return {
                    "headline": f"The notebook stopped in code cell {number} of {len(code)}: "
                    f"{'' if meant else f'{output.ename}: '}{one_line(output.evalue)[:500]}",
                    "advice": NOTEBOOK_ADVICE[meant],
                    "cell": cell.get("id", ""),
                }
    return None


def _advice(history: History) -> str | None:
    return ADVICE[history.state].format(run=history.run, step=history.reached) if history.state in ADVICE else None


def _counts(health: Health) -> str:
    passed, unknown = (sum(v.ok is value for v in health.verdicts) for value in (True, None))
    return f"{passed} hold, {len(health.failed)} fail, {unknown} not known"
