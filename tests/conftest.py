"""What every test shares: one thread, examples that are the same on every run, kernels under the interpreter on a CPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    # Triton reads this once, when it is first imported, and torch.compile in some other test may be what imports it.
    os.environ["TRITON_INTERPRET"] = "1"

import hypothesis

# The brute force serves the tests of attention and of the model; the planted faults are a script of their own.
sys.path[:0] = [str(Path(__file__).parent / "attention"), str(Path(__file__).parent)]

# Machines are shared, and tensors here are too small to gain from threads.
torch.set_num_threads(1)

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None, max_examples=25)
# For planted faults, where any failing example will do.
hypothesis.settings.register_profile(
    "mutants",
    hypothesis.settings.get_profile("repeatable"),
    max_examples=8,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.load_profile("repeatable")
