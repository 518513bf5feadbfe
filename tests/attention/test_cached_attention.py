"""Attention over a cache is the definition's rows, whatever else lies in the cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nsa_lab.attention import Span, cached_attention, geometry, reference
from nsa_lab.attention.cached_attention import cached_attention, cached_dense_attention
from nsa_lab.attention.layer_cache import LayerCache
from nsa_lab.config import NSAConfig

GEOMETRIES = [
    NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=12),
    NSAConfig(l=6, d=3, l_sel=9, n_sel=3, w=1),
    NSAConfig(l=5, d=5, l_sel=5, n_sel=5, w=7),
    NSAConfig(l=4, d=4, l_sel=12, n_sel=3, w=31),
    NSAConfig(l=12, d=2, l_sel=4, n_sel=6, w=3),
    NSAConfig(l=1, d=1, l_sel=1, n_sel=3, w=2),
]
INDEXER = {"l": 2, "d": 2, "phi": "pool"}
# Before the new tokens: nothing, less than a block, all that is selected, several windows; equal neighbours too.
LENGTHS = (0, 1, 5, 33, 33, 97, 2)


class Sequences:
    """Random inputs of sequences of `lengths` + S tokens: what a full call takes of each, and a cache of them all."""

    def __init__(self, nsa: NSAConfig, S: int, *, G: int = 2, h: int = 3, lengths: tuple[int, ...] = LENGTHS) -> None:
        self.nsa, self.S, self.lengths, self.G, self.h = nsa, S, lengths, G, h
        self._draw = torch.Generator().manual_seed(S)
        self.ends = [length + S for length in lengths]
        self.raw = [[self.draw_normal(end, G, width) for width in (6, 5, 6, 5)] for end in self.ends]
        self.compressed = [
            [self.draw_normal(geometry.num_compressed(end, nsa), G, width) for width in (6, 5)] for end in self.ends
        ]
        self.q, self.gates = (self.draw_normal(len(lengths), S, G * h, width) for width in (6, 3))

    def draw_normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._draw, dtype=torch.float64)

    def build_cache(self, ring: int, spare: int = 17) -> LayerCache:
        """NaN wherever no sequence has a token."""
        k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = (
            self.build_cache_rows([sequence[i] for sequence in kept], spare)
            for kept, i in ((self.compressed, 0), (self.compressed, 1), *((self.raw, i) for i in range(4)))
        )
        return LayerCache(k_cmp, v_cmp, k_sel, v_sel, self.build_ring(k_win, ring), self.build_ring(v_win, ring))

    def build_cache_rows(self, rows: list[Tensor], spare: int) -> Tensor:
        out = rows[0].new_full((len(rows), max(map(len, rows)) + spare, *rows[0].shape[1:]), float("nan"))
        for b, row in enumerate(rows):
            out[b, : len(row)] = row
        return out

    def build_ring(self, x: Tensor, ring: int) -> Tensor:
        out = x.new_full((len(x), ring, *x.shape[2:]), float("nan"))
        for b, end in enumerate(self.ends):
            for p in range(end):
                out[b, p % ring] = x[b, p]
        return out

    def compute_expected(self, b: int, blocks: Tensor | None = None) -> Tensor:
        raw, compressed = ([x[None] for x in kept[b]] for kept in (self.raw, self.compressed))
        span = Span.chunk(self.lengths[b], self.S)
        return reference.nsa_attention(
            self.q[b : b + 1], *compressed, *raw, self.gates[b : b + 1], self.nsa, blocks=blocks, span=span
        )


@pytest.mark.parametrize("S", [1, 2, 7, 40])
@pytest.mark.parametrize("nsa", GEOMETRIES)
def test_every_row_is_that_of_the_definition(nsa: NSAConfig, S: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = Sequences(nsa, S)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    for chunk_bytes in (4 * 2**20, 2**15):
        monkeypatch.setattr("nsa_lab.attention.cached_attention.CHUNK_BYTES", {"cpu": chunk_bytes})
        for ring in (nsa.w + S - 1, nsa.w + S + 10):
            found = cached_attention(sequences.q, sequences.gates, sequences.build_cache(ring), lengths, nsa)
            for b in range(len(LENGTHS)):
                torch.testing.assert_close(found[b : b + 1], sequences.compute_expected(b), rtol=0, atol=1e-12)


@pytest.mark.parametrize("S", [1, 7])
def test_an_indexer_chooses_by_its_own_keys(S: int) -> None:
    nsa = GEOMETRIES[0]
    choice, sequences = nsa.model_copy(update=INDEXER), Sequences(nsa, S)
    keys = [sequences.draw_normal(geometry.num_compressed(end, choice), 2, 4) for end in sequences.ends]
    index_q = sequences.draw_normal(len(LENGTHS), S, 2, 4)
    cache = sequences.build_cache(nsa.w + S - 1)._replace(k_index=sequences.build_cache_rows(keys, 5))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    found = cached_attention(sequences.q, sequences.gates, cache, lengths, nsa, index_q=index_q, selection_nsa=choice)
    moved = 0
    for b, (length, k) in enumerate(zip(LENGTHS, keys, strict=True)):
        span = Span.chunk(length, S)
        _, lse = reference.compressed_attention(index_q[b : b + 1], k[None], k[None], choice, span=span)
        blocks = reference.select_blocks(index_q[b : b + 1], k[None], lse, choice, span=span)
        torch.testing.assert_close(found[b : b + 1], sequences.compute_expected(b, blocks), rtol=0, atol=1e-12)
        moved += not torch.allclose(found[b : b + 1], sequences.compute_expected(b))
    assert moved


def test_half_precision_keeps_its_dtype_and_chooses_in_float32() -> None:
    nsa, lengths = GEOMETRIES[0], torch.tensor(LENGTHS, dtype=torch.int32)
    sequences = Sequences(nsa, 3)
    cache = LayerCache(*(x if x is None else x.bfloat16() for x in sequences.build_cache(40)))
    found = cached_attention(sequences.q.bfloat16(), sequences.gates.bfloat16(), cache, lengths, nsa)
    assert found.dtype == torch.bfloat16
    for name in ("q", "gates"):
        setattr(sequences, name, getattr(sequences, name).bfloat16())
    for kept in (sequences.raw, sequences.compressed):
        kept[:] = [[x.bfloat16() for x in row] for row in kept]
    for b in range(len(LENGTHS)):
        torch.testing.assert_close(found[b : b + 1], sequences.compute_expected(b), rtol=8e-3, atol=8e-3)


@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("branch", [0, 1, 2])
def test_a_branch_in_half_precision_is_rounded_once(branch: int, S: int) -> None:
    """Shares and sums keep float32, as in the definition: values that cancel leave a small sum."""
    x = Sequences(GEOMETRIES[0], S)
    x.gates = torch.zeros_like(x.gates)
    x.gates[..., branch] = 1.0
    x.q = x.q.bfloat16().double()
    for kept in (x.raw, x.compressed):
        kept[:] = [[part.bfloat16().double() for part in row] for row in kept]
    cache = LayerCache(*(part if part is None else part.bfloat16() for part in x.build_cache(40)))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    found = cached_attention(x.q.bfloat16(), x.gates.bfloat16(), cache, lengths, x.nsa).double()
    for b in range(len(LENGTHS)):
        torch.testing.assert_close(found[b : b + 1], x.compute_expected(b), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("lengths", [(33, 33), (33, 5)], ids=["one run of rows", "two"])
def test_gates_of_a_wider_dtype_do_not_widen_the_output(lengths: tuple[int, ...]) -> None:
    x = Sequences(GEOMETRIES[0], 1, lengths=lengths)
    cache = LayerCache(*(kept.float() for kept in x.build_cache(x.nsa.w) if kept is not None))
    told = torch.tensor(lengths, dtype=torch.int32)
    wide = cached_attention(x.q.float(), x.gates.double(), cache, told, x.nsa)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide, cached_attention(x.q.float(), x.gates.float(), cache, told, x.nsa))


@pytest.mark.parametrize("S", [1, 3, 9])
def test_what_float32_cannot_tell_apart_falls_to_the_lower_block(S: int) -> None:
    """As the definition ranks importances; float64 would take block 5, of which all queries see a little more."""
    nsa = NSAConfig(l=4, d=4, l_sel=4, n_sel=4, w=5)
    x = Sequences(nsa, S, lengths=(60,))
    keys = x.compressed[0][0]
    keys[:] = keys[0].clone()
    x.q = keys[0].repeat_interleave(x.h, 0).expand(1, S, -1, -1).contiguous()
    keys[5] *= 1 + 1e-10
    lengths = torch.tensor([60], dtype=torch.int32)
    found = cached_attention(x.q, x.gates, x.build_cache(nsa.w + S - 1), lengths, nsa)
    torch.testing.assert_close(found, x.compute_expected(0), rtol=0, atol=1e-12)
    own = torch.arange(60, 60 + S) // 4
    blocks = torch.stack([torch.zeros_like(own), torch.full_like(own, 5), own - 1, own], -1).int()
    other = x.compute_expected(0, blocks[None, :, None].expand(-1, -1, 2, -1))
    assert not torch.isclose(found, other).all()


def test_scores_of_a_piece_are_bounded_by_the_keys_that_there_are_most_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """An indexer's blocks may be shorter than the heads' and its keys more, or the other way round."""
    few, many = GEOMETRIES[3], GEOMETRIES[3].model_copy(update={"l": 1, "d": 1})
    monkeypatch.setattr("nsa_lab.attention.cached_attention.CHUNK_BYTES", {"cpu": 2**16})
    q = torch.zeros(2, 50, 6, 4)
    for nsa, choice in ((few, many), (many, few)):
        pieces = list(cached_attention._split_queries(q, 101, nsa, choice))
        assert [at for piece in pieces for at in range(50)[piece]] == [*range(50)]
        most = max(piece.stop - piece.start for piece in pieces)
        assert 1 < most < 50 and most * 2 * 6 * (151 + nsa.w) * 8 <= 2**16


def test_queries_past_the_cache_are_padding_and_carry_no_gradient() -> None:
    """Rows of two sequences that are full, or past it, beside one that is not; values are narrower than keys."""
    x = Sequences(GEOMETRIES[0], 3, lengths=(33, 97, 33))
    x.q.requires_grad_()
    cache = x.build_cache(x.nsa.w + 2, spare=0)
    found = cached_attention(x.q, x.gates, cache, torch.tensor([33, 98, 104], dtype=torch.int32), x.nsa)
    assert found.shape == (3, 3, 6, 5) and not found.requires_grad
    torch.testing.assert_close(found[:1], x.compute_expected(0).detach(), rtol=0, atol=1e-12)
    assert not found[1, 2:].any() and not found[2].any()


def test_what_does_not_go_together_is_refused() -> None:
    nsa, lengths = GEOMETRIES[0], torch.tensor(LENGTHS, dtype=torch.int32)
    sequences = Sequences(nsa, 3)
    with pytest.raises(ValueError, match="k_win is a ring of 13 slots, and 3 queries with w = 12 read 14"):
        cached_attention(sequences.q, sequences.gates, sequences.build_cache(13), lengths, nsa)
    with pytest.raises(ValueError, match="belong together"):
        cached_attention(sequences.q, sequences.gates, sequences.build_cache(14), lengths, nsa, selection_nsa=nsa)
    with pytest.raises(NotImplementedError, match="backend = 'flash'"):
        cached_attention(sequences.q, sequences.gates, sequences.build_cache(14), lengths, nsa, backend="flash")
    with pytest.raises(NotImplementedError, match="cached_dense_attention: backend = 'flash': expected torch or triton"):
        cached_dense_attention(sequences.q, *sequences.build_cache(14)[2:4], lengths, backend="flash")
