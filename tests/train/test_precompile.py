"""The dry runs of `nsa-lab warmup` that compile its kernels (see also tests/kernels/test_compiling.py)."""

from __future__ import annotations

import pytest
import torch

from nsa_lab.attention import Span
from nsa_lab.config import RunConfig
from nsa_lab.model import NSATransformer
from nsa_lab.train.build import build_model
from nsa_lab.train.precompile import dry_run_stages

STAGES = [
    {"steps": 2, "seq_len": 33, "batch_size": 3, "lr": 1e-3},
    {"steps": 2, "seq_len": 65, "batch_size": 1, "lr": 1e-3},
    {"steps": 5, "seq_len": 33, "batch_size": 3, "lr": 1e-4},
]


@pytest.mark.parametrize("documents", ["cross", "mask"])
def test_every_stage_shape_runs_once_forward_and_backward(documents: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig.from_dict(
        {
            "name": "tiny",
            "model": {"dim": 16, "n_layers": 1, "n_heads": 4, "n_kv_groups": 2, "d_k": 4, "d_v": 4},
            "nsa": {"l": 8, "d": 4, "l_sel": 8, "n_sel": 3, "w": 16},
            "runtime": {"device": "cpu"},
            "data": {"source": "synthetic", "documents": documents},
            "train": {"stages": STAGES},
        }
    )
    seen: list[tuple[torch.Size, tuple[int, ...] | None]] = []
    gradients: list[bool] = []
    forward, zero = NSATransformer.forward, torch.optim.Optimizer.zero_grad

    def recorded(self: NSATransformer, tokens: torch.Tensor, span: Span | None = None) -> torch.Tensor:
        seen.append((tokens.shape, span and tuple(document.end for document in span.documents)))
        return forward(self, tokens, span)

    def cleared(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        gradients.append(all(p.grad is not None for p in model.parameters()))
        zero(self, set_to_none)

    monkeypatch.setattr(NSATransformer, "forward", recorded)
    monkeypatch.setattr(torch.optim.Optimizer, "zero_grad", cleared)
    model = build_model(config, torch.device("cpu"))
    dry_run_stages(model, config)
    whole, packed = [((3, 33), None), ((1, 65), None)], [((1, 99), (33, 33, 33)), ((1, 65), (65,))]
    expected = whole if documents == "cross" else [whole[0], packed[0], whole[1], packed[1]]
    assert [(tuple(shape), bounds) for shape, bounds in seen] == expected
    assert gradients == [True] * len(expected) and all(p.grad is None for p in model.parameters())
