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
# # Training a small model
#
# This notebook trains a small NSA model on real text, byte by byte. The text is the source code and documentation that
# come with Python (`data.source: stdlib`); for your own texts use `data.source: local` with a `data.path`. An untrained
# model needs 8 bits per byte, and the validation loss falls from there.
#
# **What you will learn**
#
# * how to start, watch, stop and resume a run,
# * how to read the curves of a run: loss, gradient norm, gates, selection, throughput,
# * what the health checks of a run tell you.
#
# **Prerequisites.** Notebook 01 for the branches. You need no GPU.
#
# **Time.** 15 minutes to read. Training takes a few minutes on two CPU cores.
#
# The trainer is a separate process. This notebook starts it and reads its event file. You can restart the kernel or
# close the page without stopping the run. If you run the notebook again, it attaches to the run, resumes it, or shows
# the finished run.
#
# You can change the values of `params/smoke.yaml` in the next cell, or from the command line:
# `papermill notebooks/04_smoke_training.ipynb out.ipynb -y '{train: {steps: 100}}'`.

# %%
# %load_ext nsa_lab.workbook

# %% tags=["parameters"]
name: str = "smoke"  # base configuration, params/NAME.yaml
description: str = ""  # purpose of the run in a sentence, for its report; empty: that of the base configuration
model: dict = {}  # new values for its section model, for example {"dim": 256}
nsa: dict = {}  # of its section nsa: l, d, l_sel, n_sel, w, phi, gate
runtime: dict = {}  # of its section runtime: device, precision, backend, compile
train: dict = {}  # of its section train: steps, seq_len, batch_size, lr, seed
data: dict = {}  # of its section data: source, path, tokenizer
run_dir: str = ""  # run directory to attach to; empty: the latest run of this configuration, or a new one
new_run: bool = False  # start a new run even if one of this configuration exists
outputs: str = ""  # folder of the run directories; empty: outputs/ of the project
prompt: str = "def main("  # prompt of the samples
sample_tokens: int = 400  # length of each sample in tokens
reference: str = ""  # another run, by directory or id, whose validation loss is compared with this run's

# %%
from nsa_lab.workbook.training_session import configure_training

training = configure_training(
    name,
    {"model": model, "nsa": nsa, "runtime": runtime, "train": train, "data": data},
    run_dir=run_dir,
    outputs=outputs,
    new_run=new_run,
    description=description,
    prompt=prompt,
    sample_tokens=sample_tokens,
    reference=reference,
)

# %% [markdown]
# ## The model
#
# The configuration, the size of the model, and the number of tokens it will train on:

# %%
training.print_settings()

# %% [markdown]
# ## The run
#
# Interrupting the last of these two cells stops the display, not the run.

# %%
training.start()

# %%
await training.follow()

# %% [markdown]
# ## Results
#
# The run at a glance. The loss is in bits per byte: thin lines are single steps, thick lines are a running mean, and
# the dashed line is held-out text. (A model that predicts all 256 bytes equally has 8 bits per byte.) *What to notice:*
# in the first steep fall the model learns the frequencies of bytes and pairs of bytes. At the bend it starts to learn
# words and indentation. Gates, selection and throughput have separate figures below.

# %%
training.show_overview()

# %% [markdown]
# ### Comparison with another run
#
# If `reference` names a run, this figure shows the validation loss of both runs, against tokens and against step time
# (the time of optimizer steps only). *What to notice:* the lower curve against tokens learns more from the same text.
# The lower curve against time is faster. These may be different runs. One run of each is weak evidence; `nsa-lab sweep`
# compares several seeds.

# %%
training.show_reference()

# %% [markdown]
# ### Optimizer
#
# The learning rate, and the norm of the gradient before clipping. *What to notice:* the norm is large during the
# warm-up and then becomes stable. Single spikes are unusual batches, for example a table of numbers; clipping limits
# their effect. A norm that keeps growing is a sign of divergence.

# %%
training.show_optimizer()

# %% [markdown]
# ### Gates
#
# Each query weights three branches: compressed (`cmp` in the records: an overview of the whole past), selected (`sel`:
# a few blocks in full detail) and window (`win`: the latest tokens). A share is a branch's part of the sum of the three
# gates. There is one line per layer, and the dotted line marks equal shares.
#
# *What to notice:* the shares start at one third and separate early. If the shares of a layer stay at one third, the
# layer uses the branches equally on average. Whether single queries prefer a branch shows in the entropy (notebook 06).

# %%
training.show_gates()

# %% [markdown]
# The same shares by layer, at the first and at the last recorded step. *What to notice:* layers specialize. A branch
# that one layer hardly uses may be the largest in another.

# %%
training.show_gates_by_layer()

# %% [markdown]
# ### Selection
#
# Four statistics of the selected blocks:
#
# * the fraction that the previous query selected too,
# * their distance in blocks,
# * the attention on the first block (an *attention sink*: attention that is needed nowhere else),
# * the fraction of selected keys that the window reads too.
#
# *What to notice:* the dotted line is the value for random selection. A fraction above it shows that neighboring
# queries select similar blocks. It does not show that they select the right ones.

# %%
training.show_selection()

# %% [markdown]
# The size of each branch's output: mean and range over layers. *What to notice:* if the output of a branch shrinks
# towards zero, the layer stops using this branch, whatever its gate shows.

# %%
training.show_branch_norms()

# %% [markdown]
# ### Throughput
#
# Tokens per second and their median, the fraction of time spent waiting for data, and memory. *What to notice:* the
# first value includes the start-up. On a laptop, dips are usually other programs. A steady decrease is a fault.

# %%
training.show_throughput()

# %% [markdown]
# ## Samples
#
# First a passage of the same kind of text that was not used in training. Then the model's continuation of `prompt`,
# before the first step and after the last. *What to notice:* the untrained model produces random bytes. After some
# minutes of training the sample has words, indentation and Python names, but no meaning.

# %%
training.show_samples()

# %% [markdown]
# ## Health checks
#
# Each line compares a number with a limit and can fail. `?` means that the run has not recorded the number.

# %%
training.print_verdict()

# %% [markdown]
# ## Configuration
#
# All values of the run, as in `config.yaml` in its directory.

# %%
training.print_configuration()

# %% [markdown]
# **What to take away**
#
# * Training runs in its own process. The notebook only reads its record, so closing the page never stops a run.
# * A falling loss shows that the model learns. It does not show that the selection finds facts; notebook 07 does.
# * Every curve and check above comes from files in the run's directory, which can be copied to another machine.
#
# **Next.** [05_production_run](05_production_run.ipynb) is the same code with `params/production_50k.yaml`.
# [06_health_analysis](06_health_analysis.ipynb) examines any run in more detail.
