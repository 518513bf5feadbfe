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
# # Native Sparse Attention, branch by branch
#
# In dense attention, every token attends to every token before it. Native Sparse Attention (NSA,
# [arXiv 2502.11089](https://arxiv.org/abs/2502.11089)) attends to far fewer tokens, and the model learns which ones.
# This notebook builds NSA from scratch.
#
# **What you will learn**
#
# * what the three branches of NSA attend to, first on six tokens with every number printed, then as general code,
# * how NSA selects blocks of tokens, and an error in the paper's formula for it (equation 9),
# * why the result is causal, and for which lengths NSA equals dense attention,
# * NSA in 40 lines of PyTorch, equal to the library's layer in outputs and gradients.
#
# **Prerequisites.** Python, PyTorch tensors, and softmax attention: queries, keys, values. Other terms are defined where
# they first occur.
#
# **Time.** About an hour to read. The notebook runs in less than a minute on two CPU cores.
#
# **How to read it.** Each section has an equation of the paper and about ten lines of code. The next cell compares these
# lines with the library. Five times, **predict** the output of the next cell: write down your guess, run the cell, then
# open the answer. Three exercises with solutions are at the end. (Cells marked `NBVAL_CHECK_OUTPUT` print exact results,
# which the tests of this project compare with yours.)

# %%
# %load_ext nsa_lab.workbook

# %% tags=["parameters"]
seed: int = 0  # of the random numbers

# %%
import math

import torch
from torch import Tensor

from nsa_lab import NSAttention, figures
from nsa_lab.attention import dense_attention, geometry, nsa_attention, reference, select_blocks
from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.figures.blocks import compute_equation_nine
from nsa_lab.workbook import examples
from nsa_lab.workbook.display import show_figure, show_folded
from nsa_lab.workbook.query_attention import compute_reads

# %% [markdown]
# ## 1 · Why sparse attention: three numbers
#
# For each new token, dense attention compares a *query* with the *keys* of all previous tokens, and returns a mean of their
# *values*, in which tokens with a matching key have more weight. This costs twice:
#
# 1. **Comparisons.** Each token is compared with all tokens before it. The total grows with the square of the length: a
#    text twice as long needs four times the work.
# 2. **Memory traffic.** A model that generates text stores the keys and values of all previous tokens in its *cache*.
#    It reads the entire cache again for every new token. In long texts this traffic, not arithmetic, limits the speed
#    of generation.
#
# Reading only the relevant tokens would reduce both. But a GPU is fast only if it reads long contiguous pieces of memory
# and multiplies matrix *tiles* of about 64 × 64 numbers. Scattered single tokens offer neither. To find the best *tokens*,
# the model would also have to score every token, which is half the work of dense attention. This leads to the third number:
#
# 3. **Blocks.** NSA selects whole blocks of neighboring tokens. It scores each block through *compressed keys*, each of
#    which represents several tokens. One block is contiguous in memory and fills one tile.
#
# NSA is like reading a long report. A summary of every page gives you an overview (compressed). You open the few pages
# whose summary fits your question and read them in full (selected). And you remember the last sentences (window).
#
# The number of keys that a query reads after $T$ tokens follows from this. There is one compressed key per $d$ tokens,
# $n_{sel}$ selected blocks have $l_{sel}$ tokens each, and the window has $w$ tokens:
#
# $$\text{keys read} \approx \frac{T}{d} + n_{sel}\,l_{sel} + w$$
#
# Only the first term grows with the text. With the default sizes ($d = 16$, $n_{sel} = 16$, $l_{sel} = 64$, $w = 512$) the
# sum is $T/16 + 1{,}536$.

# %%
# NBVAL_CHECK_OUTPUT
default_nsa, tokens = NSAConfig(), 65_536
model = ModelConfig()  # 12 layers, 2 head groups, heads of width 64
reads = geometry.decode_reads(tokens, default_nsa)  # keys that the last query reads, by branch
n_keys = sum(reads.values())
key_bytes = 2 * model.d_k  # one key in bfloat16
token_bytes = model.n_layers * model.n_kv_groups * 2 * key_bytes  # a key and a value in each group of each layer
print(
    f"1. comparisons: {tokens:,} keys for the last of {tokens:,} tokens; NSA {n_keys:,}, {tokens / n_keys:.1f} times fewer"
)
print(f"2. traffic: {token_bytes * tokens / 1e6:,.0f} MB of cache per new token; NSA {token_bytes * n_keys / 1e6:.0f} MB")
print(
    f"3. blocks: {reads['sel']:,} selected tokens are {default_nsa.n_sel} blocks of {default_nsa.l_sel * key_bytes:,} "
    f"bytes, not {reads['sel']:,} rows of {key_bytes}; selection needs {reads['cmp']:,} scores, not {tokens:,}"
)
first = next(T for T in range(1, tokens) if sum(geometry.decode_reads(T, default_nsa).values()) < T)
print(f"NSA reads fewer keys than dense attention from {first:,} tokens on")

# %%
show_figure(figures.plot_reads_by_length([2**k for k in range(5, 17)], default_nsa))

# %% [markdown]
# **What to notice.** NSA (black) reads fewer keys than dense attention (dashed) from about 1,600 tokens on. In shorter
# texts it reads *more*; it is designed for long ones. Beyond that length only the compressed branch (blue) grows, by
# one key per 16 tokens. The cache does not shrink: a later query may select any block, so the cache holds all tokens.
# NSA reduces only the number of keys that are *read*.
#
# ## 2 · NSA in one picture
#
# Three branches attend to the past in parallel. A *gate* per branch, a number between 0 and 1 that depends on the token,
# weights their outputs, which are then added:
#
# | branch | in the code | attends to | purpose |
# |---|---|---|---|
# | **compressed** | `cmp` | one compressed key per $d$ tokens | overview of the whole past |
# | **selected** | `sel` | $n_{sel}$ blocks of $l_{sel}$ tokens, by the scores of the compressed branch | details |
# | **window** | `win` | the $w$ latest tokens | local context |
#
# The picture shows one query of a **toy** example: 64 tokens of independent normal random numbers, with blocks small
# enough to draw. Random numbers contain nothing to find, but they test every formula.

# %%
toy = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=12)
example = examples.make_random_example(64, heads=4, groups=2, head_dim=8, seed=seed)
show_figure(figures.plot_architecture(compute_reads(example, toy, position=57, group=0)))

# %% [markdown]
# **What to notice.** The compressed branch has two uses. Its output is one of the three terms of the sum, and its
# attention weights determine which blocks the selected branch reads. Three of the four selected blocks are forced, that
# is, always selected: the first block, the query's own block and the one before it. In this toy only one block is
# selected by its score.
#
# ## 3 · Six tokens, every number
#
# Before the general code, here is one query with every intermediate result. The text has six tokens, and the model should
# predict the next one:
#
# > Ann drinks tea . Ann drinks **?**
#
# The word after the earlier "drinks" is "tea", so a good answer is "tea". Attention can find it if the *key* of each token
# encodes the word **before** it, and the *query* encodes the current word. (Trained models develop such heads and use them
# to copy. They are called *induction heads*.) To keep the numbers readable, there is one head of width $D = 4$ with one
# channel per word, the queries are 6 times the word, and the values are the words themselves.

# %%
# NBVAL_CHECK_OUTPUT
words = ["Ann", "drinks", "tea", ".", "Ann", "drinks"]
vocabulary = ["Ann", "drinks", "tea", "."]
word_vectors = torch.eye(4, dtype=torch.float64)[[vocabulary.index(word) for word in words]]
values = word_vectors
keys = torch.cat([torch.zeros_like(values[:1]), values[:-1]])  # the previous word; nothing precedes the first token
queries = 6 * word_vectors


def print_table(title: str, rows: list[str], columns: list[str], numbers: Tensor) -> None:
    """Print numbers [rows, columns] with two digits."""
    print(f"{title:<24}│" + "".join(f"{column:>10}" for column in columns))
    for row, line in zip(rows, numbers.tolist(), strict=True):
        print(f"{row:<24}│" + "".join(f"{number:>10.2f}" for number in line))


names = [f"{position} {word}" for position, word in enumerate(words)]
print_table("keys", names, vocabulary, keys)
print()
print_table("values", names, vocabulary, values)
print()
print_table("query", [names[5]], vocabulary, queries[5:])

# %% [markdown]
# **Dense attention.** The score of a key is $q \cdot k / \sqrt D$, here $6 / 2 = 3$ for a match. The softmax turns scores
# into weights that sum to 1: $e^3 / (e^3 + 5 e^0) = 20.09 / 25.09 = 0.80$ for the match. The output is the sum of the
# values with these weights, and its largest channel is the answer.

# %%
# NBVAL_CHECK_OUTPUT
query = queries[5]
scores = keys @ query / math.sqrt(4)
p = scores.softmax(-1)
print_table("dense attention", ["score", "weight p"], names, torch.stack([scores, p]))
print()
print_table("output", ["dense"], vocabulary, (p @ values)[None])

# %% [markdown]
# **Compression.** A compressed key is the mean of $l = 2$ neighboring keys, and there is one for every $d = 1$ tokens. Six
# tokens give five compression blocks, which overlap. Their values are averaged in the same way.

# %%
# NBVAL_CHECK_OUTPUT
block_names = [f"block {i}" for i in range(5)]
block_tokens = [f"{name}: tokens {i}, {i + 1}" for i, name in enumerate(block_names)]
k_cmp, v_cmp = ((x[:-1] + x[1:]) / 2 for x in (keys, values))
print_table("compressed keys", block_tokens, vocabulary, k_cmp)
print()
print_table("compressed values", block_tokens, vocabulary, v_cmp)

# %% [markdown]
# **Compressed branch.** The same attention, over compressed keys. Blocks 1 and 2 contain token 2, which matches. Their
# score is 1.5, half of a full match, because the other token of the block contributes nothing. The branch sees roughly
# where the match is. Its output is blurred: "tea" has the largest weight, but far from 0.80.

# %%
# NBVAL_CHECK_OUTPUT
scores_cmp = k_cmp @ query / math.sqrt(4)
p_cmp = scores_cmp.softmax(-1)
out_cmp = p_cmp @ v_cmp
print_table("compressed attention", ["score", "weight p"], block_names, torch.stack([scores_cmp, p_cmp]))
print()
print_table("output", ["compressed"], vocabulary, out_cmp[None])

# %% [markdown]
# **Importance and selection.** Selection blocks have $l_{sel} = 1$ token here. The importance of a selection block is the
# sum of the weights of all compressed keys that contain its tokens: token 2 is in blocks 1 and 2, so its importance is
# $0.374 + 0.374 = 0.75$. Four blocks are selected. Three are forced: the first, the query's own and the one before it.
# One place is left for the best of the others: token 2, "tea".

# %%
# NBVAL_CHECK_OUTPUT
zero = torch.zeros(1, dtype=torch.float64)
importance = torch.cat([p_cmp, zero]) + torch.cat([zero, p_cmp])  # block j has compressed keys j and j - 1
rank = importance.clone()
rank[[0, 4, 5]] = math.inf  # forced
selected = rank.topk(4).indices.sort().values
print_table("selection", ["importance", "importance, forced = inf"], names, torch.stack([importance, rank]))
print("\nselected tokens:", ", ".join(names[position] for position in selected))

# %% [markdown]
# **Selected branch and window.** Both are attention over single tokens. The selected branch reads four of the six tokens
# and finds the match almost as clearly as dense attention. The window reads the last $w = 2$ tokens, which do not match:
# its weights are equal.

# %%
# NBVAL_CHECK_OUTPUT
p_sel, p_win = (scores[positions].softmax(-1) for positions in (selected, torch.tensor([4, 5])))
out_sel, out_win = p_sel @ values[selected], p_win @ values[4:]
print_table("selected branch", ["weight p"], [names[position] for position in selected], p_sel[None])
print()
print_table("window", ["weight p"], names[4:], p_win[None])
print()
print_table("output", ["selected", "window"], vocabulary, torch.stack([out_sel, out_win]))

# %% [markdown]
# **Gates and sum.** The gates are sigmoids of numbers that the model computes from the token. Here they are set by hand
# to $\sigma(-1)$, $\sigma(2)$ and $\sigma(-1)$: mostly the selected branch. The sum of the three gated outputs is the
# output of NSA. The last line compares it with the library.

# %%
# NBVAL_CHECK_OUTPUT
gates = torch.tensor([-1.0, 2.0, -1.0], dtype=torch.float64).sigmoid()
branch_outputs = torch.stack([out_cmp, out_sel, out_win])
output = gates @ branch_outputs
print_table("gates", ["gate"], ["cmp", "sel", "win"], gates[None])
print()
gated = [f"{gate:.2f} × {name}" for gate, name in zip(gates.tolist(), ("compressed", "selected", "window"), strict=True)]
print_table("gated outputs", [*gated, "sum"], vocabulary, torch.cat([gates[:, None] * branch_outputs, output[None]]))
print("\nanswer:", vocabulary[output.argmax()])

six = NSAConfig(l=2, d=1, l_sel=1, n_sel=4, w=2)
q6, k6, v6 = (x[None, :, None] for x in (queries, keys, values))  # [B, T, heads, D]
k_cmp6, v_cmp6 = (reference.compress(x, six) for x in (k6, v6))
library = nsa_attention(q6, k_cmp6, v_cmp6, k6, v6, k6, v6, gates.expand(1, 6, 1, 3), six, backend="reference")
print("equal to the library:", torch.allclose(output, library[0, 5, 0], rtol=0, atol=1e-12))

# %%
six_tokens = examples.Example("six tokens", "", q6, k6, v6, k6, v6, k6, v6)
show_figure(figures.plot_architecture(compute_reads(six_tokens, six, position=5)))

# %% [markdown]
# **What to notice.** The compressed branch could not answer by itself, but it pointed to the right block, and the selected
# branch read that block in full. With blocks of 64 tokens and texts of 65,536 this is the whole idea of NSA. It also shows
# the weak point: half of the match was lost in a mean of two keys. In a mean of 32 keys, 31/32 is lost. Notebook
# [02](02_in_practice.ipynb) returns to this.
#
# The rest of this notebook writes the same steps for all queries, heads and lengths at once.
#
# ### Symbols
#
# They follow the paper. Positions $t$, $s$ and block indices $i$, $j$ start at 0.
#
# | symbol | meaning | in the toy | default |
# |---|---|---|---|
# | $T$ | number of tokens | 64 | |
# | $H$, $G$, $h = H/G$ | query heads; groups of heads that share keys and values; heads per group | 4, 2, 2 | 12, 2, 6 |
# | $D$ | width of a head (the paper: $d_k$) | 8 | 64 |
# | $l$, $d$ | length of a compression block; its *stride*, the distance between the starts of two blocks | 8, 4 | 32, 16 |
# | $l_{sel}$, $n_{sel}$ | length (the paper: $l'$) and number (the paper: $n$) of the selected blocks | 8, 4 | 64, 16 |
# | $w$ | tokens in the window | 12 | 512 |
#
# The library's tensors have a batch dimension, `[B, T, H, D]`. The code in this notebook handles one text and omits it.
# `check_equal` stops the notebook if two results differ by more than $10^{-12}$. (Where the library computes in float32,
# $10^{-6}$.)


# %%
def check_equal(name: str, result: Tensor, library: Tensor, atol: float = 1e-12) -> None:
    """Stop the notebook unless the two tensors agree to `atol`."""
    torch.testing.assert_close(result, library, rtol=0, atol=atol)
    print(f"{name} {list(result.shape)}: equal to the library to {atol:g}")


# %%
# NBVAL_CHECK_OUTPUT
q, k_sel, v_sel, k_win, v_win = (x[0] for x in (example.q, example.k_sel, example.v_sel, example.k_win, example.v_win))
T, H, G = len(q), q.shape[1], k_sel.shape[1]
print(f"queries [T, H, D] = {list(q.shape)}, keys and values of each branch [T, G, D] = {list(k_sel.shape)}, {q.dtype}")

# %% [markdown]
# ## 4 · Dense attention, head groups and LSE (eq. 1, 2)
#
# $$o_t = \sum_{s \le t} p_{t,s}\, v_s$$
#
# $$p_{t,s} = \frac{\exp\big(q_t \cdot k_s / \sqrt D\big)}{\sum_{s' \le t} \exp\big(q_t \cdot k_{s'} / \sqrt D\big)}$$
#
# Every branch of NSA is this formula with a different set of keys. One function therefore serves all branches. Its mask
# `allowed` states which query may attend to which key.
#
# **Head groups.** A layer has $H$ query heads but only $G$ sets of keys and values: head $n$ uses those of group
# $\lfloor n / h \rfloor$. This is *grouped-query attention*, and it makes the cache $h$ times smaller. In NSA, heads
# that share keys also share the *block selection*, so a block is loaded once for all $h$ heads. `expand_groups` repeats
# the tensor of a group for each of its heads.
#
# **LSE.** The *log-sum-exp* $L_t = \log \sum_s \exp(q_t \cdot k_s / \sqrt D)$ is the logarithm of the denominator: one
# number per query and head. It gives any attention weight without the others:
# $p_{t,s} = \exp(q_t \cdot k_s/\sqrt D - L_t)$. Fast kernels never store the matrix $p$. They return $L$ with the
# output, and NSA computes its block scores from $L$.


# %% tags=["lesson"]
def expand_groups(x: Tensor, heads: int) -> Tensor:
    """Repeat each group for its heads: [., 1 or G, .] -> [., heads, .]."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


OutputAndLse = tuple[Tensor, Tensor]  # an output [T, H, D] and its LSE [T, H]


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> OutputAndLse:
    """Attend with q [T, H, D] to k, v [S, G, D]. `allowed` is a mask, bool [T, 1 or G, S]."""
    scores = torch.einsum("thd,shd->ths", q, expand_groups(k, q.shape[1])) / math.sqrt(q.shape[-1])
    allowed = expand_groups(allowed, q.shape[1])
    p = scores.masked_fill(~allowed, -1e9).softmax(-1) * allowed  # no allowed key: 0 instead of NaN
    lse = scores.masked_fill(~allowed, -math.inf).logsumexp(-1)  # no allowed key: log 0
    return torch.einsum("ths,shd->thd", p, expand_groups(v, q.shape[1])), lse


t, s = torch.arange(T)[:, None], torch.arange(T)  # queries in rows, tokens in columns
causal = (s <= t)[:, None]  # [T, 1, T]: the same for every head

# %%
# NBVAL_CHECK_OUTPUT
dense, lse = attend(q, k_sel, v_sel, causal)
check_equal("dense attention", dense, dense_attention(example.q, example.k_sel, example.v_sel)[0])

# The LSE combines attention over two halves of the keys.
first_half, second_half = (attend(q, k_sel, v_sel, causal & half) for half in (s < 32, s >= 32))
combined = sum(out * torch.exp(part - lse)[..., None] for out, part in (first_half, second_half))
print("two halves, weighted by exp(LSE of the half - LSE), sum to the whole output:", torch.allclose(combined, dense))

# %% [markdown]
# ## 5 · The gated sum (eq. 3 to 6)
#
# Equations 3 and 4 state the general idea: replace the keys and values by fewer ones and attend to those. Equation 5
# does this in three ways at once, with one gate per branch:
#
# $$o_t = g^{cmp}_t\, o^{cmp}_t + g^{sel}_t\, o^{sel}_t + g^{win}_t\, o^{win}_t$$
#
# $$g_t = \sigma(W_g\, x_t)$$
#
# Here $x_t$ is the token's input to the layer and $\sigma$ the sigmoid. Each head has its own three gates. Sigmoid
# gates do not compete: all three may be open, or all closed. (With `gate: softmax` they sum to 1.) Equation 6 counts
# the keys: the three branches together should read far fewer than $t$.
#
# The paper computes the gates with an MLP and a sigmoid, and does not give the size of the MLP. This library uses **one
# linear layer** and a sigmoid. Its gates depend on the token, and it has no hidden layer that could start with zero
# gradient. An MLP was not compared.
#
# Each branch has its own keys and values. The window learns fastest, and with shared keys it would dominate what the
# other two branches learn.


# %% tags=["lesson"]
def compute_gates(x: Tensor, weight: Tensor) -> Tensor:
    """Return gates [T, H, 3] (compressed, selected, window) of x [T, C] with weight [3H, C]."""
    return torch.sigmoid(x @ weight.T).unflatten(-1, (-1, 3))


def sum_gated(outputs: tuple[Tensor, ...], gates: Tensor) -> Tensor:
    """Add three outputs [T, H, D], weighted by gates [T, H, 3] (eq. 5)."""
    return sum(gates[..., n, None] * output for n, output in enumerate(outputs))


# %%
# NBVAL_CHECK_OUTPUT
layer = NSAttention(32, 4, 2, nsa=toy).double()  # library layer: width 32, 4 heads in 2 groups
x = torch.randn(T, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
gates = compute_gates(x, layer.attention.gate.weight).detach()
check_equal("gates", gates, layer.attention.compute_gates(x[None])[0].detach())
outputs = (q, dense, dense - q)  # any three tensors
check_equal("gated sum", sum_gated(outputs, gates), reference.combine(*(out[None] for out in outputs), gates[None])[0])

# %% [markdown]
# ## 6 · Compression (eq. 7)
#
# $$\tilde k_i = \varphi\big(k_{id},\, \dots,\, k_{id+l-1}\big)$$
#
# for the blocks $i = 0, \dots, N-1$, where
#
# $$N = \begin{cases}0 & T < l\\ \lfloor (T-l)/d \rfloor + 1 & \text{otherwise}\end{cases}$$
#
# Block $i$ starts at token $i\,d$ and has $l$ tokens. Neighboring blocks overlap because $d < l$. The compression
# operator $\varphi$ maps the keys of a block to one *compressed key*, and the values to one compressed value. In this
# notebook $\varphi$ is the mean (`phi: avg`). The paper uses an MLP that also receives the position inside the block
# (`phi: mlp`). Keys are rotated by RoPE, the model's position encoding, *before* they are compressed.
#
# Every index computation of NSA asks which token is in which block. One function answers this for both kinds of blocks:


# %% tags=["lesson"]
def get_block_mask(starts: Tensor, size: int, T: int) -> Tensor:
    """Return which of T tokens are in the blocks of `size` that start at `starts`: bool [blocks, T]."""
    s = torch.arange(T)
    return (s >= starts[:, None]) & (s < starts[:, None] + size)


def get_compression_starts(T: int, nsa: NSAConfig) -> Tensor:
    """Return the first token of every complete compression block, [N]."""
    return torch.arange(0, max(T - nsa.l + 1, 0), nsa.d)


def compress(x: Tensor, nsa: NSAConfig) -> Tensor:
    """Average every compression block (eq. 7): x [T, G, D] -> [N, G, D]."""
    members = get_block_mask(get_compression_starts(len(x), nsa), nsa.l, len(x)).to(x.dtype)
    return torch.einsum("is,sgd->igd", members / nsa.l, x)


# %%
# NBVAL_CHECK_OUTPUT
k_cmp, v_cmp = compress(example.k_cmp[0], toy), compress(example.v_cmp[0], toy)
check_equal("compressed keys", k_cmp, reference.compress(example.k_cmp, toy)[0])
check_equal("compressed values", v_cmp, reference.compress(example.v_cmp, toy)[0])
members = get_block_mask(get_compression_starts(T, toy), toy.l, T)
print(f"N = {len(members)} blocks; block 3 is tokens {members[3].nonzero()[:, 0].tolist()}")

# %%
show_figure(figures.plot_block_geometry(64, toy, position=41))

# %% [markdown]
# **What to notice.** Compression blocks (blue) overlap, selection blocks (orange) tile the text, and the window (green)
# moves with the query. The two kinds of blocks become available at different times:
#
# * A compression block is *visible* once it is **complete**. Its mean cannot be separated into tokens, so a block that
#   contains future tokens must not be read.
# * A selection block is a *candidate* once it has **started**. Inside the block, the usual causal mask applies to
#   single tokens.
#
# ### Predict 1
#
# The picture shows query 41. How many compression blocks are visible to query 50 of the toy ($l = 8$, $d = 4$)? Which
# query is the first that sees any?

# %%
n_visible = [int(geometry.visible_compressed(torch.tensor(position), toy)) for position in range(T)]
show_folded("Answer", f"query 50 sees {n_visible[50]} blocks; the first query that sees a block is {n_visible.index(1)}")

# %% [markdown]
# <details><summary>Why</summary>
#
# Block $i$ ends at token $i\,d + l - 1 = 4i + 7$. Blocks 0 to 10 end at token 47 or earlier, and block 11 ends at
# 51. Query 50 therefore sees eleven blocks. Block 0 ends at token 7, so query 7 is the first that sees a block. Queries
# 0 to 6 see none: their output in this branch is 0 and their LSE is $-\infty$.
#
# </details>
#
# ## 7 · Attention over compressed keys (eq. 8)
#
# $$p_{t,i} = \operatorname{softmax}_i\!\Big(\tfrac{1}{\sqrt{D}}\, q_t \cdot \tilde k_i\Big)$$
#
# $$o^{cmp}_t = \sum_i p_{t,i}\,\tilde v_i$$
#
# The softmax includes *only the visible blocks*, $i\,d + l - 1 \le t$. This matters twice. It makes this branch causal.
# It also makes the block selection causal, because $p$ is used again to rank blocks. If the denominator included future
# blocks, future tokens would change past selections.


# %% tags=["lesson"]
def get_visible_mask(T: int, nsa: NSAConfig) -> Tensor:
    """Return which compression blocks are complete at t: bool [T, 1, N]."""
    return (get_compression_starts(T, nsa) + nsa.l - 1 <= torch.arange(T)[:, None])[:, None]


def compressed_attention(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, nsa: NSAConfig) -> OutputAndLse:
    """Attend with q [T, H, D] to compressed keys and values [N, G, D] (eq. 8)."""
    return attend(q, k_cmp, v_cmp, get_visible_mask(len(q), nsa))


# %%
# NBVAL_CHECK_OUTPUT
out_cmp, lse_cmp = compressed_attention(q, k_cmp, v_cmp, toy)
out, lse = reference.compressed_attention(example.q, k_cmp[None], v_cmp[None], toy)
check_equal("compressed branch", out_cmp, out[0])
check_equal("LSE of the compressed branch", lse_cmp, lse[0])
print("query 6 sees no block: output is zero:", not out_cmp[6].any().item(), "and LSE =", lse_cmp[6, 0].item())

# %%
show_figure(figures.plot_visible_blocks(64, toy))

# %% [markdown]
# **What to notice.** The number of visible blocks increases by one every $d = 4$ queries. The first block becomes
# visible at query $l - 1 = 7$.
#
# ## 8 · Block importance (eq. 9, 10)
#
# The importance of a selection block is the attention that the compressed keys of its tokens receive. Each compressed
# key passes its weight to every selection block that it overlaps, once per stride of $d$ shared tokens:
#
# $$p^{slc}_t[j] = \sum_i p_{t,i}\,\frac{s_{ij}}{d}$$
#
# $$s_{ij} = \big|[id,\, id+l) \cap [j\,l_{sel},\, (j+1)\,l_{sel})\big|$$
#
# $$p^{slc\,\prime}_t[j] = \sum_{\text{heads of the group}} p^{slc}_t[j]$$
#
# The paper abbreviates "selected" as *slc*, and $s_{ij}$ is the number of tokens that blocks $i$ and $j$ share. The
# last line is equation 10: all heads of a group use the same selection, so their importance is added.
#
# **An error in the paper.** Equation 9 is printed as the double sum
#
# $$p^{slc}_t[j] = \sum_{m=0}^{l'/d - 1}\; \sum_{n=0}^{l/d - 1} p^{cmp}_t\Big[\tfrac{l'}{d}\, j - m - n\Big].$$
#
# Equations 7 and 12 number blocks from 0. With this numbering, the printed sum uses compressed blocks that are
# $l'/d - 1$ strides too early. Block 0 would receive only $p[0]$, and every block would be ranked mostly by tokens
# *before* it. The correct index is $p^{cmp}_t\big[\tfrac{l'}{d}\, j + m - n\big]$, which equals the number of shared
# strides above for all block sizes. A public port of NSA implements the printed formula. It does not crash, and its
# loss decreases, but its queries read the neighbor of the block that they score highest.
#
# In code, the sum is a product of two matrices: tokens of compression blocks times tokens of selection blocks.


# %% tags=["lesson"]
def compute_importance(q: Tensor, k_cmp: Tensor, lse: Tensor, nsa: NSAConfig) -> Tensor:
    """Return the importance of each selection block for each query and group, [T, G, blocks] (eq. 8 to 10)."""
    T, H, G = len(q), q.shape[1], k_cmp.shape[1]
    scores = torch.einsum("thd,ihd->thi", q, expand_groups(k_cmp, H)) / math.sqrt(q.shape[-1])
    p = torch.where(get_visible_mask(T, nsa), scores - lse[..., None], -math.inf).exp()  # eq. 8
    compression = get_block_mask(get_compression_starts(T, nsa), nsa.l, T).to(p.dtype)
    selection = get_block_mask(torch.arange(0, T, nsa.l_sel), nsa.l_sel, T).to(p.dtype)
    shared = compression @ selection.T / nsa.d  # [N, blocks]: shared strides, eq. 9
    return p.unflatten(1, (G, H // G)).sum(2) @ shared  # sum over the heads of a group, eq. 10


# %%
# NBVAL_CHECK_OUTPUT
importance = compute_importance(q, k_cmp, lse_cmp, toy)
library = reference.block_importance(example.q, k_cmp[None], lse_cmp[None], toy)[0]
check_equal("importance", importance, library.double(), atol=1e-6)  # the library computes it in float32
for sizes in ({}, {"l": 8, "d": 4, "l_sel": 16}, {"l": 16, "d": 16, "l_sel": 32}, {"l": 64, "d": 16, "l_sel": 32}):
    nsa = NSAConfig(**sizes)
    shared = geometry.overlap(40, 10, nsa)
    corrected, printed = (
        torch.equal(compute_equation_nine(40, 10, nsa, as_printed=as_printed), shared) for as_printed in (False, True)
    )
    weights = shared[:, 5][shared[:, 5] > 0].int().tolist()
    sizes = f"l, d, l_sel = {nsa.l}, {nsa.d}, {nsa.l_sel}"
    print(f"{sizes}: weights {weights}; eq. 9 equal if corrected: {corrected}, as printed: {printed}")

# %%
show_figure(figures.plot_overlap_weights(NSAConfig(), n_compressed=12, n_selection=3))

# %% [markdown]
# **What to notice.** In the first picture, block $j = 1$ receives weight from compressed blocks 3 to 7. These are the
# ones that overlap its tokens, 64 to 127: two shared strides in the middle, one at the two edges. In the second
# picture, the formula as printed has the same five weights three columns too far to the left.
#
# ### Predict 2
#
# Use the default sizes (32, 16, 64). The key of token 350 matches query 700 perfectly. Token 350 is in selection block
# $\lfloor 350/64 \rfloor = 5$. Which block gets the highest importance with the corrected formula, and which with the
# printed one?

# %%
keys = torch.zeros(1, 1024, 1, 16, dtype=torch.float64)
keys[0, 350] = 40.0
queries = torch.zeros(1, 1024, 1, 16, dtype=torch.float64)
queries[0, 700] = 1.0
compressed = reference.compress(keys, default_nsa)
n_visible = int(geometry.visible_compressed(torch.tensor(700), default_nsa))
p = torch.softmax(queries[0, 700, 0] @ compressed[0, :, 0].T / 4, -1)[:n_visible].float()
best_block = {
    as_printed: int((p @ compute_equation_nine(len(p), 11, default_nsa, as_printed=as_printed)).argmax())
    for as_printed in (False, True)
}
show_folded("Answer", f"corrected: block {best_block[False]}; as printed: block {best_block[True]}")

# %% [markdown]
# <details><summary>Why</summary>
#
# Token 350 is in compressed blocks $i = 20$ (tokens 320 to 351) and $i = 21$ (tokens 336 to 367). These two have all
# the weight. By the corrected formula they belong to block 5, which starts with compressed block $4 \cdot 5 = 20$. The
# printed formula gives block $j$ the compressed blocks $4j - 4$ to $4j$. For $j = 5$ these are 16 to 20, and only the
# last has weight. For $j = 6$ these are 20 to 24, which include both. Block 6 therefore wins, and the query reads
# tokens 384 to 447, which do not contain token 350.
#
# </details>
#
# ## 9 · Block selection (eq. 11)
#
# $$\mathcal I_t = \{\, j : \operatorname{rank}\big(p^{slc\,\prime}_t[j]\big) \le n_{sel} \,\}$$
#
# Each query and group selects the $n_{sel}$ blocks with the highest importance.
#
# * **Candidates** are the blocks that have started: $j\,l_{sel} \le t$.
# * **Forced blocks** are always selected and count towards $n_{sel}$: the first block, the query's own block and the
#   one before it. (The first block serves as *attention sink*: trained models put attention that they need nowhere else
#   on the first tokens.)
# * **Ties** go to the lower index, and the ranking uses float32. All implementations then select the same blocks.
#
# No gradient flows through the selection, because a ranking is not differentiable. The compressed keys are trained only
# by the output of the compressed branch.


# %% tags=["lesson"]
def select_by_importance(importance: Tensor, nsa: NSAConfig) -> Tensor:
    """Return the mask of the blocks selected by importance [T, G, blocks], of the same shape (eq. 11)."""
    T, _, blocks = importance.shape
    j, own_block = torch.arange(blocks), torch.arange(T)[:, None, None] // nsa.l_sel
    forced, is_candidate = (j == 0) | (j == own_block) | (j == own_block - 1), j <= own_block
    rank = importance.float().masked_fill(forced, math.inf).masked_fill(~is_candidate, -math.inf)
    # A stable sort keeps ties in order.
    best = rank.argsort(dim=-1, descending=True, stable=True)[..., : nsa.n_sel]
    return torch.zeros_like(rank).scatter(-1, best, 1.0).bool() & is_candidate  # early queries select fewer than n_sel


# %%
# NBVAL_CHECK_OUTPUT
selected = select_by_importance(importance, toy)
selected_indices = reference.select_blocks(example.q, k_cmp[None], lse_cmp[None], toy)  # block indices, padded with -1
library_mask = torch.nn.functional.one_hot(selected_indices[0].long() + 1, selected.shape[-1] + 1)[..., 1:].any(-2)
print("same blocks as the library:", torch.equal(selected, library_mask))
for position in (0, 15, 16, 47, 63):
    blocks_by_group = [selected[position, group].nonzero()[:, 0].tolist() for group in range(G)]
    print(f"query {position:>2}: blocks of group 0 {blocks_by_group[0]}, of group 1 {blocks_by_group[1]}")

# %%
show_figure(figures.plot_importance(importance[:, 0].float(), selected_indices[0, :, 0], toy, "the toy, group 0"))

# %% [markdown]
# **What to notice.** The upper panel shows the importance, the lower panel the resulting selection. The forced blocks
# form a horizontal line and a diagonal. The one remaining place goes to the other candidate with the highest
# importance. With random numbers, this block changes from query to query.
#
# ### Predict 3
#
# All blocks have the same importance. Which four blocks does query 63 of the toy select? Which does query 15?

# %%
equal_importance = select_by_importance(torch.ones(64, 1, 8), toy)
show_folded("Answer", "\n".join(f"query {p}: {equal_importance[p, 0].nonzero()[:, 0].tolist()}" for p in (63, 15)))

# %% [markdown]
# <details><summary>Why</summary>
#
# Query 63 is in block $\lfloor 63/8 \rfloor = 7$. Blocks 0, 6 and 7 are forced. The fourth place goes to the lowest
# remaining index, 1. Query 15 is in block 1. Only blocks 0 and 1 have started, so it selects two blocks instead of
# four.
#
# </details>
#
# ## 10 · Selected attention (eq. 12)
#
# $$\tilde K^{sel}_t = \operatorname{Cat}\{ k_s : \lfloor s / l_{sel} \rfloor \in \mathcal I_t,\; s \le t \}$$
#
# The selected branch attends to the tokens of the selected blocks, up to the query itself. This is ordinary attention
# over single tokens.


# %% tags=["lesson"]
def selected_attention(q: Tensor, k: Tensor, v: Tensor, selected: Tensor, nsa: NSAConfig) -> OutputAndLse:
    """Attend with q [T, H, D] to the tokens of the blocks `selected`, bool [T, G, blocks] (eq. 12)."""
    T = len(q)
    tokens = selected.repeat_interleave(nsa.l_sel, dim=-1)[..., :T]  # the last block may be incomplete
    return attend(q, k, v, tokens & (torch.arange(T) <= torch.arange(T)[:, None])[:, None])


# %%
# NBVAL_CHECK_OUTPUT
out_sel, _ = selected_attention(q, k_sel, v_sel, selected, toy)
library, _ = reference.selected_attention(example.q, example.k_sel, example.v_sel, selected_indices, toy)
check_equal("selected branch", out_sel, library[0])

# %% [markdown]
# ### Predict 4
#
# Count the keys that query 57 reads in the selected branch ($l_{sel} = 8$, $n_{sel} = 4$). Does the number depend on
# *which* blocks are selected?

# %%
counts = (selected.repeat_interleave(8, -1) & causal).sum(-1)  # [T, G]
formula = geometry.selected_keys(57, toy)
show_folded(
    "Answer",
    f"query 57 reads {counts[57].tolist()} keys in its two groups; the formula gives {formula} for any selection",
)

# %% [markdown]
# <details><summary>Why</summary>
#
# Token 57 is the second token of block 7 (tokens 56 to 63). Its own block is always selected and contributes 2 keys.
# The three other blocks are complete and contribute 8 keys each: 26 in total. The number does not depend on the
# selection, because the only incomplete block is the query's own, which is forced. In general it is
# $\min\big(\lfloor t/l_{sel} \rfloor,\, n_{sel}-1\big)\,l_{sel} + (t \bmod l_{sel}) + 1$. A program that reports
# another number reads other tokens. The end of notebook 06 shows a bug that was found in this way.
#
# </details>
#
# ## 11 · Window attention (section 3.3.3)
#
# The window holds the $w$ latest tokens, including $t$: exactly $\min(w, t+1)$ keys. Conventions differ: libraries
# whose window counts only the keys to the *left* of the query need $w - 1$. (The paper's $k_{t-w:t}$, read like its eq.
# 7, would be $w + 1$ keys.) The window is a separate branch so that the other two do not have to learn local patterns.


# %% tags=["lesson"]
def window_attention(q: Tensor, k: Tensor, v: Tensor, nsa: NSAConfig) -> OutputAndLse:
    """Attend with q [T, H, D] to the w latest of k, v [T, G, D]."""
    t, s = torch.arange(len(q))[:, None], torch.arange(len(q))
    return attend(q, k, v, ((s <= t) & (s > t - nsa.w))[:, None])


# %%
# NBVAL_CHECK_OUTPUT
out_win, _ = window_attention(q, k_win, v_win, toy)
check_equal("window branch", out_win, reference.window_attention(example.q, example.k_win, example.v_win, toy)[0][0])

# %%
show_figure(figures.plot_branch_masks(selected_indices[0, :, 0], toy))

# %% [markdown]
# **What to notice.** The compressed mask is narrow because each of its columns is a block, not a token. The selected
# mask is full for the first 32 queries, which have at most $n_{sel} = 4$ candidate blocks. Below, gaps of one block
# width appear. For 64 tokens, the three masks together have *more* pairs than dense attention, as section 1 predicts
# for short texts. The growth differs: the dense triangle grows with the square of the length, the selected branch and
# the window linearly.
#
# ## 12 · The complete operator (eq. 5)

# %%
# NBVAL_CHECK_OUTPUT
output = sum_gated((out_cmp, out_sel, out_win), gates)
branches = (example.q, k_cmp[None], v_cmp[None], example.k_sel, example.v_sel, example.k_win, example.v_win, gates[None])
for backend in ("reference", "torch"):
    check_equal(f"NSA, backend {backend}", output, nsa_attention(*branches, toy, backend=backend)[0])

# %% [markdown]
# ### Causality, bit for bit
#
# Change every token after 40 and compare the outputs up to 40. They must be identical, not merely close: a selection
# that depends on future tokens first shows as a tiny difference.

# %%
# NBVAL_CHECK_OUTPUT
torch.manual_seed(2)
inputs = (example.q, example.k_cmp, example.v_cmp, example.k_sel, example.v_sel, example.k_win, example.v_win)
q2, k_cmp2, v_cmp2, *others = (torch.where((s > 40)[None, :, None, None], torch.randn_like(x), x) for x in inputs)
compressed = (compress(k_cmp2[0], toy)[None], compress(v_cmp2[0], toy)[None])
after = nsa_attention(q2, *compressed, *others, gates[None], toy, backend="reference")[0]
before = nsa_attention(*branches, toy, backend="reference")[0]
print("outputs at t <= 40 are bit-identical:", torch.equal(before[:41], after[:41]))
print("outputs at t > 40 differ:", not torch.equal(before[41:], after[41:]))

# %% [markdown]
# ## 13 · Short sequences are dense
#
# If a sequence has at most $n_{sel}$ blocks, all of them are selected. The selected branch then **equals** dense causal
# attention.
#
# ### Predict 5
#
# Use the default sizes, $l_{sel} = 64$ and $n_{sel} = 16$. For how many queries does the selected branch differ from
# dense attention in a text of 1,024 tokens, of 1,025 tokens, and of 1,200 tokens?

# %%
lines = []
for T_short in (1024, 1025, 1200):
    sample = examples.make_random_example(T_short, heads=2, groups=1, head_dim=16, seed=3)
    compressed = reference.compress(sample.k_cmp, default_nsa)
    _, score = reference.compressed_attention(sample.q, compressed, compressed, default_nsa)
    sparse, _ = reference.selected_attention(
        sample.q, sample.k_sel, sample.v_sel, select_blocks(sample.q, compressed, score, default_nsa), default_nsa
    )
    differs = (sparse - dense_attention(sample.q, sample.k_sel, sample.v_sel)).abs().amax((0, 2, 3)) > 1e-9
    lines.append(f"T = {T_short:,}: {int(differs.sum())} queries differ from dense attention")
show_folded("Answer", "\n".join(lines))

# %% [markdown]
# <details><summary>Why</summary>
#
# $n_{sel} \cdot l_{sel} = 1{,}024$. Up to query 1,023 there are at most 16 blocks, and every candidate is selected.
# Query 1,024 starts block 17 and is the first that omits a block. The numbers are therefore 0, 1 and 176. A benchmark
# at shorter lengths compares dense attention with dense attention plus overhead.
#
# </details>
#
# ## 14 · NSA from scratch in 40 lines
#
# The next cell contains everything above without the library, and the two parts that were missing: the projections to
# queries, keys and values, and RoPE. `weights` has three matrices: `qkv` (queries, then the keys of the three branches,
# then their values), `gate` and `out`.

# %% tags=["lesson"]
import torch
from torch import arange, einsum


def rotate(x):  # [T, heads, D]: rotate the pair (i, i + D/2) by the angle t * 10000^(-2i/D)
    rate = 10_000.0 ** (-arange(0, x.shape[-1], 2) / x.shape[-1])
    angle = arange(len(x), dtype=torch.float32)[:, None, None] * rate
    (a, b), cos, sin = x.chunk(2, -1), angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attention(q, k, v, allowed):  # eq. 1, 2; allowed [T, 1 or G, S] -> output and weights
    k, v, allowed = (y.repeat_interleave(q.shape[1] // y.shape[1], dim=1) for y in (k, v, allowed))
    scores = einsum("thd,shd->ths", q, k) * q.shape[-1] ** -0.5
    p = scores.masked_fill(~allowed, -1e9).softmax(-1) * allowed
    return einsum("ths,shd->thd", p, v), p


def native_sparse_attention(x, weights, H, G, l, d, l_sel, n_sel, w):  # x [T, C] -> [T, C]
    T, t, s = len(x), arange(len(x))[:, None], arange(len(x))
    heads = (x @ weights["qkv"].T).unflatten(-1, (H + 6 * G, -1))
    q, k_cmp, k_sel, k_win = rotate(heads[:, : H + 3 * G]).split([H, G, G, G], dim=1)
    v_cmp, v_sel, v_win = heads[:, H + 3 * G :].split(G, dim=1)
    # Tokens of each compression and selection block: [N, T] and [blocks, T].
    first, j = arange(0, max(T - l + 1, 0), d), arange(-(-T // l_sel))
    in_cmp = ((s - first[:, None]) // l == 0).to(x.dtype)
    in_sel = (s // l_sel == j[:, None]).to(x.dtype)
    # Compressed branch.
    k_cmp, v_cmp = (einsum("is,sgd->igd", in_cmp / l, y) for y in (k_cmp, v_cmp))  # eq. 7
    out_cmp, p = attention(q, k_cmp, v_cmp, (first + l - 1 <= t)[:, None])  # eq. 8
    # Block selection.
    importance = p.unflatten(1, (G, H // G)).sum(2) @ (in_cmp @ in_sel.T / d)  # eq. 9, 10
    own_block = t[:, None] // l_sel
    forced, is_candidate = (j == 0) | (j == own_block) | (j == own_block - 1), j <= own_block
    rank = importance.float().masked_fill(forced, torch.inf).masked_fill(~is_candidate, -torch.inf)
    best = rank.argsort(dim=-1, descending=True, stable=True)[..., :n_sel]
    selected = torch.zeros_like(rank).scatter(-1, best, 1.0).bool() & is_candidate  # eq. 11
    # Selected branch and window.
    tokens = selected.repeat_interleave(l_sel, dim=-1)[..., :T] & (s <= t)[:, None]
    out_sel, _ = attention(q, k_sel, v_sel, tokens)  # eq. 12
    out_win, _ = attention(q, k_win, v_win, ((s <= t) & (s > t - w))[:, None])
    gates = torch.sigmoid(x @ weights["gate"].T).unflatten(-1, (H, 3, 1))
    branches = zip(gates.unbind(2), (out_cmp, out_sel, out_win), strict=True)
    output = sum(gate * out for gate, out in branches)  # eq. 5
    return output.flatten(1) @ weights["out"].T


# %% [markdown]
# Compare it with the library's layer with the same weights, in float64: outputs, and gradients of the input and of
# every weight. The lengths are one token, less than one block, the toy's 64, an odd length, and one beyond the 1,024
# tokens up to which the default sizes are dense.

# %%
# NBVAL_CHECK_OUTPUT
torch.manual_seed(3)
for T_here, nsa in ((1, toy), (7, toy), (64, toy), (203, toy), (1100, default_nsa)):
    layer = NSAttention(32, 4, 2, nsa=nsa).double()
    weights = {name.split(".")[1]: weight for name, weight in layer.named_parameters()}
    x = torch.randn(T_here, 32, dtype=torch.float64, requires_grad=True)
    sizes = nsa.model_dump(include={"l", "d", "l_sel", "n_sel", "w"})
    pair = (native_sparse_attention(x, weights, 4, 2, **sizes), layer(x[None])[0])
    ours, library = (torch.autograd.grad(y.square().sum(), (x, *weights.values())) for y in pair)
    torch.testing.assert_close((pair[0], *ours), (pair[1], *library), rtol=1e-10, atol=1e-10)
    print(f"T = {T_here:>5,}, l, d, l_sel, n_sel, w = {tuple(sizes.values())}: outputs and all gradients equal to 1e-10")

# %% [markdown]
# ## 15 · Exercises
#
# Add a cell below each exercise, and open the solution when yours runs.
#
# **1. Count pairs.** How many query-key pairs does each branch compute for the 64 tokens of the toy? Count them from the
# masks of this notebook, and compare with the titles of the figure in section 11.
#
# <details><summary>Solution</summary>
#
# ```python
# t, s = torch.arange(64)[:, None], torch.arange(64)
# in_sel = selected[:, 0].repeat_interleave(toy.l_sel, dim=-1)  # group 0
# print("dense", int((s <= t).sum()))
# print("compressed", int(get_visible_mask(64, toy).sum()))
# print("selected", int((in_sel & (s <= t)).sum()))
# print("window", int(((s <= t) & (s > t - toy.w)).sum()))
# ```
#
# It prints 2080, 435, 1440 and 702. Another selection would give the same numbers (section 10).
#
# </details>
#
# **2. Softmax gates.** With `gate: softmax` the three gates of a head sum to 1. Change `compute_gates`, and compare with a
# layer of `toy.model_copy(update={"gate": "softmax"})`.
#
# <details><summary>Solution</summary>
#
# ```python
# def compute_softmax_gates(x, weight):
#     return (x @ weight.T).unflatten(-1, (-1, 3)).softmax(-1)
#
# softmax = NSAttention(32, 4, 2, nsa=toy.model_copy(update={"gate": "softmax"})).double()
# x = torch.randn(64, 32, dtype=torch.float64)
# result = compute_softmax_gates(x, softmax.attention.gate.weight)
# check_equal("softmax gates", result, softmax.attention.compute_gates(x[None])[0])
# ```
#
# </details>
#
# **3. The printed formula.** For how many of the 64 queries does the formula of equation 9 as printed select other blocks
# than the corrected one?
#
# <details><summary>Solution</summary>
#
# ```python
# heads_of_group = q.shape[1] // G
# scores = torch.einsum("thd,ihd->thi", q, expand_groups(k_cmp, q.shape[1])) / math.sqrt(q.shape[-1])
# p = torch.where(get_visible_mask(64, toy), scores - lse_cmp[..., None], -math.inf).exp()
# p = p.unflatten(1, (G, heads_of_group)).sum(2)
# printed = p @ compute_equation_nine(len(k_cmp), 8, toy, as_printed=True).double()
# differs = (select_by_importance(printed, toy) != selected).any(-1).any(-1)
# print(int(differs.sum()))
# ```
#
# It prints 21. Before token 32 there are at most four candidates, so only the last 32 queries can differ.
#
# </details>
#
# ## 16 · Summary
#
# | step | equation | function | typical bug |
# |---|---|---|---|
# | compression | 7 | one compressed key per $d$ tokens | an incomplete block is read |
# | compressed attention | 8 | an overview, and the weights $p$ | future blocks in the denominator |
# | importance | 9, 10 | sums $p$ per selection block over the heads of a group | the neighbor block (eq. 9 as printed) |
# | selection | 11 | the best blocks, three of them forced | the query's own block is missing |
# | selected attention | 12 | the selected tokens in full detail | no causal mask inside a block |
# | window | – | the $w$ latest tokens | one key too many or too few |
# | gate | 5 | weights the three outputs | a gate that never changes |
#
# **What to take away**
#
# * All three branches are one formula, attention over a set of keys. NSA determines *which* set.
# * One query reads $T/d + n_{sel}\,l_{sel} + w$ keys. Only the first term grows with the text.
# * Blocks are selected per group of heads and as a whole, because a GPU reads contiguous memory at full speed.
# * A compressed key over many tokens misses a single relevant token. Training does not correct this, because no gradient
#   flows through the selection.
# * The 40 lines build full $T \times T$ matrices and are slow. Fast kernels never build them, and tests compare the
#   kernels with code like this.
#
# **Next.** [02_in_practice](02_in_practice.ipynb) applies this layer to documents and real text, and teaches the
# selection with its own loss. [03_kernel_parity](03_kernel_parity.ipynb) compares every fast implementation with the
# definition.
