"""Checks before the first step. A run that fails a check does not start."""
