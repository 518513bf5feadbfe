"""Text to batches: document sources, tokenizers, verified token shards, and batches that are a pure function of the step.

    dataset = prepare(run.data, run.model.vocab_size, run.train.seq_len)
    batches = StagedBatches(dataset.train, run.train, run.data)
    inputs, targets = batches.batch(step)

Depends only on `nsa_lab.config`.
"""

from nsa_lab.data.batches import Batch, Batches, EvalBatches
from nsa_lab.data.build_progress import ProgressMeter
from nsa_lab.data.build_shards import BuildProgress, compute_split_fraction
from nsa_lab.data.dataset import Dataset, check, prepare
from nsa_lab.data.document_starts import Documents
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
    "Documents",
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
    "compute_split_fraction",
    "load_tokenizer",
    "make_validation_batches",
    "open_source",
    "permute",
    "prepare",
]
