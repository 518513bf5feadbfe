"""The test classes of `transformers` for a causal language model, with `NSALabForCausalLM`.

test_transformers_suites.py runs it in a separate process, with a test tree of `transformers` on the path.
"""

from __future__ import annotations

import unittest
from typing import Any

from tests.generation.test_utils import GenerationTesterMixin
from tests.test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask
from tests.test_training_mixin import TrainingTesterMixin
from transformers import set_seed
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
from transformers.testing_utils import torch_device

from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.inference import hf

# Some tests run only for classes that `transformers` lists.
MODEL_MAPPING_NAMES[hf.NSALabConfig.model_type] = hf.NSALabModel.__name__


class NSALabModelTester:
    """Configuration and inputs of a small model, in the form that the classes of `transformers` expect."""

    causal_lm_class = hf.NSALabForCausalLM
    base_model_class = hf.NSALabModel
    config_class = hf.NSALabConfig

    def __init__(self, parent: unittest.TestCase, **_: Any) -> None:
        self.parent = parent
        self.batch_size, self.seq_length, self.is_training = 3, 30, True
        self.use_input_mask, self.use_cache = True, False
        self.vocab_size, self.hidden_size, self.num_hidden_layers, self.num_attention_heads = 99, 32, 2, 4
        self.intermediate_size, self.pad_token_id = 128, 0

    def get_config(self) -> hf.NSALabConfig:
        nsa = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=12)
        sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 8, "d_v": 8, "vocab_size": 99, "nsa": nsa}
        return hf.NSALabConfig(ModelConfig(**sizes).model_dump(), pad_token_id=0, bos_token_id=1, use_cache=self.use_cache)

    def prepare_config_and_inputs_for_common(self) -> tuple[hf.NSALabConfig, dict[str, Any]]:
        tokens = ids_tensor([self.batch_size, self.seq_length], self.vocab_size).to(torch_device)
        if not self.use_input_mask:
            return self.get_config(), {"input_ids": tokens}
        mask = random_attention_mask([self.batch_size, self.seq_length]).to(torch_device)
        return self.get_config(), {"input_ids": tokens, "attention_mask": mask}


class CausalLMSuite(ModelTesterMixin, GenerationTesterMixin, TrainingTesterMixin, unittest.TestCase):
    all_model_classes = (hf.NSALabModel, hf.NSALabForCausalLM)
    all_generative_model_classes = (hf.NSALabForCausalLM,)
    test_resize_embeddings = False  # the vocabulary is part of the architecture
    has_attentions = False  # no kernel computes a matrix of attention weights
    pipeline_model_mapping: dict[str, Any] = {}  # noqa: RUF012 - as transformers declares it

    def setUp(self) -> None:
        set_seed(0)
        self.model_tester = NSALabModelTester(self)

    def test_left_padding_compatibility(self) -> None:
        """`transformers` runs it only for models with attention weights as outputs."""
        self.has_attentions, self.model_tester.use_input_mask = True, False  # logits of padding are undefined
        super().test_left_padding_compatibility()

    def test_generate_continue_from_past_key_values(self) -> None:
        """`transformers` runs it, and the next test, only for models that return a cache by default."""
        self.model_tester.use_cache = True
        super().test_generate_continue_from_past_key_values()

    def test_generate_continue_from_inputs_embeds(self) -> None:
        self.model_tester.use_cache = True
        super().test_generate_continue_from_inputs_embeds()

    def _check_past_key_values_for_generate(
        self, batch_size: int, past_key_values: hf.NSALabCache, seq_length: int, config: hf.NSALabConfig
    ) -> None:
        """Replace the checks of layers with one key and value per token."""
        self.assertIsInstance(past_key_values, hf.NSALabCache)
        self.assertEqual((past_key_values.batch_size, past_key_values.get_seq_length()), (batch_size, seq_length))

    def _prepare_for_class(
        self, inputs_dict: dict[str, Any], model_class: type, return_labels: bool = False
    ) -> dict[str, Any]:
        """Add labels, which `transformers` gives only to its own classes."""
        inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels=return_labels)
        if return_labels and model_class is hf.NSALabForCausalLM:
            inputs["labels"] = inputs["input_ids"]
        return inputs
