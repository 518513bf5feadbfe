"""Mutants of nsa_lab/bench: one planted fault each."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "limits: a backward pass reads no gradient of the output",
        "bench.roofline",
        "2 * (q + kv) + more + 2 * out + lse",
        "2 * (q + kv) + more + out + lse",
    ),
    Mutant(
        "limits: a share above one is told as any other",
        "bench.roofline",
        'limit["share"] > 1 for',
        'limit["share"] > 10 for',
    ),
    Mutant(
        "limits: a disturbed turn sets the rate of a product",
        "bench.timing",
        "/ min(_time_once_ms(turn, device)",
        "/ max(_time_once_ms(turn, device)",
    ),
    Mutant(
        "limits: memory sets no limit",
        "bench.roofline",
        "1e3 * max(by_flops, by_bytes)",
        "1e3 * by_flops",
    ),
    Mutant(
        "tune: a tile that computes something else has a speed",
        "bench.tune_tiles",
        "            if passed:",
        "            if True:",
    ),
    Mutant("tune: the table keeps the last tile", "bench.tune_tiles", "setattr(launch_table, function, own)", "pass"),
    Mutant("tune: what runs differ by is a gain", "bench.tune_tiles", "(1 - MIN_GAIN) * best[0].ms", "best[0].ms"),
    Mutant("bench: other code passes for what stands", "bench.records", "!= now[part]]", "!= then.get(part)]"),
    Mutant(
        "bench: what was not measured is left out in silence",
        "bench.attention_speed",
        "str(other) for other in shapes[number:]",
        "str(other) for other in shapes[number + 1 :]",
    ),
    Mutant("bench: a value costs what a key does", "bench.attention_speed", "2 * (shape.D + values)", "4 * shape.D"),
    Mutant(
        "bench: a long output is judged by a few rows",
        "bench.attention_parity",
        "max(min(_MAX_ROWS, _MAX_SCORES // scores_per_row), 16)",
        "16",
    ),
    Mutant(
        "bench: a sequence without a full block divides by no keys",
        "bench.attention_parity",
        "max(q.shape[2] * k.shape[1], 1)",
        "q.shape[2] * k.shape[1]",
    ),
    Mutant("bench: shares of the slowest dense attention", "bench.attention_speed", "/ min(dense", "/ max(dense"),
    Mutant(
        "bench decode: NaN is no error",
        "bench.decode_attention",
        "torch.stack(ours).max()",
        "torch.stack(ours).nan_to_num().max()",
    ),
]
