"""Section `nsa`: block sizes, selection and gate of Native Sparse Attention, and the names of its branches."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from nsa_lab.config.base import MAX_COUNT, Section

# Short names of the branches, as used in code and records, in the order of the gates, and their names in text.
BRANCHES = {"cmp": "compressed", "sel": "selected", "win": "window"}


class NSAConfig(Section):
    """Block sizes and variants of Native Sparse Attention (arXiv 2502.11089, section 3.3).

    Lengths are in tokens, `n_sel` is in blocks.
    """

    l: int = Field(default=32, ge=1, le=MAX_COUNT, description="compression block length in tokens")
    d: int = Field(default=16, ge=1, le=MAX_COUNT, description="stride between compression blocks in tokens")
    l_sel: int = Field(default=64, ge=1, le=MAX_COUNT, description="selection block length in tokens")
    n_sel: int = Field(default=16, le=MAX_COUNT, description="number of selected blocks per query, including forced blocks")
    w: int = Field(default=512, ge=1, le=MAX_COUNT, description="sliding window in tokens, including the query's own")
    phi: Literal["avg", "linear", "mlp", "pool"] = Field(default="avg", description="compression operator")
    gate: Literal["sigmoid", "softmax"] = Field(default="sigmoid", description="gate over the branches")
    sink_blocks: int = Field(
        default=1, ge=0, le=MAX_COUNT, description="number of first blocks that are always selected; they count in n_sel"
    )
    local_blocks: int = Field(
        default=2,
        ge=1,
        le=MAX_COUNT,
        description="number of latest blocks that are always selected, the query's own included; they count in n_sel",
    )
    scores: Literal["compressed", "mean_key", "indexer"] | None = Field(
        default=None,
        description="scores that select the blocks: of the compressed branch (eq. 9), of the mean key of each block, or of "
        "an indexer; None: indexer if model.indexer_block is set, otherwise compressed",
    )
    head_reduction: Literal["sum", "max"] = Field(
        default="sum", description="how the scores of the query heads of a group are reduced to one (eq. 10: sum)"
    )
    block_reduction: Literal["sum", "max"] = Field(
        default="sum", description="how the scores of the keys in a block are reduced to one (eq. 9: sum)"
    )

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
        if self.n_sel < self.n_forced:
            raise ValueError(
                f"nsa.n_sel = {self.n_sel} is too small for the {self.n_forced} blocks that are always selected "
                f"(nsa.sink_blocks = {self.sink_blocks}, nsa.local_blocks = {self.local_blocks}); "
                f"use nsa.n_sel >= {self.n_forced}"
            )
        return self

    @property
    def n_forced(self) -> int:
        """Number of blocks that are always selected: the first `sink_blocks` and the latest `local_blocks`."""
        return self.sink_blocks + self.local_blocks
