"""Section `model`: architecture of the model. Section `nsa` is in `nsa_config`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from nsa_lab.config.base import MAX_COUNT, MAX_LAYERS, MAX_SIZE, Section
from nsa_lab.config.nsa_config import BRANCHES, NSAConfig
from nsa_lab.config.rope_scaling import RopeScaling

BYTE_VOCAB_SIZE = 256

# Keys of the model that describe its indexer.
INDEXER_KEYS = ("indexer_width", "indexer_heads", "indexer_keys", "indexer_order", "indexer_every", "indexer_dtype")
# Channels that share a scale in MXFP4 (OCP Microscaling Formats 1.0).
MXFP4_BLOCK = 32


class ModelConfig(Section):
    """Architecture of a decoder-only transformer. `nsa` is read from the YAML section of that name.

    The defaults are the model of the production run: 78,600,960 parameters, 0.3 M of them in per-head gates. (The code base
    that this project started from calls this size "125M".)
    """

    dim: int = Field(default=768, ge=1, le=MAX_SIZE, description="width of the residual stream")
    n_layers: int = Field(default=12, ge=1, le=MAX_LAYERS, description="number of blocks")
    n_heads: int = Field(default=12, ge=1, le=MAX_SIZE, description="number of query heads, H")
    n_kv_groups: int = Field(default=2, ge=1, le=MAX_SIZE, description="number of key/value groups, G")
    d_k: int = Field(default=64, ge=2, le=MAX_SIZE, description="width of a query or key head")
    d_v: int = Field(default=64, ge=1, le=MAX_SIZE, description="width of a value head")
    vocab_size: int = Field(default=BYTE_VOCAB_SIZE, ge=2, le=2**24, description="number of token ids; 256: bytes")
    attention: Literal["nsa", "dense"] = Field(
        default="nsa", description="dense: causal attention to all tokens, the baseline"
    )
    branches: tuple[Literal["cmp", "sel", "win"], ...] = Field(
        default=("cmp", "sel", "win"),
        strict=False,
        description="branches that exist, in the order cmp, sel, win; a branch that is not named has no weights and no "
        "cache; a single branch has no gate",
    )
    shared_kv: bool = Field(
        default=False, description="one key and value per token and group for all branches, not one for each branch"
    )
    mlp: Literal["plain", "gated"] = Field(default="plain", description="plain: SiLU; gated: SwiGLU")
    mlp_hidden: int | None = Field(default=None, ge=1, le=MAX_SIZE, description="hidden width of the MLP; None: 4 * dim")
    rope_theta: float = Field(default=10000.0, gt=0, description="RoPE base")
    rope_scaling: RopeScaling | None = Field(
        default=None,
        description="RoPE of a model whose context is extended, keys of `nsa_lab.config.RopeScaling`; None: as is",
    )
    rotary_share: float = Field(default=1.0, gt=0, le=1, description="fraction of a head's channels that RoPE rotates")
    matching_heads: int = Field(
        default=0,
        ge=0,
        description="number of induction-initialized heads in the first group: they start by attending to the token after "
        "an earlier occurrence of the current one; if above 0, this group starts with the keys of the previous token",
    )
    selection_loss: float = Field(
        default=0.0, ge=0, description="weight of the loss that trains block selection to follow the selected branch"
    )
    selection_queries: int = Field(
        default=64, ge=1, le=MAX_COUNT, description="queries per text that the selection loss samples, evenly spread"
    )
    indexer_block: int = Field(
        default=0,
        ge=0,
        le=MAX_COUNT,
        description="tokens per index key; the indexer selects the blocks and is trained only by the selection loss; "
        "0: no indexer, see nsa.scores",
    )
    indexer_width: int = Field(
        default=0,
        ge=0,
        le=MAX_SIZE,
        description="width of the indexer's queries and keys, a divisor of d_k; 0: d_k",
    )
    indexer_heads: int = Field(default=1, ge=1, le=MAX_SIZE, description="query heads per group of the indexer")
    indexer_keys: Literal["group", "shared"] = Field(
        default="group", description="group: an index key per group; shared: one index key for all groups"
    )
    indexer_order: tuple[Literal["rotate", "pool", "norm"], ...] = Field(
        default=("rotate", "pool"),
        strict=False,
        description="steps from projected keys to index keys, in order: rotate (RoPE), pool (one key of indexer_block "
        "tokens) and, if named, norm (RMSNorm over the key's channels); a pooled key is rotated to the position of its "
        "first token",
    )
    indexer_every: int = Field(
        default=1,
        ge=1,
        le=MAX_LAYERS,
        description="every layer of this number has an indexer; the layers after it use its selected blocks",
    )
    indexer_dtype: Literal["bf16", "fp8", "mxfp4"] = Field(
        default="bf16",
        description="stored index keys: in the dtype of the model, or rounded to fp8 (e4m3) or MXFP4; training rounds the "
        "same way, with a straight-through gradient",
    )
    silent: tuple[Literal["cmp", "sel", "win"], ...] = Field(
        default=(), strict=False, description="disabled branches (gates are 0, also in training), for ablations"
    )
    embedding_norm: bool = Field(
        default=False, description="apply an RMS norm without weights to embeddings before the first layer"
    )
    ngrams: int = Field(
        default=0,
        ge=0,
        le=16,
        description="embed n-grams from length 2 to this length in addition to single tokens; 0: none",
    )
    ngram_rows: int = Field(default=32_768, ge=2, le=2**24, description="rows of the hash table of each n-gram length")
    ngram_width: int = Field(default=128, ge=1, le=MAX_SIZE, description="width of a row of the n-gram tables")
    norm_eps: float = Field(default=1e-5, gt=0, description="epsilon of the RMS norms")
    nsa: NSAConfig = NSAConfig()

    @model_validator(mode="after")
    def _check_heads(self) -> ModelConfig:
        if self.n_heads % self.n_kv_groups:
            nearest = min(
                (g for g in range(1, self.n_heads + 1) if self.n_heads % g == 0), key=lambda g: abs(g - self.n_kv_groups)
            )
            raise ValueError(
                f"model.n_heads = {self.n_heads} is not a multiple of model.n_kv_groups = {self.n_kv_groups}; "
                f"the nearest number of groups that divides it is {nearest}"
            )
        if self.d_k % 2:
            raise ValueError(
                f"model.d_k = {self.d_k} is odd, but RoPE rotates pairs of channels; use {self.d_k - 1} or {self.d_k + 1}"
            )
        return self

    @model_validator(mode="after")
    def _check_ngrams(self) -> ModelConfig:
        table_keys = {"ngram_rows", "ngram_width"}
        unused = sorted(table_keys & self.model_fields_set)
        if unused and "ngrams" not in self.model_fields_set:
            raise ValueError(
                f"model.{unused[0]} = {getattr(self, unused[0])} is not used without model.ngrams; set model.ngrams: 2 or "
                "more, or remove it"
            )
        if not self.ngrams:
            # Overrides can disable the tables of a preset: reset their sizes, so that the hash equals the hash of a model
            # without tables. The instance is frozen only after validation.
            for key in table_keys:
                object.__setattr__(self, key, ModelConfig.model_fields[key].default)
        if self.ngrams == 1:
            raise ValueError(
                "model.ngrams = 1: single tokens have an embedding anyway; use model.ngrams = 2 or more, or 0 for none"
            )
        return self

    @model_validator(mode="after")
    def _check_pooling(self) -> ModelConfig:
        if self.nsa.phi == "pool" and self.nsa.l == 1:
            raise ValueError("nsa.phi = pool weighs the tokens of a block, but nsa.l = 1 has only one; use nsa.phi = avg")
        return self

    @model_validator(mode="after")
    def _check_branches(self) -> ModelConfig:
        ordered = [name for name in BRANCHES if name in self.branches]
        if list(self.branches) != ordered or not ordered:
            raise ValueError(
                f"model.branches = {list(self.branches)}: expected at least one branch, each once, in the order cmp, sel, "
                f"win; use {ordered or ['cmp', 'sel', 'win']}"
            )
        if self.attention == "dense":
            return self
        if "sel" in self.branches:
            self._check_scores()
            return self
        selecting = {
            "model.indexer_block": self.indexer_block,
            "model.selection_loss": self.selection_loss,
            "nsa.scores": self.nsa.scores,
        }
        for key, value in selecting.items():
            if value:
                raise ValueError(
                    f"{key} = {value}: it selects blocks for the branch sel, and model.branches = {list(self.branches)}; "
                    "remove it, or add sel"
                )
        return self

    def _check_scores(self) -> None:
        scores = self.nsa.scores
        if scores == "indexer" and not self.indexer_block:
            raise ValueError(
                "nsa.scores = indexer and model.indexer_block = 0: there is no indexer; set model.indexer_block: 4 and "
                "model.selection_loss: 0.05"
            )
        if scores in ("compressed", "mean_key") and self.indexer_block:
            raise ValueError(
                f"nsa.scores = {scores} and model.indexer_block = {self.indexer_block}: the indexer would not be used; set "
                "nsa.scores: indexer, or model.indexer_block: 0"
            )
        if "cmp" not in self.branches and scores in (None, "compressed") and not self.indexer_block:
            name = "nsa.scores = compressed" + (" (the default)" if scores is None else "")
            raise ValueError(
                f"{name} selects blocks by the branch cmp, and model.branches = {list(self.branches)}; set "
                "nsa.scores: mean_key, or an indexer: model.indexer_block: 4 and model.selection_loss: 0.05"
            )

    @model_validator(mode="after")
    def _check_selection_queries(self) -> ModelConfig:
        if "selection_queries" in self.model_fields_set and "selection_loss" not in self.model_fields_set:
            raise ValueError(
                f"model.selection_queries = {self.selection_queries} is not used without model.selection_loss; set "
                "model.selection_loss: 0.05, or remove it"
            )
        if not self.selection_loss:  # overrides can disable a preset's loss; see _check_ngrams
            object.__setattr__(self, "selection_queries", ModelConfig.model_fields["selection_queries"].default)
        return self

    @model_validator(mode="after")
    def _check_disabled_branches(self) -> ModelConfig:
        absent = [name for name in self.silent if name not in self.branches]
        if absent:
            raise ValueError(
                f"model.silent = {list(self.silent)}: {absent[0]} is not in model.branches = {list(self.branches)}; a "
                "branch that does not exist cannot be disabled; remove it"
            )
        if len({*self.silent}) != len(self.silent) or len(self.silent) >= len(self.branches):
            raise ValueError(
                f"model.silent = {list(self.silent)}: name each branch once, and not all of {', '.join(self.branches)}"
            )
        if self.silent and self.attention == "dense":
            raise ValueError(
                f"model.silent = {list(self.silent)}: a dense model has no branches; remove it, or set model.attention: nsa"
            )
        return self

    @model_validator(mode="after")
    def _check_rotary_and_indexer(self) -> ModelConfig:
        n_rotated = self.rotary_share * self.d_k
        if n_rotated != int(n_rotated) or int(n_rotated) % 2 or n_rotated < 2:
            nearest = max(2, 2 * round(n_rotated / 2))
            raise ValueError(
                f"model.rotary_share = {self.rotary_share} of model.d_k = {self.d_k} is {n_rotated:g} channels, but RoPE "
                f"rotates pairs of channels; use {nearest / self.d_k:g}"
            )
        if self.matching_heads > self.heads_per_group:
            raise ValueError(
                f"model.matching_heads = {self.matching_heads} is more than the {self.heads_per_group} heads of a group; "
                f"use at most {self.heads_per_group}"
            )
        unused = [
            key for key in INDEXER_KEYS if key in self.model_fields_set and "indexer_block" not in self.model_fields_set
        ]
        if unused:
            raise ValueError(
                f"model.{unused[0]} = {_format_value(getattr(self, unused[0]))} is not used without model.indexer_block; "
                "set model.indexer_block: 1 or more, or remove it"
            )
        if self.indexer_block:
            self._check_indexer()
        else:
            for key in INDEXER_KEYS:  # overrides can disable a preset's indexer; see _check_ngrams
                object.__setattr__(self, key, ModelConfig.model_fields[key].default)
        return self

    def _check_indexer(self) -> None:
        if self.nsa.l_sel % self.indexer_block:
            divisors = [n for n in range(1, self.nsa.l_sel + 1) if not self.nsa.l_sel % n]
            nearest = min(divisors, key=lambda n: abs(n - self.indexer_block))
            raise ValueError(
                f"model.indexer_block = {self.indexer_block} does not divide nsa.l_sel = {self.nsa.l_sel}; "
                f"use model.indexer_block = {nearest}"
            )
        if not self._is_valid_index_width(self.index_width):
            nearest = min(
                filter(self._is_valid_index_width, range(1, self.d_k + 1)), key=lambda n: abs(n - self.indexer_width)
            )
            raise ValueError(
                f"model.indexer_width = {self.indexer_width}: must divide model.d_k = {self.d_k}, and "
                f"model.rotary_share = {self.rotary_share} of it must be even; use model.indexer_width = {nearest}"
            )
        steps = list(self.indexer_order)
        if len({*steps}) != len(steps) or not {"rotate", "pool"} <= {*steps}:
            raise ValueError(
                f"model.indexer_order = {steps}: expected rotate and pool, each once, and norm at most once; use "
                "[rotate, pool] or, with a norm, [norm, rotate, pool] or [pool, norm, rotate]"
            )
        width = self.index_width
        if self.indexer_dtype == "mxfp4" and width % (MXFP4_BLOCK if width > MXFP4_BLOCK else 2):
            raise ValueError(
                f"model.indexer_dtype = mxfp4 stores two channels in a byte and scales {MXFP4_BLOCK} together, and "
                f"the index keys have a width of {width}; use an even width below {MXFP4_BLOCK}, or a multiple of it"
            )
        if self.indexer_every > self.n_layers:
            raise ValueError(
                f"model.indexer_every = {self.indexer_every} and model.n_layers = {self.n_layers}: expected at most the "
                f"number of layers; use model.indexer_every = {self.n_layers}"
            )
        if not self.selection_loss:
            raise ValueError(
                f"model.indexer_block = {self.indexer_block} and model.selection_loss = 0: only this loss trains the "
                "indexer; use model.selection_loss = 0.05, or model.indexer_block = 0"
            )

    def _is_valid_index_width(self, width: int) -> bool:
        n_rotated = self.rotary_share * width
        return self.d_k % width == 0 and n_rotated >= 2 and n_rotated % 2 == 0

    @property
    def index_width(self) -> int:
        """Width of the indexer's queries and keys."""
        return self.indexer_width or self.d_k

    @property
    def has_indexer(self) -> bool:
        """True if an indexer selects the blocks."""
        return self.attention == "nsa" and self.indexer_block > 0

    @property
    def scores(self) -> Literal["compressed", "mean_key", "indexer"] | None:
        """Scores that select the blocks; None without a selected branch. See `NSAConfig.scores`."""
        if self.attention == "dense" or "sel" not in self.branches:
            return None
        return "indexer" if self.indexer_block else self.nsa.scores or "compressed"

    @property
    def selection_nsa(self) -> NSAConfig:
        """Configuration of the keys that select blocks: `nsa`, or one whose blocks do not overlap.

        Blocks of `indexer_block` tokens for an indexer, selection blocks for mean keys.
        """
        if self.has_indexer:
            phi = "pool" if self.indexer_block > 1 else "avg"  # pool has no effect on single tokens
            return self.nsa.model_copy(update={"l": self.indexer_block, "d": self.indexer_block, "phi": phi})
        if self.scores == "mean_key":
            return self.nsa.model_copy(update={"l": self.nsa.l_sel, "d": self.nsa.l_sel, "phi": "avg"})
        return self.nsa

    @property
    def kv_sets(self) -> tuple[tuple[str, ...], ...]:
        """Branches that share a key and value per token: a set for each branch, or one for all; one for dense attention."""
        if self.attention == "dense":
            return (("dense",),)
        return (self.branches,) if self.shared_kv else tuple((name,) for name in self.branches)

    def get_kv_set(self, branch: str) -> int | None:
        """Return the index in `kv_sets` of the key and value that a branch reads; None if it does not exist."""
        return next((index for index, branches in enumerate(self.kv_sets) if branch in branches), None)

    def has_indexer_in(self, layer: int) -> bool:
        """Return True if the layer of this index, from 0, has an indexer; else it uses the blocks of an earlier one."""
        return self.has_indexer and layer % self.indexer_every == 0

    @property
    def n_scoring_layers(self) -> int:
        """Number of layers that select blocks; the others use the blocks of an earlier layer."""
        return -(-self.n_layers // self.indexer_every) if self.scores else 0

    @property
    def index_groups(self) -> int:
        """Number of index keys per token."""
        return 1 if self.indexer_keys == "shared" else self.n_kv_groups

    @property
    def n_index_queries(self) -> int:
        """Number of index queries per token."""
        return self.n_kv_groups * self.indexer_heads

    @property
    def has_selection_loss(self) -> bool:
        """True if the training loss includes a selection loss."""
        return self.attention == "nsa" and self.selection_loss > 0

    @property
    def rotary_width(self) -> int:
        """Number of channels of a query or key head that RoPE rotates."""
        return int(self.rotary_share * self.d_k)

    @property
    def heads_per_group(self) -> int:
        return self.n_heads // self.n_kv_groups

    @property
    def hidden_width(self) -> int:
        return self.mlp_hidden or 4 * self.dim


def _format_value(value: object) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value)
