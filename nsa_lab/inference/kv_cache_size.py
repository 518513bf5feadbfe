"""What a cache takes, what a step reads of it, and how many sequences fit: from a configuration alone."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from nsa_lab.attention import geometry
from nsa_lab.config import ConfigError, ModelConfig, NSAConfig
from nsa_lab.runs.summary import format_size

# Tokens that a step may append to sequences which have begun; rings have room for them beside what is read.
MAX_STEP_TOKENS = 256
DEFAULT_LENGTHS = (8192, 65_536, 131_072)
BF16_BYTES, TOKEN_ID_BYTES = 2, 8  # bytes of a number in bf16, of a token


def count_window_slots(nsa: NSAConfig) -> int:
    """Of the ring that keeps window keys: what the first of `STEP` new tokens sees, and all of them."""
    return geometry.ring_slots(MAX_STEP_TOKENS, nsa)


def count_raw_slots(nsa: NSAConfig) -> int:
    """Of the ring that keeps tokens which are not compressed yet."""
    return nsa.l - 1 + MAX_STEP_TOKENS


def count_previous_key_slots() -> int:
    """Of the ring that keeps keys as they came, of which a token is mixed with the one before."""
    return MAX_STEP_TOKENS + 1


def count_ngram_slots(max_ngram: int) -> int:
    """Of the ring that keeps the tokens which n-grams reach back to."""
    return max_ngram - 1 + MAX_STEP_TOKENS


def compute_sequence_bytes(config: ModelConfig, capacity: int, itemsize: int) -> int:
    """Bytes that a `Cache` lays out for one sequence of `capacity` tokens, at `itemsize` bytes a number."""
    rows = capacity * _count_kv_elements(config) + _count_previous_key_elements(config)
    if config.attention == "nsa":
        rows += (count_window_slots(config.nsa) + _count_compressed_rows(capacity, config.nsa)) * _count_kv_elements(config)
        if config.has_indexer:
            rows += _count_compressed_rows(capacity, config.selection_nsa) * config.n_kv_groups * config.index_width
    tokens = count_ngram_slots(config.ngrams) if config.ngrams else 0
    return config.n_layers * rows * itemsize + tokens * TOKEN_ID_BYTES


def compute_token_bytes(config: ModelConfig, itemsize: int) -> float:
    """Bytes that another token of a sequence takes in a `Cache`, compressed blocks in their share."""
    per_token = float(_count_kv_elements(config))
    if config.attention == "nsa":
        per_token += _count_kv_elements(config) / config.nsa.d
        per_token += config.n_kv_groups * config.index_width / config.selection_nsa.d if config.has_indexer else 0
    return config.n_layers * per_token * itemsize


def compute_read_bytes(config: ModelConfig, length: int, itemsize: int) -> int:
    """Bytes of keys and values that the last of `length` tokens reads, in all layers."""
    if config.attention == "dense":
        return config.n_layers * length * _count_kv_elements(config) * itemsize
    numbers = sum(geometry.decode_reads(length, config.nsa).values()) * _count_kv_elements(config)
    if config.has_indexer:
        numbers += geometry.num_compressed(length, config.selection_nsa) * config.n_kv_groups * config.index_width
    return config.n_layers * numbers * itemsize


def check_cache_fits(config: ModelConfig, capacity: int, batch: int, device: torch.device, itemsize: int) -> None:
    """Raises ConfigError unless a `Cache` of this size fits the memory of `device`."""
    if batch < 1 or capacity < 1:
        raise ConfigError(f"a cache of {batch} sequences of {capacity} tokens: expected at least 1 of each")
    each, there = compute_sequence_bytes(config, capacity, itemsize), get_free_bytes(device)
    if batch * each > there:
        at_once = there // each
        remedy = f"give {at_once} sequences at once" if at_once else "give fewer tokens"
        raise ConfigError(
            f"a cache of {batch} sequences of {capacity} tokens takes {format_size(batch * each)}, and {device} has "
            f"{format_size(there)}; {at_once} would fit: {remedy}"
        )


def get_free_bytes(device: torch.device) -> int:
    """What a GPU has left, or all that this machine has."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def format_decoding_estimate(
    config: ModelConfig, n_parameters: int, memory_bytes: int, lengths: Sequence[int] = DEFAULT_LENGTHS
) -> str:
    """What decoding in bf16 takes, beside weights, of a memory of `there` bytes: a line for each length."""
    lines = [
        f"decoding in bf16, with {format_size(memory_bytes)} of memory, {format_size(BF16_BYTES * n_parameters)} of them weights",
        f"  {'tokens':>9}  {'cache of one':>13}  {'fit at once':>11}  {'read per token':>14}",
    ]
    for length in lengths:
        each = compute_sequence_bytes(config, length, BF16_BYTES)
        fit = max(memory_bytes - BF16_BYTES * n_parameters, 0) // each
        read = format_size(compute_read_bytes(config, length, BF16_BYTES))
        lines.append(f"  {length:>9,}  {format_size(each):>13}  {fit:>11,}  {read:>14}")
    lines.append(f"  each token of a sequence takes {compute_token_bytes(config, BF16_BYTES):,.0f} bytes")
    return "\n".join(lines)


def _count_kv_elements(config: ModelConfig) -> int:
    """Numbers in a key and a value of all groups."""
    return config.n_kv_groups * (config.d_k + config.d_v)


def _count_previous_key_elements(config: ModelConfig) -> int:
    """Numbers of keys as they came, in all branches and an indexer; none where no convolution mixes them."""
    widths = (3 if config.attention == "nsa" else 1) * config.d_k + config.has_indexer * config.index_width
    return count_previous_key_slots() * config.n_kv_groups * widths if config.matching_heads else 0


def _count_compressed_rows(capacity: int, nsa: NSAConfig) -> int:
    return geometry.num_compressed(capacity, nsa) + count_raw_slots(nsa)
