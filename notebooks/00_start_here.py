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
# **What NSA is.** In a transformer with dense attention, every token attends to every token before it. The work grows with
# the square of the text, and generation reads the whole past again for every new token. Native Sparse Attention (NSA,
# [arXiv 2502.11089](https://arxiv.org/abs/2502.11089)) lets each token attend to three smaller sets and adds the results,
# weighted by learned gates:
#
# * a **compressed** summary of the whole past: one key per 16 tokens,
# * a few **selected** blocks of 64 tokens, the ones whose summary fits best, read in full,
# * a **window** of the latest 512 tokens.
#
# At 65,536 tokens a query then reads 5,631 keys instead of 65,536. These notebooks explain NSA, check the fast kernels,
# train models with it, and measure when it works. [The glossary](../docs/glossary.md) defines the terms.
#
# ![NSA for one query: compressed, selected and window branch, gated sum](../docs/pictures/nsa_architecture.png)
#
# **Where to start**
#
# * **Learner:** [01][1] and [02][2] build NSA from scratch. [07][7] shows tiny models that learn to find facts, and
#   [08][8] what NSA saves during generation.
# * **Engineer:** [03][3] shows what the kernels guarantee and how fast they are. [04][4] is a first training run, and
#   [08][8] is cached decoding. To use the layer, read [NSA in your own model](../docs/tutorials/nsa_in_your_model.md);
#   to convert a model that you have, read [10][10].
# * **Researcher:** [09][9] has the results on long texts, over three seeds. [07][7] has the ablations, and [06][6] the
#   checks of a training run, each of which can fail.
#
# **All notebooks**
#
# | notebook | contents | to read | to run, two CPU cores |
# |---|---|---|---|
# | [01_branches][1] | the three branches: equations, code, pictures; NSA in 40 lines | 1 hour | under a minute |
# | [02_in_practice][2] | documents, real text, teaching the selection | 30 minutes | a minute |
# | [03_kernel_parity][3] | every backend compared with the definition, and their speed | 15 minutes | a minute |
# | [04_smoke_training][4] | train a small model on real text and watch it | 15 minutes | a few minutes |
# | [05_production_run][5] | the production training, 50,000 steps | 10 minutes | needs a GPU: 18 minutes on an H200 |
# | [06_health_analysis][6] | the health of a run; two or many runs compared | 20 minutes | half a minute |
# | [07_does_selection_find][7] | does the selection find facts? tiny models | 25 minutes | a few minutes |
# | [08_decoding][8] | what a decoding step reads, and its speed | 15 minutes | a few minutes |
# | [09_long_texts][9] | results at 65,536 bytes, and a model to try | 20 minutes | ten minutes |
# | [10_convert][10] | a dense model becomes a sparse one | 15 minutes | two minutes |
#
# **Parameters.** Each notebook starts with a cell of parameters. Change the values there, then select *Run → Run All
# Cells*. The outputs in the repository were made with the values shown, on a CPU; those of 05 show the record of a run on
# an H200.
#
# **Training.** The trainer is a separate process. You can close the page or restart the kernel without stopping it. The
# Stop and Resume buttons of notebooks 04 and 05 control it. If you run the notebook again, it attaches to the run,
# resumes it, or shows the finished run.
#
# **Command line.** Everything works without a browser too. `nsa-lab run smoke` executes notebook 04 and writes a
# report. `nsa-lab follow` shows a run while it trains. `nsa-lab stop` and `nsa-lab resume` do the same as the buttons.
#
# **Changing a notebook.** Each notebook is paired with a `.py` file of the same name, which is its source in git. Saving
# the notebook in JupyterLab writes both. `make notebooks` executes them again.
#
# [1]: 01_branches.ipynb
# [2]: 02_in_practice.ipynb
# [3]: 03_kernel_parity.ipynb
# [4]: 04_smoke_training.ipynb
# [5]: 05_production_run.ipynb
# [6]: 06_health_analysis.ipynb
# [7]: 07_does_selection_find.ipynb
# [8]: 08_decoding.ipynb
# [9]: 09_long_texts.ipynb
# [10]: 10_convert.ipynb

# %%
# %load_ext nsa_lab.workbook

# %% tags=["parameters"]
outputs: str = ""  # folder of the run directories; empty: outputs/ of the project

# %%
from IPython.display import Markdown

from nsa_lab.workbook import start_page

# %% [markdown]
# ## This machine
#
# The backend that computes each part of attention here, and the reason:

# %%
Markdown(start_page.describe_machine())

# %% [markdown]
# ## Your runs
#
# The runs that you trained, newest first. The recorded runs of this repository are in
# [outputs/README.md](../outputs/README.md).

# %%
Markdown(start_page.list_runs(outputs))

# %% [markdown]
# **What to take away.** NSA reads few keys and keeps all of them: it saves reading, not storage. It pays off in long texts,
# from about 8,192 tokens in training. **Next:** [01_branches][1].
