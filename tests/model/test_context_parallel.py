"""Ranks that share a text compute the outputs and gradients of one process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from context_checks import (
    COLLECTIVES,
    MODELS,
    PACKED,
    check_gradient_sum,
    compare_threads,
    compute,
    draw,
    make_model,
    measure_error_in_bfloat16,
    run_ranks,
    run_threads,
)
from torch._dynamo.testing import CompileCounterWithBackend

from nsa_lab.attention import Span, context_parallel
from nsa_lab.attention.context_parallel import ContextShard
from nsa_lab.config import NSAConfig

NSA = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=13)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("n_ranks", [2, 3, 4])
def test_ranks_that_share_a_text_equal_one_process_in_float64(n_ranks: int) -> None:
    run_ranks(n_ranks)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_ranks_equal_one_process_with_the_training_recipe() -> None:
    run_ranks(2, "training recipe")


@pytest.mark.slow
def test_three_ranks_equal_one_process_as_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """All models on full and packed texts, without processes."""
    monkeypatch.setattr(context_parallel, "_load_collective", COLLECTIVES.get)
    for name in MODELS:
        compare_threads(name, Span.full(37), 2, 3)
        for text in list_texts()[3:]:
            compare_threads(name, text, 1, 3)


@pytest.mark.slow
def test_ranks_in_bfloat16_err_at_most_as_the_parity_rule_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 2 times (gradients: 3 times) the error of one rank in bfloat16."""
    monkeypatch.setattr(context_parallel, "_load_collective", COLLECTIVES.get)
    for name in ("training recipe", "paper", "dense"):
        for text in (Span.full(97), list_texts()[3]):
            errors = measure_error_in_bfloat16(name, text, 3)
            for what, factor in (("logits", 2), ("gradients", 3)):
                shared, single = errors[what]
                assert 1e-4 < shared <= factor * single, (name, text, what, shared, single)


def test_gradients_in_bfloat16_are_summed_without_rounding_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_parallel, "_load_collective", COLLECTIVES.get)
    run_threads(4, lambda group, rank: check_gradient_sum(group, rank, 4))


def test_communication_overlaps_with_what_is_computed_before_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the forward pass, and in the backward pass of the same computation."""
    log: list[str] = []

    def load(name: str) -> Callable[..., torch.Tensor]:
        def run(x: torch.Tensor, *_: object) -> torch.Tensor:
            log.append(name)
            return torch.cat([x, x]) if name == "all_gather" else x

        return run

    monkeypatch.setattr(context_parallel, "_load_collective", load)
    own, other = (torch.ones(1, 4, 3, requires_grad=True) for _ in range(2))
    pending = ContextShard(Span.full(8), 0, 2, cast(Any, object())).start_gather(2 * own)
    computed = 2 * other
    computed.register_hook(lambda gradient: log.append("computation"))
    (pending.wait().sum() + computed.sum()).backward()
    assert log == ["all_gather", "wait", "all_to_all", "computation", "wait"]
    assert own.grad is not None and bool((own.grad == 4).all())


def test_one_rank_computes_the_whole_text() -> None:
    """In one process: the same logits and gradients as without a shard, from keys that were gathered from nobody."""
    for name in ("training recipe", "dense"):
        for text in list_texts()[1:4]:
            model = make_model(name, "torch")
            tokens, weights = draw(model, 1, text)
            expected = compute(model, tokens, text, weights)
            actual = compute(model, tokens, ContextShard(text, 0, 1), weights)
            for value, truth in zip(actual, expected, strict=True):
                torch.testing.assert_close(value, truth, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_compiled_blocks_serve_all_documents() -> None:
    """Attention of a shard is excluded from the traced graph, so other documents compile nothing."""
    model, counter = make_model("training recipe", "torch"), CompileCounterWithBackend("aot_eager")
    texts = [text for text in list_texts() if text.capacity is not None and text.n_queries == 109]
    texts += [Span.packed(torch.tensor([0, *bounds, 109], dtype=torch.int32), 12) for bounds in ((40,), (3, 3, 90))]
    texts = [Span("packed", text.bounds, capacity=12) for text in texts]
    tokens, weights = draw(model, 1, texts[0])
    expected = [compute(model, tokens, ContextShard(text, 0, 1), weights) for text in texts]
    for block in model.blocks:
        block.compile(backend=counter, dynamic=False)
    frame_counts = set[int]()
    for text, truths in zip(texts, expected, strict=True):
        for value, truth in zip(compute(model, tokens, ContextShard(text, 0, 1), weights), truths, strict=True):
            torch.testing.assert_close(value, truth, rtol=0, atol=1e-12)
        frame_counts.add(counter.frame_count)
    assert len(texts) >= 3 and len(frame_counts) == 1


def list_texts() -> list[Span]:
    packed = [
        Span.packed(torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32), capacity)
        for lengths, capacity in PACKED
    ]
    return [Span.full(n) for n in (10, 11, 97)] + packed


def test_ranks_hold_chunks_in_zigzag_order() -> None:
    ranges = [ContextShard(Span.full(83), rank, 4).ranges for rank in range(4)]
    assert [[(part.start, part.stop) for part in parts] for parts in ranges] == [
        [(0, 10), (72, 83)],
        [(10, 20), (62, 72)],
        [(20, 31), (51, 62)],
        [(31, 51)],
    ]


def test_every_token_has_one_rank_and_all_ranks_have_about_as_many() -> None:
    for text in list_texts():
        for size in range(1, 6):
            shards = [ContextShard(text, rank, size) for rank in range(size)]
            rows = torch.arange(text.n_queries)
            taken = [shard.take(rows, dim=0) for shard in shards]
            assert torch.equal(torch.cat(taken).sort().values, rows)
            counts = [len(part) for part in taken]
            assert counts == [shard.n_queries for shard in shards] and max(counts) - min(counts) <= 2
            for shard, own in zip(shards, taken, strict=True):
                placed = shard.place(own[None, :, None] + 1)[0, :, 0]
                assert torch.equal(placed[own], own + 1) and int((placed != 0).sum()) == len(own)
                held, own_rows = shard.find_rows(range(0, text.n_queries, 3))
                assert own[own_rows].tolist() == held and set(held) == set(own.tolist()) & set(rows[::3].tolist())


def test_pieces_cover_the_rows_of_a_rank_with_the_positions_and_keys_of_their_documents() -> None:
    for text in list_texts():
        positions, documents = text.positions(torch.device("cpu")), text.query_document_ids()
        bounds = text.compressed_bounds(NSA)
        for rank in range(3):
            shard = ContextShard(text, rank, 3)
            rows = shard.take(torch.arange(text.n_queries), dim=0)
            assert torch.equal(shard.positions(torch.device("cpu")), positions[rows])
            ends = [0, *(piece.query_rows.stop for piece in shard.pieces)]
            assert [slice(*pair) for pair in pairwise(ends)] == [piece.query_rows for piece in shard.pieces]
            assert ends[-1] == len(rows)
            for piece in shard.pieces:
                own = rows[piece.query_rows]
                assert torch.equal(piece.span.positions(torch.device("cpu")), positions[own])
                assert piece.key_rows.stop == own[-1] + 1 and piece.key_rows.start == own[0] - positions[own[0]]
                assert piece.first_document == documents[own[0]]
                compressed = piece.compressed_rows(text, NSA)
                assert compressed.start == bounds[piece.first_document] and compressed.stop <= bounds[-1]


def test_a_text_that_cannot_be_shared_is_refused() -> None:
    for text, size, message in (
        (Span.full(7), 4, "expected at least 8 tokens"),
        (Span.chunk(3, 20), 2, "pass the whole text"),
    ):
        with pytest.raises(ValueError, match=message):
            ContextShard(text, 0, size)
    with pytest.raises(ValueError, match=r"rank = 2: expected 0 \.\. 1"):
        ContextShard(Span.full(9), 2, 2)
