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
# # Does selection find?
#
# A query of NSA reads a few blocks in full, and in the paper the compressed branch decides which. Training never tells it
# whether it decided well: the choice itself has no gradient. So a model can train without a fault, lower its loss,
# and still not find a fact that stands in its own text. At 78.6 M parameters that is what happened
# ([docs/science/retrieval.md][1]).
#
# This notebook asks the question where it can be answered on a CPU in a few minutes: four tiny models learn to
# recall, live, and then their choice is replaced by others, to see what it was worth. What is written here says how
# to read the numbers; the numbers are those of this run. Those of longer ones are in
# [docs/science/tiny_recall.md][2].
#
# [1]: ../docs/science/retrieval.md
# [2]: ../docs/science/tiny_recall.md

# %% tags=["parameters"]
steps: int = 300  # optimiser steps for each model, over which the rate falls to 0
seed: int = 0  # of weights and sequences
asked: int = 256  # fresh sequences that a trained model is asked with, six questions each
read: int = 4096  # bytes of real text that a fact is asked for in
widgets: bool | None = None  # True or False; None: controls only where a Jupyter front end has this notebook open

# %%
import time

import torch

from nsa_lab import figures, generate, load_model
from nsa_lab.evaluate import measure_selection_quality, run_ablations
from nsa_lab.evaluate.tiny_recall import EVAL_STREAM, TINY_NSA, TinyRecall, build_tiny_model, train_tiny_model
from nsa_lab.workbook.display import show_figure
from nsa_lab.workbook.examples import insert_fact_in_library, make_byte_examples
from nsa_lab.workbook.query_explorer import explore_query
from nsa_lab.workbook.recall_explorer import explore_recall, find_readers, format_letters

torch.set_num_threads(1)  # tensors this small lose more to waiting threads than they win

# %% [markdown]
# ## The task
#
# Keys (small letters) and values (capitals), alternating. Every key comes twice with the same value, so the second time
# the value can be known. Six of the questions stand at the end, and what they ask for was told anywhere before:
# these *far* ones are counted. The others come back sooner, mostly within the window, and are practice. Training is
# on the answers alone.

# %%
task = TinyRecall()
tokens, places = task.make_batch(0, 1, seed, EVAL_STREAM)
row = format_letters(task, tokens[0])
print(" ".join(row[i : i + 2] for i in range(0, task.length, 2)))
print(f"the last {task.n_far} are questions; each asks for what stands once before")
print(
    f"{task.length} tokens are {task.length // TINY_NSA.l_sel} blocks of {TINY_NSA.l_sel}; a query reads {TINY_NSA.n_sel}, "
    f"three of which are forced (the first, its own, the one before), and a window of {TINY_NSA.w}"
)

# %% [markdown]
# Each group of heads in each layer has one block to choose. That is the whole of the question: is it the one where
# the answer stands?
#
# ## Four models
#
# * **dense**: every query reads everything; nothing to choose.
# * **dense, same start**: the same with (1) and (2) of the recipe below.
# * **NSA avg**: NSA as in notebook 01: the paper's choice, but means for φ (the paper has an MLP) and gates of one
#   linear layer.
# * **NSA, recipe**: the same, and (1) rotary embedding on half of a head's width, (2) matching heads: in the first
#   group of heads the key of a token starts as that of the token before, and half of the group's heads start by
#   asking with the keys' own weights, so that they copy from step 0, (3) an indexer: one query per group and
#   one key per two tokens that do nothing but choose the blocks, and a loss that teaches them alone where the selected
#   branch would look if it read everything (`ModelConfig.rotary_share`, `matching_heads`, `indexer_block`,
#   `selection_loss`).

# %%
kinds = {
    "dense": {"attention": "dense"},
    "dense, same start": {"attention": "dense", "rotary_share": 0.5, "matching_heads": 1},
    "NSA avg": {},
    "NSA, recipe": {"rotary_share": 0.5, "matching_heads": 1, "indexer_block": 2, "selection_loss": 0.2},
}
models, curves = {}, {}
for name, changes in kinds.items():
    began = time.monotonic()
    models[name], curves[name] = build_tiny_model(task, seed=seed, **changes), []
    for point in train_tiny_model(
        models[name], task, steps=steps, seed=seed, eval_every=max(steps // 10, 1), n_eval_sequences=asked
    ):
        curves[name].append((point.step, point.accuracy))
    models[name].eval()
    print(
        f"{name:<17} {models[name].parameter_count():,} parameters, {time.monotonic() - began:.0f} s: "
        f"{curves[name][-1][1]:.1%} of the far questions right after {steps} steps"
    )
show_figure(figures.plot_recall_accuracy(curves, chance=1 / task.n_symbols))

# %% [markdown]
# A model can be slow here in two ways. A curve that stays at the bottom has not learned to
# *copy*: to look for the earlier place and take what came next. A curve that rises and then lies flat copies what
# it reads, and does not *read* the right block. The next section tells one from the other.
#
# ## What is the choice worth?
#
# The trained weights stay, and the choice of blocks is replaced in every layer. The sequences are other ones than those
# of the curves above, so `chosen` need not repeat their last points exactly.
#
# | | the selected branch reads | what its answers say, beside those of `chosen` |
# |---|---|---|
# | `random` | blocks by the throw of a die | no worse: the choice does nothing |
# | `nearest` | the latest blocks | no worse: what it finds is near |
# | `oracle` | the blocks its own attention would weigh most | much better: the choice is blind |
# | `twice` | twice as many blocks, the best by the model's own scores | much better: too few are read |
# | `all` | everything | much better: the heads know what to look for, and are not shown it; no better: they do not look |
# | `no_cmp`, `no_sel`, `no_win` | one branch says nothing | worse: the answer came through it |

# %%
sparse = {name: model for name, model in models.items() if model.config.attention == "nsa"}
tokens, places = task.make_batch(1, asked, seed, EVAL_STREAM)
effects = {name: run_ablations(model, tokens, places[:, -task.n_far :], batch_size=64) for name, model in sparse.items()}
accuracies = {name: {effect.name: effect.accuracy for effect in found} for name, found in effects.items()}
print(f"{'answers right':<14}│" + "".join(f"{name:>9}" for name in next(iter(accuracies.values()))))
for name, shares in accuracies.items():
    print(f"{name:<14}│" + "".join(f"{share:>9.1%}" for share in shares.values()))
show_figure(figures.plot_ablation_accuracy(accuracies, list(kinds)))

# %% [markdown]
# The same without answers: of the attention mass that the oracle's blocks hold beyond the forced ones, how much
# does the choice catch, by layer? (Below 0 is impossible, 1 is the oracle.)

# %%
for name, model in sparse.items():
    quality = measure_selection_quality(model, tokens, seed)
    for way in ("chosen", "nearest", "random"):
        shares = "  ".join(f"layer {layer}: {share:.2f}" for layer, share in enumerate(quality[f"{way}_free"]))
        print(f"{name:<14}│ {way:<8} {shares}")

# %% [markdown]
# ## What one query chose
#
# The lanes are those of notebook 01; the dashed line is the token where the answer stood. An answer needs one layer
# and group that read its block, not all: below the picture stands who did. Matching heads are in group 0 of every
# layer. (In a headless run one question of each model is drawn, for the first layer and group that read it, if any.)

# %%
explore_recall(sparse, task, seed=seed, use_widgets=widgets)

# %% [markdown]
# ## What a model of real text chose
#
# The four above live in 64 letters. `needle-8m`, which ships with the library, was trained with the same recipe on
# manuals with facts in them, up to 16,384 bytes; its [card](../nsa_lab/models/needle-8m/README.md) says what it
# finds, and what it is not for. Here a fact stands in the source of Python's `argparse`, which it was not trained on,
# and is asked for at the end, far behind the window. The dashed line is the first digit of the fact; the query is the
# last character of the question.

# %%
shipped = load_model("needle-8m")
prompt, answer = insert_fact_in_library(read, 0.3, "argparse.py", seed=seed)
end = len(prompt)  # of the question; the answer follows
(wrote,) = generate(shipped, [torch.tensor(list(prompt))], max_new_tokens=len(answer))
told = prompt.index(answer)
found_by = find_readers(shipped, torch.tensor([list(prompt)]), end - 1, told)
print(prompt[prompt.rindex(b"Q: ") :].decode() + bytes(wrote.tolist()).decode(errors="replace"))
print(f"told at byte {told:,} of {read:,}: {answer.decode()}")
print("its block is read by", ", ".join(f"layer {layer} group {group}" for layer, group in found_by) or "nobody")

# %%
layer, group = next(iter(found_by), (0, 0))
layers = make_byte_examples(shipped, prompt, "needle-8m on argparse.py")
explore_query(layers, shipped.config.nsa, end - 1, group, layer=layer, answer=told, use_widgets=widgets)

# %% [markdown]
# ## The same at 78.6 M parameters
#
# Real text with facts planted into it, 90 M bytes, lengths 2,048, then 8,192, then 32,768, one H200. Share
# of facts found among 32,768 bytes, held-out text in bits per byte; one run for each row, taken from
# [docs/science/retrieval.md][1] and its [log][2], which has all rows and what they were trained with. Nothing of it is
# computed here. The last four rows were trained on another text (all four files of the corpus in place of two; as many
# bytes), so that their text is not to be compared with that of the rows above.
#
# | | facts found at 32,768 | text |
# |---|---|---|
# | NSA avg | none; stopped after 8,192, where it found none either | |
# | NSA, matching heads with a convolution of width 2, half rotary | 60 % (all blocks: 100 %; random: 10 %) | 1.500 |
# | NSA, matching heads, half rotary, the loss on the compressed keys themselves | 100 % (random: 10 %) | 1.564 |
# | NSA, matching heads, half rotary, an indexer with a key per 32 tokens | 99.5 % | 1.468 |
# | **an indexer twice as wide, with a key per 8 tokens** | **100 %** | **1.418** |
# | the last from two other seeds | 99.5 %, 100 % | 1.447, 1.450 |
# | its dense control, with the same start | 100 % | 1.413 |
# | **a key per 2 tokens, and embeddings that later layers can see** | **100 %** | **1.361** |
# | the last from three other seeds | 100 % each | 1.365, 1.352, and one not read as one stream |
# | its dense control, with the same start and embeddings | 100 % | 1.389 |
# | the same, with as many parameters as NSA | 100 % | 1.406 |
#
# At 65,536, twice the length of the training, the last four NSA find 39, 40, 40 and 40 of 40 facts, their controls 39
# and 35. (The first control has 72.4 million parameters, NSA 79.8; both are of one seed.) Before embeddings were normed,
# two runs of one command ended .020 bits per byte apart in training loss, and seeds .03 apart in text: a layer that
# cannot see which token it stands on copies late, and how late is luck. A key of the choice has to stand for few tokens
# for the reason that is seen here, too: the one token that a query looks for drowns in the mean of many.
#
# ## Your turn
#
# Take one thing away from **NSA, recipe** in the cell of `kinds`, say before you run it which curve and which row of the
# interventions will change, and run the notebook again from there:
#
# * `matching_heads`: will it still copy, and by when?
# * `indexer_block` and `selection_loss`: who chooses then, and what will `oracle` say beside `chosen`?
# * `indexer_block: 8` in place of 2: eight tokens, four pairs, share a key of the choice. Will it still tell their block
#   from others?
#
# [tiny_recall][3] has what came out of such changes, each over two seeds or three.
#
# **Next:** `07_decoding` shows what a choice saves when a model writes; `08_long_texts` asks large trained models.
#
# [1]: ../docs/science/retrieval.md
# [2]: ../docs/science/retrieval_log.md
# [3]: ../docs/science/tiny_recall.md
