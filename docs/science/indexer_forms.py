"""Print the tables of convert.md from run directories.

    python docs/science/indexer_forms.py FOLDER

FOLDER holds the runs of the sweep convert_smollm2 (`tools/records.py unpack --to FOLDER`). Of several runs of a form, the
newest is used; an older one that was evaluated is compared with it.
"""

import json
import math
import statistics
import sys
from pathlib import Path

from learning_rates_and_parts import T, table

from nsa_lab.attention.key_storage import count_row_bytes
from nsa_lab.config import ModelConfig, RunConfig

FORMS = (
    "base", "two_heads", "four_heads", "half_width", "max_heads", "max_block", "shared_key", "fp8_keys", "two_heads_fp8",
    "rate_3", "queries_256",
)  # fmt: skip
TEXT = "validation"
BLOCKS = (40, 24)
OTHERS = ("oracle", "mean_key", "nearest")
# Up to here, all blocks are selected with 24 and with 40.
FIRST_RANGE = 1024
BF16_BYTES = 2
# The rule of part B: the fewest bytes of index keys among the forms within this of the lowest loss in the last range.
TOLERANCE = 0.002


class Run:
    """A run of a form: its configuration, evaluation, and comparisons with dense attention during training."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.model = RunConfig.from_yaml(folder / "config.yaml").model
        result = json.loads((folder / "conversion.json").read_text())["texts"][TEXT]
        self.identity, self.ranges = result["identity"], result["ranges"]
        self.windows = {(row["attention"], row["blocks"]): row["windows"] for row in result["losses"]}
        self.mass = {mass["blocks"]: mass["fractions"] for mass in result["mass"]}
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        self.course = [event for event in events if event["kind"] == "conversion"]

    def losses(self, attention: str, blocks: int | None, position: int) -> list[float]:
        """Loss of each window in one position range, nats per token."""
        return [window[position] for window in self.windows[attention, blocks]]


def main() -> None:
    folder = Path(sys.argv[1])
    found = {form: find_runs(folder, form) for form in FORMS}
    runs = {form: evaluated[-1] for form, evaluated in found.items() if evaluated}
    first = next(iter(runs.values()))
    dense = [first.losses("dense", None, k) for k in range(len(first.ranges))]
    for run in runs.values():
        assert run.identity == first.identity
        assert all(run.losses("dense", None, k) == losses for k, losses in enumerate(dense)), "other dense losses"
    spans = [(k, f"{a:,} to {b - 1:,}") for k, (a, b) in enumerate(first.ranges) if a >= FIRST_RANGE]
    last, last_name = spans[-1]
    print("not run or not evaluated: " + ", ".join(form for form in FORMS if form not in runs) + "\n")

    print("## Nats per token minus dense attention\n")
    rows = [["dense", "all", *(f"{statistics.mean(dense[k]):.4f}" for k, _ in spans)]]
    for blocks in BLOCKS:
        shown = [(f"`{form}`", run, "selected") for form, run in runs.items()] + [(name, first, name) for name in OTHERS]
        rows += [
            [name, f"{blocks}", *(compare(run.losses(attention, blocks, k), dense[k]) for k, _ in spans)]
            for name, run, attention in shown
        ]
    ((_, forced),) = [key for key in first.windows if key[0] == "window"]
    rows.append(["window", f"{forced}", *(compare(first.losses("window", forced, k), dense[k]) for k, _ in spans)])
    table(["attention", "blocks", *(name for _, name in spans)], rows)

    print(f"## Selected minus other blocks of the same run, {last_name}\n")
    rows = [
        [
            f"`{form}`",
            f"{blocks}",
            *(compare(run.losses("selected", blocks, last), run.losses(other, blocks, last)) for other in OTHERS),
        ]
        for blocks in BLOCKS
        for form, run in runs.items()
    ]
    table(["form", "blocks", *OTHERS], rows)

    most = BLOCKS[0]
    print(f"## Differences between forms, {most} blocks, {last_name}, and the rule of part B\n")
    means = {form: statistics.mean(run.losses("selected", most, last)) for form, run in runs.items()}
    best = min(means, key=lambda form: means[form])
    near = [form for form in runs if means[form] <= means[best] + TOLERANCE]
    fewest = min(count_index_bytes(runs[form].model) for form in near)
    rows = [
        [
            f"`{form}`",
            f"{count_index_bytes(run.model)}",
            "0" if form == best else compare(run.losses("selected", most, last), runs[best].losses("selected", most, last)),
        ]
        for form, run in runs.items()
    ]
    table(["form", "bytes of index keys per token and layer", f"minus `{best}`"], rows)
    print("chosen so far: " + ", ".join(form for form in near if count_index_bytes(runs[form].model) == fewest) + "\n")

    print("## Attention mass in the selected blocks, share of the oracle's: mean over layers, lowest layer\n")
    rows = [
        [f"`{form}`", *(describe_mass(run.mass[blocks][key]) for blocks in BLOCKS for key in ("chosen", "chosen_free"))]
        for form, run in runs.items()
    ] + [
        [
            f"nearest (`{next(iter(runs))}`)",
            *(describe_mass(first.mass[blocks][key]) for blocks in BLOCKS for key in ("nearest", "nearest_free")),
        ]
    ]
    table(["blocks", *(f"{blocks}, {which}" for blocks in BLOCKS for which in ("all", "free"))], rows)

    print("## At the first and the last step: loss over all positions, and mass\n")
    rows = [
        [
            f"`{form}`",
            *(f"{event['loss']['selected']:.4f}" for event in (run.course[0], run.course[-1])),
            *(describe_mass(event["attention_mass"]) for event in (run.course[0], run.course[-1])),
        ]
        for form, run in runs.items()
    ]
    print(" / ".join(f"{name} {loss:.4f}" for name, loss in first.course[0]["loss"].items() if name != "selected") + "\n")
    table(["form", "before", "after", "mass before", "mass after"], rows)

    for form, evaluated in found.items():
        for old in evaluated[:-1]:
            gaps = [
                abs(statistics.mean(old.losses(*row, k)) - statistics.mean(runs[form].losses(*row, k)))
                for row in old.windows
                for k, _ in spans
            ]
            print(f"{old.name} and {runs[form].name}: losses of every row and range within {max(gaps):.5f}\n")


def find_runs(folder: Path, form: str) -> list[Run]:
    """Evaluated runs of a form, the newest last."""
    folders = folder.glob(f"convert_smollm2.{form}.s0-*")
    return [Run(path) for path in sorted(folders) if (path / "conversion.json").exists()]


def count_index_bytes(model: ModelConfig) -> int:
    """Bytes of the index keys of one token and layer."""
    return model.index_groups * count_row_bytes(model.indexer_dtype, model.index_width, BF16_BYTES)


def compare(losses: list[float], baseline: list[float]) -> str:
    """Mean difference with its 95% interval over windows, Student's t."""
    differences = [a - b for a, b in zip(losses, baseline, strict=True)]
    mean, n = statistics.mean(differences), len(differences)
    half = T[n - 2] * statistics.stdev(differences) / math.sqrt(n)
    return f"{signed(mean)} [{signed(mean - half)}, {signed(mean + half)}]"


def signed(value: float) -> str:
    """Four decimals; rounded zeros are positive."""
    return f"{round(value, 4) + 0.0:+.4f}"


def describe_mass(shares: list[float]) -> str:
    return f"{statistics.mean(shares):.4f}, {min(shares):.4f}"


if __name__ == "__main__":
    main()
