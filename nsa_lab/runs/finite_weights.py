"""Find weights that are NaN or infinite, also in a .safetensors file without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from nsa_lab.runs.atomic_io import open_regular

MAX_HEADER_BYTES = 100_000_000  # limit of the format
CHUNK_VALUES = 1 << 22
# Bits of each type as an integer, and its exponent, whose bits are all set in NaN and infinity of either sign.
_EXPONENTS = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}


def describe_nonfinite(name: str, tensor: Any) -> str | None:
    """Return the problem of a torch tensor with NaN or infinite values; None without one."""
    n_nonfinite = int(tensor.isfinite().logical_not().sum())
    return _format_problem(name, n_nonfinite, tensor.numel()) if n_nonfinite else None


def find_nonfinite_weights(path: Path) -> str | None:
    """Return the problem of the first tensor in a .safetensors file with NaN or infinite values; None without one.

    Raises OSError or ValueError for a file that cannot be read.
    """
    with open_regular(path) as file:
        n_header = int.from_bytes(file.read(8), "little")
        if n_header > MAX_HEADER_BYTES:
            raise ValueError(f"expected a header of at most {MAX_HEADER_BYTES:,} bytes, got {n_header:,}")
        header = json.loads(file.read(n_header))
        for name, entry in header.items():
            if not isinstance(entry, dict) or entry.get("dtype") not in _EXPONENTS:
                continue  # metadata, or no float type
            bits, exponent = _EXPONENTS[entry["dtype"]]
            begin, end = entry["data_offsets"]
            n_values, n_nonfinite = (end - begin) // np.dtype(bits).itemsize, 0
            file.seek(8 + n_header + begin)
            for first in range(0, n_values, CHUNK_VALUES):
                values = np.fromfile(file, bits, min(CHUNK_VALUES, n_values - first))
                n_nonfinite += int(np.count_nonzero((values & exponent) == exponent))
            if n_nonfinite:
                return _format_problem(name, n_nonfinite, n_values)
    return None


def _format_problem(name: str, n_nonfinite: int, n_values: int) -> str:
    return f"{name}: {n_nonfinite:,} of {n_values:,} values are NaN or infinite"
