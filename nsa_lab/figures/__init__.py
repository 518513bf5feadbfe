"""Plots for reports and notebooks: each function takes data and returns a matplotlib Figure with title, units and legends.

The functions neither show nor save the figure, and they only draw the given data. Plots of runs take a run
directory or a `History` that is already loaded. Colours are colour-blind-safe, with the same colour per branch in all
figures, and resumed attempts are marked.
"""

from collections.abc import Callable

from nsa_lab.config.optional_deps import require

require("matplotlib")

from matplotlib.figure import Figure

from nsa_lab.figures.architecture import plot_architecture, plot_branch_masks
from nsa_lab.figures.benchmarks import plot_allowed_errors, plot_attention_time, plot_decode_speed, plot_step_time
from nsa_lab.figures.blocks import plot_block_geometry, plot_overlap_weights, plot_reads_by_length, plot_visible_blocks
from nsa_lab.figures.branch_curves import (
    plot_branch_norms,
    plot_gate_shares,
    plot_gates_by_layer,
    plot_selection_benefit,
    plot_selection_statistics,
)
from nsa_lab.figures.context_shards import plot_context_shards
from nsa_lab.figures.conversion_plots import plot_conversion
from nsa_lab.figures.document_boundaries import plot_document_boundaries
from nsa_lab.figures.evaluation_plots import (
    get_position_ranges,
    plot_ablation_accuracy,
    plot_difference_by_position,
    plot_facts_by_length,
    plot_loss_by_position,
    plot_recall_accuracy,
    plot_retrieval,
    plot_retrieval_grid,
)
from nsa_lab.figures.layer_comparison import plot_layer_gates, plot_layer_statistic
from nsa_lab.figures.loss import plot_learning_rate, plot_loss_curves, plot_validation_gap
from nsa_lab.figures.query_plot import plot_attention_matrix, plot_query_attention
from nsa_lab.figures.run_axes import Run
from nsa_lab.figures.run_difference import plot_loss_difference
from nsa_lab.figures.run_overview import plot_overview, plot_progress, plot_report_panels
from nsa_lab.figures.selection_maps import plot_importance, plot_selection_by_layer
from nsa_lab.figures.speed_curves import plot_throughput

__all__ = [
    "BRANCH_PLOTS",
    "RUN_PLOTS",
    "Run",
    "get_position_ranges",
    "plot_ablation_accuracy",
    "plot_allowed_errors",
    "plot_architecture",
    "plot_attention_matrix",
    "plot_attention_time",
    "plot_block_geometry",
    "plot_branch_masks",
    "plot_branch_norms",
    "plot_context_shards",
    "plot_conversion",
    "plot_decode_speed",
    "plot_difference_by_position",
    "plot_document_boundaries",
    "plot_facts_by_length",
    "plot_gate_shares",
    "plot_gates_by_layer",
    "plot_importance",
    "plot_layer_gates",
    "plot_layer_statistic",
    "plot_learning_rate",
    "plot_loss_by_position",
    "plot_loss_curves",
    "plot_loss_difference",
    "plot_overlap_weights",
    "plot_overview",
    "plot_progress",
    "plot_query_attention",
    "plot_reads_by_length",
    "plot_recall_accuracy",
    "plot_report_panels",
    "plot_retrieval",
    "plot_retrieval_grid",
    "plot_selection_benefit",
    "plot_selection_by_layer",
    "plot_selection_statistics",
    "plot_step_time",
    "plot_throughput",
    "plot_validation_gap",
    "plot_visible_blocks",
]

# Plots of a report that has no notebook, in this order.
RUN_PLOTS: tuple[Callable[[Run], Figure], ...] = (plot_learning_rate, plot_throughput)
BRANCH_PLOTS: tuple[Callable[[Run], Figure], ...] = (
    plot_gate_shares,
    plot_gates_by_layer,
    plot_selection_statistics,
    plot_branch_norms,
)
