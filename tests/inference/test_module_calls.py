"""A cached step computes what a forward pass does, whatever lives on the modules: hooks, adapters, quantized weights."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from looping import looped
from tiny_models import TINY_NSA, build_model, tiny_config
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as torch_module
from torch.nn.utils import parametrize, prune

from nsa_lab.attention.kernels.decoding import decoding_table
from nsa_lab.config import NSAConfig
from nsa_lab.inference import Decoder, decode, decode_graph, plain_weights
from nsa_lab.inference.plain_weights import WeightSnapshot, is_plain
from nsa_lab.model import NSATransformer

# Together they have every kind of map: phi with weights, an indexer, convolutions, n-grams, both attentions and MLPs.
NSA_MODEL = {
    "nsa": TINY_NSA.model_copy(update={"phi": "mlp"}),
    "selection_loss": 0.1,
    "indexer_block": 2,
    "matching_heads": 1,
    "mlp": "gated",
}
DENSE_MODEL = {"attention": "dense", "matching_heads": 1, "ngrams": 3, "ngram_rows": 50, "ngram_width": 4}
KERNEL_NSA = NSAConfig(l=8, d=4, l_sel=16, n_sel=3, w=20, phi="pool")


def sample_tokens(*shape: int) -> Tensor:
    return torch.randint(0, 37, shape, generator=torch.Generator().manual_seed(1))


class UncapturedGraph:
    """Runs the step again at every replay. Like a CUDA graph, it cannot be copied."""

    def __init__(self, run: Callable[[], Tensor]) -> None:
        self._run, self.result = run, run()

    def replay(self) -> None:
        self.result.copy_(self._run())

    def __reduce__(self) -> str:
        raise TypeError("cannot pickle a graph")


def run_without_graph(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """Replace `capture_graph`, which needs a GPU."""
    graph = UncapturedGraph(run)
    return graph.replay, graph.result


def enable_graphs(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Run steps of one token with the function that a CUDA graph captures. Return the graphs that are built."""
    graphs, build_graph = list[object](), decode.DecodeGraph
    monkeypatch.setattr(decode, "can_capture", lambda cache: True)
    monkeypatch.setattr(decode_graph, "capture_graph", run_without_graph)
    monkeypatch.setattr(decode, "DecodeGraph", lambda *args: graphs.append(build_graph(*args)) or graphs[-1])
    return graphs


@pytest.fixture(params=["steps", "graph"])
def graph(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Graphs that are built, or that are not used."""
    return enable_graphs(monkeypatch) if request.param == "graph" else []


@pytest.fixture
def enabled_graph(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """For changes that a graph would miss. A decoder without a graph would run the same steps."""
    return enable_graphs(monkeypatch)


@torch.no_grad()
def check_steps_equal_forward(model: NSATransformer, tolerance: float = 1e-10, **options: Any) -> None:
    """Compare a prefill, a chunk and single tokens with one forward pass."""
    tokens = sample_tokens(2, 34)
    full = model(tokens)
    decoder, start = Decoder(model, 34, batch=2, **options), 0
    for width in (21, 9, *[1] * 4):
        logits = decoder.append(tokens[:, start : start + width])
        torch.testing.assert_close(logits, full[:, start : start + width], rtol=0, atol=tolerance)
        start += width


def change(x: Tensor) -> Tensor:
    """Mix channels: a scale alone would not change the ranking of blocks by an indexer."""
    return 1.25 * x + 0.5 * x.roll(1, -1)


class Change(nn.Module):
    """Parametrization, and wrapper of a linear layer."""

    def __init__(self, wrapped: nn.Module | None = None) -> None:
        super().__init__()
        self.wrapped = wrapped

    def forward(self, x: Tensor) -> Tensor:
        return change(x if self.wrapped is None else self.wrapped(x))


class LowRank(nn.Module):
    """An adapter as PEFT injects it: the layer is replaced by a module that contains it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer
        generator = torch.Generator().manual_seed(layer.in_features)
        self.a = nn.Parameter(torch.randn(2, layer.in_features, generator=generator).to(layer.weight.dtype) / 4)
        self.b = nn.Parameter(torch.randn(layer.out_features, 2, generator=generator).to(layer.weight.dtype) / 4)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + x @ self.a.mT @ self.b.mT


class ChangedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return change(super().forward(x))


class ChangedWeight(Tensor):
    """A tensor whose matrix products differ from the products of its data, as with quantized tensors."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        is_product = function in (nn.functional.linear, nn.functional.embedding)
        return change(result.as_subclass(Tensor)) if is_product else result


def change_output(module: nn.Module, inputs: object, output: Any) -> Any:
    """Forward hook on any module."""
    if isinstance(output, Tensor):
        return change(output)
    parts = change(output[0]), *output[1:]
    return type(output)(*parts) if hasattr(output, "_fields") else parts


def change_input(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward pre-hook on any module whose first argument is floating point."""
    return change(inputs[0]), *inputs[1:]


def replace_forward(module: nn.Module) -> None:
    """Wrap `forward` of one module, as accelerate does."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: change_output(module, args, forward(*args, **kwargs))


def replace_in_parent(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)


def change_class(layer: nn.Linear) -> None:
    layer.__class__ = ChangedLinear


def add_bias(layer: nn.Linear) -> None:
    layer.bias = nn.Parameter(torch.linspace(-1, 1, layer.out_features, dtype=layer.weight.dtype))


def set_weight_class(layer: nn.Linear | nn.Embedding) -> None:
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(ChangedWeight))


def add_offload_hook(layer: nn.Linear) -> None:
    """Keep the weight on the meta device, and load it for each call, as hooks of accelerate do."""

    class Hook:
        execution_device = "cpu"

    weight, forward = change(layer.weight.detach()), layer.forward

    def load_and_call(x: Tensor) -> Tensor:
        layer.weight = nn.Parameter(weight)
        output = forward(x)
        layer.weight = nn.Parameter(weight.to("meta"))
        return output

    layer.weight, layer._hf_hook, layer.forward = nn.Parameter(weight.to("meta")), Hook(), load_and_call


# For tests that change each module in turn.
MODELS = [pytest.param(NSA_MODEL, id="nsa"), pytest.param(DENSE_MODEL, id="dense", marks=pytest.mark.nightly)]

LINEAR_KINDS: dict[str, Callable[[nn.Module, str], object]] = {
    "forward hook": lambda model, name: model.get_submodule(name).register_forward_hook(change_output),
    "forward pre-hook": lambda model, name: model.get_submodule(name).register_forward_pre_hook(change_input),
    "replaced forward": lambda model, name: replace_forward(model.get_submodule(name)),
    "parametrization": lambda model, name: parametrize.register_parametrization(
        model.get_submodule(name), "weight", Change()
    ),
    "pruning": lambda model, name: prune.random_unstructured(model.get_submodule(name), "weight", 0.5),
    "weight norm": lambda model, name: (
        nn.utils.weight_norm(model.get_submodule(name)),
        model.get_submodule(name).weight_g.data.add_(
            torch.linspace(0, 1, len(model.get_submodule(name).weight_g))[:, None]
        ),
    ),
    "wrapper": lambda model, name: replace_in_parent(model, name, Change(model.get_submodule(name))),
    "adapter": lambda model, name: replace_in_parent(model, name, LowRank(model.get_submodule(name))),
    "subclass": lambda model, name: change_class(model.get_submodule(name)),
    "bias": lambda model, name: add_bias(model.get_submodule(name)),
    "tensor subclass": lambda model, name: set_weight_class(model.get_submodule(name)),
    "offloaded weight": lambda model, name: add_offload_hook(model.get_submodule(name)),
}


def list_linears(model: nn.Module) -> list[str]:
    """Return the linear layers of the first block, and those outside of blocks."""
    names = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return [name for name in names if not name.startswith("blocks.") or name.startswith("blocks.0.")]


@pytest.mark.slow
@looped
@pytest.mark.parametrize("kind", LINEAR_KINDS)
@pytest.mark.parametrize("variant", MODELS)
def test_changed_linear_layer(kind: str, variant: dict, enabled_graph: list[object]) -> None:
    """Each linear layer alone. The graph is never used: its replay would not see what the module does."""
    names = list_linears(build_model(tiny_config(**variant)))
    assert {name.rpartition(".")[2] for name in names} >= {"qkv", "out", "up", "down", "head"}
    for name in names:
        model = build_model(tiny_config(**variant))
        plain_logits = model(sample_tokens(2, 40))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # weight_norm is deprecated
            LINEAR_KINDS[kind](model, name)
        assert not torch.equal(model(sample_tokens(2, 40)), plain_logits), f"{kind} on {name} has no effect"
        check_steps_equal_forward(model)
        assert not enabled_graph and not is_plain(model, plain_logits), name


@pytest.mark.slow
@looped
@pytest.mark.parametrize("variant", MODELS)
@pytest.mark.parametrize("how", ["forward hook", "forward pre-hook", "replaced forward"])
def test_hook_on_any_module(how: str, variant: dict, enabled_graph: list[object]) -> None:
    """Blocks, attention, MLP, norms, embeddings, phi, convolutions, the indexer and the model itself."""
    for name, found in build_model(tiny_config(**variant)).named_modules():
        takes_tokens = found.__class__.__name__ in ("NSATransformer", "Embedding", "NgramEmbedding")
        if isinstance(found, nn.ModuleList) or (how == "forward pre-hook" and takes_tokens):
            continue
        model = build_model(tiny_config(**variant))
        LINEAR_KINDS[how](model, name)
        check_steps_equal_forward(model)
        assert not enabled_graph, name


def test_global_hooks_and_autocast_are_not_replayed(graph: list[object]) -> None:
    model = build_model(tiny_config(**NSA_MODEL))
    handle = torch_module.register_module_forward_hook(change_output)
    try:
        check_steps_equal_forward(model)
        assert not graph
    finally:
        handle.remove()
    model = NSATransformer(tiny_config(**NSA_MODEL), seed=5)
    with torch.autocast("cpu", torch.bfloat16):
        check_steps_equal_forward(model, tolerance=0.05)
        assert not graph and not is_plain(model, model.head.weight)


def test_change_between_steps_takes_effect(graph: list[object]) -> None:
    """Hooks, adapters and new weights that come after the first steps, or after a graph was captured, and go again."""
    model, tokens = build_model(tiny_config(**NSA_MODEL)), sample_tokens(1, 34)
    original = copy.deepcopy(model)
    decoder = Decoder(model, 40)
    for position in range(30):
        decoder.append(tokens[:, position : position + 1])
    graphs = [decoder._decode_graph]

    def check_next_step(changed: NSATransformer) -> None:
        """The original model computed the keys of earlier tokens, so compare with a copy of its cache."""
        expected = Decoder(original, 40)
        expected.append(tokens[:, :30])
        expected._model = changed
        torch.testing.assert_close(decoder.append(tokens[:, 30:31]), expected.append(tokens[:, 30:31]), rtol=0, atol=1e-10)
        decoder.crop(1)

    layer = model.blocks[1].attention.out
    handle = layer.register_forward_hook(change_output)
    check_next_step(model)
    handle.remove()
    check_next_step(original)
    graphs.append(decoder._decode_graph)  # of the plain model, captured again
    model.blocks[1].attention.out = LowRank(layer)
    check_next_step(model)
    assert decoder._decode_graph is None, "the graph was captured without the adapter"
    model.blocks[1].attention.out = layer
    check_next_step(original)
    graphs.append(decoder._decode_graph)
    layer.weight = nn.Parameter(layer.weight * 2)
    check_next_step(model)
    graphs.append(decoder._decode_graph)  # of another weight, in other memory
    layer.weight.data = layer.weight.data / 2
    check_next_step(original)
    graphs.append(decoder._decode_graph)
    assert len(set(graphs)) == (5 if graph else 1)


def test_memory_of_replaced_weights_is_kept() -> None:
    """A replay may read it before the check."""
    model = build_model(tiny_config())
    snapshot, weight = WeightSnapshot(model, model.head.weight.device), model.head.weight
    memory = StorageWeakRef(weight.untyped_storage())
    weight.data = weight.data.clone()
    assert not snapshot.is_current() and not memory.expired()
    del snapshot
    assert memory.expired()


def test_method_replaced_on_its_class(graph: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused kernels and a graph do not know it, whether it comes before or after the first steps."""
    model, tokens = build_model(tiny_config(**NSA_MODEL)), sample_tokens(1, 34)
    decoder = Decoder(model, 40)
    decoder.append(tokens[:, :30])
    decoder.append(tokens[:, 30:31])
    attention = model.blocks[0].attention
    activate_gates = type(attention).activate_gates
    monkeypatch.setattr(type(attention), "activate_gates", lambda self, logits: 0.5 * activate_gates(self, logits))
    assert not is_plain(attention, attention.out.weight) and is_plain(model.norm, model.norm.weight)
    decoder.append(tokens[:, 31:32])
    assert decoder._decode_graph is None
    check_steps_equal_forward(model)


def test_copied_decoder_continues_from_the_same_tokens(graph: list[object]) -> None:
    """A captured graph writes to the cache that it was captured for: a copy does not replay it."""
    model, tokens = build_model(tiny_config(**NSA_MODEL)), sample_tokens(1, 34)
    full, other = model(tokens), tokens.flip(1)
    decoder = Decoder(model, 40)
    decoder.append(tokens[:, :29])
    decoder.append(tokens[:, 29:30])
    copied = copy.deepcopy(decoder, {id(model): model})
    for position in range(30, 34):
        decoder.append(other[:, position : position + 1])
        logits = copied.append(tokens[:, position : position + 1])
        torch.testing.assert_close(logits, full[:, position : position + 1], rtol=0, atol=1e-10)


def test_linear_layers_get_the_batch_as_first_dimension() -> None:
    """Adapters that differ between the rows of a batch need it."""
    model, tokens, rows = build_model(tiny_config(**NSA_MODEL)), sample_tokens(2, 40), set[int]()
    for name in list_linears(model):
        model.get_submodule(name).register_forward_pre_hook(lambda module, inputs: rows.add(len(inputs[0])))
    decoder = Decoder(model, 40, batch=2)
    model(tokens)
    decoder.append(tokens[:, :30])
    decoder.append(tokens[:, 30:])
    assert rows == {2}


@pytest.mark.slow
@pytest.mark.parametrize("variant", [{"selection_loss": 0.1, "indexer_block": 2}, {"attention": "dense"}])
def test_changed_module_with_kernels(variant: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernels read the weights of the other modules, and not of the changed one."""
    monkeypatch.setattr(decoding_table, "DECODING_PROGRAMS", 4)
    config = tiny_config(d_k=16, d_v=16, nsa=KERNEL_NSA, matching_heads=1, n_layers=1, **variant)
    for name, found in NSATransformer(config, device="cpu").named_modules():
        if isinstance(found, nn.ModuleList):
            continue
        model = NSATransformer(config, seed=5)
        LINEAR_KINDS["adapter" if isinstance(found, nn.Linear) else "forward hook"](model, name)
        check_few_steps_equal_forward(model)


def check_few_steps_equal_forward(model: NSATransformer) -> None:
    tokens = sample_tokens(1, 36)
    with torch.no_grad():
        full = model(tokens)
        decoder = Decoder(model, 36, backend="triton")
        decoder.append(tokens[:, :34])
        for position in (34, 35):
            logits = decoder.append(tokens[:, position : position + 1])
            torch.testing.assert_close(logits[:, 0], full[:, position], rtol=0, atol=2e-5)


def test_dynamically_quantized_linear_layers() -> None:
    model = NSATransformer(tiny_config(**NSA_MODEL), seed=5).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated
        quantized = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    assert not isinstance(quantized.head, nn.Linear)
    # All tokens of a call share the scale of quantized activations.
    tokens = sample_tokens(1, 40)
    decoder = Decoder(quantized, 40)
    torch.testing.assert_close(decoder.append(tokens), quantized(tokens), rtol=0, atol=1e-5)
    assert (quantized(tokens) - model(tokens)).abs().max() < 0.2


def test_layers_in_other_dtypes(graph: list[object]) -> None:
    """Norms in float32 in a bfloat16 model, as PEFT prepares quantized models, and a head in float64."""
    model = NSATransformer(tiny_config(**NSA_MODEL), seed=5).bfloat16()
    for module in model.modules():
        if module.__class__.__name__ == "RMSNorm":
            module.float()
    check_steps_equal_forward(model, tolerance=0.1)
    assert not graph


@pytest.mark.slow
@pytest.mark.parametrize("variant", [NSA_MODEL, DENSE_MODEL], ids=["nsa", "dense"])
def test_fully_sharded_weights(variant: dict, tmp_path: Path) -> None:
    """FSDP2 on one rank: parameters are DTensors between calls, and hooks gather them in a call."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model = build_model(tiny_config(**variant))
        expected = model(sample_tokens(2, 40)).detach()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert all(type(weight).__name__ == "DTensor" for weight in model.parameters())
        torch.testing.assert_close(model(sample_tokens(2, 40)).detach(), expected)
        check_steps_equal_forward(model)
    finally:
        torch.distributed.destroy_process_group()


def test_weights_on_the_meta_device_are_named() -> None:
    model = build_model(tiny_config())
    model.blocks[1].mlp.down.to("meta")
    with pytest.raises(
        ValueError, match=r"^blocks\.1\.mlp\.down\.weight: expected a weight in memory, got one on the meta"
    ):
        Decoder(model, 10)
    with pytest.raises(ValueError, match=re.escape("embedding.weight: expected a weight in memory")):
        Decoder(build_model(tiny_config()).to("meta"), 10)


def test_compiled_blocks_run_eagerly_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step would be another graph."""
    model, calls = build_model(tiny_config()), []
    for block in model.blocks:
        block._compiled_call_impl = lambda *args, **kwargs: calls.append(1)
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: calls.append(stance) or nullcontext())
    decoder = Decoder(model, 10)
    with pytest.raises(TypeError):
        decoder.append(sample_tokens(1, 5))
    assert calls[0] == "force_eager"


def test_every_class_of_the_model_is_known() -> None:
    """A model without changes takes the fast path; a class that is not listed would silently lose it."""
    norm = {"selection_loss": 0.1, "indexer_block": 2, "indexer_order": ("pool", "norm", "rotate"), "branches": ("sel",)}
    for variant in (NSA_MODEL, DENSE_MODEL, norm, {"nsa": TINY_NSA.model_copy(update={"phi": "pool"})}):
        model = build_model(tiny_config(**variant))
        assert is_plain(model, model.head.weight) and WeightSnapshot(model, model.head.weight.device).is_current()
        assert {type(module) for module in model.modules()} <= plain_weights._PARAMETERS.keys()
    model.head.weight.data = model.head.weight.data.mT.contiguous().mT
    assert not is_plain(model, model.embedding.weight), "kernels read weights row by row"
