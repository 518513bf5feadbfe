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
# Other implementations make it fast, and are called *backends*: `torch` (any device), `triton` (kernels of this
# project, on a GPU) and `flash` (the flash-attn package, for the window alone). Here each of them computes the same
# numbers as the definition, part by part: outputs, gradients of every input, and the choice of blocks. A backend that
# cannot run on this machine is listed with the reason, never skipped in silence.
#
# The parts are those of notebook 01: the **compressed** branch, the **selection** of blocks, attention over the
# **selected** blocks, the **window**, and the **whole** with its gates. On two CPU cores this takes less than a minute.

# %% tags=["parameters"]
lengths: list = [1, 33, 65, 512, 1025]  # sequence lengths, tokens: below one block, odd, and past n_sel * l_sel = 1,024
heads: int = 4  # query heads H on a CPU; a GPU takes 12 in 2 groups
speeds: bool = True  # measure speeds too, where there is a CUDA device

# %%
import torch

from nsa_lab import figures
from nsa_lab.attention import geometry
from nsa_lab.config import NSAConfig
from nsa_lab.workbook import kernel_parity, step_time
from nsa_lab.workbook.display import show_figure, show_folded
from nsa_lab.workbook.speeds import show_attention_speeds

nsa = NSAConfig()
device = "cuda" if torch.cuda.is_available() else "cpu"
shape = {"heads": 12, "groups": 2, "width": 64} if device == "cuda" else {"heads": heads, "groups": 2, "width": 32}
dtypes = [torch.float32, torch.bfloat16] + ([torch.float64] if device == "cpu" else [])

# %% [markdown]
# ## What can run here

# %%
print(kernel_parity.describe_backends(device, dtypes, nsa))

# %% [markdown]
# ## How far off is each of them?
#
# A bar is an error, in units of what is allowed: 1, the dotted line, is all of it, and `exact` is no error at all. Each bar
# is the worst over all the lengths, of the output or of whichever gradient comes nearest to its limit.

# %%
rows = list(kernel_parity.compare_backends(lengths, dtypes, nsa, device=device, **shape))
over = f"worst error over T = {', '.join(f'{length:,}' for length in lengths)}"
for dtype in dtypes:
    named = str(dtype).removeprefix("torch.")
    show_figure(
        figures.plot_allowed_errors(
            kernel_parity.compute_worst_fractions(rows, dtype), f"{named}: {over}, as a share of what is allowed"
        )
    )

# %% [markdown]
# **What to notice.** No bar reaches the dotted line. Where float64 is among the dtypes its bars end thousands of times
# short of it, and the choice of blocks is `exact`: what is computed is the same, and what differs is rounding. The short
# dtypes come nearer, because there the limit itself is a few roundings.
#
# **What is allowed.** A fast implementation owes its reader no more than the dtype can give, and no less than the same
# mathematics gives when it is written down plainly in that dtype:
#
# | dtype | an output may err | a gradient may err |
# |---|---|---|
# | bfloat16, float16 | 2 × plain arithmetic, in norm | 3 × plain arithmetic, in norm |
# | float32 | 1e-5, the largest difference | 3 × plain arithmetic, in norm, or 5e-6 if that is more |
# | float64 | 1e-10, the largest difference | 1e-10, the largest difference |
#
# *In norm* is the norm of the difference over the norm of the truth, which is the definition in float64. *Plain arithmetic*
# keeps every intermediate result in the dtype, scores and probabilities too, and counts for no less than the dtype's eps
# (7.8e-3 in bfloat16, twice what a rounding errs at most); on random numbers it mostly errs less, so that eps is what
# decides.
#
# The 5e-6 of float32 has a reason: where a query sees a single key, the gradient of its score is exactly 0. Plain
# arithmetic keeps the probabilities and finds that 0; a kernel that does not keep them subtracts two equal sums, and
# what is left is their rounding.
#
# For the selection the numbers are shares of queries whose set of blocks differs. In float64 none may; elsewhere one in
# a thousand, or twice as many as for the definition itself in that dtype, because two scores may be equal but for
# rounding.

# %%
too_large = [row for row in rows if not row.ok]
print(f"{len(rows)} comparisons, {len(too_large)} beyond what is allowed")
show_folded("Every comparison, with its numbers", kernel_parity.format_table(rows))
assert not too_large, kernel_parity.format_table(too_large)

# %% [markdown]
# In the table, `error` is of the output, `gradient` of the worst of the gradients, and `of` says which one that is; beside
# each stands what is allowed.
#
# ## Exactly
#
# In float64 the `torch` backend must agree with the definition to 1e-10, and choose exactly the same blocks. These
# lines are compared character by character in continuous integration.

# %%
# NBVAL_CHECK_OUTPUT
exact = kernel_parity.compare_backends([15, 32, 64, 200], [torch.float64], nsa, heads=4, groups=2, head_dim=32)
lines = [
    f"{row.part:<11} T = {row.length:>3}: {'agrees to 1e-10' if row.ok else 'DIFFERS'}"
    for row in exact
    if row.backend == "torch"
]
print("\n".join([*lines, f"mean selected keys at T = 2,048: {geometry.mean_selected_keys(2048, nsa)}"]))

# %% [markdown]
# ## Speeds
#
# Forward and backward of each part and of the whole, beside dense attention at the same shape: PyTorch's
# `scaled_dot_product_attention` (SDPA) with two kernels, flash and cuDNN. FlexAttention is PyTorch's compiler for
# attention with a mask, here with the masks of two branches. Measured now where there is a CUDA device, and then a speed
# is shown only for what passed the comparison; otherwise the record in `docs/benchmarks`, of the device and day that it
# names.

# %%
show_attention_speeds(measure=device == "cuda" and speeds)

# %% [markdown]
# **What to notice.** Dense attention (dashed) climbs with the length, since every token is compared with all before it.
# The whole of NSA (black) lies above it in short sequences, crosses it, and then grows far more slowly; what still grows
# is the compressed branch and the choice, which look at a summary for every sixteenth token.
#
# ## A training step, by part
#
# A profiler trace of the whole training step, summarised by kernel: what each part takes, and its *floor*, the least
# that its arithmetic would take (matrix products at the rate that a large one reached in the same run, attention at 500
# TFLOP/s on the keys it reads). Measured now where there is a CUDA device, otherwise the record that ships with the
# package.

# %%
step_time.show_step_time(measure=device == "cuda" and speeds)

# %% [markdown]
# **What to notice.** Per token, the matrix products (`gemm`) take as long at every length; in short sequences they are the
# largest part of NSA's step. In long ones dense attention takes nearly all of the twin's step, while NSA's whole step is
# less than twice as long as in short ones.
#
# **Next:** `03_smoke_training` trains a small model by what was checked here; `07_decoding` checks a decoding step the same
# way.
