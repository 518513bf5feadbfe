"""The requested backend runs: Triton's launches and calls of the other backends are recorded."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_inputs import Inputs, Shape

from nsa_lab import attention
from nsa_lab.attention import dispatch, kernels, reference, torch_backend
from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.model import NSATransformer

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The smallest that every kernel takes, and long enough for a compressed block and for a block to be resolved by its score.
NSA = NSAConfig(l=16, d=16, l_sel=16, n_sel=4, w=20)
SHAPE = Shape(nsa=NSA, T=69, B=1, G=1, h=1, d_k=32, d_v=32)
# Kernels of each part. The compressed branch and the window share one kernel, with W = 0 or W > 0.
FORWARD = {
    "compressed": {"nsa_band_forward, compressed"},
    "selection": {"nsa_block_topk"},
    "selected": {"nsa_selected_union"},
    "window": {"nsa_band_forward, window"},
    "combine": {"nsa_gate_forward"},
}
ALL_FORWARD = set().union(*FORWARD.values())
BACKWARD = {
    *(f"nsa_band_{step}, {branch}" for step in ("dq", "dkv") for branch in ("compressed", "window")),
    "nsa_selected_backward",
    "nsa_gate_backward",
}
NAMES = {
    "compressed": "compressed_attention",
    "selection": "select_blocks",
    "selected": "selected_attention",
    "window": "window_attention",
    "combine": "combine",
}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the names of the kernels that Triton launches, compiled or interpreted."""
    from nsa_lab.attention.kernels import block_topk

    kind, seen = type(block_topk.nsa_block_topk), set()
    run = kind.run

    def record_launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        name = kernel.fn.__name__
        seen.add(f"{name}, {'window' if kwargs['W'] else 'compressed'}" if name.startswith("nsa_band_") else name)
        return run(kernel, *args, **kwargs)

    monkeypatch.setattr(kind, "run", record_launch)
    return seen


@pytest.fixture
def entered(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Return the called parts of the backends without kernels, for example ("torch", "window")."""
    seen: set[tuple[str, str]] = set()

    def spy(backend: str, part: str, run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: seen.add((backend, part)) or run(*args, **kwargs)

    for backend, module in (("torch", torch_backend), ("reference", reference)):
        for part, name in NAMES.items():
            monkeypatch.setattr(module, name, spy(backend, part, getattr(module, name)))
    return seen


@pytest.fixture(scope="module")
def x() -> Inputs:
    return SHAPE.inputs(torch.float32).map(lambda x: x.to(DEVICE))


def list_calls(x: Inputs, backend: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each part of the public functions with a call of it on precomputed inputs."""
    _, lse = reference.compressed_attention(x.q, x.k_cmp, x.v_cmp, NSA)
    blocks = reference.select_blocks(x.q, x.k_cmp, lse, NSA)
    yield "compressed", lambda: attention.compressed_attention(x.q, x.k_cmp, x.v_cmp, NSA, backend=backend)
    yield "selection", lambda: attention.select_blocks(x.q, x.k_cmp, lse, NSA, backend=backend)
    yield "selected", lambda: attention.selected_attention(x.q, x.k_sel, x.v_sel, blocks, NSA, backend=backend)
    yield "window", lambda: attention.window_attention(x.q, x.k_win, x.v_win, NSA, backend=backend)


@pytest.mark.parametrize("backend", ["reference", "torch", "triton", "auto"])
def test_every_branch_runs_on_the_requested_backend(
    backend: str, x: Inputs, launched: set[str], entered: set[tuple[str, str]]
) -> None:
    resolved = attention.resolve_backend(DEVICE, torch.float32, NSA, backend=backend)
    if backend != "auto":
        assert {part_backend.backend for part_backend in resolved.values()} == {backend}
    for part, call in list_calls(x, backend):
        launched.clear(), entered.clear()
        call()
        if resolved[part].backend == "triton":
            assert (launched, entered) == (FORWARD[part], set())
        else:
            assert (launched, entered) == (set(), {(resolved[part].backend, part)})


def test_the_operator_runs_only_kernels_forward_and_backward(
    x: Inputs, launched: set[str], entered: set[tuple[str, str]]
) -> None:
    x = x.map(lambda x: x.detach().requires_grad_())
    out = attention.nsa_attention(*x, NSA, backend="triton")
    assert (launched, entered) == (ALL_FORWARD, set())
    launched.clear()
    torch.autograd.grad(out.sum(), x)
    assert launched >= BACKWARD and not launched & ALL_FORWARD and not entered


def test_the_operator_follows_resolved_backends(x: Inputs, launched: set[str], entered: set[tuple[str, str]]) -> None:
    attention.nsa_attention(*x, NSA, backend=attention.resolve_backend(DEVICE, torch.float32, NSA, backend="triton"))
    assert (launched, entered) == (ALL_FORWARD, set())


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_other_backends_launch_no_kernel(
    backend: str, x: Inputs, launched: set[str], entered: set[tuple[str, str]]
) -> None:
    x = x.map(lambda x: x.detach().requires_grad_())
    torch.autograd.grad(attention.nsa_attention(*x, NSA, backend=backend).sum(), x)
    # The gated sum is one line, which the torch backend takes from the definition.
    assert not launched and {name for name, part in entered if part != "combine"} == {backend}
    assert {part for _, part in entered} == set(dispatch.PARTS)


@pytest.mark.parametrize("part", FORWARD)
def test_one_part_on_kernels_launches_only_its_kernels(
    part: str, x: Inputs, launched: set[str], entered: set[tuple[str, str]]
) -> None:
    resolved = attention.resolve_backend(DEVICE, torch.float32, NSA, backend="torch")
    attention.nsa_attention(*x, NSA, backend={**resolved, part: dispatch.ResolvedBackend("triton", "for this test")})
    assert launched == FORWARD[part]
    assert {entered_part for _, entered_part in entered} == set(dispatch.PARTS) - {part}


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_model_runs_on_the_backend_that_it_was_built_for(
    backend: str, launched: set[str], entered: set[tuple[str, str]]
) -> None:
    config = ModelConfig(dim=32, n_layers=1, n_heads=2, n_kv_groups=1, d_k=32, d_v=32, nsa=NSA)
    model = NSATransformer(config, backend=backend, device=DEVICE, seed=0)
    model(torch.zeros(1, SHAPE.T, dtype=torch.int64, device=DEVICE))
    assert launched == (ALL_FORWARD if backend == "triton" else set())
    assert {name for name, part in entered if part != "combine"} == ({"torch"} if backend == "torch" else set())


def test_the_kernel_backend_has_no_fallback() -> None:
    """Nothing in the kernels' package imports another backend."""
    for path in Path(kernels.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            imported = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            assert not {"torch_backend", "reference", "dispatch"} & {name.split(".")[-1] for name in imported}, path
