"""The decision to read weights directly, for fused kernels and CUDA graphs, instead of calling their module.

A call of a module may do more than its class does with its weights: hooks, parametrizations, adapters, quantization,
sharding, offloading. `is_plain` is the only place that decides this, for every map and every backend. If it returns False,
the module is called, so that a cached step computes what a forward pass computes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from nsa_lab.attention.compression import BlockMap, BlockPool
from nsa_lab.model import MLP, Block, DenseAttention, Indexer, NSATransformer, RMSNorm, ShortConvolution, SparseAttention
from nsa_lab.model.ngrams import NgramEmbedding

# Classes whose computation the fused path knows, and the parameters of each.
_PARAMETERS: dict[type[nn.Module], set[str]] = {
    nn.Linear: {"weight", "bias"},
    nn.Embedding: {"weight"},
    RMSNorm: {"weight"},
    ShortConvolution: {"weight"},
    BlockMap: {"position"},
    BlockPool: {"score", "place"},
    **{cls: set() for cls in (nn.SiLU, nn.Sequential, nn.ModuleList, Indexer, MLP, NgramEmbedding)},
    **{cls: set() for cls in (SparseAttention, DenseAttention, Block, NSATransformer)},
}
# Their own methods at import: the fused path does not know a method that replaces one of them.
_METHODS: dict[type[nn.Module], dict[str, Callable[..., Any]]] = {
    cls: {name: method for name, method in vars(cls).items() if callable(method)} for cls in _PARAMETERS
}


def is_plain(module: nn.Module, like: Tensor) -> bool:
    """Return True if a call of `module` only applies the weights of its class and of the classes of its submodules.

    All classes belong to this library or PyTorch and are not subclassed; there are no hooks, parametrizations or replaced
    methods. Every weight is a dense, contiguous `nn.Parameter` with the dtype and device of `like`; linear layers have no
    bias. Autocast and global module hooks also change what a call computes; under them the result is False.
    """
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return False
    if torch.is_autocast_enabled(like.device.type):
        return False
    return all(_is_plain_module(part, like) for part in module.modules())


class WeightSnapshot:
    """The state of a plain model when a CUDA graph was captured: the graph reads the memory of these weights.

    `is_current` costs a small part of a decode step. It finds every change that `is_plain` would, and replaced or moved
    weights. A snapshot keeps their memory allocated, because a replay starts before the check.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device_type = device.type
        self._modules = list(model.modules())
        # The dictionaries of all modules, which a change of a module changes in place.
        self._attributes = [module.__dict__ for module in self._modules]
        self._hooks = [hooks for module in self._modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._children_by_name = [module._modules for module in self._modules if module._modules]
        self._weights_by_name = [module._parameters for module in self._modules if module._parameters]
        self._classes, self._n_attributes = self._get_classes(), self._count_attributes()
        self._unique_classes = {*self._classes}
        self._children, self._weights = self._get_children(), self._get_weights()
        self._addresses = self._get_addresses()
        self._memory = [weight.detach() for weight in self._weights if weight is not None]

    def is_current(self) -> bool:
        """Return True if the model is as it was, and neither global hooks nor autocast change what a call computes."""
        children, weights = self._get_children(), self._get_weights()
        return (
            not torch_module._global_forward_hooks
            and not torch_module._global_forward_pre_hooks
            and not torch.is_autocast_enabled(self._device_type)
            and not any(self._hooks)
            and self._get_classes() == self._classes
            and all(map(_has_own_methods, self._unique_classes))
            and self._count_attributes() == self._n_attributes
            and len(children) == len(self._children)
            and all(map(is_, children, self._children))
            and len(weights) == len(self._weights)
            and all(map(is_, weights, self._weights))
            and self._get_addresses() == self._addresses
        )

    def _get_classes(self) -> list[type]:
        return list(map(type, self._modules))

    def _count_attributes(self) -> list[int]:
        return list(map(len, self._attributes))

    def _get_children(self) -> list[nn.Module | None]:
        return [*chain.from_iterable(map(dict.values, self._children_by_name))]

    def _get_weights(self) -> list[nn.Parameter | None]:
        return [*chain.from_iterable(map(dict.values, self._weights_by_name))]

    def _get_addresses(self) -> list[int]:
        return [weight.data_ptr() for weight in self._weights if weight is not None]


def _is_plain_module(module: nn.Module, like: Tensor) -> bool:
    """Return `is_plain` of one module without its submodules."""
    cls = type(module)
    if cls not in _PARAMETERS or not _has_own_methods(cls):
        return False
    if module._forward_hooks or module._forward_pre_hooks or not _get_method_names(cls).isdisjoint(module.__dict__):
        return False
    if isinstance(module, nn.Linear) and module.bias is not None:
        return False
    if isinstance(module, nn.Embedding) and module.max_norm is not None:  # a lookup then changes the weight
        return False
    weights = module._parameters
    return weights.keys() == _PARAMETERS[cls] and all(
        weight is None or _is_plain_weight(weight, like) for weight in weights.values()
    )


def _has_own_methods(cls: type[nn.Module]) -> bool:
    """Return True if no method of a class in `_PARAMETERS` was replaced."""
    return all(map(is_, map(vars(cls).get, _METHODS[cls]), _METHODS[cls].values()))


def _is_plain_weight(weight: nn.Parameter, like: Tensor) -> bool:
    return (
        type(weight) is nn.Parameter
        and weight.layout is torch.strided
        and weight.device == like.device
        and weight.dtype is like.dtype
        and weight.is_contiguous()
    )


@cache
def _get_method_names(cls: type[nn.Module]) -> frozenset[str]:
    """Return the names of the methods of `cls`, none of which an instance may replace."""
    return frozenset(name for name in dir(cls) if callable(getattr(cls, name)))
