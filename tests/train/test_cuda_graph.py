"""CUDA graphs with document masking. Without a GPU, a replay runs the captured step again with its own batch and spans.

Reads on the host then return the documents of the capture, as in a real graph. Tests that need a GPU are in
test_train_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate, count
from typing import Any

import pytest
import torch
from document_batches import SEP, make_document_batch
from hypothesis import given
from hypothesis import strategies as st
from interpreter import keep_what_it_repeats
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from nsa_lab.attention import Span, dense
from nsa_lab.attention.segment_ops import find_documents
from nsa_lab.config import ConfigError, DataConfig, RunConfig, RuntimeConfig, StageConfig
from nsa_lab.data import Batch, compute_document_capacity
from nsa_lab.train import cuda_graph
from nsa_lab.train.build import build_model
from nsa_lab.train.distributed import World
from nsa_lab.train.packing import make_different_span, make_spans
from nsa_lab.train.step import Stepper, make_optimizer

Tiny = Callable[..., RunConfig]
CPU = torch.device("cpu")

# Document lengths of the four rows of each step; they need two or three capacities, depending on the grouping of rows.
LENGTHS = [
    [[32], [10, 22], [5, 27], [31, 1]],
    [[1, 31], [20, 12], [32], [16, 8, 8]],
    [[2] * 16, [32], [32], [32]],
    [[8, 24], [8, 24], [32], [4, 4, 24]],
    [[32], [4] * 8, [3, 29], [1] * 10 + [22]],
]


BATCHES = [make_document_batch(lengths, seed) for seed, lengths in enumerate(LENGTHS)]


def by_tables(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, *_: Any, **kwargs: Any) -> Tensor:
    """Compute what a variable-length kernel computes, with the documents given only by their bounds, as on a GPU."""
    document, t = find_documents(len(q), bounds), torch.arange(len(q))
    seen = (document == document[:, None]) & (t <= t[:, None])
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)


@pytest.fixture
def stepper(monkeypatch: pytest.MonkeyPatch, make_tiny_config: Tiny) -> Callable[..., tuple[nn.Module, Stepper]]:
    """`stepper(graph, ...)`: the tiny dense model and its stepper; a graph of it runs the Python code again."""
    monkeypatch.setattr(cuda_graph, "WARM_UP_PASSES", 1)
    monkeypatch.setattr(cuda_graph, "use_side_stream", lambda device: nullcontext())
    monkeypatch.setattr(dense, "_get_varlen_attn", lambda q, v: by_tables)

    def make(graph: bool, **changes: Any) -> tuple[nn.Module, Stepper]:
        changes = {"batch_size": 4, "accumulate_grad_batches": 1, "model": {"attention": "dense"}} | changes
        config = make_tiny_config(**changes)
        model = build_model(config, CPU)
        parameters = list(model.parameters())

        def run_anew(run: Callable[[], Tensor], pool: Any) -> tuple[Callable[[], None], Tensor, Any]:
            result = run()
            grads = [p.grad for p in parameters]

            def replay() -> None:
                for p in parameters:
                    p.grad = None
                with dense.force_single_call():  # a graph repeats the captured branch
                    result.copy_(run())
                for p, grad in zip(parameters, grads, strict=True):
                    grad.copy_(p.grad)

            return replay, result, (pool or 0) + 1

        if graph:
            monkeypatch.setattr(cuda_graph, "capture_graph", run_anew)
        settings: dict[str, Any] = {"device": CPU, "use_bf16": False, "world": World(), "separator": SEP}
        settings["use_graph"] = lambda stage: graph if stage.cuda_graph is None else stage.cuda_graph
        settings["auxiliary_loss"] = model.auxiliary_loss if config.model.has_selection_loss else None
        return model, Stepper(model, model, make_optimizer(model, config.train), config.train, **settings)

    return make


def step(stepper: Stepper, batch: Batch) -> Tensor:
    return stepper.step(*batch[:2], 1e-3, lambda: None, weights=batch.weights, documents=batch.documents)


def trained(model: nn.Module, stepper: Stepper, batches: list[Batch]) -> tuple[Tensor, list[Tensor]]:
    """Return the results of the steps, and gradients and weights after each."""
    results, left = [], []
    for batch in batches:
        results.append(step(stepper, batch))
        left.append(torch.cat([x.detach().flatten() for p in model.parameters() for x in (p.grad, p)]))
    return torch.stack(results), left


@pytest.mark.slow
def test_a_graph_replays_long_documents_of_any_length(stepper: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a graph, a step would attend to each long document separately, if that is faster."""
    alone, attend = [], dense._attend_padded
    monkeypatch.setattr(dense, "LONG_DOCUMENT", 20)
    monkeypatch.setattr(dense, "_uses_cudnn_sdpa", lambda device: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # as in the stand-in for a graph
    monkeypatch.setattr(dense, "_attend_padded", lambda q, k, v: (alone.append(q.shape[1]), attend(q, k, v))[1])
    model, graphed = stepper(True)
    found, left = trained(model, graphed, BATCHES)
    assert not alone
    model, run_without_graph = stepper(False)
    expected, weights = trained(model, run_without_graph, BATCHES)
    layers = len(model.blocks)
    assert len(alone) == layers * sum(length >= 20 for rows in LENGTHS for row in rows for length in row)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for a, b in zip(left, weights, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("micro", "optimizer"), [(4, "adamw"), (2, "adamw"), (1, "adamw"), (2, "muon")])
def test_steps_with_graphs_equal_those_without(stepper: Callable[..., Any], micro: int, optimizer: str) -> None:
    """Losses, gradients and weights are equal bit for bit, with layouts of two capacities, for every grouping of rows."""
    changes = {"micro_batch_size": micro, "optimizer": optimizer}
    model, graphed = stepper(True, **changes)
    random = torch.get_rng_state()
    found, left = trained(model, graphed, BATCHES)
    assert torch.equal(torch.get_rng_state(), random)
    capacities = {tuple(span.capacity for span in make_spans(batch.split(micro))) for batch in BATCHES}
    assert len(graphed._graphs._captured_steps) == len(capacities) in (2, 3) and graphed._graphs._pool == len(capacities)
    expected, wanted = trained(*stepper(False, **changes), BATCHES)
    assert torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(left, wanted, strict=True))


@pytest.mark.parametrize("changes", [{"seq_len": 48, "batch_size": 2}, {"batch_size": 4, "rope_theta": 321.0}])
def test_each_stage_has_its_own_graphs(stepper: Callable[..., Any], changes: dict[str, Any]) -> None:
    """Graphs of earlier stages, with another shape or rotary base, are released; steps equal those without graphs."""
    stage = StageConfig(**{"seq_len": 32, **changes})
    lengths = [[[stage.seq_len]] * stage.batch_size, [[1] * (stage.seq_len - 7) + [7]] * stage.batch_size]
    later = [make_document_batch(rows, seed) for seed, rows in enumerate(lengths, len(BATCHES))]

    def run(graph: bool) -> tuple[Stepper, Tensor, list[Tensor]]:
        model, taken = stepper(graph, model={"attention": "dense"})
        results, left = trained(model, taken, BATCHES[:2])
        taken.stage = stage
        model.config = model.config.model_copy(update={"rope_theta": stage.rope_theta or model.config.rope_theta})
        more, then = trained(model, taken, later)
        return taken, torch.cat([results, more]), left + then

    graphed, found, left = run(True)
    captured = graphed._graphs._captured_steps.values()
    assert len(captured) == graphed._graphs._pool == 2
    assert {step.batch.inputs.shape for step in captured} == {(stage.batch_size, stage.seq_len)}
    _, expected, wanted = run(False)
    assert torch.equal(found, expected) and all(torch.equal(a, b) for a, b in zip(left, wanted, strict=True))


def test_a_stage_may_disable_graphs(stepper: Callable[..., Any]) -> None:
    """The previous stage leaves nothing behind, in particular no gradients; a later stage has its own graphs."""
    run_without_graph = StageConfig(seq_len=32, batch_size=4, cuda_graph=False)

    def run(graph: bool) -> tuple[Stepper, list[Tensor]]:
        model, taken = stepper(graph)
        own, found = taken.stage, []
        for stage, batch, captured in (
            (own, 0, graph),
            (run_without_graph, 1, False),
            (run_without_graph, 2, False),
            (own, 3, graph),
        ):
            taken.stage = stage
            found += trained(model, taken, [BATCHES[batch]])[1]
            assert len(taken._graphs._captured_steps) == captured
        return taken, found

    (graphed, found), (_, expected) = run(True), run(False)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    graphed.stage = run_without_graph
    step(graphed, BATCHES[0])
    assert graphed._graphs._pool is None


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:divide by zero encountered in log2:RuntimeWarning")  # a row that sees no block
@pytest.mark.parametrize("recipe", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_the_kernels_use_the_documents_of_the_spans(stepper: Callable[..., Any], recipe: bool) -> None:
    """With the interpreter. In the training recipe, indexer, convolved keys and selection loss have their own tables."""
    pytest.importorskip("triton.runtime.interpreter")
    keep_what_it_repeats()
    more = {"rotary_share": 0.5, "matching_heads": 1, "selection_loss": 0.1, "indexer_block": 4} if recipe else {}
    changes: dict[str, Any] = {
        "model": {"dim": 32, "n_layers": 1, "n_heads": 4, "n_kv_groups": 2, "d_k": 16, "d_v": 16, **more},
        "nsa": {"l": 8, "d": 4, "l_sel": 16, "n_sel": 3, "w": 8},
        "runtime": {"device": "cpu", "backend": "triton"},
        "batch_size": 1,
        "seq_len": 48,
    }
    lengths = [[9, 5, 34], [1, 30, 17], [17, 2, 4, 4, 21]]
    batches = [make_document_batch([row], seed) for seed, row in enumerate(lengths)]
    model, graphed = stepper(True, **changes)
    found, left = trained(model, graphed, batches)
    assert len(graphed._graphs._captured_steps) == 2
    expected, wanted = trained(*stepper(False, **changes), batches)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(left, wanted, strict=True))


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_a_model_that_reads_document_starts_on_the_host_is_rejected(
    stepper: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    """The torch backend loops over documents on the host. No update is applied."""
    monkeypatch.setattr(dense, "_get_varlen_attn", lambda q, v: None)
    model, graphed = stepper(True, model={"attention": attention})
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(
        ConfigError, match=r"replayed with other documents.*set cuda_graph: false in runtime or in the stage"
    ):
        step(graphed, BATCHES[0])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("size", [3e-4, 2e-3, 8e-3])
def test_gradients_may_differ_as_much_as_two_passes_without_graph(stepper: Callable[..., Any], size: float) -> None:
    """Kernels may add in any order; above MAX_GRADIENT_TOLERANCE no difference is accepted."""
    model, graphed = stepper(True)
    random = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.register_hook(lambda grad: grad + size * grad.square().mean().sqrt() * torch.randn(grad.shape, generator=random))
    if size < 5e-3:
        step(graphed, BATCHES[0])
        return
    with pytest.raises(ConfigError, match=r"loss .*\(allowed 0\.001\), of the gradient 0\.01\d* \(allowed 0\.005\)"):
        step(graphed, BATCHES[0])


def test_the_error_for_a_step_that_cannot_be_captured_has_the_reason(
    stepper: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run: Callable[[], Tensor], pool: Any) -> None:
        raise RuntimeError("Cannot copy between CPU and CUDA tensors\nduring CUDA graph capture")

    _, graphed = stepper(True)
    monkeypatch.setattr(cuda_graph, "capture_graph", refuse)
    with pytest.raises(
        ConfigError, match=r"captured \(Cannot copy .* tensors\): .*set cuda_graph: false in runtime or in the stage"
    ):
        step(graphed, BATCHES[0])


def test_positions_from_the_host_are_rejected(stepper: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(span: Span, device: torch.device | None = None) -> Tensor:
        return torch.cat([document.positions() for document in span.documents])

    _, graphed = stepper(True)
    monkeypatch.setattr(Span, "positions", counted)
    with pytest.raises(ConfigError, match="reads document boundaries on the host"):
        step(graphed, BATCHES[0])


def test_a_gradient_that_a_replay_does_not_reproduce_is_rejected(stepper: Callable[..., Any]) -> None:
    """The loss is right, only the gradient is wrong."""
    model, graphed = stepper(True)
    factor = count(1)
    model.head.weight.register_hook(lambda grad: grad * next(factor))
    with pytest.raises(ConfigError, match=r"loss 0 \(.* of the gradient 0\.\d+ "):
        step(graphed, BATCHES[0])


def test_nan_fails_the_replay_check(stepper: Callable[..., Any]) -> None:
    model, graphed = stepper(True)
    model.head.register_forward_hook(lambda module, inputs, output: output * float("nan"))
    with pytest.raises(ConfigError, match="of the loss nan"):
        step(graphed, BATCHES[0])


@pytest.mark.parametrize("documents", [None, BATCHES[0].documents], ids=["one text", "documents"])
def test_moments_are_allocated_before_the_first_capture_only(
    stepper: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, documents: Tensor | None
) -> None:
    """Without documents nothing is checked, so the torch backend is accepted."""
    monkeypatch.setattr(dense, "_get_varlen_attn", lambda q, v: None if documents is None else by_tables)
    recorded: list[str] = []
    make, run_without_graph = Stepper._allocate_moments, cuda_graph.GradientGraphs._run_without_graph
    monkeypatch.setattr(Stepper, "_allocate_moments", lambda self: recorded.append("moments") or make(self))
    monkeypatch.setattr(
        cuda_graph.GradientGraphs,
        "_run_without_graph",
        lambda self, *args: recorded.append("plain") or run_without_graph(self, *args),
    )
    _, graphed = stepper(True)
    for batch in (BATCHES[0], BATCHES[2]):
        step(graphed, batch._replace(documents=None if documents is None else batch.documents))
    captures = ["plain", "moments"] if documents is None else ["plain"] * 3 + ["moments"] + ["plain"] * 3
    assert recorded == captures


def test_a_configuration_may_set_graphs_and_masking() -> None:
    assert RunConfig(data=DataConfig(documents="mask"), runtime=RuntimeConfig(cuda_graph=True)).runtime.cuda_graph


def test_micro_batches_of_a_step_have_one_capacity() -> None:
    micro_batches = BATCHES[2].split(1)
    assert [compute_document_capacity(part.documents, 32) for part in micro_batches] == [16, 4, 4, 4]
    spans = make_spans(micro_batches)
    assert [span.capacity for span in spans] == [16] * 4 and len({span.graph_key for span in spans}) == 1
    assert [span.bounds for span in spans] == [tuple(part.documents.tolist()) for part in micro_batches]
    assert make_spans([part._replace(documents=None) for part in micro_batches]) == [None] * 4


@given(lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4), room=st.integers(0, 2), more=st.integers(0, 3))
def test_the_different_span_differs_as_much_as_possible(lengths: list[int], room: int, more: int) -> None:
    """Compare with all possible layouts."""
    lengths = [*lengths[1:], lengths[0] + 1]
    total, capacity, longest = sum(lengths), len(lengths) + room, max(lengths) + more
    span = Span.packed(torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32), capacity, longest)
    other = make_different_span(span)
    assert other.graph_key == span.graph_key

    def layouts(left: int, documents: int) -> list[list[int]]:
        if not left:
            return [[]]
        longest_next = min(left, longest) if documents else 0
        return [[n, *rest] for n in range(1, longest_next + 1) for rest in layouts(left - n, documents - 1)]

    possible = {tuple(layout) for layout in layouts(total, capacity)}
    mine, its = (tuple(d.end for d in s.documents if d.end) for s in (span, other))
    assert {mine, its} <= possible and (mine == its) == (len(possible) == 1)


def test_the_different_span_differs_in_many_tokens() -> None:
    """The reversed documents are nearly the same here; a difference in a few tokens would be hard to tell from rounding."""
    for lengths, capacity in (([1023, 1025], 2), ([2048] * 4, 8), ([512] * 16, 16), ([9] * 63 + [33], 64)):
        bounds = torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32)
        span = Span.packed(bounds, capacity, 2048)
        moved = span.positions(CPU) != make_different_span(span).positions(CPU)
        assert moved.float().mean() >= 0.4


def test_out_of_memory_in_a_capture_is_not_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(run: Any, pool: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(cuda_graph, "use_side_stream", lambda device: nullcontext())
    monkeypatch.setattr(cuda_graph, "capture_graph", full)
    weight, tokens = torch.zeros(2, requires_grad=True), torch.zeros(1, 4, dtype=torch.int64)
    graphs = cuda_graph.GradientGraphs(lambda batch, spans: weight.sum()[None].detach(), [weight], torch.device("cpu"))
    with pytest.raises(torch.OutOfMemoryError):
        graphs(Batch(tokens, tokens), [None], StageConfig())


def test_every_loss_of_a_replay_is_compared_with_a_pass_without_graph() -> None:
    tokens, grads = torch.zeros(1, 4, dtype=torch.int64), [torch.ones(3)]
    recorded = torch.tensor([2.0, 0.5]), grads
    step = cuda_graph.CapturedStep(Batch(tokens, tokens), [None], lambda: None, torch.tensor([2.0, 0.7]), grads)
    with pytest.raises(ConfigError, match=r"relative difference of the loss 0\.4"):
        cuda_graph._check_replay(step, recorded, recorded)
