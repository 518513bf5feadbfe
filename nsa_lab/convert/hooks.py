"""Hooks of a converted model, around the dense model's own code.

The modules of the dense model stay as they are. With an attention function of another name
(`model.set_attn_implementation("sdpa")`) the hooks do nothing, and the model is the dense model again.

    model         begin_model, end_model    collect the selection losses of the layers
    model.model   begin_pass, end_pass      find documents, move padding to the end of each row, advance the cache
    self_attn     pass_hidden_states        give the layer's input to the attention function, for the indexer

Hooks are functions without state, so a model can be copied and pickled.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from nsa_lab.attention import Span
from nsa_lab.convert.cache import SparseCache, compute_index_rotary
from nsa_lab.convert.forward_pass import DENSE, HIDDEN, PASS, SPARSE, ForwardPass
from nsa_lab.convert.settings import ConversionSettings
from nsa_lab.inference.hf.cache import GET_CACHE
from nsa_lab.inference.hf.causal_lm import IGNORED_LABEL, NSALabOutput, find_shifted_labels
from nsa_lab.inference.hf.inputs import (
    PaddingPermutation,
    build_layout,
    check_flag,
    check_item_count,
    check_tensor_arguments,
    slice_mask,
    weigh_queries,
)
from nsa_lab.inference.hf.modeling import CACHE_ARGUMENT, AddedLoss, RefusedBackward
from nsa_lab.model import Rotary
from nsa_lab.model.attention_layers import get_layouts

LOSSES, LABELS = "nsa_losses", "nsa_labels"
"""Keyword arguments that the hooks add for each other."""
CACHE_NAMES = ("cache", "past_key_values")


def add_hooks(model: PreTrainedModel, settings: ConversionSettings) -> None:
    """Register the hooks on a dense model."""
    base: Any = model.base_model
    base.conversion = settings
    model.register_forward_pre_hook(begin_model, with_kwargs=True)
    model.register_forward_hook(end_model, with_kwargs=True)
    base.register_forward_pre_hook(begin_pass, with_kwargs=True)
    base.register_forward_hook(end_pass, with_kwargs=True)
    for layer in base.layers:
        layer.self_attn.register_forward_pre_hook(pass_hidden_states, with_kwargs=True)


def is_converted(model: Any) -> bool:
    """Return True unless another attention function was set for the model."""
    return model.config._attn_implementation in (SPARSE, DENSE)


def begin_model(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Ask the layers for their selection losses in a pass that computes gradients in training mode."""
    if not is_converted(model):
        return None
    arguments = _bind(model, args, kwargs)
    check_tensor_arguments(arguments)
    check_item_count(arguments.get("num_items_in_batch"))
    labels, shifted, mask = (arguments.get(name) for name in ("labels", "shift_labels", "attention_mask"))
    inputs = _get_inputs(arguments)
    if _has_labels(arguments) and inputs is not None:  # transformers reports missing inputs
        mask = None if mask is None else slice_mask(mask, *inputs.shape[:2])
        shifted = find_shifted_labels(inputs, labels, shifted, mask)
        # transformers computes a loss only if there are also labels, and flattens shift_labels with `view`.
        arguments |= {"labels": shifted if labels is None else labels, "shift_labels": shifted.contiguous()}
        args, kwargs = (), arguments
    if model.training and torch.is_grad_enabled():
        kwargs = {**kwargs, LOSSES: {}}
        if arguments.get("num_items_in_batch") is not None and shifted is not None:
            kwargs[LABELS] = _find_labels(arguments)
    return args, kwargs


def end_model(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Return the output with `aux_loss`, the sum of the selection losses.

    Times its weight it is added to the loss. Without labels, the backward pass of the logits adds its gradient, so a loss
    that is computed from them trains the indexer too.
    """
    if not kwargs.get(LOSSES):
        return None
    aux_loss = sum_losses(kwargs[LOSSES])
    weighted = aux_loss * model.base_model.conversion.model.selection_loss
    arguments = _bind(model, args, kwargs)
    is_mapping, has_labels = isinstance(output, ModelOutput), _has_labels(arguments)
    # The loss comes first in a tuple if there are labels, and otherwise the logits.
    first = output["loss" if has_labels else "logits"] if is_mapping else output[0]
    weighted = weighted.to(first.device)
    first = first + weighted * _compute_label_share(arguments) if has_labels else AddedLoss.apply(first, weighted)
    if not is_mapping:
        return (first, *output[1:], aux_loss)
    return NSALabOutput(**{**output, "loss" if has_labels else "logits": first, "aux_loss": aux_loss})


def sum_losses(losses: Mapping[int, Tensor]) -> Tensor:
    """Return the sum of the layers' selection losses, 0-d, on the device of the last."""
    values = list(losses.values())
    return torch.stack([value.to(values[-1].device) for value in values]).sum()


def _has_labels(arguments: Mapping[str, Any]) -> bool:
    return any(arguments.get(name) is not None for name in ("labels", "shift_labels"))


def _get_inputs(arguments: Mapping[str, Any]) -> Tensor | None:
    tokens = arguments.get("input_ids")
    return tokens if tokens is not None else arguments.get("inputs_embeds")


def _compute_label_share(arguments: Mapping[str, Any]) -> Tensor | float:
    """Return this batch's share of the labels, by which a Trainer weighs the losses of micro-batches; 1 without it."""
    n_labels = arguments.get("num_items_in_batch")
    return 1.0 if n_labels is None else _find_labels(arguments).sum() / n_labels


def _find_labels(arguments: Mapping[str, Any]) -> Tensor:
    """Return where a label is predicted, bool [B, T], after `begin_model`."""
    return cast(Tensor, arguments["shift_labels"]) != IGNORED_LABEL


def begin_pass(base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Prepare the pass of the base model: find its documents, and move the tokens of each row before its padding."""
    arguments = _bind(base, args, kwargs)
    if not is_converted(base):
        if any(isinstance(arguments.get(name), SparseCache) for name in CACHE_NAMES):
            raise TypeError(
                f"cache: expected one of transformers with attention {base.config._attn_implementation!r}, got a "
                "SparseCache; start without a cache after set_attn_implementation"
            )
        return None
    check_tensor_arguments(arguments)
    if arguments.get("output_attentions"):
        raise NotImplementedError(
            "output_attentions: attention weights are not an output, because no kernel computes their matrix; omit it, or "
            'use model.set_attn_implementation("eager") for dense attention'
        )
    check_flag("use_cache", arguments.get("use_cache"))
    tokens, inputs = arguments.get("input_ids"), _get_inputs(arguments)
    if inputs is None:
        return None  # transformers reports it
    n_rows, n_columns = inputs.shape[:2]
    cache = _get_cache(base, arguments)
    mask = arguments.get("attention_mask")
    if mask is not None:
        mask = slice_mask(mask, n_rows, n_columns)
    has_cache = cache is not None or arguments.get("use_cache") is True
    span = build_layout(inputs, mask, has_cache, arguments, counts_padding=True)
    if cache is None and _wants_cache(base, arguments, span):
        cache = SparseCache(base, base.conversion)
    if cache is not None and base.config._attn_implementation == DENSE:
        raise NotImplementedError(
            f'attention {DENSE!r} has no cache; pass use_cache=False, or use model.set_attn_implementation("sdpa")'
        )
    permutation = None if mask is None else PaddingPermutation(mask)
    counts = [n_columns] * n_rows if permutation is None else permutation.counts
    positions, steps = arguments.get("position_ids"), []
    if cache is not None:
        steps = cache.make_steps(counts)
        positions = cache.make_positions(n_columns, inputs.device) if positions is None else positions
        cache.check_positions(positions.expand(n_rows, -1), mask)
    elif positions is None:
        positions = torch.arange(n_columns, device=inputs.device)[None]
    if permutation is not None:
        inputs, positions = permutation.apply(inputs), permutation.apply(positions.expand(n_rows, -1))
        inputs, positions = inputs[:, : max(counts)], positions[:, : max(counts)]
    query_weights, is_label = None, arguments.pop(LABELS, None)
    if is_label is not None and is_label.shape == (n_rows, n_columns):  # transformers reports other shapes
        n_tokens = None if permutation is None else permutation.mask.sum(1)
        n_queries = base.conversion.model.selection_queries
        query_weights = weigh_queries(is_label, inputs.shape[1], n_queries, span=span, n_tokens=n_tokens)
    arguments[PASS] = ForwardPass(
        settings=base.conversion,
        is_dense=base.config._attn_implementation == DENSE,
        span=span,
        layouts=get_layouts(span, base.conversion.model, inputs.device),
        rotary=_compute_rotary(base, inputs, span) if cache is None else cache.get_rotary(inputs.device),
        n_columns=n_columns,
        counts=counts,
        permutation=permutation,
        cache=cache,
        steps=steps,
        losses=arguments.get(LOSSES, {} if base.training and torch.is_grad_enabled() else None),
        has_gradients=torch.is_grad_enabled(),
        query_weights=query_weights,
    )
    for name in CACHE_NAMES:
        arguments.pop(name, None)
    arguments |= {
        "input_ids": None if tokens is None else inputs,
        "inputs_embeds": None if tokens is not None else inputs,
        "attention_mask": None,
        "position_ids": positions,
        "use_cache": cache is not None,
        CACHE_ARGUMENT: cache,
    }
    return (), arguments


def _compute_rotary(base: Any, inputs: Tensor, span: Span | None) -> Rotary:
    length = inputs.shape[1]
    positions = torch.arange(length, device=inputs.device) if span is None else span.positions(inputs.device)
    return compute_index_rotary(base, positions)


def _get_cache(base: Any, arguments: Mapping[str, Any]) -> SparseCache | None:
    given = [arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None]
    if given and not isinstance(given[0], SparseCache):
        raise TypeError(f"cache: expected a SparseCache, got a {type(given[0]).__name__}; {GET_CACHE}")
    if given and given[0]._model is not base:
        raise ValueError(
            "cache: expected a cache of this model, got that of another one; omit it in the first call with "
            "use_cache=True, which returns one"
        )
    return given[0] if given else None


def _wants_cache(base: Any, arguments: Mapping[str, Any], span: Span | None) -> bool:
    """Return True if a new cache is requested; by the configuration, only for a pass that can have one and may need it."""
    use_cache = arguments.get("use_cache")
    if use_cache is None:
        check_flag("use_cache", base.config.use_cache)
        is_training = base.training and torch.is_grad_enabled()
        return bool(base.config.use_cache) and span is None and not is_training
    return bool(use_cache) and not (base.training and getattr(base, "gradient_checkpointing", False))


def end_pass(base: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Advance the cache and return the output with the columns in their original order."""
    current = kwargs.get(PASS)
    if not isinstance(current, ForwardPass):
        return None
    if current.cache is not None:
        current.cache.finish(current.counts, current.n_columns, current.permutation)
        output = _map_tensors(output, RefusedBackward.apply)
    if (permutation := current.permutation) is not None:
        n_columns = max(current.counts)
        output = _map_tensors(output, lambda x: permutation.restore(x) if x.ndim > 1 and x.shape[1] == n_columns else x)
    if current.losses and LOSSES not in kwargs:
        # The base model was called directly: a loss computed from its output also trains the indexer.
        output = _add_gradient(output, sum_losses(current.losses) * current.settings.model.selection_loss)
    return output


def _map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return an output with `function` applied to all its tensors."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, ModelOutput):
        return type(value)(**{name: _map_tensors(part, function) for name, part in value.items()})
    return tuple(_map_tensors(part, function) for part in value) if isinstance(value, tuple) else value


def _add_gradient(output: Any, loss: Tensor) -> Any:
    if isinstance(output, ModelOutput):
        output["last_hidden_state"] = AddedLoss.apply(output["last_hidden_state"], loss)
        return output
    return (AddedLoss.apply(output[0], loss), *output[1:])


def pass_hidden_states(
    attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give the layer's normalized input to the attention function."""
    if PASS not in kwargs:
        return None
    hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return args, {**kwargs, HIDDEN: hidden}


def _bind(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name."""
    return {**dict(zip(_list_parameters(type(module)), args, strict=False)), **kwargs}


@functools.cache
def _list_parameters(model_class: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(model_class.forward).parameters)[1:]
