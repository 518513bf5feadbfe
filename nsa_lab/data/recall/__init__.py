"""Recall: facts planted into real text, and questions whose answers stand earlier in the same sequence.

`facts` says what a fact, its question and its answer look like; `planting` puts them into windows of text for training;
`tasks` makes the sequences that a trained model is asked with.
"""

from nsa_lab.data.recall.facts import Fact, compute_max_fact_bytes, sample_facts
from nsa_lab.data.recall.needle_insertion import insert_in_share, insert_per_document, make_inserter
from nsa_lab.data.recall.retrieval_tasks import RetrievalTask, make_multi_key_task, make_multi_query_task, make_needle_task

__all__ = [
    "Fact",
    "RetrievalTask",
    "compute_max_fact_bytes",
    "insert_in_share",
    "insert_per_document",
    "make_inserter",
    "make_multi_key_task",
    "make_multi_query_task",
    "make_needle_task",
    "sample_facts",
]
