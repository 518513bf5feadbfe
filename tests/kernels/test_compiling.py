"""Every kernel compiles for all supported GPU architectures and fits their shared memory; no GPU is needed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from kernel_sources import find_jitted, find_launched_names

from nsa_lab.attention.kernels import fast_launch, parallel_compile
from nsa_lab.attention.kernels.parallel_compile import compile_in_parallel

# KB of shared memory per thread block: A100, smaller Ampere GPUs, Ada, H100 and H200, B200, smaller Blackwell GPUs, and
# MI300 if this Triton has the AMD compiler.
SHARED_KB: dict[int | str, int] = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
if importlib.util.find_spec("triton.backends.amd"):
    SHARED_KB["gfx942"] = 64
# A persistent Triton cache. Its key is the source of a kernel and of all functions that it calls, the options and the
# compiler, so unchanged kernels are not compiled at every run of the tests. Kernels that fail to compile are not cached.
CACHE = Path(__file__).parents[2] / ".cache/triton"


def run_compiling(architecture, folder, *what):
    """Run `compiling.py` in a subprocess and return its JSON output."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compiling.py")), str(architecture), *what]
    done = subprocess.run(command, env={**environment, "TRITON_CACHE_DIR": str(folder)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_they_fit(used: dict[str, int], architecture: int | str) -> None:
    assert used and {name: size for name, size in used.items() if size > SHARED_KB[architecture] * 1024} == {}


@pytest.mark.slow
def test_kernels_of_narrow_heads_are_valid_triton():
    """Nightly tests below compile them to machine code, on all architectures."""
    used = run_compiling(90, CACHE, "translate")
    assert used.keys() <= find_launched_names() and len(used) > 20


@pytest.mark.nightly
def test_other_lengths_compile_nothing(tmp_path):
    """Neither do other packed documents: lengths divisible by 16 or not, full or partial tiles, one block or many."""
    new = run_compiling(90, tmp_path, "lengths")
    assert {name.removeprefix("nsa_") for name, count in new.items() if count} == set() and len(new) > 10


@pytest.mark.nightly
def test_kernels_compiled_in_parallel_are_reused(tmp_path):
    assert run_compiling(90, tmp_path, "in_parallel") == {"kernels": 2}
    files = sorted(tmp_path.rglob("*.cubin"))
    run_compiling(90, tmp_path, "two_selections")
    assert sorted(tmp_path.rglob("*.cubin")) == files and len(files) == 2


@pytest.mark.nightly
def test_first_call_compiles_in_parallel():
    """All kernels of the operator. The other two belong to the selected branch, which is called separately after it."""
    assert run_compiling(90, CACHE, "first_calls") == {"parallel": 16, "serial": 2}


def test_triton_without_parallel_compile_raises(monkeypatch):
    monkeypatch.setattr(parallel_compile, "CAN_COMPILE_IN_PARALLEL", False)
    with pytest.raises(NotImplementedError, match=f"this is {re.escape(triton.__version__)}: upgrade triton"):
        compile_in_parallel(pytest.fail, n_threads=1)


def test_launches_are_enabled_after_a_failure():
    def work() -> None:
        assert not fast_launch.is_launch_enabled()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compile_in_parallel(work, n_threads=1)
    assert fast_launch.is_launch_enabled()


@pytest.mark.slow
def test_cached_launches_equal_those_of_triton():
    """Several hundred launches, most of them of a cached kernel."""
    counts = run_compiling(90, CACHE, "cached_launches")
    assert counts["other"] == 0 and counts["cached"] > 400


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", SHARED_KB)
def test_every_kernel_compiles_and_fits_on_every_architecture(architecture, tmp_path):
    used = run_compiling(architecture, tmp_path, "narrow", "wide")
    assert set(used) == find_launched_names()
    assert_they_fit(used, architecture)


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", SHARED_KB)
def test_wider_heads_compile_and_fit(architecture, tmp_path):
    """These include the widths of the paper, 192 and 128."""
    assert_they_fit(run_compiling(architecture, tmp_path, "wider"), architecture)


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", [80, 86, 90])
def test_forms_without_a_compressed_branch_compile_and_fit(architecture, tmp_path):
    """Ampere has no fp8 instructions, so its kernels decode index keys by integer operations."""
    assert_they_fit(run_compiling(architecture, tmp_path, "lean"), architecture)


@pytest.mark.nightly
def test_corner_shapes_compile_and_fit(tmp_path):
    """On the GPU with the least shared memory. The interpreter tests the results of these shapes, not that they compile."""
    assert_they_fit(run_compiling(86, tmp_path, "corners"), 86)


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", [80, 90])
def test_packed_kernels_compile_and_fit(architecture, tmp_path):
    used = run_compiling(architecture, tmp_path, "documents")
    assert set(used) == find_launched_names() - {"nsa_selected_index_first_query"} - find_jitted("decoding")
    assert_they_fit(used, architecture)
