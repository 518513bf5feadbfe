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
# # The production run
#
# 50 000 optimiser steps of 4 × 2048 bytes through a model of 78 million parameters: the run that the reports behind
# this project set out to do. The code is that of `03_smoke_training`; what differs is `params/production_50k.yaml`.
# It needs a CUDA device and takes well under an hour on a recent one; with `-f params/ci.yaml` the same notebook does
# 20 steps on a CPU in seconds.
#
# The trainer is a process of its own, so this notebook may be closed, killed and run again at any time: it attaches,
# resumes, or shows the finished run. From a terminal: `nsa-lab run production_50k`, `nsa-lab follow`, `nsa-lab stop`,
# `nsa-lab resume`.

# %% tags=["parameters"]
name: str = "production_50k"  # which params/NAME.yaml is the base
model: dict = {}  # values laid over its section model, for example {"dim": 256}
nsa: dict = {}  # over its section nsa: l, d, l_sel, n_sel, w, phi, gate
runtime: dict = {}  # over its section runtime: device, precision, backend, compile
train: dict = {}  # over its section train: steps, seq_len, batch_size, lr, seed
data: dict = {}  # over its section data: source, path, tokenizer
run_dir: str = ""  # run directory to attach to; empty: the latest of this configuration, or a new one
new_run: bool = False  # start a new run even where one of this configuration exists
outputs: str = ""  # folder that run directories are kept in; empty: outputs/ of the project
prompt: str = "def main("  # what the samples go on from
sample_tokens: int = 160  # length of each sample, tokens

# %%
from nsa_lab.workbook.training import configure

training = configure(
    name,
    {"model": model, "nsa": nsa, "runtime": runtime, "train": train, "data": data},
    run_dir=run_dir,
    outputs=outputs,
    new_run=new_run,
    prompt=prompt,
    sample_tokens=sample_tokens,
)

# %% [markdown]
# ## The model, before

# %%
training.describe()

# %%
training.sample_before()

# %% [markdown]
# ## The run
#
# Interrupting the cell below ends the following, not the run.

# %%
training.start()

# %%
await training.follow()

# %% [markdown]
# ## What happened

# %%
training.overview()

# %%
training.curves()

# %%
training.branches()

# %%
training.pace()

# %% [markdown]
# ## The model, after

# %%
training.sample_after()

# %% [markdown]
# ## Was the run healthy?
#
# Each line compares a number with a limit and can fail. `?` means that the run does not say.

# %%
training.verdict()

# %% [markdown]
# **Next:** `05_health_analysis` compares runs and shows where selection looks.
