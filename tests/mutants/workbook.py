"""Mutants of nsa_lab/workbook, nsa_lab/report and nsa_lab/figures: one planted fault each."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "workbook: an unreadable run hides the others",
        "workbook.evaluated_runs",
        "group_runs(run_dirs, {}, notes.append, read_each)",
        "group_runs(run_dirs, {}, notes.append)",
    ),
    Mutant(
        "notebook 01: eq. 9 as printed with the wrong sign",
        "figures.blocks",
        "(-m if as_printed else m)",
        "(m if as_printed else -m)",
    ),
    Mutant(
        "notebook 01: the window mask is one key too wide",
        "figures.architecture",
        "(s > t - nsa.w), WIN)",
        "(s >= t - nsa.w), WIN)",
    ),
    Mutant(
        "notebook 01: blocks selected by score drawn as forced",
        "figures.architecture",
        "FORCED if j in reads.forced else SEL if j in reads.blocks else PALE",
        "FORCED if j in reads.blocks else SEL if j in reads.forced else PALE",
    ),
    Mutant(
        "notebooks: folded text is not escaped",
        "workbook.display",
        "{html.escape(text)}</pre>",
        "{text}</pre>",
    ),
    Mutant(
        "notebook 03: NSA counts as faster if one dense baseline is slower",
        "workbook.speeds",
        "nsa_ns < min(dense.values())",
        "nsa_ns < max(dense.values())",
    ),
    Mutant("page: addresses of any kind", "report.sanitize", "return value if LINK.match(value) else None", "return value"),
    Mutant("page: forms remain", "report.sanitize", '{"section", "tfoot"}', '{"section", "tfoot", "form"}'),
    Mutant("page: styles of any kind", "report.sanitize", "    filter_style_properties=set(STYLE_PROPERTIES),\n", ""),
    Mutant(
        "page: pictures from anywhere", "report.sanitize", "value.strip().lower().startswith(EMBEDDED_PICTURE)", "value"
    ),
    Mutant(
        "report: only the first panel of a row has axis labels", "figures.style", "axes.tick_params(labelleft=True)", "pass"
    ),
    Mutant(
        "notebook: every run is reported as resumed",
        "workbook.notebook",
        'if not any(event["kind"] in ("start", "resume")',
        'if False and not any(event["kind"] in ("start", "resume")',
    ),
    Mutant(
        "figures: intervals over seeds set the y range",
        "figures.evaluation_plots",
        "for bound in place.over_windows or ()",
        "for bound in place.over_seeds or place.over_windows or ()",
    ),
    Mutant(
        "figures: a retrieval map counts only the first seed",
        "figures.evaluation_plots",
        "shares[row, column] = share = sum(n_right for n_right, _ in cell_counts) / sum(",
        "shares[row, column] = share = cell_counts[0][0] / sum(",
    ),
    Mutant(
        "figures: the interval over windows is that over seeds",
        "figures.evaluation_plots",
        "[place.over_windows for place in ranges]",
        "[place.over_seeds for place in ranges]",
    ),
    Mutant(
        "figures: a converted model is compared with itself instead of its control",
        "figures.conversion_plots",
        '"control" if "control" in rows else "dense"',
        '"dense"',
    ),
    Mutant(
        "figures: intervals of a conversion are standard deviations of windows",
        "figures.conversion_plots",
        "difference.std(axis=0, ddof=1) / n**0.5",
        "difference.std(axis=0, ddof=1)",
    ),
    Mutant(
        "notebook: a pattern without a run has no note",
        "workbook.evaluated_runs",
        "notes.append(str(error))",
        "pass",
    ),
    Mutant(
        "explorer: ranges include runs that are not selected",
        "workbook.run_explorer",
        "fit_controls([histories[name] for name in run_control.value], *fitted_controls)",
        "fit_controls(list(histories.values()), *fitted_controls)",
    ),
    Mutant("samples: held-out text is built to show it", "workbook.samples", "progress=_refuse_to_fill, ", ""),
    Mutant(
        "difference: the first tenth is not omitted",
        "figures.run_difference",
        "SKIPPED_FRACTION = 0.1",
        "SKIPPED_FRACTION = 0.0",
    ),
    Mutant(
        "report: losses on different texts are subtracted",
        "report.header",
        "if not (has_different_texts and ",
        "if not (False and ",
    ),
    Mutant("report: the title is repeated", "report", 'cell.source = TITLE.sub("", cell.source, count=1)', "pass"),
    Mutant("figures: the bar of a token starts before it", "figures.query_plot", "tokens.numpy() + 0.5", "tokens.numpy()"),
    Mutant(
        "figures: the colour of a model changes",
        "figures.evaluation_plots",
        "list(model_names).index(model)",
        "(index)",
    ),
]
