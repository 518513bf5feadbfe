"""Mutants of nsa_lab/evaluate: one planted fault each."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "evaluation: a separately scored document attends to earlier documents",
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
        "selection benefit: facts inside the window",
        "evaluate.selection_benefit",
        "max_position = length - max(nsa.w, nsa.local_blocks * nsa.l_sel) - fact_length",
        "max_position = length - fact_length",
    ),
    Mutant(
        "selection benefit: facts in the first block",
        "evaluate.selection_benefit",
        "first, last = min_position / text_length,",
        "first, last = 0.0,",
    ),
    Mutant(
        "retrieval: another question counts as the one at the depth",
        "evaluate.retrieval",
        "scores[0][:, 0].all(-1)",
        "scores[0][:, -1].all(-1)",
    ),
    Mutant(
        "selection benefit: too few sequences",
        "evaluate.selection_benefit",
        "DEFAULT_SEQUENCES = 16",
        "DEFAULT_SEQUENCES = 4",
    ),
    Mutant(
        "evaluation: an answer token is scored with the logits of its own position",
        "evaluate.scoring",
        "answer_positions.flatten(1) - 1",
        "answer_positions.flatten(1)",
    ),
    Mutant(
        "evaluation: the oracle sees future keys",
        "evaluate.block_selectors",
        "(s > t[:, None])[None, :, None, None]",
        "(s > t[:, None] + nsa.l_sel)[None, :, None, None]",
    ),
    Mutant(
        "evaluation: every batch gets the same random blocks",
        "evaluate.ablations",
        "forward_with_ablation(model, rows, ablation, generator)",
        "forward_with_ablation(model, rows, ablation, seed)",
    ),
    Mutant(
        "evaluation: a disabled branch is only halved",
        "evaluate.ablations",
        "torch.zeros_like(out) if name",
        "0.5 * out if name",
    ),
    Mutant(
        "evaluation: a branch that does not exist is disabled",
        "evaluate.ablations",
        "if ablation.disabled_branch and ablation.disabled_branch not in config.branches:",
        "if False:",
    ),
    Mutant(
        "evaluation: only layers with an indexer have twice as many blocks",
        "evaluate.ablations",
        "return earlier_blocks",
        "return earlier_blocks if earlier_blocks is None else earlier_blocks[..., : layer.config.nsa.n_sel].contiguous()",
    ),
    Mutant(
        "evaluation: the selection of an earlier layer is not passed on",
        "evaluate.block_selectors",
        "(selected, selected) if scoring is None",
        "(selected, selected.flip(1)) if scoring is None",
    ),
    Mutant(
        "evaluation: n_sel is not doubled",
        "evaluate.ablations",
        "nsa.n_sel * ablation.n_sel_factor",
        "nsa.n_sel",
    ),
    Mutant("tiny recall: no selection loss", "evaluate.tiny_recall", " + model.auxiliary_loss()", ""),
    Mutant(
        "tiny recall: evaluated on training sequences",
        "evaluate.tiny_recall",
        "n_eval_sequences, seed, EVAL_STREAM)",
        "n_eval_sequences, seed)",
    ),
    Mutant(
        "tiny recall: near questions count too",
        "evaluate.tiny_recall",
        "eval_positions[:, -task.n_far :]",
        "eval_positions",
    ),
    Mutant(
        "tiny recall: two pairs share a slot",
        "evaluate.tiny_recall",
        "slot_order[:, :n_far], far_slots]",
        "slot_order[:, -n_far:], far_slots]",
    ),
    Mutant(
        "retrieval: ablations only at shallow depths",
        "evaluate.retrieval",
        "index * len(DEPTHS) // count % len",
        "index % len",
    ),
    Mutant(
        "retrieval: the last samples are generated", "evaluate.retrieval", "samples[:n_generated]", "samples[-n_generated:]"
    ),
    Mutant(
        "RULER: the generated tokens are not part of the length",
        "evaluate.ruler_tasks",
        "n_prompt = length - declared.tokens_to_generate",
        "n_prompt = length",
    ),
    Mutant("RULER: case matters", "evaluate.ruler_tasks", "reference.lower() in text.lower()", "reference in text"),
    Mutant(
        "RULER: variables in random order",
        "evaluate.ruler_tasks",
        "places = sorted(rng.choice(n_noises, len(names), replace=False))",
        "places = list(rng.choice(n_noises, len(names), replace=False))",
    ),
    Mutant(
        "RULER: the example of common words has the repetitions of the question",
        "evaluate.ruler_tasks",
        "_list_words(n_example_words, example_repeats, rng)",
        "_list_words(n_example_words, repeats, rng)",
    ),
    Mutant(
        "RULER: short sequences have the repetitions of long ones",
        "evaluate.ruler_tasks",
        "length >= CWE_LONG_TOKENS",
        "length >= 4000",
    ),
    Mutant(
        "RULER: the references are the values of the first key",
        "evaluate.ruler_tasks",
        "for value in values_by_key[index]",
        "for value in values_by_key[0]",
    ),
    Mutant(
        "RULER: the haystack ends with the documents",
        "evaluate.ruler_tasks",
        "*words[: max(start + count - len(words), 0)]",
        "*words[:0]",
    ),
    Mutant(
        "RULER: the search stops below the largest fit",
        "evaluate.ruler_tasks",
        "if high - low < 2:",
        "if high - low < 9:",
    ),
    Mutant("RULER: padding on the right", "evaluate.ruler", "(width - len(row), 0)", "(0, width - len(row))"),
    Mutant(
        "RULER: the interval counts references",
        "evaluate.ruler",
        "compute_wilson_interval(share * n_questions, n_questions)",
        "compute_wilson_interval(sum(found), n_references * n_questions)",
    ),
    Mutant(
        "RULER: ids beyond the tokenizer are decoded",
        "evaluate.ruler",
        "(ids != separator) & (ids < n_ids)",
        "ids != separator",
    ),
    Mutant(
        "RULER: answers to other questions are paired",
        "health.comparison",
        'keys = ("questions", "references", "seed",',
        'keys = ("questions", "references",',
    ),
    Mutant(
        "RULER: the mean over seeds is of one seed",
        "health.comparison",
        'n_questions = sum(cell["questions"] for cell in known)',
        'n_questions = known[0]["questions"]',
    ),
    Mutant("retrieval: held-out words keep the run's wordings", "evaluate.retrieval", 'wordings="single", ', ""),
]
