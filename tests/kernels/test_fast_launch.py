"""Cached launches and parallel compilation with fake kernels; test_compiling.py compares them with Triton itself."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from triton.compiler import CompiledKernel

from nsa_lab.attention.kernels import fast_launch, parallel_compile


class FakeCompiledKernel(CompiledKernel):
    def __init__(self, launches: list[tuple[object, ...]]) -> None:
        self.launches = launches

    def __getitem__(self, grid):
        return lambda *args: self.launches.append((self, grid, args))


class FakeKernel:
    """A triton.jit function with two runtime parameters and two constants."""

    __name__ = "kernel"
    arg_names = ("x", "n", "SIZE", "ADD")
    params = tuple(SimpleNamespace(is_constexpr=name.isupper()) for name in arg_names)

    def __init__(self) -> None:
        self.launches: list[tuple[object, ...]] = []
        self.bound = 0

    def __getitem__(self, grid):
        def bind(*args, **options):
            self.bound += 1
            return FakeCompiledKernel(self.launches)

        return bind

    def run(self, *args, grid, warmup, **options):
        assert warmup


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(fast_launch, "CAN_CACHE_LAUNCHES", True)
    monkeypatch.setattr(fast_launch, "driver", SimpleNamespace(active=SimpleNamespace(get_current_device=lambda: 0)))
    return fast_launch.CachedLauncher(FakeKernel())


ROWS = torch.zeros(64, dtype=torch.float16)


def launch(kernel, x=ROWS, n=48, size=4, add=True, **options):
    kernel[(3,)](x, n, ADD=add, SIZE=size, **options)


def test_second_launch_uses_the_cached_kernel(kernel):
    launch(kernel, n=48)
    launch(kernel, ROWS[16:], n=160)
    assert kernel.kernel.bound == 1
    [(_, grid, (x, *rest))] = kernel.kernel.launches
    assert grid[:3] == (3, 1, 1) and x.data_ptr() == ROWS[16:].data_ptr() and rest == [160, 4, True]


@pytest.mark.parametrize(
    "other",
    [
        {"x": ROWS[1:]},  # an address that is not a multiple of 16
        {"x": ROWS.float()},
        {"x": None},
        {"n": 47},
        {"n": 1},
        {"n": 2**31},
        {"size": 8},
        {"add": False},
        {"num_warps": 8},
    ],
)
def test_other_specialization_is_compiled_again(kernel, other):
    launch(kernel)
    launch(kernel, **other)
    assert kernel.kernel.bound == 2 and kernel.kernel.launches == []


def test_one_has_a_separate_specialization(kernel):
    launch(kernel, n=47)
    launch(kernel, n=1)
    launch(kernel, n=49)
    assert kernel.kernel.bound == 2 and len(kernel.kernel.launches) == 1


def test_cache_is_per_gpu(kernel, monkeypatch):
    launch(kernel)
    monkeypatch.setattr(fast_launch.driver.active, "get_current_device", lambda: 1)
    launch(kernel)
    assert kernel.kernel.bound == 2


def test_kernel_is_launched_on_the_gpu_of_its_tensors(kernel, monkeypatch):
    current_devices = [0]
    monkeypatch.setattr(fast_launch.driver.active, "get_current_device", lambda: current_devices[-1])
    monkeypatch.setattr(fast_launch, "_get_device_index", lambda args: 1)

    class Device:
        def __init__(self, number):
            current_devices.append(number)

        def __enter__(self):
            pass

        def __exit__(self, *_):
            current_devices.pop()

    monkeypatch.setattr(torch.cuda, "device", Device)
    launch(kernel)
    assert current_devices == [0] and next(iter(kernel._compiled))[0] == 1


def test_older_triton_binds_every_launch(kernel, monkeypatch):
    monkeypatch.setattr(fast_launch, "CAN_CACHE_LAUNCHES", False)
    launch(kernel)
    launch(kernel)
    assert kernel.kernel.bound == 2


def test_disable_launches(kernel):
    launch(kernel)
    with fast_launch.disable_launches():
        launch(kernel)
    assert kernel.kernel.bound == 1 and kernel.kernel.launches == []
    launch(kernel)
    assert len(kernel.kernel.launches) == 1


def test_runtime_argument_by_keyword_raises(kernel):
    """Otherwise it would become part of the cache key, which keeps it alive."""
    with pytest.raises(TypeError, match="kernel: expected x, n by position"):
        kernel[(3,)](ROWS, n=48, SIZE=4, ADD=True)


def test_equal_values_of_other_types_have_other_specializations(kernel):
    for n in (16, True, 1.0):
        launch(kernel, n=n)
    assert kernel.kernel.bound == 3


def test_constant_before_a_parameter_raises():
    class Mixed(FakeKernel):
        arg_names = ("x", "SIZE", "n")
        params = tuple(SimpleNamespace(is_constexpr=name.isupper()) for name in arg_names)

    with pytest.raises(TypeError, match=r"kernel: expected all tl\.constexpr parameters after"):
        fast_launch.CachedLauncher(Mixed())


def test_first_call_of_a_kind_is_compiled_in_parallel(monkeypatch):
    events = []
    monkeypatch.setattr(parallel_compile, "IS_INTERPRETED", False)
    monkeypatch.setattr(parallel_compile, "CAN_COMPILE_IN_PARALLEL", True)
    monkeypatch.setattr(parallel_compile, "compile_in_parallel", lambda work, threads: events.append("compiled"))

    @parallel_compile.compile_before_first_call
    def compute(q, k, v, w, documents):
        events.append("computed")

    def call(T=300, heads=4, w=8, documents=None):
        compute(*(torch.zeros(1, T, n, 16) for n in (heads, 2, 2)), w, documents)

    call()
    call(T=290)
    assert events == ["compiled", "computed", "computed"]
    for other in ({"heads": 8}, {"T": 3000}, {"w": 64}, {"documents": torch.zeros(2)}):
        events.clear()
        call(**other)
        call(**other)
        assert events == ["compiled", "computed", "computed"], other
    events.clear()
    with fast_launch.disable_launches():
        call(heads=2)
    assert events == ["computed"]


@pytest.mark.skipif(not parallel_compile.CAN_COMPILE_IN_PARALLEL, reason="a Triton without AsyncCompileMode")
def test_compile_error_restores_the_async_mode():
    """Otherwise Triton would compile nothing more in this thread."""

    def queue() -> None:
        def fails():
            raise ZeroDivisionError

        parallel_compile._active_mode.get().submit("key", fails, lambda kernel: None)

    with pytest.raises(ZeroDivisionError):
        parallel_compile.compile_in_parallel(queue, n_threads=1)
    assert parallel_compile._active_mode.get() is None and fast_launch.is_launch_enabled()
    assert parallel_compile.compile_in_parallel(lambda: None, n_threads=1) == 0
    assert parallel_compile.compile_in_parallel(queue, n_threads=1, ignore_errors=True) == 1


class FakeDriver:
    """A Triton driver; it can launch if it has a launcher class."""

    def __init__(self, launches: bool, build) -> None:
        if launches:
            self.launcher_cls = build


def run_compile_in_parallel(monkeypatch, launches: bool, make, build=lambda src, metadata: None, **options) -> int:
    """Call `compile_in_parallel` with three kernels. `build` makes a launcher, and `make` also loads the kernel."""

    class Compiled(int):
        run = property(make)
        src = property(lambda self: f"source {int(self)}")
        metadata = property(lambda self: f"metadata {int(self)}")

    def queue() -> None:
        for number in range(3):
            parallel_compile._active_mode.get().submit(number, lambda number=number: Compiled(number), lambda kernel: None)

    monkeypatch.setattr(parallel_compile, "driver", SimpleNamespace(active=FakeDriver(launches, build)))
    return parallel_compile.compile_in_parallel(queue, n_threads=2, **options)


@pytest.mark.skipif(not parallel_compile.CAN_COMPILE_IN_PARALLEL, reason="a Triton without AsyncCompileMode")
@pytest.mark.parametrize("launches", [True, False])
def test_compiled_kernels_are_loaded(monkeypatch, launches):
    """If there is a GPU, threads build the launchers, and only then the calling thread loads them, with its current GPU."""
    events = []
    build = lambda src, metadata: events.append((src, metadata, threading.get_ident()))  # noqa: E731
    make = lambda kernel: events.append((int(kernel), threading.get_ident()))  # noqa: E731
    assert run_compile_in_parallel(monkeypatch, launches, make, build) == 3
    built, loaded = events[:3], events[3:]
    numbers, own = range(3 * launches), threading.get_ident()
    assert sorted(event[:2] for event in built) == [(f"source {n}", f"metadata {n}") for n in numbers]
    assert sorted(loaded) == [(n, own) for n in numbers] and own not in {event[2] for event in built}


@pytest.mark.skipif(not parallel_compile.CAN_COMPILE_IN_PARALLEL, reason="a Triton without AsyncCompileMode")
def test_kernel_that_exceeds_gpu_resources_raises(monkeypatch):
    loaded = []

    def make(number: int) -> None:
        if number == 1:
            raise MemoryError("shared memory")
        loaded.append(number)

    with pytest.raises(MemoryError, match="shared memory"):
        run_compile_in_parallel(monkeypatch, True, make)
    loaded.clear()
    assert run_compile_in_parallel(monkeypatch, True, make, ignore_errors=True) == 3 and len(loaded) == 2


@pytest.mark.skipif(not parallel_compile.CAN_COMPILE_IN_PARALLEL, reason="a Triton without AsyncCompileMode")
def test_no_parallel_compile_inside_another_async_mode(monkeypatch):
    monkeypatch.setattr(parallel_compile, "IS_INTERPRETED", False)
    monkeypatch.setattr(parallel_compile, "compile_in_parallel", pytest.fail)
    compute = parallel_compile.compile_before_first_call(lambda *args: len(args))
    token = parallel_compile._active_mode.set(object())
    try:
        assert compute(*(torch.zeros(1, 9, 2, 16) for _ in range(3))) == 3
    finally:
        parallel_compile._active_mode.reset(token)


def test_failed_first_call_is_compiled_in_parallel_again(monkeypatch):
    monkeypatch.setattr(parallel_compile, "IS_INTERPRETED", False)
    monkeypatch.setattr(parallel_compile, "CAN_COMPILE_IN_PARALLEL", True)
    monkeypatch.setattr(parallel_compile, "_is_compiling", lambda: False)
    attempts = []

    def fails(work, threads):
        attempts.append(threads)
        raise KeyboardInterrupt

    monkeypatch.setattr(parallel_compile, "compile_in_parallel", fails)
    compute = parallel_compile.compile_before_first_call(lambda *args: None)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            compute(*(torch.zeros(1, 9, 2, 16) for _ in range(3)))
    assert len(attempts) == 2
