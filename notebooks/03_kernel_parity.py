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
# `nsa_lab.attention.reference` is the definition of NSA: plain PyTorch with full score matrices, in float64 on request.
# Faster implementations are called *backends*:
#
# * `torch` runs on any device.
# * `triton` uses this project's kernels and needs a GPU.
# * `flash` uses the flash-attn package, for the window branch only.
#
# This notebook compares each backend with the definition: outputs, gradients of every input, and the selected blocks.
# If a backend cannot run on this machine, the notebook prints the reason.
#
# The parts are those of notebook 01: the **compressed** branch, the **selection** of blocks, attention over the
# **selected** blocks, the **window**, and the **whole** operator with its gates.
#
# **What you will learn**
#
# * how far a fast kernel may deviate from the definition, and why,
# * from which length on NSA is faster than dense attention on a GPU,
# * which parts of a training step take the time.
#
# **Prerequisites.** Notebook 01 for the parts. A GPU is optional: without one, the `torch` backend is compared, and the
# speeds come from a record.
#
# **Time.** 15 minutes to read. The notebook runs in about a minute on two CPU cores.

# %%
# %load_ext nsa_lab.workbook

# %% tags=["parameters"]
lengths: list = [1, 33, 65, 512, 1025]  # sequence lengths in tokens: below one block, odd, and above n_sel * l_sel (1,024)
heads: int = 4  # query heads H on a CPU; on a GPU there are 12 in 2 groups
measure_speed: bool = True  # measure speed too if there is a CUDA device

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
shape = {"heads": 12, "groups": 2, "head_dim": 64} if device == "cuda" else {"heads": heads, "groups": 2, "head_dim": 32}
dtypes = [torch.float32, torch.bfloat16] + ([torch.float64] if device == "cpu" else [])

# %% [markdown]
# ## Available backends

# %%
print(kernel_parity.describe_backends(device, dtypes, nsa))

# %% [markdown]
# ## Errors
#
# Each bar is an error divided by the allowed error. The dotted line at 1 is the limit, and `exact` means no error. A
# bar shows the worst case over all lengths, either of the output or of the gradient that is closest to its limit.

# %%
rows = list(kernel_parity.compare_backends(lengths, dtypes, nsa, device=device, **shape))
caption = f"worst error over T = {', '.join(f'{length:,}' for length in lengths)}"
for dtype in dtypes:
    title = f"{str(dtype).removeprefix('torch.')}: {caption}, as a fraction of the allowed error"
    show_figure(figures.plot_allowed_errors(kernel_parity.compute_worst_fractions(rows, dtype), title))

# %% [markdown]
# **What to notice.** No bar reaches the dotted line. In float64 (if it is among the dtypes) the errors are thousands of
# times smaller than the limit, and the selection is `exact`: the backend computes the same function, and only rounding
# differs. Low-precision bars are longer, because there the limit itself is a few rounding errors.
#
# **Allowed errors.** A backend may err about as much as the same mathematics written plainly in that dtype:
#
# | dtype | output | gradient |
# |---|---|---|
# | bfloat16, float16 | 2 × plain arithmetic, relative norm | 3 × plain arithmetic, relative norm |
# | float32 | 1e-5, largest difference | 3 × plain arithmetic, relative norm, at least 5e-6 |
# | float64 | 1e-10, largest difference | 1e-10, largest difference |
#
# *Relative norm* is the norm of the difference divided by the norm of the float64 definition. *Plain arithmetic* stores
# every intermediate result in the dtype, including scores and probabilities. Its error counts as at least the machine
# epsilon of the dtype (7.8e-3 in bfloat16, twice the largest rounding error). On random inputs it is usually smaller,
# so in most cases the epsilon sets the limit.
#
# The float32 minimum of 5e-6 has a reason. If a query sees a single key, the gradient of its score is exactly 0. Plain
# arithmetic stores the probabilities and computes this 0 exactly. A kernel that does not store them subtracts two equal
# sums, and their rounding error remains.
#
# For the selection, the error is the fraction of queries whose set of blocks differs. In float64 it must be 0. In other
# dtypes it may be 0.001, or twice the fraction of the definition itself in that dtype, because two scores may be equal
# up to rounding.

# %%
too_large = [row for row in rows if not row.ok]
print(f"{len(rows)} comparisons, {len(too_large)} above the limit")
show_folded("All comparisons with their numbers", kernel_parity.format_table(rows))
assert not too_large, kernel_parity.format_table(too_large)

# %% [markdown]
# The column `error` is the error of the output, and `gradient` is the worst gradient error, of the tensor named in the
# last column. The allowed error follows each of them.
#
# ## Exact comparison
#
# In float64, the `torch` backend must agree with the definition to 1e-10 and select exactly the same blocks. Continuous
# integration compares these lines character by character.

# %%
# NBVAL_CHECK_OUTPUT
exact = kernel_parity.compare_backends([15, 32, 64, 200], [torch.float64], nsa, heads=4, groups=2, head_dim=32)
lines = [
    f"{row.part:<11} T = {row.length:>3}: {'equal to 1e-10' if row.ok else 'DIFFERS'}"
    for row in exact
    if row.backend == "torch"
]
print("\n".join([*lines, f"mean selected keys at T = 2,048: {geometry.mean_selected_keys(2048, nsa)}"]))

# %% [markdown]
# ## Speed
#
# Forward and backward of each part and of the whole operator, compared with dense attention of the same shape. The
# dense baselines are PyTorch's `scaled_dot_product_attention` (SDPA) with the flash and the cuDNN kernel.
# FlexAttention, PyTorch's compiler for masked attention, is measured with the masks of two branches.
#
# On a CUDA device the speeds are measured now, only for backends that passed the comparison. Otherwise the notebook
# shows the record in `docs/benchmarks`, with its device and date.

# %%
show_attention_speeds(measure=device == "cuda" and measure_speed)

# %% [markdown]
# **What to notice.** The time per token of dense attention (dashed) grows with the length, because every token is
# compared with all tokens before it. The whole NSA operator (black) is slower in short sequences and faster in long
# ones, where it grows much more slowly. Its growth comes from the compressed branch and the selection, which score one
# compressed key per 16 tokens.
#
# ## A training step, part by part
#
# A profiler trace of the complete training step, grouped by kernel: the time of each part, and its *floor*. The floor
# is the time that its arithmetic needs at full speed. For matrix products, full speed is what a large product reached
# in the same run. For attention it is 500 TFLOP/s, counting the keys that are read. On a CUDA device the trace is
# recorded now; otherwise the record that ships with the package is shown.

# %%
step_time.show_step_time(measure=device == "cuda" and measure_speed)

# %% [markdown]
# **What to notice.** The time of matrix products (`gemm`) per token is the same at every length. In short sequences it
# is the largest part of NSA's step. In long sequences, dense attention takes most of the dense baseline's step. NSA's
# step, per token, is less than twice as long there as in short sequences.
#
# **What to take away**
#
# * Every backend computes the same function as the definition. In low precision it errs about as much as plain
#   arithmetic in that precision.
# * In float64 the selection is equal for every query, so two backends never read different blocks.
# * NSA is slower than dense attention in short sequences and faster in long ones. The crossover is printed above.
#
# **Next.** [04_smoke_training](04_smoke_training.ipynb) trains a small model with these backends.
# [08_decoding](08_decoding.ipynb) checks a decoding step in the same way.
