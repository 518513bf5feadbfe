"""Recall: facts inserted into real text, and questions whose answers occur earlier in the same sequence.

`facts` defines the text of a fact, its question and its answer, `grammar` most of its wordings. `needle_insertion` inserts
them into windows of training text. `retrieval_tasks` builds the sequences that evaluate a trained model.
"""

from nsa_lab.data.recall.facts import HELD_OUT_WORDINGS, Fact, compute_max_fact_bytes, sample_facts
from nsa_lab.data.recall.needle_insertion import insert_in_share, insert_per_document, make_inserter
from nsa_lab.data.recall.retrieval_tasks import (
    RetrievalTask,
    make_first_value_task,
    make_multi_key_task,
    make_multi_query_task,
    make_needle_task,
    make_updated_task,
)

__all__ = [
    "HELD_OUT_WORDINGS",
    "Fact",
    "RetrievalTask",
    "compute_max_fact_bytes",
    "insert_in_share",
    "insert_per_document",
    "make_first_value_task",
    "make_inserter",
    "make_multi_key_task",
    "make_multi_query_task",
    "make_needle_task",
    "make_updated_task",
    "sample_facts",
]
