"""Text to batches: sources of documents, tokenizers, verified shards, and batches that are a pure function of the step.

    dataset = prepare(run.data, run.model.vocab_size, run.train.seq_len)
    batches = StagedBatches(dataset.train, run.train, run.data)
    inputs, targets = batches.batch(step)

Depends on `nsa_lab.config` alone.
"""

from nsa_lab.data.batches import Batch, Batches, EvalBatches
from nsa_lab.data.dataset import Dataset, check, prepare
from nsa_lab.data.documents import Documents
from nsa_lab.data.errors import DataError
from nsa_lab.data.fill import FillProgress, split_fraction
from nsa_lab.data.pace import FillPace
from nsa_lab.data.prefetch import Prefetcher
from nsa_lab.data.rows import BestFitRows, StreamRows, permute
from nsa_lab.data.shards import TokenStore
from nsa_lab.data.sources import Document, Source, open_source
from nsa_lab.data.staged import StagedBatches, held_out
from nsa_lab.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "Batches",
    "BestFitRows",
    "ByteTokenizer",
    "DataError",
    "Dataset",
    "Document",
    "Documents",
    "EvalBatches",
    "FileTokenizer",
    "FillPace",
    "FillProgress",
    "Prefetcher",
    "Source",
    "StagedBatches",
    "StreamRows",
    "TokenStore",
    "Tokenizer",
    "check",
    "held_out",
    "load_tokenizer",
    "open_source",
    "permute",
    "prepare",
    "split_fraction",
]
