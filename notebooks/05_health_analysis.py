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
# One run, two runs, many runs. What a reader asks of each: did it learn, is it stable, what do the
# branches do, does selection find anything, how does it compare. It reads run directories, also those copied from
# another machine without their checkpoints. Every picture is a function of `nsa_lab.figures`, every verdict one of
# `nsa_lab.health`: `nsa-lab health RUN` prints the same lines. `?` means that the run does not say.
#
# A fresh checkout has the runs that are shared, and the latest of them is as good a start as any. To see NSA beside its
# dense twin, let `run_dir` be `production_50k-20261121` and `other_run` `production_50k_dense-20261121`.
#
# In the records, the branches are called `cmp` (compressed: a coarse view of everything), `sel` (selected: a few
# blocks that matter, read in full) and `win` (window: the latest tokens).

# %% tags=["parameters"]
run_dir: str = ""  # run directory, by path, id or the beginning of an id; empty: the latest finished run
other_run: str = ""  # a second run to lay over the first, for example its dense twin
layer: int = 0  # layer that the explorer begins with
group: int = 0  # head group that the explorer begins with
planned_tokens_per_s: float = 0.0  # speed that the plan reckoned with; 0: what preflight measured, or the gate
prompt: str = "def main("  # what the sample goes on from
sample_tokens: int = 400  # length of the sample, tokens
outputs: str = ""  # folder that run directories are kept in; empty: outputs/ of the project

# %%
from IPython.display import Markdown, display

from nsa_lab import figures
from nsa_lab.health.matched_pair import build_side_by_side, check_matched_pair, find_matched_pair
from nsa_lab.health.paired_difference import summarize_comparisons
from nsa_lab.workbook import earlier_reports, notebook, plan_vs_actual, run_explorer, samples
from nsa_lab.workbook.display import show_figure

runs = notebook.read_histories(run_dir, other_run, outputs)
history = runs[0]
pair = find_matched_pair(runs)
print(history.run)
notebook.print_answers(history)

# %%
Markdown(notebook.format_facts_table(history))

# %% [markdown]
# # One run
#
# ## Did it learn?
#
# Bits per byte: loss / ln 2 for bytes. 8 is a model that knows nothing, and programs that compress files, such as zip
# or xz, reach 2 to 3 on such text. *What to notice:* held-out text (dashed) beside training, and whether both still
# fall at the end.

# %%
show_figure(figures.plot_loss_curves(history))

# %% [markdown]
# What it writes: the newest checkpoint, by prefill and then token by token through the caches. The line below holds
# that against one pass over the whole text.

# %%
print(samples.sample_run(history.run_dir, prompt, sample_tokens))

# %%
print(samples.check_decoding(history.run_dir))

# %% [markdown]
# ## Is it stable?
#
# *What to notice:* a gradient norm (before clipping) that settles. Single spikes are batches unlike the others, and
# clipping bounds what they do; a norm that keeps growing is the way in which runs diverge.

# %%
show_figure(figures.plot_learning_rate(history))

# %% [markdown]
# Every verdict on the run that is not among the four answers at the top: a number, a limit, and what was found.

# %%
notebook.print_verdicts(history, without_answers=True)

# %% [markdown]
# The pace, and what each attempt did. *What to notice:* a speed that stays. Dips are evaluations, saves and other
# programs; dashed lines are where the run was stopped or killed and went on.

# %%
show_figure(figures.plot_throughput(history))
for each in runs:
    print(each.run)
    for attempt in each.attempts():
        print(
            f"  attempt {attempt.number}: steps {attempt.from_step:,} to {attempt.last_step:,}, "
            f"{attempt.ended_at - attempt.started_at:,.0f} s, {attempt.outcome}"
        )

# %% [markdown]
# Did it go as planned? The plan follows from the configuration and, for its time, from the speed that preflight
# measured on a GPU before the first step. Memory, a GPU's, is asked to come out within 15 %, the time on the clock
# within 25 %.

# %%
print(plan_vs_actual.compare_plan_with_run(history, planned_tokens_per_s or None))

# %% [markdown]
# ## What do the branches do?
#
# Gates weigh the three branches, for every query and head anew. *What to notice:* shares that leave a third (dotted).
# An entropy that stays at ln 3 = 1.0986 is a gate that never learned anything; one near 0 is a layer that lost two
# branches. The verdict "gates alive" fails on both.

# %%
has_branches = history.config.model.attention == "nsa"
if has_branches:
    show_figure(figures.plot_gate_shares(history))
    show_figure(figures.plot_gates_by_layer(history))
    show_figure(figures.plot_branch_norms(history))
else:
    print("a dense model: no gates")

# %% [markdown]
# ## Does selection find?
#
# First, what the choice is like. *Reuse*: the share of a query's blocks that the query before it chose too.
# *Distance*: how far back, in blocks. *First block's share*: of the selected attention; trained models park attention
# that they have no use for at the beginning of a text, which is called an *attention sink*. *Overlap*: the share of
# selected keys that the window reads as well. Dotted: what chance would give.

# %%
if has_branches:
    show_figure(figures.plot_selection_statistics(history))
else:
    print("a dense model: nothing is selected")

# %%
if has_branches:
    try:
        show_figure(samples.plot_run_selection(history.run_dir))
    except samples.NoCheckpoint as error:
        print(f"no map of the selection: {error}")

# %% [markdown]
# None of that says that the choice is worth anything. So every evaluation plants facts further back than the window
# reaches, asks for them, and replaces the blocks that were chosen. *What to notice:* if the answers cost as much with
# random blocks, with the nearest ones, or with no selected branch at all, selection finds nothing, however busy it
# looks above.

# %%
if has_branches:
    show_figure(figures.plot_selection_benefit(history))
else:
    print("a dense model: nothing is selected")

# %% [markdown]
# # Two runs
#
# ## As good as dense?
#
# The dense twin is the same training in everything but attention (and, for as many parameters, the width of its MLP:
# `nsa-lab plan NAME --twin`). NSA is asked to stay within 1 % of its bits per byte on held-out text. Beside the
# verdict stands what differs besides attention, and each difference with its 95 % interval: over windows of the
# held-out text, over training batches, over seeds. An interval that holds 0 is no difference. One over windows or
# batches says nothing of other seeds.

# %%
if len(runs) < 2:
    print("no second run was given: other_run names one")
elif not pair:
    print("not a run of NSA and its dense twin")
else:
    print(*check_matched_pair(*pair), sep="\n")
print(*summarize_comparisons(pair or runs), sep="\n")

# %% [markdown]
# *What to notice:* two loss curves over each other hide what is asked. Below is their difference, on the same
# batches, and on held-out text. A large one at the beginning is mostly a delay: a model that learns to copy from
# earlier in its text some hundred steps after the other is far behind for just so long (the production run was 16 %
# behind its twin at step 2,000, and level at 4,000).

# %%
if len(runs) == 2:
    show_figure(figures.plot_loss_difference(*(pair or runs), title="NSA less dense" if pair else "first less second"))
if pair:
    notebook.print_columns(("", "NSA", "dense", "NSA / dense"), build_side_by_side(*pair))
    show_figure(figures.plot_validation_gap(*pair))

# %% [markdown]
# The second run's own verdicts.

# %%
for each in runs[1:]:
    print(each.run)
    notebook.print_verdicts(each)

# %% [markdown]
# # Many runs
#
# ## Explorer
#
# Choose runs, a view, a layer, a head group and a step; layers and steps are those of the runs that are chosen.
# Without a front end, the gates and the selection of one layer. The same views are functions of
# `nsa_lab.workbook.run_comparison`; `nsa-lab report RUN RUN ...` writes a page that compares runs, with intervals over seeds
# where there are several.

# %%
run_explorer.explore_runs(runs, notebook.list_other_runs(runs, outputs), layer=layer, group=group)

# %% [markdown]
# ## Beside the reports of an earlier code base
#
# This project began from five reports on an earlier implementation of NSA, which trained on one A100: what they said,
# what a reading of that code found it to mean, and what this run recorded.

# %%
display(Markdown(earlier_reports.table(*(pair or runs[:1]))))

# %% [markdown]
# ## Three numbers that can be derived
#
# Three of the earlier reports' numbers need no measurement: they follow from the code, and each names a bug. They are
# why the health checks here compare with what *must* come out, and not with what came out last time.
#
# **Gate entropy 1.098.** Three gates of equal share have the entropy $\ln 3 = 1.0986$. Logged step after step, it says
# that the gate never moved: it was not learning at all.
#
# **721 selected keys per query.** At $T = 2{,}048$ the mean must be 752.5, whatever is chosen (notebook 01, section 9).
# 721.0 is exactly what comes out if a block counts as a candidate only once it is *whole*: the query's own block is
# forced, found invalid, and its place is wasted, so that a query reads 15 old blocks and never its own, except at the
# one position in 64 where it is just complete. (The same log has 0.83 % of the queries at 1,024 keys, 17 of 2,048: that
# is right either way.) `tests/attention/test_block_arithmetic.py` derives these numbers.
#
# **Learning rate 8.71e-05 at step 1,740.** A warm-up of 2,000 steps to 2e-4 gives 1.74e-4 there. Half of it says that
# the schedule went on by one for every two logged steps (two micro-batches make one optimiser step), while its length
# was counted in micro-batches. The rate was half of what the configuration said, and would have ended above half its
# peak.
#
# A statistic that can be derived to the last digit is no measurement of the model: it is a fingerprint of the code.
#
# **Next:** a run may pass every verdict and find nothing: `06_does_selection_find` asks a model for what it has read.
