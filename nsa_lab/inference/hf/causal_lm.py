"""`NSALabForCausalLM`: an `NSATransformer` as a causal language model of `transformers`, with `generate` and a loss."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportUntypedBaseClass=false
# pyright: reportIncompatibleMethodOverride=false, reportPrivateImportUsage=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast

from nsa_lab.inference.hf.cache import NSALabCache, PassesCacheToPeft, check_cache_implementation
from nsa_lab.inference.hf.configuration import NSALabConfig
from nsa_lab.inference.hf.inputs import check_item_count, check_tensor_arguments
from nsa_lab.inference.hf.modeling import CACHE_ARGUMENT, Inputs, NSALabModel
from nsa_lab.model import NSATransformer

IGNORED_LABEL = -100


@dataclass
class NSALabOutput(CausalLMOutputWithPast):
    """Output of `NSALabForCausalLM`. `aux_loss`: the selection loss in training, 0-d, before its weight; otherwise None."""

    aux_loss: Tensor | None = None


class NSALabForCausalLM(PassesCacheToPeft, NSALabModel, GenerationMixin):
    """`NSATransformer` as a causal language model of `transformers`; `self.model` is the `NSATransformer`."""

    # With `tie_word_embeddings` in the configuration, the head has the weights of the embedding.
    _tied_weights_keys = {"model.head.weight": "model.embedding.weight"}  # noqa: RUF012 - as transformers declares it
    accepts_loss_kwargs = True  # num_items_in_batch: the loss of a Trainer does not depend on its micro-batches

    def __init__(self, config: NSALabConfig, transformer: NSATransformer | None = None) -> None:
        super().__init__(config, transformer)
        if self.generation_config is not None:
            self.generation_config.use_cache = True  # the configuration's value is for calls of the model

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `generate` creates an NSALabCache

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any) -> Any:
        """Create the cache of `generate`, which assisted generation needs before the first forward pass.

        Raises NotImplementedError for `assistant_early_exit`.
        """
        if generation_config.assistant_early_exit is not None:
            raise NotImplementedError(
                f"assistant_early_exit = {generation_config.assistant_early_exit}: expected None, because the head is "
                "trained on the output of the last layer only, and all layers share one cache; omit it, and use "
                "assistant_model= with a smaller model or prompt_lookup_num_tokens="
            )
        if generation_config.use_cache is not False:
            check_cache_implementation(generation_config)
        result = super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        names = ("cache", "past_key_values")
        if generation_config.use_cache is not False and all(model_kwargs.get(name) is None for name in names):
            model_kwargs[CACHE_ARGUMENT] = NSALabCache(self.model)
        return result

    def init_continuous_batching(self, *_: Any, **__: Any) -> None:
        """Raise NotImplementedError for `generate_batch` and `cache_implementation="paged"`.

        Their paged cache has one kind of keys and values per layer. Errors in their thread end in empty texts.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: continuous batching is not supported, because the model has its own cache; use "
            "generate without cache_implementation, with padded prompts"
        )

    def _prepare_attention_mask_for_generation(
        self, inputs_tensor: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> Tensor:
        """Infer padding from the pad token only in a prompt. After cached tokens, as an assistant's, it is a token."""
        caches = (model_kwargs.get(name) for name in ("cache", "past_key_values"))
        cache = next((cache for cache in caches if isinstance(cache, NSALabCache)), None)
        if cache is None or not 0 < cache.get_seq_length() <= inputs_tensor.shape[1]:
            return super()._prepare_attention_mask_for_generation(inputs_tensor, generation_config, model_kwargs)
        mask = cache.make_mask(len(inputs_tensor)).to(inputs_tensor.device, torch.int64)
        return pad(mask, (0, inputs_tensor.shape[1] - mask.shape[1]), value=1)

    @property
    def base_model(self) -> NSALabModel:
        """The model without the head, with the same weights. It is not a submodule: its weights have one name."""
        view = self.__dict__.get("_base_model")
        if view is None or view.model is not self.model:
            view = NSALabModel(cast(NSALabConfig, self.config), self.model)
            object.__setattr__(self, "_base_model", view)
        return view

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save the model. The configuration records whether the head has the weights of the embedding."""
        head, embedding = (getattr(module, "weight", None) for module in (self.model.head, self.model.embedding))
        self.config.tie_word_embeddings = head is not None and head is embedding
        super().save_pretrained(*args, **kwargs)

    def get_output_embeddings(self) -> nn.Module:
        return self.model.head

    def set_output_embeddings(self, value: nn.Module) -> None:
        self.model.head = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: NSALabCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        cache: NSALabCache | None = None,
        **others: Any,
    ) -> NSALabOutput | tuple[Any, ...]:
        """Return logits [B, T, V] of input_ids int64 [B, T], and the loss for `labels`. Logits of padding are undefined.

        attention_mask: [B, T] or longer; the last T columns are used. 1 for a token, 0 for padding, which has no position.
        position_ids: in a single row without padding or cache, positions that restart at 0 separate documents, as
            `DataCollatorWithFlattening` packs them; each document is computed as if alone. None: one text per row.
        others, by name only: cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k and seq_idx are accepted with
            position_ids, which they repeat; cache_position is not used; output_attentions is refused.
        inputs_embeds: [B, T, C], outputs of the embedding or other vectors, instead of input_ids.
        use_cache: return a cache of the tokens. With a cache there are no gradients. None: as in the configuration, and
            False in training mode.
        cache, past_key_values: a cache from an earlier call, under either name. The output uses the name of the installed
            `transformers` version.
        labels: int64 [B, T], shifted inside; shift_labels (by name only): int64 [B, T], already shifted, which are used if
            both are passed. -100 is ignored, and so is every label that a column of padding predicts. The loss is the mean
            NLL over labels; in training, plus the selection loss of an indexer (`aux_loss`) times its weight in the
            configuration.
        num_items_in_batch: number of labels in all micro-batches of an optimizer step, by which the loss is then divided.
            The selection loss of a text is then weighted by its number of labels, so that it does not depend on how a
            batch is divided either. Without labels the number has no effect: every call adds the whole gradient of the
            selection loss to the logits.
        output_hidden_states: return the inputs of all blocks and the normalized output of the last block.
        logits_to_keep: number of columns at the end (0: all), or an index of columns.
        output_hidden_states, return_dict: None: as in the configuration.

        Raises ValueError for other masks, positions and labels, for both kinds of input, and for another model's cache;
        TypeError for both cache names at once, a cache of another class and unknown keywords; NotImplementedError for
        attention weights as outputs.
        """
        # Not a parameter: a Trainer takes every parameter whose name contains "label" for a column of its data.
        shift_labels = others.pop("shift_labels", None)
        check_tensor_arguments({"labels": labels, "shift_labels": shift_labels})
        check_item_count(num_items_in_batch)
        has_labels = labels is not None or shift_labels is not None
        if isinstance(logits_to_keep, Tensor):
            columns = logits_to_keep
        elif logits_to_keep < 0:
            raise ValueError(
                f"logits_to_keep = {logits_to_keep}: expected a number of columns, 0 for all, or their indices"
            )
        else:
            columns = slice(-logits_to_keep, None) if logits_to_keep else None

        def shift(inputs: Tensor) -> Tensor:
            return find_shifted_labels(inputs, labels, shift_labels, attention_mask)

        def find_labels(inputs: Tensor) -> Tensor:
            return shift(inputs).to(inputs.device) != IGNORED_LABEL

        outputs = self._run(
            Inputs(input_ids, inputs_embeds, attention_mask, position_ids),
            self._get_cache(cache, past_key_values),
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            others=others,
            output="logits",
            columns=None if has_labels else columns,
            find_labels=find_labels if num_items_in_batch is not None and has_labels else None,
        )
        logits, loss, aux_loss = outputs.result, None, self._selection_loss
        if has_labels:
            loss = self._compute_loss(logits, labels, shift(logits), num_items_in_batch)
            logits = logits if columns is None else logits[:, columns]
        elif aux_loss is not None:
            logits, aux_loss = self._add_selection_loss(logits), aux_loss.detach()
        if not self._get_flag(return_dict, "return_dict", default=True):
            parts = loss, logits, outputs.cache, outputs.hidden_states, aux_loss
            return tuple(part for part in parts if part is not None)
        cache_output: dict[str, Any] = {CACHE_ARGUMENT: outputs.cache}
        return NSALabOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, aux_loss=aux_loss, **cache_output
        )

    def _compute_loss(
        self,
        logits: Tensor,
        labels: Tensor | None,
        shift_labels: Tensor,
        num_items_in_batch: Tensor | int | None,
    ) -> Tensor:
        """Return the mean NLL over labels plus the weighted selection loss, 0-d."""
        loss = self.loss_function(
            logits,
            labels,
            vocab_size=self.config.vocab_size,
            shift_labels=shift_labels.contiguous(),  # transformers flattens them with `view`
            num_items_in_batch=num_items_in_batch,
        )
        if self._selection_loss is None:
            return loss
        weighted = self.model.auxiliary_loss().to(loss.device)
        if num_items_in_batch is not None:
            # The losses of all micro-batches are added: weight each by its share of the labels, as `weigh_queries` weights
            # the texts of a micro-batch.
            weighted = weighted * (shift_labels != IGNORED_LABEL).sum() / num_items_in_batch
        return loss + weighted


def find_shifted_labels(
    inputs: Tensor, labels: Tensor | None, shift_labels: Tensor | None, attention_mask: Tensor | None
) -> Tensor:
    """Return the label that each column predicts, int64 [B, T], `IGNORED_LABEL` at padding. inputs: [B, T, ...].

    Raises ValueError for labels of another shape or dtype.
    """
    shape = inputs.shape[:2]
    for name, given in (("labels", labels), ("shift_labels", shift_labels)):
        if given is not None and (given.shape != shape or given.dtype != torch.int64):
            raise ValueError(f"{name}: expected int64 [B, T], {tuple(shape)}, got {given.dtype} {tuple(given.shape)}")
    if shift_labels is None:
        shift_labels = pad(cast(Tensor, labels)[:, 1:], (0, 1), value=IGNORED_LABEL)
    if attention_mask is not None:
        # Logits of padding are undefined, also those before the first token of a row.
        is_padding = attention_mask[:, -shape[1] :] == 0
        shift_labels = shift_labels.masked_fill(is_padding.to(shift_labels.device), IGNORED_LABEL)
    return shift_labels
