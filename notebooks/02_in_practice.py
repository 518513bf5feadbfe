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
# # NSA in practice: documents, real text, and teaching the selection
#
# Notebook [01](01_branches.ipynb) built NSA from equations and tested it on random numbers. This notebook applies it to
# text. It goes beyond the paper in one point: it trains the block selection with its own loss.
#
# **What you will learn**
#
# * how several documents share one training sequence without attending to each other,
# * what NSA reads in a real text, with hand-made heads and in a trained model,
# * why the mean of many keys hides a single relevant token, and why training does not correct this,
# * the three changes that make the selection find facts: an indexer with its own loss, induction-initialized heads,
#   normalized embeddings,
# * how several GPUs share one text.
#
# **Prerequisites.** Notebook 01.
#
# **Time.** 30 minutes to read. The notebook runs in about a minute on two CPU cores.

# %%
# %load_ext nsa_lab.workbook

# %% tags=["parameters"]
length: int = 2048  # tokens (characters) of the real text, at most 2,048
query: int = 1900  # position of the query that the explorer shows, below length
use_widgets: bool = None  # True or False; None: controls only if a Jupyter front end is open

# %%
import math

import torch
from torch import Tensor

from nsa_lab import NSAttention, figures, load_model
from nsa_lab.attention import Span, nsa_attention, reference, select_blocks, selection_loss
from nsa_lab.attention.context_parallel import ContextShard
from nsa_lab.config import NSAConfig
from nsa_lab.workbook import examples
from nsa_lab.workbook.display import show_figure, show_folded
from nsa_lab.workbook.query_attention import compute_reads
from nsa_lab.workbook.query_explorer import explore_query

default_nsa, toy = NSAConfig(), NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=12)
example = examples.make_random_example(64, heads=4, groups=2, head_dim=8)
T = 64

# %% [markdown]
# Four functions of notebook 01 are needed again:


# %%
def check_equal(name: str, result: Tensor, library: Tensor, atol: float = 1e-12) -> None:
    """Stop the notebook unless the two tensors agree to `atol`."""
    torch.testing.assert_close(result, library, rtol=0, atol=atol)
    print(f"{name} {list(result.shape)}: equal to the library to {atol:g}")


def expand_groups(x: Tensor, heads: int) -> Tensor:
    """Repeat each group for its heads: [., 1 or G, .] -> [., heads, .]."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def get_block_mask(starts: Tensor, size: int, T: int) -> Tensor:
    """Return which of T tokens are in the blocks of `size` that start at `starts`: bool [blocks, T]."""
    s = torch.arange(T)
    return (s >= starts[:, None]) & (s < starts[:, None] + size)


def select_by_importance(importance: Tensor, nsa: NSAConfig) -> Tensor:
    """Return the mask of the blocks selected by importance [T, G, blocks], of the same shape (eq. 11)."""
    T, _, blocks = importance.shape
    j, own_block = torch.arange(blocks), torch.arange(T)[:, None, None] // nsa.l_sel
    forced, is_candidate = (j == 0) | (j == own_block) | (j == own_block - 1), j <= own_block
    rank = importance.float().masked_fill(forced, math.inf).masked_fill(~is_candidate, -math.inf)
    # A stable sort keeps ties in order.
    best = rank.argsort(dim=-1, descending=True, stable=True)[..., : nsa.n_sel]
    return torch.zeros_like(rank).scatter(-1, best, 1.0).bool() & is_candidate  # early queries select fewer than n_sel


# %% [markdown]
# ## 1 · Packed documents
#
# A training sequence contains several documents, one after another. Without a document mask, a query near the start of
# a document attends to the previous document in all three branches. With the mask (`data.documents: mask`, in the
# library `Span.packed`), positions, blocks and window start at 0 in each document. A query then reads the same keys as
# if its document were the whole sequence.

# %%
boundary, t = 26, 36
document = example.slice_document(boundary, 64)
reads, masked_reads = compute_reads(example, toy, t), compute_reads(document, toy, t - boundary)
show_figure(figures.plot_document_boundaries(reads, masked_reads, [0, boundary, 64]))

# %% [markdown]
# **What to notice.** Without the mask (top), every branch crosses the document boundary, and compressed keys at the
# boundary mix both documents. With the mask (bottom), blocks are numbered from the boundary, and no block crosses it.
#
# ## 2 · Real text, hand-made heads
#
# The text is the first 2,048 characters of Python's `textwrap` module, with the default block sizes. The heads are
# **hand-made, not trained**. They are induction heads, as in the six tokens of notebook 01: the query at $t$ encodes the
# last few characters, and the key at $s$ encodes the characters before $s$. A query therefore matches the token that
# followed an earlier passage like the current one. Group 0 encodes 4 characters, group 1 encodes 12. All branches share
# keys and values in this example, so that their attention can be compared.

# %%
text = examples.make_text_example(examples.read_standard_library(length))
text_k, text_v = reference.compress(text.k_cmp, default_nsa), reference.compress(text.v_cmp, default_nsa)
_, text_lse = reference.compressed_attention(text.q, text_k, text_v, default_nsa)
text_importance = reference.block_importance(text.q, text_k, text_lse, default_nsa)
text_blocks = select_blocks(text.q, text_k, text_lse, default_nsa)
show_figure(figures.plot_importance(text_importance[0, :, 1], text_blocks[0, :, 1], default_nsa, "real text, group 1"))

# %% [markdown]
# **What to notice.** Up to $t = 1{,}023$ all blocks are selected, because there are at most 16. After that, more and more
# blocks remain unselected (grey): 13 free places for a growing number of candidates. The diagonal and the bottom row are
# forced blocks. Among the blocks selected by score, neighboring queries differ, because these hand-made heads match
# another passage at almost every character.
#
# ## 3 · Why a mean hides a token
#
# The selection of notebook 01 scores compressed keys, and each compressed key is the mean of 32 keys. Suppose that the
# query matches one token (the *needle*) in a block. In the mean, the needle's contribution to the score is divided by
# 32, and the other 31 keys add noise. For keys with $D$ independent channels and blocks of $n$ tokens, the needle's block
# scores
#
# $$\frac{D / n}{\sqrt{D} / \sqrt{n}} = \sqrt{D/n}$$
#
# standard deviations above the other blocks. For $n = 32$ and $D = 64$ this is 1.4, and one noise block in thirteen
# scores as high.
#
# Training does not correct this. Block selection is not differentiable, so the compressed keys get a gradient only from
# the output of the compressed branch. The effect is measurable. We trained two models on text with inserted facts and
# later questions for them. The *dense baseline* has the same architecture, data and number of training steps, with dense
# attention:
#
# | model | facts retrieved |
# |---|---|
# | NSA, 78.6 M parameters | none, at any length |
# | dense baseline | all, in 32,768 bytes |
#
# Three changes fix it. Together they are called the *training recipe*. When each was removed alone, retrieval needed the
# first and the third, and without the second the loss was 0.06 bits per byte higher
# ([three seeds](../docs/science/learning_rates_and_parts.md#b-with-three-seeds)):
#
# 1. **Indexer with its own loss.** One extra query and key per group, used only for selection. Here each index key covers
#    2 tokens (`indexer_block`). The *selection loss* trains the indexer to predict where the selected branch would attend
#    if it could attend to all past tokens.
# 2. **Induction-initialized heads** (`matching_heads`). Some heads start as induction heads, which copy. The selection
#    therefore has a target from the first step.
# 3. **Normalized embeddings** (`embedding_norm`). Token embeddings start with a standard deviation of 0.02, and the output
#    of the first layer, which is added to them, is several times larger. Scaled to a root mean square of 1, the current
#    token stays visible to every later layer.
#
# ## 4 · One index key per few tokens
#
# Block importance is defined as in notebook 01, with the indexer's attention $p$ in place of the compressed branch's. The
# indexer's blocks do not overlap, so each lies in one selection block, and the overlap weights of equation 9 are 0 or
# 1.
#
# Each index key is a weighted mean of the keys in its block. The weights are a softmax over the block, separately for
# every channel. They are equal at initialization and can learn to emphasize one token (`score` and `place`; without
# these two parameters the index key is the plain mean).


# %% tags=["lesson"]
def compute_index_importance(
    q: Tensor, k: Tensor, block: int, nsa: NSAConfig, score: Tensor | None = None, place: Tensor | None = None
) -> Tensor:
    """Return the importance [T, G, blocks] by the indexer's q and k, [T, G, D] each."""
    n_blocks = len(k) // block  # complete blocks; the remaining tokens have no index key yet
    tokens = k[: n_blocks * block].unflatten(0, (n_blocks, block))  # [N, block, G, D]
    logits = torch.zeros_like(tokens) if score is None else tokens @ score.T + place.T[:, None]
    keys = (logits.softmax(1) * tokens).sum(1)  # [N, G, D]: one index key per block
    ends = block * torch.arange(1, n_blocks + 1) - 1
    is_visible = (ends <= torch.arange(len(q))[:, None])[:, None]  # complete at t
    scores = torch.einsum("tgd,igd->tgi", q, keys) / math.sqrt(q.shape[-1])
    p = scores.masked_fill(~is_visible, -1e9).softmax(-1) * is_visible
    members = get_block_mask(torch.arange(0, len(q), nsa.l_sel), nsa.l_sel, len(q))[:, ends]  # [blocks, N]
    return p @ members.to(p.dtype).T


# %% [markdown]
# Compare with the library's indexer: random weights, toy sizes, one index key per 2 tokens.

# %%
# NBVAL_CHECK_OUTPUT
torch.manual_seed(4)
indexed = NSAttention(32, 4, 2, nsa=toy, rotary_share=0.5, matching_heads=1, indexer_block=2, selection_loss=0.05).double()
layer, indexer = indexed.attention, indexed.attention.indexer
for weight in indexer.parameters():
    torch.nn.init.normal_(weight)
x = torch.randn(T, 32, dtype=torch.float64)
rotary = indexed.compute_rotary(x[None])
index = indexer(x[None], rotary)
importance = compute_index_importance(index.q[0], index.k[0], 2, toy, indexer.phi.score, indexer.phi.place)
inputs = layer.project(x[None], rotary)
index_q, index_keys, index_nsa = layer.project_selection_inputs(x[None], inputs, rotary)
_, index_lse = reference.compressed_attention(index_q, index_keys, index_keys, index_nsa)
library = reference.block_importance(index_q, index_keys, index_lse, index_nsa)[0]
# The library computes importance in float32.
check_equal("importance by the indexer", importance.detach(), library.double().detach(), atol=1e-6)
selected_indices = layer.observe(x[None], rotary)["blocks"][0]
library_mask = torch.nn.functional.one_hot(selected_indices.long() + 1, importance.shape[-1] + 1)[..., 1:].any(-2)
print("same blocks as the layer:", torch.equal(select_by_importance(importance, toy), library_mask))

# %% [markdown]
# ### Predict
#
# * The input has 2,048 tokens with random keys of width 64.
# * Each of the last 1,024 queries has one target token far in the past. The query is that token's key times four.
# * One selected block is free (not forced). Between 14 and 29 blocks of 64 tokens compete for it.
#
# In which share of the queries is the correct block selected if an index key covers 32 tokens, 8 tokens, or 1 token?

# %%
torch.manual_seed(5)
keys = torch.randn(2048, 1, 64, dtype=torch.float64)
query_positions = torch.arange(1024, 2048)
target_positions = 64 + (torch.rand(1024) * (query_positions - 256)).long()  # not in the first block, not near the query
queries = torch.zeros_like(keys).index_put((query_positions,), 4 * keys[target_positions])
one_free_block, lines = NSAConfig(n_sel=4), []
for block in (32, 8, 1):
    selected = select_by_importance(compute_index_importance(queries, keys, block, one_free_block), one_free_block)
    rate = selected[query_positions, 0, target_positions // 64].double().mean()
    lines.append(f"a key per {block:>2} tokens: {rate:.0%} found, {math.sqrt(64 / block):.1f} standard deviations")
show_folded("Answer", "\n".join(lines))

# %% [markdown]
# <details><summary>Why</summary>
#
# At 1.4 standard deviations, the correct block is seldom the best of about twenty, but more often than the 5% of random
# selection. At 2.8 it often is. An index key per token always finds it.
#
# An index key per token costs as many scores per query as dense attention. One key per 8 tokens costs an eighth of that,
# and one per 2 tokens costs half. The indexer also has one query per group instead of six.
#
# Random keys are the worst case, because neighboring tokens in text have similar keys. A number in the middle of a page,
# however, is such a case.
#
# </details>
#
# ## 5 · The selection loss
#
# $$\mathcal L = -\frac{1}{T\,G} \sum_{t,\,g} \sum_{j \text{ free}} m_{t,j}\, \log c_{t,j}$$
#
# $$c_{t,j} = \frac{I_{t,j}}{\sum_{i \text{ free}} I_{t,i}}$$
#
# * $m_{t,j}$ is the attention mass on the tokens of block $j$, averaged over the heads of group $g$. It is computed by
#   full attention over *all past tokens* with the keys of the selected branch.
# * $I_{t,j}$ is the importance of block $j$. The index $g$ of $m$, $I$ and $c$ is omitted.
# * Free blocks are the candidates that are not forced. Forced blocks are excluded because they are always selected.
#
# The loss is a cross-entropy. It is smallest when the importance is distributed over the free blocks as the attention
# mass is. (For a fixed target, cross-entropy and KL divergence have the same gradient.) Over the free blocks, $m$ sums
# to less than 1, so a query that attends elsewhere has a smaller weight.
#
# The target $m$ is detached, and so is the indexer's input. The loss therefore trains the indexer and no other
# parameter. In training it is evaluated on 64 queries per sequence, not on all.


# %% tags=["lesson"]
def compute_selection_loss(importance: Tensor, q: Tensor, k_sel: Tensor, nsa: NSAConfig) -> Tensor:
    """Return the loss of importance [T, G, blocks] for attention of q [T, H, D] over k_sel [T, G, D], in nats per query."""
    T, G, blocks = importance.shape
    t, j = torch.arange(T)[:, None], torch.arange(blocks)
    is_free = ((j > 0) & (j < t // nsa.l_sel - 1))[:, None]  # a candidate, and not forced
    scores = torch.einsum("thd,shd->ths", q, expand_groups(k_sel, q.shape[1])) / math.sqrt(q.shape[-1])
    p = scores.masked_fill((torch.arange(T) > t)[:, None], -1e9).softmax(-1)
    tokens = get_block_mask(torch.arange(0, T, nsa.l_sel), nsa.l_sel, T).to(p.dtype)
    mass = (p.unflatten(1, (G, -1)).mean(2) @ tokens.T).detach()  # m, mean over the heads
    importance = importance + 1e-9  # a block may have no index key yet; avoid log 0
    share = importance / (importance * is_free).sum(-1, keepdim=True).clamp_min(1e-9)
    return -(mass * is_free * share.log()).sum() / (T * G)


# %%
# NBVAL_CHECK_OUTPUT
loss = compute_selection_loss(importance, inputs[0][0], inputs[3][0], toy)
library = selection_loss(index_q, index_keys, inputs[3], index_nsa, attention_q=inputs[0], n_queries=None)
check_equal("selection loss", loss, library)
names, weights = zip(*layer.named_parameters(), strict=True)
grads = [torch.autograd.grad(y, weights, retain_graph=True, allow_unused=True) for y in (loss, library)]
for name, ours, theirs in zip(names, *grads, strict=True):
    if theirs is not None:
        check_equal(f"gradient of {name}", ours, theirs)
modules = {name.split(".")[0] for name, grad in zip(names, grads[1], strict=True) if grad is not None}
print("other modules with a gradient:", modules - {"indexer"} or "none")

# %% [markdown]
# ## 6 · Induction-initialized heads
#
# The selection can learn to find only tokens that some head attends to. If selection is random, a query sees a fraction
# of the text, and copying heads form late or never.
#
# Half of the first group's heads therefore start as induction heads, in two steps:
#
# 1. **Equal weights.** Their query weights start as a copy of the key weights. A query then matches the key of an equal
#    token.
# 2. **Shifted keys.** The keys of this group start as the keys of the *previous* token. The shift is a *convolution of
#    width 2*: each key is a weighted sum of the keys of this token and of the previous one, with initial weights 0 and 1.
#    Training can change them. A query now matches the position *after* an equal token, and reads the token that followed.
#
# RoPE rotates only half of each head's channels (`rotary_share`). The other half matches equal tokens at any distance.
#
# The picture shows such a head of an **untrained** layer. The text repeats its first six characters at the end.

# %%
torch.manual_seed(6)
sentence = "the quick brown fox; the qu"
letters = sorted(set(sentence))
embedded = torch.randn(len(letters), 64, dtype=torch.float64)[[letters.index(letter) for letter in sentence]]
untrained = NSAttention(64, 2, 1, head_dim=64, nsa=toy, rotary_share=0.5, matching_heads=1).double()
heads = untrained.attention.project_heads(embedded[None], untrained.compute_rotary(embedded[None]))
scores = (heads.q[0, :, 0] @ heads.keys[1][0, :, 0].T).detach() / math.sqrt(64)
is_past = torch.ones_like(scores).tril().bool()
p = scores.masked_fill(~is_past, -math.inf).softmax(-1)
show_figure(figures.plot_attention_matrix(p, list(sentence), "An induction-initialized head before training"))
for position in range(21, 26):
    attended = p[position].argmax().item()
    print(f"{sentence[position]!r} attends most to {sentence[attended]!r}, which follows {sentence[attended - 1]!r}")

# %% [markdown]
# **What to notice.** In the last rows, the dark squares form a diagonal, one place to the right of the equal characters:
# "t" attends to "h", "h" to "e", "q" to "u". The last space has four earlier occurrences, and its attention is divided
# among the tokens that followed them. The selection loss has a clear target from the first step.
#
# ## 7 · The explorer
#
# The explorer shows the text of section 2 in a **trained** model, `needle-8m`, which ships with the library (data and
# limits are on its [model card](../nsa_lab/models/needle-8m/README.md)). Its branches have separate keys and values, and
# an indexer with one key per 8 bytes selects the blocks. Move the query and change the layer, the group and the block
# sizes. The picture shows which tokens each branch reads and with what weight. The text below lists the selected blocks.
#
# The model was trained with the sizes shown first. Without a Jupyter front end, the notebook draws the picture once,
# without controls.

# %%
shipped = load_model("needle-8m")
layer_examples = examples.make_byte_examples(
    shipped, examples.read_standard_library(length).encode(), "needle-8m on textwrap.py"
)
explore_query(
    layer_examples, shipped.config.nsa, min(query, length - 1), layer=shipped.config.n_layers // 2, use_widgets=use_widgets
)

# %% [markdown]
# **What to notice.** The second row (importance) does not follow the first (compressed attention), because the indexer
# scores the blocks. A narrow spike in the third row is a token that the selected branch found in full detail, while the
# compressed keys show it only faintly. Where the window (green) overlaps a selected block, both branches read the same
# tokens.
#
# ## 8 · Several GPUs share one text
#
# A text that is too long for one GPU is divided among *ranks* (processes, one per GPU): *context parallelism*,
# `runtime.context_parallel`. The text is cut into two chunks per rank, and rank $r$ of $N$ holds chunks $r$ and
# $2N - 1 - r$, in zigzag order. Queries stay on their rank. Keys and values of all tokens are gathered, because a query
# may select any block before it.
#
# The next cell computes the text of section 2 on four ranks, one after the other. Each rank computes its chunks with the
# keys before them. The joined outputs equal the outputs of one process.

# %%
n_ranks, whole_text = 4, Span.full(length)
shards = [ContextShard(whole_text, rank, n_ranks) for rank in range(n_ranks)]
gates = torch.full((1, length, text.q.shape[2], 3), 1 / 3, dtype=torch.float64)
joined = torch.zeros_like(text.q)  # here values are as wide as queries
owner = torch.zeros(length, dtype=torch.int64)
for shard in shards:
    outputs: list[Tensor] = []
    for piece in shard.pieces:
        compressed, keys = piece.compressed_rows(whole_text, default_nsa), piece.key_rows
        cached = (
            text_k[:, compressed],
            text_v[:, compressed],
            *(x[:, keys] for x in (text.k_sel, text.v_sel, text.k_win, text.v_win)),
        )
        q_piece, gates_piece = (shard.take(x)[:, piece.query_rows] for x in (text.q, gates))
        outputs.append(nsa_attention(q_piece, *cached, gates_piece, default_nsa, span=piece.span))
    joined += shard.place(torch.cat(outputs, dim=1))
    owner[torch.cat([torch.arange(part.start, part.stop) for part in shard.ranges])] = shard.rank
inputs = text.q, text_k, text_v, text.k_sel, text.v_sel, text.k_win, text.v_win, gates
check_equal("outputs of four ranks", joined, nsa_attention(*inputs, default_nsa))

# Tokens that a query of group 1 reads, in selected blocks or in the window, by the rank that holds them.
queries, keys = torch.arange(length)[:, None], torch.arange(length)
is_selected = (text_blocks[0, :, 1, :, None] == torch.arange(-(-length // default_nsa.l_sel))).any(1)
is_read = (is_selected[:, keys // default_nsa.l_sel] | (keys > queries - default_nsa.w)) & (keys <= queries)
held = torch.nn.functional.one_hot(owner, n_ranks).double()
n_reads = held.T @ is_read.double() @ held
show_figure(figures.plot_context_shards(shards, n_reads / n_reads.sum(1, keepdim=True)))
n_past = torch.bincount(owner, weights=torch.arange(1.0, length + 1))
for name, counts in (("keys up to the queries", n_past), ("keys that NSA reads", n_reads.sum(1))):
    print(f"{name}, relative to rank 0: {(counts / counts[0]).round(decimals=2).tolist()}")

# %% [markdown]
# **What to notice.** Left: a rank holds one early and one late chunk (rank 3: two adjacent ones), so all ranks have the
# same number of keys up to their queries. In contiguous order, the last rank would have seven times as many as the first.
# Right: every rank reads keys of all ranks, in nearly equal shares. It therefore gathers all keys. NSA itself reads fewer
# keys on rank 0, because the first queries have few keys. A query reads at most 1,536 of them, so this difference
# vanishes in long texts.
#
# ## 9 · Results
#
# With all three changes, NSA (79.8 M parameters) retrieves the facts at every length of its training, and at twice the
# longest:
#
# | text length, bytes | facts retrieved, four seeds together |
# |---|---|
# | 2,048 | 800 of 800 |
# | 8,192 | 800 of 800 |
# | 32,768 | 800 of 800 |
# | 65,536 (not in training) | 159 of 160 |
#
# The retrieval depends on the selection. Loss on answers to facts outside the window, in *nats* (the negative natural
# logarithm of the probability that the model gives to the right byte; 0 is certainty):
#
# | selected blocks | loss, nats per byte |
# |---|---|
# | by the indexer | 0.000 |
# | random | 3.01 to 4.86 |
#
# On *held-out* text, which was not used in training, NSA has a lower loss than both dense baselines. The unit is *bits per
# byte*, which is nats per byte divided by $\ln 2$:
#
# | model | parameters | bits per byte |
# |---|---|---|
# | NSA, three of the four seeds | 79.8 M | 1.352 to 1.365 |
# | dense, same initialization and widths | 72.4 M | 1.389 |
# | dense, same number of parameters | as NSA | 1.406 |
#
# The last table shows that selection does not increase the loss on plain text. It shows no more than that: NSA's lead
# starts at the first bytes of a text, where attention is not sparse.
#
# [docs/science/retrieval.md](../docs/science/retrieval.md) explains why each change is needed. Its log lists every
# experiment, including the failed ones. The presets `smoke` and `recall_taught` use all three changes (`smoke` with one
# index key per 8 tokens). Without these options, the configuration is NSA as in notebook 01. It equals the paper's NSA
# except for φ (a mean) and the gate (one linear layer).
#
# **What to take away**
#
# * With a document mask, a packed document reads the same keys as if it were alone in the sequence.
# * A compressed key over 32 tokens misses a single relevant token: 1.4 standard deviations are too few.
# * An index key over few tokens finds it, but needs its own training signal. The selection loss gives one, to the indexer
#   only.
# * Selection can only find tokens that some head attends to. Heads that copy from the first step provide the target.
#
# **Next.** [03_kernel_parity](03_kernel_parity.ipynb) compares every fast implementation with the definition.
# [04_smoke_training](04_smoke_training.ipynb) trains a model. [07_does_selection_find](07_does_selection_find.ipynb)
# measures on tiny models how much each part contributes.
