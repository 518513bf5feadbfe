"""Size of a KV cache, bytes read per decode step, and number of sequences that fit, computed from a configuration."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from nsa_lab.attention import geometry
from nsa_lab.attention.key_storage import count_row_bytes
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


def count_ring_slots(nsa: NSAConfig, branches: Sequence[str]) -> int | None:
    """Return the slots of the ring of keys and values that `branches` share; None if all tokens are stored."""
    if "sel" in branches or "dense" in branches:
        return None
    needed = {"cmp": count_raw_slots(nsa), "win": count_window_slots(nsa)}
    return max(needed[branch] for branch in branches)


def compute_sequence_bytes(config: ModelConfig, capacity: int, itemsize: int) -> int:
    """Return the bytes that a `Cache` allocates per sequence of `capacity` tokens, with `itemsize` bytes per element."""
    c = config
    slots = (count_ring_slots(c.nsa, branches) for branches in c.kv_sets)
    n_rows = sum(capacity if n is None else n for n in slots) + _count_compressed(c, capacity)
    keys_and_values = c.n_layers * n_rows * _count_kv_elements(c) * itemsize
    tokens = count_ngram_slots(c.ngrams) if c.ngrams else 0
    selection = geometry.num_compressed(capacity, c.selection_nsa) * _count_selection_bytes(c, itemsize)
    rings = _count_previous_key_elements(c) * itemsize + tokens * TOKEN_ID_BYTES
    if c.has_indexer:
        rings += c.n_scoring_layers * count_raw_slots(c.selection_nsa) * c.index_groups * c.index_width * itemsize
    return keys_and_values + selection + rings


def compute_token_bytes(config: ModelConfig, itemsize: int) -> float:
    """Return the bytes of a `Cache` per additional token, including its shares of compressed blocks."""
    c = config
    n_rows = float(sum(count_ring_slots(c.nsa, branches) is None for branches in c.kv_sets))
    n_rows += 1 / c.nsa.d if c.attention == "nsa" and "cmp" in c.branches else 0
    per_token = c.n_layers * n_rows * _count_kv_elements(c) * itemsize
    return per_token + _count_selection_bytes(c, itemsize) / c.selection_nsa.d


def compute_read_bytes(config: ModelConfig, length: int, itemsize: int) -> int:
    """Return the bytes of keys and values that the last of `length` tokens reads, summed over branches and layers.

    A token that two branches read counts twice, also if they share its key and value.
    """
    c, reads = config, geometry.decode_reads(length, config.nsa)
    n_rows = length if c.attention == "dense" else sum(reads[branch] for branch in c.branches)
    selection = geometry.num_compressed(length, c.selection_nsa) * _count_selection_bytes(c, itemsize)
    return c.n_layers * n_rows * _count_kv_elements(c) * itemsize + selection


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
    """Return the elements of the keys before the short convolution, in all layers and indexers; 0 without it."""
    c = config
    widths = c.n_layers * len(c.kv_sets) * c.n_kv_groups * c.d_k
    widths += c.n_scoring_layers * c.index_groups * c.index_width if c.has_indexer else 0
    return count_previous_key_slots() * widths if c.matching_heads else 0


def _count_compressed(config: ModelConfig, capacity: int) -> int:
    """Return the number of blocks that the compressed branch caches for `capacity` tokens; 0 without it."""
    has_compression = config.attention == "nsa" and "cmp" in config.branches
    return geometry.num_compressed(capacity, config.nsa) if has_compression else 0


def _count_selection_bytes(config: ModelConfig, itemsize: int) -> int:
    """Return the bytes of one key that only selects blocks, of an indexer or a mean key, summed over groups and layers."""
    c = config
    if c.has_indexer:
        return c.n_scoring_layers * c.index_groups * count_row_bytes(c.indexer_dtype, c.index_width, itemsize)
    return c.n_scoring_layers * c.n_kv_groups * c.d_k * itemsize if c.scores == "mean_key" else 0
