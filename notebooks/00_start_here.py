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
# | goal | notebook | two CPU cores (measured) | one H200 |
# |---|---|---|---|
# | understand NSA through equations, code and pictures | [01][1] | under a minute | same as on a CPU |
# | check that the fast backends match the definition, and time them | [02][2] | under a minute | 3 minutes (measured) |
# | train a small model on real text and watch it | [03][3] | a few minutes | `name = "smoke_gpu"`: minutes (estimated) |
# | run the production training, 50,000 steps | [04][4] | `name = "ci"`: seconds | 18 minutes (measured) |
# | examine the health of a run, or compare runs | [05][5] | seconds | half a minute (measured) |
# | test whether selection finds facts, with tiny models | [06][6] | a few minutes | same as on a CPU |
# | see what a decoding step reads, and time it against context length | [07][7] | a few minutes | same as on a CPU |
# | see the results on long texts, and test the model that ships | [08][8] | a few minutes | same as on a CPU |
#
# [1]: 01_branches.ipynb
# [2]: 03_kernel_parity.ipynb
# [3]: 04_smoke_training.ipynb
# [4]: 05_production_run.ipynb
# [5]: 06_health_analysis.ipynb
# [6]: 07_does_selection_find.ipynb
# [7]: 08_decoding.ipynb
# [8]: 09_long_texts.ipynb
#
# **Parameters.** Each notebook starts with a cell of parameters. Change the values there, then select *Run → Run All
# Cells*.
#
# **Training.** The trainer is a separate process. You can close the page or restart the kernel without stopping it. The
# Stop and Resume buttons of notebooks 04 and 05 control it. If you run the notebook again, it attaches to the run,
# resumes it, or shows the finished run.
#
# **Source files.** Each notebook is paired with a `.py` file of the same name. Saving the notebook writes both, and the
# `.py` file is the source of truth in git. `make notebooks` rebuilds every `.ipynb` from its `.py` file, without
# outputs. In JupyterLab, the `.py` file opens as text; *Open With → Notebook* shows it as a notebook.
#
# **Command line.** Everything works without a browser too. `nsa-lab run smoke` executes notebook 04 and writes a
# report. `nsa-lab follow` shows a run while it trains. `nsa-lab stop` and `nsa-lab resume` do the same as the buttons.

# %% tags=["parameters"]
outputs: str = ""  # folder of the run directories; empty: outputs/ of the project

# %%
from IPython.display import Markdown

from nsa_lab.workbook import start_page

# %% [markdown]
# ## This machine

# %%
Markdown(start_page.describe_machine())

# %% [markdown]
# ## Runs

# %%
Markdown(start_page.list_runs(outputs))
