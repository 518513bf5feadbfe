"""The one error of the data package."""

from __future__ import annotations

from nsa_lab.config import UsageError


class DataError(UsageError, ValueError):
    """The data cannot be used. One line: what was expected, what came, what to do."""
