"""Glossary of the names that every kernel, launcher and helper in this folder uses, and the names of kernels in a profile.

Axes and sizes
    B T H G      batch, queries of a sequence, query heads, groups of heads that share keys and values
    N            keys of a sequence: its compressed blocks in the compressed branch, its tokens elsewhere
    HEADS        query heads per group, H / G
    DK, DV       head width of q and k, of v and out
    b g t head   indices on these axes: sequence, group, query, head within its group; `bg` is b * G + g
    L, STRIDE, W, L_SEL, N_SEL    the geometry: l, d, w, l_sel, n_sel of `NSAConfig`
    BLOCK        tokens of a kv block in the kernels of the selected branch: l_sel, or a divisor of a long l_sel
    X_PAD        X rounded up to a power of two, because tiles need power-of-two sizes: `padded_width(X)`
    X_PART, X_REST    a width split into two tiles: columns [0, X_PART), then X_REST columns; X_REST = 0: one tile
Packed documents: B is 1, T and N count all documents together, and pointers are advanced to the rows of one document
    n_documents  number of documents;  document: index of one document, in the order of rows
    q_bounds k_bounds    first rows of all documents in q and in k, and the end of the last one; None: not packed
    first        first row of a document
Tiles
    ROWS         (query, head) rows per tile, row = t * HEADS + head: a tile is full for any number of heads, and the
                 heads that share a key load it once. QUERIES, KEYS, BLOCKS: queries, keys, selection blocks per tile
    columns      positions along a head's width
    q, k, v ...  tiles in registers; q_ptr points to the start of the tensor, q_base to the start of one sequence and group
    stride_qb    elements from one b of q to the next; t (queries), n (keys), h (heads), g (groups) likewise. The last axis
                 is contiguous and needs no stride
Numbers
    scale        the softmax scale, d_k ** -0.5;  scale_log2 = scale * log2(e): scores are in units of log2 inside the
                 kernels, so that exp2 needs no rescaling
    lse          log-sum-exp of a row's scores, natural log, float32; lse_log2 the same in units of log2
    peak, total  the running maximum of an online softmax, in units of log2, and the sum of exp2(score - peak)
    do dq dk dv dlse    gradients of out, q, k, v, lse
    delta        sum(do * out) - dlse of a row: the term of ds that all its keys share (FlashAttention-2, appendix B)
Partial results, which a later kernel sums in a fixed order: no floating-point atomics, so equal inputs give equal bits
    pair_x       one row per query, selected block, and head
    item_x       one per work item of the inverted index (selected/inverted_index.py)
    chunk_x      one per chunk of the queries that attend to a key tile (band/)
    part_x       one per part of the keys in split-KV decoding (decoding/): PARTS per row, first cmp, then win, then sel.
                 `before` is the number of cached tokens before the first query
Bounds and masks
    first_query  position of query 0 if keys precede it; None: 0
    start, stop  a half-open range;  first, last: both included
    inside       mask of rows that exist in the tensor: loads and stores use it
    seen         mask of keys that a query may attend to: scores use it
    live         mask of selected slots that hold a block which starts at or before the query
    DIAGONAL, MASKED    compile-time: this loop needs the causal mask, this loop needs the mask of the band
    WIDE         compile-time: offsets inside one sequence need 64 bits
"""

from __future__ import annotations

LOG2E = 1.4426950408889634

UNSPECIALIZED_ARGS = (
    "T", "N", "B", "G", "G_all", "n_angles", "n_documents", "first_query", "n_rows", "n_blocks", "n_items",
    "n_segments", "first_segment", "first_tile", "pass_segments", "row_programs", "rows_total", "work_size", "tiles",
    "reductions", "parts", "chunk_steps", "stride_gb", "stride_lseb", "ring", "raw_ring", "conv_ring", "row_tiles",
    "row_parts",
)  # fmt: skip
"""Kernel arguments that depend on sequence lengths, batch size or the number of pieces.

They are listed in `do_not_specialize`, so a new length compiles nothing: by default Triton compiles separate variants for 1
and for multiples of 16. Row strides are not listed, because 16-byte loads need their divisibility; nor are batch strides
that are whole rows.
"""

KERNEL_PARTS = {
    "nsa_compressed_": "compressed",
    "nsa_window_": "window",
    "nsa_block_": "block choice",
    "nsa_selection_loss_": "selection loss",
    "nsa_selected_": "selected",
    "nsa_gate_": "gated sum",
    "nsa_rope_kv_append": "cache",
    "nsa_compress_update": "cache",
    "nsa_index_append": "cache",
    "nsa_linear": "linear maps",
    "nsa_ngram_": "embedding",
    "nsa_rms_norm": "embedding",
}
"""Prefix of a kernel name -> part of NSA that the kernel computes. The profiler report uses only this table."""


def get_kernel_part(name: str) -> str | None:
    """Return the part of NSA that a kernel in a profile belongs to, or None if it is not one of our kernels."""
    return next((part for prefix, part in KERNEL_PARTS.items() if name.startswith(prefix)), None)
