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
# # Decoding
#
# A model that writes reads its whole past once more for every token, if its attention is dense. A query of NSA reads
# the compressed past, a few blocks in full and a window. Decoding is where that shows first, since in long
# contexts a single query is limited mostly by the bytes that it reads.
#
# This notebook draws what one step reads, shows what a cache keeps for it, checks that decoding is the model, times it
# against context beside the dense twin, and marks in a text the blocks that were read for each answer.

# %% tags=["parameters"]
longest: int = 65536  # tokens of the longest context that is timed
layers: int = 2  # of the models that are timed
steps: int = 300  # optimiser steps of the small model that writes at the end
seed: int = 0  # of weights and sequences

# %%
import torch
from IPython.display import display

from nsa_lab import NSATransformer, figures
from nsa_lab.attention import geometry
from nsa_lab.config import BRANCHES, ModelConfig
from nsa_lab.evaluate.tiny_recall import TINY_NSA, TinyRecall, build_tiny_model, train_tiny_model
from nsa_lab.inference import Decoder, kv_cache_size
from nsa_lab.workbook.decoded_blocks import decode_answers, format_html, format_text
from nsa_lab.workbook.display import show_figure, show_folded
from nsa_lab.workbook.examples import make_text_example, read_standard_library
from nsa_lab.workbook.query_attention import compute_reads
from nsa_lab.workbook.speeds import show_decoding_speeds

config = ModelConfig()  # of the production run: 12 layers, 12 heads in 2 groups
nsa = config.nsa

# %% [markdown]
# ## What one step reads
#
# The last of 2,048 tokens, in one group of heads: the bars of each lane are the weights that the branch gives to what
# it reads. The text is real; the vectors are made up of it and of nothing that was learned.

# %%
example = make_text_example(read_standard_library(2048))
show_figure(figures.plot_query_attention(compute_reads(example, nsa, 2047), example.description))

# %% [markdown]
# At position $S$ that is $N(S)$ compressed keys, at most $\min(n_{sel}\, l_{sel},\ S)$ selected (exactly so where $S$ is a
# multiple of $l_{sel}$: notebook 01, section 9) and $\min(w, S)$ of the
# window, where a dense query reads $S$. The first grows with the text, at a sixteenth of its pace; the others do not.

# %%
contexts = [2**n for n in range(10, 18)]
for length in contexts[::3]:
    reads = geometry.decode_reads(length, nsa)
    told_reads = ", ".join(f"{BRANCHES[branch]} {keys:,}" for branch, keys in reads.items())
    print(f"{length:>7,} tokens: {told_reads}; {sum(reads.values()):,} keys, dense {length:,}")
kinds = {kind: config.model_copy(update={"attention": kind}) for kind in ("nsa", "dense")}
curves = {
    kind: [(n, kv_cache_size.compute_read_bytes(kind_config, n, 2) / 1e6) for n in contexts]
    for kind, kind_config in kinds.items()
}
show_figure(figures.plot_decode_speed(curves, "MB read per token", "12 layers, bf16, keys and values"))

# %% [markdown]
# ### Predict
#
# In a very long text, which share of what a dense step reads does a step of NSA read? And with an indexer that has a key,
# as wide as a head's, for every token?

# %%
far = 10**9
indexed = config.model_copy(update={"selection_loss": 0.05, "indexer_block": 1})
for about, kind_config in {"as it is": config, "with an indexer's key for every token": indexed}.items():
    share = kv_cache_size.compute_read_bytes(kind_config, far, 2) / kv_cache_size.compute_read_bytes(kinds["dense"], far, 2)
    show_folded(f"What comes out {about}", f"{share:.4f}")

# %% [markdown]
# <details><summary>Why</summary>
# <p>A dense step reads $S$ keys and $S$ values of each group; NSA reads $S/d$ of each, and what it selects and the window
# no longer count: $1/16 = .0625$. An indexer's keys are $S$ more, and have no values: half of what dense attention
# reads, and with the compressed ones $1/2 + 1/16 = .5625$.</p>
# </details>
#
# ## What is kept for it
#
# A layer keeps the selection keys and values of every token, compressed ones of every whole block, the window's in a
# ring of some more than $w$ slots and, in another ring, the tokens of the block that is not whole yet. So the compression
# operator runs once for every $d$ tokens, and nothing is ever moved. NSA keeps slightly more than dense attention, and
# reads much less. An indexer's keys come on top: with one for every byte a sequence keeps 1.6 times as much as with dense
# attention, and at 65,536 bytes a token reads .59 of what dense attention reads.

# %%
params = NSATransformer(config, seed=seed).parameter_count()
print(kv_cache_size.format_decoding_estimate(config, params, 80 * 10**9))

# %% [markdown]
# ## Is it the model?
#
# Two texts of different lengths in one batch, the first part of each read at once, the rest in chunks of 7 and then one
# by one, against a full forward pass over each, in float64.

# %%
small = ModelConfig(dim=96, n_layers=2, n_heads=6, n_kv_groups=2, d_k=16, d_v=16)
model = NSATransformer(small, dtype=torch.float64, seed=seed).double().eval()
draw = torch.Generator().manual_seed(seed)
texts = [torch.randint(0, 256, (length,), generator=draw) for length in (1500, 1211)]
decoder, found, at = Decoder(model, 1500, batch=2), [[], []], 0
for size in (1100, *[7] * 50, *[1] * 50):
    parts = [text[at : at + size] for text in texts]
    counts = [len(part) for part in parts]
    logits = decoder.append(torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), counts)
    for row, count in enumerate(counts):
        found[row].append(logits[row, :count])
    at += size
with torch.no_grad():
    for text, parts in zip(texts, found, strict=True):
        error = (torch.cat(parts) - model(text[None])[0]).abs().max()
        print(f"{len(text):,} tokens in {len(parts)} chunks: logits differ by {error:.1e} at most")

# %% [markdown]
# ## Tokens per second against context
#
# Two models of the production run's width, NSA and its dense twin, float32 on this machine's cores, weights, MLP and all.
# Their caches hold random numbers: what a step costs does not depend on them. On a GPU `nsa-lab bench decode` measures
# more.

# %%
lengths = [length for length in (1024, 4096, 16_384, 65_536, 131_072) if length <= longest]
show_decoding_speeds(config.model_copy(update={"n_layers": layers}), lengths)

# %% [markdown]
# Where the context is short, NSA has more to do than dense attention: three branches and a choice. What it costs beyond
# that grows with $N(S)$ alone.
#
# ## What was read for each answer
#
# The small model of [notebook 06][1], with its recipe, learns to recall: small letters are keys, capitals their values,
# and the last pairs are questions. Then it answers them with a cache, one after another. On a coloured ground stand the
# blocks that its query chose in the first layer, in the group that starts with matching heads: three that are forced,
# and one that is chosen. An answer is green where it is right.
#
# [1]: 06_does_selection_find.ipynb

# %%
task = TinyRecall()
recipe = {"rotary_share": 0.5, "matching_heads": 1, "indexer_block": 2, "selection_loss": 0.2}
model = build_tiny_model(task, seed=seed, **recipe)
torch.set_num_threads(1)  # tensors this small lose more to waiting threads than they win
for point in train_tiny_model(model, task, steps=steps, seed=seed, eval_every=max(steps // 3, 1), n_eval_sequences=64):
    print(f"step {point.step}: {point.accuracy:.0%} of the far questions right")
model.eval()
written = []
handle = display({"text/plain": ""}, raw=True, display_id=True)
for answer in decode_answers(model, task, layer=0, group=0, seed=seed):
    written.append(answer)
    handle.update(
        {"text/html": format_html(written, TINY_NSA.l_sel), "text/plain": format_text(written, TINY_NSA.l_sel)},
        raw=True,
    )
print(f"{sum(one.token == one.right for one in written)} of {len(written)} right")
print(f"{sum(one.found(TINY_NSA.l_sel) for one in written)} of {len(written)} were told in a block that was read")

# %% [markdown]
# A run of yours goes on from a prompt with `nsa-lab generate latest --prompt-file FILE`, which ends with the time to the
# first token and tokens per second, and with `nsa-lab export-hf latest FOLDER` it becomes a model of
# `transformers`: `AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)`.
#
# **Next:** `08_long_texts` asks trained models about texts of 2,048 to 65,536 bytes.
