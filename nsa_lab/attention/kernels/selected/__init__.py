"""The selected branch: softmax attention of every query to the tokens <= t of the blocks that it chose.

Source: arXiv 2502.11089, section 3.4 (kernel design), with the loop order turned round for groups of few heads.

* forward.py has two orders of the same sum: the *union* for short sequences, the *gather* for all others.
* inverted_index.py sorts the choice by block, for the kernels that keep a kv block resident and stream its queries.
* pieces.py cuts an input whose partial results would not fit the workspace.
* launch.py has the operators. What they launch is chosen from shapes alone, so nothing is read back from the device and a
  CUDA graph can hold them.
"""
