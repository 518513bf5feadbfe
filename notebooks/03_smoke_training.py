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
# # Training, small
#
# A small NSA model learns real text: the source code and documentation that come with Python (`data.source: stdlib`;
# `local` with a `path` takes texts of your own), byte by byte. An untrained model needs 8 bits per byte; watch
# validation fall from there. On two CPU cores this takes a few minutes.
#
# The trainer is a process of its own. This notebook starts it, or attaches to it, and reads its event file: killing
# the kernel or closing the page does not hurt the run, and running the notebook again attaches to it, resumes it
# where it stopped, or shows the finished one. Parameters that belong to `params/smoke.yaml` can be changed below, or
# from outside: `papermill notebooks/03_smoke_training.ipynb out.ipynb -y '{train: {steps: 100}}'`.

# %% tags=["parameters"]
name: str = "smoke"  # which params/NAME.yaml is the base
model: dict = {}  # values laid over its section model, for example {"dim": 256}
nsa: dict = {}  # over its section nsa: l, d, l_sel, n_sel, w, phi, gate
runtime: dict = {}  # over its section runtime: device, precision, backend, compile
train: dict = {}  # over its section train: steps, seq_len, batch_size, lr, seed
data: dict = {}  # over its section data: source, path, tokenizer
run_dir: str = ""  # run directory to attach to; empty: the latest of this configuration, or a new one
new_run: bool = False  # start a new run even where one of this configuration exists
outputs: str = ""  # folder that run directories are kept in; empty: outputs/ of the project
prompt: str = "def main("  # what the samples go on from
sample_tokens: int = 400  # length of each sample, tokens
reference: str = ""  # another run, by directory or id: its validation is drawn beside this one's

# %%
from nsa_lab.workbook.training_session import configure_training

training = configure_training(
    name,
    {"model": model, "nsa": nsa, "runtime": runtime, "train": train, "data": data},
    run_dir=run_dir,
    outputs=outputs,
    new_run=new_run,
    prompt=prompt,
    sample_tokens=sample_tokens,
    reference=reference,
)

# %% [markdown]
# ## The model
#
# Before a step is done: how large it is, and how much it will read.

# %%
training.print_settings()

# %% [markdown]
# ## The run
#
# Interrupting the cell below stops the watching, not the run.

# %%
training.start()

# %%
await training.follow()

# %% [markdown]
# ## What happened
#
# The run at a glance. The loss is in bits per byte, thin as recorded and thick as a running mean, the held-out text
# dashed (8 bits is a model that knows nothing). *What to notice:* the first fall is the frequencies of single bytes
# and pairs; where the curve bends, words and indentation have come. Gates, selection and pace have pictures of their
# own below.

# %%
training.show_overview()

# %% [markdown]
# ### Beside another run
#
# Where `reference` names one: both validations, over tokens and over seconds of optimiser steps. *What to notice:* which
# is lower at the same tokens says what learns more from a text, which is lower at the same second what is quicker;
# they need not be one. One run of each proves little: `nsa-lab sweep` compares several seeds.

# %%
training.show_reference()

# %% [markdown]
# ### The optimiser
#
# The rate that was asked for, and the length of the gradient before it is clipped. *What to notice:* it is large
# while the rate still rises, and settles. Single spikes are batches unlike the others (a table, a file of data);
# clipping bounds what they do. A norm that keeps growing is the way in which runs diverge.

# %%
training.show_optimizer()

# %% [markdown]
# ### The gates
#
# Every query weighs three branches: compressed (`cmp` in the records; a coarse view of everything), selected (`sel`;
# a few blocks, read in full) and window (`win`; the latest tokens). Shares are of the three gates' sum; one line per
# layer, dotted where all three are alike. *What to notice:* they start at a third each and part early; a layer whose
# shares stay at a third uses the three alike on average, and whether single queries choose, the entropy tells (notebook
# 05).

# %%
training.show_gates()

# %% [markdown]
# The same by layer, at the first reading and at the last. *What to notice:* layers come to divide their work: a
# branch that one layer hardly uses may be another's largest.

# %%
training.show_gates_by_layer()

# %% [markdown]
# ### The selection
#
# What the chosen blocks are like: shared with the query before, how far back, the first block's share (attention that
# is parked at the beginning of the text, an *attention sink*), and how much of them the window reads as well. *What
# to notice:* by chance, neighbouring queries would share as many blocks as the dotted line says; lying above it shows that
# neighbours choose alike, not that they choose well.

# %%
training.show_selection()

# %% [markdown]
# How large each branch's output is, mean and range over layers. *What to notice:* a branch whose output shrinks
# towards zero is being given up, whatever its gate says.

# %%
training.show_branch_norms()

# %% [markdown]
# ### The pace
#
# Tokens per second with their median, the share of the time spent waiting for data, and memory. *What to notice:* the
# first reading holds the start-up. Dips on a laptop are other programs; a creep downwards is a fault.

# %%
training.show_throughput()

# %% [markdown]
# ## What it writes
#
# First, text of the kind it learned from, which training never read; then what the model makes of the prompt `def
# main(` (or whatever `prompt` says above), before the first step and after the last. *What to notice:* the untrained
# model writes any byte. After some minutes there are words, indentation and names of Python, and no sense.

# %%
training.show_samples()

# %% [markdown]
# ## Was the run healthy?
#
# Each line compares a number with a limit and can fail. `?` means that the run does not say.

# %%
training.print_verdict()

# %% [markdown]
# ## The configuration
#
# Every value that the run was made with; `config.yaml` in its directory holds the same.

# %%
training.print_configuration()

# %% [markdown]
# **Next:** `04_production_run` is the same code with `params/production_50k.yaml`; `05_health_analysis` looks closer
# at any run.
