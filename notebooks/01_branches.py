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
# This notebook builds NSA from scratch. Each step has an equation of the paper and about ten lines of code. The next
# cell compares these lines with the library, to 12 digits (to 6 where the library computes in float32).
#
# At the end you have NSA in 40 lines, equal to the library's layer in float64. The last part goes beyond the paper: it
# trains the block selection with its own loss.
#
# The sections follow equations 1 to 12 of the paper. Six times, **predict** the output of the next cell: write down
# your guess, run the cell, then open the answer. Cells marked `NBVAL_CHECK_OUTPUT` print exact results, which
# continuous integration compares character by character. The notebook runs in less than a minute on a CPU.

# %% tags=["parameters"]
length: int = 2048  # tokens (characters) of the real text, at most 2,048
query: int = 1900  # position of the query that the explorer shows, below length
use_widgets: object = None  # True or False; None: controls only if a Jupyter front end is open

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
# ## 1 · Why sparse attention: three numbers
#
# Dense attention reads all previous tokens. This costs twice:
#
# 1. **Comparisons.** Each token is compared with all tokens before it. The total grows with the square of the length: a
#    text twice as long needs four times the work.
# 2. **Memory traffic.** A model that generates text stores the keys and values of all previous tokens in its *cache*.
#    It reads the entire cache again for every new token. In long texts this traffic, not arithmetic, limits the speed
#    of generation.
#
# Reading only the relevant tokens would reduce both. But a GPU is fast only on contiguous memory and on matrix tiles of
# about 64 × 64. Scattered single tokens offer neither. To find the best *tokens*, the model would also have to score
# every token, which is half the work of dense attention. This leads to the third number:
#
# 3. **Blocks.** NSA selects whole blocks of neighboring tokens. It scores each block through compressed keys, each of
#    which represents several tokens. One block is contiguous in memory and fills one tile.

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
# Three branches attend to the past in parallel. A gate weights their outputs, which are then added:
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
example = examples.make_random_example(64, heads=4, groups=2, head_dim=8)
show_figure(figures.plot_architecture(compute_reads(example, toy, position=57, group=0)))

# %% [markdown]
# **What to notice.** The compressed branch has two uses. Its output is one of the three terms of the sum, and its
# attention weights determine which blocks the selected branch reads. Three of the four selected blocks are forced, that
# is, always selected: the first block, the query's own block and the one before it. In this toy only one block is
# selected by its score.
#
# **Symbols** follow the paper. Positions $t$, $s$ and block indices $i$, $j$ start at 0.
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
# `check_equal` stops the notebook if two results differ by more than $10^{-12}$.


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
# ## 3 · Dense attention, head groups and LSE (eq. 1, 2)
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
# ## 4 · The gated sum (eq. 3 to 6)
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
# ## 5 · Compression (eq. 7)
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
# <p>Block $i$ ends at token $i\,d + l - 1 = 4i + 7$. Blocks 0 to 10 end at token 47 or earlier, and block 11 ends at
# 51. Query 50 therefore sees eleven blocks. Block 0 ends at token 7, so query 7 is the first that sees a block. Queries
# 0 to 6 see none: their output in this branch is 0 and their LSE is $-\infty$.</p>
# </details>
#
# ## 6 · Attention over compressed keys (eq. 8)
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
# ## 7 · Block importance (eq. 9, 10)
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
# <p>Token 350 is in compressed blocks $i = 20$ (tokens 320 to 351) and $i = 21$ (tokens 336 to 367). These two have all
# the weight. By the corrected formula they belong to block 5, which starts with compressed block $4 \cdot 5 = 20$. The
# printed formula gives block $j$ the compressed blocks $4j - 4$ to $4j$. For $j = 5$ these are 16 to 20, and only the
# last has weight. For $j = 6$ these are 20 to 24, which include both. Block 6 therefore wins, and the query reads
# tokens 384 to 447, which do not contain token 350.</p>
# </details>
#
# ## 8 · Block selection (eq. 11)
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
# <p>Query 63 is in block $\lfloor 63/8 \rfloor = 7$. Blocks 0, 6 and 7 are forced. The fourth place goes to the lowest
# remaining index, 1. Query 15 is in block 1. Only blocks 0 and 1 have started, so it selects two blocks instead of
# four.</p>
# </details>
#
# ## 9 · Selected attention (eq. 12)
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
# How many keys does query 57 read in the selected branch ($l_{sel} = 8$, $n_{sel} = 4$)? Does the number depend on
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
# <p>Token 57 is the second token of block 7 (tokens 56 to 63). Its own block is always selected and contributes 2 keys.
# The three other blocks are complete and contribute 8 keys each: 26 in total. The number does not depend on the
# selection, because the only incomplete block is the query's own, which is forced. In general it is
# $\min\big(\lfloor t/l_{sel} \rfloor,\, n_{sel}-1\big)\,l_{sel} + (t \bmod l_{sel}) + 1$. A program that reports
# another number reads other tokens. The end of notebook 06 shows a bug that was found in this way.</p>
# </details>
#
# ## 10 · Window attention (section 3.3.3)
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
# ## 11 · The complete operator (eq. 5)

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
# ## 12 · Short sequences are dense
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
# <p>$n_{sel} \cdot l_{sel} = 1{,}024$. Up to query 1,023 there are at most 16 blocks, and every candidate is selected.
# Query 1,024 starts block 17 and is the first that omits a block. The numbers are therefore 0, 1 and 176. A benchmark
# at shorter lengths compares dense attention with dense attention plus overhead.</p>
# </details>
#
# ## 13 · Packed documents
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
# ## 14 · Real text
#
# The text is the first 2,048 characters of Python's `textwrap` module, with the default block sizes. The heads are
# **hand-made, not trained**. The query at $t$ encodes the last few characters, and the key at $s$ encodes the
# characters before $s$. A query therefore matches the token that followed an earlier passage like the current one.
# Trained models develop such *induction heads*. Group 0 encodes 4 characters, group 1 encodes 12. All branches share
# keys and values in this example, so that their attention can be compared.

# %%
text = examples.make_text_example(examples.read_standard_library(length))
text_k, text_v = reference.compress(text.k_cmp, default_nsa), reference.compress(text.v_cmp, default_nsa)
_, text_lse = reference.compressed_attention(text.q, text_k, text_v, default_nsa)
text_importance = reference.block_importance(text.q, text_k, text_lse, default_nsa)
text_blocks = select_blocks(text.q, text_k, text_lse, default_nsa)
show_figure(figures.plot_importance(text_importance[0, :, 1], text_blocks[0, :, 1], default_nsa, "real text, group 1"))

# %% [markdown]
# **What to notice.** Up to $t = 1{,}023$ all blocks are selected, as predicted. After that, more and more blocks remain
# unselected (grey): 13 free places for a growing number of candidates. The diagonal and the bottom row are forced
# blocks. Among the blocks selected by score, neighboring queries differ, because these hand-made heads match another
# passage at almost every character. Notebook 06 shows the selection of trained heads.
#
# ## 15 · The explorer
#
# The explorer shows the same text in a **trained** model, `needle-8m`, which ships with the library (data and limits
# are on its [model card](../nsa_lab/models/needle-8m/README.md)). Its branches have separate keys and values. Its
# blocks are selected by an indexer (section 17) instead of the compressed attention weights. Move the query and change
# the layer, the group and the block sizes. The picture shows which tokens each branch reads and with what weight. The
# text below lists the selected blocks.
#
# The model was trained with the sizes shown first. In a headless run, the notebook draws the picture once, without
# controls.

# %%
shipped = load_model("needle-8m")
layer_examples = examples.make_byte_examples(
    shipped, examples.read_standard_library(length).encode(), "needle-8m on textwrap.py"
)
explore_query(
    layer_examples, shipped.config.nsa, min(query, length - 1), layer=shipped.config.n_layers // 2, use_widgets=use_widgets
)

# %% [markdown]
# **What to notice.** In sections 7 and 14, the second row (importance) was the sum of the first row (compressed
# attention) over blocks. In this model it is not: a separate indexer scores the blocks (section 17). A narrow spike in
# the third row is a token that the selected branch found in full detail, while the compressed keys show it only
# faintly. Where the window (green) overlaps a selected block, both branches read the same tokens.
#
# ## 16 · NSA from scratch in 40 lines
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
# ## 17 · Training the block selection
#
# This section goes beyond the paper. It trains the block selection with its own loss.
#
# The selection of section 8 scores compressed keys, and each compressed key is the mean of 32 keys. Suppose that the
# query matches one token (the needle) in a block. In the mean, the needle's contribution to the score is divided by 32,
# and the other 31 keys add noise. For keys with $D$ independent channels and blocks of $n$ tokens, the needle's block
# scores
#
# $$\frac{D / n}{\sqrt{D} / \sqrt{n}} = \sqrt{D/n}$$
#
# standard deviations above the other blocks. For $n = 32$ and $D = 64$ this is 1.4, and one noise block in thirteen
# scores as high.
#
# Training does not correct this. Block selection is not differentiable, so the compressed keys get a gradient only from
# the output of the compressed branch. The effect is measurable. We trained two models on text with facts that are
# queried later:
#
# | model | facts retrieved |
# |---|---|
# | NSA, 78.6 M parameters | none, at any length |
# | dense baseline | all, in 32,768 bytes |
#
# Four changes fix it, and all four are needed:
#
# 1. **Indexer.** One query and one key per group, used only for selection. Each index key covers 2 tokens
#    (`indexer_block`).
# 2. **Selection loss.** It trains the indexer to predict where the selected branch would attend if it could attend to
#    all past tokens.
# 3. **Induction-initialized heads** (`matching_heads`). Some heads are initialized as induction heads, which copy. The
#    selection therefore has a target from the first step.
# 4. **Normalized embeddings** (`embedding_norm`). Embeddings are initialized with a standard deviation of 0.02, so the
#    output of the first layer dominates the residual stream. Scaled to unit RMS, the current token stays visible to
#    every later layer.
#
# ### One index key per few tokens
#
# Block importance is defined as in section 7, with the indexer's attention $p$ in place of the compressed branch's. The
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
    is_visible = (ends <= torch.arange(len(q))[:, None])[:, None]  # complete at t, as in section 6
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
# The library's is in float32, as in section 7.
check_equal("importance by the indexer", importance.detach(), library.double().detach(), atol=1e-6)
selected_indices = layer.observe(x[None], rotary)["blocks"][0]
library_mask = torch.nn.functional.one_hot(selected_indices.long() + 1, importance.shape[-1] + 1)[..., 1:].any(-2)
print("same blocks as the layer:", torch.equal(select_by_importance(importance, toy), library_mask))

# %% [markdown]
# ### Predict 6
#
# * The input has 2,048 tokens with random keys of width 64.
# * Each of the last 1,024 queries has one target token far in the past. The query is that token's key times four.
# * One selected block is free (not forced). Between 14 and 29 blocks of 64 tokens compete for it.
#
# How often is the correct block selected if an index key covers 32 tokens, 8 tokens, or 1 token?

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
# <p>At 1.4 standard deviations, the correct block is seldom the best of about twenty, but more often than the 5% of
# random selection. At 2.8 it often is. An index key per token always finds it.</p>
# <p>An index key per token costs as many scores per query as dense attention. One key per 8 tokens costs an eighth of
# that, and one per 2 tokens costs half. The indexer also has one query per group instead of six.</p>
# <p>Random keys are the worst case, because neighboring tokens in text have similar keys. A number in the middle of a
# page, however, is such a case.</p>
# </details>
#
# ### The selection loss
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
# ### Induction-initialized heads
#
# The selection can learn to find only tokens that some head attends to. If selection is random, a query sees a fraction
# of the text, and copying heads form late or never.
#
# Half of the first group's heads therefore start with query weights equal to the key weights. The keys of this group
# start as the keys of the *previous* token. A convolution of width 2 makes this shift, and training can change it. A
# query then matches the position *after* an equal token and reads the token that followed it.
#
# RoPE rotates only half of each head's channels (`rotary_share`). The other half matches equal tokens at any distance.

# %%
# NBVAL_CHECK_OUTPUT
torch.manual_seed(6)
sentence = "the quick brown fox; THE JUMPING DOG q"
letters = sorted(set(sentence))
embedded = torch.randn(len(letters), 64, dtype=torch.float64)[[letters.index(letter) for letter in sentence]]
untrained = NSAttention(64, 2, 1, head_dim=64, nsa=toy, rotary_share=0.5, matching_heads=1).double()
heads = untrained.attention.project_heads(embedded[None], untrained.compute_rotary(embedded[None]))
position = (heads.q[0, -1, 0] @ heads.keys[1][0, :, 0].T).argmax().item()
previous, attended = sentence[position - 1], sentence[position]
print(f"untrained, the head at the last {sentence[-1]!r} attends to {attended!r}, which follows {previous!r}")

# %% [markdown]
# ### Results
#
# With all four changes, NSA (79.8 M parameters) retrieves the facts at every length of its training, and at twice the
# longest:
#
# | text length, bytes | facts retrieved, four seeds together |
# |---|---|
# | 2,048 | 800 of 800 |
# | 8,192 | 800 of 800 |
# | 32,768 | 800 of 800 |
# | 65,536 (not in training) | 159 of 160 |
#
# The retrieval depends on the selection. Loss on answers to facts outside the window:
#
# | selected blocks | loss, nats per byte |
# |---|---|
# | by the indexer | 0.000 |
# | random | 3.01 to 4.86 |
#
# On plain text, NSA has a lower loss than both dense baselines:
#
# | model | parameters | bits per byte |
# |---|---|---|
# | NSA, three of the four seeds | 79.8 M | 1.352 to 1.365 |
# | dense, same initialization and widths | 72.4 M | 1.389 |
# | dense, parameter-matched | as NSA | 1.406 |
#
# The last table shows that selection does not increase the loss on plain text. It shows no more than that: NSA's lead
# starts at the first bytes of a text, where attention is not sparse.
#
# [docs/science/retrieval.md][1] explains why each change is needed. Its log lists every experiment, including the
# failed ones. The presets `smoke` and `recall_taught` use all four changes (`smoke` with one index key per 8 tokens).
# Without these options, the configuration is NSA as in sections 1 to 16. It equals the paper's NSA except for φ (a
# mean) and the gate (one linear layer).
#
# [1]: ../docs/science/retrieval.md
#
# ## 18 · Summary
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
# * All three branches are one formula, attention over a set of keys. NSA determines *which* set.
# * One query reads $T/d + n_{sel}\,l_{sel} + w$ keys. Only the first term grows with the text.
# * Blocks are selected per group of heads and as a whole, because a GPU reads contiguous memory at full speed.
# * A compressed key over many tokens misses a single relevant token, and the paper's training does not correct this.
#   Index keys over few tokens, trained with the selection loss, do.
# * The 40 lines build full $T \times T$ matrices and are slow. Fast kernels never build them, and tests compare the
#   kernels with code like this.
#
# **Next:** `03_kernel_parity` compares every fast implementation with this definition. `04_smoke_training` trains a
# model. `07_does_selection_find` measures whether a trained selection finds facts.
