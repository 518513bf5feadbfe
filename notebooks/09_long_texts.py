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
# # NSA on long texts
#
# Sparse attention is meant for long texts. This notebook compares NSA with a parameter-matched dense baseline of 78.4 M
# parameters on facts in texts of up to 65,536 bytes, and on documents that neither model was trained on.
#
# Both models were trained on the same text in the same order, in three stages: lengths of 2,048, 8,192 and 65,536
# bytes. The last stage reads each long text once. NSA uses the training recipe of [notebook 07][1] with one index key
# per byte. (With one key per 8 bytes, such a model lost distant facts; one seed, see [the log][2].) Both models have
# normalized embeddings and *n-gram tables*: embeddings of the last few bytes together.
#
# The experiment has three seeds. A clone of the repository has the records of seed 0;
# `python tools/records.py unpack RUN` adds other recorded runs (see [outputs/README.md](../outputs/README.md)). The
# [protocol][2] was written before the runs: the tasks, the criteria, and the results that would refute the claim. All
# tables and figures are made from the records of the runs, `events.jsonl` and `evaluation.json`. `nsa-lab compare`
# prints the same tables for these runs, with `--against` for the baseline.
#
# Other runs can be compared with the parameters `runs` and `baseline`:
#
# * A longer schedule, which memorized its text: `long_64k_shallow.a_key_per_byte.*` and `long_64k_shallow.dense.*`,
#   baseline `long_64k_shallow.dense`.
# * NSA trained without one of its parts: `long_64k_window*`, `long_64k_paper-*` and `long_64k-20261126*`, baseline
#   `long_64k`.
# * NSA and dense attention, both without the recipe: `long_64k_paper-*` and `long_64k_dense_plain-*`, baseline
#   `long_64k_dense_plain`.
# * Seed 0 with five times as many questions: `long_64k_full-*` and `long_64k_dense_full-*`, baseline
#   `long_64k_dense_full`.
#
# [1]: 07_does_selection_find.ipynb
# [2]: ../docs/science/long_texts.md

# %% tags=["parameters"]
runs: list = ["long_64k-20261126*", "long_64k_dense-20261126*"]  # evaluated runs; seeds of one name are one model
baseline: str = "long_64k_dense"  # model to compare the others with
outputs: str = ""  # folder of the run directories; empty: outputs/ of the project
target: float = 0.005  # allowed difference from the baseline in bits per byte, by the protocol
text_bytes: int = 4096  # length of each text for the shipped model
n_texts: int = 10  # number of these texts, each with a fact at another depth
seed: int = 0  # of the facts

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

evaluation = load_evaluated_models(runs, baseline, outputs)

# %% [markdown]
# ## Training and its cost
#
# Each row is a model, with its seeds in order. *What to notice:* compare the step time (optimizer steps only) and the
# total time with the dense baseline. The total includes compilation, evaluations and checkpoints.

# %%
evaluation.show_costs()

# %% [markdown]
# Validation loss while training. Against tokens, the lower curve learns more from the same text. Against time, the
# lower curve is faster. Steps in a curve are changes of stage, to other lengths and other texts.

# %%
evaluation.show_training_time()

# %% [markdown]
# ## Does the model find facts?
#
# A *needle* is a fact inserted somewhere in held-out text and asked for at its end. In *multi-key*, the text contains
# many other facts of the same kind. In *multi-query*, there are four questions in a row. Some runs were also evaluated
# on other forms of facts: values of other lengths, letters or hexadecimal digits, codes as names, and other wording. No
# model was trained on these.
#
# *What to notice:* the table of far facts. They are beyond the window and after the first block, so only block
# selection can find them.

# %%
evaluation.show_needles()

# %% [markdown]
# ## Does the model predict text as well?
#
# The text `long` consists of documents of at least 128 KB, in windows of 65,536 bytes, and both models read each
# window. *What to notice:* not the mean, but whether the difference grows with the position. If it does, the selection
# loses distant information, as it does with one index key per 8 bytes. The dashed line is the target of the protocol.
#
# Two intervals are shown because two things vary: the texts (interval over windows) and the seeds. With three seeds,
# the second interval is wide: 4.3 standard errors.

# %%
evaluation.show_text("long", target)

# %% [markdown]
# Documents of packages that are also in the training data (`validation`), and of packages that are not (`heldout`),
# each from its first byte:

# %%
evaluation.show_text("validation")

# %%
evaluation.show_text("heldout")

# %% [markdown]
# ## Which part matters?
#
# The trained weights stay the same. In every layer the selected blocks are replaced, or a branch is disabled ([notebook
# 06][1] explains each ablation). *What to notice:*
#
# * Needles with random blocks: if the model still found them, the task would not measure selection.
# * Text with `oracle`: the improvement that a better selection of the same number of blocks could still bring.
#
# If no table follows, these runs were not evaluated in this way. The next section lists missing results.
#
# [1]: 07_does_selection_find.ipynb

# %%
evaluation.show_ablations()

# %% [markdown]
# ## Missing results
#
# Runs that did not finish or were not evaluated, and tasks that differ between the runs:

# %%
evaluation.show_excluded()

# %% [markdown]
# ## Try it
#
# `needle-8m` ships with the library. It was trained with the recipe of notebook 07, with one index key per 8 bytes, on
# texts of up to 16,384 bytes; its [model card](../nsa_lab/models/needle-8m/README.md) states its retrieval results. The
# next cell inserts facts into a module of Python's standard library, and replaces the model's block selection as above,
# now and on this machine.

# %%
shipped = load_model("needle-8m")
source = read_standard_library(90_000, "argparse.py")
texts = make_needles(text_bytes, n_texts, RecallConfig(), seed, np.frombuffer(source.encode(), np.uint8).astype(np.int64))
start = time.monotonic()
effects = run_ablations(
    shipped, *stack_samples(texts, torch.device("cpu")), names=("chosen", "random", "nearest", "no_sel"), seed=seed
)
seconds = (time.monotonic() - start) / (n_texts * len(effects))
print(f"{n_texts} texts of {text_bytes:,} bytes, {seconds:.1f} s each")
for effect in effects:
    ablation = ABLATIONS[effect.name]
    label = f"{ablation.selection} blocks" if ablation.disabled_branch is None else "no selected branch"
    bpb = effect.loss / np.log(2)
    print(f"{label:<18}│ {effect.accuracy:>4.0%} of the facts, {bpb:.3f} bits per byte on the text around them")

# %% [markdown]
# With your own documents: `nsa-lab run long_64k -p data.path=FOLDER` trains a model,
# `nsa-lab evaluate RUN --text mine=PATH` evaluates it, and the parameter `runs` of this notebook shows it.
