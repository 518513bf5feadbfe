"""Every kernel compiles for the GPUs that the project names, and fits them, whether or not one is here."""

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

# KB of shared memory that a block may have: A100 and the smaller GPUs of its kin, Ada, H100 and H200, B200, the smaller
# GPUs of its kin, and MI300 where this Triton has AMD's compiler.
SHARED_KB: dict[int | str, int] = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
if importlib.util.find_spec("triton.backends.amd"):
    SHARED_KB["gfx942"] = 64
# Triton's own cache, which goes by the source of a kernel and all that it calls, by its options and by the compiler: what
# none of these changed is not compiled at every run of the tests. What does not compile is in no cache.
CACHE = Path(__file__).parents[2] / ".cache/triton"


def run_compiling(architecture, folder, *what):
    """Bytes of shared memory of each kernel that `compiling.py` compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("compiling.py")), str(architecture), *what]
    done = subprocess.run(command, env={**environment, "TRITON_CACHE_DIR": str(folder)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_they_fit(used: dict[str, int], architecture: int | str) -> None:
    assert used and {name: size for name, size in used.items() if size > SHARED_KB[architecture] * 1024} == {}


@pytest.mark.slow
def test_every_kernel_compiles_and_fits():
    """Wide heads where memory is short, narrow ones on Hopper; the other pairs are the next test's."""
    on_a100, on_h100 = run_compiling(80, CACHE, "wide"), run_compiling(90, CACHE, "narrow")
    assert set(on_a100) | set(on_h100) == find_launched_names()
    assert_they_fit(on_a100, 80)
    assert_they_fit(on_h100, 90)


@pytest.mark.slow
def test_another_length_compiles_nothing_anew(tmp_path):
    """Nor do other documents: lengths that 16 divides or not, tiles that are full or not, one block or many."""
    new = run_compiling(90, tmp_path, "lengths")
    assert {name.removeprefix("nsa_") for name, count in new.items() if count} == set() and len(new) > 10


@pytest.mark.slow
def test_what_is_compiled_ahead_is_not_compiled_again(tmp_path):
    assert run_compiling(90, tmp_path, "ahead") == {"kernels": 2}
    files = sorted(tmp_path.rglob("*.cubin"))
    run_compiling(90, tmp_path, "chosen")
    assert sorted(tmp_path.rglob("*.cubin")) == files and len(files) == 2


@pytest.mark.slow
def test_the_kernels_of_a_first_call_are_compiled_side_by_side():
    """All of the operator's; two are the selected branch's on its own, which is called after it."""
    assert run_compiling(90, CACHE, "together") == {"together": 16, "alone": 2}


def test_a_triton_that_compiles_one_by_one_is_refused(monkeypatch):
    monkeypatch.setattr(parallel_compile, "CAN_COMPILE_IN_PARALLEL", False)
    with pytest.raises(NotImplementedError, match=f"this is {re.escape(triton.__version__)}: upgrade triton"):
        compile_in_parallel(pytest.fail, n_threads=1)


def test_launches_are_launches_again_after_a_failure():
    def work() -> None:
        assert not fast_launch.is_launch_enabled()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        compile_in_parallel(work, n_threads=1)
    assert fast_launch.is_launch_enabled()


def test_what_is_launched_is_what_triton_would_launch():
    """Of several hundred launches, most of a kernel that was kept."""
    found = run_compiling(90, CACHE, "again")
    assert found["other"] == 0 and found["again"] > 400


@pytest.mark.soak
@pytest.mark.parametrize("architecture", SHARED_KB)
def test_every_kernel_compiles_and_fits_on_every_architecture(architecture, tmp_path):
    used = run_compiling(architecture, tmp_path, "narrow", "wide")
    assert set(used) == find_launched_names()
    assert_they_fit(used, architecture)


@pytest.mark.soak
@pytest.mark.parametrize("architecture", SHARED_KB)
def test_heads_wider_than_any_that_was_timed_compile_and_fit(architecture, tmp_path):
    """The paper's own 192 and 128 among them."""
    assert_they_fit(run_compiling(architecture, tmp_path, "wider"), architecture)


@pytest.mark.soak
def test_shapes_that_no_kernel_is_tuned_for_compile_and_fit(tmp_path):
    """On the GPU with the least memory for a block; the interpreter proves what they compute, and not that they compile."""
    assert_they_fit(run_compiling(86, tmp_path, "corners"), 86)


@pytest.mark.soak
@pytest.mark.parametrize("architecture", [80, 90])
def test_every_kernel_compiles_for_documents_and_fits(architecture, tmp_path):
    used = run_compiling(architecture, tmp_path, "documents")
    assert set(used) == find_launched_names() - {"nsa_selected_index_first_query"} - find_jitted("decoding")
    assert_they_fit(used, architecture)
