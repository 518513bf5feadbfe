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
# A dense decoder lets token $t$ read all $t+1$ tokens up to itself. Native Sparse Attention (NSA,
# [arXiv 2502.11089](https://arxiv.org/abs/2502.11089)) reads far fewer, through three branches that run side by side:
#
# | branch | reads | for |
# |---|---|---|
# | **compressed** (cmp) | one averaged key for every $d$ tokens of the past | an overview of everything |
# | **selected** (sel) | $n_{sel}$ whole blocks of $l_{sel}$ tokens, ranked by the first branch | what matters, in full |
# | **window** (win) | the $w$ latest tokens | what is near |
#
# This notebook derives each of them: the equation, the code that computes it (`nsa_lab.attention.reference`, the
# definition that every fast kernel of this project is measured against), and a picture. First on a toy of 64 random
# tokens that is small enough to check by hand, then on 2048 characters of real text.
#
# Cells marked `NBVAL_CHECK_OUTPUT` print numbers that are exact; continuous integration compares them character by
# character. The whole notebook takes well under a minute on a CPU.
#
# **Letters.** $T$ tokens, $H$ query heads in $G$ groups that share keys and values, $h = H/G$ heads a group, $D$ head
# width. $l$, $d$: length and stride of compression blocks. $l_{sel}$, $n_{sel}$: length and number of selected blocks. $w$:
# window. Positions $t$ and blocks $i$, $j$ count from 0.

# %% tags=["parameters"]
length: int = 2048  # tokens (characters) of the real text, at most 2048
query: int = 1900  # position of the query whose reads are shown, below length
widgets: bool | None = None  # True or False; None: controls only where a Jupyter front end has this notebook open

# %%
import math

import torch

from nsa_lab import figures
from nsa_lab.attention import dense_attention, geometry, nsa_attention, reference, select_blocks
from nsa_lab.config import NSAConfig
from nsa_lab.figures.blocks import equation_nine
from nsa_lab.workbook import examples
from nsa_lab.workbook.query_explorer import explore
from nsa_lab.workbook.reads import reads_of
from nsa_lab.workbook.show import show

# %% [markdown]
# ## 1 · The toy
#
# 64 tokens, 4 heads in 2 groups, and block sizes small enough to draw. Queries, keys and values are independent
# normal numbers: there is nothing to find in them, which is what one wants for checking formulas.

# %%
toy = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=12)
example = examples.random_example(64, heads=4, groups=2, width=8)
print(
    f"{example.about}, {example.q.dtype}: q [B, T, H, D] = {list(example.q.shape)}, "
    f"k and v [B, T, G, D] = {list(example.k_sel.shape)}"
)
show(figures.block_geometry(64, toy, position=41))

# %% [markdown]
# Compression blocks overlap ($d < l$), selection blocks tile the sequence, the window moves with the query. A
# compressed block is visible once it is *whole* (block 9 ends at token 43, so query 41 does not see it yet); a
# selection block is a candidate once it has *begun*, since inside a chosen block the ordinary causal rule still
# holds.
#
# ## 2 · Compression (eq. 7)
#
# $$\tilde k_i = \varphi\big(k_{id},\, \dots,\, k_{id+l-1}\big), \qquad i = 0, \dots, N-1, \qquad
# N = \begin{cases}0 & T < l\\ \lfloor (T-l)/d \rfloor + 1 & \text{otherwise}\end{cases}$$
#
# $\varphi$ is the mean here (`phi: avg`); `linear` and `mlp` are learned maps of the flattened block with an encoding
# of the position inside it. Keys carry their rotary angle *before* they are averaged.

# %%
# NBVAL_CHECK_OUTPUT
k_cmp, v_cmp = reference.compress(example.k_cmp, toy), reference.compress(example.v_cmp, toy)
by_hand = torch.stack([example.k_cmp[0, 4 * i : 4 * i + 8].mean(0) for i in range(15)])
print("N =", geometry.num_compressed(64, toy), " k_cmp [B, N, G, D] =", list(k_cmp.shape))
print("equals the mean of each block:", torch.allclose(k_cmp[0], by_hand, atol=1e-12))

# %% [markdown]
# ## 3 · Who sees what
#
# Query $t$ sees block $i$ iff the block's last token is not in its future: $i\,d + l - 1 \le t$. The first $l-1$
# queries see nothing at all; for them the branch returns exactly 0 and a log-sum-exp of $-\infty$, with zero
# gradients and no NaN.

# %%
show(figures.visible_blocks(64, toy))

# %%
# NBVAL_CHECK_OUTPUT
out_cmp, lse = reference.compressed_attention(example.q, k_cmp, v_cmp, toy)
visible = geometry.visible_compressed(torch.arange(64), toy)
print("blocks seen by queries 0, 6, 7, 10, 11, 41, 63:", visible[[0, 6, 7, 10, 11, 41, 63]].tolist())
print("query 6: out is zero:", bool((out_cmp[0, 6] == 0).all()), " lse =", lse[0, 6, 0].item())

# %% [markdown]
# ## 4 · Attention over compressed blocks (eq. 8)
#
# $$p_{t,i} = \operatorname{softmax}_i\!\Big(\tfrac{1}{\sqrt{D}}\, q_t \cdot \tilde k_i\Big) \quad\text{over visible } i
# \text{ only,} \qquad o^{cmp}_t = \sum_i p_{t,i}\,\tilde v_i$$
#
# *Over visible blocks only* matters twice: once for causality, and once more because $p$ is reused to rank blocks. A
# normaliser that includes blocks of the future changes the past when the future changes.

# %%
# NBVAL_CHECK_OUTPUT
scores = torch.einsum("hd,ihd->hi", example.q[0, 41], k_cmp[0].repeat_interleave(2, dim=1)) / math.sqrt(8)
p = scores[:, : visible[41]].softmax(-1)  # [H, visible blocks]
o = torch.einsum("hi,ihd->hd", p, v_cmp[0, : visible[41]].repeat_interleave(2, dim=1))
print("p of query 41:", list(p.shape), "rows sum to 1:", torch.allclose(p.sum(-1), torch.ones(4, dtype=p.dtype)))
print("sum of p * v equals the branch:", torch.allclose(o, out_cmp[0, 41], atol=1e-12))

# %% [markdown]
# ## 5 · From compressed blocks to selection blocks (eq. 9)
#
# Selection blocks are ranked by the attention that their tokens got in the compressed branch. Compressed block $i$
# gives selection block $j$ its probability times the number of strides they share:
#
# $$\text{importance}(t, j) = \sum_i p_{t,i}\;\frac{\big|[id,\, id+l) \cap [j\,l_{sel},\, (j+1)\,l_{sel})\big|}{d}$$
#
# The paper writes the same as a double sum,
#
# $$p^{slc}_t[j] = \sum_{m=0}^{l_{sel}/d - 1}\; \sum_{n=0}^{l/d - 1} p^{cmp}_t\Big[\tfrac{l_{sel}}{d}\, j - m - n\Big],$$
#
# and says nothing about where $j$ starts. **It must be 1.** With $l, d, l_{sel} = 32, 16, 64$ and everything counted
# from 1, block $j=1$ (tokens 0 to 63) collects $p[1 \dots 4]$ with weights 2, 2, 2, 1: exactly the compressed blocks
# that touch those tokens. Counted from 0, block $j=0$ collects $p[0]$ alone and every other block collects what lies
# *before* it: the ranking is off by one block into the past, so the block a query should read is the neighbour of the
# one it does read. A public port of NSA has this bug. Nothing crashes, and the loss still falls.

# %%
show(figures.overlap_weights(NSAConfig(), compressed=12, selection=3))

# %%
# NBVAL_CHECK_OUTPUT
for sizes in ({}, {"l": 8, "d": 4, "l_sel": 16}, {"l": 16, "d": 16, "l_sel": 32}, {"l": 64, "d": 16, "l_sel": 32}):
    nsa = NSAConfig(**sizes)
    shared = geometry.overlap(40, 10, nsa)
    same = {first: torch.equal(equation_nine(40, 10, nsa, first_j=first), shared) for first in (1, 0)}
    column = shared[:, 5][shared[:, 5] > 0].int().tolist()
    print(
        f"l, d, l_sel = {nsa.l}, {nsa.d}, {nsa.l_sel}: weights {column}; eq. 9 from 1 agrees: {same[1]}, from 0: {same[0]}"
    )

# %% [markdown]
# ## 6 · One choice for a group (eq. 10), and the choice itself (eq. 11)
#
# Heads of a group share keys and values, so they also share the blocks: their importances are added. Then, for each
# query and group,
#
# * candidates are the blocks that have begun: $j\,l_{sel} \le t$;
# * three are **forced**: the first block, the one that holds $t$, and the one before it; they count towards $n_{sel}$;
# * the rest go by importance, ties to the lower index, in float32;
# * the result is ascending, distinct, and padded with $-1$. No gradient flows through the choice.

# %%
importance = reference.block_importance(example.q, k_cmp, lse, toy)
blocks = reference.select_blocks(example.q, k_cmp, lse, toy)
print(
    f"importance [B, T, G, blocks] = {list(importance.shape)}, "
    f"chosen [B, T, G, n_sel] = {list(blocks.shape)}, {blocks.dtype}"
)
show(figures.importance_map(importance[0, :, 0], blocks[0, :, 0], toy, "the toy, group 0"))

# %%
# NBVAL_CHECK_OUTPUT
for t in (0, 15, 16, 47, 48, 63):
    print(f"query {t:>2}: blocks of group 0 {blocks[0, t, 0].tolist()}, of group 1 {blocks[0, t, 1].tolist()}")
alike = torch.ones(1, 1, 1, 8)  # eight blocks with the same score: the free place goes to the lowest index
print("all scores equal, query 63:", reference.choose(alike, toy, first=63)[0, 0, 0].tolist())

# %% [markdown]
# ## 7 · Selected attention and the window
#
# Both are ordinary softmax attention over a set of tokens: the tokens $\le t$ of the chosen blocks, and the $w$
# latest tokens, $t$ included (exactly $\min(w, t+1)$ keys: a library whose window counts the keys to the *left* of
# the query wants $w-1$). Each branch has keys and values of its own, so that no branch can starve another of
# gradient.

# %%
out_sel, _ = reference.selected_attention(example.q, example.k_sel, example.v_sel, blocks, toy)
out_win, _ = reference.window_attention(example.q, example.k_win, example.v_win, toy)
toy_reads = reads_of(example, toy, position=57, group=0)
show(figures.query_reads(toy_reads, "the toy: random numbers, so the weights mean nothing; the sets are what to look at"))

# %%
# NBVAL_CHECK_OUTPUT
for t in (0, 10, 31, 57, 63):
    counted, predicted = reads_of(example, toy, t).counts(), geometry.decode_reads(t + 1, toy)
    print(f"query {t:>2} reads {counted}, as the formulas say: {counted == predicted}")

# %% [markdown]
# The formulas, for the last query of a sequence of $S$ tokens: $N(S)$ compressed keys, $\min(w, S)$ of the window,
# and of the selected branch $\min\big(\lfloor t/l_{sel} \rfloor,\, n_{sel}-1\big)\,l_{sel} + (t \bmod l_{sel}) + 1$
# with $t = S-1$. The last one does not depend on *what* was chosen, because the current block always is.
#
# ## 8 · The gated sum (eq. 5)
#
# $$o_t = g^{cmp}_t\, o^{cmp}_t + g^{sel}_t\, o^{sel}_t + g^{win}_t\, o^{win}_t, \qquad
# g_t = \sigma(W_g\, x_t) \text{ for each head and branch}$$
#
# A sigmoid for each branch, as in the paper: branches may all be open, or all shut. (`gate: softmax` makes them
# compete.)

# %%
# NBVAL_CHECK_OUTPUT
gates = torch.rand(1, 64, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
by_hand = sum(gates[..., n, None] * out for n, out in enumerate((out_cmp, out_sel, out_win)))
inputs = (example.q, k_cmp, v_cmp, example.k_sel, example.v_sel, example.k_win, example.v_win, gates)
for backend in ("reference", "torch"):
    out = nsa_attention(*inputs, toy, backend=backend)
    print(f"{backend}: equals the gated sum:", torch.allclose(out, by_hand, atol=1e-10))

# %% [markdown]
# ### Causality, bit for bit
#
# Change every token after 40 and look at the outputs up to 40. "Close" would not do: a choice of blocks that peeks
# into the future shows as a tiny difference first.

# %%
# NBVAL_CHECK_OUTPUT
future = torch.arange(64) > 40


def attend(changed: bool) -> torch.Tensor:
    """NSA on the toy, with or without another future."""
    noise = torch.Generator().manual_seed(2)

    def other(x: torch.Tensor) -> torch.Tensor:
        fresh = torch.randn(x.shape, generator=noise, dtype=x.dtype)
        return torch.where(future[None, :, None, None], fresh, x) if changed else x

    q, kc, vc, ks, vs, kw, vw = map(
        other, (example.q, example.k_cmp, example.v_cmp, example.k_sel, example.v_sel, example.k_win, example.v_win)
    )
    return nsa_attention(
        q, reference.compress(kc, toy), reference.compress(vc, toy), ks, vs, kw, vw, gates, toy, backend="reference"
    )


before, after = attend(False), attend(True)
print("outputs at t <= 40 unchanged, bit for bit:", torch.equal(before[:, :41], after[:, :41]))
print("outputs at t > 40 changed:", not torch.equal(before[:, 41:], after[:, 41:]))

# %% [markdown]
# ## 9 · Why short sequences are dense
#
# With the usual sizes ($l_{sel} = 64$, $n_{sel} = 16$) there are no more than 16 blocks up to $T = 1024$: every
# candidate is chosen, and the selected branch **is** dense causal attention. Sparsity begins past $n_{sel} \cdot
# l_{sel}$ tokens; a speed or quality comparison at shorter lengths compares dense attention with dense attention plus
# overhead.

# %%
# NBVAL_CHECK_OUTPUT
usual = NSAConfig()
for tokens in (1000, 1024, 1025, 1200):
    x = examples.random_example(tokens, heads=2, groups=1, width=16, seed=3)
    kc = reference.compress(x.k_cmp, usual)
    _, score = reference.compressed_attention(x.q, kc, kc, usual)
    chosen = select_blocks(x.q, kc, score, usual)
    sparse, _ = reference.selected_attention(x.q, x.k_sel, x.v_sel, chosen, usual)
    dense = dense_attention(x.q, x.k_sel, x.v_sel)
    differs = (sparse - dense).abs().amax((0, 2, 3)) > 1e-9
    print(f"T = {tokens}: queries that differ from dense attention: {int(differs.sum())}")

# %%
show(figures.reads_by_length([2**k for k in range(5, 17)], usual))

# %% [markdown]
# ## 10 · A real text
#
# 2048 characters of Python's own `textwrap` module, with the usual sizes. The heads are **made by hand, not
# trained**: the query at $t$ encodes the last few characters, the key at $s$ the characters before $s$, so that a
# query looks for what came after passages like the present one (what trained models grow as "induction heads"). Group
# 0 looks 4 characters back, group 1 looks 12. All branches share keys and values here, so that their reads can be
# compared.

# %%
text = examples.text_example(examples.standard_library_text(length))
text_k, text_v = reference.compress(text.k_cmp, usual), reference.compress(text.v_cmp, usual)
_, text_lse = reference.compressed_attention(text.q, text_k, text_v, usual)
text_importance = reference.block_importance(text.q, text_k, text_lse, usual)
text_blocks = select_blocks(text.q, text_k, text_lse, usual)
for group in range(text.groups):
    scores, chosen = text_importance[0, :, group], text_blocks[0, :, group]
    show(figures.importance_map(scores, chosen, usual, f"real text, group {group}"))

# %% [markdown]
# Up to $t = 1023$ everything is chosen, then the grey of blocks that are passed over sets in; the red diagonal and
# floor are the forced blocks. The averaged keys are a coarse sieve: one exact match of 12 characters is one token of
# 32 in its block.
#
# ## 11 · The explorer
#
# Move the query, change the group and the geometry: which tokens does each branch read, with what weight, and what do
# the chosen blocks say? (In a headless run the same picture is drawn once, without controls.)

# %%
explore(text, usual, min(query, length - 1), group=1, with_widgets=widgets)

# %% [markdown]
# ## 12 · What three numbers gave away
#
# This project began from the published logs of an NSA training effort whose dashboards said "healthy". Three of the
# numbers in them can be derived, and each names a bug. They are why the health checks here compare against what
# *must* come out, not against what came out last time.
#
# **Gate entropy 1.098.** Three gates of equal share have entropy $\ln 3 = 1.0986$. Logged step after step, it means that
# the gate never moved: it was not learning at all.
#
# **721 selected keys per query.** At $T = 2048$ the mean must be 752.5, whatever is chosen. 721.0 is exactly what comes
# out if a block counts as a candidate only once it is *whole*: the current block is forced, found invalid, and its
# slot wasted, so a query reads 15 old blocks and never its own, except at the one position in 64 where it is just
# complete.
#
# **Learning rate 8.71e-05 at step 1740.** A warm-up of 2000 steps to 2e-4 gives 1.74e-4 there. Half of it means that the
# schedule was advanced once every two logged steps (two micro-batches make one optimiser step), while its length was
# counted in micro-batches: the rate was half of what the configuration said, and would have ended above half its
# peak.

# %%
# NBVAL_CHECK_OUTPUT
T, l_sel, n_sel = 2048, usual.l_sel, usual.n_sel
print(f"ln 3 = {math.log(3):.4f}")

closed_form = geometry.mean_selected_keys(T, usual)
counted = sum(geometry.selected_keys(t, usual) for t in range(T)) / T
print(f"mean selected keys, the definition: {closed_form} in closed form, {counted} counted")

whole = [(t + 1) // l_sel for t in range(T)]  # blocks that are complete at t
slots = [n_sel if (t + 1) % l_sel == 0 else n_sel - 1 for t in range(T)]  # one is wasted on the current block
whole_only = [l_sel * min(blocks, free) for blocks, free in zip(whole, slots, strict=True)]
print(
    f"with whole blocks only: mean {sum(whole_only) / T}, largest {max(whole_only)}, "
    f"queries at the largest {whole_only.count(max(whole_only))}, queries that read nothing {whole_only.count(0)}"
)

warmup, peak, logged = 2000, 2e-4, 1740
print(
    f"learning rate at step {logged}: {peak * logged / warmup:.3g} as configured, "
    f"{peak * (logged // 2 + 1) / warmup:.3g} if two logged steps advance it once"
)

# %% [markdown]
# The same log also reports the largest count as 1024 and 0.83 % of queries at it: 17 of 2048, as derived. A statistic
# that can be derived to the last digit is not a measurement of the model; it is a fingerprint of the code.
#
# **Next:** `02_kernel_parity` holds every fast implementation against these definitions; `03_smoke_training` trains a
# model.
