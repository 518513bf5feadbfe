"""NSA models as `transformers` models (extra `hf`): `generate`, `pipeline`, `Trainer` and `from_pretrained` work unchanged.

Importing this package registers a configuration, models and a tokenizer with the Auto classes, under the name `nsa_lab`.
Padding may be on either side. It is removed before the forward pass, and positions are counted per row, so a sequence has
the same logits in a batch as without one. `generate` appends after the last column; pad prompts on the left for it.

    configuration.py  `NSALabConfig`, and the files with which `trust_remote_code=True` imports this package
    modeling.py       `NSALabModel`, and what models with a head share
    causal_lm.py      `NSALabForCausalLM`
    inputs.py         padding masks and packed documents
    cache.py          `NSALabCache`, the key/value cache of `generate`
    tokenizer.py      `NSALabTokenizer`, of bytes
    exporting.py      `export` of a run to a folder for `from_pretrained`
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# ruff: noqa: E402 - require() first, for its error message

from __future__ import annotations

from nsa_lab.config.optional_deps import require

require("transformers")
from transformers import AutoModel, AutoTokenizer

from nsa_lab.inference.hf.cache import NSALabCache
from nsa_lab.inference.hf.causal_lm import NSALabForCausalLM, NSALabOutput
from nsa_lab.inference.hf.configuration import NSALabConfig
from nsa_lab.inference.hf.exporting import export
from nsa_lab.inference.hf.modeling import CACHE_ARGUMENT, NSALabModel, register_causal_lm
from nsa_lab.inference.hf.tokenizer import NSALabTokenizer

register_causal_lm(NSALabForCausalLM)
AutoModel.register(NSALabConfig, NSALabModel)
AutoTokenizer.register(NSALabConfig, slow_tokenizer_class=NSALabTokenizer)

__all__ = [
    "CACHE_ARGUMENT",
    "NSALabCache",
    "NSALabConfig",
    "NSALabForCausalLM",
    "NSALabModel",
    "NSALabOutput",
    "NSALabTokenizer",
    "export",
]
