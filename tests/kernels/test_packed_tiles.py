"""Packed documents in the kernels: each is computed independently of the others. Also chunks."""

from __future__ import annotations

import numpy as np
import packings
import pytest
import torch
import triton
import triton.language as tl
from attention_inputs import Inputs, to_lists
from layout_cases import Case, compute_actual, compute_error, compute_expected, draw_weights
from looping import looped, tiered
from torch._dynamo.testing import CompileCounterWithBackend

from nsa_lab import attention
from nsa_lab.attention import Span, kernels, reference
from nsa_lab.attention.kernels.band.launch import band_attention
from nsa_lab.attention.kernels.packed_tiles import count_tiles, find_document_of_row, find_document_of_tile
from nsa_lab.attention.kernels.selected import launch as selected
from nsa_lab.attention.kernels.selected import workspace_pieces
from nsa_lab.config import NSAConfig

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
NSA = NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=13)
# No token, one token, fewer than a compressed block, and more than a selection block; a tile of queries has 32 rows.
LENGTHS = (1, 17, 0, 5)


def make_cu_seqlens(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def make_case(lengths: tuple[int, ...], capacity: int | None, h: int, G: int = 1) -> Case:
    span = Span.packed(make_cu_seqlens(*lengths), capacity)
    return Case(NSA, span, (0,) * len(lengths), lengths, 1, G=G, h=h, d_k=32, d_v=32, seed=5)


@triton.jit
def _find(bounds_ptr, other_bounds_ptr, found_ptr, row_ptr, n_documents, ROWS_PER_TOKEN: tl.constexpr, TILE: tl.constexpr):
    tile = tl.program_id(0)
    document, tile_in_document, first, n_tokens, other_first, other_rows = find_document_of_tile(
        bounds_ptr, other_bounds_ptr, n_documents, tile, ROWS_PER_TOKEN, TILE
    )
    if tile_in_document * TILE < n_tokens * ROWS_PER_TOKEN:
        tl.store(found_ptr + tile * 5, document)
        tl.store(found_ptr + tile * 5 + 1, first * ROWS_PER_TOKEN + tile_in_document * TILE)
        tl.store(found_ptr + tile * 5 + 2, n_tokens)
        tl.store(found_ptr + tile * 5 + 3, other_first)
        tl.store(found_ptr + tile * 5 + 4, other_rows)
    if tile < tl.load(bounds_ptr + n_documents):
        tl.store(row_ptr + tile, find_document_of_row(bounds_ptr, n_documents, tile))


FEW = (0, 5, 0, 0, 1, 8, 3, 4, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lengths",
    [(6,), FEW, FEW * 7, FEW * 8, pytest.param((0, 0, 1, 0) * 520, marks=pytest.mark.nightly)],
    ids=lambda lengths: f"{len(lengths)}_documents",
)
def test_every_tile_of_every_document_has_one_program(lengths: tuple[int, ...], device: torch.device) -> None:
    """One program finds each tile, the rows of its document, and the document's compressed keys.

    With one document, and with numbers of documents that need zero, one and two search steps. Documents may be empty.
    """
    rows_per_token, tile = 3, 2
    span = Span.packed(make_cu_seqlens(*lengths))
    table = span.layout(NSA, device).bounds
    n_documents = table.shape[1] - 1
    n_programs = max(count_tiles(span.n_queries * rows_per_token, tile, n_documents), span.n_queries)
    found = torch.full((n_programs, 5), -1, dtype=torch.int64, device=device)
    owners = torch.full((span.n_queries,), -1, dtype=torch.int64, device=device)
    _find[(n_programs,)](table[0], table[1], found, owners, n_documents, ROWS_PER_TOKEN=rows_per_token, TILE=tile)
    expected = [
        [index, row, document.end, compressed.start, compressed.stop - compressed.start]
        for index, (document, compressed) in enumerate(zip(span.documents, span.compressed_rows(NSA), strict=True))
        for row in range(document.query_rows.start * rows_per_token, document.query_rows.stop * rows_per_token, tile)
    ]
    assert [place for place in found.tolist() if place[0] >= 0] == expected
    assert owners.tolist() == span.query_document_ids().tolist()


def test_kernels_get_the_bounds_of_documents() -> None:
    """Of tokens, compressed keys and selection blocks; each row is a multiple of 16 bytes."""
    span, cpu, l_sel = Span.packed(make_cu_seqlens(9, 0, 21), capacity=6), torch.device("cpu"), NSA.l_sel
    table = span.layout(NSA, cpu).bounds
    first, last = -(-9 // l_sel), -(-9 // l_sel) - (-21 // l_sel)
    assert table.dtype == torch.int32 and table.tolist() == [
        [0, 9, 9, 30, 30, 30, 30, 30],
        [0, 1, 1, 5, 5, 5, 5, 5],
        [0, first, first, *[last] * 5],
    ]
    assert span.layout(NSA, cpu).bounds is table
    without_capacity = Span.packed(make_cu_seqlens(9, 0, 21)).layout(NSA, cpu).bounds
    assert without_capacity.tolist() == [[0, 9, 9, 30], [0, 1, 1, 5], [0, first, first, last]]
    # `max_seqlen` is the total length if there is a capacity, otherwise the longest document rounded up to a power of two.
    q = torch.empty(1)
    spans = span, Span.packed(make_cu_seqlens(9, 0, 21)), Span.packed(make_cu_seqlens(40, 9, 21))
    assert [kernels._get_layout_args(s, None, NSA, q)[1] for s in spans] == [30, 30, 64]


def run_operator(case: Case, x: Inputs, weight: torch.Tensor) -> tuple[torch.Tensor, Inputs]:
    """Return the output of the operator, and the gradients of its weighted sum."""
    x = x.map(lambda y: y.detach().to(DEVICE).requires_grad_())
    out = attention.nsa_attention(*x, case.nsa, backend="triton", span=case.span)
    return out.detach().cpu(), Inputs(*torch.autograd.grad((out * weight.to(DEVICE)).sum(), x)).map(torch.Tensor.cpu)


def assert_gradients(grads: Inputs, exact: dict[str, np.ndarray]) -> None:
    """Assert that gradients equal `exact`, and that those of padding rows are zero."""
    for name, grad in grads._asdict().items():
        true = exact[name]
        assert (grad[:, true.shape[1] :] == 0).all(), name
        assert compute_error(grad[:, : true.shape[1]].double(), true) < 1e-5, name


@pytest.mark.slow
def test_each_part_equals_brute_force(poisoned, monkeypatch) -> None:
    """Outputs, LSEs and blocks, and the gradients of outputs and LSEs."""
    case = make_case(LENGTHS, None, h=2)
    exact = case.inputs()
    x, weights = exact.map(torch.Tensor.float), draw_weights(case, exact)
    results, blocks, gradients = compute_expected(case, x.map(torch.Tensor.double), weights)
    # The next test covers the operator. Here the reference computes it, whose gradients equal the expected ones.
    monkeypatch.setattr(attention, "nsa_attention", lambda *y, backend, span: reference.nsa_attention(*y, span=span))
    actual, actual_blocks, grads = compute_actual(case, x, {name: y.float() for name, y in weights.items()}, "triton")
    assert to_lists(actual_blocks) == blocks
    for name, y in actual.items():
        assert compute_error(y.double(), results[name]) < 1e-5, name
    assert_gradients(grads, gradients)


# Scores of the poisoned neighbor overflow, and the interpreter warns.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
def test_operator_equals_brute_force_and_documents_are_independent(poisoned, monkeypatch) -> None:
    """With an inverted index. Large finite values in one document do not change the documents next to it."""
    monkeypatch.setattr(selected, "UNION_TOKENS", 0)
    case = make_case(LENGTHS, 4, h=2)
    exact = case.inputs()
    x = exact.map(torch.Tensor.float)
    weights = {name: y * (name == "mixed") for name, y in draw_weights(case, exact).items()}
    results, _, gradients = compute_expected(case, x.map(torch.Tensor.double), weights)
    out, grads = run_operator(case, x, weights["mixed"].float())
    assert compute_error(out.double(), results["mixed"]) < 1e-5
    assert_gradients(grads, gradients)
    assert_no_bit_changes(case, x, weights["mixed"].float(), out, grads)


def assert_no_bit_changes(case: Case, x: Inputs, weight: torch.Tensor, out: torch.Tensor, grads: Inputs) -> None:
    rows = {
        name: (case.span.compressed_rows(NSA)[1] if name.endswith("_cmp") else case.span.documents[1].query_rows)
        for name in ("mixed", *x._fields)
    }
    changed = x.map(torch.clone)
    for name, y in changed._asdict().items():
        y[:, rows[name]] = 0.5 if name == "gates" else 1e18
    after, new_grads = run_operator(case, changed, weight)
    for name, y, z in [("mixed", out, after), *zip(x._fields, grads, new_grads, strict=True)]:
        others = torch.ones(y.shape[1], dtype=torch.bool)
        others[rows[name]] = False
        assert torch.equal(y[:, others], z[:, others]), name
        assert not torch.equal(y[:, rows[name]], z[:, rows[name]]), name


@pytest.mark.slow
def test_pieces_equal_one_piece(device, monkeypatch, poisoned) -> None:
    """A piece ends inside a document, and the next piece continues it."""
    monkeypatch.setattr(selected, "UNION_TOKENS", 0)
    case = make_case((10, 0, 7), None, h=1)
    x = case.inputs(torch.float32).map(lambda y: y.to(device).requires_grad_())
    table, longest, _ = kernels._get_layout_args(case.span, None, NSA, x.q)
    blocks = torch.tensor([0, -1, -1, -1], dtype=torch.int32, device=device).expand(1, 17, 1, 4)

    def run():
        out, lse = selected.selected_attention(x.q, x.k_sel, x.v_sel, blocks, NSA.l_sel, table, longest)
        return out, lse, *torch.autograd.grad((out, lse), (x.q, x.k_sel, x.v_sel), (out.detach(), lse.detach()))

    expected = run()
    split = [workspace_pieces.Piece(0, 1, 0, 1, 0, 6), workspace_pieces.Piece(0, 1, 0, 1, 6, 17)]
    monkeypatch.setattr(selected, "split_into_pieces", lambda *_: split)
    monkeypatch.setattr(selected, "should_sort_items", lambda *_: True)
    for a, b in zip(expected, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@looped
@pytest.mark.parametrize(
    ("strategy", "start", "length"),
    # The keys of the first two tiles of the third case are outside every window; the last four are in `make nightly`.
    tiered(
        [
            ("union", 41, 9),
            ("gather", 60, 1),
            ("gather", 161, 39),
            ("union", 16, 64),
            ("gather", 3, 90),
            ("union", 203, 2),
            ("gather", 7, 300),
        ],
        nightly=lambda strategy, start, length: start in (16, 3, 203, 7),
    ),
)
def test_chunks(strategy: str, start: int, length: int, poisoned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and gradients of a chunk equal the definition in float64, of the operator and of its parts."""
    if strategy == "gather":
        monkeypatch.setattr(selected, "UNION_TOKENS", 0)
    case = Case(NSA, Span.chunk(start, length), (start,), (length,), 2, G=1, h=2, d_k=32, d_v=32, seed=5)
    inputs = case.inputs(torch.float32)

    def compute(x: Inputs, backend: str, device: torch.device) -> list[torch.Tensor]:
        x = x.map(lambda y: y.to(device).requires_grad_())
        out = attention.nsa_attention(*x, NSA, backend=backend, span=case.span)
        window, lse = attention.window_attention(x.q, x.k_win, x.v_win, NSA, backend=backend, span=case.span)
        results = out, window, lse
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r) for r in results]
        return [*results, *torch.autograd.grad(results, list(x), weights)]

    exact = compute(inputs.map(torch.Tensor.double), "reference", torch.device("cpu"))
    for actual, expected in zip(compute(inputs, "triton", DEVICE), exact, strict=True):
        torch.testing.assert_close(actual.cpu().double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
def test_one_compiled_graph_for_all_documents(device) -> None:
    """With a capacity only the table changes, and it is an input: no graph break, no second compilation."""
    x = make_case((17,), None, h=1).inputs(torch.float32).map(lambda y: y.to(device))
    counter = CompileCounterWithBackend("aot_eager")

    def attend(table: torch.Tensor) -> torch.Tensor:
        return band_attention(x.q, x.k_win, x.v_win, 1, 1, NSA.w, table, 17)[0]

    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for lengths in ((12, 5), (2, 0, 15)):
        table = Span.packed(make_cu_seqlens(*lengths), capacity=3).layout(NSA, device).bounds
        assert torch.equal(compiled(table), attend(table))
    assert counter.frame_count == 1


# Under the interpreter a packing takes ten seconds to a minute, so `make test` runs only the quickest configuration.
QUICKEST = 7
NUMBERS = [
    pytest.param(number, marks=pytest.mark.slow if CUDA or number == QUICKEST else pytest.mark.nightly)
    for number in range(len(packings.CONFIGURATIONS))
]


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("number", NUMBERS)
def test_random_packings_equal_separate_documents(number: int) -> None:
    """On a CPU: one small packing per configuration. For more, on a GPU: python tests/kernels/packings.py 1000."""
    configuration = packings.CONFIGURATIONS[number]
    sizes = (packings.MAX_DOCUMENTS, packings.MAX_TOKENS) if CUDA else (4, 40)
    for seed in range(2) if CUDA else (number,):
        errors = packings.check(seed, configuration if CUDA else packings.replace_bfloat16(configuration), *sizes)
        assert all(error <= 1 for error in errors.values()), errors
