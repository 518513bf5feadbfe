"""What a trained model can do, and what its selection does: retrieval, loss by position and of documents, interventions.

    evaluation = evaluate_run("outputs/smoke-...")          # writes evaluation.json into the run directory

Every part works on a model by itself, on a CPU too: `retrieval`, `loss_by_position`, `document_loss`, `text_loss`,
`intervene`, `choice_quality`, `reach`.
"""

from nsa_lab.evaluate.ablations import ABLATIONS, Ablation, forward_with_ablation, run_ablations
from nsa_lab.evaluate.block_selectors import compute_block_mass, measure_selection_quality
from nsa_lab.evaluate.document_loss import measure_document_loss
from nsa_lab.evaluate.heldout import TextLoss, measure_text_loss, read_text
from nsa_lab.evaluate.loss_by_position import measure_loss_by_position
from nsa_lab.evaluate.retrieval import NEEDLE_FORMS, TASKS, evaluate_retrieval
from nsa_lab.evaluate.run_evaluation import evaluate_run
from nsa_lab.evaluate.selection_benefit import SelectionBenefit, measure_selection_benefit

__all__ = [
    "ABLATIONS",
    "NEEDLE_FORMS",
    "TASKS",
    "Ablation",
    "SelectionBenefit",
    "TextLoss",
    "compute_block_mass",
    "evaluate_retrieval",
    "evaluate_run",
    "forward_with_ablation",
    "measure_document_loss",
    "measure_loss_by_position",
    "measure_selection_benefit",
    "measure_selection_quality",
    "measure_text_loss",
    "read_text",
    "run_ablations",
]
