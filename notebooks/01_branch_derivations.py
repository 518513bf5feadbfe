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
# You know attention: every token compares itself with every token before it. Native Sparse Attention (NSA,
# [arXiv 2502.11089](https://arxiv.org/abs/2502.11089)) reads far fewer of them, and learns which. This notebook builds it
# from nothing: an equation of the paper, some ten lines of code for it, and under each a cell that holds these lines
# against the library, to twelve digits (six where the library ranks in float32). Then the whole of NSA in 40 lines,
# equal to the library's layer in float64, and
# last what the paper leaves open: how the choice is taught to find.
#
# The sections follow the paper's equations, 1 to 12. Six times you are asked to **predict** what the next cell shows:
# write your guess down, run the cell, open the answer. Cells marked `NBVAL_CHECK_OUTPUT` print numbers that are exact;
# continuous integration compares them character by character. All of it takes well under a minute on a CPU.

# %% tags=["parameters"]
length: int = 2048  # tokens (characters) of the real text, at most 2,048
query: int = 1900  # position of the query whose reads are shown, below length
widgets: bool | None = None  # True or False; None: controls only where a Jupyter front end has this notebook open

# %%
import math

import torch
from torch import Tensor

from nsa_lab import NSAttention, figures, load_model
from nsa_lab.attention import dense_attention, geometry, nsa_attention, reference, select_blocks, selection_loss
from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.figures.blocks import compute_equation_nine
from nsa_lab.workbook import examples
from nsa_lab.workbook.display import show_figure, show_folded
from nsa_lab.workbook.query_attention import compute_reads
from nsa_lab.workbook.query_explorer import explore_query

# %% [markdown]
# ## 1 · Why: three numbers
#
# Dense attention reads everything. For the last token of a long text that costs, each time:
#
# 1. **Comparisons.** As many as there are tokens before it. Added up over all tokens that is a square: a text twice as
#    long takes four times the work.
# 2. **Memory traffic.** A model that writes a text keeps the keys and values of all tokens so far, its *cache*, and
#    reads the whole of it again for every new token. That, and not arithmetic, is what generation waits for.
#
# Reading a few well-chosen tokens would cut both. But a GPU moves memory in long rows and multiplies in tiles of some
# 64 by 64, and a thousand tokens picked one by one are neither; and whoever wants the best *tokens* has to score all of
# them first, which is half of dense attention. Hence
#
# 3. **Blocks.** NSA chooses whole blocks of neighbours, by scores of summaries. One block is one row of memory and one
#    tile.

# %%
# NBVAL_CHECK_OUTPUT
usual, model, tokens = NSAConfig(), ModelConfig(), 65_536  # the usual block sizes; 12 layers, 2 groups, heads 64 wide
reads = geometry.decode_reads(tokens, usual)  # keys that the last token reads, by branch
read = sum(reads.values())
key_bytes = 2 * model.d_k  # one key in bfloat16
token_bytes = model.n_layers * model.n_kv_groups * 2 * key_bytes  # a key and a value in each group of each layer
print(f"1. comparisons: {tokens:,} keys for the last of {tokens:,} tokens; NSA {read:,}, {tokens / read:.1f} times fewer")
print(f"2. traffic: {token_bytes * tokens / 1e6:,.0f} MB of cache for one new token; NSA {token_bytes * read / 1e6:.0f} MB")
print(
    f"3. blocks: {reads['sel']:,} chosen tokens are {usual.n_sel} rows of {usual.l_sel * key_bytes:,} bytes, "
    f"not {reads['sel']:,} of {key_bytes}; {reads['cmp']:,} scores choose them, not {tokens:,}"
)
first = next(T for T in range(1, tokens) if sum(geometry.decode_reads(T, usual).values()) < T)
print(f"NSA reads fewer keys than dense attention in texts of {first:,} tokens and more")

# %%
show_figure(figures.plot_reads_by_length([2**k for k in range(5, 17)], usual))

# %% [markdown]
# **What to notice.** The black line crosses the dashed one at some 1,600 tokens. From there on only the overview (blue)
# still gets longer, by one key for every 16 tokens. In shorter texts NSA reads *more* than dense attention; it is made
# for long ones. The *reads* get fewer, not what is kept: any token may be chosen later, so the cache holds all of
# them.
#
# ## 2 · The whole of it in one picture
#
# Three branches look at the past side by side, and a gate mixes what they bring home:
#
# | branch | in the code | reads | for |
# |---|---|---|---|
# | **compressed** | `cmp` | one summary for every $d$ tokens of the past | an overview of everything |
# | **selected** | `sel` | $n_{sel}$ blocks of $l_{sel}$ tokens, chosen by the first branch | what matters, in full |
# | **window** | `win` | the $w$ latest tokens | what is near |
#
# The picture shows them for one query of a **toy**: 64 tokens of independent normal numbers, with blocks small enough to
# draw. There is nothing to find in random numbers, which is what one wants for checking formulas.

# %%
toy = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=12)
example = examples.make_random_example(64, heads=4, groups=2, head_dim=8)
show_figure(figures.plot_architecture(compute_reads(example, toy, position=57, group=0)))

# %% [markdown]
# **What to notice.** The compressed branch does two jobs: its output is one part of the answer, and its weights say
# which blocks the selected branch reads. Of the four chosen blocks three are given (the first, the query's own and the
# one before), so here a single block is chosen freely, the highest bar among the others.
#
# **Letters**, as in the paper where it has one. Positions $t$, $s$ and blocks $i$, $j$ count from 0.
#
# | | | in the toy | usually |
# |---|---|---|---|
# | $T$ | tokens | 64 | |
# | $H$, $G$, $h = H/G$ | query heads; groups of heads that share keys and values; heads per group | 4, 2, 2 | 12, 2, 6 |
# | $D$ | width of a head (the paper: $d_k$) | 8 | 64 |
# | $l$, $d$ | length of a compression block; *stride*, from the start of one to the next | 8, 4 | 32, 16 |
# | $l_{sel}$, $n_{sel}$ | length of a selection block (the paper: $l'$); how many a query reads ($n$) | 8, 4 | 64, 16 |
# | $w$ | tokens of the window | 12 | 512 |
#
# The library's tensors have a batch in front, `[B, T, H, D]`; the code here is for one text and leaves it out. To compare,
# `same` stops the notebook where two results differ by more than $10^{-12}$.


# %%
def same(what: str, here: Tensor, library: Tensor, to: float = 1e-12) -> None:
    """Stop unless the two agree; say so if they do."""
    torch.testing.assert_close(here, library, rtol=0, atol=to)
    print(f"{what} {list(here.shape)}: the library's, to {to:g}")


# %%
# NBVAL_CHECK_OUTPUT
q, k_sel, v_sel, k_win, v_win = (x[0] for x in (example.q, example.k_sel, example.v_sel, example.k_win, example.v_win))
T, H, G = len(q), q.shape[1], k_sel.shape[1]
print(f"queries [T, H, D] = {list(q.shape)}, keys and values of each branch [T, G, D] = {list(k_sel.shape)}, {q.dtype}")

# %% [markdown]
# ## 3 · Dense attention, groups of heads, and the LSE (eq. 1, 2)
#
# $$o_t = \sum_{s \le t} p_{t,s}\, v_s$$
#
# $$p_{t,s} = \frac{\exp\big(q_t \cdot k_s / \sqrt D\big)}{\sum_{s' \le t} \exp\big(q_t \cdot k_{s'} / \sqrt D\big)}$$
#
# Every branch of NSA is this formula with another set of keys. So one function serves them all: it takes a table `allowed`
# that says which query may read which key.
#
# **Groups of heads.** A layer has $H$ query heads, but only $G$ sets of keys and values: head $n$ reads those of group
# $\lfloor n / h \rfloor$ (*grouped-query attention*). The cache is $h$ times smaller for it. For NSA it matters once
# more: heads that share keys also share the *choice* of blocks, so that a block is fetched once for all $h$ of them.
# `spread` repeats what a group owns for each of its heads.
#
# **LSE.** The logarithm of the sum in the denominator, $L_t = \log \sum_s \exp(q_t \cdot k_s / \sqrt D)$
# (*log-sum-exp*), is one number per query and head, and with it any single weight can be had later:
# $p_{t,s} = \exp(q_t \cdot k_s/\sqrt D - L_t)$. Fast kernels never store the table $p$; they return $L$ beside the
# output, and NSA ranks its blocks from that.


# %% tags=["lesson"]
def spread(x: Tensor, heads: int) -> Tensor:
    """One row per group becomes one per head: [., 1 or G, .] -> [., heads, .]."""
    return x.repeat_interleave(heads // x.shape[1], dim=1)


Attended = tuple[Tensor, Tensor]  # an output [T, H, D] and its LSE [T, H]


def attend(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Attended:
    """q [T, H, D] over k, v [S, G, D], where `allowed` (bool [T, 1 or G, S]) lets it."""
    scores = torch.einsum("thd,shd->ths", q, spread(k, q.shape[1])) / math.sqrt(q.shape[-1])
    allowed = spread(allowed, q.shape[1])
    p = scores.masked_fill(~allowed, -1e9).softmax(-1) * allowed  # nothing to read: zeros, no NaN
    lse = scores.masked_fill(~allowed, -math.inf).logsumexp(-1)  # nothing to read: the log of 0
    return torch.einsum("ths,shd->thd", p, spread(v, q.shape[1])), lse


t, s = torch.arange(T)[:, None], torch.arange(T)  # queries in rows, tokens in columns
causal = (s <= t)[:, None]  # [T, 1, T]: the same for every head

# %%
# NBVAL_CHECK_OUTPUT
dense, lse = attend(q, k_sel, v_sel, causal)
same("dense attention", dense, dense_attention(example.q, example.k_sel, example.v_sel)[0])

# What the LSE is good for: attention over two halves of the keys, put together again.
old, young = (attend(q, k_sel, v_sel, causal & half) for half in (s < 32, s >= 32))
joined = sum(out * torch.exp(part - lse)[..., None] for out, part in (old, young))
print("two halves, each weighted by exp(its LSE - the whole LSE), make the whole:", torch.allclose(joined, dense))

# %% [markdown]
# ## 4 · The frame: a gated sum (eq. 3 to 6)
#
# Equations 3 and 4 say in general: replace the keys and values by fewer, and attend to those. Equation 5 does it in
# three ways at once, with a gate for each:
#
# $$o_t = g^{cmp}_t\, o^{cmp}_t + g^{sel}_t\, o^{sel}_t + g^{win}_t\, o^{win}_t$$
#
# $$g_t = \sigma(W_g\, x_t)$$
#
# and equation 6 counts: the keys read at $t$ are those of the three branches together, and they should be far fewer
# than $t$. $x_t$ is the token's vector as it enters the layer, $\sigma$ the sigmoid; every head has three gates of its
# own. Sigmoids do not compete: all three branches may be open, or all shut (`gate: softmax` makes them share).
#
# The paper makes the gates by an MLP and a sigmoid, and gives no size for the MLP. Here it is **one linear layer** and a
# sigmoid: enough for a gate to depend on the token, and no hidden layer that could start dead and pass on no gradient.
# What an MLP would add has not been measured here. Each branch has keys and values of its own, so that the easy one (the
# window, which learns fastest) cannot bend those of the others to its needs.


# %% tags=["lesson"]
def gates_of(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, C], weight [3H, C] -> gates [T, H, 3], in the order compressed, selected, window."""
    return torch.sigmoid(x @ weight.T).unflatten(-1, (-1, 3))


def gated_sum(outputs: tuple[Tensor, ...], gates: Tensor) -> Tensor:
    """Three outputs [T, H, D] and their gates [T, H, 3] -> [T, H, D] (eq. 5)."""
    return sum(gates[..., n, None] * output for n, output in enumerate(outputs))


# %%
# NBVAL_CHECK_OUTPUT
layer = NSAttention(32, 4, 2, nsa=toy).double()  # a layer of the library, 32 wide, 4 heads in 2 groups
x = torch.randn(T, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
gates = gates_of(x, layer.attention.gate.weight).detach()
same("gates", gates, layer.attention.compute_gates(x[None])[0].detach())
three = (q, dense, dense - q)  # any three outputs will do here
same("gated sum", gated_sum(three, gates), reference.combine(*(out[None] for out in three), gates[None])[0])

# %% [markdown]
# ## 5 · Compression (eq. 7)
#
# $$\tilde k_i = \varphi\big(k_{id},\, \dots,\, k_{id+l-1}\big)$$
#
# for the blocks $i = 0, \dots, N-1$, where
#
# $$N = \begin{cases}0 & T < l\\ \lfloor (T-l)/d \rfloor + 1 & \text{otherwise}\end{cases}$$
#
# Block $i$ begins at token $i\,d$ and is $l$ tokens long; since $d < l$, neighbours overlap. $\varphi$ turns a block of
# keys into one key, and likewise for values. Here it is the mean (`phi: avg`); the paper has an MLP that also sees the
# position inside the block (`phi: mlp`). Here keys carry their rotary angle (the
# model's encoding of position) *before* they are averaged.
#
# All of NSA's bookkeeping is about which token lies in which block. One function says it, for both kinds of block:


# %% tags=["lesson"]
def inside(starts: Tensor, size: int, T: int) -> Tensor:
    """Which of T tokens lie in the blocks of `size` that begin at `starts`: bool [blocks, T]."""
    s = torch.arange(T)
    return (s >= starts[:, None]) & (s < starts[:, None] + size)


def compression_starts(T: int, nsa: NSAConfig) -> Tensor:
    """The first token of every whole compression block, [N]."""
    return torch.arange(0, max(T - nsa.l + 1, 0), nsa.d)


def compress(x: Tensor, nsa: NSAConfig) -> Tensor:
    """The mean of every compression block (eq. 7): x [T, G, D] -> [N, G, D]."""
    members = inside(compression_starts(len(x), nsa), nsa.l, len(x)).to(x.dtype)
    return torch.einsum("is,sgd->igd", members / nsa.l, x)


# %%
# NBVAL_CHECK_OUTPUT
k_cmp, v_cmp = compress(example.k_cmp[0], toy), compress(example.v_cmp[0], toy)
same("compressed keys", k_cmp, reference.compress(example.k_cmp, toy)[0])
same("compressed values", v_cmp, reference.compress(example.v_cmp, toy)[0])
members = inside(compression_starts(T, toy), toy.l, T)
print(f"N = {len(members)} blocks; block 3 is tokens {members[3].nonzero()[:, 0].tolist()}")

# %%
show_figure(figures.plot_block_geometry(64, toy, position=41))

# %% [markdown]
# **What to notice.** Compression blocks (blue) overlap, selection blocks (orange) tile the text, the window (green)
# moves with the query. A compression block may be read once it is *whole*: what is averaged cannot be unmixed, so a
# block that reaches into the future is left out. A selection block may be chosen once it has *begun*: inside it the
# ordinary causal rule holds.
#
# ### Predict 1
#
# The picture is of query 41. How many compression blocks may query 50 of the toy read ($l = 8$, $d = 4$)? And which is the
# first query that may read any?

# %%
blocks_seen = [int(geometry.visible_compressed(torch.tensor(position), toy)) for position in range(T)]
show_folded(
    "What comes out", f"query 50 reads {blocks_seen[50]} blocks; the first that reads any is query {blocks_seen.index(1)}"
)

# %% [markdown]
# <details><summary>Why</summary>
# <p>Block $i$ ends at token $i\,d + l - 1 = 4i + 7$. Blocks 0 to 10 end at 47 or before, block 11 at 51: eleven blocks.
# Block 0 ends at token 7, and the query at 7 is the first that may read it. Queries 0 to 6 read nothing in this branch:
# output 0, LSE $-\infty$.</p>
# </details>
#
# ## 6 · Attention over the summaries (eq. 8)
#
# $$p_{t,i} = \operatorname{softmax}_i\!\Big(\tfrac{1}{\sqrt{D}}\, q_t \cdot \tilde k_i\Big)$$
#
# $$o^{cmp}_t = \sum_i p_{t,i}\,\tilde v_i$$
#
# *Over the blocks that $t$ may read, only*: those that are whole, $i\,d + l - 1 \le t$. It matters twice: for causality
# here, and once more because $p$ is used again to rank blocks. A sum over blocks of the future in the denominator would
# change the past whenever the future changes.


# %% tags=["lesson"]
def may_read(T: int, nsa: NSAConfig) -> Tensor:
    """Bool [T, 1, N]: compression blocks that are whole at t."""
    return (compression_starts(T, nsa) + nsa.l - 1 <= torch.arange(T)[:, None])[:, None]


def compressed_attention(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, nsa: NSAConfig) -> Attended:
    """q [T, H, D] over the compressed keys and values [N, G, D] (eq. 8)."""
    return attend(q, k_cmp, v_cmp, may_read(len(q), nsa))


# %%
# NBVAL_CHECK_OUTPUT
out_cmp, lse_cmp = compressed_attention(q, k_cmp, v_cmp, toy)
out, lse = reference.compressed_attention(example.q, k_cmp[None], v_cmp[None], toy)
same("output of the compressed branch", out_cmp, out[0])
same("its LSE", lse_cmp, lse[0])
print("query 6 reads nothing: output all zero:", not out_cmp[6].any().item(), "and LSE =", lse_cmp[6, 0].item())

# %%
show_figure(figures.plot_visible_blocks(64, toy))

# %% [markdown]
# **What to notice.** The staircase climbs one block every $d = 4$ queries, and begins $l - 1 = 7$ tokens late.
#
# ## 7 · How important is a block? (eq. 9, 10)
#
# Selection blocks are ranked by the attention that the summaries of their tokens got. A summary gives its weight to every
# selection block with which it shares tokens, once for each stride of $d$ tokens that they share:
#
# $$p^{slc}_t[j] = \sum_i p_{t,i}\,\frac{s_{ij}}{d}$$
#
# $$s_{ij} = \big|[id,\, id+l) \cap [j\,l_{sel},\, (j+1)\,l_{sel})\big|$$
#
# $$p^{slc\,\prime}_t[j] = \sum_{\text{heads of the group}} p^{slc}_t[j]$$
#
# (*slc* is the paper's word for selected; $s_{ij}$ counts the tokens that the blocks $i$ and $j$ share.) The last one is
# equation 10: heads of a group choose together, so their importances are added.
#
# **An erratum.** The paper writes the first one, equation 9, as a double sum,
#
# $$p^{slc}_t[j] = \sum_{m=0}^{l'/d - 1}\; \sum_{n=0}^{l/d - 1} p^{cmp}_t\Big[\tfrac{l'}{d}\, j - m - n\Big].$$
#
# Equations 7 and 12 count blocks from 0. Counted so, the printed sum takes its summaries $l'/d - 1$ strides too early:
# block 0 would collect $p[0]$ alone, and every block is ranked by what lies mostly *before* it. What is meant is
# $p^{cmp}_t\big[\tfrac{l'}{d}\, j + m - n\big]$, which is the number of shared strides above, for all sizes. A public
# port of NSA has followed the print to the letter. Nothing crashes, and the loss still falls; the query just reads the
# neighbour of the block it was looking for.
#
# In code the sum is a product of two tables: tokens of compression blocks times tokens of selection blocks.


# %% tags=["lesson"]
def block_importance(q: Tensor, k_cmp: Tensor, lse: Tensor, nsa: NSAConfig) -> Tensor:
    """Importance of each selection block to each query and group, [T, G, blocks] (eq. 8 to 10)."""
    T, H, G = len(q), q.shape[1], k_cmp.shape[1]
    scores = torch.einsum("thd,ihd->thi", q, spread(k_cmp, H)) / math.sqrt(q.shape[-1])
    p = torch.where(may_read(T, nsa), scores - lse[..., None], -math.inf).exp()  # eq. 8
    compression = inside(compression_starts(T, nsa), nsa.l, T).to(p.dtype)
    selection = inside(torch.arange(0, T, nsa.l_sel), nsa.l_sel, T).to(p.dtype)
    shared = compression @ selection.T / nsa.d  # [N, blocks]: strides that two blocks share, eq. 9
    return p.unflatten(1, (G, H // G)).sum(2) @ shared  # the heads of a group added, eq. 10


# %%
# NBVAL_CHECK_OUTPUT
importance = block_importance(q, k_cmp, lse_cmp, toy)
library = reference.block_importance(example.q, k_cmp[None], lse_cmp[None], toy)[0]
same("importance", importance, library.double(), to=1e-6)  # the library's is in float32, as the ranking is
for sizes in ({}, {"l": 8, "d": 4, "l_sel": 16}, {"l": 16, "d": 16, "l_sel": 32}, {"l": 64, "d": 16, "l_sel": 32}):
    nsa = NSAConfig(**sizes)
    shared = geometry.overlap(40, 10, nsa)
    mended, printed = (torch.equal(compute_equation_nine(40, 10, nsa, as_printed=which), shared) for which in (False, True))
    weights = shared[:, 5][shared[:, 5] > 0].int().tolist()
    agrees = f"eq. 9 agrees mended: {mended}, as printed: {printed}"
    print(f"l, d, l_sel = {nsa.l}, {nsa.d}, {nsa.l_sel}: weights {weights}; {agrees}")

# %%
show_figure(figures.plot_overlap_weights(NSAConfig(), n_compressed=12, n_selection=3))

# %% [markdown]
# **What to notice.** In the first picture, block $j = 1$ collects the summaries 3 to 7, which are those that touch its
# tokens 64 to 127: inner ones twice, the two at its edges once. In the second, as printed, the same five weights sit
# three columns too far left.
#
# ### Predict 2
#
# The usual sizes (32, 16, 64). One token, number 350, has a key that query 700 matches perfectly. It lies in selection
# block $\lfloor 350/64 \rfloor = 5$. Which block gets the highest importance, and which as printed?

# %%
found = torch.zeros(1, 1024, 1, 16, dtype=torch.float64)
found[0, 350] = 40.0
needle = torch.zeros(1, 1024, 1, 16, dtype=torch.float64)
needle[0, 700] = 1.0
summaries = reference.compress(found, usual)
p = torch.softmax(needle[0, 700, 0] @ summaries[0, :, 0].T / 4, -1)[: geometry.visible_compressed(torch.tensor(700), usual)]
ranked = {
    which: int((p.float() @ compute_equation_nine(len(p), 11, usual, as_printed=which)).argmax()) for which in (False, True)
}
show_folded("What comes out", f"mended: block {ranked[False]}; as printed: block {ranked[True]}")

# %% [markdown]
# <details><summary>Why</summary>
# <p>Token 350 lies in the summaries $i = 20$ (tokens 320 to 351) and $i = 21$ (336 to 367), so these two hold all the
# weight. Rightly read, they belong to block 5, which begins with summary $4 \cdot 5 = 20$. As printed, block $j$
# collects the summaries $4j - 4$ to $4j$: for $j = 5$ that is 16 to 20 with the weight 1 for the last of them, for
# $j = 6$ it is 20 to 24, with both. So block 6 wins, and the query reads tokens 384 to 447, past what it was looking
# for.</p>
# </details>
#
# ## 8 · The choice (eq. 11)
#
# $$\mathcal I_t = \{\, j : \operatorname{rank}\big(p^{slc\,\prime}_t[j]\big) \le n_{sel} \,\}$$
#
# For each query and group, the $n_{sel}$ best blocks, where
#
# * candidates are blocks that have begun, $j\,l_{sel} \le t$;
# * three are **forced**, and count towards $n_{sel}$: the first block (models park attention that they need nowhere on the
#   first tokens, an *attention sink*), the query's own, and the one before it;
# * ties go to the lower index, and the ranking is in float32, so that every implementation chooses alike.
#
# No gradient flows through the choice: a ranking has no slope. What trains the summaries is the branch's own output.


# %% tags=["lesson"]
def choose(importance: Tensor, nsa: NSAConfig) -> Tensor:
    """Importance [T, G, blocks] -> which blocks are read, bool, the same shape (eq. 11)."""
    T, _, blocks = importance.shape
    j, own = torch.arange(blocks), torch.arange(T)[:, None, None] // nsa.l_sel
    forced, begun = (j == 0) | (j == own) | (j == own - 1), j <= own
    rank = importance.float().masked_fill(forced, math.inf).masked_fill(~begun, -math.inf)
    # Stable: ties stay in order.
    best = rank.argsort(dim=-1, descending=True, stable=True)[..., : nsa.n_sel]
    return torch.zeros_like(rank).scatter(-1, best, 1.0).bool() & begun  # early: fewer than n_sel


# %%
# NBVAL_CHECK_OUTPUT
chosen = choose(importance, toy)
listed = reference.select_blocks(example.q, k_cmp[None], lse_cmp[None], toy)  # the library: numbers, then -1
as_table = torch.nn.functional.one_hot(listed[0].long() + 1, chosen.shape[-1] + 1)[..., 1:].any(-2)
print("the same blocks as the library's:", torch.equal(chosen, as_table))
for position in (0, 15, 16, 47, 63):
    of_group = [chosen[position, group].nonzero()[:, 0].tolist() for group in range(G)]
    print(f"query {position:>2}: blocks of group 0 {of_group[0]}, of group 1 {of_group[1]}")

# %%
show_figure(figures.plot_importance(importance[:, 0].float(), listed[0, :, 0], toy, "the toy, group 0"))

# %% [markdown]
# **What to notice.** First the scores, then what becomes of them. The forced blocks are a floor and a diagonal; what is
# left, one place, goes to the brightest of the other candidates. With random numbers it jumps about from query
# to query.
#
# ### Predict 3
#
# All importances are equal. Which four blocks does query 63 of the toy read? And query 15?

# %%
alike = choose(torch.ones(64, 1, 8), toy)
show_folded("What comes out", "\n".join(f"query {p}: {alike[p, 0].nonzero()[:, 0].tolist()}" for p in (63, 15)))

# %% [markdown]
# <details><summary>Why</summary>
# <p>Query 63 lies in block $\lfloor 63/8 \rfloor = 7$: forced are 0, 6 and 7, and the fourth place goes to the lowest
# index that is left, 1. Query 15 lies in block 1: only blocks 0 and 1 have begun, so it reads two, not four.</p>
# </details>
#
# ## 9 · Selected attention (eq. 12)
#
# $$\tilde K^{sel}_t = \operatorname{Cat}\{ k_s : \lfloor s / l_{sel} \rfloor \in \mathcal I_t,\; s \le t \}$$
#
# The tokens of the chosen blocks, up to the query's own. From here on it is ordinary attention again, over single tokens.


# %% tags=["lesson"]
def selected_attention(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, nsa: NSAConfig) -> Attended:
    """q [T, H, D] over the tokens of the blocks `chosen`, bool [T, G, blocks] (eq. 12)."""
    T = len(q)
    tokens = chosen.repeat_interleave(nsa.l_sel, dim=-1)[..., :T]  # the last may be cut short
    return attend(q, k, v, tokens & (torch.arange(T) <= torch.arange(T)[:, None])[:, None])


# %%
# NBVAL_CHECK_OUTPUT
out_sel, _ = selected_attention(q, k_sel, v_sel, chosen, toy)
same("selected branch", out_sel, reference.selected_attention(example.q, example.k_sel, example.v_sel, listed, toy)[0][0])

# %% [markdown]
# ### Predict 4
#
# How many keys does query 57 read in the selected branch ($l_{sel} = 8$, $n_{sel} = 4$)? Does it depend on *which*
# blocks it chose?

# %%
counts = (chosen.repeat_interleave(8, -1) & causal).sum(-1)  # [T, G]
formula = geometry.selected_keys(57, toy)
show_folded(
    "What comes out",
    f"query 57 reads {counts[57].tolist()} keys in its two groups; the formula without a choice: {formula}",
)

# %% [markdown]
# <details><summary>Why</summary>
# <p>Token 57 is the second of block 7 (tokens 56 to 63). Its own block is always chosen and gives 2 keys, the three others
# are whole and give 8 each: 26. It does not depend on the choice, because the only block that can be cut short is
# always in. In general $\min\big(\lfloor t/l_{sel} \rfloor,\, n_{sel}-1\big)\,l_{sel} + (t \bmod l_{sel}) + 1$. A
# program that reports another number reads other tokens; that is how a bug in an earlier implementation was found
# (notebook 05, at its end).</p>
# </details>
#
# ## 10 · The window (section 3.3.3)
#
# The $w$ latest tokens, $t$ included: exactly $\min(w, t+1)$ keys. A library whose window counts the keys to the *left*
# of the query wants $w - 1$ (and the paper's $k_{t-w:t}$, counted as its eq. 7 counts, would be $w + 1$). The window
# has a branch of its own so that the other two need not learn what is near.


# %% tags=["lesson"]
def window_attention(q: Tensor, k: Tensor, v: Tensor, nsa: NSAConfig) -> Attended:
    """q [T, H, D] over the w latest of k, v [T, G, D]."""
    t, s = torch.arange(len(q))[:, None], torch.arange(len(q))
    return attend(q, k, v, ((s <= t) & (s > t - nsa.w))[:, None])


# %%
# NBVAL_CHECK_OUTPUT
out_win, _ = window_attention(q, k_win, v_win, toy)
same("window branch", out_win, reference.window_attention(example.q, example.k_win, example.v_win, toy)[0][0])

# %%
show_figure(figures.plot_branch_masks(listed[0, :, 0], toy))

# %% [markdown]
# **What to notice.** Three pictures with gaps take the place of one full triangle. The staircase of the compressed branch
# is narrow because a column is a block, not a token. The selected branch is full for the first 32 queries, which have no
# more than $n_{sel} = 4$ blocks to choose from; below them gaps appear, a block wide. The pairs add up to *more*
# than dense attention's: 64 tokens are still a short text, as the first picture said. What counts is the shape: with the
# length, the triangle grows as a square, the selected branch and the window as bands.
#
# ## 11 · All of it together (eq. 5)

# %%
# NBVAL_CHECK_OUTPUT
mixed = gated_sum((out_cmp, out_sel, out_win), gates)
branches = (example.q, k_cmp[None], v_cmp[None], example.k_sel, example.v_sel, example.k_win, example.v_win, gates[None])
for backend in ("reference", "torch"):
    same(f"NSA, backend {backend}", mixed, nsa_attention(*branches, toy, backend=backend)[0])

# %% [markdown]
# ### Causal, bit for bit
#
# Change every token after 40 and look at the outputs up to 40. "Close" would not do: a choice of blocks that peeks into the
# future shows as a tiny difference first.

# %%
# NBVAL_CHECK_OUTPUT
torch.manual_seed(2)
inputs = (example.q, example.k_cmp, example.v_cmp, example.k_sel, example.v_sel, example.k_win, example.v_win)
q2, k_cmp2, v_cmp2, *others = (torch.where((s > 40)[None, :, None, None], torch.randn_like(one), one) for one in inputs)
compressed = (compress(k_cmp2[0], toy)[None], compress(v_cmp2[0], toy)[None])
after = nsa_attention(q2, *compressed, *others, gates[None], toy, backend="reference")[0]
before = nsa_attention(*branches, toy, backend="reference")[0]
print("outputs at t <= 40 unchanged, bit for bit:", torch.equal(before[:41], after[:41]))
print("outputs at t > 40 changed:", not torch.equal(before[41:], after[41:]))

# %% [markdown]
# ## 12 · Why short sequences are dense
#
# Where there are no more than $n_{sel}$ blocks, all of them are chosen, and the selected branch **is** dense causal
# attention.
#
# ### Predict 5
#
# The usual sizes: $l_{sel} = 64$, $n_{sel} = 16$. For how many queries does the selected branch differ from dense
# attention in a text of 1,024 tokens, of 1,025, and of 1,200?

# %%
lines = []
for T_short in (1024, 1025, 1200):
    one = examples.make_random_example(T_short, heads=2, groups=1, head_dim=16, seed=3)
    summaries = reference.compress(one.k_cmp, usual)
    _, score = reference.compressed_attention(one.q, summaries, summaries, usual)
    sparse, _ = reference.selected_attention(
        one.q, one.k_sel, one.v_sel, select_blocks(one.q, summaries, score, usual), usual
    )
    differs = (sparse - dense_attention(one.q, one.k_sel, one.v_sel)).abs().amax((0, 2, 3)) > 1e-9
    lines.append(f"T = {T_short:,}: {int(differs.sum())} queries differ from dense attention")
show_folded("What comes out", "\n".join(lines))

# %% [markdown]
# <details><summary>Why</summary>
# <p>$n_{sel} \cdot l_{sel} = 1{,}024$. Up to query 1,023 there are at most 16 blocks, and every candidate is chosen. Query
# 1,024 opens the 17th block and is the first that has to leave one out: 0, then 1, then 176. A comparison of speed or
# quality at shorter lengths compares dense attention with dense attention plus overhead.</p>
# </details>
#
# ## 13 · Documents in one row
#
# A training row holds several documents, one after another. Read as one text, a query near the beginning of a document
# reads the one before it, in all three branches. Told apart (`data.documents: mask`, `Span.packed` in the library),
# positions, blocks and window begin anew with each document: a query reads exactly what it would read if its document
# were alone.

# %%
border, t = 26, 36
alone = example.slice_document(border, 64)
show_figure(
    figures.plot_document_boundaries(compute_reads(example, toy, t), compute_reads(alone, toy, t - border), [0, border, 64])
)

# %% [markdown]
# **What to notice.** Above, every branch of the query reaches across the border; the compressed summaries that span it
# are of both documents at once. Below, blocks are counted from the border on, and none spans it.
#
# ## 14 · A real text
#
# 2,048 characters of Python's own `textwrap` module, with the usual sizes. The heads are **made by hand, not trained**:
# the query at $t$ encodes the last few characters, the key at $s$ the characters before $s$, so that a query looks for
# what came after passages like the present one (trained models grow such *induction heads*). Group 0 looks 4 characters
# back, group 1 looks 12. All branches share keys and values here, so that their reads can be compared.

# %%
text = examples.make_text_example(examples.read_standard_library(length))
text_k, text_v = reference.compress(text.k_cmp, usual), reference.compress(text.v_cmp, usual)
_, text_lse = reference.compressed_attention(text.q, text_k, text_v, usual)
text_importance = reference.block_importance(text.q, text_k, text_lse, usual)
text_blocks = select_blocks(text.q, text_k, text_lse, usual)
show_figure(figures.plot_importance(text_importance[0, :, 1], text_blocks[0, :, 1], usual, "real text, group 1"))

# %% [markdown]
# **What to notice.** Up to $t = 1{,}023$ everything is chosen, as predicted; then the grey of blocks that are passed over
# sets in, and takes up more and more: 13 free places, ever more candidates. The staircase and the floor are the forced
# blocks. Look closely at those chosen by score: neighbouring queries look for different passages, and so hand-made
# heads choose anew at almost every character. What trained heads do with their freedom, notebook 05 shows of any run.
#
# ## 15 · The explorer
#
# The same text, read by a **trained** model: `needle-8m`, which ships with the library (its
# [card](../nsa_lab/models/needle-8m/README.md) has data and limits). Its branches have keys and values of their own,
# and its blocks are chosen by an indexer (section 17), not by the compressed scores of the first lane. Move the query,
# change layer, group and sizes: which tokens does each branch read, with what weight, and what do the chosen blocks
# say? (It was trained with the sizes that it starts with. In a headless run the same picture is drawn once, without
# controls.)

# %%
shipped = load_model("needle-8m")
read_by_it = examples.make_byte_examples(
    shipped, examples.read_standard_library(length).encode(), "needle-8m on textwrap.py"
)
explore_query(
    read_by_it, shipped.config.nsa, min(query, length - 1), layer=shipped.config.n_layers // 2, use_widgets=widgets
)

# %% [markdown]
# **What to notice.** The second row is not the first one added up by blocks, as it was in sections 7 and 14: in this
# model an indexer's own keys score the blocks (section 17). A tall narrow spike in the third is a token
# that the summaries only hinted at, and that the selected branch found in full. Where the window (green) covers a
# selected block, both read it.
#
# ## 16 · NSA from scratch in 40 lines
#
# Everything above without the library, and what was still missing: the projections that make queries, keys and values,
# and their rotary angles. `weights` are three matrices: `qkv` (queries, then keys of the three branches, then their
# values), `gate`, `out`.

# %% tags=["lesson"]
import torch
from torch import arange, einsum


def rotate(x):  # [T, heads, D]: the pair (i, i + D/2) turns by the angle t * 10000^(-2i/D)
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
    # Which token lies in which compression and selection block: [N, T] and [blocks, T].
    first, j = arange(0, max(T - l + 1, 0), d), arange(-(-T // l_sel))
    in_cmp = ((s - first[:, None]) // l == 0).to(x.dtype)
    in_sel = (s // l_sel == j[:, None]).to(x.dtype)
    # Compressed branch.
    k_cmp, v_cmp = (einsum("is,sgd->igd", in_cmp / l, y) for y in (k_cmp, v_cmp))  # eq. 7
    out_cmp, p = attention(q, k_cmp, v_cmp, (first + l - 1 <= t)[:, None])  # eq. 8
    # The choice.
    importance = p.unflatten(1, (G, H // G)).sum(2) @ (in_cmp @ in_sel.T / d)  # eq. 9, 10
    own = t[:, None] // l_sel
    forced, begun = (j == 0) | (j == own) | (j == own - 1), j <= own
    rank = importance.float().masked_fill(forced, torch.inf).masked_fill(~begun, -torch.inf)
    best = rank.argsort(dim=-1, descending=True, stable=True)[..., :n_sel]
    chosen = torch.zeros_like(rank).scatter(-1, best, 1.0).bool() & begun  # eq. 11
    # Selected branch and window.
    tokens = chosen.repeat_interleave(l_sel, dim=-1)[..., :T] & (s <= t)[:, None]
    out_sel, _ = attention(q, k_sel, v_sel, tokens)  # eq. 12
    out_win, _ = attention(q, k_win, v_win, ((s <= t) & (s > t - w))[:, None])
    gates = torch.sigmoid(x @ weights["gate"].T).unflatten(-1, (H, 3, 1))
    branches = zip(gates.unbind(2), (out_cmp, out_sel, out_win), strict=True)
    mixed = sum(gate * out for gate, out in branches)  # eq. 5
    return mixed.flatten(1) @ weights["out"].T


# %% [markdown]
# Beside the library's layer with the same weights: outputs, and the gradients of the input and of every weight, in
# float64. The lengths are a single token, less than one block, the toy's 64, an odd one, and one past the 1,024 tokens
# up to which the usual sizes are dense.

# %%
# NBVAL_CHECK_OUTPUT
torch.manual_seed(3)
for T_here, nsa in ((1, toy), (7, toy), (64, toy), (203, toy), (1100, usual)):
    layer = NSAttention(32, 4, 2, nsa=nsa).double()
    weights = {name.split(".")[1]: weight for name, weight in layer.named_parameters()}
    x = torch.randn(T_here, 32, dtype=torch.float64, requires_grad=True)
    sizes = nsa.model_dump(include={"l", "d", "l_sel", "n_sel", "w"})
    pair = (native_sparse_attention(x, weights, 4, 2, **sizes), layer(x[None])[0])
    here, library = (torch.autograd.grad(y.square().sum(), (x, *weights.values())) for y in pair)
    torch.testing.assert_close((pair[0], *here), (pair[1], *library), rtol=1e-10, atol=1e-10)
    print(f"T = {T_here:>5,}, l, d, l_sel, n_sel, w = {tuple(sizes.values())}: outputs and all gradients equal to 1e-10")

# %% [markdown]
# ## 17 · Teaching the choice
#
# This step goes beyond the paper. The choice of section 8 rests on the summaries, and a summary is the mean of 32
# keys. Suppose that one token among them is what the query looks for. Its key adds to the score what it would add
# alone, divided by 32; the 31 others add noise. With keys of $D$ independent numbers, means of $n$ of them, the
# needle stands
#
# $$\frac{D / n}{\sqrt{D} / \sqrt{n}} = \sqrt{D/n}$$
#
# deviations above the other blocks: 1.4 for $n = 32$ and $D = 64$, and one block of noise in thirteen stands as high.
# And nobody tells a summary to do better: the choice has no slope, and what trains the summaries is what the
# compressed branch itself brings home. It shows. A model of 78.6 million parameters, trained on text with facts that
# are asked for later, found none of them at any length; its dense twin found every one in 32,768 bytes.
#
# Four things together mend it:
#
# 1. **An indexer.** A query and a key per group that serve the choice alone, and a key for every 2 tokens
#    (`indexer_block`).
# 2. **The selection loss.** It tells the indexer where the selected branch would have looked, could it look
#    everywhere.
# 3. **Matching heads.** Some heads start as ones that copy, so that there is something to look for from the first
#    step.
# 4. **Embeddings that are seen.** Looked up, an embedding has numbers of size .02, and what the first layer adds drowns
#    it; scaled to size 1 (*normed*), every later layer can see which token it stands on (`embedding_norm`).
#
# ### A key for every few tokens
#
# Importance is what it was in section 7, with the indexer's attention $p$ in place of the summaries'. Its blocks lie
# side by side, so each belongs to one selection block and the shares of equation 9 are 0 or 1. Its mean has weights,
# a softmax over the block for every channel; they start equal and may learn to let one token stand out (`score` and
# `place`; without them it is the plain mean).


# %% tags=["lesson"]
def index_importance(
    q: Tensor, k: Tensor, block: int, nsa: NSAConfig, score: Tensor | None = None, place: Tensor | None = None
) -> Tensor:
    """One query and key per group, [T, G, D] each -> importance of each selection block, [T, G, blocks]."""
    whole = len(k) // block  # blocks of `block` tokens; what is left over at the end has no key yet
    tokens = k[: whole * block].unflatten(0, (whole, block))  # [N, block, G, D]
    logits = torch.zeros_like(tokens) if score is None else tokens @ score.T + place.T[:, None]
    keys = (logits.softmax(1) * tokens).sum(1)  # [N, G, D]: one key for every few tokens
    ends = block * torch.arange(1, whole + 1) - 1
    seen = (ends <= torch.arange(len(q))[:, None])[:, None]  # whole at t, as in section 6
    scores = torch.einsum("tgd,igd->tgi", q, keys) / math.sqrt(q.shape[-1])
    p = scores.masked_fill(~seen, -1e9).softmax(-1) * seen
    owner = inside(torch.arange(0, len(q), nsa.l_sel), nsa.l_sel, len(q))[:, ends]  # [blocks, N]
    return p @ owner.to(p.dtype).T


# %% [markdown]
# Beside the library's indexer, with random weights, on the toy: a key for every 2 tokens.

# %%
# NBVAL_CHECK_OUTPUT
torch.manual_seed(4)
taught = NSAttention(32, 4, 2, nsa=toy, rotary_share=0.5, matching_heads=1, indexer_block=2, selection_loss=0.05).double()
layer, indexer = taught.attention, taught.attention.indexer
for weight in indexer.parameters():
    torch.nn.init.normal_(weight)
x = torch.randn(T, 32, dtype=torch.float64)
rotary = taught.compute_rotary(x[None])
index = indexer(x[None], rotary)
own = index_importance(index.q[0], index.k[0], 2, toy, indexer.phi.score, indexer.phi.place)
inputs = layer.project(x[None], rotary)
index_q, index_keys, index_nsa = layer.project_selection_inputs(x[None], inputs, rotary)
_, index_lse = reference.compressed_attention(index_q, index_keys, index_keys, index_nsa)
library = reference.block_importance(index_q, index_keys, index_lse, index_nsa)[0]
# The library's is in float32, as in section 7.
same("importance by the indexer", own.detach(), library.double().detach(), to=1e-6)
listed = layer.observe(x[None], rotary)["blocks"][0]
as_table = torch.nn.functional.one_hot(listed.long() + 1, own.shape[-1] + 1)[..., 1:].any(-2)
print("the same blocks as the layer reads:", torch.equal(choose(own, toy), as_table))

# %% [markdown]
# ### Predict 6
#
# 2,048 tokens with random keys, 64 wide. Each of the last 1,024 queries looks for one token far behind it: it is that
# token's key, times four. There is a single free place, for one of 14 to 29 blocks of 64 tokens. How often is the
# right block chosen if a key stands for 32 tokens, for 8, for 1?

# %%
torch.manual_seed(5)
keys = torch.randn(2048, 1, 64, dtype=torch.float64)
askers = torch.arange(1024, 2048)
wanted = 64 + (torch.rand(1024) * (askers - 256)).long()  # neither in the first block nor near the query
asking = torch.zeros_like(keys).index_put((askers,), 4 * keys[wanted])
narrow, lines = NSAConfig(n_sel=4), []
for block in (32, 8, 1):
    read = choose(index_importance(asking, keys, block, narrow), narrow)[askers, 0, wanted // 64]
    lines.append(f"a key for {block:>2} tokens: {read.double().mean():.0%} found, {math.sqrt(64 / block):.1f} deviations")
show_folded("What comes out", "\n".join(lines))

# %% [markdown]
# <details><summary>Why</summary>
# <p>At 1.4 deviations the right block is seldom the best of some twenty, though more often than the 5 % of a blind
# choice. At 2.8 it often is, and a key of one token cannot be missed. That would be dense attention's scores, all of
# them: 8 tokens to a key are an eighth of that, 2 are half, with one query per group in place of six. Random keys are
# the worst case, since in a text neighbours are alike; but a number in the middle of a page is just such a case.</p>
# </details>
#
# ### The selection loss
#
# $$\mathcal L = -\frac{1}{T\,G} \sum_{t,\,g} \sum_{j \text{ free}} m_{t,j}\, \log c_{t,j}$$
#
# $$c_{t,j} = \frac{I_{t,j}}{\sum_{i \text{ free}} I_{t,i}}$$
#
# $m_{t,j}$ is the attention, a mean over the heads of group $g$, that they would give to the tokens of block $j$ *over the
# whole past*, with the keys of the selected branch; $I$ is the importance. Both have an index $g$ that is left out here.
# Over the free blocks $m$ adds up to less than 1, so that a query that looks elsewhere counts for less. It is a
# cross-entropy, smallest where the choice
# spreads its importance as the branch would its attention. Forced blocks are left out: there is nothing to choose.
# $m$ is a target and carries no gradient, and the indexer reads its input without passing one on. So the loss moves
# the indexer and nothing else. In training 64 queries per sequence are asked, not all.


# %% tags=["lesson"]
def choice_loss(importance: Tensor, q: Tensor, k_sel: Tensor, nsa: NSAConfig) -> Tensor:
    """Importance [T, G, blocks] against the attention of q [T, H, D] over k_sel [T, G, D]: nats per query and group."""
    T, G, blocks = importance.shape
    t, j = torch.arange(T)[:, None], torch.arange(blocks)
    free = ((j > 0) & (j < t // nsa.l_sel - 1))[:, None]  # begun, and not one of the three forced
    scores = torch.einsum("thd,shd->ths", q, spread(k_sel, q.shape[1])) / math.sqrt(q.shape[-1])
    p = scores.masked_fill((torch.arange(T) > t)[:, None], -1e9).softmax(-1)
    tokens = inside(torch.arange(0, T, nsa.l_sel), nsa.l_sel, T).to(p.dtype)
    mass = (p.unflatten(1, (G, -1)).mean(2) @ tokens.T).detach()  # m: over the whole past, a mean over the heads
    importance = importance + 1e-9  # a block may have no key yet, and log 0 has no slope
    share = importance / (importance * free).sum(-1, keepdim=True).clamp_min(1e-9)
    return -(mass * free * share.log()).sum() / (T * G)


# %%
# NBVAL_CHECK_OUTPUT
loss = choice_loss(own, inputs[0][0], inputs[3][0], toy)
library = selection_loss(index_q, index_keys, inputs[3], index_nsa, attention_q=inputs[0], n_queries=None)
same("selection loss", loss, library)
names, weights = zip(*layer.named_parameters(), strict=True)
slopes = [torch.autograd.grad(one, weights, retain_graph=True, allow_unused=True) for one in (loss, library)]
for name, here, there in zip(names, *slopes, strict=True):
    if there is not None:
        same(f"gradient of {name}", here, there)
moved = {name.split(".")[0] for name, slope in zip(names, slopes[1], strict=True) if slope is not None}
print("what else has a gradient:", moved - {"indexer"} or "nothing")

# %% [markdown]
# ### Matching heads
#
# A choice can only learn to find what some head looks for, and copying is found late or never where a blind choice
# shows a query a fraction of the text. So half of the first group's heads start with the keys' own weights for their
# queries, and that group's keys start as those of the token *before* (a convolution of width 2, which may learn
# otherwise). A query then matches the place *after* a token like its own, and reads what came next there. Only half
# of a head's width is rotated (`rotary_share`), so that it knows a token again wherever it stands.

# %%
# NBVAL_CHECK_OUTPUT
torch.manual_seed(6)
sentence = "the quick brown fox; THE JUMPING DOG q"
letters = sorted(set(sentence))
embedded = torch.randn(len(letters), 64, dtype=torch.float64)[[letters.index(letter) for letter in sentence]]
fresh = NSAttention(64, 2, 1, head_dim=64, nsa=toy, rotary_share=0.5, matching_heads=1).double()
heads = fresh.attention.project_heads(embedded[None], fresh.compute_rotary(embedded[None]))
looks = (heads.q[0, -1, 0] @ heads.keys[1][0, :, 0].T).argmax().item()
met, after = sentence[looks - 1], sentence[looks]
print(f"untrained, the matching head at the last {sentence[-1]!r} looks at {after!r}, which came after {met!r}")

# %% [markdown]
# ### What came of it
#
# Trained with all four, NSA with 79.8 million parameters found 800 of 800 facts at each of 2,048, 8,192 and 32,768
# bytes, over four seeds, and 159 of 160 in twice that, a length that no step of its training had shown it. Answers
# beyond the window cost .000 nats per byte, and 3.01 to 4.86 with random blocks in place of the chosen ones. Plain
# text it reads at 1.352 to 1.365 bits per byte (three of the seeds), dense attention of the same start and widths
# (72.4 million parameters) at 1.389, and one of as many parameters at 1.406. NSA leads from the first bytes of a text
# on, where nothing is sparse: so the choice costs no text, and that is all that is found about text.
# [docs/science/retrieval.md][1] says why each is needed, and its log has every row, those that failed among them. The
# presets `smoke` and `recall_taught` train with all four (`smoke` with a key for 8 tokens); a configuration that names
# none is NSA as sections 1 to 16 have it: the paper's, but for φ (a mean) and the gate (one linear layer).
#
# [1]: ../docs/science/retrieval.md
#
# ## 18 · What to take away
#
# | step | equation | what it does | what goes wrong there |
# |---|---|---|---|
# | compress | 7 | a summary for every $d$ tokens | a block read before it is whole |
# | compressed attention | 8 | an overview, and the weights $p$ | future blocks in the denominator |
# | importance | 9, 10 | adds up $p$ per selection block, over a group's heads | the block next door, as eq. 9 is printed |
# | choice | 11 | the best blocks, three of them forced | the query's own block not among them |
# | selected attention | 12 | the chosen tokens, in full | the causal rule forgotten inside a block |
# | window | – | the $w$ latest tokens | one key more or less |
# | gate | 5 | mixes the three | a gate that never moves |
#
# * All three branches are one formula, attention over a set of keys; NSA is about *which* set.
# * One query reads $T/d + n_{sel}\,l_{sel} + w$ keys: only the first term grows.
# * The choice is made per group of heads, in blocks, because that is what a GPU reads at full speed.
# * A choice by means of many keys misses the single token, and nothing in NSA teaches it better; a key for a few
#   tokens and a loss of its own do.
# * The 40 lines form whole tables of $T \times T$ and are slow. What makes NSA fast is never to form them; what keeps
#   the fast code honest is to be held against lines like these.
#
# **Next:** `02_kernel_parity` holds every fast implementation against this definition; `03_smoke_training` trains a model;
# `06_does_selection_find` asks whether a trained choice finds anything.
