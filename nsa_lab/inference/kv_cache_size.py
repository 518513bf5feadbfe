"""Size of a KV cache, bytes read per decode step, and number of sequences that fit, computed from a configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from nsa_lab.attention import geometry
from nsa_lab.config import ConfigError, ModelConfig, NSAConfig
from nsa_lab.runs.summary import format_size

# Maximum tokens of a step after prefill. Rings have this many slots in addition to those that queries read.
MAX_STEP_TOKENS = 256
DEFAULT_LENGTHS = (8192, 65_536, 131_072)
BF16_BYTES, TOKEN_ID_BYTES = 2, 8  # bytes per bf16 element and per token id


def count_window_slots(nsa: NSAConfig) -> int:
    """Return the slots of the ring of window keys: a window, and `MAX_STEP_TOKENS` new tokens."""
    return geometry.ring_slots(MAX_STEP_TOKENS, nsa)


def count_raw_slots(nsa: NSAConfig) -> int:
    """Return the slots of the ring of raw tokens that are not compressed yet."""
    return nsa.l - 1 + MAX_STEP_TOKENS


def count_previous_key_slots() -> int:
    """Return the slots of the ring of keys before the short convolution, which needs the previous token."""
    return MAX_STEP_TOKENS + 1


def count_ngram_slots(max_ngram: int) -> int:
    """Return the slots of the ring of the latest token ids, which n-grams need."""
    return max_ngram - 1 + MAX_STEP_TOKENS


def compute_sequence_bytes(config: ModelConfig, capacity: int, itemsize: int) -> int:
    """Return the bytes that a `Cache` allocates per sequence of `capacity` tokens, with `itemsize` bytes per element."""
    rows = capacity * _count_kv_elements(config) + _count_previous_key_elements(config)
    if config.attention == "nsa":
        rows += (count_window_slots(config.nsa) + _count_compressed_rows(capacity, config.nsa)) * _count_kv_elements(config)
        if config.has_indexer:
            rows += _count_compressed_rows(capacity, config.selection_nsa) * config.n_kv_groups * config.index_width
    tokens = count_ngram_slots(config.ngrams) if config.ngrams else 0
    return config.n_layers * rows * itemsize + tokens * TOKEN_ID_BYTES


def compute_token_bytes(config: ModelConfig, itemsize: int) -> float:
    """Return the bytes of a `Cache` per additional token, including 1/d of a compressed block."""
    per_token = float(_count_kv_elements(config))
    if config.attention == "nsa":
        per_token += _count_kv_elements(config) / config.nsa.d
        per_token += config.n_kv_groups * config.index_width / config.selection_nsa.d if config.has_indexer else 0
    return config.n_layers * per_token * itemsize


def compute_read_bytes(config: ModelConfig, length: int, itemsize: int) -> int:
    """Return the bytes of keys and values that the last of `length` tokens reads, summed over layers."""
    if config.attention == "dense":
        return config.n_layers * length * _count_kv_elements(config) * itemsize
    n_elements = sum(geometry.decode_reads(length, config.nsa).values()) * _count_kv_elements(config)
    if config.has_indexer:
        n_elements += geometry.num_compressed(length, config.selection_nsa) * config.n_kv_groups * config.index_width
    return config.n_layers * n_elements * itemsize


def check_cache_fits(config: ModelConfig, capacity: int, batch: int, device: torch.device, itemsize: int) -> None:
    """Raise ConfigError unless a `Cache` of this size fits in the memory of `device`."""
    if batch < 1 or capacity < 1:
        raise ConfigError(f"a cache of {batch} sequences of {capacity} tokens: expected at least 1 of each")
    sequence_bytes, memory_bytes = compute_sequence_bytes(config, capacity, itemsize), get_free_bytes(device)
    if batch * sequence_bytes > memory_bytes:
        n_fit = memory_bytes // sequence_bytes
        remedy = f"use at most {n_fit} sequences" if n_fit else "use fewer tokens"
        raise ConfigError(
            f"a cache of {batch} sequences of {capacity} tokens needs {format_size(batch * sequence_bytes)}, and "
            f"{device} has {format_size(memory_bytes)}; {n_fit} would fit: {remedy}"
        )


def get_free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, or the total memory of this machine."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def format_decoding_estimate(
    config: ModelConfig, n_parameters: int, memory_bytes: int, lengths: Sequence[int] = DEFAULT_LENGTHS
) -> str:
    """Return a table of the memory that decoding in bf16 needs, one line per length, for a device of `memory_bytes`."""
    lines = [
        f"decoding in bf16, with {format_size(memory_bytes)} of memory, including "
        f"{format_size(BF16_BYTES * n_parameters)} of weights",
        f"  {'tokens':>9}  {'per sequence':>13}  {'sequences':>11}  {'read per token':>14}",
    ]
    for length in lengths:
        sequence_bytes = compute_sequence_bytes(config, length, BF16_BYTES)
        n_fit = max(memory_bytes - BF16_BYTES * n_parameters, 0) // sequence_bytes
        read_size = format_size(compute_read_bytes(config, length, BF16_BYTES))
        lines.append(f"  {length:>9,}  {format_size(sequence_bytes):>13}  {n_fit:>11,}  {read_size:>14}")
    lines.append(f"  each token of a sequence uses {compute_token_bytes(config, BF16_BYTES):,.0f} bytes")
    return "\n".join(lines)


def _count_kv_elements(config: ModelConfig) -> int:
    """Return the elements of a key and a value, summed over groups."""
    return config.n_kv_groups * (config.d_k + config.d_v)


def _count_previous_key_elements(config: ModelConfig) -> int:
    """Return the elements of the keys before the short convolution, in all branches and the indexer; 0 without it."""
    widths = (3 if config.attention == "nsa" else 1) * config.d_k + config.has_indexer * config.index_width
    return count_previous_key_slots() * config.n_kv_groups * widths if config.matching_heads else 0


def _count_compressed_rows(capacity: int, nsa: NSAConfig) -> int:
    return geometry.num_compressed(capacity, nsa) + count_raw_slots(nsa)
