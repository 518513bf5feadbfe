# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
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
# Reads a run directory, any run directory, also one copied from another machine without its checkpoints. Every
# picture is a function of `nsa_lab.figures`, every verdict one of `nsa_lab.health`: `nsa-lab health RUN` prints
# the same lines. `?` means that the run does not say.

# %% tags=["parameters"]
run_dir: str = ""  # run directory, by path, id or the beginning of an id; empty: the latest finished run
other_run: str = ""  # a second run to lay over the first, for example its dense twin
layer: int = 0  # layer that the explorer begins with
group: int = 0  # head group that the explorer begins with
planned_tokens_per_s: float = 0.0  # speed that the plan reckoned with; 0: what preflight measured, or the gate
prompt: str = "def main("  # what the sample goes on from
sample_tokens: int = 160  # length of the sample, tokens
outputs: str = ""  # folder that run directories are kept in; empty: outputs/ of the project

# %%
from IPython.display import Markdown, display

from nsa_lab import figures
from nsa_lab.health.twins import beside_twin, side_by_side, twins
from nsa_lab.inference import NoCheckpoint
from nsa_lab.runs.history import History
from nsa_lab.runs.summary import shown_facts
from nsa_lab.workbook import earlier_reports, notebook, planned, run_explorer, samples
from nsa_lab.workbook.show import show

run = notebook.run_directory(run_dir) if run_dir else notebook.latest_finished(outputs)
runs = [History.read(run)] + ([History.read(notebook.run_directory(other_run))] if other_run else [])
history = runs[0]
pair = twins(runs)
print(history.run)
notebook.print_answers(history)

for key, value in shown_facts(history):
    print(f"     {key:<26} {value}")

# %% [markdown]
# ## Verdicts

# %%
for each in runs:
    print(each.run)
    notebook.print_verdicts(each)

# %% [markdown]
# ## As good as dense?
#
# The dense twin is the same training in everything but attention. NSA is asked to stay within 1 % of its bits per byte on
# held-out text.

# %%
if pair:
    notebook.print_columns(("", "NSA", "dense", "NSA / dense"), side_by_side(*pair))
    print(*beside_twin(*pair), sep="\n")
    show(figures.validation_gap(*pair))
else:
    print("no dense twin was given: other_run names one")

# %% [markdown]
# ## As planned?
#
# The plan follows from the configuration and, for its time, from the speed that preflight measured on a GPU before the
# first step. Memory, a GPU's, is asked to come out within 15 %, the time on the clock within 25 %.

# %%
print(planned.outcome(history, planned_tokens_per_s or None))

# %% [markdown]
# ## Loss
#
# Bits per byte: loss / ln 2 for bytes. 8 is an untrained model, and text compressors of the zip family reach 2 to 3 on
# such text.

# %%
show(figures.loss_curves(runs))
show(figures.learning_rate(runs))

# %% [markdown]
# ## Gates
#
# A gate that stays at ln 3 = 1.0986 of entropy never learnt anything; one that collapses has lost a branch. Both are
# looked for.

# %%
has_branches = history.config.model.attention == "nsa"
if has_branches:
    show(figures.gate_shares(history))
    show(figures.gate_layers(history))
    show(figures.branch_norms(history))
else:
    print("a dense model: no gates")

# %% [markdown]
# ## Selection
#
# Reuse: share of a query's blocks that the query before it chose too. Distance: how far back, in blocks. Sink: the
# share of selected attention that the first block holds. Overlap: the share of selected keys that the window reads as
# well.

# %%
if has_branches:
    show(figures.selection_statistics(history))
else:
    print("a dense model: nothing is selected")

# %%
if has_branches:
    try:
        show(samples.selection_maps(history.run_dir))
    except NoCheckpoint as error:
        print(f"no map of the selection: {error}")

# %% [markdown]
# ## What it writes
#
# The newest checkpoint, by prefill and then token by token through the caches; the last line holds that against one pass
# over the whole text.

# %%
print(samples.sample_after(history.run_dir, prompt, sample_tokens))

# %%
print(samples.decode_check(history.run_dir))

# %% [markdown]
# ## Speed, memory, attempts

# %%
show(figures.throughput(runs))
for each in runs:
    print(each.run)
    for attempt in each.attempts():
        print(
            f"  attempt {attempt.number}: steps {attempt.from_step:,} to {attempt.last_step:,}, "
            f"{attempt.ended - attempt.began:,.0f} s, {attempt.ending}"
        )

# %% [markdown]
# ## Beside the reports that this project began from
#
# Five reports on an earlier code base: what they said, what a reading of that code found it to mean, and what this run
# recorded.

# %%
display(Markdown(earlier_reports.table(*(pair or runs[:1]))))

# %% [markdown]
# ## Explorer
#
# Choose runs, a view, a layer, a head group and a step. Without a front end, the gates and the selection of one layer.
# The same views are functions of `nsa_lab.workbook.compare`.

# %%
run_explorer.explore_runs(runs, notebook.other_runs(runs, outputs), layer=layer, group=group)

# %% [markdown]
# ## Three numbers that can be derived
#
# Three of the earlier reports' numbers need no measurement: they follow from the code, and each names a bug. They are
# why the health checks here compare with what *must* come out, and not with what came out last time.
#
# **Gate entropy 1.098.** Three gates of equal share have the entropy $\ln 3 = 1.0986$. Logged step after step, it says
# that the gate never moved: it was not learning at all.
#
# **721 selected keys per query.** At $T = 2048$ the mean must be 752.5, whatever is chosen (notebook 01, section 9).
# 721.0 is exactly what comes out if a block counts as a candidate only once it is *whole*: the query's own block is
# forced, found invalid, and its place is wasted, so that a query reads 15 old blocks and never its own, except at the
# one position in 64 where it is just complete. (The same log has 0.83 % of the queries at 1 024 keys, 17 of 2 048: that
# is right either way.) `tests/attention/test_block_arithmetic.py` derives these numbers.
#
# **Learning rate 8.71e-05 at step 1740.** A warm-up of 2 000 steps to 2e-4 gives 1.74e-4 there. Half of it says that
# the schedule went on by one for every two logged steps (two micro-batches make one optimiser step), while its length
# was counted in micro-batches. The rate was half of what the configuration said, and would have ended above half its
# peak.
#
# A statistic that can be derived to the last digit is no measurement of the model: it is a fingerprint of the code.
