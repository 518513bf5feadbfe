"""The words that every kernel, launcher and helper in this folder uses, so that all of them read as one.

Axes and sizes
    B T H G      batch, queries of a sequence, query heads, groups of heads that share keys and values
    N            keys of a sequence: its compressed blocks in the compressed branch, its tokens elsewhere
    HEADS        query heads per group, H / G
    DK, DV       head width of q and k, of v and out
    b g t head   indices on these axes: sequence, group, query, head within its group; `bg` is b * G + g
    L, STRIDE, W, L_SEL, N_SEL    the geometry: l, d, w, l_sel, n_sel of `NSAConfig`
    BLOCK        tokens of a kv block as the selected branch's kernels work in it: l_sel, or a divisor of a longer one
    X_PAD        X rounded up to a power of two, which a tile needs: `padded_width(X)`
    X_PART, X_REST    a width as two tiles side by side: columns [0, X_PART), and X_REST after them; 0: one tile
Documents, where one row holds several: B is then 1, T and N count all of them, and pointers are moved to a document's rows
    documents    how many there are;  document: the index of one, in the order of rows
    q_bounds k_bounds    first rows of all documents in q and in k, and the end of the last; None: no documents
    first        the first row of one;  own: what it has of N, or which of its own tiles a program works on
Tiles
    ROWS         (query, head) rows per tile, row = t * HEADS + head: a tile is full whatever the number of heads, and the
                 heads that share a key read it once. QUERIES, KEYS, BLOCKS: queries, keys, selection blocks per tile
    columns      positions along a head's width
    q, k, v ...  tiles in registers; q_ptr points to the start of the tensor, q_base to that of one sequence and group
    stride_qb    elements from one b of q to the next; t (queries), n (keys), h (heads), g (groups) likewise. The last axis
                 is contiguous and needs no stride
Numbers
    scale        the softmax scale, d_k ** -0.5;  scale_log2 = scale * log2(e): scores are in units of log2 inside the
                 kernels, so that exp2 needs no rescaling
    lse          log-sum-exp of a row's scores, natural log, float32; lse_log2 the same in units of log2
    peak, total  the running maximum of an online softmax, in units of log2, and the sum of exp2(score - peak)
    do dq dk dv dlse    gradients of out, q, k, v, lse
    delta        sum(do * out) - dlse of a row: the term of ds that all its keys share (Flash Attention 2, appendix B)
Partial results, which a later kernel sums in a fixed order: no floating-point atomics, so equal inputs give equal bits
    pair_x       one row per query, block that it chose, and head
    item_x       one per work item of the inverted index (selected/inverted_index.py)
    chunk_x      one per chunk of the queries that see a key tile (band/)
    part_x       one per part of the keys that a decoding step splits a branch into (decoding/): PARTS of them per row,
                 those of cmp, win and sel one after another. `before` are then the tokens before the first query
Bounds and masks
    first_query  the position of query 0, where keys came before; None: 0
    start, stop  a half-open range;  first, last: both inside it
    inside       whether a row exists in its tensor: what loads and stores are masked by
    seen         whether a query may attend to a key: what scores are masked by
    live         whether a chosen block exists and has begun by its query
    DIAGONAL, MASKED    compile-time: this loop needs the causal mask, this loop needs the mask of the band
    WIDE         compile-time: offsets inside one sequence need 64 bits
"""

from __future__ import annotations

LOG2E = 1.4426950408889634

UNSPECIALIZED_ARGS = (
    "T", "N", "B", "G", "G_all", "n_angles", "documents", "first_query", "n_rows", "n_blocks", "n_items", "n_spans",
    "first_span", "pass_spans", "row_programs", "rows_total", "work_size", "tiles", "reductions", "parts", "chunk_steps",
    "stride_gb", "stride_lseb", "ring", "raw_ring", "past_ring", "row_tiles", "row_parts",
)  # fmt: skip
"""Arguments of kernels that follow from how long texts are, how many, and in how many pieces.

No kernel is compiled for their values (`do_not_specialize`), so that another length compiles nothing anew: by default
Triton would compile again for a 1 and for what 16 divides. Strides of rows are not among them, which loads of 16 bytes
need to know, nor those of batches that are whole rows.
"""

KERNEL_PARTS = {
    "nsa_compressed_": "compressed",
    "nsa_window_": "window",
    "nsa_choice": "block choice",
    "nsa_selected_": "selected",
    "nsa_gate_": "gated sum",
    "nsa_append": "cache",
    "nsa_complete": "cache",
    "nsa_linear": "linear maps",
}
"""How the name of a launched kernel begins -> the part of NSA that it computes. A profile is read by this alone."""


def get_kernel_part(name: str) -> str | None:
    """The part that the kernel of this name, as a profiler gives it, belongs to; None if it is not one of ours."""
    return next((part for prefix, part in KERNEL_PARTS.items() if name.startswith(prefix)), None)
