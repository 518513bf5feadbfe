# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     formats: ipynb,py:percent
#     notebook_metadata_filter: kernelspec,-jupytext.text_representation.jupytext_version,-language_info,-widgets
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Every backend against the definition
#
# `nsa_lab.attention.reference` is the definition: plain PyTorch, whole score matrices, float64 where it is asked for.
# The backends that make it fast (`torch` everywhere, `triton` and `flash` on a GPU) are compared with it here, part
# by part, on the same numbers: outputs, gradients of every input, and the choice of blocks. A backend that cannot run
# on this machine is listed with the reason, never skipped in silence.
#
# On two CPU cores this takes less than a minute.

# %% tags=["parameters"]
lengths: list = [1, 33, 65, 512, 1025]  # sequence lengths, tokens: below one block, odd, and past n_sel * l_sel = 1024
heads: int = 4  # query heads H on a CPU; a GPU takes 12 in 2 groups
speeds: bool = True  # measure speeds too, where there is a CUDA device

# %%
import torch

from nsa_lab import figures
from nsa_lab.attention import geometry
from nsa_lab.config import NSAConfig
from nsa_lab.workbook import parity
from nsa_lab.workbook.show import show

nsa = NSAConfig()
device = "cuda" if torch.cuda.is_available() else "cpu"
shape = {"heads": 12, "groups": 2, "width": 64} if device == "cuda" else {"heads": heads, "groups": 2, "width": 32}
dtypes = [torch.float32, torch.bfloat16] + ([torch.float64] if device == "cpu" else [])

# %% [markdown]
# ## What can run here

# %%
print(f"device: {torch.cuda.get_device_name() if device == 'cuda' else 'cpu'}")
for dtype in dtypes:
    names, reasons = parity.usable(device, dtype, nsa)
    print(f"{str(dtype).removeprefix('torch.'):<9} usable: {', '.join(names)}")
    for backend, reason in reasons.items():
        print(f"{'':<9} not usable: {backend}: {reason}")

# %% [markdown]
# ## Errors
#
# `error` says how far an output is from float64, `gradient` how far the worst of the gradients is, and `of` which one
# that is; beside each stands what is allowed. A fast implementation owes its reader no more than the dtype can give, and
# no less than the same mathematics gives when it is written down plainly in that dtype:
#
# | dtype | an output may err | a gradient may err |
# |---|---|---|
# | bfloat16, float16 | 2 × plain arithmetic, in norm | 3 × plain arithmetic, in norm |
# | float32 | 1e-5, the largest difference | 3 × plain arithmetic, in norm, or 5e-6 if that is more |
# | float64 | 1e-10, the largest difference | 1e-10, the largest difference |
#
# *In norm* is the norm of the difference over the norm of the truth. *Plain arithmetic* keeps every intermediate result
# in the dtype, scores and probabilities too, and counts for no less than one rounding, 7.8e-3 in bfloat16; on random
# numbers it mostly errs less, so that the one rounding is what decides.
#
# The 5e-6 of float32 has a reason: where a query sees a single key, the gradient of its score is exactly 0. Plain
# arithmetic keeps the probabilities and finds that 0; a kernel that does not keep them subtracts two equal sums, and
# what is left is their rounding.
#
# For `selection` the numbers are shares of queries whose set of blocks differs. In float64 none may; elsewhere one in a
# thousand, or twice as many as for the definition itself in that dtype, because two scores may be equal but for rounding.

# %%
rows = list(parity.compare(lengths, dtypes, nsa, device=device, **shape))
print(parity.table(rows))

# %%
over = f"worst error over T = {', '.join(map(str, lengths))}"
for dtype in dtypes:
    named = str(dtype).removeprefix("torch.")
    show(figures.shares_of_allowed(parity.worst_shares(rows, dtype), f"{named}: {over}, as a share of what is allowed"))

# %% [markdown]
# ## Exactly
#
# In float64 the `torch` backend must agree with the definition to 1e-10, and choose exactly the same blocks. These
# lines are compared character by character in continuous integration.

# %%
# NBVAL_CHECK_OUTPUT
exact = parity.compare([15, 32, 64, 200], [torch.float64], nsa, heads=4, groups=2, width=32)
for row in exact:
    if row.backend == "torch":
        print(f"{row.part:<11} T = {row.length:>3}: {'agrees to 1e-10' if row.ok else 'DIFFERS'}")
print("mean selected keys at T = 2048:", geometry.mean_selected_keys(2048, nsa))

# %%
too_large = [row for row in rows if not row.ok]
print(f"{len(rows)} comparisons, {len(too_large)} beyond what is allowed")
assert not too_large, parity.table(too_large)

# %% [markdown]
# ## Speeds
#
# Only where there is a CUDA device: forward and backward of each part and of the whole, beside dense attention at the
# same shape, and the length from which NSA is the faster of the two. A speed is shown only for what passed the
# comparison.

# %%
if device == "cuda" and speeds:
    from nsa_lab.workbook.speeds import show_speeds

    show_speeds()
else:
    print("no CUDA device: no speeds" if device == "cpu" else "speeds = False")

# %% [markdown]
# ## A training step, by part
#
# A profiler trace of the whole training step, summarised by kernel: what each part takes, and the least that its
# arithmetic would take (matrix products at the rate that a large one reached in the same run, attention at 500 TFLOP/s
# on the keys it reads). Measured now where there is a CUDA device, otherwise the record that ships with the package.

# %%
from nsa_lab.workbook import step_time

step_time.show_step_time(measure=device == "cuda" and speeds)
