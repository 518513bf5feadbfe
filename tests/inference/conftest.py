"""Models and the tokenizer for `transformers`, which is imported where a test needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tiny_models import TINY_NSA

if TYPE_CHECKING:
    from nsa_lab.inference import hf

VARIANTS = [
    {},
    {"attention": "dense"},
    {"rotary_share": 0.5, "matching_heads": 1, "selection_loss": 0.1, "indexer_block": 2},
    {"nsa": TINY_NSA.model_copy(update={"phi": "mlp", "gate": "softmax"})},
    {"ngrams": 4, "ngram_rows": 100, "ngram_width": 5},
    {
        "branches": ("sel", "win"),
        "shared_kv": True,
        "selection_loss": 0.1,
        "indexer_block": 2,
        "indexer_every": 2,
        "indexer_order": ("pool", "norm", "rotate"),
        "indexer_dtype": "fp8",
    },
]


@pytest.fixture(params=VARIANTS)
def model(request: pytest.FixtureRequest) -> hf.NSALabForCausalLM:
    from hf_models import make_model

    return make_model(**request.param).eval()


@pytest.fixture
def tokenizer() -> hf.NSALabTokenizer:
    from nsa_lab.inference import hf

    return hf.NSALabTokenizer()
