"""What a trained model can do, and what its selection does: retrieval, loss by position and of documents, interventions.

    evaluation = evaluate_run("outputs/smoke-...")          # writes evaluation.json into the run directory

Every part works on a model by itself, on a CPU too: `retrieval`, `loss_by_position`, `document_loss`, `text_loss`,
`intervene`, `choice_quality`, `reach`.
"""

from nsa_lab.evaluate.choices import block_mass, choice_quality
from nsa_lab.evaluate.documents import document_loss
from nsa_lab.evaluate.interventions import INTERVENTIONS, Intervention, forward, intervene
from nsa_lab.evaluate.positions import loss_by_position
from nsa_lab.evaluate.reach import Reach, reach
from nsa_lab.evaluate.record import evaluate_run
from nsa_lab.evaluate.retrieval import FORMS, TASKS, retrieval
from nsa_lab.evaluate.texts import TextLoss, read_text, text_loss

__all__ = [
    "FORMS",
    "INTERVENTIONS",
    "TASKS",
    "Intervention",
    "Reach",
    "TextLoss",
    "block_mass",
    "choice_quality",
    "document_loss",
    "evaluate_run",
    "forward",
    "intervene",
    "loss_by_position",
    "reach",
    "read_text",
    "retrieval",
    "text_loss",
]
