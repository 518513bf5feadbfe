"""Print the tables of lean.md from run directories.

    python docs/science/lean.py FOLDER

FOLDER holds the runs of the sweep long_64k_lean (`tools/records.py unpack --to FOLDER`).
"""

import json
import statistics
import sys
from pathlib import Path

from learning_rates_and_parts import TASKS, TEXTS, Run, difference, number, table

from nsa_lab.config import RunConfig
from nsa_lab.inference.kv_cache_size import compute_read_bytes, compute_sequence_bytes

RECORDS = Path(__file__).parent / "records"
RUNS = (
    "today", "dense", "lean", "window", "window_shared_kv", "group_keys", "one_head", "bf16_keys", "mxfp4_keys", "every_2",
)  # fmt: skip
CHANGED_WEIGHTS = ("fp8", "mxfp4", "mean_keys", "every_2", "every_4")
LENGTH, ELEMENT_BYTES = 65536, 2
STAGES = ((0, 786), (786, 1832), (1832, 2582))


def main() -> None:
    folder = Path(sys.argv[1])
    paths = {name: next(iter(folder.glob(f"long_64k_lean.{name}.s0-*"))) for name in RUNS}
    runs = {name: Run(path) for name, path in paths.items()}
    today, spans = runs["today"], runs["today"].texts["long"]["octaves"]

    print("## Bits per byte minus `today`, and the cache at 65,536 bytes as a share of `dense`\n")
    shares = {name: [f"{share:.3f}" for share in both] for name, both in shares_of_cache(paths).items()}
    rows = [["`today`", *map(number, [today.validation, *(today.bits(t) for t in TEXTS)]), *shares["today"]]]
    rows += [
        [
            f"`{name}`",
            f"{runs[name].validation - today.validation:+.4f}",
            *(difference(runs[name], today, t) for t in TEXTS),
            *shares[name],
        ]
        for name in RUNS[1:]
    ]
    table(["run", "own validation", *(f"`{t}`" for t in TEXTS), "read", "kept"], rows)

    print("## `long` by position, minus `today`\n")
    shown = ("dense", "lean", "window", "window_shared_kv")
    table(
        ["positions", *(f"`{name}`" for name in shown)],
        [
            [f"{first:,} to {last - 1:,}", *(difference(runs[name], today, "long", k) for name in shown)]
            for k, (first, last) in enumerate(spans)
        ],
    )

    print("## Right answers, percent\n")
    columns = [(task, length) for length in (4096, 65536) for task in TASKS]
    head = ["run", *(f"{task}, {length:,}" for task, length in columns)]
    table(head, [[f"`{name}`", *(run.answers(*column) for column in columns)] for name, run in runs.items()])

    print("## Weights of `today`, changed after training\n")
    changed = {name: Changed(evaluation) for name, evaluation in read_changed().items()}
    table(
        ["change", *(f"`{t}`" for t in TEXTS)],
        [[f"`{name}`", *(difference(run, today, t) for t in TEXTS)] for name, run in changed.items()],
    )
    table(head, [[f"`{name}`", *(run.answers(*column) for column in columns)] for name, run in changed.items()])

    print("## Thousand bytes per second, by stage\n")
    table(["run", "2,048", "8,192", "65,536"], [[f"`{n}`", *read_throughput(p)] for n, p in paths.items()])


class Changed(Run):
    """An evaluation of changed weights, without a run."""

    def __init__(self, evaluation: dict) -> None:
        self.texts, self.cells = evaluation["texts"], evaluation["retrieval"]


def read_changed() -> dict[str, dict]:
    evaluations = json.loads((RECORDS / "lean_changed_weights.json").read_text())
    return {name: evaluations[name] for name in CHANGED_WEIGHTS}


def shares_of_cache(paths: dict[str, Path]) -> dict[str, tuple[float, float]]:
    """Bytes read per generated token, and kept per sequence, as shares of those of `dense`, for each run."""
    models = {name: RunConfig.from_yaml(path / "config.yaml").model for name, path in paths.items()}
    count = compute_read_bytes, compute_sequence_bytes
    size = {name: [f(model, LENGTH, ELEMENT_BYTES) for f in count] for name, model in models.items()}
    return {name: (read / size["dense"][0], kept / size["dense"][1]) for name, (read, kept) in size.items()}


def read_throughput(path: Path) -> list[str]:
    """Median throughput of each stage, without its first 50 steps."""
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    steps = [(e["step"], e["tokens_per_s"]) for e in events if e["kind"] == "step" and e.get("tokens_per_s")]
    return [f"{statistics.median(v for n, v in steps if a + 50 < n <= b) / 1000:,.0f}" for a, b in STAGES]


if __name__ == "__main__":
    main()
