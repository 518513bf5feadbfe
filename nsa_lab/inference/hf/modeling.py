"""`NSALabModel`: an `NSATransformer` without its head, as a model of `transformers`, and what models with a head share."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportUntypedBaseClass=false
# pyright: reportIncompatibleMethodOverride=false, reportPrivateImportUsage=false

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache as TransformersCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nsa_lab.attention import resolve_backend
from nsa_lab.attention.input_checks import SUPPORTED_DTYPES
from nsa_lab.config import ConfigError, ModelConfig
from nsa_lab.inference.hf.cache import GET_CACHE, NSALabCache
from nsa_lab.inference.hf.configuration import NSALabConfig, SavedWithImport
from nsa_lab.inference.hf.inputs import (
    PaddingPermutation,
    build_layout,
    check_flag,
    check_tensor_arguments,
    slice_mask,
    weigh_queries,
)
from nsa_lab.model import Block, NSATransformer
from nsa_lab.model.placement import Placement, find_placement
from nsa_lab.runs.finite_weights import describe_nonfinite

# Name of the cache in the arguments and the output of `forward`: `cache` since transformers 5.24.
CACHE_ARGUMENT = next(name for name in ("cache", "past_key_values") if name in CausalLMOutputWithPast.__dataclass_fields__)
# Further arguments of `forward`, by name only.
OTHER_ARGUMENTS = (
    *("output_attentions", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"),
    "cache_position",
)


class Inputs(NamedTuple):
    """Inputs of all columns, padding included."""

    tokens: Tensor | None
    """int64 [B, T]; None with embeddings."""
    embeddings: Tensor | None
    """[B, T, C]; None with tokens."""
    mask: Tensor | None
    """[B, T] or longer."""
    positions: Tensor | None
    """[B, T] or [1, T]."""


class Outputs(NamedTuple):
    """Outputs for all columns, padding included."""

    result: Tensor
    """Logits [B, T, V], or the normalized output of the last block, [B, T, C]."""
    hidden_states: tuple[Tensor, ...] | None
    """[B, T, C] each: the inputs of all blocks and the normalized output; None if not requested."""
    cache: NSALabCache | None


def check_finite_weights(model: nn.Module, source: object) -> None:
    """Raise ConfigError for weights that are NaN or infinite in a model that was loaded from `source`."""
    for name, weight in model.named_parameters():
        # On the meta device are weights that another rank will send; other types and dtypes are quantized or sharded.
        is_plain = type(weight) is nn.Parameter and weight.dtype in SUPPORTED_DTYPES and not weight.is_meta
        if is_plain and (problem := describe_nonfinite(name, weight)):
            raise ConfigError(
                f"{source}: {problem} in {weight.dtype}; save or export the model again, or load it with another dtype"
            )


def register_causal_lm(model_class: Any) -> None:
    """Register a causal language model and its configuration with the Auto classes, the pipelines and the Trainer.

    With `label_smoothing_factor`, a Trainer computes the loss from the logits. It shifts the labels only if the name of the
    model's class is in its list; otherwise each position would be trained to predict its own token.
    """
    config_class = model_class.config_class
    AutoConfig.register(config_class.model_type, config_class)
    AutoModelForCausalLM.register(config_class, model_class)
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config_class.model_type] = model_class.__name__


class SavedModel(SavedWithImport):
    """Base of models that are saved as a folder. A class lists it before its class of `transformers`."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a model as `transformers` does. Raises ConfigError for weights that are NaN or infinite."""
        parent: Any = super()
        loaded = parent.from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        # With `output_loading_info`, the model is the first of two results.
        check_finite_weights(loaded[0] if isinstance(loaded, tuple) else loaded, pretrained_model_name_or_path)
        return loaded


class NSALabModel(SavedModel, PreTrainedModel):
    """`NSATransformer` without its head, as a model of `transformers`; `self.model` is the `NSATransformer`.

    transformer: the `NSATransformer`; None: build one from `config`.
    """

    config_class = NSALabConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012 - as transformers declares it

    def __init__(self, config: NSALabConfig, transformer: NSATransformer | None = None) -> None:
        super().__init__(config)
        config.check_sizes()  # `from_pretrained` sets attributes after the configuration was checked
        if transformer is None:
            # from_pretrained builds the model on the meta device, where no backend can be resolved yet.
            device = torch.empty(0).device
            backend = "torch" if device.type == "meta" else config.backend
            transformer = NSATransformer(ModelConfig(**config.architecture), backend=backend, device=device)
        for parameter in transformer.parameters():
            if not parameter.is_meta:
                parameter._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]
        self.model = transformer
        self._resolved_for: Placement | None = None
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize all weights that a loaded folder does not have as in a new model; `transformers` warns of them.

        `module`: any module that has such a weight; `transformers` does not call it for modules without.
        """
        missing = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if not getattr(parameter, "_is_hf_initialized", False) and not parameter.is_meta
        }
        if missing:
            with torch.device("cpu"):
                initialized = NSATransformer(self.model.config, backend="torch")
            for name, parameter in missing.items():
                parameter.copy_(initialized.get_parameter(name))
                parameter._is_hf_initialized = True  # pyright: ignore[reportAttributeAccessIssue]

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Set the switch of `NSATransformer`, for `gradient_checkpointing_enable` and a Trainer.

        `use_reentrant=True` has no effect: that form keeps only gradients of tensors that a block returns directly, and
        would drop the selection loss.
        """
        self.model.gradient_checkpointing, self.model.checkpoint_interval = enable, every_n_layers
        self.model.checkpoint_function = functools.partial(gradient_checkpointing_func, use_reentrant=False)

    @property
    def base_model(self) -> NSALabModel:
        return self

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embedding = value

    def get_decoder(self, *_: Any, **__: Any) -> nn.Module:
        return self.base_model

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *_: Any, **__: Any) -> nn.Module:
        """Return the embedding unchanged. Raises NotImplementedError for another size, which is another architecture."""
        if new_num_tokens not in (None, self.config.vocab_size):
            raise NotImplementedError(
                f"{type(self).__name__}: expected {self.config.vocab_size} tokens, which are part of the architecture, got "
                f"{new_num_tokens}; train a model with another model.vocab_size and data.tokenizer"
            )
        return self.model.embedding

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: NSALabCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache: NSALabCache | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """Return `last_hidden_state` [B, T, C], the normalized output of the last block. Arguments and errors as in
        `NSALabForCausalLM.forward`.

        In training, the gradient of the weighted selection loss is added to that of `last_hidden_state`: a loss computed
        from it also trains the indexer.
        """
        outputs = self._run(
            Inputs(input_ids, inputs_embeds, attention_mask, position_ids),
            self._get_cache(cache, past_key_values),
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            others=others,
            output="hidden",
        )
        hidden = self._add_selection_loss(outputs.result)
        if not self._get_flag(return_dict, "return_dict", default=True):
            return tuple(part for part in (hidden, outputs.cache, outputs.hidden_states) if part is not None)
        cache_output: dict[str, Any] = {CACHE_ARGUMENT: outputs.cache}
        return BaseModelOutputWithPast(last_hidden_state=hidden, hidden_states=outputs.hidden_states, **cache_output)

    @property
    def _selection_loss(self) -> Tensor | None:
        """The selection loss of the last forward pass, before its weight; None in evaluation and without an indexer."""
        return self.model._selection_loss

    def _add_selection_loss(self, result: Tensor) -> Tensor:
        """Return `result`, with the gradient of the weighted selection loss added to its own in training."""
        if self._selection_loss is None or not torch.is_grad_enabled():
            return result
        return AddedLoss.apply(result, self.model.auxiliary_loss())

    def _get_flag(self, value: bool | None, name: str, *, default: bool = False) -> bool:
        """Return an argument of `forward`; None: the value of the configuration."""
        value = getattr(self.config, name, default) if value is None else value
        check_flag(name, value)
        return bool(value)

    def _run(
        self,
        inputs: Inputs,
        cache: NSALabCache | None,
        *,
        use_cache: bool | None,
        output_hidden_states: bool | None,
        others: Mapping[str, Any],
        output: str,
        columns: Tensor | slice | None = None,
        find_labels: Callable[[Tensor], Tensor] | None = None,
    ) -> Outputs:
        """Check the arguments of `forward` and run the model. `output`, `columns`: as in `NSATransformer.forward`.

        `find_labels`: returns, for the tokens or their embeddings, where a label is predicted, bool [B, T]. The selection
        loss of a text is then weighted by its number of labels.
        """
        self._check_names(others)
        names = "input_ids", "inputs_embeds", "attention_mask", "position_ids"
        check_tensor_arguments(dict(zip(names, inputs, strict=True)))
        for value in (use_cache, self.config.use_cache):
            check_flag("use_cache", value)
        has_cache = cache is not None or bool(
            self.config.use_cache and not self.training if use_cache is None else use_cache
        )
        tokens, embeddings = inputs.tokens, inputs.embeddings
        if (tokens is None) == (embeddings is None):
            raise ValueError(
                f"{type(self).__name__}.forward: expected either input_ids= or inputs_embeds=, got both or neither"
            )
        if tokens is not None and 0 in tokens.shape:
            raise ValueError(
                f"input_ids: expected int64 [B, T], B and T at least 1, got {tuple(tokens.shape)}; begin an empty text "
                "with the separator token"
            )
        if self._get_flag(others.get("output_attentions"), "output_attentions"):
            raise NotImplementedError(
                f"{type(self).__name__}.forward: attention weights are not an output, because no kernel computes their "
                "matrix; omit output_attentions=, and use NSATransformer.observe for selected blocks and gates"
            )
        self._resolve_backends()
        data = cast(Tensor, embeddings if tokens is None else tokens)
        mask = None if inputs.mask is None else slice_mask(inputs.mask, *data.shape[:2])
        permutation = None if mask is None else PaddingPermutation(mask)
        span = build_layout(data, mask, has_cache, {"position_ids": inputs.positions, **others})
        query_weights = None
        if find_labels is not None and self.training and self.model.config.has_selection_loss:
            query_weights = weigh_queries(
                find_labels(data),
                data.shape[1],
                self.model.config.selection_queries,
                span=span,
                n_tokens=None if permutation is None else permutation.mask.sum(1),
            )
        if permutation is not None:
            tokens, embeddings = (None if x is None else permutation.apply(x) for x in (tokens, embeddings))
        with_hidden = self._get_flag(output_hidden_states, "output_hidden_states")
        if cache is None and has_cache:
            cache = NSALabCache(self.model)
        if cache is not None and inputs.positions is not None:
            cache.check_positions(inputs.positions, mask)
        # Padding moves columns: with a mask, the requested ones are selected after the order is restored.
        early_columns = columns if cache is None and permutation is None and not with_hidden else None
        hidden_states: tuple[Tensor, ...] = ()
        if cache is not None:
            result, hidden_states = cache.append(
                tokens, embeddings, permutation, with_hidden=with_hidden or output == "hidden"
            )
        elif with_hidden:
            result, hidden_states = self.model(
                tokens, span, embeddings=embeddings, output="all", query_weights=query_weights
            )
        else:
            result = self.model(
                tokens, span, embeddings=embeddings, columns=early_columns, output=output, query_weights=query_weights
            )
        if output == "hidden" and hidden_states:
            result = hidden_states[-1]
        if permutation is not None:
            result = permutation.restore(result)
            hidden_states = tuple(map(permutation.restore, hidden_states))
        if columns is not None and early_columns is None:
            result = result[:, columns]
        return Outputs(result, hidden_states if with_hidden else None, cache)

    def _check_names(self, others: Mapping[str, Any]) -> None:
        """Raise TypeError for a keyword that `forward` does not have, and for a cache under another name."""
        for name, value in others.items():
            if name in OTHER_ARGUMENTS:
                continue
            if isinstance(value, TransformersCache):
                raise TypeError(
                    f"{type(self).__name__}.forward: expected the cache as cache= or past_key_values=, got {name}=; "
                    "install a tested version of transformers (5.0 to 5.24)"
                )
            own = [known for known in inspect.signature(type(self).forward).parameters if known not in ("self", "others")]
            nearest = difflib.get_close_matches(name, [*own, *OTHER_ARGUMENTS], n=1, cutoff=0)[0]
            raise TypeError(
                f"{type(self).__name__}.forward: got an unexpected keyword argument {name}=; the nearest is {nearest}="
            )

    def _get_cache(self, *caches: NSALabCache | None) -> NSALabCache | None:
        """Return the cache that was passed, or None. Raises TypeError for two of them and for one of another class,
        ValueError for that of another model.
        """
        given = [cache for cache in caches if cache is not None]
        if len(given) == 2:
            raise TypeError(
                f"{type(self).__name__}.forward: cache= and past_key_values= are the same argument; give only one"
            )
        if given and not isinstance(given[0], NSALabCache):
            raise TypeError(
                f"{type(self).__name__}.forward: expected an NSALabCache, got {type(given[0]).__name__}; {GET_CACHE}"
            )
        if given and given[0]._model is not self.model:
            raise ValueError(
                f"{type(self).__name__}.forward: expected a cache of this model, got that of another one; omit it in the "
                "first call with use_cache=True, which returns one"
            )
        return given[0] if given else None

    def _resolve_backends(self) -> None:
        """Resolve the backends again if the device or dtype of the weights has changed."""
        placement, config = find_placement(self.model), self.model.config
        if placement != self._resolved_for:
            backends = resolve_backend(*placement, config.nsa, config, self.config.backend)
            self.model.backends = backends
            for module in self.model.modules():
                if isinstance(module, Block):
                    module.attention.backends = backends
            self._resolved_for = placement


class AddedLoss(torch.autograd.Function):
    """Return x, and add the gradient of `loss` to the backward pass, as if it were added to a loss computed from x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.new_ones(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        return grad_outputs[0], ctx.like


class RefusedBackward(torch.autograd.Function):
    """Return x of a pass with a cache, and refuse its backward pass: cached keys and values have no gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        raise NotImplementedError(
            "use_cache: a pass with a cache has no gradients; pass use_cache=False, or call model.train() first"
        )
