"""A compiled model computes what the eager one does, gradients included."""

import shutil

import pytest
import torch

from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.model import NSATransformer

CONFIG = ModelConfig(
    dim=32, n_layers=2, n_heads=4, n_kv_groups=2, d_k=8, d_v=8, nsa=NSAConfig(l=8, d=4, l_sel=8, n_sel=3, w=10)
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own modules warn of each other
@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_compiled_blocks_match_eager_ones(attention: str) -> None:
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
