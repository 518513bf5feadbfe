"""Run directories for code that writes, follows or reads them: records, status, checkpoints, names.

Importing this package does not import torch, so that launching and reading a run are quick.
"""
