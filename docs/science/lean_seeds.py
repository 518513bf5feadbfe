"""Print the tables of stage 2 in lean.md from run directories, and write its figure to docs/pictures/lean.png.

    python docs/science/lean_seeds.py FOLDER

FOLDER holds the runs of the sweeps long_64k_lean (seed 0), long_64k_lean_seeds and long_64k_window
(`tools/records.py unpack --to FOLDER`).
"""

import math
import statistics
import sys
from pathlib import Path

from lean import RUNS, read_throughput, shares_of_cache
from learning_rates_and_parts import TASKS, TEXTS, Run, T, difference, number, pairs, table
from matplotlib.figure import Figure

from nsa_lab.figures.style import DENSE, SEL, add_legend, render_png

PICTURE = Path(__file__).parents[1] / "pictures" / "lean.png"
SEEDS = (0, 1, 2)
FORMS = ("window", "dense")
# The first position range of the target on `long`.
FIRST_RANGE = 4096


def main() -> None:
    folder = Path(sys.argv[1])
    paths = {(name, seed): find_run(folder, name, seed) for name in ("today", *FORMS) for seed in SEEDS}
    runs = {key: Run(path) for key, path in paths.items()}
    spans = runs["today", 0].texts["long"]["octaves"]

    print("## Bits per byte minus `today` at the same seed\n")
    rows = []
    for form in FORMS:
        for seed in SEEDS:
            run, control = runs[form, seed], runs["today", seed]
            own = f"{run.validation - control.validation:+.4f}"
            rows.append([f"`{form}`", f"{seed}", own, *(difference(run, control, text) for text in TEXTS)])
        own_differences = [runs[form, s].validation - runs["today", s].validation for s in SEEDS]
        means = [average(collect(runs, form, text)) for text in TEXTS]
        rows.append([f"`{form}`", "mean", average(own_differences), *means])
    table(["run", "seed", "own validation", *(f"`{text}`" for text in TEXTS)], rows)

    print("## Bits per byte\n")
    rows = [
        [f"`{name}`", f"{seed}", number(runs[name, seed].validation), *(number(runs[name, seed].bits(t)) for t in TEXTS)]
        for name in ("today", *FORMS)
        for seed in SEEDS
    ]
    table(["run", "seed", "own validation", *(f"`{text}`" for text in TEXTS)], rows)

    print("## `long` by position, `window` minus `today`\n")
    ranges = [(k, first, last) for k, (first, last) in enumerate(spans) if first >= FIRST_RANGE]
    rows = [
        [
            f"{first:,} to {last - 1:,}",
            *(difference(runs["window", seed], runs["today", seed], "long", k) for seed in SEEDS),
            average(collect(runs, "window", "long", k)),
        ]
        for k, first, last in ranges
    ]
    table(["positions", *(f"seed {seed}" for seed in SEEDS), "mean"], rows)

    print("## Right answers, percent\n")
    columns = [(task, length) for length in (4096, 65536) for task in TASKS]
    rows = [
        [f"`{name}`", f"{seed}", *(run.answers(*column) if run.cells else "–" for column in columns)]
        for (name, seed), run in runs.items()
    ]
    table(["run", "seed", *(f"{task}, {length:,}" for task, length in columns)], rows)

    print("## Thousand bytes per second, by stage\n")
    rows = [[f"`{name}`", f"{seed}", *read_throughput(path)] for (name, seed), path in paths.items()]
    table(["run", "seed", "2,048", "8,192", "65,536"], rows)

    if one_head := sorted(folder.glob("long_64k_window.one_head.s0-*")):
        print("## One index head, seed 0, minus `window`\n")
        run, control = Run(one_head[-1]), runs["window", 0]
        own = f"{run.validation - control.validation:+.4f}"
        row = ["`one_head`", own, *(difference(run, control, text) for text in TEXTS)]
        table(["run", "own validation", *(f"`{text}`" for text in TEXTS)], [row])
        table(
            [f"{task}, {length:,}" for task, length in columns],
            [[run.answers(*column) for column in columns]],
        )

    PICTURE.write_bytes(render_png(plot_lean(folder, runs, spans)))


def plot_lean(folder: Path, runs: dict[tuple[str, int], Run], spans: list[list[int]]) -> Figure:
    """Plot the loss on `long` minus `today`: of every form of stage 1 by the cache that it reads, and by position."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    forms, positions = figure.subplots(1, 2)
    stage_1 = {name: find_run(folder, name, 0) for name in RUNS}
    for name, (read, _) in shares_of_cache(stage_1).items():
        loss = mean_difference(Run(stage_1[name]), runs["today", 0], "long")
        forms.plot(read, loss, "o", color={"dense": DENSE, "window": SEL}.get(name, "#777777"))
        below = name in ("bf16_keys", "today")
        forms.annotate(name, (read, loss), xytext=(5, -10 if below else 3), textcoords="offset points", fontsize=8)
    forms.set(
        xscale="log",
        xlim=(0.07, 1.7),
        xlabel="cache read per token at 65,536 bytes, share of dense",
        ylabel="bits per byte",
    )
    forms.set_title("long, minus today, one seed", fontsize=9)
    forms.set_xticks([0.1, 0.2, 0.5, 1], ["0.1", "0.2", "0.5", "1"])
    for form, color in (("dense", DENSE), ("window", SEL)):
        seeds = [collect(runs, form, "long", k) for k in range(len(spans))]
        positions.plot([statistics.mean(values) for values in seeds], "o-", color=color, label=f"{form}, mean of 3 seeds")
        for seed in range(len(SEEDS)):
            positions.plot([values[seed] for values in seeds], color=color, linewidth=0.7, alpha=0.6)
    positions.axhline(0.003, color="black", linewidth=0.8, linestyle="--", label="target from 4,096 on: at most +0.003")
    for axes in (forms, positions):
        axes.axhline(0, color="black", linewidth=0.8)
    positions.set_xticks(range(len(spans)), [f"{first:,}–" for first, _ in spans], fontsize=7)
    positions.set(xlabel="position, bytes", ylabel="bits per byte")
    positions.set_title("long by position, minus today at the same seed", fontsize=9)
    add_legend(positions)
    return figure


def find_run(folder: Path, name: str, seed: int) -> Path:
    """The newest run of a form and seed."""
    sweep = "long_64k_lean" if seed == 0 else "long_64k_lean_seeds"
    return max(folder.glob(f"{sweep}.{name}.s{seed}-*"))


def collect(runs: dict[tuple[str, int], Run], form: str, text: str, position: int | None = None) -> list[float]:
    """Differences from `today` of the seeds for which both runs were evaluated on the text."""
    found = [(runs[form, seed], runs["today", seed]) for seed in SEEDS]
    return [
        mean_difference(run, control, text, position)
        for run, control in found
        if text in run.texts and text in control.texts
    ]


def mean_difference(first: Run, second: Run, text: str, position: int | None = None) -> float:
    """First minus second in bits per byte: of whole documents, or at one position range."""
    values, weights = pairs(first, second, text, position)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)


def average(values: list[float]) -> str:
    """Mean over seeds with its 95% interval, Student's t."""
    mean, n = statistics.mean(values), len(values)
    half = T[n - 2] * statistics.stdev(values) / math.sqrt(n)
    return f"{mean:+.4f} [{mean - half:+.4f}, {mean + half:+.4f}], {n} seeds"


if __name__ == "__main__":
    main()
