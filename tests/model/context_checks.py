"""Check of context parallelism: `python context_checks.py STORE RANK SIZE [MODEL]` is one rank, started by `run_ranks`.

Every rank computes each case alone, and its share of it with the others, in float64. It raises where the two differ.
"""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from nsa_lab.attention import Span
from nsa_lab.attention.context_parallel import ContextShard
from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.model import NSATransformer, SparseAttention
from nsa_lab.train.distributed import World

TOLERANCE = 1e-12
NSA: dict[str, Any] = {"l": 8, "d": 4, "l_sel": 8, "n_sel": 4, "w": 13, "phi": "mlp"}
SMALL: dict[str, Any] = {
    "dim": 20,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_groups": 2,
    "d_k": 6,
    "d_v": 10,
    "mlp_hidden": 22,
    "vocab_size": 101,
}
RECIPE: dict[str, Any] = {
    "rotary_share": 1.0,
    "matching_heads": 1,
    "selection_loss": 0.3,
    "indexer_block": 2,
    "ngrams": 4,
    "ngram_rows": 61,
    "ngram_width": 10,
}
# name -> (options of the model, options of NSA)
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "paper": ({}, {}),
    "training recipe": (RECIPE, {"phi": "pool"}),
    "keys pooled before RoPE, every second layer": (
        {**RECIPE, "indexer_every": 2, "indexer_order": ["pool", "norm", "rotate"], "indexer_block": 4},
        {"phi": "avg"},
    ),
    "mean keys, without a window": ({"branches": ["cmp", "sel"]}, {"scores": "mean_key", "head_reduction": "max"}),
    "one set of keys and values": ({"shared_kv": True, "matching_heads": 1}, {"phi": "linear"}),
    "indexer learns from dense attention": (
        {"branches": ["sel"], "selection_loss": 0.3, "indexer_block": 1, "indexer_dtype": "fp8"},
        {},
    ),
    "dense": ({"attention": "dense", "matching_heads": 1}, {}),
}
# The models of which layers are computed again in the backward pass.
RECOMPUTED = ("keys pooled before RoPE, every second layer",)
# Document lengths of packed texts: one token, empty, longer than a chunk, and ends at odd places.
PACKED: tuple[tuple[tuple[int, ...], int | None], ...] = (
    ((1, 70, 0, 3, 29, 5), None),
    ((55, 54), 9),
    ((7, 1, 1, 9, 90), 12),
)


def run_ranks(n_ranks: int, *model: str) -> None:
    """Run the check on `n_ranks` ranks, of one of `MODELS` or of all."""
    from gloo_ranks import start_ranks  # a rank cannot import it

    start_ranks(__file__, n_ranks, *model)


def list_cases(n_ranks: int) -> Iterator[tuple[str, Span, int]]:
    """Yield (model, layout of the text, batch) of every case."""
    for name in MODELS:
        yield name, Span.full(109), 2
        for lengths, capacity in PACKED:
            bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            yield name, Span.packed(bounds, capacity), 1
    yield "training recipe", Span.full(2 * n_ranks), 1
    yield "training recipe", Span.full(2 * n_ranks + 1), 3


def compute(model: NSATransformer, tokens: Tensor, span: Span | ContextShard, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits and the gradients, as one vector, of the weighted logits and the auxiliary loss."""
    model.zero_grad(set_to_none=True)
    logits = model(tokens, span)
    ((logits * weights).sum() + model.auxiliary_loss()).backward()
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return logits.detach(), torch.cat([gradient.flatten() for gradient in gradients])


def make_model(name: str, backend: str) -> NSATransformer:
    """Return a model of `MODELS` in float64, in training mode, without weights that are zero or equal."""
    options, nsa_options = MODELS[name]
    nsa = NSAConfig(**{**NSA, **nsa_options})
    model = NSATransformer(ModelConfig(**SMALL, **options, nsa=nsa), backend=backend, dtype=torch.float64, seed=3).double()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.gradient_checkpointing = name in RECOMPUTED
    for module in model.modules():
        if isinstance(module, SparseAttention):
            module.trains_densely = name == "indexer learns from dense attention"
    return model.train()


def draw(model: NSATransformer, batch: int, text: Span) -> tuple[Tensor, Tensor]:
    """Return tokens and weights of the logits of whole texts."""
    torch.manual_seed(1)
    tokens = torch.randint(model.config.vocab_size, (batch, text.n_queries))
    return tokens, torch.randn(batch, text.n_queries, model.config.vocab_size, dtype=torch.float64)


def check_case(
    name: str, text: Span, batch: int, rank: int, n_ranks: int, backends: tuple[str, ...], device: torch.device
) -> None:
    for backend in backends:
        if MODELS[name][0].get("attention") == "dense" and backend == "reference":
            continue
        model = make_model(name, backend).to(device)
        tokens, weights = (x.to(device) for x in draw(model, batch, text))
        expected, expected_gradients = compute(model, tokens, text, weights)
        shard = ContextShard(text, rank, n_ranks, distributed.group.WORLD)
        logits, gradients = compute(model, shard.take(tokens), shard, shard.take(weights))
        distributed.all_reduce(gradients)
        compare(f"{name}, {backend}, {text}: logits", logits, shard.take(expected))
        compare(f"{name}, {backend}, {text}: gradients", gradients, expected_gradients)


def compare(what: str, actual: Tensor, expected: Tensor) -> None:
    error = ((actual - expected).abs().max() / expected.abs().max()).item()
    assert error <= TOLERANCE, f"{what}: relative error {error:.3g}"


def check_gradient_sum(group: Any, rank: int, n_ranks: int, device: torch.device | None = None) -> None:
    """The gradient of gathered rows in bfloat16 is the sum over the ranks, rounded once."""
    generator = torch.Generator().manual_seed(0)
    shard = ContextShard(Span.full(61), rank, n_ranks, group)
    gradients = torch.randn(n_ranks, 2, 61, 5, generator=generator).bfloat16().to(device)
    own = torch.zeros(2, shard.n_queries, 5, dtype=torch.bfloat16, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(shard.gather(own), own, gradients[rank])
    assert torch.equal(gradient, shard.take(gradients.double().sum(0).bfloat16()))


class ThreadGroup:
    """A group of ranks that are threads of this process, whose collectives are `COLLECTIVES`."""

    def __init__(self, n_ranks: int) -> None:
        self._barrier, self._values = threading.Barrier(n_ranks, timeout=60), [torch.empty(0)] * n_ranks
        self._rank = threading.local()

    def set_rank(self, rank: int) -> None:
        self._rank.value = rank

    def abort(self) -> None:
        self._barrier.abort()

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._exchange(x), dim)

    def all_to_all(self, x: Tensor) -> Tensor:
        return torch.cat([value.chunk(len(self._values))[self._rank.value] for value in self._exchange(x)])

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._values[self._rank.value] = x.detach().clone()
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()
        return values


COLLECTIVES: dict[str, Callable[..., Tensor]] = {
    "all_gather": lambda x, dim, group: group.all_gather(x, dim),
    "all_to_all": lambda x, output_sizes, input_sizes, group: group.all_to_all(x),
    "wait": lambda x: x,
}


def run_threads(n_ranks: int, function: Callable[[Any, int], Any]) -> list[Any]:
    """Return the result of `function(group, rank)` of ranks that are threads. Use it with `COLLECTIVES`."""
    group = ThreadGroup(n_ranks)

    def run(rank: int) -> Any:
        group.set_rank(rank)
        try:
            return function(group, rank)
        except BaseException:
            group.abort()
            raise

    with ThreadPoolExecutor(n_ranks) as pool:
        return list(pool.map(run, range(n_ranks)))


def measure_error_in_bfloat16(name: str, text: Span, n_ranks: int) -> dict[str, tuple[float, float]]:
    """Return the errors of logits and of gradients against float64, each of ranks that are threads and of one rank.

    Both compute in bfloat16 under autocast. Use it with `COLLECTIVES`.
    """
    exact_model = make_model(name, "torch")
    tokens, weights = draw(exact_model, 1, text)
    exact = compute(exact_model, tokens, text, weights)
    model = NSATransformer(exact_model.config, backend="torch", dtype=torch.bfloat16).train()
    model.load_state_dict(exact_model.state_dict())

    def compute_low(tokens: Tensor, span: Span | ContextShard, weights: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return compute(copy.deepcopy(model), tokens, span, weights)

    def compute_share(group: Any, rank: int) -> tuple[Tensor, Tensor]:
        shard = ContextShard(text, rank, n_ranks, group)
        logits, gradients = compute_low(shard.take(tokens), shard, shard.take(weights))
        return shard.place(logits), gradients

    parts = run_threads(n_ranks, compute_share)
    shared = [torch.stack(values).double().sum(0) for values in zip(*parts, strict=True)]
    single = compute_low(tokens, text, weights)
    errors = [
        tuple(((x.double() - truth).norm() / truth.norm()).item() for x in values)
        for *values, truth in zip(shared, single, exact, strict=True)
    ]
    return {"logits": errors[0], "gradients": errors[1]}


def compare_threads(name: str, text: Span, batch: int, n_ranks: int) -> None:
    """Compare ranks that are threads with one rank, as `check_case` does. Use it with `COLLECTIVES`."""
    model = make_model(name, "torch")
    tokens, weights = draw(model, batch, text)
    expected, expected_gradients = compute(model, tokens, text, weights)

    def compute_share(group: Any, rank: int) -> tuple[Tensor, Tensor]:
        shard = ContextShard(text, rank, n_ranks, group)
        return compute(copy.deepcopy(model), shard.take(tokens), shard, shard.take(weights))

    results = run_threads(n_ranks, compute_share)
    for rank, (logits, _) in enumerate(results):
        compare(f"{name}, {text}: logits of rank {rank}", logits, ContextShard(text, rank, n_ranks).take(expected))
    gradients = torch.stack([gradient for _, gradient in results]).sum(0)
    compare(f"{name}, {text}: gradients", gradients, expected_gradients)


def main(store: str, rank: int, n_ranks: int, model: str | None = None) -> None:
    torch.set_num_threads(1)
    use_gpus = torch.cuda.device_count() >= n_ranks
    device = torch.device("cuda", rank) if use_gpus else torch.device("cpu")
    if use_gpus:
        torch.cuda.set_device(device)
    world = World(rank, n_ranks, rank, n_ranks, Path(store))
    world.init_process_group(device)
    check_gradient_sum(distributed.group.WORLD, rank, n_ranks, device)
    cases = [case for case in list_cases(n_ranks) if model in (None, case[0])]
    # With one model, a full text and a packed one are enough.
    for name, text, batch in cases if model is None else cases[:2]:
        check_case(name, text, batch, rank, n_ranks, ("torch",) if model else ("torch", "reference"), device)
    world.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
