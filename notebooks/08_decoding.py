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
# *Decoding* is generation token by token. With dense attention, the model reads its whole past for every new token. A
# query of NSA reads the compressed past, a few blocks in full, and a window. In long contexts the speed of a single
# query is limited mainly by the bytes it reads, so the benefit of NSA shows first in decoding.
#
# **What you will learn**
#
# * how many keys and bytes one decoding step reads, and what the cache stores,
# * that cached decoding equals a forward pass,
# * from which context length on NSA decodes faster than dense attention on this machine,
# * which blocks a model reads for each answer.
#
# **Prerequisites.** Notebook 01. Notebook 07 for the task of the last section.
#
# **Time.** 15 minutes to read. The notebook runs in a few minutes on two CPU cores.

# %%
# %load_ext nsa_lab.workbook

# %% tags=["parameters"]
max_context: int = 65536  # longest context to time, in tokens
n_layers: int = 2  # layers of the timed models
steps: int = 300  # optimizer steps of the small model at the end
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

config = ModelConfig()  # as in the production run: 12 layers, 12 heads in 2 groups
nsa = config.nsa

# %% [markdown]
# ## Reads of one step
#
# The figure shows the last of 2,048 tokens in one head group. The bars of each lane are the attention weights of a
# branch. The text is real. The queries and keys are computed from it by hand-made heads, not by a trained model.

# %%
example = make_text_example(read_standard_library(2048))
show_figure(figures.plot_query_attention(compute_reads(example, nsa, 2047), example.description))

# %% [markdown]
# At position $S$, a query reads $N(S)$ compressed keys, at most $\min(n_{sel}\, l_{sel},\ S)$ selected keys, and
# $\min(w, S)$ keys of the window. (The selected number is exact if $S$ is a multiple of $l_{sel}$; see notebook 01,
# section 10.) A dense query reads $S$ keys. Only the first term grows with the text, by one key per 16 tokens.

# %%
contexts = [2**n for n in range(10, 18)]
for length in contexts[::3]:
    reads = geometry.decode_reads(length, nsa)
    keys_by_branch = ", ".join(f"{BRANCHES[branch]} {n_keys:,}" for branch, n_keys in reads.items())
    print(f"{length:>7,} tokens: {keys_by_branch}; {sum(reads.values()):,} keys, dense {length:,}")
kinds = {kind: config.model_copy(update={"attention": kind}) for kind in ("nsa", "dense")}
curves = {
    kind: [(n, kv_cache_size.compute_read_bytes(kind_config, n, 2) / 1e6) for n in contexts]
    for kind, kind_config in kinds.items()
}
show_figure(figures.plot_decode_speed(curves, "MB read per token", "12 layers, bf16, keys and values"))

# %% [markdown]
# ### Predict
#
# Consider a very long text. Which fraction of the bytes of a dense step does an NSA step read? And with an indexer that
# has one key per token, as wide as the key of a head?

# %%
length = 10**9
indexed = config.model_copy(update={"selection_loss": 0.05, "indexer_block": 1})
for title, kind_config in {"Answer": config, "Answer with one index key per token": indexed}.items():
    read_bytes, dense_bytes = (kv_cache_size.compute_read_bytes(c, length, 2) for c in (kind_config, kinds["dense"]))
    show_folded(title, f"{read_bytes / dense_bytes:.4f}")

# %% [markdown]
# <details><summary>Why</summary>
#
# A dense step reads $S$ keys and $S$ values per group. NSA reads $S/d$ of each, and in a very long text the selected
# keys and the window are negligible: $1/16 = 0.0625$. An indexer adds $S$ keys without values, which is half of what
# dense attention reads. Together with the compressed keys this is $1/2 + 1/16 = 0.5625$.
#
# </details>
#
# ## Contents of the cache
#
# For each layer, the cache stores:
#
# * the keys and values of the selected branch for every token,
# * the compressed keys and values of every complete block,
# * the keys and values of the window, in a ring buffer of slightly more than $w$ slots,
# * the tokens of the incomplete compression block, in another ring buffer.
#
# The compression operator therefore runs once per $d$ tokens, and no cached value is ever moved. NSA stores slightly
# more than dense attention and reads much less. An indexer adds its keys. With all three branches and one index key
# per byte, a sequence needs 1.6 times the cache of dense attention, and a token at 65,536 bytes reads 0.59 of what dense
# attention reads. The preset `long_64k` has no compressed branch, and one index key in fp8 for all groups: 1.14
# and 0.15.

# %%
params = NSATransformer(config, seed=seed).parameter_count()
print(kv_cache_size.format_decoding_estimate(config, params, 80 * 10**9))

# %% [markdown]
# ## Is cached decoding exact?
#
# Two texts of different lengths form one batch. The first part of each is prefilled at once; the rest is decoded in
# chunks of 7 tokens and then one by one. The logits are compared with a full forward pass over each text, in float64.

# %%
small = ModelConfig(dim=96, n_layers=2, n_heads=6, n_kv_groups=2, d_k=16, d_v=16)
model = NSATransformer(small, dtype=torch.float64, seed=seed).double().eval()
generator = torch.Generator().manual_seed(seed)
texts = [torch.randint(0, 256, (length,), generator=generator) for length in (1500, 1211)]
decoder, chunks, start = Decoder(model, 1500, batch=2), [[], []], 0
for size in (1100, *[7] * 50, *[1] * 50):
    parts = [text[start : start + size] for text in texts]
    counts = [len(part) for part in parts]
    logits = decoder.append(torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), counts)
    for row, count in enumerate(counts):
        chunks[row].append(logits[row, :count])
    start += size
with torch.no_grad():
    for text, parts in zip(texts, chunks, strict=True):
        error = (torch.cat(parts) - model(text[None])[0]).abs().max()
        print(f"{len(text):,} tokens in {len(parts)} chunks: largest difference of the logits {error:.1e}")

# %% [markdown]
# ## Tokens per second against context length
#
# Two models with the width of the production run, NSA and its dense baseline, in float32 on this machine's cores, with
# all weights and the MLP. Their caches contain random numbers, because the time of a step does not depend on them. On a
# GPU, `nsa-lab bench decode` measures more.

# %%
lengths = [length for length in (1024, 4096, 16_384, 65_536, 131_072) if length <= max_context]
show_decoding_speeds(config.model_copy(update={"n_layers": n_layers}), lengths)

# %% [markdown]
# In short contexts NSA does more work than dense attention: three branches and a selection. Beyond that, its cost grows
# only with $N(S)$.
#
# ## Blocks read for each answer
#
# The small model of [notebook 07][1], with the training recipe, learns the recall task: lowercase letters are keys,
# capital letters are their values, and the last pairs are questions. It then answers the questions one after another
# with a cache. Colored text marks the blocks that the query selected in the first layer, in the group with
# induction-initialized heads: three forced blocks and one selected by score. A correct answer is green.
#
# [1]: 07_does_selection_find.ipynb

# %%
task = TinyRecall()
recipe = {"rotary_share": 0.5, "matching_heads": 1, "indexer_block": 2, "selection_loss": 0.2}
model = build_tiny_model(task, seed=seed, **recipe)
torch.set_num_threads(1)  # for tensors this small, more threads are slower
for point in train_tiny_model(model, task, steps=steps, seed=seed, eval_every=max(steps // 3, 1), n_eval_sequences=64):
    print(f"step {point.step}: {point.accuracy:.0%} of the far questions correct")
model.eval()
decoded = []
handle = display({"text/plain": ""}, raw=True, display_id=True)
for answer in decode_answers(model, task, layer=0, group=0, seed=seed):
    decoded.append(answer)
    handle.update(
        {"text/html": format_html(decoded, TINY_NSA.l_sel), "text/plain": format_text(decoded, TINY_NSA.l_sel)},
        raw=True,
    )
print(f"{sum(answer.token == answer.expected for answer in decoded)} of {len(decoded)} correct")
n_read = sum(answer.has_selected_answer(TINY_NSA.l_sel) for answer in decoded)
print(f"for {n_read} of {len(decoded)}, the query read the block of the answer")

# %% [markdown]
# To continue a prompt with your own run, use `nsa-lab generate latest --prompt-file FILE`. It prints the time to the
# first token and the tokens per second. `nsa-lab export-hf latest FOLDER` converts a run to a `transformers` model,
# which `AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)` loads.
#
# **What to take away**
#
# * A step reads $S/d + n_{sel}\,l_{sel} + w$ keys instead of $S$. In a very long text that is a sixteenth of the bytes,
#   and more with an indexer.
# * The cache is not smaller: NSA saves reading, not storage.
# * Cached decoding gives the logits of a forward pass, up to rounding.
# * In short contexts dense attention is faster.
#
# **Next.** [09_long_texts](09_long_texts.ipynb) evaluates trained models on texts of 2,048 to 65,536 bytes.
