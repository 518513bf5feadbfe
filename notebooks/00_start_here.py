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
# # Start here
#
# | to | open | on two CPU cores, measured | on one H200 |
# |---|---|---|---|
# | understand NSA: equation, code, picture; explore what a query reads | [01][1] | under a minute | as on a CPU |
# | see that fast paths compute what the definition says, and how fast | [02][2] | under a minute | 3 minutes, measured |
# | train a small model on real text and watch it | [03][3] | a few minutes | `name = "smoke_gpu"`: minutes, estimated |
# | do the 50,000-step run | [04][4] | `name = "ci"`: seconds | 18 minutes, measured |
# | judge a run, or compare several | [05][5] | seconds | half a minute, measured |
# | see whether selection finds, on models that train in front of you | [06][6] | a few minutes | as on a CPU |
# | see what a step of decoding reads, and time it against context | [07][7] | a few minutes | as on a CPU |
# | read what long texts showed, and ask the model that ships | [08][8] | a few minutes | as on a CPU |
#
# [1]: 01_branch_derivations.ipynb
# [2]: 02_kernel_parity.ipynb
# [3]: 03_smoke_training.ipynb
# [4]: 04_production_run.ipynb
# [5]: 05_health_analysis.ipynb
# [6]: 06_does_selection_find.ipynb
# [7]: 07_decoding.ipynb
# [8]: 08_long_texts.ipynb
#
# Each opens with a cell of **parameters**: change values there, then *Run → Run All Cells*. Training happens in a
# process of its own: the buttons Stop and Resume of 03 and 04 speak to it, and closing the page or restarting the
# kernel does not hurt it. Running the notebook again attaches, resumes, or shows the finished run.
#
# A notebook and the `.py` beside it are one pair: saving the notebook writes both, and the `.py` is what counts in git
# (`make notebooks` builds every `.ipynb` anew, without outputs). The `.py` opens as text; *Open With → Notebook* shows
# it as a notebook.
#
# Everything also works without a browser: `nsa-lab run smoke` executes notebook 03 and writes a report, `nsa-lab
# follow` watches, `nsa-lab stop` and `nsa-lab resume` do what the buttons do.

# %% tags=["parameters"]
outputs: str = ""  # folder that run directories are kept in; empty: outputs/ of the project

# %%
from IPython.display import Markdown

from nsa_lab.workbook import start_page

# %% [markdown]
# ## This machine

# %%
Markdown(start_page.describe_machine())

# %% [markdown]
# ## The runs there are

# %%
Markdown(start_page.list_runs(outputs))
