"""Text to batches: document sources, tokenizers, verified token shards, and batches that are a pure function of the step.

    dataset = prepare(run.data, run.model.vocab_size, run.train.seq_len)
    batches = StagedBatches(dataset.train, run.train, run.data)
    inputs, targets = batches.batch(step)

Depends only on `nsa_lab.config`. Each name is imported on first use: configuration and text can be checked without torch,
which only batches need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nsa_lab.data.batches import Batch, Batches, EvalBatches
    from nsa_lab.data.build_shards import BuildProgress, ProgressMeter, compute_split_fraction
    from nsa_lab.data.dataset import Dataset, check, describe_split, prepare
    from nsa_lab.data.document_starts import compute_document_capacity, split_documents
    from nsa_lab.data.errors import DataError
    from nsa_lab.data.prefetch import Prefetcher
    from nsa_lab.data.sequence_packing import BestFitPacking, StreamPacking, permute
    from nsa_lab.data.shards import TokenStore
    from nsa_lab.data.sources import Document, Source, open_source
    from nsa_lab.data.stage_batches import StagedBatches, make_validation_batches
    from nsa_lab.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "Batches",
    "BestFitPacking",
    "BuildProgress",
    "ByteTokenizer",
    "DataError",
    "Dataset",
    "Document",
    "EvalBatches",
    "FileTokenizer",
    "Prefetcher",
    "ProgressMeter",
    "Source",
    "StagedBatches",
    "StreamPacking",
    "TokenStore",
    "Tokenizer",
    "check",
    "compute_document_capacity",
    "compute_split_fraction",
    "describe_split",
    "load_tokenizer",
    "make_validation_batches",
    "open_source",
    "permute",
    "prepare",
    "split_documents",
]

_MODULE_BY_NAME = {
    "Batch": "batches",
    "Batches": "batches",
    "BestFitPacking": "sequence_packing",
    "BuildProgress": "build_shards",
    "ByteTokenizer": "tokenizer",
    "DataError": "errors",
    "Dataset": "dataset",
    "Document": "sources",
    "EvalBatches": "batches",
    "FileTokenizer": "tokenizer",
    "Prefetcher": "prefetch",
    "ProgressMeter": "build_shards",
    "Source": "sources",
    "StagedBatches": "stage_batches",
    "StreamPacking": "sequence_packing",
    "TokenStore": "shards",
    "Tokenizer": "tokenizer",
    "check": "dataset",
    "compute_document_capacity": "document_starts",
    "compute_split_fraction": "build_shards",
    "describe_split": "dataset",
    "load_tokenizer": "tokenizer",
    "make_validation_batches": "stage_batches",
    "open_source": "sources",
    "permute": "sequence_packing",
    "prepare": "dataset",
    "split_documents": "document_starts",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_BY_NAME:
        raise AttributeError(f"module 'nsa_lab.data' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"nsa_lab.data.{_MODULE_BY_NAME[name]}"), name)
