"""The selected branch: softmax attention of every query to the tokens <= t of its selected blocks.

Source: arXiv 2502.11089, section 3.4 (kernel design), with the loop order reversed for groups of few heads.

* forward.py computes the same sum in two orders: *union* for short sequences, *gather* for all others.
* inverted_index.py sorts the selection by block, for the kernels that keep a kv block resident and stream its queries.
* workspace_pieces.py splits an input whose partial results would not fit into the workspace.
* launch.py has the operators. The launches depend only on shapes, so nothing is read back from the device and a CUDA graph
  can capture them.
"""
