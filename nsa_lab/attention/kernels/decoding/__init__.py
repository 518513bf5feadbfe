"""Attention of a few new tokens over a cache: the computation of one decoding step.

    rope_kv_append.py       rotate new tokens and write them into the cache
    compress_update.py      compress the blocks that new tokens complete
    index_append.py         index queries of new tokens, and index keys of the blocks that they complete
    kv_tiles.py             addresses of keys in the cache, and attention over a range of keys or over blocks
    split_kv_attention.py   attention to parts of the keys (compressed; selected and window); merge of the partial outputs
    decode_topk.py          scores of compressed keys or of an indexer, and their highest
    decode_linear.py        linear layers of few rows
    embedding.py            embeddings of new tokens and of the n-grams that end with them
    pdl.py                  programmatic dependent launch
    decoding_table.py       tile sizes and compile options of these kernels
    launch.py               the launches of all kernels, in order

A decoding step is limited by the bytes that it reads and, for one sequence, by the number of multiprocessors that read
them. So the keys of a branch are split into enough parts to fill the GPU at the given batch size, and every part stores the
sums of a separate softmax: a partial output, a peak and a total (Flash-Decoding). The number of parts depends only on
shapes. The range of keys of a part is computed on the device from the lengths, so parts are equal for any lengths, and a
CUDA graph of the launches stays valid while lengths grow.
"""
