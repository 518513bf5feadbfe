"""Evaluation of trained models: retrieval, RULER, loss by position, of documents and texts, ablations of block selection.

    evaluation = evaluate_run("outputs/smoke-...")          # writes evaluation.json into the run directory

Each part also works directly on a model, on a CPU too: `evaluate_retrieval`, `evaluate_ruler`,
`measure_loss_by_position`, `measure_document_loss`, `measure_text_loss`, `run_ablations`, `measure_selection_quality`,
`measure_selection_benefit`.
"""

from nsa_lab.evaluate.ablations import ABLATIONS, Ablation, forward_with_ablation, list_ablations, run_ablations
from nsa_lab.evaluate.block_selectors import compute_block_mass, measure_selection_quality
from nsa_lab.evaluate.document_loss import measure_document_loss
from nsa_lab.evaluate.heldout import TextLoss, measure_text_loss, read_text
from nsa_lab.evaluate.loss_by_position import measure_loss_by_position
from nsa_lab.evaluate.retrieval import NEEDLE_FORMS, TASKS, evaluate_retrieval
from nsa_lab.evaluate.ruler import RulerResult, evaluate_ruler, evaluate_run_with_ruler
from nsa_lab.evaluate.ruler_tasks import RULER_TASKS
from nsa_lab.evaluate.run_evaluation import evaluate_run
from nsa_lab.evaluate.selection_benefit import SelectionBenefit, measure_selection_benefit

__all__ = [
    "ABLATIONS",
    "NEEDLE_FORMS",
    "RULER_TASKS",
    "TASKS",
    "Ablation",
    "RulerResult",
    "SelectionBenefit",
    "TextLoss",
    "compute_block_mass",
    "evaluate_retrieval",
    "evaluate_ruler",
    "evaluate_run",
    "evaluate_run_with_ruler",
    "forward_with_ablation",
    "list_ablations",
    "measure_document_loss",
    "measure_loss_by_position",
    "measure_selection_benefit",
    "measure_selection_quality",
    "measure_text_loss",
    "read_text",
    "run_ablations",
]
