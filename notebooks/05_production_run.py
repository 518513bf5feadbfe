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
# This notebook trains a model of 78 million parameters for 50,000 optimizer steps of 4 × 2,048 bytes. It has the same
# code as [04_smoke_training](04_smoke_training.ipynb), with `params/production_50k.yaml`.
#
# The outputs in the repository show the recorded run `production_50k-20261121T141448Z-afd3`, which was trained on one H200
# in November 2026 and killed once on purpose, next to its dense baseline. They were made from the records of both, without
# training (`run_dir = "production_50k-20261121"`, `reference = "production_50k_dense-20261121"`). The repository does not
# contain the weights, so the sample after training is missing here. [A page](../docs/science/production_50k.md) has all
# results.
#
# **What you will learn**
#
# * what a healthy run of 50,000 steps looks like, including one that was killed and resumed,
# * how layers divide the work among the three branches,
# * how to start such a run yourself.
#
# **Prerequisites.** Notebook 04. To train: a CUDA device.
#
# **Time.** 10 minutes to read. Training takes 18 minutes on an H200. With `-f params/ci.yaml` the same notebook runs 20
# steps on a CPU in seconds.
#
# The trainer is a separate process, so you can close or restart this notebook at any time. If you run it again, it
# attaches to the run, resumes it, or shows the finished run. The commands are `nsa-lab run production_50k`,
# `nsa-lab follow`, `nsa-lab stop` and `nsa-lab resume`.

# %%
# %load_ext nsa_lab.workbook

# %% tags=["parameters"]
name: str = "production_50k"  # base configuration, params/NAME.yaml
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
# most of the decrease is in the first tenth of the steps, which the axes omit for a long run. A drop within a few
# hundred steps is an ability learned at once, for example copying from earlier in the text. Which seed or architecture
# drops first is mostly chance. Gates, selection and throughput have separate figures below.

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
# Tokens per second and their median, the fraction of time spent waiting for data, and memory. *What to notice:* on a
# GPU that runs nothing else, the throughput is constant. Dips are evaluations and checkpoints.

# %%
training.show_throughput()

# %% [markdown]
# ## Samples
#
# First a passage of the same kind of text that was not used in training. Then the model's continuation of `prompt`,
# before the first step and after the last. *What to notice:* the words, the markup and the layout are right, the
# meaning is not. With `params/ci.yaml` (20 steps) the sample is noise.

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
# * The run is stable: the gradient norm settles after the warm-up, and the resumed part continues the curve.
# * Layers specialize. The shares of the branches differ between layers and stay that way.
# * Passed checks do not show that the model finds facts. When this run was trained, nothing measured it. The same
#   architecture, trained on text with facts, retrieves none of them ([retrieval](../docs/science/retrieval.md)).
#
# **Next.** [06_health_analysis](06_health_analysis.ipynb) compares this run with its dense baseline.
