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
# **What you will learn**
#
# * whether NSA finds facts and predicts text as well as dense attention at 65,536 bytes, and at which cost,
# * how such a comparison is made so that it can fail: a protocol, three seeds, intervals,
# * which part of NSA the result depends on.
#
# **Prerequisites.** Notebooks 01, 02 and 07.
#
# **Time.** 20 minutes to read. The notebook runs in about ten minutes on two CPU cores. Only its last section computes with
# a model; the rest reads records. (With `n_texts = 2` it takes a fifth of the time.)
#
# **The models.** `long_64k` is NSA with all three branches (today the preset `long_64k_three_branches`; [a form without a
# compressed branch][4] has replaced it) and `long_64k_dense` the dense baseline. Both were trained on the same text in the
# same order, in three stages: lengths of 2,048, 8,192 and 65,536 bytes. The last stage reads each long text once. NSA uses
# the training recipe of [notebook 02][1] with one index key per byte. (With one key per 8 bytes, such a model lost distant
# facts; one seed, see [the log][3].) Both models have normalized embeddings and *n-gram tables*: embeddings of the last few
# bytes together.
#
# **The records.** The [protocol][2] was written before the runs: the tasks, the criteria, and the results that would refute
# the claim. All sentences, tables and figures below are generated from the records of the runs, `events.jsonl` and
# `evaluation.json`. A clone has the record of seed 0 in `outputs/` and the others in an archive, from which this notebook
# unpacks the ones that it needs. `python tools/records.py unpack` unpacks all; then `nsa-lab compare` prints the same
# tables, with `--against` for the baseline.
#
# **Other runs** can be compared with the parameters `runs` and `baseline`:
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
# [1]: 02_in_practice.ipynb
# [2]: ../docs/science/long_texts.md
# [3]: ../docs/log/long_texts.md
# [4]: ../docs/science/lean.md

# %%
# %load_ext nsa_lab.workbook

# %% tags=["parameters"]
runs: list = ["long_64k-20261126*", "long_64k_dense-20261126*"]  # evaluated runs; seeds of one name are one model
baseline: str = "long_64k_dense"  # model to compare the others with
outputs: str = ""  # folder of the run directories; empty: outputs/ of the project, and the archive of records
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
# ## Results
#
# These sentences are generated from the records. An interval *over windows* shows how far other texts could change the
# difference, an interval *over seeds* how far another training run could.

# %%
evaluation.show_results("long", target)

# %% [markdown]
# **What this does not show.** The facts are inserted into the training text too, always in the same wording. 65,536 bytes
# are about 16,000 tokens of a usual tokenizer. The models have one size, and the texts are manuals and dictionaries. The
# interval over three seeds is wide: a difference in loss is not established. Three details are in the last section: the
# seeds ran on two kinds of GPU, with and without CUDA graphs, and seed 0 of the baseline was evaluated at two lengths only.
#
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
# A *needle* is a fact inserted somewhere in held-out text and asked for at its end. In *multi_key*, the text contains
# many other facts of the same kind. In *multi_query*, there are four questions in a row. Some runs were also evaluated
# on other forms of facts: values of other lengths, letters or hexadecimal digits, codes as names, and other wording. No
# model was trained on these.
#
# *What to notice:* NSA loses nothing as the text grows, and the intervals of both models overlap at every length. The
# folded table has the *far* facts separately: they are beyond the window and after the first block, so only block selection
# can find them.

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
# the second interval is wide: 4.3 standard errors on each side.

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
# 07](07_does_selection_find.ipynb) explains each ablation). *What to notice:*
#
# * Needles with random blocks: if the model still found them, the task would not measure selection.
# * Text with `oracle`: the improvement that a better selection of the same number of blocks could still bring.
#
# If no sentence follows, these runs were not evaluated in this way. The next section lists missing results.

# %%
evaluation.show_ablations()

# %% [markdown]
# ## Conditions and missing results
#
# Conditions in which the runs differ, runs that did not finish or were not evaluated, and tasks that some runs lack:

# %%
evaluation.show_excluded()

# %% [markdown]
# ## Try it
#
# `needle-8m` ships with the library. It was trained with the recipe of notebook 02, with one index key per 8 bytes, on
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
#
# **What to take away**
#
# * With the training recipe, NSA finds facts in 65,536 bytes as dense attention does, in less than two thirds of its step
#   time. Without the recipe it finds none there.
# * Both models predict long text equally well, as far as three seeds can tell.
# * The selection does it: with random blocks the facts are lost.
#
# **Next.** [The science pages](../docs/science/long_texts.md) have the protocol, all experiments and the negative
# results. [NSA in your own model](../docs/tutorials/nsa_in_your_model.md) shows how to use the layer.
