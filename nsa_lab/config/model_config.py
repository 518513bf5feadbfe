"""The sections `model` and `nsa`: what is computed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from nsa_lab.config.base import MAX_COUNT, MAX_SIZE, Section

BYTE_VOCAB_SIZE = 256

# The branches, by the short names that code and records have for them, in the order of gates; and in words.
BRANCHES = {"cmp": "compressed", "sel": "selected", "win": "window"}

# Every query reads the first block, the one that holds it and the one before that, whatever their scores.
N_FORCED_BLOCKS = 3


class NSAConfig(Section):
    """Geometry and variants of Native Sparse Attention (arXiv 2502.11089, section 3.3).

    Lengths are in tokens, `n_sel` in blocks.
    """

    l: int = Field(default=32, ge=1, le=MAX_COUNT, description="compression block length, tokens")
    d: int = Field(default=16, ge=1, le=MAX_COUNT, description="stride between compression blocks, tokens")
    l_sel: int = Field(default=64, ge=1, le=MAX_COUNT, description="selection block length, tokens")
    n_sel: int = Field(default=16, le=MAX_COUNT, description="selection blocks read by a query, the forced ones included")
    w: int = Field(default=512, ge=1, le=MAX_COUNT, description="sliding window, tokens, the query's own included")
    phi: Literal["avg", "linear", "mlp", "pool"] = Field(default="avg", description="compression operator")
    gate: Literal["sigmoid", "softmax"] = Field(default="sigmoid", description="gate over the three branches")

    @model_validator(mode="after")
    def _check_geometry(self) -> NSAConfig:
        for name in ("l", "l_sel"):
            length = getattr(self, name)
            if length % self.d:
                low = max(length // self.d, 1) * self.d
                raise ValueError(
                    f"nsa.{name} = {length} is not a multiple of nsa.d = {self.d}; "
                    f"use nsa.{name} = {low} or {low + self.d}, or a stride that divides {length}"
                )
        if self.n_sel < N_FORCED_BLOCKS:
            raise ValueError(
                f"nsa.n_sel = {self.n_sel} leaves no room for the three forced blocks "
                f"(the first, the current and the one before it); use nsa.n_sel >= {N_FORCED_BLOCKS}"
            )
        return self


class ModelConfig(Section):
    """A decoder-only transformer. `nsa` is read from the YAML section of that name.

    By default that of the production run: 78,600,960 parameters, 0.3 M of them in gates per head. What this project
    began from calls it "125M".
    """

    dim: int = Field(default=768, ge=1, le=MAX_SIZE, description="width of the residual stream")
    n_layers: int = Field(default=12, ge=1, le=10_000)
    n_heads: int = Field(default=12, ge=1, le=MAX_SIZE, description="query heads, H")
    n_kv_groups: int = Field(default=2, ge=1, le=MAX_SIZE, description="key/value groups, G")
    d_k: int = Field(default=64, ge=2, le=MAX_SIZE, description="width of a query or key head")
    d_v: int = Field(default=64, ge=1, le=MAX_SIZE, description="width of a value head")
    vocab_size: int = Field(default=BYTE_VOCAB_SIZE, ge=2, le=2**24)
    attention: Literal["nsa", "dense"] = "nsa"
    mlp: Literal["plain", "gated"] = Field(default="plain", description="plain: SiLU; gated: SwiGLU")
    mlp_hidden: int | None = Field(default=None, ge=1, le=MAX_SIZE, description="hidden width of the MLP; None: 4 * dim")
    rope_theta: float = Field(default=10000.0, gt=0)
    rotary_share: float = Field(default=1.0, gt=0, le=1, description="share of a head's width that rotary embedding turns")
    matching_heads: int = Field(
        default=0,
        ge=0,
        description="heads of the first group that start by looking for what came after the present token before; "
        "with any, that group's keys are those of the token before",
    )
    selection_loss: float = Field(
        default=0.0, ge=0, description="weight of the loss that teaches the choice where the selected branch would look"
    )
    indexer_block: int = Field(
        default=0,
        ge=0,
        le=MAX_COUNT,
        description="tokens that share a key of the indexer, a query and a key per group that choose the blocks and learn "
        "from the selection loss alone; 0: none, the compressed branch's scores choose (eq. 9)",
    )
    indexer_width: int = Field(
        default=0,
        ge=0,
        le=MAX_SIZE,
        description="width of the indexer's query and keys, of which d_k is a multiple; 0: d_k",
    )
    silent: tuple[Literal["cmp", "sel", "win"], ...] = Field(
        default=(), strict=False, description="branches whose gates are 0, in training too: for ablations"
    )
    embedding_norm: bool = Field(
        default=False, description="embeddings are normed, without weights, before the first layer"
    )
    ngrams: int = Field(
        default=0,
        ge=0,
        le=16,
        description="longest n-gram that is looked up beside a token, from 2 on; all shorter ones are, too; 0: none",
    )
    ngram_rows: int = Field(default=32_768, ge=2, le=2**24, description="rows of the hash table for each n-gram length")
    ngram_width: int = Field(default=128, ge=1, le=MAX_SIZE, description="width of a row of that table")
    norm_eps: float = Field(default=1e-5, gt=0)
    nsa: NSAConfig = NSAConfig()

    @model_validator(mode="after")
    def _check_heads(self) -> ModelConfig:
        if self.n_heads % self.n_kv_groups:
            near = min(
                (g for g in range(1, self.n_heads + 1) if self.n_heads % g == 0), key=lambda g: abs(g - self.n_kv_groups)
            )
            raise ValueError(
                f"model.n_heads = {self.n_heads} is not a multiple of model.n_kv_groups = {self.n_kv_groups}; "
                f"the nearest number of groups that divides it is {near}"
            )
        if self.d_k % 2:
            raise ValueError(
                f"model.d_k = {self.d_k} is odd, and rotary embedding turns pairs; use {self.d_k - 1} or {self.d_k + 1}"
            )
        return self

    @model_validator(mode="after")
    def _check_ngrams(self) -> ModelConfig:
        tables = {"ngram_rows", "ngram_width"}
        given = sorted(tables & self.model_fields_set)
        if given and "ngrams" not in self.model_fields_set:
            raise ValueError(
                f"model.{given[0]} = {getattr(self, given[0])} is not read without model.ngrams; set model.ngrams: 2 or "
                "more, or remove it"
            )
        if not self.ngrams:
            # Of a preset that has tables: without them it is what it would be if it had never had any. Frozen for everyone
            # else; here it is still being made.
            for key in tables:
                object.__setattr__(self, key, ModelConfig.model_fields[key].default)
        if self.ngrams == 1:
            raise ValueError(
                "model.ngrams = 1: a single token is looked up anyway; use model.ngrams = 2 or more, or 0 for none"
            )
        return self

    @model_validator(mode="after")
    def _check_pooling(self) -> ModelConfig:
        if self.nsa.phi == "pool" and self.nsa.l == 1:
            raise ValueError("nsa.phi = pool weighs the tokens of a block, and nsa.l = 1 is one; use nsa.phi = avg")
        return self

    @model_validator(mode="after")
    def _check_disabled_branches(self) -> ModelConfig:
        if len({*self.silent}) != len(self.silent) or len(self.silent) > 2:
            raise ValueError(f"model.silent = {list(self.silent)}: name a branch once, and leave one of cmp, sel and win")
        if self.silent and self.attention == "dense":
            raise ValueError(
                f"model.silent = {list(self.silent)}: a dense model has no branches; remove it, or set model.attention: nsa"
            )
        return self

    @model_validator(mode="after")
    def _check_rotary_and_indexer(self) -> ModelConfig:
        turned = self.rotary_share * self.d_k
        if turned != int(turned) or int(turned) % 2 or turned < 2:
            near = max(2, 2 * round(turned / 2))
            raise ValueError(
                f"model.rotary_share = {self.rotary_share} of model.d_k = {self.d_k} is {turned:g} channels, and rotary "
                f"embedding turns pairs; use {near / self.d_k:g}"
            )
        if self.matching_heads > self.heads_per_group:
            raise ValueError(
                f"model.matching_heads = {self.matching_heads} is more than the {self.heads_per_group} heads of a group; "
                f"use at most {self.heads_per_group}"
            )
        if self.indexer_width and "indexer_block" not in self.model_fields_set:
            raise ValueError(
                f"model.indexer_width = {self.indexer_width} is not read without model.indexer_block; set "
                "model.indexer_block: 1 or more, or remove it"
            )
        if self.indexer_block:
            self._check_indexer()
        else:
            object.__setattr__(self, "indexer_width", 0)  # of a preset that has an indexer; as for tables above
        return self

    def _check_indexer(self) -> None:
        if self.nsa.l_sel % self.indexer_block:
            fits = [n for n in range(1, self.nsa.l_sel + 1) if not self.nsa.l_sel % n]
            near = min(fits, key=lambda n: abs(n - self.indexer_block))
            raise ValueError(
                f"model.indexer_block = {self.indexer_block} does not divide nsa.l_sel = {self.nsa.l_sel}; "
                f"use model.indexer_block = {near}"
            )
        if not self._is_valid_index_width(self.index_width):
            near = min(
                filter(self._is_valid_index_width, range(1, self.d_k + 1)), key=lambda n: abs(n - self.indexer_width)
            )
            raise ValueError(
                f"model.indexer_width = {self.indexer_width}: model.d_k = {self.d_k} has to be a multiple of it, and "
                f"model.rotary_share = {self.rotary_share} of it pairs of channels; use model.indexer_width = {near}"
            )
        if not self.selection_loss:
            raise ValueError(
                f"model.indexer_block = {self.indexer_block} and model.selection_loss = 0: nothing else teaches an "
                "indexer; use model.selection_loss = 0.05, or model.indexer_block = 0"
            )

    def _is_valid_index_width(self, width: int) -> bool:
        turned = self.rotary_share * width
        return self.d_k % width == 0 and turned >= 2 and turned % 2 == 0

    @property
    def index_width(self) -> int:
        """Width of the indexer's query and keys."""
        return self.indexer_width or self.d_k

    @property
    def has_indexer(self) -> bool:
        """Whether blocks are chosen by an indexer."""
        return self.attention == "nsa" and self.indexer_block > 0

    @property
    def selection_nsa(self) -> NSAConfig:
        """The geometry of the keys that choose blocks: `nsa`, or an indexer's, whose blocks lie side by side."""
        if not self.has_indexer:
            return self.nsa
        phi = "pool" if self.indexer_block > 1 else "avg"  # one token has nothing to weigh: dead weights
        return self.nsa.model_copy(update={"l": self.indexer_block, "d": self.indexer_block, "phi": phi})

    @property
    def has_selection_loss(self) -> bool:
        """Whether the model adds a selection loss to what it is trained on."""
        return self.attention == "nsa" and self.selection_loss > 0

    @property
    def rotary_width(self) -> int:
        """Channels of a query or key head that rotary embedding turns."""
        return int(self.rotary_share * self.d_k)

    @property
    def heads_per_group(self) -> int:
        return self.n_heads // self.n_kv_groups

    @property
    def hidden_width(self) -> int:
        return self.mlp_hidden or 4 * self.dim
