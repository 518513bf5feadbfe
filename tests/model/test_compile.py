"""A compiled model equals the eager model, including gradients."""

import functools
import shutil

import pytest
import torch
from looping import looped
from torch._dynamo.testing import CompileCounter

from nsa_lab.attention import Span, dense
from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.model import NSATransformer
from nsa_lab.model import attention_layers as layers

CONFIG = ModelConfig(
    dim=32, n_layers=2, n_heads=4, n_kv_groups=2, d_k=8, d_v=8, nsa=NSAConfig(l=8, d=4, l_sel=8, n_sel=3, w=10)
)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # the compiler's own modules warn of each other
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_compiled_blocks_equal_eager_blocks(attention: str) -> None:
    model = NSATransformer(CONFIG.model_copy(update={"attention": attention}), seed=0)
    tokens = torch.randint(0, 256, (2, 53), generator=torch.Generator().manual_seed(1))
    eager = model(tokens)
    eager.logsumexp(-1).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    for block in model.blocks:
        block.compile(dynamic=False)
    compiled = model(tokens)
    compiled.logsumexp(-1).sum().backward()
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


TRAINING_RECIPE = {
    "rotary_share": 0.5,
    "matching_heads": 1,
    "selection_loss": 0.05,
    "indexer_block": 2,
    "embedding_norm": True,
}
TRAINING_RECIPE |= {"ngrams": 3, "ngram_rows": 50, "ngram_width": 4}
DOCUMENTS = Span.packed(torch.tensor([0, 20, 20, 47], dtype=torch.int32))
SHORT = Span.packed(torch.tensor([0, 9, 9, 20, 30, 40, 47], dtype=torch.int32), capacity=8, longest=11)


def compile_and_run(model: NSATransformer, span: Span | None) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Return the number of traced graphs, and the outputs of the compiled and the eager model."""
    tokens = torch.randint(0, 256, (1, 47), generator=torch.Generator().manual_seed(1))
    model.train()
    eager, graphs = model(tokens, span), []
    torch._dynamo.reset()
    model.blocks[0].compile(backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    compiled = model(tokens, span)
    return len(graphs), compiled, eager


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@looped
@pytest.mark.parametrize("more", [pytest.param({}, marks=pytest.mark.nightly), TRAINING_RECIPE], ids=["plain", "recipe"])
@pytest.mark.parametrize("span", [None, DOCUMENTS, SHORT], ids=["one text", "documents", "short documents"])
def test_a_layer_on_the_kernels_is_one_graph(more: dict[str, object], span: Span | None) -> None:
    """A second graph would store the tensors between them, and accumulate gradients separately."""
    config = ModelConfig.model_validate({**CONFIG.model_dump(), "d_k": 16, "d_v": 16, "n_layers": 1, **more})
    config = config.model_copy(update={"nsa": NSAConfig(l=8, d=4, l_sel=16, n_sel=3, w=10)})
    graphs, compiled, eager = compile_and_run(NSATransformer(config, seed=0, backend="triton"), span)
    assert graphs == 1
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("more", [{}, {"matching_heads": 1}], ids=["plain", "recipe"])
def test_a_dense_layer_with_documents_is_one_graph(more: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stub for PyTorch's varlen attention, which needs half precision on a GPU."""

    def varlen(q, k, v, bounds, _, most, __, window_size):
        owner = torch.bucketize(torch.arange(len(q)), bounds[1:-1], right=True)
        seen = (owner[:, None] == owner) & (torch.arange(len(q))[:, None] >= torch.arange(len(q)))
        return dense._attend_sdpa(q[None], k[None], v[None], seen)[0]

    config = ModelConfig.model_validate({**CONFIG.model_dump(), "attention": "dense", "n_layers": 1, **more})
    model = NSATransformer(config, seed=0)
    apart = model(torch.randint(0, 256, (1, 47), generator=torch.Generator().manual_seed(1)), DOCUMENTS)
    # With the signature of the function that `_load_varlen_attn` returns.
    monkeypatch.setattr(layers, "find_single_call", lambda span, device: functools.partial(varlen))
    monkeypatch.setattr(dense, "supports_varlen", lambda q, v: True)
    graphs, compiled, eager = compile_and_run(model, DOCUMENTS)
    assert graphs == 1
    torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(eager, apart, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("branches", [("cmp", "sel", "win"), ("sel", "win"), ("sel",)])
def test_later_calls_compile_nothing(branches: tuple[str, ...]) -> None:
    """Also where the torch backend leaves the graph: nothing on the stack there is another object in each call."""
    nsa = CONFIG.nsa if "cmp" in branches else CONFIG.nsa.model_copy(update={"scores": "mean_key"})
    model = NSATransformer(CONFIG.model_copy(update={"branches": branches, "nsa": nsa}), backend="torch", seed=0)
    counter, frames = CompileCounter(), []
    for block in model.blocks:
        block.compile(dynamic=False, backend=counter)
    for seed in range(3):
        tokens = torch.randint(0, 256, (2, 53), generator=torch.Generator().manual_seed(seed))
        model(tokens).logsumexp(-1).sum().backward()
        frames.append(counter.frame_count)
    assert frames[0] == frames[1] == frames[2] > 0
