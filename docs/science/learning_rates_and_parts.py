"""Print the tables of learning_rates_and_parts.md from run directories.

    python docs/science/learning_rates_and_parts.py FOLDER [CONTROLS]

FOLDER holds the runs of the sweeps long_64k_rates, long_64k_parts, long_64k_parts_seeds and fast_rates_dense
(`tools/records.py unpack --to FOLDER`); CONTROLS the runs of long_64k at seeds 1 and 2.
"""

import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from nsa_lab.health.comparison import NeedleResult, Proportion, collect_needle_results
from nsa_lab.health.model_runs import ModelRuns, group_runs
from nsa_lab.health.paired_text_loss import WHOLE_DOCUMENTS, RangeDifference, compare_texts

# Quantile 0.975 of Student's t for 1 to 19 degrees of freedom, as in nsa_lab/health/paired.py.
T = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
)
STRETCHES = 20
BIT = math.log(2)
TEXTS = ("heldout", "validation", "long")
TASKS = ("needle", "multi_key", "multi_query")
# The parts that were trained with three seeds, and where their effect on text is judged: a text and its positions.
PARTS = ("no_embedding_norm", "no_ngrams", "rotary_everywhere", "no_matching_heads", "adamw", "no_indexer")
PLACES = (*((text, WHOLE_DOCUMENTS) for text in TEXTS), ("long", "32,768 to 65,535"))


class Run:
    """The record of one run: its last validation in bits per byte, losses of texts, and answers of the retrieval tasks."""

    def __init__(self, folder: Path) -> None:
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        self.validation = [event["bpb"] for event in events if event["kind"] == "eval"][-1]
        whole, part = folder / "evaluation.json", folder / "evaluation.unfinished.json"
        if whole.exists():
            evaluation = json.loads(whole.read_text())
            self.texts, self.cells = evaluation["texts"], evaluation["retrieval"]
        else:
            # The archive of recorded runs has no unfinished evaluations.
            found = json.loads(part.read_text())["found"] if part.exists() else {}
            self.texts = {key.split()[1].rstrip(","): text for key, text in found.items() if key.startswith("text ")}
            self.cells = []

    def bits(self, text: str) -> float | None:
        return self.texts[text]["loss"] / BIT if text in self.texts else None

    def count(self, task: str, length: int) -> tuple[int, int]:
        """Right answers and all answers of a task at a length; 0, 0 if it was not evaluated."""
        cells = [cell for cell in self.cells if (cell["task"], cell["length"]) == (task, length)]
        return sum(cell["right"] for cell in cells), sum(cell["answers"] for cell in cells)

    def answers(self, task: str, length: int) -> str:
        return percent(*self.count(task, length))


def percent(right: int, n: int) -> str:
    low, high = wilson(right, n)
    return f"{100 * right / n:.1f} [{100 * low:.1f}, {100 * high:.1f}]"


def wilson(right: int, n: int) -> tuple[float, float]:
    z = 1.959964
    share, spread = right / n, z * z / n
    half = z * math.sqrt((share * (1 - share) + spread / 4) / n)
    return max(0.0, (share + spread / 2 - half) / (1 + spread)), min(1.0, (share + spread / 2 + half) / (1 + spread))


def pairs(first: Run, second: Run, text: str, position: int | None) -> tuple[list[float], list[float]]:
    """Differences in bits per byte, and weights: of rows of whole documents, or of windows at one position range."""
    a, b = first.texts[text], second.texts[text]
    assert a["identity"] == b["identity"] and a["length"] == b["length"]
    if position is None:
        return [(x[1] - y[1]) / BIT for x, y in zip(a["rows"], b["rows"], strict=True)], [row[0] for row in a["rows"]]
    return [(x[position] - y[position]) / BIT for x, y in zip(a["windows"], b["windows"], strict=True)], [1.0] * len(
        a["windows"]
    )


def difference(first: Run, second: Run, text: str, position: int | None = None) -> str:
    """First minus second with its 95% interval over up to 20 equal stretches of windows."""
    if text not in first.texts or text not in second.texts:
        return "–"
    values, weights = pairs(first, second, text, position)
    count = min(len(values), STRETCHES)
    size, extra = divmod(len(values), count)
    means, start = [], 0
    for k in range(count):
        end = start + size + (k < extra)
        means.append(
            sum(v * w for v, w in zip(values[start:end], weights[start:end], strict=True)) / sum(weights[start:end])
        )
        start = end
    mean = sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
    half = T[count - 2] * statistics.stdev(means) / math.sqrt(count)
    return f"{mean:+.4f} [{mean - half:+.4f}, {mean + half:+.4f}]"


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def table(head: list[str], rows: list[list[str]]) -> None:
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def rates(runs: dict[str, Run], sweep: str, seed: int) -> None:
    rows = []
    for arm in ("nsa", "dense"):
        for rate in ("0007", "0014", "0028"):
            run = runs[f"{sweep}.{arm}_{rate}.s{seed}"]
            rows.append(
                [
                    "NSA" if arm == "nsa" else "dense",
                    f"{int(rate) / 10:.1f}e-3",
                    number(run.validation),
                    *(number(run.bits(t)) for t in TEXTS),
                ]
            )
    table(["arm", "rate", "own validation", *(f"`{text}`" for text in TEXTS)], rows)
    table(
        ["NSA minus dense", *(f"`{text}`" for text in TEXTS)],
        [
            [
                f"both at {int(rate) / 10:.1f}e-3",
                *(difference(runs[f"{sweep}.nsa_{rate}.s{seed}"], runs[f"{sweep}.dense_{rate}.s{seed}"], t) for t in TEXTS),
            ]
            for rate in ("0007", "0014", "0028")
        ],
    )


def three_seeds(folder: Path) -> None:
    """Print the tables of the parts at seeds 0, 1 and 2, compared by `nsa_lab.health` as `nsa-lab compare` does."""
    named = {
        "control": [*folder.glob("long_64k_rates.nsa_0014.s0-*"), *folder.glob("long_64k_parts_seeds.as_it_is.s*")],
        **{part: sorted(folder.glob(f"long_64k_parts*.{part}.s*")) for part in PARTS},
    }
    models = {model.name: model for model in group_runs([], named, print)}
    differences = {part: measure_places(models[part], models["control"]) for part in PARTS}
    print("## Three seeds: minus the control of the same seed, mean and 95% interval over seeds\n")
    places = ["`heldout`", "`validation`", "`long`", "`long`, 32,768 to 65,535"]
    table(
        ["run", *places],
        [["control", *(f"{place.baseline_bits:.4f}" for place in differences[PARTS[0]])]]
        + [[f"`{part}`", *map(format_over_seeds, differences[part])] for part in PARTS],
    )
    print("## Three seeds: per seed 0, 1, 2, and the mean of seeds 1 and 2\n")
    rows = []
    for part in PARTS:
        by_seed = [measure_places(pick(models[part], seed), pick(models["control"], seed)) for seed in (0, 1, 2)]
        rows.append([f"`{part}`"])
        for seeds in zip(*by_seed, strict=True):
            values = [place.difference for place in seeds]
            rows[-1].append(" / ".join(f"{value:+.4f}" for value in values) + f": {statistics.mean(values[1:]):+.4f}")
    table(["run", *places], rows)
    print("## Three seeds: right answers, percent\n")
    for name, get in (
        ("pooled", lambda result: result.every),
        ("per seed", None),
        ("far facts", lambda result: result.far),
    ):
        print(f"{name}:\n")
        table(
            ["run", *(f"{task}, {length:,}" for length in (4096, 65536) for task in TASKS)],
            [[f"`{model.name}`", *format_answers(model, get)] for model in models.values()],
        )


def pick(model: ModelRuns, seed: int) -> ModelRuns:
    return ModelRuns(model.name, {seed: model.runs[seed]})


def measure_places(model: ModelRuns, control: ModelRuns) -> list[RangeDifference]:
    """The differences of a model and the control at `PLACES`."""
    found = {text.text: {place.place: place for place in text.places} for text in compare_texts(model, control, print)}
    return [found[text][place] for text, place in PLACES]


def format_over_seeds(place: RangeDifference) -> str:
    assert place.over_seeds is not None
    return f"{place.difference:+.4f} [{place.over_seeds[0]:+.4f}, {place.over_seeds[1]:+.4f}]"


def format_answers(model: ModelRuns, get: Callable[[NeedleResult], Proportion | None] | None) -> list[str]:
    """Percent of right answers per length and task: by `get` with the Wilson interval, or of every seed."""
    results = {(result.length, result.task): result for result in collect_needle_results(model)}
    cells = []
    for length in (4096, 65536):
        for result in (results[length, task] for task in TASKS):
            shares = [get(result)] if get else result.by_seed.values()
            known = [share for share in shares if share is not None]
            cells.append(" / ".join(f"{100 * share.share:.1f}" for share in known))
            if get:
                cells[-1] += f" [{100 * known[0].low:.1f}, {100 * known[0].high:.1f}]"
    return cells


def main() -> None:
    folder = Path(sys.argv[1])
    sweeps = ("long_64k_rates", "long_64k_parts", "fast_rates_dense")
    runs = {path.name.rsplit("-", 2)[0]: Run(path) for sweep in sweeps for path in sorted(folder.glob(sweep + ".*"))}
    print("## A\n")
    rates(runs, "long_64k_rates", 0)
    control = runs["long_64k_rates.nsa_0014.s0"]
    long = [name for name in runs if name.startswith("long_64k") and name.endswith(".s0")]
    spans = control.texts["long"]["octaves"]
    chosen = [k for k, (first, _) in enumerate(spans) if first in (0, 4096, 32768)]
    table(
        ["positions of `long`", *(f"both at {rate}" for rate in ("0.7e-3", "1.4e-3", "2.8e-3"))],
        [
            [
                f"{first:,} to {last - 1:,}",
                *(
                    difference(runs[f"long_64k_rates.nsa_{rate}.s0"], runs[f"long_64k_rates.dense_{rate}.s0"], "long", k)
                    for rate in ("0007", "0014", "0028")
                ),
            ]
            for k, (first, last) in enumerate(spans)
        ],
    )
    print("## B: minus the control\n")
    names = sorted(name for name in long if "_parts." in name)
    table(
        ["run", "own validation", "`heldout`", "`validation`", "`long`", "`long`, 32,768 to 65,535"],
        [
            [
                "control",
                *map(number, [control.validation, *(control.bits(t) for t in TEXTS)]),
                number(statistics.mean(w[chosen[-1]] for w in control.texts["long"]["windows"]) / BIT),
            ]
        ]
        + [
            [
                f"`{name.split('.')[1]}`",
                f"{runs[name].validation - control.validation:+.4f}",
                *(difference(runs[name], control, t) for t in TEXTS),
                difference(runs[name], control, "long", chosen[-1]),
            ]
            for name in names
        ],
    )
    print("## Right answers, percent\n")
    table(
        ["run", *(f"{task}, {length:,}" for length in (4096, 65536) for task in TASKS)],
        [
            [
                f"`{name.split('.')[1]}`, seed {name[-1]}",
                *(runs[name].answers(task, length) for length in (4096, 65536) for task in TASKS),
            ]
            for name in sorted(runs)
            if runs[name].cells
        ],
    )
    three_seeds(folder)
    print("## C\n")
    rates(runs, "fast_rates_dense", 1337)
    if len(sys.argv) > 2:
        print("## No compressed branch, minus long_64k of the same seed\n")
        rows = []
        for path in sorted(Path(sys.argv[2]).glob("long_64k-*")):
            seed = next(
                line.split()[1] for line in (path / "config.yaml").read_text().splitlines() if line.startswith("  seed:")
            )
            if (name := f"long_64k_parts.no_compressed_branch.s{seed}") in runs:
                other = Run(path)
                rows.append(
                    [
                        seed,
                        f"{runs[name].validation - other.validation:+.4f}",
                        *(difference(runs[name], other, t) for t in TEXTS),
                        difference(runs[name], other, "long", chosen[-1]),
                    ]
                )
        table(["seed", "own validation", *(f"`{t}`" for t in TEXTS), "`long`, 32,768 to 65,535"], rows)


if __name__ == "__main__":
    main()
