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
# A small NSA model learns real text: the source code and documentation that come with Python, byte by byte. An
# untrained model needs 8 bits per byte; watch validation fall from there. On two CPU cores this takes a few minutes.
#
# The trainer is a process of its own. This notebook starts it, or attaches to it, and reads its event file: killing
# the kernel or closing the page does not hurt the run, and running the notebook again attaches to it, resumes it
# where it stopped, or shows the finished one. Parameters that belong to `params/smoke.yaml` can be changed below, or
# from outside:
# `papermill notebooks/03_smoke_training.ipynb out.ipynb -y '{train: {steps: 50}}'`.

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
# **Next:** `04_production_run` is the same code with `params/production_50k.yaml`; `05_health_analysis` looks closer at
# any run.
