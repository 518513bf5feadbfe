"""Print the tables of the project's own dense baseline in convert.md, and the times of whole runs in lean.md.

    python docs/science/own_baseline.py FOLDER

FOLDER holds the runs of convert_own, long_64k_whole, long_64k_lean and long_64k_lean_seeds (`tools/records.py unpack --to
FOLDER`).
"""

import json
import sys
from pathlib import Path

from lean import read_throughput
from lean_seeds import average, mean_difference
from learning_rates_and_parts import TASKS, TEXTS, Run, difference, table

from nsa_lab.runs.history import History, compute_step_time

SCRATCH = "long_64k_lean.window.s0"
BASELINE = "long_64k_whole.dense.s0"
CONTROL = "convert_own.continued.s0"
ARMS = ("two_heads", "stage_1", "low_rate", "continued")
# By seed: NSA from scratch, the dense baseline that was converted, and the two runs from its weights.
SEEDS = {
    seed: {
        "scratch": f"long_64k_lean_seeds.window.s{seed}" if seed else SCRATCH,
        "dense": f"convert_own.dense.s{seed}" if seed else BASELINE,
        "two_heads": f"convert_own.two_heads.s{seed}",
        "continued": f"convert_own.continued.s{seed}",
    }
    for seed in range(3)
}
# Which of two runs minus which, in the tables over seeds.
DIFFERENCES = (("two_heads", "scratch"), ("continued", "scratch"), ("dense", "scratch"), ("two_heads", "continued"))
FIRST_RANGE = 4096
LENGTHS = (4096, 65536)
WHOLE = (
    "long_64k_whole.window.s0",
    "long_64k_whole.dense.s0",
    "long_64k_lean.window.s0",
    "long_64k_lean.dense.s0",
    "convert_own.dense.s0",
)


def main() -> None:
    folder = Path(sys.argv[1])
    arms = {name: f"convert_own.{name}.s0" for name in ARMS} | {"its dense baseline, before": BASELINE}
    runs = {name: Run(find_run(folder, run)) for name, run in arms.items()}
    scratch, control = Run(find_run(folder, SCRATCH)), Run(find_run(folder, CONTROL))
    ranges = [(k, a, b) for k, (a, b) in enumerate(scratch.texts["long"]["octaves"]) if a >= FIRST_RANGE]

    for title, other in (("NSA from scratch", scratch), ("`continued`", control)):
        print(f"## Bits per byte minus {title}: `long` by position\n")
        rows = [
            [label(name), *(difference(run, other, "long", k) for k, _, _ in ranges), difference(run, other, "long")]
            for name, run in runs.items()
            if run.texts and name != ("continued" if other is control else None)
        ]
        table(["", *(f"{a:,} to {b - 1:,}" for _, a, b in ranges), "all"], rows)
        print(f"## Bits per byte minus {title}: texts\n")
        rows = [
            [label(name), f"{run.validation:.4f}", *(difference(run, other, text) for text in TEXTS)]
            for name, run in runs.items()
        ]
        table(["", "own validation", *(f"`{text}`" for text in TEXTS)], rows)

    print("## Right answers\n")
    rows = [
        [label(name), *(describe_count(*run.count(task, length)) for length in LENGTHS for task in TASKS)]
        for name, run in [*runs.items(), ("NSA from scratch", scratch)]
    ]
    table(["", *(f"{task}, {length:,}" for length in LENGTHS for task in TASKS)], rows)

    print_seeds(folder, ranges)

    print("## Seconds of optimizer steps, seconds from the first event to the last, thousand bytes per second by stage\n")
    rows = []
    for name in WHOLE:
        path = find_run(folder, name)
        events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
        seconds = events[-1]["t"] - events[0]["t"]
        own = Run(path).validation
        rows.append(
            [
                f"`{name}`",
                f"{compute_step_time(History.read(path)):.1f}",
                f"{seconds:.1f}",
                *read_throughput(path),
                f"{own:.4f}",
            ]
        )
    table(["run", "steps", "whole record", "2,048", "8,192", "65,536", "own validation"], rows)


def print_seeds(folder: Path, ranges: list[tuple[int, int, int]]) -> None:
    """Print the tables over three seeds: losses by position and text, and right answers."""
    by_seed = {seed: {arm: Run(find_run(folder, name)) for arm, name in arms.items()} for seed, arms in SEEDS.items()}
    places = [*(("long", k, f"`long`, {a:,} to {b - 1:,}") for k, a, b in ranges), *((t, None, f"`{t}`") for t in TEXTS)]
    for arm, other in DIFFERENCES:
        print(f"## Bits per byte, {arm} minus {other}\n")
        rows = []
        for text, position, place in places:
            columns = [(arms[arm], arms[other]) for arms in by_seed.values()]
            mean = average([mean_difference(*pair, text, position) for pair in columns]).removesuffix(", 3 seeds")
            rows.append([place, *(difference(*pair, text, position) for pair in columns), mean])
        table(["", *(f"seed {seed}" for seed in SEEDS), "mean"], rows)
    print("## Right answers by seed\n")
    rows = [
        [f"`{arm}`", f"{seed}", *(describe_count(*run.count(task, length)) for length in LENGTHS for task in TASKS)]
        for seed, arms in by_seed.items()
        for arm, run in arms.items()
    ]
    table(["", "seed", *(f"{task}, {length:,}" for length in LENGTHS for task in TASKS)], rows)


def find_run(folder: Path, name: str) -> Path:
    """The newest run of a name."""
    return max(folder.glob(f"{name}-*"))


def label(name: str) -> str:
    return f"`{name}`" if name in ARMS else name


def describe_count(right: int, n: int) -> str:
    return f"{right} of {n}"


if __name__ == "__main__":
    main()
