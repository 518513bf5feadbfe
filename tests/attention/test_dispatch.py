"""Which backend each part runs on, and errors that name why a backend cannot run."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_inputs import Shape
from dispatch_inputs import NSA, PACKED, call_all_functions
from looping import looped

from nsa_lab import attention
from nsa_lab.attention import BackendError, dispatch, flash, kernels, reference, torch_backend
from nsa_lab.config import ModelConfig, NSAConfig

CPU = torch.device("cpu")


@pytest.mark.parametrize("span", [attention.Span.chunk(0, 21), attention.Span.chunk(4, 17), PACKED], ids=repr)
def test_the_kernels_support_every_layout(span: attention.Span, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout that is equivalent to a full one is passed as none."""
    monkeypatch.setattr(kernels, "find_device_problem", lambda *_: None)
    monkeypatch.setattr(kernels, "find_shape_problem", lambda *_: None)
    ran = []
    monkeypatch.setattr(kernels, "nsa_attention", lambda *x, **where: ran.append((x, where)))
    x = Shape(T=span.n_queries).inputs()
    keys = [y.new_zeros(1, span.n_keys, *y.shape[2:]) for y in (x.k_win, x.v_win)]
    cmp = [y.new_zeros(1, span.num_compressed(NSA), *y.shape[2:]) for y in (x.k_cmp, x.v_cmp)]
    attention.nsa_attention(x.q, *cmp, *keys, *keys, x.gates, NSA, backend="triton", span=span)
    ((given, where),) = ran
    assert len(given) == 9 and where == {"blocks": None} | ({} if span.is_full else {"span": span})


def test_auto_resolves_to_a_backend_that_supports_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_device_problem", lambda *_: None)
    monkeypatch.setattr(kernels, "find_shape_problem", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a device")
    chunk = attention.Span.chunk(4, 17)
    of = {span: attention.resolve_backend("cuda", torch.float32, NSA, span=span) for span in (None, PACKED, chunk)}
    for span in (None, PACKED, chunk):
        assert {part_backend.backend for part_backend in of[span].values()} == {"triton"}


def test_flash_attn_errors_name_supported_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both when the backend is resolved for a model and in a call without a model."""
    monkeypatch.setattr(flash, "find_flash_problem", lambda *_: None)
    for sizes, words in (
        ({"d_k": 288, "d_v": 288}, "head widths up to 256, got 288; use 256"),
        ({"d_k": 64, "d_v": 32}, "equal key and value widths, got d_k = 64 and d_v = 32; use 64 for both"),
    ):
        for kind in ("nsa", "dense"):
            config = ModelConfig(attention=kind, **sizes)
            with pytest.raises(NotImplementedError, match=words):
                attention.resolve_backend("cpu", torch.bfloat16, config.nsa, config, "flash")
        x = Shape(**sizes).inputs(torch.bfloat16)
        with pytest.raises(NotImplementedError, match=words):
            attention.window_attention(x.q, x.k_win, x.v_win, NSA, backend="flash")
        with pytest.raises(NotImplementedError, match=words):
            attention.dense_attention(x.q, x.k_win, x.v_win, backend="flash")


def test_with_flash_the_other_parts_resolve_like_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the given layout and head widths, which the kernels may not support."""
    monkeypatch.setattr(flash, "find_flash_problem", lambda *_: None)
    monkeypatch.setattr(kernels, "find_device_problem", lambda *_: None)
    monkeypatch.setattr(kernels, "find_shape_problem", lambda nsa, *widths: "too odd" if 24 in widths else None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a device")
    chunk, odd = attention.Span.chunk(4, 17), ModelConfig(d_k=24, d_v=24)
    for span, model, rest in (
        (None, None, "triton"),
        (PACKED, ModelConfig(), "triton"),
        (chunk, None, "triton"),
        (None, odd, "torch"),
    ):
        resolved = attention.resolve_backend("cuda", torch.bfloat16, NSA, model, "flash", span=span)
        assert {part: part_backend.backend for part, part_backend in resolved.items()} == {
            **dict.fromkeys(dispatch.PARTS, rest),
            "window": "flash",
        }


def test_flash_attn_supports_its_stated_widths() -> None:
    flash.check_widths(256, 256)
    with pytest.raises(NotImplementedError, match="head widths up to 256, got 257; use 256"):
        flash.check_widths(257, 257)


def test_auto_on_a_cpu_is_torch_with_a_reason() -> None:
    resolved = attention.resolve_backend("cpu", torch.float32, NSAConfig())
    assert set(resolved) == set(dispatch.PARTS)
    assert {part_backend.backend for part_backend in resolved.values()} == {"torch"}
    assert all(part_backend.reason for part_backend in resolved.values())


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_requested_backend_is_used(backend: str) -> None:
    resolved = attention.resolve_backend("cpu", torch.float64, NSAConfig(), backend=backend)
    assert {(part_backend.backend, part_backend.reason) for part_backend in resolved.values()} == {
        (backend, "requested by name")
    }


@looped
@pytest.mark.parametrize(
    ("config", "backend", "error", "words"),
    [
        (ModelConfig(), "trition", ValueError, "expected one of auto, reference, torch, triton, flash"),
        (ModelConfig(), "flash", BackendError, "flash-attn needs a CUDA device, and this is cpu"),
        (ModelConfig(attention="dense"), "flash", BackendError, "flash-attn needs a CUDA device"),
        (ModelConfig(attention="dense"), "triton", NotImplementedError, "no dense attention; use auto, torch or flash"),
    ],
)
def test_a_backend_that_cannot_run_is_an_error_with_its_reason(
    config: ModelConfig, backend: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        attention.resolve_backend("cpu", torch.float32, config.nsa, config, backend)
    assert words in str(caught.value)


def test_unusable_triton_raises_and_auto_gives_the_same_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_device_problem", lambda *_: "no such device today; buy one")
    with pytest.raises(BackendError, match="backend = 'triton' cannot run: no such device today; buy one"):
        attention.resolve_backend("cpu", torch.float32, NSAConfig(), backend="triton")
    resolved = attention.resolve_backend("cpu", torch.float32, NSAConfig())
    assert resolved["selected"] == dispatch.ResolvedBackend("torch", "no such device today; buy one")


def test_usable_triton_is_used_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "find_device_problem", lambda *_: None)
    assert attention.resolve_backend("cpu", torch.float32, NSAConfig(), backend="triton")["window"].backend == "triton"
    # On a CPU the kernels run interpreted, so auto does not take them.
    assert attention.resolve_backend("cpu", torch.float32, NSAConfig())["window"].backend == "torch"


@looped
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"d_k": 50}, "multiples of 16 up to 256; got d_k = 50; the nearest is 48"),
        ({"d_k": 512, "d_v": 64}, "d_k = 512; the nearest is 256"),
        ({"d_v": 8}, "d_v = 8; the nearest is 16"),
        ({"nsa": NSAConfig(l=8, d=8, l_sel=24)}, "multiples of 16; got 24; the nearest that nsa.d = 8 divides is 32"),
        ({"nsa": NSAConfig(l=20, d=20, l_sel=60)}, "the nearest that nsa.d = 20 divides is 80"),
        ({"nsa": NSAConfig(n_sel=65)}, "at most nsa.n_sel = 64 blocks per query; got 65"),
        ({"nsa": NSAConfig(l=8, d=4, l_sel=80)}, "nsa.l_sel up to 16 times nsa.d = 4; got 80; the nearest is 64"),
        ({"nsa": NSAConfig(l=260, d=4, l_sel=16)}, "nsa.l up to 64 times nsa.d = 4; got 260; the nearest is 256"),
    ],
)
def test_an_unsupported_triton_shape_names_the_nearest(
    model: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request by name raises; `auto` gives the same reason and resolves to torch."""
    monkeypatch.setattr(kernels, "find_device_problem", lambda *_: None)
    config = ModelConfig(**model)
    with pytest.raises(NotImplementedError) as caught:
        attention.resolve_backend("cpu", torch.float32, config.nsa, config, "triton")
    assert words in str(caught.value)
    resolved = attention.resolve_backend("cuda", torch.float32, config.nsa, config)
    assert {part_backend.backend for part_backend in resolved.values()} == {"torch"}
    assert all(words in part_backend.reason for part_backend in resolved.values())


def test_a_direct_call_raises_for_an_unsupported_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a model, the widths of the tensors are checked."""
    monkeypatch.setattr(kernels, "find_device_problem", lambda *_: None)
    x, blocks = Shape().inputs(), torch.full((1, Shape().T, 2, 3), -1, dtype=torch.int32)
    nsa = NSA.model_copy(update={"l_sel": 16})
    q, k, v = (a[..., :2].contiguous() for a in (x.q, x.k_sel, x.v_sel))
    calls = {
        "compressed_attention": lambda: attention.compressed_attention(x.q, x.k_cmp, x.v_cmp, nsa, backend="triton"),
        "select_blocks": lambda: attention.select_blocks(x.q, x.k_cmp, torch.zeros(1, 21, 6), nsa, backend="triton"),
        "selected_attention": lambda: attention.selected_attention(q, k, v, blocks, nsa, backend="triton"),
        "window_attention": lambda: attention.window_attention(q, k, v, nsa, backend="triton"),
        "nsa_attention": lambda: attention.nsa_attention(*x, nsa, backend="triton"),
    }
    for name, call in calls.items():
        with pytest.raises(NotImplementedError, match=f"^{name}, backend = 'triton': .* the nearest is 16"):
            call()
    with pytest.raises(NotImplementedError, match=r"nsa\.l_sel in multiples of 16"):
        attention.window_attention(q, k, v, NSA.model_copy(update={"l_sel": 24}), backend="triton")


def test_the_geometry_of_scored_keys_does_not_limit_other_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with an indexer scores other keys than `nsa` describes; its branches run on the kernels all the same."""
    monkeypatch.setattr(kernels, "find_device_problem", lambda *_: None)
    nsa, q = NSAConfig(l=32, d=16, block_reduction="max"), torch.zeros(1, 4, 2, 16)
    with pytest.raises(NotImplementedError, match="only of keys that do not overlap"):
        dispatch._get_implementation("selection", q, nsa, "triton", None)
    for part in ("compressed", "selected", "window"):
        assert dispatch._get_implementation(part, q, nsa, "triton", None) is kernels, part


def test_kernel_requirements_on_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    assert "CUDA device" in kernels.find_device_problem(torch.device("mps"), torch.float32)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "TRITON_INTERPRET=1" in kernels.find_device_problem(CPU, torch.float32)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    tiles = importlib.import_module("nsa_lab.attention.kernels.tiles")
    monkeypatch.setattr(tiles, "IS_INTERPRETED", False)
    assert "before Python starts" in kernels.find_device_problem(CPU, torch.float32)
    monkeypatch.setattr(tiles, "IS_INTERPRETED", True)
    assert kernels.find_device_problem(CPU, torch.float32) is None
    assert "got torch.float64" in kernels.find_device_problem(CPU, torch.float64)
    assert "multiplies bfloat16 wrongly" in kernels.find_device_problem(CPU, torch.bfloat16)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install triton" in kernels.find_device_problem(CPU, torch.float32)


def test_flash_supports_only_window_and_dense_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "find_flash_problem", lambda *_: None)
    resolved = attention.resolve_backend("cpu", torch.bfloat16, NSAConfig(), backend="flash")
    assert {part: part_backend.backend for part, part_backend in resolved.items()} == {
        "compressed": "torch",
        "selection": "torch",
        "selected": "torch",
        "combine": "torch",
        "window": "flash",
    }
    config = ModelConfig(attention="dense")
    assert attention.resolve_backend("cpu", torch.bfloat16, config.nsa, config, "flash")["dense"].backend == "flash"
    x, blocks = Shape().inputs(), torch.full((1, 21, 2, 3), -1, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="not selected; use auto, triton or torch"):
        attention.selected_attention(x.q, x.k_sel, x.v_sel, blocks, NSA, backend="flash")


@pytest.mark.parametrize(
    ("device", "dtype", "words"),
    [
        ("cpu", torch.bfloat16, "needs a CUDA device"),
        ("cuda", torch.float32, "set runtime.precision: bf16"),
        ("cuda", torch.bfloat16, "cannot be imported"),
    ],
)
def test_flash_names_missing_requirements(
    device: str, dtype: torch.dtype, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise ImportError("no module named flash_attn")

    monkeypatch.setattr(flash, "_import_flash_attn", missing)
    assert words in flash.find_flash_problem(torch.device(device), dtype)


def test_a_dense_model_resolves_to_its_own_part() -> None:
    config = ModelConfig(attention="dense")
    resolved = attention.resolve_backend("cpu", torch.float32, config.nsa, config)
    assert list(resolved) == ["dense"] and resolved["dense"].backend == "torch" and resolved["dense"].reason


@pytest.mark.parametrize(("backend", "module"), [("reference", reference), ("torch", torch_backend)])
def test_the_requested_backend_runs(backend: str, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part runs on the backend requested by name or by resolved backends, and never on the other."""
    names = ["compressed_attention", "select_blocks", "selected_attention", "window_attention"]
    ran = []

    def spy(owner: Any, name: str) -> Callable[..., Any]:
        run = getattr(owner, name)
        return lambda *args: ran.append((owner, name)) or run(*args)

    for owner in (reference, torch_backend):
        for name in names:
            monkeypatch.setattr(owner, name, spy(owner, name))
    x = Shape().inputs()
    for requested in (backend, attention.resolve_backend(CPU, x.q.dtype, NSA, backend=backend)):
        ran.clear()
        attention.nsa_attention(*x, NSA, backend=requested)
        assert ran == [(module, name) for name in names]
    ran.clear()
    call_all_functions(x, NSA, backend)
    assert {owner for owner, _ in ran} == {module}


def test_each_part_runs_on_its_resolved_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = {
        **attention.resolve_backend(CPU, torch.float64, NSA, backend="torch"),
        "window": dispatch.ResolvedBackend("reference", "for this test"),
    }
    monkeypatch.setattr(torch_backend, "window_attention", None)
    monkeypatch.setattr(reference, "selected_attention", None)
    x = Shape().inputs()
    assert attention.nsa_attention(*x, NSA, backend=resolved).shape == (1, 21, 6, 4)


def test_no_environment_variable_changes_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    before = attention.resolve_backend("cpu", torch.float32, NSAConfig())
    for name in ("NSA_USE_FA2", "NSA_USE_TRITON_SEL", "NSA_FORCE_PARITY", "NSA_PREFILL_BATCHED", "NSA_FORCE_SEL_MASK"):
        for value in ("0", "1"):
            monkeypatch.setenv(name, value)
            assert attention.resolve_backend("cpu", torch.float32, NSAConfig()) == before


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_torch_func_transforms_run_on_the_reference() -> None:
    x = Shape().inputs()

    def run(q: torch.Tensor, backend: str = "reference") -> torch.Tensor:
        return attention.nsa_attention(q, *x[1:], NSA, backend=backend)

    twice = torch.stack([x.q, 2 * x.q])
    assert torch.allclose(torch.func.vmap(run)(twice), torch.stack([run(q) for q in twice]), rtol=1e-12)
    out, lse = attention.compressed_attention(x.q, x.k_cmp, x.v_cmp, NSA, backend="reference")
    blocks = attention.select_blocks(x.q, x.k_cmp, lse, NSA, backend="reference")
    given = torch.func.vmap(lambda b: attention.nsa_attention(*x, NSA, blocks=b, backend="reference"))(blocks[None])
    torch.testing.assert_close(given[0], run(x.q))
    q = x.q.detach().requires_grad_()
    (expected,) = torch.autograd.grad(run(q).sum(), q)
    torch.testing.assert_close(torch.func.grad(lambda q: run(q).sum())(x.q), expected)
    out, moved = torch.func.jvp(run, (x.q,), (x.q,))
    step = 1e-6
    torch.testing.assert_close(moved, (run(x.q + step * x.q) - run(x.q - step * x.q)) / (2 * step), rtol=1e-6, atol=1e-8)
    assert torch.equal(out, run(x.q))
    with pytest.raises(RuntimeError, match=r"torch\.func"):
        torch.func.vmap(lambda q: run(q, "torch"))(twice)
