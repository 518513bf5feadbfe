"""What every test shares: one thread, examples that are the same on every run, kernels under the interpreter on a CPU."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

# Machines are shared, and tensors here are too small to gain from threads: not in this process, and not in those that
# tests start. OpenMP reads this when torch loads it.
os.environ["OMP_NUM_THREADS"] = "1"
# torch.compile would first build and run a program to see whether this CPU has the vector instructions that it names: ten
# seconds in every cache that is new.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import hypothesis
import pytest
import torch

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Triton reads this once, when it is first imported, and a conftest deeper down or torch.compile may be what imports it.
    os.environ["TRITON_INTERPRET"] = "1"

# jsonschema, which nbformat brings, would parse the whole grammar of IRIs when it is imported: seconds in every process,
# for a format that no notebook here has. Where the package is missing it does without.
sys.modules["rfc3987_syntax"] = None

# The brute force serves the tests of attention and of the model; the planted faults are a script of their own.
sys.path[:0] = [str(Path(__file__).parent / "attention"), str(Path(__file__).parent)]

# They lie beside this file.
from forker import Forker  # noqa: E402
from interpreter import keep_what_it_repeats  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--transformers-tests", help="folder that contains tests/ of the installed version of transformers")


hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None, max_examples=25)
# For planted faults, where any failing example will do.
hypothesis.settings.register_profile(
    "mutants",
    hypothesis.settings.get_profile("repeatable"),
    max_examples=8,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.load_profile("repeatable")


def pytest_collection() -> None:
    """What is imported and collected stays to the end, and is not searched for garbage meanwhile."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What is imported and collected by now stays to the end; looking through it for garbage again and again takes long."""
    keep_what_it_repeats()
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def recorded_runs() -> list[Path]:
    """Return the directories of all recorded runs. Those of the archive are unpacked once, into .cache/records."""
    root = Path(__file__).parents[1]
    archive = (root / "docs/science/records/runs.tar.xz").read_bytes()
    unpacked = root / ".cache/records" / hashlib.sha256(archive).hexdigest()[:16]
    if not unpacked.is_dir():
        unpacked.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=unpacked.parent) as folder:
            command = [sys.executable, root / "tools/records.py", "unpack", "--to", f"{folder}/runs"]
            subprocess.run(command, check=True, capture_output=True)
            with contextlib.suppress(OSError):  # another process has unpacked it
                Path(folder, "runs").rename(unpacked)
    return sorted(path.parent for folder in (root / "outputs", unpacked) for path in folder.glob("*/RECORDED"))


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    forker = Forker()
    yield forker
    forker.close()


@pytest.fixture
def forked(forker: Forker) -> Iterator[None]:
    """Meanwhile trainers are forked."""
    with forker.forking():
        yield
