"""Mutants of nsa_lab/bench: one planted fault each."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "bench: a deeply nested record is a traceback", "bench.attention_rows", "ValueError, RecursionError)", "ValueError)"
    ),
    Mutant(
        "bench: the tokens of a shape have no upper bound",
        "bench.attention_rows",
        "1 <= tokens <= MAX_COUNT and ",
        "1 <= tokens and ",
    ),
    Mutant(
        "bench: the other numbers of a shape have no upper bound",
        "bench.attention_rows",
        "1 <= size <= MAX_SIZE",
        "1 <= size",
    ),
    Mutant(
        "roofline: a backward pass reads no gradient of the output",
        "bench.roofline",
        "2 * (q + kv) + more + 2 * out + lse",
        "2 * (q + kv) + more + out + lse",
    ),
    Mutant(
        "roofline: a share above one is not reported",
        "bench.roofline",
        'limit["share"] > 1 for',
        'limit["share"] > 10 for',
    ),
    Mutant(
        "roofline: the slowest round sets the matmul rate",
        "bench.timing",
        "/ min(_time_once_ms(run_round, device)",
        "/ max(_time_once_ms(run_round, device)",
    ),
    Mutant(
        "roofline: memory sets no limit",
        "bench.roofline",
        "1e3 * max(by_flops, by_bytes)",
        "1e3 * by_flops",
    ),
    Mutant(
        "bench: what fails parity has a speed",
        "bench.harness",
        "    if is_correct:\n        measure()",
        "    measure()",
    ),
    Mutant("bench: a failed parity check leaves no note", "bench.harness", "else PARITY_FAILED", 'else ""'),
    Mutant(
        "tune: the launch table keeps the last tile",
        "bench.tune_tiles",
        "setattr(launch_table, function, original)",
        "pass",
    ),
    Mutant(
        "tune: the variation between runs is a gain",
        "bench.tune_tiles",
        "(1 - MIN_GAIN) * best[0].ms",
        "best[0].ms",
    ),
    Mutant(
        "bench: a case that was not measured is not listed",
        "bench.harness",
        "for other in cases[n_measured:]]",
        "for other in cases[n_measured + 1 :]]",
    ),
    Mutant(
        "bench: an interrupted benchmark keeps only its last case",
        "bench.harness",
        "[self.to_json(row) for row in rows]",
        "[self.to_json(row) for row in new_rows]",
    ),
    Mutant(
        "bench: a value costs as much as a key",
        "bench.attention_speed",
        "2 * (shape.D + value_width)",
        "4 * shape.D",
    ),
    Mutant(
        "bench: few rows of a long output are checked",
        "bench.attention_parity",
        "max(min(_MAX_ROWS, _MAX_SCORES // scores_per_row), 16)",
        "16",
    ),
    Mutant(
        "bench: division by zero keys without a full block",
        "bench.attention_parity",
        "max(q.shape[2] * k.shape[1], 1)",
        "q.shape[2] * k.shape[1]",
    ),
    Mutant(
        "bench: index keys are not rounded",
        "bench.attention_parts",
        "round_keys(k, model.indexer_dtype).expand",
        "k.expand",
    ),
    Mutant("bench: shares of the slowest dense attention", "bench.attention_speed", "/ min(dense", "/ max(dense"),
    Mutant(
        "bench decode: NaN is no error",
        "bench.decode_attention",
        "torch.stack(errors).max()",
        "torch.stack(errors).nan_to_num().max()",
    ),
    Mutant(
        "bench decode: NaN logits of a model pass",
        "bench.decode_parity",
        "if not pair[0] <= pair[1]",
        "if pair[0] > pair[1]",
    ),
    Mutant(
        "bench decode: the limit grows with the error",
        "bench.decode_parity",
        "_compute_relative_errors(plain, exact)",
        "_compute_relative_errors(decoded, exact)",
    ),
    Mutant("bench decode: a model that fails parity is timed", "bench.decode_speed", "if kind not in failed", ""),
    Mutant(
        "bench decode: index keys of few bits stay 0",
        "bench.decode_speed",
        "if cached.dtype.itemsize == 1:",
        "if not cached.dtype.itemsize:",
    ),
    Mutant(
        "bench decode: share of the bytes read as that of the bytes cached",
        "bench.decode_speed",
        "row.cached_bytes / baseline.cached_bytes",
        "row.read_bytes / baseline.read_bytes",
    ),
]
