"""Reference throughput, measured once and shipped with the package, for estimates without another measurement.

`reference_throughput.json` is a part of a record of `nsa-lab bench train`. It names the device, the date and the shapes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nsa_lab.config import ModelConfig, RunConfig

DATA_FILE = Path(__file__).with_name("reference_throughput.json")


def load_reference_throughput() -> dict[str, Any]:
    """Return device, date and model, and for each shape tokens per second and time shares of NSA and the dense baseline."""
    return json.loads(DATA_FILE.read_text(encoding="utf-8"))


def find_reference_speed(config: RunConfig) -> tuple[float, str] | None:
    """Return (tokens per second, GPU name) measured for this model and shape; None for any other."""
    record, train, model = load_reference_throughput(), config.train, config.model
    # Settings added after the record was made have their default, which is off.
    if model.model_copy(update={"attention": "nsa"}) != ModelConfig.model_validate(record["model"]):
        return None
    for row in record["rows"]:
        measured = row[model.attention]
        is_same_shape = all(
            (row["seq_len"], row["micro_batch"], measured["cuda_graph"])
            == (stage.seq_len, stage.sequences_per_forward, config.uses_cuda_graph(stage))
            for stage in train.plan
        )
        if is_same_shape and config.runtime.compile:
            return measured["tokens_per_s"], record["device"]
    return None
