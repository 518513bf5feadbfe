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
# # Health of a run
#
# This notebook examines one run, compares two runs, or explores many. It answers these questions: did the model learn,
# was training stable, what do the branches do, does selection find facts, and how does the run compare with another?
#
# It reads run directories, including directories copied from another machine without their checkpoints. Every figure is
# a function of `nsa_lab.figures`, and every check a function of `nsa_lab.health`. `nsa-lab health RUN` prints the same
# checks. `?` means that the run has not recorded the number.
#
# The outputs in the repository compare the recorded production run of notebook 05 with its dense baseline: the same model,
# data and steps, with dense attention. For your own run, set `run_dir` to its id or to `""` (the latest finished run), and
# `other_run` to `""`.
#
# **What you will learn**
#
# * how to see whether a run learned, was stable, and uses its branches,
# * how to compare two runs without mistaking noise for a difference,
# * three numbers that can be derived, and the bugs behind logs that show others.
#
# **Prerequisites.** Notebooks 01 and 04.
#
# **Time.** 20 minutes to read. The notebook runs in half a minute on two CPU cores.
#
# The records name the branches `cmp` (compressed: an overview of the whole past), `sel` (selected: a few blocks in full
# detail) and `win` (window: the latest tokens).

# %%
# %load_ext nsa_lab.workbook

# %% tags=["parameters"]
run_dir: str = "production_50k-20261121"  # run directory, by path, id or start of the id; empty: the latest finished run
other_run: str = "production_50k_dense-20261121"  # a second run to compare with the first; empty: none
layer: int = 0  # initial layer of the explorer
group: int = 0  # initial head group of the explorer
planned_tokens_per_s: float = 0.0  # planned throughput; 0: what preflight measured, or the configured minimum
prompt: str = "def main("  # prompt of the sample
sample_tokens: int = 400  # length of the sample in tokens
outputs: str = ""  # folder of the run directories; empty: outputs/ of the project

# %%
from IPython.display import Markdown

from nsa_lab import figures
from nsa_lab.health.matched_pair import build_side_by_side, check_matched_pair, find_matched_pair
from nsa_lab.health.paired_difference import summarize_comparisons
from nsa_lab.workbook import notebook, plan_vs_actual, run_explorer, samples
from nsa_lab.workbook.display import show_figure

runs = notebook.read_histories(run_dir, other_run, outputs)
history = runs[0]
pair = find_matched_pair(runs)
print(history.run)
notebook.print_answers(history)

# %%
Markdown(notebook.format_facts_table(history))

# %% [markdown]
# ## One run
#
# ### Learning
#
# The loss is in bits per byte, which is loss / ln 2 for bytes. A model that predicts all bytes equally has 8.
# Compression programs such as zip or xz reach 2 to 3 on such text. *What to notice:* compare held-out text (dashed)
# with training, and see whether both still decrease at the end.

# %%
show_figure(figures.plot_loss_curves(history))

# %% [markdown]
# A sample of the newest checkpoint: the prompt is prefilled, then the model decodes one token at a time with its cache.
# The line after the sample compares cached decoding with a single forward pass over a whole text.

# %%
print(samples.sample_run(history.run_dir, prompt, sample_tokens))

# %%
print(samples.check_decoding(history.run_dir))

# %% [markdown]
# ### Stability
#
# *What to notice:* the gradient norm (before clipping) becomes stable. Single spikes are unusual batches, and clipping
# limits their effect. A norm that keeps growing is a sign of divergence.

# %%
show_figure(figures.plot_learning_rate(history))

# %% [markdown]
# All checks except those in the four answers at the top. Each has a number, a limit and a result.

# %%
notebook.print_verdicts(history, without_answers=True)

# %% [markdown]
# Throughput, and the steps of each attempt. (An attempt is one process: a run that was stopped or killed and then
# resumed has several.) *What to notice:* the throughput is constant. Dips are evaluations, checkpoints and other
# programs. Dashed lines mark where a new attempt started.

# %%
show_figure(figures.plot_throughput(history))
for run in runs:
    print(run.run)
    for attempt in run.attempts():
        print(
            f"  attempt {attempt.number}: steps {attempt.from_step:,} to {attempt.last_step:,}, "
            f"{attempt.ended_at - attempt.started_at:,.0f} s, {attempt.outcome}"
        )

# %% [markdown]
# Did the run go as planned? The plan follows from the configuration and from the throughput that preflight measured on
# a GPU before the first step. The check passes if GPU memory is within 15% of the plan and the total time within 25%.

# %%
print(plan_vs_actual.compare_plan_with_run(history, planned_tokens_per_s or None))

# %% [markdown]
# ### Branches
#
# Gates weight the three branches, separately for every query and head. *What to notice:* the shares leave one third
# (dotted). If the entropy stays at ln 3 = 1.0986, the gate has not learned. If it is near 0, the layer has lost two
# branches. The check "gates alive" fails in both cases.

# %%
has_branches = history.config.model.attention == "nsa"
if has_branches:
    show_figure(figures.plot_gate_shares(history))
    show_figure(figures.plot_gates_by_layer(history))
    show_figure(figures.plot_branch_norms(history))
else:
    print("a dense model has no gates")

# %% [markdown]
# ### Selection
#
# First, four statistics of the selection; dotted lines are the values for random selection:
#
# * *Shared blocks*: the fraction of a query's blocks that the previous query selected too.
# * *Distance*: how far back the selected blocks are, in blocks.
# * *First block*: its share of the selected attention. Trained models put attention that they need nowhere else on the
#   start of a text, which is called an *attention sink*.
# * *Overlap*: the fraction of selected keys that the window reads too.

# %%
if has_branches:
    show_figure(figures.plot_selection_statistics(history))
else:
    print("a dense model selects no blocks")

# %%
if has_branches:
    try:
        show_figure(samples.plot_run_selection(history.run_dir))
    except samples.NoCheckpoint as error:
        print(f"no map of the selection: {error}")

# %% [markdown]
# These statistics do not show whether the selection is useful. Every evaluation therefore inserts facts further back
# than the window, asks for them, and replaces the selected blocks. *What to notice:* if the answers have the same loss
# with random blocks, with the nearest blocks, or without the selected branch, then the selection finds nothing.

# %%
if has_branches:
    show_figure(figures.plot_selection_benefit(history))
else:
    print("a dense model selects no blocks")

# %% [markdown]
# ## Two runs
#
# ### Comparison with the dense baseline
#
# The dense baseline has the same training as NSA in everything but attention. Its MLP is wider, so that both models
# have the same number of parameters (`nsa-lab plan NAME --twin`). The check passes if NSA is within 1% of the
# baseline's bits per byte on held-out text.
#
# The cell also prints what else differs between the runs, and each difference with its 95% interval: over windows of
# the held-out text, over training batches, and over seeds. An interval that contains 0 is no significant difference. An
# interval over windows or batches does not include the variation between seeds.

# %%
if len(runs) < 2:
    print("no second run; set other_run")
elif not pair:
    print("not an NSA run and its dense baseline")
else:
    print(*check_matched_pair(*pair), sep="\n")
print(*summarize_comparisons(pair or runs), sep="\n")

# %% [markdown]
# *What to notice:* two loss curves in one figure hide small differences. The figure below shows the difference itself,
# on the same batches and on held-out text. A large difference at the start is mostly a delay: a model that learns to
# copy a few hundred steps later is far behind only during these steps. The production run, for example, was 16% behind
# its baseline at step 2,000 and equal at step 4,000.

# %%
if len(runs) == 2:
    show_figure(figures.plot_loss_difference(*(pair or runs), title="NSA minus dense" if pair else "first minus second"))
if pair:
    notebook.print_columns(("", "NSA", "dense", "NSA / dense"), build_side_by_side(*pair))
    show_figure(figures.plot_validation_gap(*pair))

# %% [markdown]
# The checks of the second run.

# %%
for run in runs[1:]:
    print(run.run)
    notebook.print_verdicts(run)

# %% [markdown]
# ## Many runs
#
# ### Explorer
#
# Select runs, a figure, a layer, a head group and a step. The selected runs determine the layers and steps. In a
# headless run, the notebook shows the gates and the selection of one layer. The same figures are functions of
# `nsa_lab.workbook.run_comparison`. `nsa-lab report RUN RUN ...` writes a page that compares runs, with intervals over
# seeds if there are several.

# %%
run_explorer.explore_runs(runs, notebook.list_other_runs(runs, outputs), layer=layer, group=group)

# %% [markdown]
# ## Three numbers that can be derived
#
# Some statistics follow from the code and need no measurement. The following three were in the logs of an earlier NSA
# implementation, and each reveals a bug. For this reason, the health checks compare a value with the *correct* one, not
# with the previous one.
#
# **Gate entropy 1.098.** Three equal gates have the entropy $\ln 3 = 1.0986$. The same value at every logged step means
# that the gate never changed: it did not learn.
#
# **721 selected keys per query.** At $T = 2{,}048$ the mean must be 752.5 for any selection (notebook 01, section 10).
# The value 721.0 results if a block is a candidate only once it is *complete*. The query's own block is forced, then
# found invalid, and its place stays empty. A query then reads 15 earlier blocks and never its own, except at one
# position in 64, where its block is complete. `tests/attention/test_block_arithmetic.py` derives these numbers.
#
# **Learning rate 8.71e-05 at step 1,740.** A warm-up over 2,000 steps to 2e-4 reaches 1.74e-4 at this step, twice the
# logged value. The schedule advanced once per two logged steps, because two micro-batches form one optimizer step,
# while its length was given in micro-batches. The learning rate was half of the configured one, and it would have ended
# at more than half its peak.
#
# A statistic that can be derived exactly does not measure the model. It identifies the code.
#
# **What to take away**
#
# * A check has a number, a limit and a reason. It can fail, and it is marked `?` if the record has no answer.
# * Two runs are compared on the same batches and the same held-out text. One seed of each is weak evidence.
# * A run may pass every check and still find no facts in its input.
#
# **Next.** [07_does_selection_find](07_does_selection_find.ipynb) asks a model for facts in its input.
