"""Mutants of nsa_lab/evaluate: one planted fault each."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "evaluation: a document that is read alone sees those before it",
        "evaluate.document_loss",
        "for layout in (span, None))",
        "for layout in (None, None))",
    ),
    Mutant(
        "evaluation: padding counts as text of documents",
        "evaluate.document_loss",
        "window, layout)[:n_targets]",
        "window, layout)",
    ),
    Mutant(
        "reach: facts inside the window",
        "evaluate.selection_benefit",
        "max_position = length - max(nsa.w, 2 * nsa.l_sel) - fact_length",
        "max_position = length - fact_length",
    ),
    Mutant(
        "reach: facts in the first block",
        "evaluate.selection_benefit",
        "first, last = nsa.l_sel / text_length,",
        "first, last = 0.0,",
    ),
    Mutant(
        "retrieval: any question is the one at the depth",
        "evaluate.retrieval",
        "scores[0][:, 0].all(-1)",
        "scores[0][:, -1].all(-1)",
    ),
    Mutant("reach: few enough for luck", "evaluate.selection_benefit", "DEFAULT_SEQUENCES = 16", "DEFAULT_SEQUENCES = 4"),
    Mutant(
        "evaluation: an answer's token from its own logits",
        "evaluate.scoring",
        "answer_positions.flatten(1) - 1",
        "answer_positions.flatten(1)",
    ),
    Mutant(
        "evaluation: the oracle looks ahead",
        "evaluate.block_selectors",
        "(s > t[:, None])[None, :, None, None]",
        "(s > t[:, None] + nsa.l_sel)[None, :, None, None]",
    ),
    Mutant(
        "evaluation: every part of the sequences throws the same dice",
        "evaluate.ablations",
        "forward_with_ablation(model, rows, ablation, generator)",
        "forward_with_ablation(model, rows, ablation, seed)",
    ),
    Mutant(
        "evaluation: a silenced branch is only halved",
        "evaluate.ablations",
        "torch.zeros_like(out) if name",
        "0.5 * out if name",
    ),
    Mutant(
        "evaluation: twice as many blocks are as many as ever",
        "evaluate.ablations",
        "nsa.n_sel * ablation.n_sel_factor",
        "nsa.n_sel",
    ),
    Mutant("tiny recall: the selection loss is left out", "evaluate.tiny_recall", " + model.auxiliary_loss()", ""),
    Mutant(
        "tiny recall: asked with what it was trained on",
        "evaluate.tiny_recall",
        "n_eval_sequences, seed, EVAL_STREAM)",
        "n_eval_sequences, seed)",
    ),
    Mutant("tiny recall: near questions count too", "evaluate.tiny_recall", "eval_positions[:, -task.n_far :]", "eval_positions"),
    Mutant(
        "tiny recall: a far pair is told where another is",
        "evaluate.tiny_recall",
        "slot_order[:, :n_far], far_slots]",
        "slot_order[:, -n_far:], far_slots]",
    ),
    Mutant(
        "retrieval: interventions at shallow depths alone",
        "evaluate.retrieval",
        "index * len(DEPTHS) // count % len",
        "index % len",
    ),
    Mutant(
        "retrieval: the last sequences are written", "evaluate.retrieval", "samples[:n_generated]", "samples[-n_generated:]"
    ),
]
