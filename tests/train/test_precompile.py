"""The dry runs of `nsa-lab warmup` that compile its kernels (see also tests/kernels/test_compiling.py)."""

from __future__ import annotations

import pytest
import torch

from nsa_lab.attention import Span
from nsa_lab.config import RunConfig
from nsa_lab.model import NSATransformer
from nsa_lab.train import precompile
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


def test_a_cpu_or_dense_run_compiles_nothing_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompile, "build_model", lambda *_, **__: pytest.fail("no model is needed"))
    dense = RunConfig.from_dict({"name": "dense", "model": {"attention": "dense"}, "data": {"source": "synthetic"}})
    for config, device in ((dense, torch.device("cuda")), (RunConfig(name="sparse"), torch.device("cpu"))):
        assert precompile.precompile_in_trainer(config, device) == 0.0


def test_the_model_that_compiles_has_one_layer_and_no_pretrained_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[NSATransformer] = []

    def build(config: RunConfig, device: torch.device, **options: bool) -> NSATransformer:
        built.append(build_model(config, torch.device("cpu"), **options))
        return built[-1]

    monkeypatch.setattr(precompile, "build_model", build)
    config = RunConfig.from_dict(
        {"name": "converted", "train": {"initial_weights": "/nothing/there"}, "data": {"source": "synthetic"}}
    )
    assert precompile.precompile_in_trainer(config, torch.device("cuda")) == 0.0, "no kernel on a CPU"
    assert [len(model.blocks) for model in built] == [1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_run_on_a_gpu_compiles_its_kernels_before_it_starts() -> None:
    config = RunConfig.from_dict(
        {
            "name": "tiny",
            "model": {"dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_groups": 2, "d_k": 16, "d_v": 16},
            "runtime": {"device": "cuda", "precision": "bf16"},
            "data": {"source": "synthetic", "documents": "mask"},
            "train": {"stages": STAGES},
        }
    )
    seconds = precompile.precompile_in_trainer(config, torch.device("cuda"))
    from nsa_lab.attention.kernels.parallel_compile import CAN_COMPILE_IN_PARALLEL

    assert (seconds > 0) == CAN_COMPILE_IN_PARALLEL
