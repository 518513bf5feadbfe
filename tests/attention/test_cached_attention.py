"""Attention over a cache equals the rows of the definition, whatever unused cache rows contain."""

from __future__ import annotations

import pytest
import torch
from looping import looped
from torch import Tensor

from nsa_lab.attention import Span, geometry, reference
from nsa_lab.attention.cached_attention import _split_queries, cached_attention, cached_dense_attention
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
# Tokens before the new ones: none, less than a block, one selection budget, several windows; also equal neighbors.
LENGTHS = (0, 1, 5, 33, 33, 97, 2)


class Sequences:
    """Random inputs of sequences of `lengths` + S tokens: full inputs of each, and a cache of all of them."""

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
        """Return a cache with NaN in all unused rows."""
        k_cmp, v_cmp, k_sel, v_sel, k_win, v_win = (
            self.build_cache_rows([sequence[i] for sequence in branches], spare)
            for branches, i in ((self.compressed, 0), (self.compressed, 1), *((self.raw, i) for i in range(4)))
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
        raw, compressed = ([x[None] for x in tensors[b]] for tensors in (self.raw, self.compressed))
        span = Span.chunk(self.lengths[b], self.S)
        return reference.nsa_attention(
            self.q[b : b + 1], *compressed, *raw, self.gates[b : b + 1], self.nsa, blocks=blocks, span=span
        )


@pytest.mark.slow
@looped
@pytest.mark.parametrize("S", [1, 2, 7, 40])
@pytest.mark.parametrize("nsa", GEOMETRIES)
def test_every_row_equals_the_definition(nsa: NSAConfig, S: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = Sequences(nsa, S)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    for chunk_bytes in (4 * 2**20, 2**15):
        monkeypatch.setattr("nsa_lab.attention.cached_attention.CHUNK_BYTES", {"cpu": chunk_bytes})
        for ring in (nsa.w + S - 1, nsa.w + S + 10):
            out = cached_attention(sequences.q, sequences.gates, sequences.build_cache(ring), lengths, nsa)
            for b in range(len(LENGTHS)):
                torch.testing.assert_close(out[b : b + 1], sequences.compute_expected(b), rtol=0, atol=1e-12)


@pytest.mark.parametrize("S", [1, 7])
def test_an_indexer_selects_by_its_own_keys(S: int) -> None:
    nsa = GEOMETRIES[0]
    selection_nsa, sequences = nsa.model_copy(update=INDEXER), Sequences(nsa, S)
    keys = [sequences.draw_normal(geometry.num_compressed(end, selection_nsa), 2, 4) for end in sequences.ends]
    index_q = sequences.draw_normal(len(LENGTHS), S, 2, 4)
    cache = sequences.build_cache(nsa.w + S - 1)._replace(k_index=sequences.build_cache_rows(keys, 5))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    out = cached_attention(sequences.q, sequences.gates, cache, lengths, nsa, index_q=index_q, selection_nsa=selection_nsa)
    n_different = 0
    for b, (length, k) in enumerate(zip(LENGTHS, keys, strict=True)):
        span = Span.chunk(length, S)
        _, lse = reference.compressed_attention(index_q[b : b + 1], k[None], k[None], selection_nsa, span=span)
        blocks = reference.select_blocks(index_q[b : b + 1], k[None], lse, selection_nsa, span=span)
        torch.testing.assert_close(out[b : b + 1], sequences.compute_expected(b, blocks), rtol=0, atol=1e-12)
        n_different += not torch.allclose(out[b : b + 1], sequences.compute_expected(b))
    assert n_different


def test_half_precision_keeps_its_dtype_and_selects_in_float32() -> None:
    nsa, lengths = GEOMETRIES[0], torch.tensor(LENGTHS, dtype=torch.int32)
    sequences = Sequences(nsa, 3)
    cache = LayerCache(*(x if x is None else x.bfloat16() for x in sequences.build_cache(40)))
    out = cached_attention(sequences.q.bfloat16(), sequences.gates.bfloat16(), cache, lengths, nsa)
    assert out.dtype == torch.bfloat16
    for name in ("q", "gates"):
        setattr(sequences, name, getattr(sequences, name).bfloat16())
    for tensors in (sequences.raw, sequences.compressed):
        tensors[:] = [[x.bfloat16() for x in row] for row in tensors]
    for b in range(len(LENGTHS)):
        torch.testing.assert_close(out[b : b + 1], sequences.compute_expected(b), rtol=8e-3, atol=8e-3)


@looped
@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("branch", [0, 1, 2])
def test_a_branch_in_half_precision_is_rounded_once(branch: int, S: int) -> None:
    """Probabilities and sums are float32, as in the definition: values that cancel leave a small sum."""
    x = Sequences(GEOMETRIES[0], S)
    x.gates = torch.zeros_like(x.gates)
    x.gates[..., branch] = 1.0
    x.q = x.q.bfloat16().double()
    for tensors in (x.raw, x.compressed):
        tensors[:] = [[part.bfloat16().double() for part in row] for row in tensors]
    cache = LayerCache(*(part if part is None else part.bfloat16() for part in x.build_cache(40)))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    out = cached_attention(x.q.bfloat16(), x.gates.bfloat16(), cache, lengths, x.nsa).double()
    for b in range(len(LENGTHS)):
        torch.testing.assert_close(out[b : b + 1], x.compute_expected(b), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("lengths", [(33, 33), (33, 5)], ids=["one run of rows", "two"])
def test_gates_of_a_wider_dtype_do_not_widen_the_output(lengths: tuple[int, ...]) -> None:
    x = Sequences(GEOMETRIES[0], 1, lengths=lengths)
    cache = LayerCache(*(part.float() for part in x.build_cache(x.nsa.w) if part is not None))
    cache_lengths = torch.tensor(lengths, dtype=torch.int32)
    wide = cached_attention(x.q.float(), x.gates.double(), cache, cache_lengths, x.nsa)
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide, cached_attention(x.q.float(), x.gates.float(), cache, cache_lengths, x.nsa))


@pytest.mark.parametrize("S", [1, 3, 9])
def test_equal_float32_importances_select_the_lower_block(S: int) -> None:
    """The definition ranks in float32; float64 would select block 5, whose importance is slightly larger."""
    nsa = NSAConfig(l=4, d=4, l_sel=4, n_sel=4, w=5)
    x = Sequences(nsa, S, lengths=(60,))
    keys = x.compressed[0][0]
    keys[:] = keys[0].clone()
    x.q = keys[0].repeat_interleave(x.h, 0).expand(1, S, -1, -1).contiguous()
    keys[5] *= 1 + 1e-10
    lengths = torch.tensor([60], dtype=torch.int32)
    out = cached_attention(x.q, x.gates, x.build_cache(nsa.w + S - 1), lengths, nsa)
    torch.testing.assert_close(out, x.compute_expected(0), rtol=0, atol=1e-12)
    own = torch.arange(60, 60 + S) // 4
    blocks = torch.stack([torch.zeros_like(own), torch.full_like(own, 5), own - 1, own], -1).int()
    other = x.compute_expected(0, blocks[None, :, None].expand(-1, -1, 2, -1))
    assert not torch.isclose(out, other).all()


def test_chunk_size_follows_the_larger_number_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """An indexer can have shorter blocks and more keys than the compressed branch, or the other way round."""
    few, many = GEOMETRIES[3], GEOMETRIES[3].model_copy(update={"l": 1, "d": 1})
    monkeypatch.setattr("nsa_lab.attention.cached_attention.CHUNK_BYTES", {"cpu": 2**16})
    q = torch.zeros(2, 50, 6, 4)
    for nsa, selection_nsa in ((few, many), (many, few)):
        chunks = list(_split_queries(q, 101, nsa, selection_nsa))
        assert [query for chunk in chunks for query in range(50)[chunk]] == [*range(50)]
        size = max(chunk.stop - chunk.start for chunk in chunks)
        assert 1 < size < 50 and size * 2 * 6 * (151 + nsa.w) * 8 <= 2**16


def test_queries_past_the_cache_are_padding_without_gradient() -> None:
    """Two sequences reach or exceed the capacity, one does not; values are narrower than keys."""
    x = Sequences(GEOMETRIES[0], 3, lengths=(33, 97, 33))
    x.q.requires_grad_()
    cache = x.build_cache(x.nsa.w + 2, spare=0)
    out = cached_attention(x.q, x.gates, cache, torch.tensor([33, 98, 104], dtype=torch.int32), x.nsa)
    assert out.shape == (3, 3, 6, 5) and not out.requires_grad
    torch.testing.assert_close(out[:1], x.compute_expected(0).detach(), rtol=0, atol=1e-12)
    assert not out[1, 2:].any() and not out[2].any()


def test_inconsistent_inputs_raise() -> None:
    nsa, lengths = GEOMETRIES[0], torch.tensor(LENGTHS, dtype=torch.int32)
    sequences = Sequences(nsa, 3)
    with pytest.raises(ValueError, match="k_win is a ring of 13 slots, 3 queries with w = 12 need 14"):
        cached_attention(sequences.q, sequences.gates, sequences.build_cache(13), lengths, nsa)
    with pytest.raises(ValueError, match="belong together"):
        cached_attention(sequences.q, sequences.gates, sequences.build_cache(14), lengths, nsa, selection_nsa=nsa)
    with pytest.raises(NotImplementedError, match="backend = 'flash'"):
        cached_attention(sequences.q, sequences.gates, sequences.build_cache(14), lengths, nsa, backend="flash")
    with pytest.raises(NotImplementedError, match="cached_dense_attention: backend = 'flash': expected torch or triton"):
        cached_dense_attention(sequences.q, *sequences.build_cache(14)[2:4], lengths, backend="flash")
