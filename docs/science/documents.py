"""The tables of documents.md, from its record: `python docs/science/documents.py`. Nothing is computed anew."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parent / "records/documents.json"
STUDENT_T = 4.303  # two-sided 95 %, two degrees of freedom
SEEDS = (1337, 1, 2)
Run = dict[str, Any]
MEASURES: dict[str, Callable[[Run], float]] = {
    "whole documents of `validation`, each by itself": lambda run: run["whole_documents"]["loss"],
    "400 held-out rows, each document by itself": lambda run: run["alone_and_across"]["alone"],
    "the same rows, each read as one text": lambda run: run["alone_and_across"]["across"],
    "documents of up to 1,024 bytes, by themselves": lambda run: short(run, "alone"),
    "the same, behind others": lambda run: short(run, "across"),
    "first byte of a document, by itself": lambda run: run["alone_and_across"]["first_alone"],
}


def short(run: Run, how: str) -> float:
    held = [part for part in run["alone_and_across"]["by_length"] if part["last"] <= 1024]
    return sum(part["tokens"] * part[how] for part in held) / sum(part["tokens"] for part in held)


def main() -> None:
    runs = {(run["documents"], run["seed"]): run for run in json.loads(RECORD.read_text(encoding="utf-8"))["runs"]}
    print("| bits per byte, seeds 1337 / 1 / 2 | cross | mask | mask - cross, mean and 95 % interval |\n|---|---|---|---|")
    for name, loss in MEASURES.items():
        found = {how: [loss(runs[how, seed]) / math.log(2) for seed in SEEDS] for how in ("cross", "mask")}
        apart = [mask - cross for cross, mask in zip(found["cross"], found["mask"], strict=True)]
        half = STUDENT_T * statistics.stdev(apart) / math.sqrt(len(apart))
        of = {how: " / ".join(f"{x:.3f}" for x in xs) for how, xs in found.items()}
        print(f"| {name} | {of['cross']} | {of['mask']} | {statistics.fmean(apart):+.3f} ± {half:.3f} |")


if __name__ == "__main__":
    main()
