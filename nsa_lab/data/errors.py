"""The error type of the data package."""

from __future__ import annotations

from nsa_lab.config import UsageError


class DataError(UsageError, ValueError):
    """The data cannot be used. One-line message: expected, found, remedy."""
