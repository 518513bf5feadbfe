"""Attention of a few new tokens through a cache: what one step of generation computes.

    append.py      the kernel that turns new tokens by their angles and writes them into the cache
    keys.py        where a key lies in the cache, and attention over a range of keys or over blocks
    attend.py      the kernels that read keys and values: compressed and window, selected, and an indexer's scores
    choose.py      from scores to chosen blocks
    merge.py       the partial outputs of all branches, merged and gated
    launch.py      how they are launched, one after another

A step is bound by the bytes that it reads and, at one sequence, by how many multiprocessors read them. So the keys of a
branch are split into parts, as many as fill the GPU at this batch, and every part leaves the sums of its own softmax: a
partial output, a peak and a total (flash decoding). How many parts there are depends on shapes alone; which keys a part
has is decided on the device, from the lengths: whatever they are, parts are equal, and a CUDA graph of the launches stays
good while lengths grow.
"""
