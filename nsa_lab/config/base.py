"""Base class of all configuration sections, and the limits of their values."""

from __future__ import annotations

from typing import Any

import pydantic

from nsa_lab.config.errors import ConfigError, format_validation_error

MAX_COUNT = 2**31 - 1
"""Largest length or count: kernels and data shards use 32-bit indices."""
MAX_SIZE = 2**18
"""Largest width, number of heads or number of sequences, so that the bytes of any tensor fit 64 bits."""
MAX_LAYERS = 10_000
"""Largest number of layers."""


class Section(pydantic.BaseModel):
    """A configuration section: immutable, strictly typed, without unknown keys. Raise `ConfigError` if it is invalid."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except pydantic.ValidationError as error:
            raise ConfigError(format_validation_error(error, type(self))) from None
