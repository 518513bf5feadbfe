"""What every test shares: one thread, and examples that are the same on every run."""

from __future__ import annotations

import hypothesis
import torch

# Machines are shared, and tensors here are too small to gain from threads.
torch.set_num_threads(1)

hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
hypothesis.settings.load_profile("repeatable")
