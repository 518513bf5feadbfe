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
# # Does NSA read long texts?
#
# Sparse attention is for long texts. NSA and a dense twin of its size, 78.4 M parameters, were trained on the same text in
# the same order, in stages of 2,048, 8,192 and 65,536 bytes, the last of which reads each long text once. NSA has the
# recipe of
# [notebook 06][1], with a key of the indexer for every byte, since with one for eight such a model lost what is far (one
# seed, [what led here][2]); both have normed embeddings and *tables of n-grams*, embeddings that are looked up by the
# last few bytes together. Then both are asked for facts, and
# read documents that neither was trained on.
#
# These are three seeds. Other runs can be read as well: a longer plan, which learned its text by heart, with
# `long_64k_shallow.a_key_per_byte.*` and `long_64k_shallow.dense.*` as `runs` and `long_64k_shallow.dense` as `against`;
# NSA trained without a part of it, with `long_64k_window*`, `long_64k_paper-*` and `long_64k-20261126*`, against
# `long_64k`; attention without the recipe (the paper's, but with means for φ) beside a dense model without the recipe,
# with `long_64k_paper-*` and
# `long_64k_dense_plain-*`, against `long_64k_dense_plain`; or seed 0 once more, asked five times as much, with
# `long_64k_full-*` and `long_64k_dense_full-*`, against `long_64k_dense_full`.
#
# The [protocol][2] was written before the runs: what is asked, how it is judged, and what would show that it is not so.
# Nothing below was typed in by hand: tables and pictures are made from the records of the runs, `events.jsonl` and
# `evaluation.json`. A terminal prints the same tables with `nsa-lab compare`, given these runs and `--against`.
#
# [1]: 06_does_selection_find.ipynb
# [2]: ../docs/science/long_texts.md

# %% tags=["parameters"]
runs: list = ["long_64k-20261126*", "long_64k_dense-20261126*"]  # evaluated; a name's seeds are one model
against: str = "long_64k_dense"  # the model that the others are compared with
outputs: str = ""  # folder that runs are kept in; empty: outputs/ of the project
bar: float = 0.005  # bits per byte that NSA may lie above its twin, by the protocol
read: int = 4096  # bytes of each text that the shipped model is asked about at the end
asked: int = 10  # such texts, the fact at another depth in each
seed: int = 0  # of those facts

# %%
import time

import numpy as np
import torch

from nsa_lab import load_model
from nsa_lab.config import RecallConfig
from nsa_lab.evaluate import ABLATIONS, run_ablations
from nsa_lab.evaluate.retrieval import make_needles
from nsa_lab.evaluate.scoring import stack_samples
from nsa_lab.workbook.evaluated_runs import load_evaluated_models
from nsa_lab.workbook.examples import read_standard_library

found = load_evaluated_models(runs, against, outputs)

# %% [markdown]
# ## What was trained, and what it cost
#
# One line for a model, its seeds in order. *What to notice:* the share of the dense twin's seconds, and of its whole run,
# which has compiling, evaluations and saves as well.

# %%
found.show_costs()

# %% [markdown]
# Validation against tokens says what learns more from a text, against seconds what is quicker. The steps in a line are
# those of the stages: other lengths, other texts.

# %%
found.show_training_time()

# %% [markdown]
# ## Does it find?
#
# A needle is a fact, told somewhere in held-out text and asked for at its end. *Multi-key* is one among many others
# of its kind, *multi-query* are four questions in a row. Where other forms were asked (values of other lengths, of letters
# or hexadecimal digits, names that are codes, other words), no model was trained on any. *What to notice:* the table of far
# facts, those beyond the window and behind the first block: there the choice of blocks has to find.

# %%
found.show_needles()

# %% [markdown]
# ## Does it read as well?
#
# `long` is of documents of 128 KB and more, in windows of 65,536 bytes, each read by both models. *What to notice:* not
# the mean, but whether the difference grows with the position. If it does, the choice loses what is far, as it does with a
# key for eight bytes. The dashed level is the protocol's bar. There are two intervals, since two things are unknown: other
# texts (over windows), and other seeds; of three seeds the second is wide, 4.3 standard errors.

# %%
found.show_text("long", bar)

# %% [markdown]
# Documents from the same packages as those of training (`validation`), and of packages that training has nothing of
# (`heldout`), each from its first byte:

# %%
found.show_text("validation")

# %%
found.show_text("heldout")

# %% [markdown]
# ## Which part does it?
#
# The trained weights stay, and in every layer the blocks are replaced, or a branch says nothing ([notebook 06][1] explains
# each line). *What to notice:* needles by random blocks. Were they found as well, the task would not measure
# selection. And `oracle` in text: what a better choice of as many blocks could still gain. Where nothing follows, it was
# not asked of these runs, as the list after it says.
#
# [1]: 06_does_selection_find.ipynb

# %%
found.show_ablations()

# %% [markdown]
# ## What is not in these tables
#
# Runs that did not end or were not asked, and questions that were not the same for all:

# %%
found.show_excluded()

# %% [markdown]
# ## Ask one yourself
#
# `needle-8m` ships with the library and was trained by the recipe of notebook 06, with a key for eight bytes, on lengths
# up to 16,384; its [card](../nsa_lab/models/needle-8m/README.md) says what it finds. Here facts stand in a module of
# Python's standard library, and its choice is replaced as above, on this machine and now.

# %%
shipped = load_model("needle-8m")
source = read_standard_library(90_000, "argparse.py")
texts = make_needles(read, asked, RecallConfig(), seed, np.frombuffer(source.encode(), np.uint8).astype(np.int64))
began = time.monotonic()
effects = run_ablations(
    shipped, *stack_samples(texts, torch.device("cpu")), names=("chosen", "random", "nearest", "no_sel"), seed=seed
)
print(f"{asked} texts of {read:,} bytes, {(time.monotonic() - began) / (asked * len(effects)):.1f} s for each")
for effect in effects:
    what = ABLATIONS[effect.name]
    told = f"{what.selection} blocks" if what.disabled_branch is None else "no selected branch"
    print(
        f"{told:<18}│ {effect.accuracy:>4.0%} of the facts, {effect.loss / np.log(2):.3f} bits per byte of the text around"
    )

# %% [markdown]
# On documents of your own: `nsa-lab run long_64k -p data.path=FOLDER` trains, `nsa-lab evaluate RUN --text mine=PATH`
# asks, and this notebook takes the runs by name.
