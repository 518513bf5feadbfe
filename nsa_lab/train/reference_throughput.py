"""Speeds that were measured once and ship with the package: what a plan reckons with where nothing else is known.

`measured.json` is taken from a record of `nsa-lab bench train`; it says of which device, when, and at which shapes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nsa_lab.config import ModelConfig, RunConfig

DATA_FILE = Path(__file__).with_name("measured.json")


def load_reference_throughput() -> dict[str, Any]:
    """Device, date, model, and per shape the tokens per second and the shares of a step, of NSA and of its dense twin."""
    return json.loads(DATA_FILE.read_text(encoding="utf-8"))


def find_reference_speed(config: RunConfig) -> tuple[float, str] | None:
    """Tokens per second that were measured for this very model and shape, and on which GPU; None for any other."""
    record, train, model = load_reference_throughput(), config.train, config.model
    # Settings that are younger than the record were off when it was made, as they are by default.
    if model.model_copy(update={"attention": "nsa"}) != ModelConfig.model_validate(record["model"]):
        return None
    for row in record["rows"]:
        measured = row[model.attention]
        same = all(
            (row["seq_len"], row["micro_batch"], measured["cuda_graph"])
            == (s.seq_len, s.sequences_per_forward, config.uses_cuda_graph(s))
            for s in train.plan
        )
        if same and config.runtime.compile:
            return measured["tokens_per_s"], record["device"]
    return None
