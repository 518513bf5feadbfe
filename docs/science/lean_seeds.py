"""Print the tables of stage 2 in lean.md from run directories.

    python docs/science/lean_seeds.py FOLDER

FOLDER holds the runs of the sweeps long_64k_lean (seed 0), long_64k_lean_seeds and long_64k_window
(`tools/records.py unpack --to FOLDER`).
"""

import math
import statistics
import sys
from pathlib import Path

from lean import read_throughput
from learning_rates_and_parts import TASKS, TEXTS, Run, T, difference, number, pairs, table

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


def find_run(folder: Path, name: str, seed: int) -> Path:
    """The newest run of a form and seed."""
    sweep = "long_64k_lean" if seed == 0 else "long_64k_lean_seeds"
    return max(folder.glob(f"{sweep}.{name}.s{seed}-*"))


def collect(runs: dict[tuple[str, int], Run], form: str, text: str, position: int | None = None) -> list[float]:
    """Differences from `today` of the seeds for which both runs were evaluated on the text."""
    found = [(runs[form, seed], runs["today", seed]) for seed in SEEDS]
    values = []
    for run, control in found:
        if text in run.texts and text in control.texts:
            differences, weights = pairs(run, control, text, position)
            values.append(sum(d * w for d, w in zip(differences, weights, strict=True)) / sum(weights))
    return values


def average(values: list[float]) -> str:
    """Mean over seeds with its 95% interval, Student's t."""
    mean, n = statistics.mean(values), len(values)
    half = T[n - 2] * statistics.stdev(values) / math.sqrt(n)
    return f"{mean:+.4f} [{mean - half:+.4f}, {mean + half:+.4f}], {n} seeds"


if __name__ == "__main__":
    main()
