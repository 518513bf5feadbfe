"""What stands at the top of a report: the verdict, the numbers that a reader asks for first, and what went wrong."""

from __future__ import annotations

import base64
import json
from typing import Any

from nsa_lab import rundir
from nsa_lab.explore.plots import overview
from nsa_lab.explore.show import png
from nsa_lab.health import Health, examine
from nsa_lab.health.answers import BRANCH_QUESTIONS, answers
from nsa_lab.health.verdict import Verdict, one_line
from nsa_lab.history import History
from nsa_lab.summary import shown_facts

MOODS = {True: "ok", False: "bad", None: "open"}

ADVICE = {
    rundir.HALTED: "The weights are those of step {step:,}, the last good one. Read the reason above and the newest halt-… "
                   "folder of the run, change what it names, then: nsa-lab resume {run}",
    rundir.PREEMPTED: "Nothing is lost: nsa-lab resume {run} goes on from step {step:,}.",
    rundir.RUNNING: "This page shows the run as it was when the page was made: nsa-lab follow {run} shows it live.",
    "DEAD": "The trainer was killed; the last recorded step is {step:,}. nsa-lab resume {run} goes on from the newest "
            "checkpoint.",
}


def run_summary(run: Any, *, picture: bool = True) -> dict[str, Any]:
    """The header of one run, ready for the template."""
    history = History.read(run)
    health = examine(history)
    return {
        "headline": health.headline,
        "mood": "bad" if health.failed else "ok" if history.done else "open",
        "advice": _advice(history),
        "answers": [_row(answer) for answer in answers(health.verdicts) if not _beside_the_point(answer, history)],
        "facts": shown_facts(history),
        "picture": base64.b64encode(png(overview(history))).decode() if picture and history.steps else None,
        "picture_alt": f"Loss, gates, selection and throughput of {history.run} over its steps",
        "counts": _counts(health),
        "verdicts": [_row(verdict) for verdict in health.verdicts],
        "config": history.config.to_yaml(),
        "environment": json.dumps(history.environment, indent=1),
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
                return {
                    "headline": f"The notebook stopped in code cell {number} of {len(code)}: {output.ename}: "
                                f"{one_line(output.evalue)[:500]}",
                    "advice": "What came before it stands below. A run that it started is not hurt by this: its own "
                              "verdict, if there is one, follows.",
                    "cell": cell.get("id", ""),
                }
    return None


def state_of(history: History) -> str | None:
    """What the run's status says; DEAD where it says RUNNING and no trainer is alive."""
    state = history.status.get("status")
    return "DEAD" if state == rundir.RUNNING and not history.alive else state


def _advice(history: History) -> str | None:
    state = state_of(history)
    return ADVICE[state].format(run=history.run, step=history.reached) if state in ADVICE else None


def _counts(health: Health) -> str:
    passed, unknown = (sum(v.ok is value for v in health.verdicts) for value in (True, None))
    return f"{passed} hold, {len(health.failed)} fail, {unknown} not known"
