"""Shapes of the benchmarks, result rows of the attention benchmark, and records read from files. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pydantic

from nsa_lab.config import MAX_COUNT, MAX_SIZE, ConfigError, ModelConfig, NSAConfig
from nsa_lab.config.errors import shorten
from nsa_lab.runs.atomic_io import parse_json, read_bounded


@dataclass(frozen=True)
class Shape:
    """T tokens, B sequences, H query heads, G groups, head width D, value width V (None: D)."""

    T: int
    B: int
    H: int = 12
    G: int = 2
    D: int = 64
    V: int | None = None

    @property
    def value_width(self) -> int:
        return self.V or self.D

    def with_heads_of(self, model: ModelConfig) -> Shape:
        """Return a shape with the heads, groups and widths of `model`."""
        return Shape(self.T, self.B, model.n_heads, model.n_kv_groups, model.d_k, model.d_v)

    def __str__(self) -> str:
        width = f"{self.D}" if self.value_width == self.D else f"{self.D}/{self.value_width}"
        heads = "" if (self.H, self.G, width) == (12, 2, "64") else f" H{self.H} G{self.G} d{width}"
        return f"{self.T}x{self.B}{heads}"


GPU_SHAPES = (Shape(2048, 8), Shape(8192, 2), Shape(32768, 1), Shape(65536, 1))
CPU_SHAPES = (Shape(96, 1, 6, 2, 32),)
SIZE_LIMITS = f"1 to {MAX_COUNT} tokens; each other number 1 to {MAX_SIZE}"


@dataclass
class AttentionRow:
    """One implementation of one part at one shape. Field names are keys of the record.

    Times are in milliseconds; None: parity failed, or there is no backward pass. `by`: the implementation. `share`: total
    time as a fraction of SDPA flash, `share_fastest`: of the fastest dense attention. `bar`: the target of `share`.
    """

    __pydantic_config__: ClassVar = pydantic.ConfigDict(extra="forbid")  # other keys are those of another benchmark

    shape: str
    part: str
    by: str
    forward_ms: float | None = None
    backward_ms: float | None = None
    peak_mib: float | None = None
    tflops_forward: float | None = None
    tflops_backward: float | None = None
    share: float | None = None
    share_fastest: float | None = None
    bar: float | None = None
    eager_ms: float | None = None
    """Forward and backward without a CUDA graph, only for the whole operator; `eager_share` and `eager_bar` likewise."""
    eager_share: float | None = None
    eager_bar: float | None = None
    parity: dict[str, list[float]] = field(default_factory=dict)
    """{tensor: [error, limit]}"""
    limits: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    """Device limit per pass, if requested: `roofline.add_limits`."""
    note: str = ""

    @property
    def total_ms(self) -> float | None:
        return None if self.forward_ms is None else self.forward_ms + (self.backward_ms or 0.0)


def parse_shape(text: str, model: ModelConfig | None = None) -> Shape:
    """Parse `2048x8` (tokens x sequences), `32768x1xH64xG4xD128` or `32768x1xH64xG4xD192xV128`. Raises ValueError.

    Heads, groups and widths that the text does not name are those of `model`.
    """
    sizes = _parse_sizes(r"(\d+)x(\d+)(?:xH(\d+)xG(\d+)xD(\d+)(?:xV(\d+))?)?", text)
    if sizes is None:
        raise ValueError(
            f"shape {shorten(text)!r}: expected TOKENSxSEQUENCES, e.g. 2048x8, or 32768x1xH64xG4xD128, "
            f"optionally followed by xV128 for another value width; {SIZE_LIMITS}"
        )
    shape = Shape(*sizes)
    if shape.H % shape.G:
        raise ValueError(
            f"shape {shorten(text)!r}: expected H (heads) to be a multiple of G (groups), got {shape.H} and {shape.G}; "
            "change one of them"
        )
    return shape if model is None or len(sizes) > 2 else shape.with_heads_of(model)


def parse_training_shape(text: str) -> tuple[int, int]:
    """Parse `2048x32` (tokens x sequences of a forward pass) to (2048, 32). Raises ValueError."""
    sizes = _parse_sizes(r"(\d+)x(\d+)", text)
    if sizes is None:
        raise ValueError(f"{shorten(text)}: expected tokens x sequences, for example 2048x32; {SIZE_LIMITS}")
    return sizes[0], sizes[1]


def _parse_sizes(pattern: str, text: str) -> list[int] | None:
    """Return the numbers of `text`, tokens first; None if it does not match `pattern` or if a number is out of range."""
    match = re.fullmatch(pattern, text)
    digits = [group for group in match.groups() if group] if match else []
    # Python does not parse an integer of thousands of digits.
    if not digits or max(map(len, digits)) > len(str(MAX_COUNT)):
        return None
    tokens, *sizes = map(int, digits)
    return [tokens, *sizes] if 1 <= tokens <= MAX_COUNT and all(1 <= size <= MAX_SIZE for size in sizes) else None


def parse_shape_label(text: str) -> Shape:
    """Parse `str(shape)`. Raises ValueError."""
    sizes = _parse_sizes(r"(\d+)x(\d+)(?: H(\d+) G(\d+) d(\d+)(?:/(\d+))?)?", text)
    if sizes is None:
        raise ValueError(f"shape {text!r}: expected 2048x8, or 32768x1 H64 G4 d192/128")
    return Shape(*sizes)


def read_record(path: Path) -> dict[str, Any]:
    """Read a record. Raises `ConfigError` for any other file, also one that is not regular or too large."""
    expected = f"{path}: expected a record written by nsa-lab bench --json"
    try:
        record = parse_json(read_bounded(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{expected}, got an unreadable file: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("when"), str):
        raise ConfigError(f"{expected}, got a file without its date (key 'when')")
    return record


class _AttentionRecord(pydantic.BaseModel):
    """The keys of a `bench attention` record that `nsa-lab bench limits` reads."""

    device: str
    dtype: Annotated[str, pydantic.Field(pattern=r"^(torch\.)?(bfloat16|float16|float32|float64)$")]
    nsa: NSAConfig
    model: ModelConfig | None = None
    rates: dict[str, pydantic.PositiveFloat | None] = {}
    rows: list[AttentionRow]


def parse_record(
    record: Mapping[str, Any], flops: float | None = None, bandwidth: float | None = None
) -> tuple[list[AttentionRow], ModelConfig, float, float | None]:
    """Return rows, model, FLOP/s and bytes per second of a `bench attention` record; given rates replace its own.

    The model of a record without a preset has all branches and the recorded NSA settings.

    Raises ConfigError if the FLOP/s are unknown or if the record is damaged or from another benchmark.
    """
    try:
        content = _AttentionRecord.model_validate(record)
        for row in content.rows:
            row.limits.clear()  # of the recorded rates
            parse_shape_label(row.shape)
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise ConfigError(
            "expected a record of `nsa-lab bench attention`, got a damaged one or one of another benchmark; "
            f"measure it again, or correct {key}: {' '.join(problem['msg'].split())}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"expected a record of `nsa-lab bench attention`, got {error}; measure it again") from None
    model = content.model or ModelConfig(nsa=content.nsa)
    flops_per_s = flops or content.rates.get("flops")
    if flops_per_s is None:
        raise ConfigError("the record has no device limits; measure it again with --parts, or give --flops and --bandwidth")
    return content.rows, model, flops_per_s, bandwidth or content.rates.get("bytes")
