"""The runs of tiny_recall.md: every row of its table, on a CPU, one thread. `python docs/science/tiny_recall.py --help`."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from nsa_lab.evaluate import measure_selection_quality, run_ablations
from nsa_lab.evaluate.tiny_recall import EVAL_STREAM, TINY_NSA, TinyRecall, train_tiny_model, build_tiny_model

START = {"rotary_share": 0.5, "matching_heads": 1}
TAUGHT = {**START, "selection_loss": 0.2}
ROWS: dict[str, dict[str, Any]] = {
    "dense": {"attention": "dense"},
    "nsa_avg": {},
    "nsa_linear": {"nsa": TINY_NSA.model_copy(update={"phi": "linear"})},
    "nsa_half": {"rotary_share": 0.5},
    "nsa_start": {"matching_heads": 1},
    "nsa_taught_001": {"selection_loss": 0.01},
    "nsa_taught_005": {"selection_loss": 0.05},
    "nsa_taught_02": {"selection_loss": 0.2},
    "dense_start_half": {"attention": "dense", **START},
    "nsa_start_half": START,
    "nsa_recipe_001": {**START, "selection_loss": 0.01},
    "nsa_recipe_005": {**START, "selection_loss": 0.05},
    "nsa_recipe_02": TAUGHT,
    "nsa_recipe_1": {**START, "selection_loss": 1.0},
    # Matching heads had plainly shifted keys until commit 57b34fd; the rows above with them are of that code, these of today's.
    "dense_start_conv": {"attention": "dense", **START},
    "nsa_start_conv": START,
    # An indexer had a width, and the compressed branch's blocks, of 8 tokens every 4, until 23 November: nsa_indexer, 8 wide,
    # and nsa_indexer_wide, 16, plain means (commit 5494a09); nsa_indexer_pool and nsa_indexer_pool_wide (commit 14f78a2).
    "nsa_indexer_4": {**TAUGHT, "indexer_block": 4},
    "nsa_indexer_2": {**TAUGHT, "indexer_block": 2},
    "nsa_indexer_1": {**TAUGHT, "indexer_block": 1},
    "nsa_indexer_1_half": {**TAUGHT, "indexer_block": 1, "indexer_width": 8},
    "nsa_indexer_1_quarter": {**TAUGHT, "indexer_block": 1, "indexer_width": 4},
    "nsa_recipe_02_linear": {**TAUGHT, "nsa": TINY_NSA.model_copy(update={"phi": "linear"})},
    "nsa_recipe_02_mlp": {**TAUGHT, "nsa": TINY_NSA.model_copy(update={"phi": "mlp"})},
    "nsa_recipe_02_l4": {**TAUGHT, "nsa": TINY_NSA.model_copy(update={"l": 4, "d": 2})},
}


def run(name: str, seed: int, steps: int) -> dict[str, Any]:
    """Train one row and ask it; a record."""
    task = TinyRecall()
    model = build_tiny_model(task, seed=seed, **ROWS[name])
    began, curve = time.process_time(), []
    for point in train_tiny_model(model, task, steps=steps, seed=seed):
        curve.append(asdict(point))
        print(f"{name} seed {seed} step {point.step}: {point.accuracy:.3f}, {point.loss:.3f} nats", flush=True)
    record = {
        "name": name,
        "seed": seed,
        "model": model.config.model_dump(),
        "task": asdict(task),
        "steps": steps,
        "parameters": model.parameter_count(),
        "cpu_s": round(time.process_time() - began, 1),
        "curve": curve,
    }
    if model.config.attention == "nsa":
        tokens, places = task.make_batch(1, 256, seed, EVAL_STREAM)
        effects = run_ablations(model, tokens, places[:, -task.n_far :], seed=seed, batch_size=64)
        record["interventions"] = {effect.name: effect.accuracy for effect in effects}
        record["choice_quality"] = measure_selection_quality(model, tokens, seed)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "records" / "tiny_recall.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    records = json.loads(options.out.read_text()) if options.out.is_file() else []
    for seed in options.seeds:
        for name in options.rows:
            if not any(record["name"] == name and record["seed"] == seed for record in records):
                records.append(run(name, seed, options.steps))
                options.out.write_text(json.dumps(records) + "\n")


if __name__ == "__main__":
    main()
