"""Key/value cache of a model, and attention of new tokens through it.

    model_cache.py       `Cache`: the caches of all layers and the length of each sequence
    attention_cache.py   cache of one layer, NSA or dense, and attention of new tokens through it
    compressed_cache.py  compressed blocks, and the raw tokens that later blocks need
    storage.py           rows for all tokens, rings for the latest tokens
    cache_step.py        `Step`: the new tokens and their indices in the storage
    cached_pass.py       `ModelPass`: a pass of the model over new tokens, by calls of its modules or by fused kernels

Invariants
* All memory is allocated once, for `batch` sequences of at most `capacity` tokens. A step writes to it and moves nothing.
* Each sequence has its own length. A step gives all sequences the same number of tokens, the last of which may be padding.
  Values of padding are beyond the length of the sequence: no token attends to them, and later tokens overwrite them.
* An NSA layer caches selection keys and values of all tokens, window keys and values of the latest tokens in a ring,
  compressed keys and values of all complete blocks, and in rings the raw tokens of the next block. phi is computed once per
  block.
"""

from nsa_lab.inference.cache.cache_step import Step
from nsa_lab.inference.cache.cached_pass import ModelPass
from nsa_lab.inference.cache.model_cache import Cache

__all__ = ["Cache", "ModelPass", "Step"]
