"""NSA models as `transformers` models (extra `hf`): `generate`, `pipeline` and `from_pretrained` work unchanged.

Importing this module registers a configuration, a model and a tokenizer with the Auto classes, under the name `nsa_lab`.
Padding may be on either side. It is removed before the forward pass, and positions are counted per row, so a sequence has
the same logits in a batch as without one. `generate` appends after the last column; pad prompts on the left for it.
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
from transformers import (  # noqa: E402 - require() first, for its error message
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

MIN_CACHE_TOKENS = 256  # initial capacity; a full cache grows to twice the tokens needed
# File in an exported folder from which `trust_remote_code=True` imports the classes below.
REMOTE_CODE = "nsa_lab_in_transformers.py"
# Name of the cache in the arguments and the output of `forward`: `cache` since transformers 5.24.
CACHE_ARGUMENT = next(name for name in ("cache", "past_key_values") if name in CausalLMOutputWithPast.__dataclass_fields__)
AUTO_MAP = {"AutoConfig": "NSALabConfig", "AutoModelForCausalLM": "NSALabForCausalLM"}


class NSALabConfig(PreTrainedConfig):
    """Configuration. `architecture`: a `ModelConfig` as a mapping, including `nsa`; `backend`: as in `NSATransformer`."""

    model_type = "nsa_lab"

    def __init__(self, architecture: Mapping[str, Any] | None = None, backend: str = "auto", **kwargs: Any) -> None:
        config = ModelConfig(**(architecture or {}))
        self.architecture, self.backend = config.model_dump(), backend
        self.vocab_size, self.hidden_size = config.vocab_size, config.dim
        self.num_hidden_layers, self.num_attention_heads = config.n_layers, config.n_heads
        super().__init__(**{"tie_word_embeddings": False, **kwargs})


class NSALabCache(TransformersCache):
    """Cache of the sequences being generated: a `Decoder` that grows when it is full."""

    def __init__(self, model: NSATransformer, batch: int) -> None:
        super().__init__(layers=[])
        self._model, self._batch, self._n_columns = model, batch, 0
        self.decoder: Decoder | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> NSALabCache:
        """Copy the cached tokens, but share the model, so that several generations can continue from one prompt."""
        memo[id(self._model)] = self._model
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def append(self, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """Append tokens int64 [B, n] and return their logits [B, n, V]; `counts` as in `Decoder.append`."""
        n_tokens = (max(self.decoder.cache.starts) if self.decoder else 0) + tokens.shape[1]
        if self.decoder is None:
            self.decoder = Decoder(self._model, max(MIN_CACHE_TOKENS, 2 * n_tokens), self._batch)
        elif n_tokens > self.decoder.cache.capacity:
            self.decoder.grow(2 * n_tokens)
        return self.decoder.append(tokens, counts)

    def count_columns(self, n_columns: int) -> None:
        """Add `n_columns` input columns, padding included, to the length that `transformers` sees."""
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
        raise NotImplementedError(
            "NSALabCache: tokens cannot be removed, so assisted generation is not supported; use no assistant model"
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError("NSALabCache: a cache cannot be repeated; repeat the prompts instead")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise NotImplementedError("NSALabCache: the batch size is fixed; create a new cache for another batch size")

    @property
    def is_linear(self) -> list[bool]:
        return [False]  # for all layers, which are not listed: the cache grows with the text

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
    """`NSATransformer` as a causal language model of `transformers`; `self.model` is the `NSATransformer`."""

    config_class = NSALabConfig
    base_model_prefix = "model"
    accepts_loss_kwargs = False  # the loss is the mean over its batch; a Trainer divides by its accumulation steps
    _no_split_modules = ["Block"]  # noqa: RUF012 - as transformers declares it

    def __init__(self, config: NSALabConfig) -> None:
        super().__init__(config)
        # from_pretrained builds the model on the meta device, where no backend can be resolved yet.
        device = torch.empty(0).device
        backend = "torch" if device.type == "meta" else config.backend
        self.model = NSATransformer(ModelConfig(**config.architecture), backend=backend, device=device)
        self._resolved_for: tuple[torch.device, torch.dtype] | None = None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing: `NSATransformer` initializes its weights."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first forward pass with use_cache=True creates an NSALabCache

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.model.head

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *_: Any, **__: Any) -> nn.Embedding:
        """Return the embedding unchanged. Raises NotImplementedError for another size, which is another architecture."""
        if new_num_tokens not in (None, self.config.vocab_size):
            raise NotImplementedError(
                f"NSALabForCausalLM: expected {self.config.vocab_size} tokens, which are part of the architecture, got "
                f"{new_num_tokens}; train a model with another model.vocab_size and data.tokenizer"
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
        **other_kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Return logits [B, T, V] of input_ids int64 [B, T], and the loss for `labels`. Logits of padding are undefined.

        attention_mask: [B, T] or longer; the last T columns are used. 1 for a token, 0 for padding on either side.
        position_ids: optional. In a single row without padding or cache, positions that restart at 0 separate documents,
            as `DataCollatorWithFlattening` packs them; each document is computed as if alone.
        use_cache: return a cache of the tokens. With a cache there are no gradients.
        cache, past_key_values: a cache from an earlier call, under either name. The output uses the name of the installed
            `transformers` version.
        labels: int64 [B, T], shifted inside; -100 is ignored. The loss does not include the selection loss of an indexer.
        logits_to_keep: number of columns at the end (0: all), or an index of columns.

        Raises ValueError for other masks and positions; TypeError for both cache names at once, for a cache under another
        name or of another class, and for `inputs_embeds`; NotImplementedError for hidden states or attention as outputs.
        """
        self._resolve_backends()
        if cache is not None and past_key_values is not None:
            raise TypeError("NSALabForCausalLM.forward: cache= and past_key_values= are the same argument; give only one")
        cache = past_key_values if cache is None else cache
        if unknown := [name for name, value in other_kwargs.items() if isinstance(value, TransformersCache)]:
            raise TypeError(
                f"NSALabForCausalLM.forward: expected the cache as cache= or past_key_values=, got {unknown[0]}=; "
                "install a tested version of transformers (5.0 to 5.24)"
            )
        if input_ids is None or other_kwargs.get("inputs_embeds") is not None:
            raise TypeError("NSALabForCausalLM.forward: inputs_embeds= is not supported; give input_ids=")
        if unsupported := [name for name in ("output_hidden_states", "output_attentions") if other_kwargs.get(name)]:
            raise NotImplementedError(f"NSALabForCausalLM.forward returns only logits; omit {unsupported[0]}=")
        mask = None if attention_mask is None else _slice_mask(attention_mask, input_ids)
        permutation = None if mask is None else _PaddingPermutation(mask)
        span = _build_layout(input_ids, mask, cache is not None or bool(use_cache), other_kwargs)
        if cache is not None and not isinstance(cache, NSALabCache):
            raise TypeError(
                f"NSALabForCausalLM.forward: expected an NSALabCache, got {type(cache).__name__}; "
                "omit it in the first call with use_cache=True, which returns one"
            )
        tokens = input_ids if permutation is None else input_ids.gather(1, permutation.indices)
        if cache is None and use_cache:
            cache = NSALabCache(self.model, len(tokens))
        if cache is None:
            logits = self.model(tokens, span)
        else:
            counts = permutation.counts if permutation else [tokens.shape[1]] * len(tokens)
            if not max(counts):
                raise ValueError("attention_mask: expected a token in at least one row, got only padding")
            logits = _pad_logits(cache.append(tokens[:, : max(counts)], counts), tokens.shape[1])
            cache.count_columns(tokens.shape[1])
        if permutation is not None:
            logits = logits.gather(1, permutation.inverse[:, :, None].expand_as(logits))
        loss = None if labels is None else self.loss_function(logits, labels, vocab_size=self.config.vocab_size)
        if isinstance(logits_to_keep, Tensor) or logits_to_keep:
            columns = logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
            logits = logits[:, columns]
        if return_dict is False:
            return tuple(part for part in (loss, logits, cache) if part is not None)
        cache_output: dict[str, Any] = {CACHE_ARGUMENT: cache}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **cache_output)

    def _resolve_backends(self) -> None:
        """Resolve the backends again if the device or dtype of the weights has changed."""
        weight, config = self.model.head.weight, self.model.config
        if (weight.device, weight.dtype) != self._resolved_for:
            backends = resolve_backend(weight.device, weight.dtype, config.nsa, config, self.config.backend)
            self.model.backends = backends
            for block in self.model.blocks:
                assert isinstance(block, Block)
                block.attention.backends = backends
            self._resolved_for = weight.device, weight.dtype


class NSALabTokenizer(PreTrainedTokenizer):
    """Tokenizer of UTF-8 bytes. Byte 255, which is never part of UTF-8, is the BOS, EOS, padding and separator token."""

    SEPARATOR = "<|separator|>"
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012 - as transformers declares it

    def __init__(self, **kwargs: Any) -> None:
        special_tokens = dict.fromkeys(("bos_token", "eos_token", "pad_token"), self.SEPARATOR)
        options = {"padding_side": "left", "clean_up_tokenization_spaces": False, **special_tokens, **kwargs}
        super().__init__(**{"special_tokens_pattern": "bos", **options})

    @property
    def vocab_size(self) -> int:
        return ByteTokenizer.vocab_size

    def get_vocab(self) -> dict[str, int]:
        return {self._convert_id_to_token(index): index for index in range(self.vocab_size)} | self.added_tokens_encoder

    def build_inputs_with_special_tokens(self, token_ids_0: list[int], token_ids_1: list[int] | None = None) -> list[int]:
        # In training a separator precedes every document.
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
            raise ValueError(f"id {index}: expected 0 to {self.vocab_size - 1}, or the id of an added token")
        return self.SEPARATOR if index == ByteTokenizer.separator else chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        # Tokens that are not bytes are copied: added tokens, and separators unless they are skipped.
        groups = ((is_byte, list(group)) for is_byte, group in groupby(tokens, key=_is_byte))
        return "".join(ByteTokenizer().decode(map(ord, group)) if is_byte else "".join(group) for is_byte, group in groups)

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        return ()


def _slice_mask(mask: Tensor, tokens: Tensor) -> Tensor | None:
    """Return the columns of `mask` for `tokens`, or None if there is no padding. Raises ValueError for an invalid mask."""
    n_rows, n_columns = tokens.shape
    if mask.ndim != 2 or len(mask) != n_rows or mask.shape[1] < n_columns:
        raise ValueError(
            f"attention_mask: expected [B, T] as input_ids {(n_rows, n_columns)}, or longer by the cached tokens, got "
            f"{tuple(mask.shape)}; masks [T, T] are not supported: separate documents with position_ids="
        )
    mask = mask[:, -n_columns:]
    # One transfer for both: each generation step waits for it.
    is_valid, is_unpadded = torch.stack([(mask.eq(0) | mask.eq(1)).all(), mask.eq(1).all()]).tolist()
    if not is_valid:
        raise ValueError("attention_mask: expected 1 for a token and 0 for padding, got other values")
    return None if is_unpadded else mask


def _build_layout(tokens: Tensor, mask: Tensor | None, use_cache: bool, arguments: Mapping[str, Any]) -> Span | None:
    """Return the layout given by `position_ids` in `arguments`: packed documents, or None for one text per row.

    Positions that count up by one may start anywhere: RoPE depends only on distances. Raises ValueError for other
    positions, and if documents are separated only by another argument.
    """
    positions = arguments.get("position_ids")
    if positions is None:
        if other := [name for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx") if arguments.get(name) is not None]:
            raise ValueError(f"{other[0]}: not supported alone; separate documents with position_ids= that restart at 0")
        return None
    has_matching_shape = (
        positions.ndim == 2 and positions.shape[0] in (1, len(tokens)) and positions.shape[1] == tokens.shape[1]
    )
    if not has_matching_shape:
        raise ValueError(
            f"position_ids: expected the shape of input_ids, {tuple(tokens.shape)}, got {tuple(positions.shape)}"
        )
    positions = positions.expand_as(tokens)
    counts_up = positions.diff(dim=1).eq(1)
    if mask is not None:
        counts_up |= ~(mask[:, 1:].bool() & mask[:, :-1].bool())
    if bool(counts_up.all()):
        return None
    is_zero = positions.eq(0)
    if (
        len(tokens) > 1
        or mask is not None
        or use_cache
        or not (bool(is_zero[0, 0]) and bool((counts_up | is_zero[:, 1:]).all()))
    ):
        raise ValueError(
            "position_ids: expected positions that count up by one or, in a single row without padding and cache, "
            "positions that restart at 0 for each document; omit them for one text per row"
        )
    starts = is_zero[0].nonzero().flatten().tolist()
    return Span.packed(torch.tensor([*starts, tokens.shape[1]], dtype=torch.int32, device=tokens.device))


def _is_byte(token: str) -> bool:
    return len(token) == 1 and ord(token) < ByteTokenizer.separator


class _PaddingPermutation:
    """Column order of a mask [B, T] per row, tokens first: `indices`, their `inverse`, and the `counts` of tokens."""

    def __init__(self, mask: Tensor) -> None:
        self.indices = mask.bool().logical_not().byte().argsort(dim=1, stable=True)
        self.inverse = self.indices.argsort(dim=1)
        self.counts = [int(count) for count in mask.bool().sum(1).tolist()]


def _pad_logits(logits: Tensor, n_columns: int) -> Tensor:
    return torch.nn.functional.pad(logits, (0, 0, 0, n_columns - logits.shape[1]))


def export(run_dir: str | Path, folder: str | Path, *, step: int | None = None, max_shard_size: str = "5GB") -> Path:
    """Export the model of a run and its tokenizer to `folder`, in the format of `from_pretrained`. Return the folder.

    step: the checkpoint; default: the newest. Raises `NoCheckpoint` if there is none, `ConfigError` if `folder` has files.
    """
    folder = check_new_folder(folder)
    checkpoint = find_checkpoint(run_dir, step)
    run = RunConfig.from_yaml(directory.check_run_dir(run_dir) / directory.CONFIG)
    model, tokenizer = load_model(checkpoint), load_tokenizer(run.data.tokenizer)
    exported = NSALabForCausalLM(NSALabConfig(model.config.model_dump()))
    exported.model.load_state_dict(model.state_dict())
    special_token_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.separator)
    exported.generation_config = GenerationConfig(**special_token_ids)
    exported.save_pretrained(folder, max_shard_size=max_shard_size)
    if isinstance(tokenizer, ByteTokenizer):
        NSALabTokenizer().save_pretrained(folder)
    else:
        PreTrainedTokenizerFast(tokenizer_file=run.data.tokenizer).save_pretrained(folder)
    _write_remote_code(folder, is_byte_tokenizer=isinstance(tokenizer, ByteTokenizer))
    return folder


def _write_remote_code(folder: Path, is_byte_tokenizer: bool) -> None:
    """Write the file and the `auto_map` entries with which `trust_remote_code=True` imports the installed nsa_lab."""
    names = [*AUTO_MAP.values(), "NSALabTokenizer"]
    imported_names = ", ".join(names)
    write_text(folder / REMOTE_CODE, f"from nsa_lab.inference.hf import {imported_names}\n\n__all__ = {names}\n")
    module = REMOTE_CODE.removesuffix(".py")
    _update_json(folder / "config.json", {"auto_map": {auto: f"{module}.{name}" for auto, name in AUTO_MAP.items()}})
    if is_byte_tokenizer:
        _update_json(folder / "tokenizer_config.json", {"auto_map": {"AutoTokenizer": [f"{module}.NSALabTokenizer", None]}})


def _update_json(path: Path, entries: Mapping[str, Any]) -> None:
    contents = json.loads(path.read_text(encoding="utf-8"))
    write_text(path, json.dumps({**contents, **entries}, indent=2) + "\n")


AutoConfig.register(NSALabConfig.model_type, NSALabConfig)
AutoModelForCausalLM.register(NSALabConfig, NSALabForCausalLM)
AutoTokenizer.register(NSALabConfig, slow_tokenizer_class=NSALabTokenizer)
