"""Models of this project in `transformers` (extra `hf`): `generate`, `pipeline`, `from_pretrained`, by that library's code.

Importing this module registers a configuration, a model and a tokenizer with the Auto classes, under the name `nsa_lab`.
Padding may stand anywhere: rows are read without it, each at positions of its own, so that a sequence in a batch is the
sequence by itself. (`generate` goes on behind the last column, so that prompts of a batch are padded on the left.)
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportUntypedBaseClass=false

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nsa_lab.attention import Span, resolve_backend
from nsa_lab.config import ModelConfig, RunConfig
from nsa_lab.config.optional_deps import require
from nsa_lab.data import ByteTokenizer, load_tokenizer
from nsa_lab.inference.decode import Decoder
from nsa_lab.inference.load import find_checkpoint, load_model
from nsa_lab.inference.package import check_new_folder
from nsa_lab.model import Block, NSATransformer
from nsa_lab.runs import directory
from nsa_lab.runs.atomic_io import write_text

require("transformers")
from transformers import (  # noqa: E402 - the extra is named first
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.cache_utils import Cache as TransformersCache  # noqa: E402
from transformers.modeling_outputs import CausalLMOutputWithPast  # noqa: E402

MIN_CACHE_TOKENS = 256  # tokens that a cache begins with; it doubles as it fills
# What a folder needs so that `trust_remote_code=True` loads it where this module was not imported.
REMOTE_CODE = "nsa_lab_in_transformers.py"
# What that library calls a cache, in what it hands to `forward` and takes from it: another name from 5.24 on.
CACHE_ARGUMENT = next(name for name in ("cache", "past_key_values") if name in CausalLMOutputWithPast.__dataclass_fields__)
AUTO_MAP = {"AutoConfig": "NSALabConfig", "AutoModelForCausalLM": "NSALabForCausalLM"}


class NSALabConfig(PreTrainedConfig):
    """`architecture` is a `ModelConfig` as a mapping, with its section `nsa`; `backend` as `NSATransformer` takes it."""

    model_type = "nsa_lab"

    def __init__(self, architecture: Mapping[str, Any] | None = None, backend: str = "auto", **kwargs: Any) -> None:
        config = ModelConfig(**(architecture or {}))
        self.architecture, self.backend = config.model_dump(), backend
        self.vocab_size, self.hidden_size = config.vocab_size, config.dim
        self.num_hidden_layers, self.num_attention_heads = config.n_layers, config.n_heads
        super().__init__(**{"tie_word_embeddings": False, **kwargs})


class NSALabCache(TransformersCache):
    """What a model keeps of the sequences that it generates: a `Decoder`, with more room whenever it is full."""

    def __init__(self, model: NSATransformer, batch: int) -> None:
        super().__init__(layers=[])
        self._model, self._batch, self._n_columns = model, batch, 0
        self.decoder: Decoder | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> NSALabCache:
        """What was read, so that several generations can go on from one prompt; the model is the same one."""
        memo[id(self._model)] = self._model
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def append(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """Logits [B, n, V] of the next tokens int64 [B, n]; `counts` as `Decoder.append` has them."""
        needed = (max(self.decoder.cache.starts) if self.decoder else 0) + tokens.shape[1]
        if self.decoder is None:
            self.decoder = Decoder(self._model, max(MIN_CACHE_TOKENS, 2 * needed), self._batch)
        elif needed > self.decoder.cache.capacity:
            self.decoder.grow(2 * needed)
        return self.decoder.append(tokens, counts)

    def count_columns(self, n_columns: int) -> None:
        """So many columns of input, padding included, were read: what `transformers` calls a length."""
        self._n_columns += n_columns

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._n_columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.decoder is not None:
            self.decoder.cache.reorder(beam_idx.tolist())

    def reset(self) -> None:
        self.decoder, self._n_columns = None, 0

    def crop(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("NSALabCache: tokens cannot be taken back, as assisted generation asks; use no assistant")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError("NSALabCache: repeat the prompts, not their cache")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise NotImplementedError("NSALabCache: a batch keeps its size; begin a cache of another size anew")

    @property
    def is_linear(self) -> list[bool]:
        return [False]  # of layers that it does not list: it grows with the text, and what is in it is not read again

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def batch_size(self) -> int:
        return self._batch


class NSALabForCausalLM(PreTrainedModel, GenerationMixin):
    """`NSATransformer` as `transformers` has causal language models; `self.model` is the model itself."""

    config_class = NSALabConfig
    base_model_prefix = "model"
    accepts_loss_kwargs = False  # a loss is the mean over its own batch, whatever a Trainer accumulates
    _no_split_modules = ["Block"]  # noqa: RUF012 - that library's own form

    def __init__(self, config: NSALabConfig) -> None:
        super().__init__(config)
        # On the meta device, where weights are loaded from disk, there is nothing to compute on yet.
        device = torch.empty(0).device
        backend = "torch" if device.type == "meta" else config.backend
        self.model = NSATransformer(ModelConfig(**config.architecture), backend=backend, device=device)
        self._resolved_for: tuple[torch.device, torch.dtype] | None = None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """`NSATransformer` has done it."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first forward pass of a generation makes its own

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.model.head

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *_: Any, **__: Any) -> nn.Embedding:
        """The embedding as it is. Raises NotImplementedError for another size: it is part of the architecture."""
        if new_num_tokens not in (None, self.config.vocab_size):
            raise NotImplementedError(
                f"NSALabForCausalLM: {self.config.vocab_size} tokens are part of the architecture, and {new_num_tokens} "
                "would be another one: train a model with model.vocab_size and data.tokenizer"
            )
        return self.model.embedding

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: NSALabCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        cache: NSALabCache | None = None,
        **unread: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits [B, T, V] of input_ids int64 [B, T]; those of padding mean nothing.

        attention_mask: [B, T] or longer, of which the last T columns are read; 0 is padding, on either side, and 1 is
        not. position_ids: not needed; in one row without padding or cache, positions that begin anew at 0 tell documents
        apart, as `DataCollatorWithFlattening` gives them, each then read as if it were alone. With `use_cache` or a
        cache, what was read is kept, and there are no gradients. labels: as everywhere in that library, shifted inside,
        -100 left out; the selection loss of an indexer is not in it. A cache is handed in and out under the name that the
        installed library has for it, `cache` or `past_key_values`; either is taken. logits_to_keep: so many at the end
        (0: all), or an index of columns. Raises ValueError for masks and positions that say anything else, TypeError for
        both names at once, for a cache under any other or of another kind, and for embeddings as inputs,
        NotImplementedError where hidden states or attention are wanted as well.
        """
        self._resolve_backends()
        if cache is not None and past_key_values is not None:
            raise TypeError("NSALabForCausalLM.forward: cache= and past_key_values= are two names of one thing; give one")
        cache = past_key_values if cache is None else cache
        if unknown := [name for name, value in unread.items() if isinstance(value, TransformersCache)]:
            raise TypeError(
                f"NSALabForCausalLM.forward takes a cache as cache= or past_key_values=, and it came as {unknown[0]}=; "
                "install a version of transformers that nsa_lab was tested with (5.0 to 5.24)"
            )
        if input_ids is None or unread.get("inputs_embeds") is not None:
            raise TypeError("NSALabForCausalLM.forward reads tokens, and no inputs_embeds=: give input_ids=")
        if wanted := [name for name in ("output_hidden_states", "output_attentions") if unread.get(name)]:
            raise NotImplementedError(f"NSALabForCausalLM.forward gives logits and no more: leave out {wanted[0]}=")
        mask = None if attention_mask is None else _slice_mask(attention_mask, input_ids)
        order = None if mask is None else _PaddingPermutation(mask)
        span = _build_layout(input_ids, mask, cache is not None or bool(use_cache), unread)
        if cache is not None and not isinstance(cache, NSALabCache):
            raise TypeError(
                f"NSALabForCausalLM.forward keeps what it read in an NSALabCache, and was given a {type(cache).__name__}; "
                "give none, and the first forward pass with use_cache=True makes one"
            )
        tokens = input_ids if order is None else input_ids.gather(1, order.indices)
        if cache is None and use_cache:
            cache = NSALabCache(self.model, len(tokens))
        if cache is None:
            logits = self.model(tokens, span)
        else:
            counts = order.counts if order else [tokens.shape[1]] * len(tokens)
            if not max(counts):
                raise ValueError("attention_mask: expected a token in at least one row, and all of it is padding")
            logits = _pad_logits(cache.append(tokens[:, : max(counts)], counts), tokens.shape[1])
            cache.count_columns(tokens.shape[1])
        if order is not None:
            logits = logits.gather(1, order.inverse[:, :, None].expand_as(logits))
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        if isinstance(logits_to_keep, Tensor) or logits_to_keep:
            kept = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
            logits = logits[:, kept]
        if return_dict is False:
            return tuple(part for part in (loss, logits, cache) if part is not None)
        named: dict[str, Any] = {CACHE_ARGUMENT: cache}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **named)

    def _resolve_backends(self) -> None:
        """Backends follow the device and dtype that the weights have now."""
        weight, config = self.model.head.weight, self.model.config
        if (weight.device, weight.dtype) != self._resolved_for:
            backends = resolve_backend(weight.device, weight.dtype, config.nsa, config, self.config.backend)
            self.model.backends = backends
            for block in self.model.blocks:
                assert isinstance(block, Block)
                block.attention.backends = backends
            self._resolved_for = weight.device, weight.dtype


class NSALabTokenizer(PreTrainedTokenizer):
    """UTF-8 bytes as tokens; 255, which is in no text, separates documents, begins every prompt, ends and pads."""

    SEPARATOR = "<|separator|>"
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012 - that library's own form

    def __init__(self, **kwargs: Any) -> None:
        special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), self.SEPARATOR)
        from_file = {"padding_side": "left", "clean_up_tokenization_spaces": False, **special, **kwargs}
        super().__init__(**{"special_tokens_pattern": "bos", **from_file})

    @property
    def vocab_size(self) -> int:
        return ByteTokenizer.vocab_size

    def get_vocab(self) -> dict[str, int]:
        return {self._convert_id_to_token(index): index for index in range(self.vocab_size)} | self.added_tokens_encoder

    def build_inputs_with_special_tokens(self, token_ids_0: list[int], token_ids_1: list[int] | None = None) -> list[int]:
        # In training a separator stands before every document.
        parts = [token_ids_0] if token_ids_1 is None else [token_ids_0, token_ids_1]
        return [index for part in parts for index in (ByteTokenizer.separator, *part)]

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return [chr(byte) for byte in text.encode("utf-8")]

    def _convert_token_to_id(self, token: str) -> int | None:
        if token == self.SEPARATOR:
            return ByteTokenizer.separator
        unknown: Any = self.unk_token_id
        return ord(token) if _is_byte(token) else unknown

    def _convert_id_to_token(self, index: int) -> str:
        if not 0 <= index < self.vocab_size:
            raise ValueError(f"id {index}: expected 0 to {self.vocab_size - 1}, or the id of a token that was added")
        return self.SEPARATOR if index == ByteTokenizer.separator else chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        # What is no byte stands for itself: separators, unless they were to be skipped, and tokens that were added.
        runs = ((byte, list(run)) for byte, run in groupby(tokens, key=_is_byte))
        return "".join(ByteTokenizer().decode(map(ord, run)) if byte else "".join(run) for byte, run in runs)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        return ()


def _slice_mask(mask: Tensor, tokens: Tensor) -> Tensor | None:
    """The columns of a mask that belong to `tokens`; None where none is padding. Raises ValueError for no mask of these."""
    rows, columns = tokens.shape
    if mask.ndim != 2 or len(mask) != rows or mask.shape[1] < columns:
        raise ValueError(
            f"attention_mask: expected [B, T] as input_ids {(rows, columns)}, or longer by what a cache holds, and it is "
            f"{tuple(mask.shape)}; masks of pairs of positions are not taken: give documents by position_ids="
        )
    mask = mask[:, -columns:]
    # Both are asked at once: every step of a generation waits for the answer.
    valid, whole = torch.stack([(mask.eq(0) | mask.eq(1)).all(), mask.eq(1).all()]).tolist()
    if not valid:
        raise ValueError("attention_mask: expected 1 for a token and 0 for padding, and it has other values")
    return None if whole else mask


def _build_layout(tokens: Tensor, mask: Tensor | None, use_cache: bool, arguments: Mapping[str, Any]) -> Span | None:
    """What `position_ids` of the arguments `given` say: documents in one row, or None where there is one text in each.

    Where only positions count up it does not matter where they begin: what is turned is turned by distances. Raises
    ValueError for any others, and for documents that are told in another way alone.
    """
    positions = arguments.get("position_ids")
    if positions is None:
        if told := [name for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx") if arguments.get(name) is not None]:
            raise ValueError(f"{told[0]}: documents in one row are told by position_ids= that begin anew at 0; give these")
        return None
    fits = positions.ndim == 2 and positions.shape[0] in (1, len(tokens)) and positions.shape[1] == tokens.shape[1]
    if not fits:
        raise ValueError(
            f"position_ids: expected the shape of input_ids, {tuple(tokens.shape)}, not {tuple(positions.shape)}"
        )
    positions = positions.expand_as(tokens)
    goes_on = positions.diff(dim=1).eq(1)
    if mask is not None:
        goes_on |= ~(mask[:, 1:].bool() & mask[:, :-1].bool())
    if bool(goes_on.all()):
        return None
    anew = positions.eq(0)
    if len(tokens) > 1 or mask is not None or use_cache or not (bool(anew[0, 0]) and bool((goes_on | anew[:, 1:]).all())):
        raise ValueError(
            "position_ids: expected positions that count up by one, or, in one row without padding and cache, positions "
            "that begin anew at 0 with every document; leave them out for one text in each row"
        )
    begins = anew[0].nonzero().flatten().tolist()
    return Span.packed(torch.tensor([*begins, tokens.shape[1]], dtype=torch.int32, device=tokens.device))


def _is_byte(token: str) -> bool:
    return len(token) == 1 and ord(token) < ByteTokenizer.separator


class _PaddingPermutation:
    """Of a mask [B, T], in every row: the columns of tokens and then of padding, how many are tokens, and the way back."""

    def __init__(self, mask: Tensor) -> None:
        self.indices = mask.bool().logical_not().byte().argsort(dim=1, stable=True)
        self.inverse = self.indices.argsort(dim=1)
        self.counts = [int(count) for count in mask.bool().sum(1).tolist()]


def _pad_logits(logits: Tensor, n_columns: int) -> Tensor:
    return torch.nn.functional.pad(logits, (0, 0, 0, n_columns - logits.shape[1]))


def export(run_dir: str | Path, folder: str | Path, *, step: int | None = None, max_shard_size: str = "5GB") -> Path:
    """A run's model, of its newest checkpoint or of `step`, as a folder that `from_pretrained` loads, tokenizer included.

    Raises `NoCheckpoint` where there is none, `ConfigError` where `folder` is there already and not empty.
    """
    folder = check_new_folder(folder)
    checkpoint = find_checkpoint(run_dir, step)
    run = RunConfig.from_yaml(directory.check_run_dir(run_dir) / directory.CONFIG)
    model, tokenizer = load_model(checkpoint), load_tokenizer(run.data.tokenizer)
    exported = NSALabForCausalLM(NSALabConfig(model.config.model_dump()))
    exported.model.load_state_dict(model.state_dict())
    separator = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.separator)
    exported.generation_config = GenerationConfig(**separator)
    exported.save_pretrained(folder, max_shard_size=max_shard_size)
    if isinstance(tokenizer, ByteTokenizer):
        NSALabTokenizer().save_pretrained(folder)
    else:
        PreTrainedTokenizerFast(tokenizer_file=run.data.tokenizer).save_pretrained(folder)
    _write_remote_code(folder, is_byte_tokenizer=isinstance(tokenizer, ByteTokenizer))
    return folder


def _write_remote_code(folder: Path, is_byte_tokenizer: bool) -> None:
    """`trust_remote_code=True` then finds the classes of the installed nsa_lab, also where this module was not imported."""
    names = [*AUTO_MAP.values(), "NSALabTokenizer"]
    listed = ", ".join(names)
    write_text(folder / REMOTE_CODE, f"from nsa_lab.inference.hf import {listed}\n\n__all__ = {names}\n")
    module = REMOTE_CODE.removesuffix(".py")
    _update_json(folder / "config.json", {"auto_map": {auto: f"{module}.{name}" for auto, name in AUTO_MAP.items()}})
    if is_byte_tokenizer:
        _update_json(folder / "tokenizer_config.json", {"auto_map": {"AutoTokenizer": [f"{module}.NSALabTokenizer", None]}})


def _update_json(path: Path, entries: Mapping[str, Any]) -> None:
    found = json.loads(path.read_text(encoding="utf-8"))
    write_text(path, json.dumps({**found, **entries}, indent=2) + "\n")


AutoConfig.register(NSALabConfig.model_type, NSALabConfig)
AutoModelForCausalLM.register(NSALabConfig, NSALabForCausalLM)
AutoTokenizer.register(NSALabConfig, slow_tokenizer_class=NSALabTokenizer)
