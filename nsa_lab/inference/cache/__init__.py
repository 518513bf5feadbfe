"""What a model keeps of the sequences that it reads, and attention of new tokens through it.

    model.py       `Cache`: all layers of a model, and how long each sequence is
    layers.py      what one layer keeps, NSA or dense, and its attention of new tokens
    compressed.py  compressed blocks, and the tokens that the next ones need
    storage.py     rows that keep every token, rings that keep the latest
    step.py        `Step`: the new tokens, and where they go in all of these

Invariants
* Everything is laid out once, for `batch` sequences of at most `capacity` tokens; a step writes into it and moves nothing.
* Sequences have lengths of their own. A step gives each the same number of tokens, of which the last ones may be padding:
  what they leave is beyond the sequence's length, is read by no token of it, and is overwritten by what comes.
* An NSA layer keeps selection keys and values of every token, window keys and values of the latest in a ring, compressed
  ones of every whole block and, in rings too, the tokens that the next block needs: phi is computed once for each block.
"""

from nsa_lab.inference.cache.cache_step import Step
from nsa_lab.inference.cache.model_cache import Cache

__all__ = ["Cache", "Step"]
