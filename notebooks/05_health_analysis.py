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
# picture is a function of `nsa_lab.explore.plots`, every verdict one of `nsa_lab.health`: `nsa-lab health RUN` prints
# the same lines.

# %% tags=["parameters"]
run_dir: str = ""  # run directory, by path, id or the beginning of an id; empty: the latest finished run
other_run: str = ""  # a second run to lay over the first, for example its dense twin
layer: int = 0  # layer that the explorer begins with
group: int = 0  # head group that the explorer begins with
outputs: str = ""  # folder that run directories are kept in; empty: outputs/ of the project

# %%
from nsa_lab.explore import notebook, plots, run_explorer, samples
from nsa_lab.explore.show import show
from nsa_lab.generate import NoCheckpoint
from nsa_lab.history import History, facts

run = notebook.directory(run_dir) if run_dir else notebook.latest_finished(outputs)
runs = [History.read(run)] + ([History.read(notebook.directory(other_run))] if other_run else [])
history = runs[0]
for key, value in facts(history).items():
    print(f"{key:<24} {value}")

# %% [markdown]
# ## Verdicts

# %%
for each in runs:
    print(each.run)
    notebook.print_verdicts(each)

# %% [markdown]
# ## Loss
#
# Bits a byte: loss / ln 2 for bytes. 8 is an untrained model, and text compressors of the zip family reach 2 to 3 on
# such text.

# %%
show(plots.loss_curves(runs))
show(plots.learning_rate(runs))

# %% [markdown]
# ## Gates
#
# A gate that stays at ln 3 = 1.0986 of entropy never learnt anything; one that collapses has lost a branch. Both are
# looked for.

# %%
has_branches = history.config.model.attention == "nsa"
if has_branches:
    show(plots.gate_shares(history))
    show(plots.gate_layers(history))
    show(plots.branch_norms(history))
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
    show(plots.selection_statistics(history))
else:
    print("a dense model: nothing is selected")

# %%
if has_branches:
    try:
        show(samples.selection_maps(history.run_dir))
    except NoCheckpoint as error:
        print(f"no map of the selection: {error}")

# %% [markdown]
# ## Explorer
#
# Choose runs, a view, a layer, a head group and a step. Without a front end, the gates and the selection of one layer.
# The same views are functions of `nsa_lab.explore.compare`.

# %%
run_explorer.explore_runs(runs, notebook.other_runs(runs, outputs), layer=layer, group=group)

# %% [markdown]
# ## Speed

# %%
show(plots.throughput(runs))
for attempt in history.attempts():
    print(f"attempt {attempt.number}: steps {attempt.from_step:,} to {attempt.last_step:,}, "
          f"{attempt.ended - attempt.began:,.0f} s, {attempt.ending}")
