"""Pictures: every function here takes data and gives a matplotlib Figure with a title, units and legends.

None shows or saves it, and none computes what it draws. Pictures of runs take a run directory, or a `History` that was read
already; they use one colour per branch everywhere (colour-blind-safe) and mark where a run was resumed.
"""

from collections.abc import Callable

from nsa_lab.config.extras import require

require("matplotlib")

from matplotlib.figure import Figure

from nsa_lab.figures.architecture import architecture, branch_masks
from nsa_lab.figures.blocks import block_geometry, overlap_weights, reads_by_length, visible_blocks
from nsa_lab.figures.branches import branch_norms, gate_layers, gate_shares, selection_statistics
from nsa_lab.figures.decoding import against_context
from nsa_lab.figures.differences import loss_difference
from nsa_lab.figures.documents import across_documents
from nsa_lab.figures.layers import gates_of_layer, statistic_of_layer
from nsa_lab.figures.loss import learning_rate, loss_curves, validation_gap
from nsa_lab.figures.pace import throughput
from nsa_lab.figures.parity import shares_of_allowed
from nsa_lab.figures.query import query_reads
from nsa_lab.figures.reach import reach_losses
from nsa_lab.figures.retrieval import difference_by_position, loss_by_position, octaves_of, retrieval_map, retrieval_maps
from nsa_lab.figures.run_axes import Run
from nsa_lab.figures.selection import importance_map, selection_by_layer
from nsa_lab.figures.speeds import time_by_length
from nsa_lab.figures.step_time import step_by_part
from nsa_lab.figures.tiny_recall import accuracy_curves, intervention_bars
from nsa_lab.figures.whole_run import first_screen, overview, progress

__all__ = [
    "BRANCH_PICTURES",
    "RUN_PICTURES",
    "Run",
    "accuracy_curves",
    "across_documents",
    "against_context",
    "architecture",
    "block_geometry",
    "branch_masks",
    "branch_norms",
    "difference_by_position",
    "first_screen",
    "gate_layers",
    "gate_shares",
    "gates_of_layer",
    "importance_map",
    "intervention_bars",
    "learning_rate",
    "loss_by_position",
    "loss_curves",
    "loss_difference",
    "octaves_of",
    "overlap_weights",
    "overview",
    "progress",
    "query_reads",
    "reach_losses",
    "reads_by_length",
    "retrieval_map",
    "retrieval_maps",
    "selection_by_layer",
    "selection_statistics",
    "shares_of_allowed",
    "statistic_of_layer",
    "step_by_part",
    "throughput",
    "time_by_length",
    "validation_gap",
    "visible_blocks",
]

# What a report without a notebook shows, in this order.
RUN_PICTURES: tuple[Callable[[Run], Figure], ...] = (learning_rate, throughput)
BRANCH_PICTURES: tuple[Callable[[Run], Figure], ...] = (gate_shares, gate_layers, selection_statistics, branch_norms)
