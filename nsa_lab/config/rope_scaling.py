"""Mapping `model.rope_scaling`: RoPE of a model whose context is extended."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from nsa_lab.config.base import MAX_COUNT, Section


class RopeScaling(Section):
    """RoPE for texts that are longer than those of pretraining, with the names of `rope_scaling` in transformers."""

    rope_type: Literal["linear", "yarn"] = Field(
        description="linear: divide all frequencies by the factor; yarn: only those with few rotations in the original "
        "length (arXiv 2309.00071)"
    )
    factor: float = Field(ge=1, description="new length / original length")
    original_max_position_embeddings: int | None = Field(
        default=None, ge=1, le=MAX_COUNT, description="yarn: length of the texts of pretraining, in tokens"
    )
    beta_fast: float = Field(
        default=32.0, gt=0, description="yarn: frequencies with more rotations in the original length do not change"
    )
    beta_slow: float = Field(
        default=1.0, gt=0, description="yarn: frequencies with fewer rotations in it are divided by the factor"
    )
    attention_factor: float | None = Field(
        default=None, gt=0, description="yarn: scale of rotated queries and keys; None: 0.1 ln(factor) + 1"
    )

    @model_validator(mode="after")
    def _check_length(self) -> RopeScaling:
        if self.rope_type == "yarn" and self.original_max_position_embeddings is None:
            raise ValueError(
                "model.rope_scaling: yarn needs original_max_position_embeddings, the length of the texts of pretraining; "
                "set it, for example to 8192"
            )
        return self
