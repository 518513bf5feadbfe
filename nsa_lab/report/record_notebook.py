"""Build an executed notebook from the record of a run, without a kernel, so that a forge displays the report.

Its code cells contain the calls that made their outputs, and can be run again in the run's directory. Cells tagged
`in-header` show what the header of `report.html` shows too.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.figure import Figure
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from nsa_lab import figures
from nsa_lab.figures.style import get_title, render_png
from nsa_lab.health import Health, examine
from nsa_lab.health.next_actions import list_advice
from nsa_lab.health.summary_sentence import describe_outcome, describe_purpose
from nsa_lab.report.header import describe_training, list_ablations, summarize_ruler
from nsa_lab.runs.evaluation import read_evaluation
from nsa_lab.runs.history import History, collect_facts
from nsa_lab.runs.summary import format_facts
from nsa_lab.runs.tables import Table

IN_HEADER = "in-header"
MARK = "nsa_lab_record"  # key of the notebook's metadata
KERNEL = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
GLOSSARY_LINK = "../../docs/glossary.md"
# Heading and explanation of each figure.
NOTES: dict[Callable[..., Figure], tuple[str, str]] = {
    figures.plot_loss_curves: (
        "Loss",
        "Bits per byte. Thin lines are single steps, thick lines a running mean, the dashed line is held-out text.",
    ),
    figures.plot_learning_rate: (
        "Optimizer",
        "The learning rate, and the norm of the gradient before clipping. A norm that keeps growing indicates divergence.",
    ),
    figures.plot_throughput: (
        "Throughput",
        "Dashed lines mark where a new attempt started. Dips are evaluations, checkpoints and other programs.",
    ),
    figures.plot_gate_shares: (
        "Gates",
        "Each query weights three branches. A share is a branch's part of the sum of the three gates. The dotted line "
        "marks equal shares. If the entropy stays at ln 3 = 1.0986, the gates have not learned.",
    ),
    figures.plot_gates_by_layer: ("Gates by layer", "The same shares at the first and at the last recorded step."),
    figures.plot_selection_statistics: (
        "Selection",
        "Statistics of the selected blocks. Dotted lines are the values for random selection. They do not show whether the "
        "selected blocks are the right ones.",
    ),
    figures.plot_selection_benefit: (
        "Benefit of the selection",
        "The loss of answers to facts beyond the window, with other blocks or without the selected branch. If the lines "
        "coincide, the selection finds nothing.",
    ),
    figures.plot_branch_norms: (
        "Branch outputs",
        "The size of each branch's output: mean and range over layers. A branch whose output shrinks towards zero is no "
        "longer used.",
    ),
}


def build_record_notebook(run: Any) -> NotebookNode:
    """Return the report of one run as an executed notebook: summary, checks, evaluation, curves, configuration."""
    history = History.read(run)
    cells = [
        *_make_summary(history),
        *_make_evaluation(history),
        *_make_ruler(history),
        *_make_curves(history),
        *_make_configuration(history),
    ]
    _number(cells)
    notebook = new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = KERNEL
    notebook.metadata[MARK] = {"run": history.run, "step": history.last_step}
    return notebook


def is_record_notebook(notebook: NotebookNode) -> bool:
    return MARK in notebook.metadata


def make_plot_cell(plot: Callable[..., Figure], run: Any, call: str) -> NotebookNode:
    """Return a code cell with the source `call` and the figure `plot(run)` as its output."""
    figure = plot(run)
    data = {"image/png": base64.b64encode(render_png(figure)).decode(), "text/plain": f"<{get_title(figure)}>"}
    output = new_output("display_data", data=data, metadata={"image/png": {"alt": get_title(figure)}})
    return new_code_cell(call, outputs=[output])


def list_plots(history: History) -> list[Callable[[Any], Figure]]:
    """Return the plots of a run below its summary."""
    plots = [*figures.RUN_PLOTS, *(figures.BRANCH_PLOTS if history.config.model.attention == "nsa" else ())]
    has_benefit = any(isinstance(event.get("answer_loss"), dict) for event in history.current_events("reach"))
    return [*plots, *([figures.plot_selection_benefit] if has_benefit else [])]


def _make_summary(history: History) -> list[NotebookNode]:
    health = examine(history)
    lines = [
        f"# {history.run}",
        "",
        describe_purpose(history.config),
        "",
        f"**{describe_outcome(history, health.verdicts)}**",
        "",
        f"{describe_training(collect_facts(history), history)}.",
        "",
        "This page was generated from the record of the run by `nsa-lab report RUN --record`. "
        f"[The glossary]({GLOSSARY_LINK}) defines its terms.",
    ]
    facts = [(name, value) for name, value in format_facts(history)]
    return [
        _make_markdown("\n".join(lines), in_header=True),
        _make_markdown(
            "\n".join(["## Checks", "", health.headline, "", *_list_advice(history), *_format_checks(health)]), True
        ),
        _make_markdown("\n".join(["## Key numbers", "", *_format_table(("", ""), facts)]), in_header=True),
    ]


def _list_advice(history: History) -> list[str]:
    advice = [f"* {line}" for line in list_advice(history)]
    return [*advice, ""] if advice else []


def _format_checks(health: Health) -> list[str]:
    order = {"failed": 0, "warning": 1, "unknown": 2, "passed": 3}
    verdicts = sorted(health.verdicts, key=lambda verdict: order[verdict.level])
    return _format_table(("check", "level", "result"), [(v.name, v.level, v.text) for v in verdicts])


def _make_evaluation(history: History) -> list[NotebookNode]:
    evaluation = read_evaluation(history.run_dir)
    if evaluation is None:
        return []
    text = (
        "## Evaluation on long texts\n\n"
        f"Checkpoint of step {evaluation['step']:,}, seed {evaluation['seed']}, {evaluation['device']}, "
        f"{evaluation['dtype']}; held-out text."
    )
    cells = [_make_markdown(text, in_header=True)]
    for plot in (figures.plot_retrieval, figures.plot_loss_by_position):
        call = f"show_figure(figures.{plot.__name__}(read_evaluation(run.run_dir)))"
        cells.append(_tag(make_plot_cell(plot, evaluation, call)))
    if ablations := list_ablations(evaluation):
        names = (
            "length",
            "blocks read, or disabled branch",
            "accuracy of the answers",
            "change of the loss of the text, nats",
        )
        cells.append(_make_markdown("\n".join(["### Ablations", "", *_format_table(names, ablations)]), in_header=True))
    return cells


def _make_ruler(history: History) -> list[NotebookNode]:
    ruler = summarize_ruler(history)
    if ruler is None:
        return []
    lines = ["## RULER", "", ruler["description"], "", *_format_table(ruler["head"], ruler["rows"])]
    return [_make_markdown("\n".join(lines), in_header=True)]


def _make_curves(history: History) -> list[NotebookNode]:
    setup = "\n".join(
        [
            "from nsa_lab import figures",
            "from nsa_lab.runs.evaluation import read_evaluation",
            "from nsa_lab.runs.history import History",
            "from nsa_lab.workbook.display import show_figure",
            "",
            'run = History.read(".")  # the directory of this notebook',
        ]
    )
    if not history.steps:
        return [_make_markdown("Nothing has been recorded yet.")]
    cells = [_make_markdown("## Curves", in_header=True), _tag(new_code_cell(setup))]
    for plot in [figures.plot_loss_curves, *list_plots(history)]:
        heading, note = NOTES[plot]
        in_header = plot is figures.plot_loss_curves
        cells.append(_make_markdown(f"### {heading}\n\n{note}", in_header=in_header))
        cell = make_plot_cell(plot, history, f"show_figure(figures.{plot.__name__}(run))")
        cells.append(_tag(cell) if in_header else cell)
    return cells


def _make_configuration(history: History) -> list[NotebookNode]:
    environment = json.dumps(history.environment, indent=1)
    text = (
        f"## Configuration\n\n```yaml\n{history.config.to_yaml().rstrip()}\n```\n\n"
        f"## Versions and machine\n\n```json\n{environment}\n```"
    )
    return [_make_markdown(text, in_header=True)]


def _make_markdown(text: str, in_header: bool = False) -> NotebookNode:
    cell = new_markdown_cell(text)
    return _tag(cell) if in_header else cell


def _tag(cell: NotebookNode) -> NotebookNode:
    cell.metadata["tags"] = [IN_HEADER]
    return cell


def _number(cells: Sequence[NotebookNode]) -> None:
    """Give the cells ids and execution counts that depend only on their order, so that a rebuilt file differs little."""
    n_code_cells = 0
    for number, cell in enumerate(cells):
        cell["id"] = f"record-{number:03d}"
        if cell.cell_type == "code":
            n_code_cells += 1
            cell.execution_count = n_code_cells


def _format_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return Table(names, rows).to_markdown().splitlines()
