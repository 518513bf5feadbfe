"""Mutants of nsa_lab/workbook: one planted fault each."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "notebook 01: the erratum of eq. 9 shown with the other sign",
        "figures.blocks",
        "(-m if as_printed else m)",
        "(m if as_printed else -m)",
    ),
    Mutant(
        "notebook 01: the picture of the window is a key too wide",
        "figures.architecture",
        "(s > t - nsa.w), WIN)",
        "(s >= t - nsa.w), WIN)",
    ),
    Mutant(
        "notebook 01: blocks by score drawn as forced",
        "figures.architecture",
        "FORCED if j in reads.forced else SEL if j in reads.blocks else PALE",
        "FORCED if j in reads.blocks else SEL if j in reads.forced else PALE",
    ),
    Mutant(
        "notebooks: a folded text is taken for markup",
        "workbook.display",
        "{html.escape(text)}</pre>",
        "{text}</pre>",
    ),
    Mutant(
        "notebook 02: NSA called faster where one dense attention is slower",
        "workbook.speeds",
        "whole < min(dense.values())",
        "whole < max(dense.values())",
    ),
    Mutant("page: addresses of any kind", "report.sanitize", "return value if LINK.match(value) else None", "return value"),
    Mutant("page: forms stay", "report.sanitize", '{"section", "tfoot"}', '{"section", "tfoot", "form"}'),
    Mutant("page: styles of any kind", "report.sanitize", "    filter_style_properties=set(STYLE_PROPERTIES),\n", ""),
    Mutant(
        "page: pictures from anywhere", "report.sanitize", "value.strip().lower().startswith(EMBEDDED_PICTURE)", "value"
    ),
    Mutant("report: an error says again what to do", "report.once", "shown = [_kept(part, said) or part", "shown = [part"),
    Mutant("report: panels share the numbers of the first", "figures.style", "axes.tick_params(labelleft=True)", "pass"),
    Mutant("report: the picture on top is shown again", "report.once", "if OVERVIEW in cell.source:", "if False:"),
    Mutant("report: what the header says is said again", "report.once", "not in said]", "not in ()]"),
    Mutant(
        "notebook: every run is called resumed",
        "workbook.notebook",
        'if not any(event["kind"] in ("start", "resume")',
        'if False and not any(event["kind"] in ("start", "resume")',
    ),
    Mutant(
        "figures: intervals over seeds set the scale",
        "figures.evaluation_plots",
        "for bound in place.over_windows or ()",
        "for bound in place.over_seeds or place.over_windows or ()",
    ),
    Mutant(
        "figures: a map of a model's seeds shows the first",
        "figures.evaluation_plots",
        "sum(right for right, _ in own) / sum(asked for _, asked in own)",
        "own[0][0] / own[0][1]",
    ),
    Mutant(
        "figures: the interval over seeds is drawn as that over windows",
        "figures.evaluation_plots",
        "[place.over_windows for place in places]",
        "[place.over_seeds for place in places]",
    ),
    Mutant(
        "notebook: a pattern that names no run is passed over in silence",
        "workbook.evaluated_runs",
        "notes.append(str(error))",
        "pass",
    ),
    Mutant(
        "explorer: steps of runs that are not chosen",
        "workbook.run_explorer",
        "fit_controls([known[name] for name in which.value], *fitted)",
        "fit_controls(list(known.values()), *fitted)",
    ),
    Mutant("beside: text is fetched to be shown", "workbook.beside", "progress=_refuse_to_fill, ", ""),
    Mutant(
        "difference: the first tenth hides the rest",
        "figures.run_difference",
        "SKIPPED_FRACTION = 0.1",
        "SKIPPED_FRACTION = 0.0",
    ),
    Mutant(
        "report: losses on other texts are subtracted",
        "report.header",
        "if not (has_different_texts and ",
        "if not (False and ",
    ),
    Mutant("report: the title stands twice", "report", 'cell.source = TITLE.sub("", cell.source, count=1)', "pass"),
    Mutant("figures: a token's bar begins before it", "figures.query_plot", "read.numpy() + 0.5", "read.numpy()"),
    Mutant(
        "figures: a model changes its colour",
        "figures.tiny_recall",
        "list(model_names).index(model)",
        "(place)",
    ),
]
