"""Print the tables of part B of convert.md, stages 1 and 2, from run directories.

    python docs/science/conversion_seeds.py FOLDER NAME [REFERENCE]

FOLDER holds runs NAME.s0, NAME.s1, ... with conversion.json (`nsa-lab evaluate --blocks 24 --blocks 40`). REFERENCE: dense
(stage 1) or control (stage 2).
"""

import json
import math
import statistics
import sys
from pathlib import Path

from indexer_forms import BLOCKS, compare, describe_mass, signed
from learning_rates_and_parts import T, table

FIRST_POSITION = 512
OTHERS = ("oracle", "mean_key", "nearest")
# A range in which the window loses less than this does not test the selection.
MIN_WINDOW_LOSS = 0.05


class Run:
    """A conversion run: its evaluation by text, and its duration."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.seed = int(folder.name.split(".s")[1].split("-")[0])
        record = json.loads((folder / "conversion.json").read_text())
        self.texts, self.step, self.dtype = record["texts"], record["step"], record["dtype"]
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        saves = [event["t"] for event in events if event["kind"] == "checkpoint"]
        self.seconds = saves[-1] - events[0]["t"] if saves else math.nan
        steps = [event for event in events if event["kind"] == "step"]
        self.tokens, self.tokens_per_s = steps[-1]["tokens"], statistics.median(e["tokens_per_s"] for e in steps[1:])

    def losses(self, text: str, attention: str, blocks: int | None, position: int) -> list[float]:
        """Loss of each window in one position range, nats per token."""
        (row,) = (r for r in self.texts[text]["losses"] if (r["attention"], r["blocks"]) == (attention, blocks))
        return [window[position] for window in row["windows"]]


def main() -> None:
    folder, name, reference = Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else "dense"
    paths = sorted(path.parent for path in folder.glob(f"{name}.s*/conversion.json"))
    runs = sorted((Run(path) for path in paths), key=lambda run: run.seed)
    print("## Runs\n")
    rows = [
        [f"`{run.name}`", f"{run.seed}", f"{run.tokens / 1e6:.1f}", f"{run.tokens_per_s:,.0f}", f"{run.seconds:.0f}"]
        for run in runs
    ]
    table(["run", "seed", "M tokens", "tokens/s, median", "s, first event to last checkpoint"], rows)

    for text, result in runs[0].texts.items():
        assert len({run.texts[text]["identity"] for run in runs}) == 1, "other windows"
        spans = [(k, f"{a:,} to {b - 1:,}") for k, (a, b) in enumerate(result["ranges"]) if a >= FIRST_POSITION]
        n_windows = len(runs[0].losses(text, "dense", None, 0))
        print(f"## {text}: selected minus {reference}, nats per token, {n_windows} windows\n")
        rows = []
        for blocks in BLOCKS:
            by_seed = [
                [(run.losses(text, "selected", blocks, k), run.losses(text, reference, None, k)) for k, _ in spans]
                for run in runs
            ]
            rows += [
                [f"{blocks}", f"{run.seed}", *(compare(*pair) for pair in pairs)]
                for run, pairs in zip(runs, by_seed, strict=True)
            ]
            rows.append([f"{blocks}", "mean", *(average_seeds(column) for column in zip(*by_seed, strict=True))])
        rows.append(["window", "–", *(compare(*window_pair(runs[0], text, reference, k)) for k, _ in spans)])
        table(["blocks", "seed", *(span for _, span in spans)], rows)

        weak = [span for k, span in spans if mean_gap(*window_pair(runs[0], text, reference, k)) < MIN_WINDOW_LOSS]
        print(f"the window loses less than {MIN_WINDOW_LOSS}: {', '.join(weak) or 'nowhere'}\n")

        last, last_span = spans[-1]
        print(f"## {text}: selected minus other blocks of the same run, {last_span}\n")
        rows = [
            [
                f"{blocks}",
                f"{run.seed}",
                *(compare(run.losses(text, "selected", blocks, last), run.losses(text, o, blocks, last)) for o in OTHERS),
            ]
            for blocks in BLOCKS
            for run in runs
        ]
        table(["blocks", "seed", *OTHERS], rows)

        print(f"## {text}: attention mass in the selected blocks, share of the oracle's: mean over layers, lowest layer\n")
        rows = []
        for run in runs:
            fractions = {mass["blocks"]: mass["fractions"] for mass in run.texts[text]["mass"]}
            cells = [
                describe_mass(fractions[blocks][key]) for blocks in BLOCKS for key in ("chosen", "chosen_free", "nearest")
            ]
            rows.append([f"{run.seed}", *cells])
        table(["seed", *(f"{blocks}, {which}" for blocks in BLOCKS for which in ("all", "free", "nearest"))], rows)


def window_pair(run: Run, text: str, reference: str, position: int) -> tuple[list[float], list[float]]:
    """Losses of the blocks that are always selected, and of the reference."""
    (blocks,) = (row["blocks"] for row in run.texts[text]["losses"] if row["attention"] == "window")
    return run.losses(text, "window", blocks, position), run.losses(text, reference, None, position)


def mean_gap(losses: list[float], baseline: list[float]) -> float:
    return statistics.mean(losses) - statistics.mean(baseline)


def average_seeds(pairs: tuple[tuple[list[float], list[float]], ...]) -> str:
    """Mean over seeds of the mean difference, with its 95% interval over seeds."""
    means = [mean_gap(*pair) for pair in pairs]
    if len(means) == 1:
        return signed(means[0])
    half = T[len(means) - 2] * statistics.stdev(means) / math.sqrt(len(means))
    return f"{signed(statistics.mean(means))} [{signed(statistics.mean(means) - half)}, {signed(statistics.mean(means) + half)}]"


if __name__ == "__main__":
    main()
