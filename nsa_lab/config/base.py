"""What all sections have in common."""

from __future__ import annotations

from typing import Any

import pydantic

from nsa_lab.config.errors import ConfigError, format_validation_error

MAX_COUNT = 2**31 - 1
"""The largest length or count: what kernels and shards number with 32 bits."""
MAX_SIZE = 2**18
"""The largest width, number of heads or number of sequences, so that no tensor has more bytes than 64 bits count."""


class Section(pydantic.BaseModel):
    """Frozen, strict, and without keys that nobody reads. Raises `ConfigError`."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except pydantic.ValidationError as error:
            raise ConfigError(format_validation_error(error, type(self))) from None
