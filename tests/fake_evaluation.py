"""Evaluated fake runs for tests: records of `fake_run` with evaluations of random numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fake_run import Event, make_config, write_run

from nsa_lab.runs.evaluation import write_evaluation

POSITION_RANGES = [[0, 256], [256, 4096], [4096, 8192], [8192, 16384], [16384, 30000]]
WINDOWS, DEPTHS = 23, (0.0, 0.3, 0.9)


def make_text_loss(rng: np.random.Generator, **changes: Any) -> dict[str, Any]:
    """Return the record of a text loss with random losses."""
    rows = [
        [int(tokens), float(loss)] for tokens, loss in zip(rng.integers(50, 300, 7), rng.normal(1, 0.1, 7), strict=True)
    ]
    rows = [[tokens, loss] for tokens, (_, loss) in zip((300, 300, 299, 300, 280, 300, 41), rows, strict=True)]
    return {
        "identity": "0123456789abcdef",
        "documents": 4,
        "tokens": sum(tokens for tokens, _ in rows),
        "length": 30000,
        "loss": sum(tokens * loss for tokens, loss in rows) / sum(tokens for tokens, _ in rows),
        "rows": rows,
        "octaves": POSITION_RANGES,
        "windows": rng.normal(1, 0.1, (WINDOWS, len(POSITION_RANGES))).tolist(),
        "window_documents": [window // 4 for window in range(WINDOWS)],
        **changes,
    }


def make_evaluation(number: int, attention: str = "nsa", step: int = 200, **changes: Any) -> dict[str, Any]:
    """Return an evaluation with random numbers; `number` is the seed."""
    rng = np.random.default_rng(number)
    cells = [
        {"task": task, "length": length, "depth": depth, "sequences": 7, "answers": 7 * questions}
        | {"right": int(rng.integers(8)), "written": 1, "written_right": int(rng.integers(2))}
        for task, questions in (("needle", 1), ("multi_query", 4))
        for length in (260, 4096)
        for depth in DEPTHS
    ]
    octaves = [
        {"first": first, "last": last, "error": 0.1, "windows": rng.normal(1, 0.1, 5).tolist()}
        for first, last in POSITION_RANGES[:2]
    ]
    correct = [rng.integers(2, size=4).tolist() for _ in range(2)]
    effects = [
        {"name": name, "accuracy": sum(right) / 4, "d_loss": float(rng.normal()), "right": right}
        for name, right in zip(("chosen", "random"), correct, strict=True)
    ]
    part = {"length": 4096, "sequences": 4, "depths": [0.0, 0.2, 0.5, 0.9], "why_not": None, "interventions": effects}
    return {
        "v": 1,
        "run": "fake",
        "step": step,
        "seed": 0,
        "data_identity": "d" * 64,
        "recall": {"value_length": 7},
        "code": {"source": "abc"},
        "dtype": "bfloat16",
        "device": "cpu",
        "attention": attention,
        "retrieval": cells,
        "not_asked": [{"task": "multi_key", "length": 260, "why": "too short"}],
        "positions": {
            "length": 4096,
            "windows": 5,
            "octaves": [{**o, "loss": float(np.mean(o["windows"]))} for o in octaves],
        },
        "texts": {"long": make_text_loss(rng)},
        "selection": [] if attention == "dense" else [part],
        **changes,
    }


def make_run_factory(outputs: Path) -> Callable[..., Path]:
    """Return a function make(name, seed, evaluate, **config) that writes a run with its own random evaluation.

    `evaluate` changes the evaluation in place; None: the run has no evaluation.
    """
    count = itertools.count()

    def make(
        name: str, seed: int, evaluate: Callable[[dict[str, Any]], Any] | None = lambda evaluation: None, **config: Any
    ) -> Path:
        number = next(count)

        def spoil(events: list[Event]) -> None:
            for event in events:
                if event["kind"] == "step":
                    event["dt_s"] = 0.5 + number / 100

        settings = make_config(train__seed=seed, **config).model_copy(update={"name": name})
        run_dir = write_run(outputs, settings, spoil, name=f"{name}-{number}")
        if evaluate:
            evaluation = make_evaluation(number, settings.model.attention, run=run_dir.name)
            evaluate(evaluation)
            write_evaluation(run_dir, evaluation)
        return run_dir

    return make
