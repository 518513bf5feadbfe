"""What every test shares: one thread, and examples that are the same on every run."""

from __future__ import annotations

import sys
from pathlib import Path

import hypothesis
import torch

# The brute force serves the tests of attention and of the model.
sys.path.insert(0, str(Path(__file__).parent / "attention"))

# Machines are shared, and tensors here are too small to gain from threads.
torch.set_num_threads(1)

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None, max_examples=25)
# For planted faults, where any failing example will do.
hypothesis.settings.register_profile("mutants", hypothesis.settings.get_profile("repeatable"), max_examples=8,
                                     phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate])
hypothesis.settings.load_profile("repeatable")
