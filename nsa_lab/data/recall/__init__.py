"""Recall: facts planted into real text, and questions whose answers stand earlier in the same sequence.

`facts` says what a fact, its question and its answer look like; `planting` puts them into windows of text for training;
`tasks` makes the sequences that a trained model is asked with.
"""

from nsa_lab.data.recall.facts import Fact, draw_facts, fact_bytes
from nsa_lab.data.recall.planting import by_document, planter, sparingly
from nsa_lab.data.recall.tasks import Asked, multi_key, multi_query, needle

__all__ = [
    "Asked",
    "Fact",
    "by_document",
    "draw_facts",
    "fact_bytes",
    "multi_key",
    "multi_query",
    "needle",
    "planter",
    "sparingly",
]
