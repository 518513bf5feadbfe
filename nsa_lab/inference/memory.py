"""What a cache takes, what a step reads of it, and how many sequences fit: from a configuration alone."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from nsa_lab.attention import geometry
from nsa_lab.config import ConfigError, ModelConfig, NSAConfig
from nsa_lab.runs.summary import size_text

# Tokens that a step may append to sequences which have begun; rings have room for them beside what is read.
STEP = 256
LENGTHS = (8192, 65_536, 131_072)
HALF, TOKEN = 2, 8  # bytes of a number in bf16, of a token


def window_slots(nsa: NSAConfig) -> int:
    """Of the ring that keeps window keys: what the first of `STEP` new tokens sees, and all of them."""
    return geometry.ring_slots(STEP, nsa)


def raw_slots(nsa: NSAConfig) -> int:
    """Of the ring that keeps tokens which are not compressed yet."""
    return nsa.l - 1 + STEP


def past_slots() -> int:
    """Of the ring that keeps keys as they came, of which a token is mixed with the one before."""
    return STEP + 1


def latest_slots(longest: int) -> int:
    """Of the ring that keeps the tokens which n-grams reach back to."""
    return longest - 1 + STEP


def sequence_bytes(config: ModelConfig, capacity: int, itemsize: int) -> int:
    """Bytes that a `Cache` lays out for one sequence of `capacity` tokens, at `itemsize` bytes a number."""
    rows = capacity * _kv(config) + _past(config)
    if config.attention == "nsa":
        rows += (window_slots(config.nsa) + _compressed_rows(capacity, config.nsa)) * _kv(config)
        if config.indexed:
            rows += _compressed_rows(capacity, config.choice_nsa) * config.n_kv_groups * config.index_width
    tokens = latest_slots(config.ngrams) if config.ngrams else 0
    return config.n_layers * rows * itemsize + tokens * TOKEN


def token_bytes(config: ModelConfig, itemsize: int) -> float:
    """Bytes that another token of a sequence takes in a `Cache`, compressed blocks in their share."""
    per_token = float(_kv(config))
    if config.attention == "nsa":
        per_token += _kv(config) / config.nsa.d
        per_token += config.n_kv_groups * config.index_width / config.choice_nsa.d if config.indexed else 0
    return config.n_layers * per_token * itemsize


def read_bytes(config: ModelConfig, length: int, itemsize: int) -> int:
    """Bytes of keys and values that the last of `length` tokens reads, in all layers."""
    if config.attention == "dense":
        return config.n_layers * length * _kv(config) * itemsize
    numbers = sum(geometry.decode_reads(length, config.nsa).values()) * _kv(config)
    if config.indexed:
        numbers += geometry.num_compressed(length, config.choice_nsa) * config.n_kv_groups * config.index_width
    return config.n_layers * numbers * itemsize


def check_fits(config: ModelConfig, capacity: int, batch: int, device: torch.device, itemsize: int) -> None:
    """Raises ConfigError unless a `Cache` of this size fits the memory of `device`."""
    if batch < 1 or capacity < 1:
        raise ConfigError(f"a cache of {batch} sequences of {capacity} tokens: expected at least 1 of each")
    each, there = sequence_bytes(config, capacity, itemsize), free_bytes(device)
    if batch * each > there:
        at_once = there // each
        remedy = f"give {at_once} sequences at once" if at_once else "give fewer tokens"
        raise ConfigError(
            f"a cache of {batch} sequences of {capacity} tokens takes {size_text(batch * each)}, and {device} has "
            f"{size_text(there)}; {at_once} would fit: {remedy}"
        )


def free_bytes(device: torch.device) -> int:
    """What a GPU has left, or all that this machine has."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def decoding_text(config: ModelConfig, params: int, there: int, lengths: Sequence[int] = LENGTHS) -> str:
    """What decoding in bf16 takes, beside weights, of a memory of `there` bytes: a line for each length."""
    lines = [
        f"decoding in bf16, with {size_text(there)} of memory, {size_text(HALF * params)} of them weights",
        f"  {'tokens':>9}  {'cache of one':>13}  {'fit at once':>11}  {'read per token':>14}",
    ]
    for length in lengths:
        each = sequence_bytes(config, length, HALF)
        fit = max(there - HALF * params, 0) // each
        read = size_text(read_bytes(config, length, HALF))
        lines.append(f"  {length:>9,}  {size_text(each):>13}  {fit:>11,}  {read:>14}")
    lines.append(f"  each token of a sequence takes {token_bytes(config, HALF):,.0f} bytes")
    return "\n".join(lines)


def _kv(config: ModelConfig) -> int:
    """Numbers in a key and a value of all groups."""
    return config.n_kv_groups * (config.d_k + config.d_v)


def _past(config: ModelConfig) -> int:
    """Numbers of keys as they came, in all branches and an indexer; none where no convolution mixes them."""
    widths = (3 if config.attention == "nsa" else 1) * config.d_k + config.indexed * config.index_width
    return past_slots() * config.n_kv_groups * widths if config.matching_heads else 0


def _compressed_rows(capacity: int, nsa: NSAConfig) -> int:
    return geometry.num_compressed(capacity, nsa) + raw_slots(nsa)
