"""Plants one fault at a time into the library and runs the tests on it: `python tests/mutants.py [part of a name ...]`.

A mutant is a piece of source text and what takes its place. Each runs in a forked process that imports the changed module,
until the first test fails. Prints a line per mutant, `caught by <test>` or `SURVIVED`; exits 1 if one survives, if one does
not apply to the source any more, or if the library as it stands fails.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import io
import linecache
import multiprocessing
import os
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

# Imported once, here, and inherited by every fork: all that is slow to import and is not the library itself.
import hypothesis  # noqa: F401
import numpy  # noqa: F401
import pydantic  # noqa: F401
import pytest
import torch
import yaml  # noqa: F401

if not torch.cuda.is_available():
    # As tests/conftest.py has it, which comes too late here: Triton reads this once, and torch's compiler imports Triton.
    os.environ["TRITON_INTERPRET"] = "1"
import torch._dynamo

ROOT = Path(__file__).parents[1]
WORKERS = 2


def attention_tests(*names: str) -> list[str]:
    """These files first, then the rest: a mutant meets the tests of its own module before others."""
    rest = ("definition", "block_choice", "gradcheck", "torch_parity", "causality", "block_arithmetic")
    return [f"tests/attention/test_{name}.py" for name in dict.fromkeys(names + rest)]


def cases(file: str, *names: str) -> list[str]:
    """Single tests of a file whose others take long: a kernel is interpreted."""
    return [f"tests/{file}::test_{name}" for name in names]


MODEL = [
    f"tests/model/test_model_{name}.py"
    for name in ("definition", "silent", "recall", "indexer", "ngrams", "numbers", "observe", "precision", "layer")
]
PACKED = cases(
    "kernels/test_packed.py",
    "every_tile_of_every_document_has_one_program",
    "the_whole_equals_brute_force_and_a_neighbour_changes_no_bit",
)
BAND = cases(
    "kernels/band/test_band.py",
    "the_gradient_of_lse_is_exact",
    "nothing_at_or_before_t_sees_what_comes_after",
    "matches_the_definition[window-1x192x3x1x32x32-torch.float32]",
    "matches_the_definition[compressed-1x45x3x1x192x144-torch.float32]",
)
SELECTED = cases(
    "kernels/selected/test_selected.py",
    "a_block_that_has_not_begun_counts_as_none",
    "later_tokens_change_nothing",
    *(f"matches_the_definition[2x77x6x2x64x32x3x16-random-torch.float32-{way}]" for way in ("union", "gather")),
    "matches_the_definition[1x75x2x1x32x32x17x16-random-torch.float32-gather]",
)
DECODING = cases(
    "kernels/decoding/test_cached_attention.py",
    "equals_plain_loops[203+37+130x1-H6G2-32x16-l8d4s16n4w20-torch.float32]",
    "equals_plain_loops[201+9+64x1-H6G2-32x32-l8d4s16n4w20-index8-torch.float32]",
    "equals_plain_loops[651+3x2-H6G2-16x16-l32d16s80n5w20-torch.float32]",
    "scores_of_either_sign_are_ranked",
    "heads_of_unlike_sharpness",
    "of_equals_the_lower_index_is_chosen",
)
# A fork of this script may start no process, as a filling that is killed needs.
FILLING = cases(
    "data/test_fill.py",
    "nothing_is_lost_and_documents_are_separated",
    "copies_of_a_text_fall_on_the_same_side",
    "interruptions_change_nothing",
    "damage_is_found_and_named",
)
# Without the kernels under the interpreter, which take long.
GRAPHS = cases(
    "train/test_cuda_graph.py",
    "steps_of_graphs_are_those_without",
    "a_graph_serves_long_documents_of_any_lengths",
    "another_stage_has_graphs_of_its_own",
    "a_stage_may_have_no_graphs",
    "gradients_may_scatter_as_those_of_plain_passes_do",
    "a_part_that_asks_the_host_where_documents_begin_is_found",
    "what_is_not_a_number_is_no_proof",
    "a_gradient_that_a_replay_does_not_repeat_is_found",
    "moments_are_made_before_the_first_capture_alone",
    "micro_batches_of_a_step_have_one_capacity",
    "other_documents_are_others_where_there_can_be_any",
    "other_documents_differ_in_much_of_the_text",
)
MASKED = cases(
    "train/test_masked_run.py",
    "a_step_is_that_of_the_documents_alone",
    "an_evaluation_is_that_of_the_documents_alone",
    "preflight_finds_what_leaks_into_a_neighbour",
    "preflight_finds_tokens_that_reach_a_neighbour_before_any_layer",
)
SUITES = {
    "attention.span": [*attention_tests("take_over", "span", "dense_limit"), *MODEL],
    "attention.geometry": attention_tests("block_arithmetic"),
    "attention.reference": attention_tests(),
    "attention.compression": attention_tests("packing", "span"),
    "attention.packing": attention_tests("packing", "span"),
    "attention.torch_backend": attention_tests("span", "definition", "gradcheck", "torch_parity"),
    "attention.checks": attention_tests("dispatch"),
    "attention.dispatch": [*attention_tests("launches", "dispatch"), "tests/model/test_model_indexer.py"],
    "model.attention": [*MODEL, "tests/inference/test_decode.py"],
    "model.indexer": MODEL,
    "model.initial": MODEL,
    "model.ngrams": ["tests/model/test_model_ngrams.py"],
    "model.layers": [*MODEL, "tests/inference/test_decode.py"],
    "model.statistics": MODEL,
    "model.drop_in": ["tests/model/test_model_layer.py"],
    "model.transformer": MODEL,
}
OTHERS = {
    "config.section": ["tests/test_config.py"],
    "cli.benches": ["tests/bench/test_bench_commands.py"],
    "cli.reading": cases("test_cli.py", "a_report_of_the_record_is_one"),
    "data.paths": ["tests/data/test_paths.py"],
    "runs.names": ["tests/runs/test_names.py"],
    "config.run": [
        "tests/test_config.py",
        *cases("train/test_stages.py", "a_stage_says_itself_whether_its_steps_are_graphs"),
    ],
    "config.training": [
        "tests/test_config.py",
        *cases("train/test_stages.py", "a_budget_of_tokens_is_as_many_whole_steps_as_it_pays_for"),
    ],
    "config.model": ["tests/test_config.py", *MODEL],
    **{f"attention.{part}": ["tests/attention/test_dense_limit.py"] for part in ("dense", "flash")},
    "attention.padding": ["tests/attention/test_padding.py"],
    "attention.selection_loss": ["tests/attention/test_selection_loss.py", "tests/attention/test_packing.py"],
    **{
        f"health.{part}": [f"tests/health/test_{name}.py" for name in ("stage_verdicts", "verdicts", "edited_records")]
        for part in ("run", "learning", "steps", "pace", "branches", "selection")
    },
    "health.record": [
        "tests/health/test_attempts.py",
        "tests/health/test_verdicts.py",
        "tests/health/test_edited_records.py",
    ],
    "health.twins": ["tests/health/test_verdicts.py", "tests/health/test_paired.py"],
    "bench.decode_operator": cases("bench/test_decode_bench.py", "what_is_not_a_number_gets_no_speed"),
    "inference.hf": cases(
        "inference/test_hf.py",
        "documents_in_one_row_are_documents_alone",
        "masks_and_positions_that_say_something_else_are_refused",
        "the_step_that_is_asked_for_is_exported_as_its_stage_has_it",
    ),
    "bench.records": ["tests/bench/test_records.py"],
    "bench.attention": ["tests/bench/test_records.py", "tests/bench/test_attention_bench.py"],
    "bench.attention_parity": ["tests/bench/test_attention_bench.py"],
    "bench.tune": ["tests/bench/test_tune.py"],
    "bench.timing": cases("bench/test_train_bench.py", "a_product_that_was_disturbed_once_does_not_set_the_rate"),
    "bench.attention_limits": ["tests/bench/test_attention_limits.py"],
    "workbook.run_explorer": ["tests/workbook/test_run_explorer.py"],
    "workbook.beside": ["tests/workbook/test_beside.py"],
    "report.header": cases(
        "train/test_evaluation.py", "the_record_says_what_was_evaluated_and_different_texts_are_not_compared"
    ),
    "report": cases("report/test_report.py", "the_first_screen_says_what_happened"),
    "figures.query": cases("workbook/test_reads.py", "the_bar_of_a_token_stands_inside_its_block"),
    "figures.tiny_recall": cases("evaluate/test_tiny_recall.py", "a_model_keeps_its_colour_from_one_picture_to_the_next"),
    "figures.differences": ["tests/workbook/test_differences.py"],
    "figures.retrieval": ["tests/workbook/test_evaluated.py"],
    "workbook.evaluated": ["tests/workbook/test_evaluated.py"],
    "health.paired": ["tests/health/test_paired.py"],
    "health.shares": ["tests/health/test_comparison.py"],
    "runs.evaluation": ["tests/health/test_comparison.py", "tests/inference/test_shipping.py"],
    "health.models": ["tests/health/test_comparison.py"],
    "health.text_pairs": ["tests/health/test_comparison.py"],
    "health.comparison": ["tests/health/test_comparison.py"],
    "train.twin": ["tests/train/test_twin.py"],
    "runs.events": [
        "tests/runs/test_reading.py",
        "tests/train/test_telemetry.py",
        "tests/runs/test_damaged_records.py",
        "tests/health/test_verdicts.py",
    ],
    "train.guard": ["tests/train/test_guard.py"],
    "train.plan": ["tests/train/test_plan.py"],
    "train.schedule": ["tests/train/test_schedule.py"],
    "train.step": ["tests/train/test_step.py", *MASKED, *GRAPHS],
    "train.cuda_graph": GRAPHS,
    "train.muon": ["tests/train/test_muon.py"],
    "train.snapshot": [
        "tests/train/test_going_on.py",
        *cases("train/test_run.py", "a_run_without_a_word_of_its_optimiser_goes_on_with_adamw_alone"),
    ],
    "train.documents": [*GRAPHS, *MASKED, *cases("train/test_switch.py", "the_first_step_of_each_room")],
    "train.preflight.leakage": MASKED,
    "attention.kernels.choice": cases(
        "kernels/test_choice.py",
        "of_two_equals_the_higher_gives_way_to_a_better_block",
        "matches_the_definition[1x130x3x3x32-torch.float32]",
        "matches_the_definition[2x77x6x2x32-torch.float32]",
        "matches_the_definition[1x230x2x1x144-torch.float32]",
        "one_head_with_blocks_side_by_side_needs_no_lse[2x77x2x32-torch.float32-sharp]",
        "one_head_with_blocks_side_by_side_needs_no_lse[1x700x1x16-torch.float32-sharp]",
        "without_an_lse_ties_go_to_the_lower_index[2x77x2x32]",
    ),
    "attention.kernels.band.forward": BAND,
    "attention.kernels.band.bounds": BAND,
    "attention.kernels.band.backward": [*BAND, *PACKED],
    "attention.kernels.documents": PACKED,
    "attention.kernels.selected.inverted_index": PACKED,
    "attention.kernels.tiles": ["tests/kernels/test_tiles.py", *SELECTED, *BAND],
    "attention.kernels.selected.forward": SELECTED,
    "attention.kernels.selected.backward": SELECTED,
    **{f"attention.kernels.decoding.{part}": DECODING for part in ("keys", "attend", "choose", "merge")},
    "attention.kernels.decoding.append": ["tests/kernels/decoding/test_append.py"],
    "attention.kernels.decoding.complete": ["tests/kernels/decoding/test_append.py"],
    "attention.kernels.decoding.linear": ["tests/kernels/decoding/test_linear.py"],
    "attention.kernels.ahead": ["tests/kernels/test_launching.py"],
    "attention.kernels.launching": ["tests/kernels/test_launching.py"],
    "attention.kernels.launch_table": ["tests/kernels/test_launch_table.py"],
    "attention.kernels.gating": ["tests/kernels/test_gating.py"],
    "attention.kernels.operator": cases(
        "model/test_model_indexer.py", "under_the_interpreter_blocks_from_outside_are_read"
    ),
    "train.preflight.checks": ["tests/train/test_preflight.py"],
    "train.preflight.parity": ["tests/train/test_preflight.py"],
    "attention.decoding": attention_tests("decoding", "narrow"),
    "attention.narrow": ["tests/attention/test_narrow.py"],
    **{f"inference.{part}": ["tests/inference/test_decode.py"] for part in ("decode", "maps", "memory", "recorded")},
    **{
        f"inference.cache.{part}": ["tests/inference/test_decode.py"]
        for part in ("compressed", "layers", "model", "step", "storage")
    },
    "inference.generate": ["tests/inference/test_generate.py", "tests/inference/test_load.py"],
    "inference.sampling": ["tests/inference/test_sampling.py"],
    "inference.stops": ["tests/inference/test_generate.py"],
    "inference.text": ["tests/inference/test_text.py"],
    **{f"data.{part}": ["tests/data/test_batches.py", "tests/data/test_documents.py"] for part in ("batches", "rows")},
    "data.documents": ["tests/data/test_documents.py"],
    "data.fill": [*FILLING, *cases("train/test_masked_run.py", "short_documents_are_left_out_of_both_parts")],
    "data.shards": ["tests/data/test_batches.py", "tests/data/test_stage_text.py", *FILLING],
    "data.tokenizer": ["tests/data/test_tokenizer.py"],
    "data.sources.local": ["tests/data/test_sources.py"],
    "config.yaml_text": ["tests/test_config.py"],
    "report.inert": ["tests/report/test_inert.py"],
    "health.worth": ["tests/health/test_worth.py"],
    "health.suspect": ["tests/health/test_worth.py"],
    "figures.style": cases(
        "workbook/test_reads.py", "panels_in_a_row_keep_their_numbers_where_they_stand_below_each_other"
    ),
    "runs.anew": ["tests/runs/test_anew.py"],
    "report.once": cases(
        "report/test_one_number.py",
        "what_the_header_says_a_notebook_below_it_does_not",
        "of_a_halted_run_what_to_do_stands_once_on_the_page",
    ),
    "workbook.notebook": ["tests/workbook/test_notebook.py"],
    "train.parts": [
        *cases("train/test_switch.py", "blocks_keep_what_every_stage_compiles"),
        "tests/train/test_stages.py",
    ],
    "inference.load": cases("train/test_stages.py", "a_checkpoint_computes_with_the_rotary_base_of_its_stage"),
    "data.staged": [
        "tests/data/test_stage_text.py",
        "tests/data/test_documents.py",
        "tests/train/test_stages.py",
        "tests/train/test_evaluation.py",
    ],
    "config.data": ["tests/data/test_recall.py"],
    "data.recall.facts": ["tests/data/test_recall.py"],
    "data.recall.tasks": ["tests/evaluate/test_retrieval.py", "tests/data/test_recall.py"],
    "data.recall.planting": ["tests/data/test_recall.py", "tests/data/test_stage_text.py"],
    "evaluate.answers": ["tests/evaluate/test_retrieval.py"],
    "evaluate.choices": ["tests/evaluate/test_interventions.py"],
    "evaluate.reach": ["tests/evaluate/test_reach.py"],
    "evaluate.retrieval": ["tests/evaluate/test_retrieval.py"],
    "evaluate.documents": ["tests/evaluate/test_document_loss.py"],
    "evaluate.interventions": ["tests/evaluate/test_interventions.py"],
    "evaluate.tiny_recall": cases(
        "evaluate/test_tiny_recall.py",
        "every_question_repeats_a_pair_that_was_told_once",
        "training_adds_the_selection_loss_and_repeats_itself",
        "what_is_told_is_that_of_the_far_questions_of_fresh_sequences",
    ),
    "train.trainer": [
        "tests/train/test_trainer.py",
        "tests/train/test_evaluation.py",
        "tests/train/test_run.py",
        *cases("train/test_switch.py", "every_number_of_documents_is_rehearsed_where_blocks_are_compiled"),
    ],
    "train.saves": cases(
        "train/test_run.py",
        "a_run_whose_last_save_failed_is_not_done",
        "one_failed_save_is_recorded_and_the_next_one_tried",
    ),
    "train.checkpoint": ["tests/crash/test_full_disk.py", "tests/crash/test_damage.py", "tests/crash/test_save.py"],
    "runs.checkpoints": [
        "tests/runs/test_damaged_records.py",
        "tests/crash/test_damage.py",
        "tests/crash/test_save.py",
        "tests/runs/test_checkpoints.py",
    ],
    "runs.lock": [
        "tests/train/test_ranks.py::test_resume_refuses_while_a_rank_lives_and_names_it",
        "tests/runs/test_damaged_records.py",
    ],
    "runs.files": ["tests/runs/test_damaged_records.py"],
    "runs.launch": ["tests/runs/test_damaged_records.py"],
    "runs.ranks": ["tests/train/test_launch.py"],
    "runs.sweep": ["tests/runs/test_sweep.py"],
    "config.sweep": ["tests/runs/test_sweep.py"],
    "health.sweep": ["tests/health/test_sweep_results.py"],
    # Not the whole file: a mutant's process may have no children of its own.
    "data.dataset": [
        "tests/data/test_fill.py::test_a_run_goes_on_from_the_cache_when_its_source_is_gone",
        "tests/data/test_fill.py::test_without_a_source_every_shard_is_hashed_whatever_its_size",
    ],
    "train.attempt": [
        "tests/train/test_going_on.py",
        "tests/train/test_run.py::test_a_run_resumes_without_its_source_where_the_cache_holds_it_all",
        "tests/train/test_run.py::test_the_window_of_the_spike_rule_outlives_a_resume",
    ],
    "train.ranks": [
        "tests/train/test_ranks.py::test_the_rank_that_a_signal_ended_is_blamed_before_those_that_fell_after_it"
    ],
    "train.telemetry.event_log": ["tests/crash/test_full_disk.py"],
    "train.telemetry.heartbeat": ["tests/train/test_telemetry.py"],
    "train.telemetry.mirror": ["tests/crash/test_full_disk.py"],
    "train.telemetry.phases": ["tests/train/test_telemetry.py"],
    "train.telemetry.machine": ["tests/train/test_telemetry.py", "tests/train/test_run.py"],
    "runs.export": ["tests/runs/test_export.py"],
    "train.measure": ["tests/train/test_evaluation.py", *MASKED],
    "runs.history": [
        "tests/runs/test_reading.py",
        *cases("report/test_one_number.py", "the_list_of_runs_says_verdict_loss_speed_and_model"),
        *cases(
            "health/test_verdicts.py",
            "training_loss_is_told_as_a_mean_of_the_latest_readings",
            "as_many_readings_as_tell_where_training_stands",
        ),
        "tests/health/test_sweep_results.py",
        "tests/health/test_attempts.py",
        "tests/train/test_evaluation.py",
        "tests/runs/test_summary.py",
    ],
    "figures.blocks": cases("workbook/test_reads.py", "equation_nine_is_the_overlap_once_its_erratum_is_mended"),
    "figures.architecture": cases(
        "workbook/test_reads.py",
        "the_masks_count_the_pairs_that_the_formulas_count",
        "the_architecture_counts_the_keys_of_its_query",
    ),
    "workbook.show": ["tests/workbook/test_show.py"],
    "workbook.speeds": cases("workbook/test_speeds.py", "nsa_is_faster_only_where_it_beats_every_dense_contender"),
}
SUITES |= OTHERS
# Long sequences prove parity, not logic; the mutants do without them.
QUICK = "not 1025 and not 2048 and not 65536 and not needle and not at_the_default_geometry"


@dataclass(frozen=True)
class Mutant:
    name: str
    module: str
    old: str
    new: str


MUTANTS = [
    Mutant(
        "compiling ahead: nothing is launched ever after",
        "attention.kernels.launching",
        "        _launching.reset(token)\n",
        "        pass\n",
    ),
    Mutant(
        "compiling together: one kernel after another",
        "attention.kernels.ahead",
        "if kind not in known and together(lambda: compute(*args)):",
        "if kind in known and together(lambda: compute(*args)):",
    ),
    Mutant(
        "compiling ahead: launchers are left for the first launch",
        "attention.kernels.ahead",
        "                _ = kernel.run  # made, and the kernel loaded, when it is first asked for\n",
        "                pass\n",
    ),
    Mutant(
        "choice: of wide keys the first columns alone are scored",
        "attention.kernels.choice",
        "for past in range(0, DK, COLUMNS):",
        "for past in range(0, COLUMNS, COLUMNS):",
    ),
    Mutant(
        "launching: a kernel that loads 16 bytes at once is taken for any address",
        "attention.kernels.launching",
        "else (x.dtype, x.data_ptr() & 15 == 0)",
        "else (x.dtype, True)",
    ),
    Mutant(
        "launching: a kernel for one row is taken for any number of rows",
        "attention.kernels.launching",
        "+ 2 * (x == 1)",
        "",
    ),
    Mutant(
        "launching: constants are not part of what was compiled",
        "attention.kernels.launching",
        "tuple(options), tuple(options.values())",
        "tuple(options)",
    ),
    # The block arithmetic that every backend takes from one place.
    Mutant(
        "eq. 9 read with indices from 0",
        "attention.geometry",
        "start_i = starts.unsqueeze(1)",
        "start_i = starts.unsqueeze(1) + nsa.l_sel - nsa.d",
    ),
    Mutant(
        "health: a training loss that has risen to three times itself is fine",
        "health.learning",
        "if last > max(limits.training_kept * lowest, lowest + chance):",
        "if last > 100 * lowest:",
    ),
    Mutant(
        "health: what few long texts differ by is a rise of the training loss",
        "health.learning",
        "if last > max(limits.training_kept * lowest, lowest + chance):",
        "if last > limits.training_kept * lowest:",
    ),
    Mutant(
        "health: a number that cannot be is a number",
        "health.run",
        "impossible = [] if bad else [",
        "impossible = [] if True else [",
    ),
    Mutant(
        "health: statistics that nobody measures any more are statistics",
        "health.record",
        "            if row >= most:\n",
        "            if row > 10 * most:\n",
    ),
    Mutant(
        "health: a run whose record has no end is finished",
        "health.run",
        "if ok and not any(event",
        "if False and not any(event",
    ),
    Mutant(
        "evaluation: a document that is read alone sees those before it",
        "evaluate.documents",
        "for reading in (span, None))",
        "for reading in (None, None))",
    ),
    Mutant(
        "evaluation: padding counts as text of documents",
        "evaluate.documents",
        "window, reading)[:filled]",
        "window, reading)",
    ),
    Mutant(
        "notebook 01: the erratum of eq. 9 shown with the other sign",
        "figures.blocks",
        "(-m if as_printed else m)",
        "(m if as_printed else -m)",
    ),
    Mutant(
        "notebook 01: the picture of the window is a key too wide",
        "figures.architecture",
        "(s > t - nsa.w), WIN)",
        "(s >= t - nsa.w), WIN)",
    ),
    Mutant(
        "notebook 01: blocks by score drawn as forced",
        "figures.architecture",
        "FORCED if j in reads.forced else SEL if j in reads.blocks else PALE",
        "FORCED if j in reads.blocks else SEL if j in reads.forced else PALE",
    ),
    Mutant(
        "notebooks: a folded text is taken for markup",
        "workbook.show",
        "{html.escape(text)}</pre>",
        "{text}</pre>",
    ),
    Mutant(
        "notebook 02: NSA called faster where one dense attention is slower",
        "workbook.speeds",
        "whole < min(dense.values())",
        "whole < max(dense.values())",
    ),
    Mutant(
        "overlap weights renormalised at the cut end",
        "attention.geometry",
        "return shared.clamp_min(0).to(dtype) / nsa.d",
        "return shared.clamp_min(0).to(dtype) / shared.clamp_min(0).sum(1, keepdim=True).clamp_min(1)",
    ),
    Mutant(
        "compressed block visible one token early", "attention.geometry", "(position + 1 - nsa.l)", "(position + 2 - nsa.l)"
    ),
    Mutant("compressed block visible one token late", "attention.geometry", "(position + 1 - nsa.l)", "(position - nsa.l)"),
    Mutant(
        "compressed block count with the cut one",
        "attention.geometry",
        "else (length - nsa.l) // nsa.d + 1",
        "else -(-(length - nsa.l) // nsa.d) + 1",
    ),
    Mutant(
        "current block not forced",
        "attention.geometry",
        "(block == 0) | (block == own) | (block == own - 1)",
        "(block == 0) | (block == own - 1)",
    ),
    Mutant(
        "previous block not forced",
        "attention.geometry",
        "(block == 0) | (block == own) | (block == own - 1)",
        "(block == 0) | (block == own)",
    ),
    Mutant(
        "first block not forced",
        "attention.geometry",
        "(block == 0) | (block == own) | (block == own - 1)",
        "(block == own) | (block == own - 1)",
    ),
    Mutant(
        "current block a candidate only once it is complete",
        "attention.geometry",
        "* nsa.l_sel <= position.unsqueeze(-1)",
        "* nsa.l_sel + nsa.l_sel - 1 <= position.unsqueeze(-1)",
    ),
    Mutant(
        "candidate blocks of the future",
        "attention.geometry",
        "* nsa.l_sel <= position.unsqueeze(-1)",
        "* nsa.l_sel <= position.unsqueeze(-1) + nsa.l_sel",
    ),
    Mutant("mean selected keys forgets the cut block", "attention.geometry", "+ rest * (rest + 1) / 2", ""),
    Mutant("decode reads not limited by the sequence", "attention.geometry", '"win": min(nsa.w, length)', '"win": nsa.w'),
    # Where queries stand.
    Mutant(
        "span: positions go on from one document to the next",
        "attention.span",
        "self.start, self.start + end - begin)",
        "self.start + begin, self.start + end)",
    ),
    Mutant(
        "span: rotary positions do not restart",
        "attention.span",
        "- bounds[owners(span.queries, bounds)]",
        "- 0 * bounds[owners(span.queries, bounds)]",
    ),
    Mutant(
        "span: a document's first block is its neighbour's last",
        "attention.span",
        "slice(begin, end) for begin, end in pairwise(self.compressed_bounds(nsa))",
        "slice(max(begin - 1, 0), end) for begin, end in pairwise(self.compressed_bounds(nsa))",
    ),
    Mutant(
        "span: compressed rows counted over the whole row",
        "attention.span",
        "(geometry.num_compressed(document.last, nsa) for document in span.documents)",
        "(document.last // nsa.d for document in span.documents)",
    ),
    Mutant(
        "span: a chunk's keys begin at its first query",
        "attention.span",
        "slice(begin, end + self.start), self.start",
        "slice(begin + self.start, end + self.start), self.start",
    ),
    Mutant("span: a chunk is full", "attention.span", "self.queries == self.longest", "self.queries <= self.longest"),
    Mutant(
        "span: of what is kept, the first tensor alone is taken over",
        "attention.span",
        "for tensor, value in pairs:",
        "for tensor, value in pairs[:1]:",
    ),
    Mutant(
        "span: documents of any length are taken over",
        "attention.span",
        "return self.kind, self.queries, self.capacity, self.at_most\n",
        "return self.kind, self.queries, self.capacity\n",
    ),
    Mutant(
        "span: without a capacity documents are taken over",
        "attention.span",
        "if self.capacity is None or self.laid_out != other.laid_out",
        "if self.laid_out != other.laid_out",
    ),
    Mutant(
        "span: what is taken over is broadcast",
        "attention.span",
        "            if mine != its:",
        "            if len(mine) != len(its):",
    ),
    Mutant(
        "graphs: the documents of the capture for ever",
        "train.cuda_graph",
        "                held.take_over(span)",
        "                held.take_over(held)",
    ),
    Mutant(
        "graphs: the batch of the capture for ever",
        "train.cuda_graph",
        "                here.copy_(there, non_blocking=True)",
        "                here.copy_(here, non_blocking=True)",
    ),
    Mutant("graphs: nothing is checked", "train.cuda_graph", "        if expected:\n", "        if expected is ...:\n"),
    Mutant(
        "graphs: the gradient is not checked",
        "train.cuda_graph",
        "if not (loss_apart <= ROUNDING and grads_apart <= allowed)",
        "if not loss_apart <= ROUNDING",
    ),
    Mutant(
        "graphs: what is not a number passes",
        "train.cuda_graph",
        "if not (loss_apart <= ROUNDING and grads_apart <= allowed)",
        "if loss_apart > ROUNDING or grads_apart > allowed",
    ),
    Mutant(
        "graphs: whatever plain passes differ by is rounding",
        "train.cuda_graph",
        "min(max(ROUNDING, 2 * _gradients_apart(again, plain)), MOST_ROUNDING)",
        "max(ROUNDING, 2 * _gradients_apart(again, plain))",
    ),
    Mutant(
        "graphs: no stage is without them",
        "train.step",
        "if self._is_graphed(self.stage):",
        "if self._is_graphed(self._train.plan[0]):",
    ),
    Mutant(
        "graphs: a plain stage keeps those before it",
        "train.step",
        "            self._graphs.let_go()\n",
        "            self._graphs._clear()\n",
    ),
    Mutant(
        "config: a stage's graphs are those of the run",
        "config.run",
        "return self.runtime.cuda_graph if stage.cuda_graph is None else stage.cuda_graph",
        "return self.runtime.cuda_graph",
    ),
    Mutant(
        "graphs: the gradients of the graph before",
        "train.cuda_graph",
        "zip(self._parameters, step.grads, strict=True)",
        "zip(self._parameters, next(iter(self._captured.values())).grads, strict=True)",
    ),
    Mutant(
        "graphs: one for documents of any number",
        "train.cuda_graph",
        "layout = tuple(span and span.laid_out for span in spans)",
        "layout = tuple(span and span.queries for span in spans)",
    ),
    Mutant(
        "graphs: those of the stage before",
        "train.cuda_graph",
        "if stage != self._stage:",
        "if self._stage is None:",
    ),
    Mutant(
        "stages: blocks keep the shapes of one",
        "train.parts",
        "VARIANTS_OF_A_STAGE * stages",
        "VARIANTS_OF_A_STAGE",
    ),
    Mutant(
        "graphs: moments at every capture",
        "train.cuda_graph",
        "        if not self._captured:\n",
        "        if True:\n",
    ),
    Mutant(
        "graphs: checked with nearly the same documents",
        "train.documents",
        "return max(choices",
        "return min(choices",
    ),
    Mutant(
        "graphs: a capacity for every micro-batch",
        "train.documents",
        "[span_of(part.documents, capacity) for part in parts]",
        "[span_of(part.documents) for part in parts]",
    ),
    Mutant(
        "step: all micro-batches have the documents of the first",
        "train.step",
        "told.append(self._backward(part, span, whole))",
        "told.append(self._backward(part, spans[0], whole))",
    ),
    Mutant(
        "compression: blocks across the border of documents",
        "attention.compression",
        "blocks=rows_elsewhere(span.num_compressed(nsa), blocks, text)",
        "blocks=torch.arange(span.num_compressed(nsa), device=device)",
    ),
    Mutant(
        "compression: a document begins in its neighbour's last stride",
        "attention.compression",
        "tokens=rows_elsewhere((most + nsa.l // nsa.d) * nsa.d, text * nsa.d, tokens)",
        "tokens=torch.arange((most + nsa.l // nsa.d) * nsa.d, device=device).clamp_max(span.queries - 1)",
    ),
    Mutant(
        "compression: padding is what phi makes of nothing",
        "attention.compression",
        "zero_absent(phi(take(_whole_blocks(text, nsa), rows.blocks, rows.blocks_back)), rows.blocks)",
        "phi(take(_whole_blocks(text, nsa), rows.blocks, rows.blocks_back))",
    ),
    Mutant("packing: empty documents own rows", "attention.packing", "(bounds, row, right=True) - 1", "(bounds, row)"),
    Mutant("packing: rows past a document's end", "attention.packing", "number < shared", "number <= shared"),
    Mutant("packing: absent rows are not zero", "attention.packing", "(rows == ABSENT)", "(rows < ABSENT)"),
    Mutant(
        "packing: the gradient goes where the row came from",
        "attention.packing",
        "take(grads[0], back, rows)",
        "take(grads[0], back.flip(0), rows)",
    ),
    Mutant(
        "torch: a chunk's rows taken for its positions",
        "attention.torch_backend",
        "row = document.queries.start - document.first",
        "row = document.queries.start",
    ),
    Mutant(
        "torch: zero times NaN",
        "attention.torch_backend",
        "return k.where(sound, mark), v.where(sound, 0.0)",
        "return k, v",
    ),
    # The definition.
    Mutant("reference: window of w + 1 keys", "attention.reference", "t[:, None] - nsa.w)", "t[:, None] - nsa.w - 1)"),
    Mutant("reference: window of w - 1 keys", "attention.reference", "t[:, None] - nsa.w)", "t[:, None] - nsa.w + 1)"),
    Mutant(
        "reference: normaliser over blocks of the future",
        "attention.reference",
        'p = torch.where(seen, scores - torch.where(torch.isneginf(lse), 0.0, lse), float("-inf")).exp()',
        "p = torch.where(seen, scores.softmax(-1), 0.0)",
    ),
    Mutant(
        "reference: ties to the higher index",
        "attention.reference",
        "order = rank.sort(dim=-1, descending=True, stable=True).indices[..., : nsa.n_sel]",
        "order = blocks - 1 - rank.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., : nsa.n_sel]",
    ),
    Mutant(
        "reference: ties broken by a bias on the index",
        "attention.reference",
        'rank = torch.where(candidate, torch.where(forced, float("inf"), importance), float("-inf"))',
        "bias = 1e-8 * torch.arange(blocks)\n"
        '    rank = torch.where(candidate, torch.where(forced, 1e9, importance - bias), float("-inf"))',
    ),
    Mutant(
        "reference: importances ranked in bf16",
        "attention.reference",
        "return (p.sum(dim=3) @ carry).float()",
        "return (p.sum(dim=3) @ carry).bfloat16().float()",
    ),
    Mutant("reference: strongest head instead of the sum", "attention.reference", "p.sum(dim=3)", "p.amax(dim=3)"),
    Mutant(
        "reference: one choice for all groups",
        "attention.reference",
        "p.sum(dim=3)",
        "p.sum(dim=(2, 3)).unsqueeze(2).expand(-1, -1, p.shape[2], -1)",
    ),
    Mutant("reference: unscaled logits", "attention.reference", "k.to(wide)) * q.shape[-1] ** -0.5", "k.to(wide))"),
    Mutant(
        "reference: top-n one short",
        "attention.reference",
        "stable=True).indices[..., : nsa.n_sel]",
        "stable=True).indices[..., : nsa.n_sel - 1]",
    ),
    Mutant(
        "reference: forced blocks on top of n_sel",
        "attention.reference",
        "stable=True).indices[..., : nsa.n_sel]",
        "stable=True).indices[..., : nsa.n_sel + 3]",
    ),
    Mutant(
        "reference: blocks in the order of their rank", "attention.reference", "    order = order.sort(dim=-1).values\n", ""
    ),
    Mutant(
        "reference: selected attention sees the future of its own block",
        "attention.reference",
        "[..., :S] & (s <= t[:, None])[None, :, None]",
        "[..., :S]",
    ),
    Mutant(
        "reference: padding reads the last block",
        "attention.reference",
        "torch.where(own < 0, n, own).long()",
        "torch.where(own < 0, n - 1, own).long()",
    ),
    Mutant(
        "reference: LSE in base 2",
        "attention.reference",
        "return out, lse.flatten(2, 3)",
        "return out, lse.flatten(2, 3).mul(1.4426950408889634)",
    ),
    Mutant(
        "reference: NaN where a row sees nothing",
        "attention.reference",
        "p.exp(), v.to(p.dtype)",
        "p.softmax(-1), v.to(p.dtype)",
    ),
    Mutant(
        "reference: a row that sees nothing has an LSE",
        "attention.reference",
        'lse = torch.where(empty, float("-inf"), scores.masked_fill(empty.unsqueeze(-1), 0.0).logsumexp(-1))',
        "lse = scores.masked_fill(empty.unsqueeze(-1), 0.0).logsumexp(-1)",
    ),
    Mutant("reference: gates in another order", "attention.reference", "g_cmp, g_sel, g_win =", "g_sel, g_cmp, g_win ="),
    Mutant(
        "reference: heads of a group interleaved",
        "attention.reference",
        "return torch.unflatten(x, 2, (groups, x.shape[2] // groups))",
        "return x.unflatten(2, (x.shape[2] // groups, groups)).transpose(2, 3)",
    ),
    Mutant(
        "reference: a block averages its neighbour's tokens",
        "attention.reference",
        "return x.unfold(1, nsa.l, nsa.d)",
        "return x.roll(1, 1).unfold(1, nsa.l, nsa.d)",
    ),
    Mutant(
        "reference: blocks one block apart",
        "attention.reference",
        "return x.unfold(1, nsa.l, nsa.d)",
        "return x.unfold(1, nsa.l, nsa.l)",
    ),
    Mutant(
        "reference: the cut block is averaged too",
        "attention.reference",
        "return x.unfold(1, nsa.l, nsa.d)",
        "return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, nsa.d)).unfold(1, nsa.l, nsa.d)",
    ),
    # The fast compression operator.
    Mutant(
        "compression: a stride is left out",
        "attention.compression",
        "range(1, nsa.l // nsa.d)",
        "range(1, max(nsa.l // nsa.d - 1, 1))",
    ),
    Mutant("compression: no intra-block position", "attention.compression", " + self.position.to(blocks.dtype)", ""),
    Mutant("compression: mean over the stride", "attention.compression", "(blocks / nsa.l)", "(blocks / nsa.d)"),
    # The torch backend.
    Mutant(
        "torch: window of w + 1 keys",
        "attention.torch_backend",
        "_causal(first - nsa.w, last - nsa.w, start",
        "_causal(first - nsa.w - 1, last - nsa.w - 1, start",
    ),
    Mutant(
        "torch: window's range starts one key late",
        "attention.torch_backend",
        "max(first - nsa.w + 1, 0)",
        "max(first - nsa.w + 2, 0)",
    ),
    Mutant(
        "torch: eq. 9 read with indices from 0",
        "attention.torch_backend",
        "padded = pad(p, (lead, ",
        "padded = pad(p, (lead + step - 1, ",
    ),
    Mutant(
        "torch: eq. 9 with equal weights",
        "attention.torch_backend",
        "for shift in range(lead):",
        "for shift in range(0):",
    ),
    Mutant(
        "torch: heads repeated out of their groups",
        "attention.dense",
        "k.repeat_interleave(repeats, dim=1)",
        "k.repeat(1, repeats, 1)",
    ),
    Mutant(
        "preflight: a short first stage timed by the batches of the next",
        "train.preflight.checks",
        "weighted(index % stage.steps, ",
        "weighted(index, ",
    ),
    Mutant(
        "torch: normaliser over the chunk's future",
        "attention.torch_backend",
        'torch.where(seen.unsqueeze(1), s - norm, float("-inf")).exp().sum(3)',
        "torch.where(seen.unsqueeze(1), s.softmax(-1), 0.0).sum(3)",
    ),
    Mutant(
        "torch: every chunk chooses as if it were the first",
        "attention.torch_backend",
        "reference.choose(importance, nsa, first=first)",
        "reference.choose(importance, nsa, first=0)",
    ),
    Mutant(
        "torch: selected attention sees the future of its own block",
        "attention.torch_backend",
        "return _rows_from(chunk, 0, last), tokens | ~_causal(first, last, 0, last, q.device)",
        "return _rows_from(chunk, 0, last), tokens",
    ),
    Mutant(
        "torch: gathered keys of the future",
        "attention.torch_backend",
        "hidden = (tokens < 0) | (tokens > t)",
        "hidden = (tokens < 0) | (tokens >= k.shape[1])",
    ),
    Mutant(
        "torch: token numbers overflow",
        "attention.torch_backend",
        "(own.long().unsqueeze(-1) * l_sel",
        "(own.to(torch.int8).unsqueeze(-1) * l_sel",
    ),
    Mutant(
        "torch: padding reads block 0",
        "attention.torch_backend",
        "torch.where((picks < 0) | (picks > n), n, picks)",
        "torch.where(picks > n, n, picks.clamp_min(0))",
    ),
    Mutant(
        "torch: NaN where a row sees nothing", "attention.torch_backend", "torch.where(total == 0, 1.0, total)", "total"
    ),
    Mutant(
        "torch: exponentials without their maximum",
        "attention.torch_backend",
        "top = _finite(s.amax(-1, keepdim=True))",
        "top = torch.zeros_like(s[..., :1])",
    ),
    Mutant(
        "reference: a value that is not finite is multiplied by zero",
        "attention.reference",
        "sound = k.isfinite().all(-1) & v.isfinite().all(-1)",
        "sound = k.isfinite().all(-1)",
    ),
    Mutant("torch: LSE in base 2", "attention.torch_backend", "(top + total.log())", "(top + total.log2())"),
    Mutant(
        "torch: heads of a group interleaved",
        "attention.torch_backend",
        "return torch.unflatten(x.to(wide), 2, (groups, -1)).transpose(1, 2).flatten(2, 3)",
        "return x.to(wide).unflatten(2, (-1, groups)).permute(0, 3, 1, 2, 4).flatten(2, 3)",
    ),
    Mutant(
        "torch: backward without delta",
        "attention.torch_backend",
        "row = sum(out * grad_out) - grad_lse\n"
        "        row = (out.to(wide) * grad_out.to(wide)).sum(-1) - grad_lse.to(wide)",
        "row = sum(out * grad_out) - grad_lse\n        row = -grad_lse.to(wide)",
    ),
    Mutant(
        "torch: backward without the gradient of the LSE",
        "attention.torch_backend",
        "row = sum(out * grad_out) - grad_lse\n"
        "        row = (out.to(wide) * grad_out.to(wide)).sum(-1) - grad_lse.to(wide)",
        "row = sum(out * grad_out) - grad_lse\n        row = (out.to(wide) * grad_out.to(wide)).sum(-1)",
    ),
    Mutant(
        "torch: gathering backward without delta",
        "attention.torch_backend",
        "        grad_v = torch.zeros(v.shape, dtype=wide, device=k.device)\n"
        "        row = (out.to(wide) * grad_out.to(wide)).sum(-1) - grad_lse.to(wide)",
        "        grad_v = torch.zeros(v.shape, dtype=wide, device=k.device)\n        row = -grad_lse.to(wide)",
    ),
    Mutant("torch: dV scaled like a score", "attention.torch_backend", "+= p.mT @ do_rows", "+= p.mT @ do_rows * scale"),
    Mutant(
        "torch: dK of the last chunk only",
        "attention.torch_backend",
        "grad_k[:, :, reach] += ds.mT @ q_rows",
        "grad_k[:, :, reach] = ds.mT @ q_rows",
    ),
    Mutant("torch: dQ not scaled", "attention.torch_backend", "_unrows(ds @ k_wide * scale, h)", "_unrows(ds @ k_wide, h)"),
    Mutant(
        "torch: gathered gradients overwrite each other",
        "attention.torch_backend",
        ".scatter_add_(2, index",
        ".scatter_(2, index",
    ),
    # What the public functions run.
    Mutant("dispatch: torch runs the reference", "attention.dispatch", '"torch": torch_backend,', '"torch": reference,'),
    Mutant(
        "dispatch: triton's name runs torch",
        "attention.dispatch",
        '"triton": kernels,',
        '"triton": torch_backend,',
    ),
    Mutant(
        "dispatch: the whole operator of triton is computed by torch",
        "attention.dispatch",
        "        return kernels.nsa_attention(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates, nsa, blocks=blocks, "
        "**where)",
        "        run = dict.fromkeys(PARTS, torch_backend)",
    ),
    Mutant(
        "dispatch: a backend that cannot run falls back silently",
        "attention.dispatch",
        "raise BackendError(f\"backend = 'triton' cannot run: {unusable}\")",
        'return dict.fromkeys(PARTS, Choice("torch", "asked for by name"))',
    ),
    Mutant(
        "dispatch: a shape that the kernels refuse falls back silently",
        "attention.dispatch",
        "raise NotImplementedError(f\"backend = 'triton' does not take this shape: {unsupported}\")",
        'return dict.fromkeys(PARTS, Choice("torch", "asked for by name"))',
    ),
    Mutant(
        "dispatch: selected branch on the window's keys",
        "attention.dispatch",
        'run["selected"].selected_attention(q, k_sel, v_sel,',
        'run["selected"].selected_attention(q, k_win, v_win,',
    ),
    Mutant(
        "dispatch: compressed keys of any length are taken",
        "attention.checks",
        "if k.shape != (B, keys(T), G, D):",
        "if k.shape[2:] != (G, D):",
    ),
    Mutant(
        "checks: a branch whose values are one wide is broadcast",
        "attention.checks",
        "if len(set(widths)) > 1:",
        "if len(set(widths) - {1}) > 1:",
    ),
    Mutant("checks: a block may be read twice", "attention.checks", "if again.any() or", "if"),
    Mutant("checks: integers are taken", "attention.checks", "if x.dtype not in DTYPES:", "if x.dtype.is_complex:"),
    # The kernels, under Triton's interpreter.
    Mutant(
        "choice kernel: of two equals the lower gives way",
        "attention.kernels.choice",
        "lowest = tl.min(best, 1)",
        "lowest = tl.min(best ^ ABSENT, 1) ^ ABSENT",
    ),
    Mutant(
        "choice kernel: probabilities without their normaliser",
        "attention.kernels.choice",
        "weight += tl.exp2(scores * scale_log2 - lse_log2[:, None])",
        "weight += tl.exp2(scores * scale_log2)",
    ),
    Mutant(
        "choice kernel: forced blocks compete too",
        "attention.kernels.choice",
        "(j[None, :] <= own[:, None] - 2)",
        "(j[None, :] <= own[:, None] - 1)",
    ),
    Mutant(
        "launch table: the columns of a wide head past its first 128 are nobody's",
        "attention.kernels.launch_table",
        "return 128 if dtype == torch.float32 or width > WIDEST else 64",
        "return 128 if dtype == torch.float32 else 64",
    ),
    Mutant(
        "launch table: many rows of wide heads for blocks of any size",
        "attention.kernels.launch_table",
        "dtype != torch.float32 and block > 32 and is_hopper(device)",
        "dtype != torch.float32 and is_hopper(device)",
    ),
    Mutant("band kernel: window of w + 1 keys", "attention.kernels.band.bounds", "tl.uint32) < W", "tl.uint32) <= W"),
    Mutant(
        "band kernel: compressed block visible one token early",
        "attention.kernels.band.bounds",
        "(t - L + 1 + STRIDE) // STRIDE",
        "(t - L + 2 + STRIDE) // STRIDE",
    ),
    Mutant(
        "band kernel: the sum is not shrunk with its maximum",
        "attention.kernels.band.forward",
        "total = total * shrink + tl.sum(p, 1)",
        "total = total + tl.sum(p, 1)",
    ),
    Mutant("band kernel: LSE in base 2", "attention.kernels.band.forward", "1.0, total))) * LN2)", "1.0, total))))"),
    Mutant(
        "band kernel: backward without the gradient of the LSE",
        "attention.kernels.band.backward",
        "delta -= tl.load(dlse_ptr + origin + place)",
        "delta -= 0.0",
    ),
    Mutant("band kernel: dQ not scaled", "attention.kernels.band.backward", "    dq *= scale\n", ""),
    Mutant(
        "band kernel: wide heads' last columns of dQ not scaled",
        "attention.kernels.band.backward",
        "    dq_rest *= scale\n",
        "",
    ),
    Mutant(
        "band kernel: wide heads' last columns are no part of dP",
        "attention.kernels.band.backward",
        "p = tl.exp2(scores * scale_log2 - lse_log2[None, :])\n        dv, dv_lost",
        "p = tl.exp2(scores * scale_log2 - lse_log2[None, :])\n        dp = tl.dot(v, tl.trans(do))\n        dv, dv_lost",
    ),
    Mutant(
        "kernels: wide heads' last columns are no part of a score",
        "attention.kernels.tiles",
        'product = tl.dot(a_rest, tl.trans(b_rest), product, input_precision="ieee")',
        "product = product + 0.0",
    ),
    Mutant(
        "kernels: wide heads' last columns are read from the first",
        "attention.kernels.tiles",
        "rest = load_consecutive(base, stride, start, N, PART + tl.arange(0, REST),",
        "rest = load_consecutive(base, stride, start, N, tl.arange(0, REST),",
    ),
    Mutant(
        "launch table: 192 columns in one tile of 256",
        "attention.kernels.launch_table",
        "part + rest < whole",
        "part + rest < 0",
    ),
    Mutant(
        "selected kernel: a query's merge goes on with the slots of the next",
        "attention.kernels.selected.forward",
        "inside & (slot < N_SEL), first_query, t, BLOCK)\n            weight =",
        "inside, first_query, t, BLOCK)\n            weight =",
    ),
    Mutant(
        "selected kernel: a query's dq goes on with the slots of the next",
        "attention.kernels.selected.backward",
        "inside & (slot < N_SEL)",
        "inside",
    ),
    Mutant(
        "kernels: a float32 sum leaves out what was there",
        "attention.kernels.tiles",
        "tl.full(total.shape, 1.0, tl.float32), total)",
        "tl.full(total.shape, 1.0, tl.float32), total * 0.0)",
    ),
    Mutant(
        "selected kernel: the future of its own block",
        "attention.kernels.selected.forward",
        'scores = tl.where((start + place)[None, :] <= position[:, None], scores, float("-inf"))',
        "scores = scores",
    ),
    Mutant(
        "selected kernel: a row reads what its neighbours chose",
        "attention.kernels.selected.forward",
        'tl.where(chosen, new_peak, float("inf"))[:, None]',
        "new_peak[:, None]",
    ),
    Mutant(
        "selected kernel: backward without delta",
        "attention.kernels.selected.backward",
        "ds = (p * (dp - delta[:, None])).to(q.dtype)",
        "ds = (p * dp).to(q.dtype)",
    ),
    Mutant(
        "selected kernel: gradients to the future of a block",
        "attention.kernels.selected.backward",
        "p = tl.where(key[None, :] <= (first_query + t.to(tl.int32))[:, None], p, 0.0)",
        "p = p",
    ),
    Mutant(
        "documents: a document's first tile is the last of the one before",
        "attention.kernels.documents",
        "tl.where(there, probes, document), EACH, TILE) <= tile)",
        "tl.where(there, probes, document), EACH, TILE) < tile)",
    ),
    Mutant(
        "documents: the last of those that are left is never found",
        "attention.kernels.documents",
        "tl.arange(0, WAYS), stop - 1)",
        "tl.arange(0, WAYS), tl.maximum(stop - 2, document))",
    ),
    Mutant(
        "band kernel: what rounding lost is lost twice",
        "attention.kernels.tiles",
        "add_product(-lost, a, b)",
        "add_product(lost, a, b)",
    ),
    Mutant(
        "documents: among many, the search goes on beside the one that was found",
        "attention.kernels.documents",
        "axis=0) - 1) * step",
        "axis=0) - 1)",
    ),
    Mutant(
        "band kernel: what two documents leave for dK lies in the same place",
        "attention.kernels.band.backward",
        "return (first // 16 + document * (PAST // 16 + 1)) * 16",
        "return first // 16 * 16",
    ),
    Mutant(
        "inverted index: blocks of all documents have the numbers of the first's",
        "attention.kernels.selected.inverted_index",
        "number = block + (first // BLOCK).to(tl.int32) + document",
        "number = block",
    ),
    Mutant(
        "gate kernel: the selected branch by the window's gate",
        "attention.kernels.gating",
        "tl.load(sel_ptr + at, mask=mask, other=0.0).to(tl.float32) * gate_sel[:, None]",
        "tl.load(sel_ptr + at, mask=mask, other=0.0).to(tl.float32) * gate_win[:, None]",
    ),
    Mutant(
        "gate kernel: a gate's gradient without its branch",
        "attention.kernels.gating",
        "tl.sum(out * do, 1)",
        "tl.sum(do, 1)",
    ),
    # Decoding and generation.
    Mutant(
        "decoding: a window of w - 1 keys",
        "attention.decoding",
        "max(first - nsa.w + 1, 0)",
        "max(first - nsa.w + 2, 0)",
    ),
    Mutant(
        "decoding: a query does not read itself",
        "attention.decoding",
        "geometry.selected_keys(first + at, nsa)]",
        "max(geometry.selected_keys(first + at, nsa) - 1, 1)]",
    ),
    Mutant(
        "decoding kernels: a window of w - 1 keys",
        "attention.kernels.decoding.attend",
        "tl.where(compressed, NEVER, W)",
        "tl.where(compressed, NEVER, W - 1)",
    ),
    Mutant(
        "decoding kernels: a part keeps its peak for its total",
        "attention.kernels.decoding.keys",
        "tl.store(part_sums_ptr + 2 * place + 1, total, mask=inside)",
        "tl.store(part_sums_ptr + 2 * place + 1, peak, mask=inside)",
    ),
    Mutant(
        "decoding kernels: parts are not shrunk to one peak",
        "attention.kernels.decoding.merge",
        "tl.exp2(part_peak - tl.max(part_peak, 0))",
        "tl.exp2(part_peak - part_peak)",
    ),
    Mutant(
        "decoding kernels: shares by one part's total",
        "attention.kernels.decoding.choose",
        "total = tl.sum(part_total * tl.exp2(part_peak - peak[:, None]), 1)",
        "total = tl.max(part_total * tl.exp2(part_peak - peak[:, None]), 1)",
    ),
    Mutant(
        "decoding kernels: the block before a query's own competes too",
        "attention.kernels.decoding.choose",
        "competes = j <= own - 2",
        "competes = j <= own - 1",
    ),
    Mutant(
        "decoding kernels: new tokens past a sequence's room are kept",
        "attention.kernels.decoding.append",
        "kept = kept & (position < N)",
        "kept = kept",
    ),
    Mutant(
        "decoding kernels: new tokens lie in the window's ring as in the other",
        "attention.kernels.decoding.append",
        "b, (position % ring).to(tl.int64), g, turns,",
        "b, (position % raw_ring).to(tl.int64), g, turns,",
    ),
    Mutant(
        "decoding kernels: new tokens are turned the other way",
        "attention.kernels.decoding.append",
        "tl.where(early, -partner, partner)",
        "tl.where(early, partner, -partner)",
    ),
    Mutant(
        "decoding kernels: a sequence's first key is mixed with what lies in the ring",
        "attention.kernels.decoding.append",
        "late = is_key & (position > 0)",
        "late = is_key",
    ),
    Mutant(
        "decoding kernels: of keys that are mixed the partners are not",
        "attention.kernels.decoding.append",
        "partner = mixed(partner, mix_base, NEXT, late_base, partners, turned & is_key, turned & late)",
        "partner = partner",
    ),
    Mutant(
        "decoding kernels: a block is completed a token too late",
        "attention.kernels.decoding.complete",
        "visible(before + T - 1, L, STRIDE)",
        "visible(before + T - 2, L, STRIDE)",
    ),
    Mutant(
        "decoding kernels: a block's places weigh nothing",
        "attention.kernels.decoding.complete",
        "tl.load(place_ptr + columns[None, :] * L + i[:, None], mask=there, other=0.0)",
        "tl.zeros([L_PAD, PAD], tl.float32)",
    ),
    Mutant(
        "decoding kernels: a map's rows keep their own scale",
        "attention.kernels.decoding.linear",
        "acc, gate = acc * scale, gate * scale",
        "acc, gate = acc, gate * scale",
    ),
    Mutant(
        "decoding kernels: the second map's columns are the first's",
        "attention.kernels.decoding.linear",
        "w_ptr, y_ptr, N, then = w1_ptr, y1_ptr, N1, THEN1",
        "w_ptr, y_ptr, N, then = w0_ptr, y1_ptr, N1, THEN1",
    ),
    Mutant(
        "decoding kernels: the least of an indexer's sums are chosen",
        "attention.kernels.decoding.choose",
        "keys = in_order(tl.where(score > LEAST, score, LEAST).to(tl.int32, bitcast=True))",
        "keys = tl.where(score > LEAST, score, LEAST).to(tl.int32, bitcast=True)",
    ),
    Mutant(
        "decoding kernels: a key from before a block gives it all that it reaches over",
        "attention.kernels.decoding.choose",
        "* min(near + REACH, STRIDES)",
        "* REACH",
    ),
    Mutant(
        "decoding kernels: a key that reaches past its block gives it all",
        "attention.kernels.decoding.choose",
        "* tl.minimum(STRIDES - near, REACH)",
        "* REACH",
    ),
    Mutant(
        "decoding kernels: of what lies in a block the padding counts",
        "attention.kernels.decoding.choose",
        "((near < STRIDES) & (i < stop))",
        "(i < stop)",
    ),
    Mutant(
        "decoding kernels: of equals the higher index is chosen",
        "attention.kernels.decoding.choose",
        "tl.min(tl.where(keys == top, j, ABSENT), 0)",
        "tl.max(tl.where(keys == top, j, 0), 0)",
    ),
    Mutant(
        "decoding: a sequence's first key is mixed with what the cache held",
        "inference.cache.storage",
        "return kept.masked_fill((step.lengths == 0).view(-1, 1, 1, 1, 1), 0)",
        "return kept",
    ),
    Mutant(
        "decoding: a recorded step stands still",
        "inference.recorded",
        "cache.lengths.add_(self._counts)",
        "cache.lengths.add_(0 * self._counts)",
    ),
    Mutant(
        "decoding: a residual is lost",
        "inference.maps",
        "out.append(found if residual is None else residual + found)",
        "out.append(found)",
    ),
    Mutant("decoding: the strongest head chooses", "attention.decoding", "carry(p.sum(3)", "carry(p.amax(3)"),
    Mutant(
        "decoding: the choice of the query before",
        "attention.decoding",
        "return reference.choose(importance.float(), nsa, first=first)",
        "return reference.choose(importance.float(), nsa, first=first - 1)",
    ),
    Mutant("decoding: float32 is never in doubt", "attention.narrow", "next_one * doubt)", "next_one)"),
    Mutant("decoding: doubt without the length of keys", "attention.narrow", "(longest_q * longest_k)", "longest_q"),
    Mutant(
        "decoding: one sequence in doubt, and the first is computed wide",
        "attention.decoding",
        "_shares(q[one], k[one], first, choice_nsa, choice_dtype",
        "_shares(q[:1], k[:1], first, choice_nsa, choice_dtype",
    ),
    Mutant(
        "decoding: every row as long as the first",
        "attention.decoding",
        "yield slice(begin, end), length",
        "yield slice(begin, end), lengths[0].item()",
    ),
    Mutant(
        "decoding: of a chunk, the first query's compressed blocks alone are masked",
        "attention.decoding",
        "scores[..., seen_by_all:].masked_fill_(hidden,",
        "scores[..., seen_by_all:].masked_fill_(hidden & False,",
    ),
    Mutant(
        "decoding: blocks that overlap forget what they share", "inference.memory", "return nsa.l - 1 + STEP", "return STEP"
    ),
    Mutant(
        "decoding: padding past a sequence's room begins its neighbour",
        "inference.cache.step",
        "torch.where(places < capacity, rows * capacity + places, len(rows) * capacity)",
        "(rows * capacity + places).clamp_max(len(rows) * capacity)",
    ),
    Mutant(
        "decoding: what is worked out for one ring is taken for all",
        "inference.cache.step",
        'self._once(("ring", slots),',
        'self._once("ring",',
    ),
    Mutant(
        "decoding: blocks that a query has not reached compete",
        "attention.narrow",
        'rank[end:] = float("-inf")',
        "pass",
    ),
    Mutant(
        "decoding: a ring is read on past its end",
        "attention.decoding",
        "ring[:, : at + end - begin - slots]",
        "ring[:, at - (at + end - begin - slots) : at]",
    ),
    Mutant(
        "decoding: padding makes a sequence longer",
        "inference.decode",
        "self.cache.advance(own)",
        "self.cache.advance([part.shape[1]] * len(part))",
    ),
    Mutant(
        "decoding: a ring begins with the padding of its prompt",
        "inference.cache.step",
        "last = self.counts[:, None] - 1",
        "last = self.counts[:, None] * 0 + self.width - 1",
    ),
    Mutant(
        "decoding: a convolution reads the token itself",
        "inference.cache.step",
        "_in_ring(self.rows, self.positions[:, :1] + back, slots)",
        "_in_ring(self.rows, self.positions[:, :1] + back + 1, slots)",
    ),
    Mutant(
        "generation: the seed is not used", "inference.generate", "manual_seed(seed or 0)", "manual_seed(seed and 0 or 0)"
    ),
    Mutant(
        "decoding: a recorded step completes no block", "inference.cache.compressed", "-(-step.width // self.nsa.d)", "0"
    ),
    Mutant(
        "decoding: a recorded step forgets which rows are padding",
        "inference.recorded",
        "self._counts.copy_(torch.tensor(counts, dtype=torch.int64), non_blocking=True)",
        "self._counts.fill_(1)",
    ),
    Mutant("decoding: a recording outlives its cache", "inference.decode", "self._recorded = None\n\n", "pass\n\n"),
    Mutant(
        "decoding: lengths are elsewhere after a step",
        "inference.cache.model",
        "self.lengths.copy_(torch.tensor(self.starts, dtype=torch.int32), non_blocking=True)",
        "self.lengths = torch.tensor(self.starts, dtype=torch.int32, device=self.lengths.device)",
    ),
    Mutant("generation: nothing stops it", "inference.generate", "stops.reached(answers[row])", "False"),
    Mutant(
        "generation: ids past the tokenizer's are drawn",
        "inference.generate",
        "logits[:, :drawable]",
        "logits[:, :None]",
    ),
    Mutant(
        "generation: a stop by its last token alone",
        "inference.stops",
        "list(drawn[-len(end) :]) == end",
        "drawn[-1:] == end[-1:]",
    ),
    Mutant("generation: no separator before the prompt", "inference.text", "[tokenizer.separator, *map(", "[*map("),
    Mutant("sampling: temperature multiplies", "inference.sampling", "/ self.temperature)", "* self.temperature)"),
    Mutant("sampling: top-k drops the last of them", "inference.sampling", "logits < floor", "logits <= floor"),
    Mutant(
        "sampling: top-p without the token that reaches it",
        "inference.sampling",
        "before = falling.cumsum(-1) - falling",
        "before = falling.cumsum(-1)",
    ),
    # The data.
    Mutant("data: targets are the inputs", "data.batches", "both[:, 1:].contiguous()", "both[:, :-1].contiguous()"),
    Mutant(
        "data: every epoch in the same windows",
        "data.batches",
        'return f"{self._seed}:{epoch}"',
        'return f"{self._seed}:0"',
    ),
    Mutant(
        "data: every micro-batch is the first",
        "data.batches",
        "first = step * self.sequences_per_step + start",
        "first = step * self.sequences_per_step",
    ),
    Mutant(
        "data: a permutation that repeats",
        "data.rows",
        "        if index < size:\n            return index",
        "        return index % size",
    ),
    Mutant(
        "data: documents run together",
        "data.fill",
        "ids.astype(self._dtype).tobytes() + self._separator)",
        "ids.astype(self._dtype).tobytes() + b' ')",
    ),
    Mutant(
        "data: documents are split by what came before them",
        "data.fill",
        '"validation" if fraction < self._plan.val_fraction else "train"',
        '"validation" if self.state["splits"]["train"]["documents"] % 3 == 2 else "train"',
    ),
    Mutant(
        "data: characters counted for bytes",
        "data.fill",
        'counts["text_bytes"] += len(_bytes_of(text))',
        'counts["text_bytes"] += len(text)',
    ),
    Mutant(
        "data: a filling that goes on begins again",
        "data.fill",
        'self.state["cursor"] = self._cursor',
        'self.state["cursor"] = None',
    ),
    Mutant(
        "data: a read past a shard's end begins the next one late",
        "data.shards",
        "offset = start + filled - (self._ends[index] - len(shard))",
        "offset = max(start - (self._ends[index] - len(shard)), 0) + bool(filled)",
    ),
    Mutant("data: shards by their size alone", "data.shards", "if content and (digest", "if False and (digest"),
    Mutant(
        "data: a separator spelt out in a text is one",
        "data.tokenizer",
        "self._tokenizer.encode_special_tokens = True",
        "self._tokenizer.encode_special_tokens = False",
    ),
    Mutant(
        "data: a row is lost where a filling goes on", "data.sources.local", "if row >= first and", "if row > first and"
    ),
    Mutant(
        "data: what a hidden folder holds is text", "data.sources.local", 'part.startswith(".") for part', "False for part"
    ),
    # What a user, or a stranger, gives.
    Mutant("yaml: the last of two keys is taken", "config.yaml_text", "if key.value in seen:", "if False:"),
    Mutant("yaml: minutes and seconds are a number", "config.yaml_text", "[-+]?(0|[1-9][\\d_]*|", "[-+]?(0|[1-9][\\d_:]*|"),
    Mutant("yaml: keys of any kind", "config.yaml_text", 'if key.tag not in (f"{TAG}str", f"{TAG}merge"):', "if False:"),
    Mutant("yaml: nesting without end", "config.yaml_text", "if self._depth == DEEPEST:", "if False:"),
    Mutant("page: addresses of any kind", "report.inert", "return value if LINK.match(value) else None", "return value"),
    Mutant("page: forms stay", "report.inert", '{"section", "tfoot"}', '{"section", "tfoot", "form"}'),
    Mutant("page: styles of any kind", "report.inert", "    filter_style_properties=set(STYLES),\n", ""),
    Mutant("page: pictures from anywhere", "report.inert", "value.strip().lower().startswith(PICTURE)", "value"),
    # The model.
    Mutant(
        "model: Q rotated before the head split",
        "model.attention",
        "n_kv_groups] * branches], dim=2)\n",
        "n_kv_groups] * branches], dim=2)\n"
        "    from nsa_lab.model.layers import rotary_table\n"
        "    whole = rotary_table(qkv.shape[1], c.n_heads * c.d_k, c.rope_theta, qkv.device)\n"
        "    q = rotate(qkv[..., : c.n_heads * c.d_k].unsqueeze(2), whole).squeeze(2).unflatten(-1, (c.n_heads, c.d_k))\n",
    ),
    Mutant(
        "model: K not rotated",
        "model.attention",
        "n_kv_groups] * branches], dim=2)\n",
        "n_kv_groups] * branches], dim=2)\n    turned = roped[:, :, c.n_heads :].split(c.n_kv_groups, dim=2)\n",
    ),
    Mutant(
        "model: compressed keys rotated by nothing",
        "model.attention",
        "n_kv_groups] * branches], dim=2)\n",
        "n_kv_groups] * branches], dim=2)\n"
        "    turned = [roped[:, :, c.n_heads : c.n_heads + c.n_kv_groups], *turned[1:]]\n",
    ),
    Mutant(
        "model: compressed values from the selected branch",
        "model.attention",
        "compress(v_cmp, nsa, self.phi_v, ",
        "compress(v_sel, nsa, self.phi_v, ",
    ),
    Mutant(
        "model: compressed branch cut off from its keys",
        "model.attention",
        "compress(k_cmp, nsa, self.phi_k, ",
        "compress(k_cmp.detach(), nsa, self.phi_k, ",
    ),
    Mutant(
        "model: window on the selected branch's keys",
        "model.attention",
        "k_win, v_win, self.gates(x).to(q.dtype)",
        "k_sel, v_sel, self.gates(x).to(q.dtype)",
    ),
    Mutant(
        "model: gates by branch, then by head",
        "model.attention",
        "logits = logits.unflatten(-1, (self.config.n_heads, 3))",
        "logits = logits.unflatten(-1, (3, self.config.n_heads)).mT",
    ),
    Mutant(
        "model: packed compressed values from the selected branch",
        "model.attention",
        "compress_documents(v_cmp, nsa, self.phi_v, ",
        "compress_documents(v_sel, nsa, self.phi_v, ",
    ),
    Mutant("model: a silent branch is heard", "model.attention", "if self.config.silent:", "if False:"),
    Mutant(
        "model: the wrong branches are silent",
        "model.attention",
        "name in self.config.silent else",
        "name not in self.config.silent else",
    ),
    Mutant("model: softmax gate over the heads", "model.attention", "logits.softmax(-1)", "logits.softmax(-2)"),
    Mutant(
        "model: the late key of a document's first token is the last document's",
        "model.layers",
        "        if begins is not None:\n",
        "        if False:\n",
    ),
    Mutant("model: late keys are two tokens late", "model.layers", "[first, x[:, :-1]]", "[first, first, x[:, :-2]]"),
    Mutant(
        "model: decoding forgets the unread key", "model.layers", "if before is None else before", "if True else before"
    ),
    Mutant("model: the selection loss in evaluation too", "model.attention", "return self.training and ", "return "),
    Mutant("model: the selection loss without its weight", "model.attention", "else taught * weight", "else taught"),
    Mutant(
        "model: matching heads of the second group",
        "model.initial",
        "[: layer.config.matching_heads] = keys[0, 0]",
        "[: layer.config.matching_heads] = keys[0, -1]",
    ),
    Mutant("model: branches' keys start apart", "model.initial", "keys[1:] = keys[0].clone()", "pass"),
    Mutant(
        "model: the short convolution of every group starts as a shift",
        "model.layers",
        "self.weight[1, :, 0] = self.weight[0, :, 1:] = 1.0",
        "self.weight[1] = 1.0",
    ),
    Mutant(
        "model: the short convolution's weights change places", "model.layers", "this, last = self", "last, this = self"
    ),
    Mutant("phi: a pool weighs without the place", "attention.compression", " + self.place.to(wide)", ""),
    Mutant(
        "phi: a pool's weights sum to one over channels", "attention.compression", "score.softmax(-1)", "score.softmax(-2)"
    ),
    Mutant(
        "phi: a pool's scores transposed",
        "attention.compression",
        "self.score.to(blocks.dtype) @",
        "self.score.to(blocks.dtype).mT @",
    ),
    Mutant("model: a pool does not start as the mean", "model.initial", "ShortConvolution | BlockPool", "ShortConvolution"),
    Mutant("indexer: plain means", "config.model", '"pool" if self', '"avg" if self'),
    Mutant("indexer: one token is weighed", "config.model", "self.indexer_block > 1 else", "self.indexer_block > 0 else"),
    Mutant("indexer: the heads' blocks", "config.model", "if not self.indexed:", "if True:"),
    Mutant(
        "indexer: blocks that overlap", "config.model", '"d": self.indexer_block', '"d": max(1, self.indexer_block // 2)'
    ),
    Mutant("indexer: its loss reaches the trunk", "model.indexer", "self.qk(x.detach())", "self.qk(x)"),
    Mutant("indexer: its keys are not those of the token before", "model.indexer", "if self.convolution:", "if False:"),
    Mutant(
        "indexer: starts with every group's last head",
        "model.initial",
        "queries[:: c.heads_per_group, channels]",
        "queries[c.heads_per_group - 1 :: c.heads_per_group, channels]",
    ),
    Mutant(
        "indexer: documents are compressed as the heads' keys",
        "model.attention",
        "block_rows(span, config.choice_nsa, device)",
        "block_rows(span, config.nsa, device)",
    ),
    Mutant(
        "indexer: taught by the geometry of the heads' keys",
        "model.attention",
        "q, k_cmp, nsa = index or (looking, k_cmp, self.config.nsa)",
        "q, k_cmp, nsa = (*(index or (looking, k_cmp))[:2], self.config.nsa)",
    ),
    Mutant(
        "choice kernel: negative scores ordered by their bits",
        "attention.kernels.choice",
        "return score ^ ((score >> 31) & 0x7FFFFFFF)",
        "return score",
    ),
    Mutant(
        "choice kernel: sums of other strides are not brought to one peak",
        "attention.kernels.choice",
        "total = total * tl.exp2(peak - new_peak) +",
        "total = total +",
    ),
    Mutant("preflight: an indexer's choice is not compared", "train.preflight.parity", "if model.indexed:", "if False:"),
    Mutant("indexer: its scores are not counted", "model.transformer", "if c.indexed:", "if False:"),
    Mutant(
        "indexer: a narrow one is turned by the quickest angles",
        "model.layers",
        "return rotary[0][..., ::n], rotary[1][..., ::n]",
        "return rotary[0][..., : width // 2], rotary[1][..., : width // 2]",
    ),
    Mutant(
        "decoding kernels: angles lie side by side",
        "attention.kernels.decoding.append",
        "columns - HALF) * stride_ap",
        "columns - HALF)",
    ),
    Mutant(
        "memory: an indexer's past is as wide as a head's",
        "inference.memory",
        "config.indexed * config.index_width",
        "config.indexed * config.d_k",
    ),
    Mutant("indexer: starts with the window's keys", "model.initial", "found.copy_(keys[1]", "found.copy_(keys[2]"),
    Mutant("indexer: taught by its own attention", "model.attention", "looking=looking,", "looking=None,"),
    Mutant(
        "indexer: the model does not read its blocks", "model.attention", "blocks=blocks, backend", "blocks=None, backend"
    ),
    Mutant(
        "indexer: what is observed are the branch's own blocks",
        "model.attention",
        "*self.scoring(x, inputs, rotary, span), backend",
        "q, k_cmp, nsa, backend",
    ),
    Mutant(
        "indexer: a prompt is read by other blocks",
        "inference.cache.layers",
        "blocks=blocks, backend",
        "blocks=None, backend",
    ),
    Mutant(
        "indexer: decoding chooses by the compressed keys",
        "attention.decoding",
        "if index_q is not None and cache.k_index",
        "if False and cache.k_index",
    ),
    Mutant(
        "indexer: decoding carries by the compressed branch's geometry",
        "attention.decoding",
        "first + p.shape[2], nsa), choice_nsa)",
        "first + p.shape[2], nsa), nsa)",
    ),
    Mutant(
        "indexer: decoding forgets its unread key",
        "inference.cache.layers",
        "before=self.past and self.past.before(step))",
        "before=None)",
    ),
    Mutant(
        "dispatch: blocks from outside are chosen anew",
        "attention.dispatch",
        "if blocks is None:\n        blocks",
        "if True:\n        blocks",
    ),
    Mutant(
        "operator: blocks from outside are chosen anew",
        "attention.kernels.operator",
        "n_sel, *where) if chosen is None else chosen",
        "n_sel, *where)",
    ),
    Mutant(
        "operator: the gradient is of other blocks than were read",
        "attention.kernels.operator",
        "blocks = blocks if chosen is None else chosen",
        "blocks = blocks if chosen is None else chosen.flip(1)",
    ),
    Mutant(
        "preflight: an indexer needs no gradient",
        "train.preflight.checks",
        "(FORCED_BLOCKS + 1) * parts.config.nsa.l_sel",
        "99 * parts.config.nsa.l_sel",
    ),
    Mutant(
        "preflight: one free block is to teach an indexer",
        "train.preflight.checks",
        "(FORCED_BLOCKS + 1) * parts.config.nsa.l_sel",
        "FORCED_BLOCKS * parts.config.nsa.l_sel",
    ),
    Mutant(
        "limits: a backward pass reads no gradient of the output",
        "bench.attention_limits",
        "2 * (q + kv) + more + 2 * out + lse",
        "2 * (q + kv) + more + out + lse",
    ),
    Mutant(
        "bench: a model has as many layers as it would have anyway",
        "cli.benches",
        "layers=layers, backend=backend",
        "layers=None, backend=backend",
    ),
    Mutant(
        "report: a page of the record is made from the notebook",
        "cli.reading",
        "record_alone=record)",
        "record_alone=False)",
    ),
    Mutant(
        "parts: several ranks replay graphs",
        "train.parts",
        'device.type != "cuda" or world.size > 1',
        'device.type != "cuda"',
    ),
    Mutant(
        "overrides: nothing takes the place of a section",
        "config.run",
        "elif value is None and isinstance(merged.get(section), dict):",
        "elif value is ... and isinstance(merged.get(section), dict):",
    ),
    Mutant(
        "paths: what the working directory has stays relative",
        "data.paths",
        "    return str(last)",
        "    return path",
    ),
    Mutant(
        "names: a list that is cut does not say so",
        "runs.names",
        "if len(names) > NAMED else",
        "if len(names) > 99 else",
    ),
    Mutant(
        "config: the longest stage is the last",
        "config.training",
        "return max(self.plan, key=lambda stage: stage.seq_len)",
        "return self.plan[-1]",
    ),
    Mutant(
        "config: a rate may not stay where it is",
        "config.training",
        "if self.min_lr > self.lr:",
        "if self.min_lr >= self.lr:",
    ),
    Mutant(
        "overrides: a value ends at its last equals sign",
        "config.run",
        'text.partition("=")',
        'text.rpartition("=")',
    ),
    Mutant(
        "snapshot: rows are packed otherwise after a resume",
        "train.snapshot",
        'frozenset({"path", "timeout_s"})',
        'frozenset({"path", "timeout_s", "packing"})',
    ),
    Mutant(
        "attempt: equal bits are owed with another number of threads",
        "train.attempt",
        '("versions", "device", "backend", "threads", "ranks")',
        '("versions", "device", "backend", "ranks")',
    ),
    Mutant(
        "attempt: text is waited for no longer than anything else",
        "train.attempt",
        '{**PATIENT_PHASES_S, "data": self.config.data.timeout_s}',
        "{**PATIENT_PHASES_S}",
    ),
    Mutant(
        "trainer: of two evaluations between readings one counts as training",
        "train.trainer",
        "self._interval.excluded_s += self.record",
        "self._interval.excluded_s = self.record",
    ),
    Mutant(
        "events: an attempt is cut where the next one began alone",
        "runs.events",
        "lowest = min(lowest, resumed_at[attempt])",
        "lowest = resumed_at[attempt]",
    ),
    Mutant(
        "history: the best validation is the worst",
        "runs.history",
        "best_validation_bpb=float(np.nanmin(validation))",
        "best_validation_bpb=float(np.nanmax(validation))",
    ),
    Mutant(
        "history: trouble that ended nothing is a failure",
        "runs.history",
        'fatal = any(e["kind"] == "error" and e.get("fatal") for e in own)',
        'fatal = any(e["kind"] == "error" for e in own)',
    ),
    Mutant(
        "limits: a share above one is told as any other",
        "bench.attention_limits",
        'limit["share"] > 1 for',
        'limit["share"] > 10 for',
    ),
    Mutant(
        "limits: a disturbed turn sets the rate of a product",
        "bench.timing",
        "/ min(_clock_ms(turn, device)",
        "/ max(_clock_ms(turn, device)",
    ),
    Mutant(
        "limits: memory sets no limit",
        "bench.attention_limits",
        "1e3 * max(by_flops, by_bytes)",
        "1e3 * by_flops",
    ),
    Mutant(
        "dense: every number of documents is compiled for",
        "attention.dense",
        'if device.type == "cuda" and span.capacity is not None else None',
        'if device.type == "cuda" else None',
    ),
    Mutant(
        "dense: long documents go in one call, however fast one text is",
        "attention.dense",
        "if varlen is None or (span.longest >= LONG and _one_text_is_faster(device)):",
        "if varlen is None:",
    ),
    Mutant(
        "tune: a tile that computes something else has a speed",
        "bench.tune",
        "            if passed:",
        "            if True:",
    ),
    Mutant("tune: the table keeps the last tile", "bench.tune", "setattr(launch_table, function, own)", "pass"),
    Mutant("tune: what runs differ by is a gain", "bench.tune", "(1 - GAIN) * best[0].ms", "best[0].ms"),
    Mutant(
        "graphs: are held against documents of one length",
        "train.cuda_graph",
        "            with replayable():\n",
        "            if True:\n",
    ),
    Mutant(
        "dense: a long document loses its last rows",
        "attention.dense",
        "[:, : q.shape[1]]",
        "[:, room : room + q.shape[1]]",
    ),
    Mutant(
        "dense: a captured graph has the lengths of its documents",
        "attention.dense",
        "not torch.cuda.is_current_stream_capturing() and",
        "",
    ),
    Mutant(
        "model: gates start at zero",
        "model.initial",
        "std = (2.0 / (module.in_features + module.out_features)) ** 0.5",
        "std = 0.0",
    ),
    Mutant("model: head starts as large as any other", "model.initial", "std = 1.0 / module.in_features", "pass"),
    Mutant("model: residual outputs not reduced", "model.initial", "std *= into_residual", "std *= 1.0"),
    Mutant(
        "model: embeddings are normed in no model",
        "model.transformer",
        "if self.config.embedding_norm else x",
        "if False else x",
    ),
    Mutant(
        "model: embeddings are normed in every model",
        "model.transformer",
        "if self.config.embedding_norm else x",
        "if True else x",
    ),
    Mutant(
        "decode: embeddings are never normed",
        "inference.cache.model",
        "return model.embed(tokens)",
        "return model.embedding(tokens)",
    ),
    Mutant(
        "preflight: what a document looks up may reach another",
        "train.preflight.leakage",
        "after = parts.model(changed, span)",
        "after = parts.model(tokens, span)",
    ),
    Mutant("plan: looked up at no cost", "train.plan", "(kept + looked_up + loss)", "(kept + loss)"),
    Mutant("n-grams: tables that nothing reads count", "config.model", "if not self.ngrams:", "if False:"),
    Mutant("checkpoints: weights of any shape will do", "runs.checkpoints", "if written != asked:", "if False:"),
    Mutant(
        "n-grams: they reach over a document's begin",
        "model.ngrams",
        "(positions[..., None] >= back)",
        "torch.ones_like(back)",
    ),
    Mutant("n-grams: a token 0 is none", "model.ngrams", "(seen + 1)", "seen"),
    Mutant("n-grams: all lengths share a table", "model.ngrams", " + self.rows * back[:-1]", ""),
    Mutant("n-grams: the order of tokens does not count", "model.ngrams", ".cumprod(0)", ".cumprod(0)[-1:]"),
    Mutant("n-grams: high bits do not count", "model.ngrams", "0x2545F4914F6CDD1D, 32", "0x2545F4914F6CDD1D, 63"),
    Mutant(
        "n-grams: a model does not say where documents begin",
        "model.transformer",
        "self.embed(tokens, positions)",
        "self.embed(tokens)",
    ),
    Mutant(
        "n-grams: tables are counted as products",
        "model.transformer",
        " - self.looked_up_count())",
        " - self.embedding.weight.numel())",
    ),
    Mutant(
        "decoding: what n-grams reach back to is not kept", "inference.cache.model", "self.latest.put(tokens, step)", "pass"
    ),
    Mutant(
        "decoding: what n-grams reach back to stays with its row",
        "inference.cache.model",
        "yield self.latest.ring.kept",
        "pass",
    ),
    Mutant(
        "decoding: padding overwrites what n-grams reach back to",
        "inference.memory",
        "return longest - 1 + STEP",
        "return STEP",
    ),
    Mutant("model: no norm before the MLP", "model.transformer", "self.mlp(self.mlp_norm(x))", "self.mlp(x)"),
    Mutant("model: the first layer's selection loss alone", "model.transformer", "torch.stack(losses).sum()", "losses[0]"),
    Mutant("model: a constant of the rotation frozen at 10000", "model.layers", "rate = theta ** (", "rate = 10000.0 ** ("),
    Mutant(
        "model: what is not turned is lost",
        "model.layers",
        "parts.append(still.to(wide))",
        "parts.append(0 * still.to(wide))",
    ),
    Mutant(
        "model: gate shares of compressed and selected swapped",
        "model.statistics",
        "for i, name in enumerate(BRANCHES)}",
        "for i, name in zip((1, 0, 2), BRANCHES)}",
    ),
    Mutant(
        "model: keys of all queries counted as one's",
        "model.statistics",
        "keys.sum(-1).float()",
        "keys.sum((1, -1)).float()",
    ),
    Mutant(
        "model: gate entropy in bits", "model.statistics", "share.clamp_min(1e-9).log()", "share.clamp_min(1e-9).log2()"
    ),
    Mutant(
        "model: reuse measured against any block",
        "model.statistics",
        "again = (bits[:, 1:, :, :-1] & bits[:, :-1, :, :-1])",
        "again = (bits[:, 1:, :, :-1])",
    ),
    Mutant(
        "model: reuse measured across documents",
        "model.statistics",
        "_mean_of(again, positions[1:] > 0)",
        "_mean_of(again, positions[1:] >= 0)",
    ),
    Mutant(
        "model: distance to blocks of another document",
        "model.statistics",
        "    positions = span.positions()",
        "    positions = geometry.positions(0, span.queries)",
    ),
    Mutant(
        "flash: room for the documents of the first batch alone",
        "attention.span",
        "return self.longest if self.capacity is None else self.queries",
        "return self.longest",
    ),
    Mutant(
        "flash: packed rows attended as one",
        "attention.flash",
        'if span is None or span.kind != "packed":',
        "if True:",
    ),
    Mutant("dense: documents see what is to come", "attention.dense", "window_size=(-1, 0)", "window_size=(-1, -1)"),
    Mutant("documents: room for a power of two", "data.documents", "1 << twos + twos % 2", "1 << twos"),
    Mutant("documents: no room beside one for each row", "data.documents", "2 * len(self.rows)", "len(self.rows)"),
    Mutant(
        "model: an indexer's keys of documents lie as the compressed branch's",
        "model.attention",
        "kernels.document_table(span, config.choice_nsa, device) if ours and",
        "kernels.document_table(span, config.nsa, device) if ours and",
    ),
    Mutant(
        "documents: a document begins behind its separator",
        "data.documents",
        "separators = tokens == separator",
        "separators = np.append(False, (tokens == separator)[:-1])",
    ),
    Mutant(
        "documents: rows share a document",
        "data.documents",
        "ends.extend((row[1:] + ends[-1]).tolist())",
        "ends.extend((row[1:-1] + ends[-1]).tolist() + [ends[-1] + int(row[-1])] * (row is self.rows[-1]))",
    ),
    Mutant(
        "documents: room for those of an average row",
        "data.documents",
        "int(inside.max(initial=0))",
        "int(inside[:1].mean())",
    ),
    Mutant("documents: worst fit", "data.rows", "(fitting & -fitting).bit_length()", "fitting.bit_length()"),
    Mutant(
        "documents: the rest of a long one in any row",
        "data.rows",
        "best_fit(sizes.tolist(), len(rest), room)",
        "best_fit(sizes.tolist(), 0, room)",
    ),
    Mutant(
        "documents: padding weighs as text does",
        "data.rows",
        "(np.arange(self._seq_len + 1) <= self._filled[row])",
        "(np.arange(self._seq_len + 1) >= 0)",
    ),
    Mutant(
        "documents: facts across them",
        "data.staged",
        "by_document(plant, separator) if",
        "plant if",
    ),
    Mutant(
        "documents: evaluated as one text",
        "train.measure",
        "logits = logits_of(parts.model, inputs, span_of(documents))",
        "logits = parts.model(inputs)",
    ),
    Mutant(
        "documents: short ones held out all the same",
        "data.fill",
        "max(self._plan.min_document_bytes, 1)",
        "max(self._plan.min_document_bytes * (split_fraction(document.text) >= self._plan.val_fraction), 1)",
    ),
    Mutant(
        "stages: as long as is left out all the same",
        "data.shards",
        "kept = lengths > least",
        "kept = lengths > least + 1",
    ),
    Mutant(
        "stages: a stretch that goes on in the next shard is cut",
        "data.shards",
        "bisect.bisect_right(ends, first), bisect.bisect_left(begins, last)",
        "bisect.bisect_left(begins, first), bisect.bisect_left(begins, last)",
    ),
    Mutant(
        "stages: short documents in all of them",
        "data.staged",
        "tokens = tokens.without_short_documents(separator, stage.min_document_tokens)",
        "pass",
    ),
    Mutant(
        "stages: facts in every sequence",
        "data.staged",
        "return sparingly(whole, stage.planted_share)",
        "return whole",
    ),
    Mutant(
        "stages: the share all at once",
        "data.recall.planting",
        "if int((sequence + 1) * share) > int(sequence * share):",
        "if sequence % 10 < 10 * share:",
    ),
    Mutant(
        "documents: trained on as one text",
        "train.documents",
        "if documents is None:",
        "if True:",
    ),
    Mutant(
        "documents: first tokens of padding too",
        "train.step",
        "(tokens == self._separator) & (weights != 0)",
        "(tokens == self._separator)",
    ),
    Mutant(
        "preflight: nothing is poisoned",
        "train.preflight.leakage",
        'name.endswith("attention.qkv")',
        'name.endswith("attention.qk")',
    ),
    Mutant("padding: lengths of columns", "attention.padding", "kept.sum(1).cpu()", "kept.sum(0).cpu()"),
    Mutant(
        "padding: put back without the mask",
        "attention.padding",
        "padded[kept] = x[0]",
        "padded.flatten(0, 1)[: x.shape[1]] = x[0]",
    ),
    Mutant(
        "trainer: an evaluation that a stop cut off is lost",
        "train.trainer",
        " or (self._evaluation_due(self.done) and not self._evaluated)",
        "",
    ),
    Mutant(
        "reach: facts inside the window",
        "evaluate.reach",
        "nearest = length - max(nsa.w, 2 * nsa.l_sel) - longest",
        "nearest = length - longest",
    ),
    Mutant("reach: facts in the first block", "evaluate.reach", "first, last = nsa.l_sel / body,", "first, last = 0.0,"),
    Mutant(
        "health: a choice by which no answer is right finds",
        "health.selection",
        'if gain >= limit and right.get("chosen"):',
        "if gain >= limit:",
    ),
    Mutant(
        "health: a choice as good as random ones is fine",
        "health.selection",
        'for change in ("random", "nearest", "no_sel")}',
        'for change in ("nearest", "no_sel")}',
    ),
    Mutant(
        "health: a choice as good as the nearest is fine",
        "health.selection",
        'for change in ("random", "nearest", "no_sel")}',
        'for change in ("random", "no_sel")}',
    ),
    Mutant(
        "health: a selected branch of zeros is fine",
        "health.selection",
        'for change in ("random", "nearest", "no_sel")}',
        'for change in ("random", "nearest")}',
    ),
    Mutant("ranks: GPUs are not counted", "runs.ranks", "if 0 < gpus < ranks:", "if False:"),
    Mutant(
        "layer: under autocast it takes anything",
        "model.drop_in",
        " and {x.dtype, weights} <= set(CAST):",
        ":",
    ),
    Mutant("model: any number is a token", "model.transformer", "if low < 0 or high >= c.vocab_size:", "if low < 0:"),
    Mutant(
        "retrieval: any question is the one at the depth",
        "evaluate.retrieval",
        "found[0][:, 0].all(-1)",
        "found[0][:, -1].all(-1)",
    ),
    Mutant(
        "checkpoints: called as anybody likes",
        "runs.checkpoints",
        "if isinstance(step, int) and checkpoint.name !=",
        "if False and checkpoint.name !=",
    ),
    Mutant("reach: few enough for luck", "evaluate.reach", "SEQUENCES = 16", "SEQUENCES = 4"),
    Mutant("health: luck counts as a choice", "health.selection", "limits.reach_share * (loss", "0.0 * (loss"),
    Mutant("health: the first reading of the choice is judged", "health.selection", "last = asked[-1]", "last = asked[0]"),
    Mutant("selection loss: the target carries gradient", "attention.selection_loss", "with torch.no_grad():", "if True:"),
    Mutant(
        "selection loss: forced blocks count",
        "attention.selection_loss",
        " & ~geometry.forced_blocks(own, blocks, nsa)",
        "",
    ),
    Mutant(
        "selection loss: the target sees the future",
        "attention.selection_loss",
        "keys=torch.stack([first_key, first_key + t + 1])",
        "keys=torch.stack([first_key, first_key + t + 2])",
    ),
    Mutant(
        "selection loss: the target sees the document before",
        "attention.selection_loss",
        "keys=torch.stack([first_key, first_key + t + 1])",
        "keys=torch.stack([first_key * 0, first_key + t + 1])",
    ),
    Mutant(
        "selection loss: blocks of the document before are free",
        "attention.selection_loss",
        "* nsa.l_sel > first[:, None]",
        "* nsa.l_sel >= 0 * first[:, None]",
    ),
    Mutant(
        "selection loss: compressed blocks of the document before are seen",
        "attention.selection_loss",
        "compressed=torch.stack([first_compressed, first_compressed + seen])",
        "compressed=torch.stack([first_compressed * 0, first_compressed + seen])",
    ),
    Mutant(
        "selection loss: what is not finite reaches other documents' gradients",
        "attention.selection_loss",
        "q.where(sound_q, 0), k.where(sound_k, 0).to(q.dtype)",
        "q, k.to(q.dtype)",
    ),
    Mutant(
        "selection loss: documents ask from where the row begins",
        "attention.selection_loss",
        "span.start + query - row[owner]",
        "query - row[owner]",
    ),
    Mutant(
        "selection loss: apart, a query sees the keys after its own",
        "attention.selection_loss",
        "keys=torch.stack([none, t + 1])",
        "keys=torch.stack([none, t + 2])",
    ),
    Mutant(
        "selection loss: apart, a query sees all compressed blocks of its document",
        "attention.selection_loss",
        "compressed=torch.stack([none, seen])",
        "compressed=torch.stack([none, seen * 0 + len(number)])",
    ),
    Mutant(
        "selection loss: apart, the row's first keys in the place of the document's",
        "attention.selection_loss",
        "(first_key[:, None] + place[:longest])",
        "(0 * first_key[:, None] + place[:longest])",
    ),
    Mutant(
        "selection loss: the last key that is seen is not",
        "attention.selection_loss",
        "(number < seen[1][:, None])",
        "(number + 1 < seen[1][:, None])",
    ),
    Mutant(
        "documents: each separator of several in a row begins one",
        "data.documents",
        "(np.diff(ends, prepend=-2) > 1) & (ends > 0)",
        "ends > 0",
    ),
    Mutant(
        "recall: whether a task fits depends on what is drawn",
        "data.recall.tasks",
        "len(inserts) * len(longest.statement)",
        "sum(len(insert.said) for insert in inserts)",
    ),
    Mutant("selection loss: scores without the scale", "attention.selection_loss", " * q.shape[-1] ** -0.5", ""),
    Mutant("selection loss: equal distances", "attention.selection_loss", "turned * bounds.diff() // TURN", "0"),
    Mutant(
        "selection loss: its queries copied from the host",
        "attention.selection_loss",
        "spread(span.queries, queries, device)",
        "spread(span.queries, queries).to(device)",
    ),
    Mutant("model: FLOPs of the forward pass alone", "model.transformer", "BACKWARD_FLOPS = 2.0", "BACKWARD_FLOPS = 0.0"),
    # The configuration.
    Mutant("config: unknown keys ignored", "config.section", 'extra="forbid"', 'extra="ignore"'),
    Mutant("config: a stride that does not divide the block", "config.model", "if length % self.d:", "if False:"),
    Mutant("config: no room for the forced blocks", "config.model", "if self.n_sel < FORCED_BLOCKS:", "if self.n_sel < 1:"),
    Mutant(
        "config: steps counted in forward passes",
        "config.training",
        "return self.sequences_per_step * self.seq_len",
        "return self.batch_size * self.seq_len",
    ),
    # Verdicts on a run: each must be able to fail.
    Mutant(
        "health: a run called DONE is finished wherever it stands",
        "health.run",
        "ok = history.reached == steps",
        "ok = True",
    ),
    Mutant(
        "health: a trainer that is gone counts as running",
        "health.run",
        "if state == directory.RUNNING and history.alive:",
        "if state == directory.RUNNING:",
    ),
    Mutant(
        "health: guards looked for among the halts",
        "health.run",
        'every = history.current("guard")',
        'every = history.current("halt")',
    ),
    Mutant(
        "health: a loss that rises counts as one that fell",
        "health.learning",
        "fall = 1 - bpb[-1] / bpb[0]",
        "fall = abs(1 - bpb[-1] / bpb[0])",
    ),
    Mutant(
        "health: rounding decides the unit of the training loss",
        "health.learning",
        "per_token if per_token[0] < limit <= per_byte[0] else per_byte",
        "min(falls)",
    ),
    Mutant(
        "health: the best validation instead of the last",
        "health.learning",
        "ratio = bpb[-1] / bpb[best]",
        "ratio = bpb[best] / bpb[best]",
    ),
    Mutant(
        "health: a leak in validation alone goes unseen",
        "health.learning",
        "np.concatenate([bpb, held_out])",
        "np.concatenate([bpb, held_out + 8])",
    ),
    Mutant(
        "health: half of the warm-up passes",
        "health.learning",
        "return train.lr * step / peak",
        "return train.lr * step / peak / 2",
    ),
    Mutant(
        "health: doubled steps not looked for", "health.steps", "if len(set(seen)) < len(seen) else []", "if False else []"
    ),
    Mutant(
        "health: a checkpoint that was due and missing",
        "health.steps",
        "missing = sorted(step for step in wanted - saved - excused",
        "missing = sorted(step for step in wanted - wanted",
    ),
    Mutant(
        "health: a pace that the trainer warned of is forgiven",
        "health.pace",
        '[e for e in history.current("guard") if e.get("rule") == "slowdown"]',
        "[]",
    ),
    Mutant(
        "health: slow windows forgiven whatever their share",
        "health.pace",
        "ok = share <= limits.slow_share or",
        "ok = share <= 1.0 or",
    ),
    Mutant(
        "health: a slow half hides in the median", "health.pace", "return max(float(np.median", "return min(float(np.median"
    ),
    Mutant(
        "health: a checkpoint without its event was not saved",
        "health.steps",
        "saved = resumed | _whole_on_disk(history) | recorded",
        "saved = recorded",
    ),
    Mutant(
        "health: a stall condemns a run for ever",
        "health.run",
        'found, overcome = by_attempt(history, history.of_kind("stall"))',
        'found, overcome = history.of_kind("stall"), []',
    ),
    Mutant(
        "health: the survivors of a killed rank speak for it",
        "health.run",
        'event.get("cause") is not True, not _fatal(event)',
        "False, not _fatal(event)",
    ),
    Mutant("health: a mirror that failed condemns a run", "health.run", 'event.get("where") not in BESIDE', "True"),
    Mutant("health: what was due is known of every attempt", "health.record", "    if not unknown:", "    if True:"),
    Mutant(
        "health: an attempt is judged by the settings of the latest",
        "runs.history",
        'return watched.applied(self.config, begin["settings"])',
        "return self.config",
    ),
    Mutant(
        "health: settings that nobody tells are those of config.yaml",
        "runs.history",
        'begin.get("config_hash", self.config.hash()) == self.config.hash()',
        "True",
    ),
    Mutant("health: a run without preflight is not judged", "health.run", "False if trained else None", "None"),
    Mutant("health: null that nobody listed passes", "health.run", "if entry is None or (", "if False and ("),
    Mutant("health: a null rate follows the schedule", "health.learning", "off[~np.isfinite(off)] = np.inf", "pass"),
    Mutant(
        "health: a loss that does not move passes",
        "health.learning",
        "if still >= limits.equal_losses:",
        "if still > 10**9:",
    ),
    Mutant(
        "health: no gradient passes", "health.learning", "if (none := norms == 0).any():", "if (none := norms < 0).any():"
    ),
    Mutant("health: a trial is called healthy", "health.worth", "if steps < limits.trial_steps:", "if steps < 0:"),
    Mutant(
        "health: tokens for parameters are not counted",
        "health.worth",
        "if known.parameters and tokens <",
        "if tokens < 0 *",
    ),
    Mutant("health: any dense run is a twin", "health.worth", "and same_training(history, other).ok is True", ""),
    Mutant(
        "health: a rash rate is no suspect", "health.suspect", "rash = _peak(history) > limits.rash_rate", "rash = False"
    ),
    Mutant(
        "report: another median of the speed",
        "runs.history",
        "float(np.median(speeds)) for speeds",
        "float(np.mean(speeds)) for speeds",
    ),
    Mutant("report: training told by the last batch", "runs.history", "LATEST_READINGS = 50", "LATEST_READINGS = 1"),
    Mutant("report: training told by three long documents", "runs.history", "LATEST_ERROR = 0.05", "LATEST_ERROR = 9"),
    Mutant("report: training told by its beginning", "runs.history", "len(finite) // 2 and", "len(finite) and"),
    Mutant(
        "health: a run is trained anew without its own settings",
        "runs.anew",
        "[*first, *(key for key, *_ in unlike_settings(base, changed))]",
        "first",
    ),
    Mutant("report: an error says again what to do", "report.once", "shown = [_kept(part, said) or part", "shown = [part"),
    Mutant("report: panels share the numbers of the first", "figures.style", "axes.tick_params(labelleft=True)", "pass"),
    Mutant("report: the picture on top is shown again", "report.once", "if OVERVIEW in cell.source:", "if False:"),
    Mutant("report: what the header says is said again", "report.once", "not in said]", "not in ()]"),
    Mutant(
        "health: shares of gates told by their entropy",
        "health.branches",
        'by_share = f"shares moved by {_least_to_most(np.max(moved, axis=0))}, of 1"',
        'by_share = "shares moved by 0.251 to 0.393, of 1"',
    ),
    Mutant("health: a layer that stayed even is not named", "health.branches", "< limits.gate_even if away", "< 0 if away"),
    Mutant(
        "notebook: every run is called resumed",
        "workbook.notebook",
        'if not any(event["kind"] in ("start", "resume")',
        'if False and not any(event["kind"] in ("start", "resume")',
    ),
    Mutant(
        "health: a gate that froze after a while passes",
        "health.branches",
        "if (row >= limits.gate_still).any():",
        "if (row > 10**9).any():",
    ),
    Mutant(
        "health: a gate that trembled passes",
        "health.branches",
        "if (stopped := recent < limits.gate_moved).any():",
        "if (stopped := recent < 0).any():",
    ),
    Mutant(
        "health: gates judged at the end alone",
        "health.branches",
        "if (wrong := now | often).any():",
        "if (wrong := now).any():",
    ),
    Mutant(
        "health: a branch that is silent passes",
        "health.branches",
        "(silent := values == 0).any()",
        "(silent := values < 0).any()",
    ),
    Mutant("health: the status of another run", "health.record", "said == named[0], len", "True, len"),
    Mutant("health: a clock that goes back", "health.record", "ok = back <= limits.clock_back_s", "ok = back >= 0"),
    Mutant(
        "health: a run without heartbeats",
        "health.record",
        "if beats.count(attempt.number) < wanted:",
        "if beats.count(attempt.number) < 0:",
    ),
    Mutant("health: what is missing passes", "health.record", "missing = sorted(due - set(found))", "missing = []"),
    Mutant(
        "health: a gate of zeros passes",
        "health.branches",
        "pinned = np.all(np.abs(entropy - EVEN) < limits.gate_pinned, axis=0)",
        "pinned = np.zeros(entropy.shape[1], bool)",
    ),
    Mutant(
        "health: gate weights that never move pass",
        "health.branches",
        "still = (update == 0).all(axis=0)",
        "still = (update < 0).all(axis=0)",
    ),
    Mutant(
        "health: a collapsed layer hides in the mean",
        "health.branches",
        "if (wrong := now | often).any():",
        "if (wrong := now | often).all():",
    ),
    Mutant(
        "health: one choice for all queries passes",
        "health.selection",
        "if (fixed := reuse > limits.reuse_fixed).any():",
        "if (fixed := reuse > 2).any():",
    ),
    Mutant(
        "health: a wider window passes for a selection",
        "health.selection",
        "if (close := distance < near).any():",
        "if (close := distance < 0).any():",
    ),
    Mutant("bench: other code passes for what stands", "bench.records", "!= now[part]]", "!= then.get(part)]"),
    Mutant(
        "bench: what was not measured is left out in silence",
        "bench.attention",
        "str(other) for other in shapes[number:]",
        "str(other) for other in shapes[number + 1 :]",
    ),
    Mutant("bench: a value costs what a key does", "bench.attention", "2 * (shape.D + values)", "4 * shape.D"),
    Mutant(
        "bench: a long output is judged by a few rows",
        "bench.attention_parity",
        "max(min(_ROWS, _SCORES // scores_per_row), 16)",
        "16",
    ),
    Mutant(
        "bench: a sequence without a full block divides by no keys",
        "bench.attention_parity",
        "max(q.shape[2] * k.shape[1], 1)",
        "q.shape[2] * k.shape[1]",
    ),
    Mutant(
        "figures: intervals over seeds set the scale",
        "figures.retrieval",
        "for bound in place.over_windows or ()",
        "for bound in place.over_seeds or place.over_windows or ()",
    ),
    Mutant(
        "figures: a map of a model's seeds shows the first",
        "figures.retrieval",
        "sum(right for right, _ in own) / sum(asked for _, asked in own)",
        "own[0][0] / own[0][1]",
    ),
    Mutant(
        "figures: the interval over seeds is drawn as that over windows",
        "figures.retrieval",
        "[place.over_windows for place in places]",
        "[place.over_seeds for place in places]",
    ),
    Mutant(
        "notebook: a pattern that names no run is passed over in silence",
        "workbook.evaluated",
        "notes.append(str(error))",
        "pass",
    ),
    Mutant("bench: shares of the slowest dense attention", "bench.attention", "/ min(dense", "/ max(dense"),
    Mutant(
        "explorer: steps of runs that are not chosen",
        "workbook.run_explorer",
        "fit([known[name] for name in which.value], *fitted)",
        "fit(list(known.values()), *fitted)",
    ),
    Mutant("beside: text is fetched to be shown", "workbook.beside", "progress=_refuse, ", ""),
    Mutant("difference: the first tenth hides the rest", "figures.differences", "LEFT_OUT = 0.1", "LEFT_OUT = 0.0"),
    Mutant("paired: neighbours count as independent", "health.paired", "min(len(apart), STRETCHES)", "len(apart)"),
    Mutant(
        "compare: Wilson's interval around the share itself", "runs.evaluation", "share + spread / 2, DEV", "share, DEV"
    ),
    Mutant(
        "compare: configurations of one name are one model",
        "health.models",
        "if but_seed(alike[0].history) != but_seed(run.history):",
        "if False:",
    ),
    Mutant(
        "compare: how a run was computed is not told", "health.models", "if differ := _differences", "if not _differences"
    ),
    Mutant("compare: an evaluation of any step counts", "health.models", 'found.get("step") != steps', "False"),
    Mutant(
        "compare: other windows make pairs",
        "health.text_pairs",
        "if ours.cut[key] != reading.cut.get(key)",
        "if key == 'bytes' and ours.cut[key] != reading.cut.get(key)",
    ),
    Mutant(
        "compare: the windows of one seed stand for all",
        "health.text_pairs",
        "(np.mean(side, axis=0) for side in parts)",
        "(side[0] for side in parts)",
    ),
    Mutant(
        "compare: what was never looked for counts as far",
        "health.comparison",
        "depth * length >= nsa.l_sel and ",
        "",
    ),
    Mutant("paired: other batches make pairs", "health.paired", "if _batches(first) != _batches(second):", "if False:"),
    Mutant(
        "sweep: runs of one seed count as seeds",
        "health.sweep",
        "[float(np.mean(values)) for values in read.values()]",
        "[value for values in read.values() for value in values]",
    ),
    Mutant(
        "sweep: other texts are compared",
        "health.sweep",
        "comparable = has_mean and (",
        "comparable = has_mean or (",
    ),
    Mutant(
        "sweep: a seed is paired with any of the baseline's",
        "health.sweep",
        "np.mean(ours[seed]) - np.mean(theirs[seed])",
        "np.mean(ours[seed]) - np.mean(theirs[min(theirs)])",
    ),
    Mutant(
        "sweep: compiling is the pace of the steps after it",
        "runs.history",
        'if not compiles and event.get("dt_s") is not None:',
        'if event.get("dt_s") is not None:',
    ),
    Mutant("sweep: noise is called a gain", "health.sweep", "abs(less.mean) <= less.half", "False"),
    Mutant("sweep: two runs on one GPU", "runs.sweep", "[gpu for gpu in gpus if gpu not in busy.values()]", "gpus"),
    Mutant(
        "sweep: what was halted is trained again", "runs.sweep", "not in (RUNNING, DONE, HALTED)", "not in (RUNNING, DONE)"
    ),
    Mutant("sweep: a trainer that lives has no GPU", "runs.sweep", 'run.status.get("gpu") or gpus[0]', "gpus[0]"),
    Mutant("sweep: a name for two configurations", "runs.sweep", "            sweep._check_names()\n", ""),
    Mutant("sweep: an interrupt leaves its runs alone", "runs.sweep", "            self._stop(say)\n", ""),
    Mutant(
        "sweep: a variant may set the seed",
        "config.sweep",
        "if taken := [key for key in keys if key in ITS_OWN]:",
        "if taken := []:",
    ),
    Mutant("twin: a width beside the best", "train.twin", "return 1 + round(", "return round("),
    Mutant("evaluation: windows of a batch change places", "train.measure", ".mean(1)", ".mean(1).flip(0)"),
    Mutant("report: losses on other texts are subtracted", "report.header", "if not (apart and ", "if not (False and "),
    Mutant("report: the title stands twice", "report", 'cell.source = TITLE.sub("", cell.source, count=1)', "pass"),
    Mutant("figures: a token's bar begins before it", "figures.query", "read.numpy() + 0.5", "read.numpy()"),
    Mutant(
        "figures: a model changes its colour",
        "figures.tiny_recall",
        "list(every).index(model)",
        "(place)",
    ),
    Mutant(
        "evaluation: the last one reads its text again",
        "train.trainer",
        "            found = evaluate_apart(self.parts, held_out, self._poll)",
        "            for _ in range(1 + (self.done == self.train.steps)):\n"
        "                found = evaluate_apart(self.parts, held_out, self._poll)",
    ),
    Mutant(
        "ahead: another number of documents compiles when it comes",
        "train.trainer",
        "        if self.parts.config.runtime.compile:\n            anew.update(",
        "        if False:\n            anew.update(",
    ),
    Mutant("ahead: one rank's documents stand for all", "train.documents", "{(index, rank, room)", "{(index, 0, room)"),
    Mutant("saves: a failure at last is not tried again", "train.saves", "self._failed > 1", "self._failed > 0"),
    Mutant("twins: a time in minutes", "health.twins", '("wall_s", duration)', '("wall_s", lambda s: f"{s / 60:.3f}")'),
    Mutant("health: worse than dense passes", "health.twins", "bool(gap <= limits.twin_gap)", "bool(abs(gap) >= 0)"),
    Mutant(
        "health: twins of other settings",
        "health.twins",
        "differ = sorted(key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key))",
        "differ = []",
    ),
    Mutant("health: how a stage is launched makes no twin", "health.twins", 'if key != "cuda_graph"', "if key"),
    # The trainer's promises.
    Mutant("plan: a model larger than the machine is built", "train.plan", "if needed > there:", "if False:"),
    Mutant("plan: shards are built as shards", "train.plan", "params * WEIGHT_BYTES)", "0)"),
    Mutant(
        "events: a step that was done again counts twice",
        "runs.events",
        "lowest = min(lowest, resumed_at[attempt])",
        'lowest = float("inf")',
    ),
    Mutant(
        "guard: a spike judged against itself",
        "train.guard",
        "window = self.losses\n        self._losses.append(loss)",
        "self._losses.append(loss)\n        window = self.losses",
    ),
    Mutant(
        "guard: throughput gate fires at once",
        "train.guard",
        "if self._minimum and self._below >= self._patience:",
        "if self._minimum and self._below >= 1:",
    ),
    Mutant(
        "guard: the best pace is the latest",
        "train.guard",
        "self._best = max(self._best, statistics.median(self._recent))",
        "self._best = statistics.median(self._recent)",
    ),
    Mutant("guard: half the speed is still fast", "train.guard", "SLOW_FACTOR = 0.6", "SLOW_FACTOR = 0.5"),
    Mutant("guard: a frozen gate is one that moves little", "train.guard", "value == 0.0)", "value < 1e-3)"),
    Mutant(
        "schedule: warm-up one step late",
        "train.schedule",
        "return train.lr * step / train.warmup_steps",
        "return train.lr * (step - 1) / train.warmup_steps",
    ),
    Mutant(
        "schedule: cosine over all steps, warm-up included",
        "train.schedule",
        "progress = (step - peak) / (train.steps - peak)",
        "progress = step / train.steps",
    ),
    Mutant(
        "schedule: wsd falls one step late",
        "train.schedule",
        "last_at_peak = max(train.steps - train.decay_steps, peak)",
        "last_at_peak = max(train.steps - train.decay_steps, peak) + 1",
    ),
    Mutant(
        "step: a bad update is applied",
        "train.step",
        "self._step_unless(self._bad)",
        "self._optimizer.step()",
    ),
    Mutant(
        "step: loss is the mean of micro-batch means",
        "train.step",
        "/ whole, []",
        "/ targets.numel(), []",
    ),
    Mutant(
        "step: a weighted loss over the number of tokens",
        "train.step",
        "return self._world.sum(weights.to(self._device, non_blocking=True).sum())",
        "return self.stage.tokens_per_step",
    ),
    Mutant(
        "muon: the queries and a branch's keys are one matrix",
        "train.muon",
        "[c.n_heads * c.d_k, *keys, *values]",
        "[c.n_heads * c.d_k + keys[0], *keys[1:], *values]",
    ),
    Mutant(
        "muon: the halves of a gated MLP are one matrix",
        "train.muon",
        "[module.down.in_features] * (2 if module.gated else 1)",
        "[module.up.out_features]",
    ),
    Mutant(
        "muon: gates are orthogonalised",
        "train.muon",
        "            found[module.out.weight] = [c.dim]\n",
        "            found[module.out.weight] = [c.dim]\n"
        "            found |= {m.gate.weight: [3 * c.n_heads] for m in [module] if branches == 3}\n",
    ),
    Mutant(
        "muon: the largest matrix of a shape sets the norm of all",
        "train.muon",
        "torch.linalg.matrix_norm(x, keepdim=True).clamp_min(SMALLEST)",
        "torch.linalg.matrix_norm(x, keepdim=True).amax().clamp_min(SMALLEST)",
    ),
    Mutant("muon: four steps of Newton-Schulz", "train.muon", "2.0315), 5", "2.0315), 4"),
    Mutant(
        "muon: momentum looks no step ahead",
        "train.muon",
        "newton_schulz(grad.lerp(momentum, MOMENTUM), precision)",
        "newton_schulz(momentum, precision)",
    ),
    Mutant(
        "muon: scaled by the rows alone", "train.muon", "math.sqrt(max(weight.shape[-2:]))", "math.sqrt(weight.shape[-2])"
    ),
    Mutant(
        "muon: decay at the rate of its updates", "train.muon", "weight.mul(1 - lr * decay)", "weight.mul(1 - rate * decay)"
    ),
    Mutant(
        "muon: a bad gradient stays in the momentum",
        "train.muon",
        "torch.where(bad, before, momentum), torch",
        "momentum, torch",
    ),
    Mutant("muon: AdamW's half takes a bad update", "train.muon", "found_inf=self.found_inf,", "found_inf=None,"),
    Mutant(
        "plan: muon holds two moments of its matrices, too",
        "train.plan",
        'if train.optimizer == "muon" else 0',
        'if train.optimizer == "nobody" else 0',
    ),
    Mutant(
        "config: muon of sharded matrices",
        "config.run",
        'self.train.optimizer == "muon" and self.runtime.parallel == "fsdp"',
        'self.train.optimizer == "muon" and self.runtime.parallel == "no"',
    ),
    Mutant(
        "config: runs that knew of no muon get another hash",
        "config.run",
        '        "optimizer": "adamw",\n',
        "",
    ),
    Mutant(
        "resume: muon goes on where there was adamw",
        "train.snapshot",
        '        "micro_batch_size",\n        "log_every",',
        '        "micro_batch_size",\n        "optimizer",\n        "log_every",',
    ),
    Mutant(
        "stages: the rotary base is that of the first all along",
        "train.parts",
        "self.model.config = self.config.model_at(step)",
        "self.model.config = self.config.model_at(0)",
    ),
    Mutant(
        "load: a checkpoint's rotary base is that of no stage",
        "inference.load",
        "config.model_at(checkpoints.step_of(folder))",
        "config.model",
    ),
    Mutant(
        "stages: a budget of tokens is overdrawn",
        "config.training",
        "self.token_budget // self.tokens_per_step)",
        "-(-self.token_budget // self.tokens_per_step))",
    ),
    Mutant("stages: all with one seed", "data.staged", "if index == 0:", "if index >= 0:"),
    Mutant(
        "recall: two facts with one value",
        "data.recall.facts",
        "if not enough or value not in drawn:",
        "if True:",
    ),
    Mutant(
        "recall: a value is told in a form of its own", "config.data", "if any(form or conversion", "if any(False and form"
    ),
    Mutant(
        "recall: a question before its statement",
        "data.recall.planting",
        "Insert(max(place for _, place in told), fact.question",
        "Insert(min(place for place, _ in told) - 1e-3, fact.question",
    ),
    Mutant(
        "recall: the end of the line weighs as the answer",
        "data.recall.planting",
        "(answer_weight, len(insert.answer)), (1.0, len(_end(insert)))",
        "(answer_weight, len(insert.answer + _end(insert)))",
    ),
    Mutant(
        "evaluation: an answer's token from its own logits",
        "evaluate.answers",
        "places.flatten(1) - 1",
        "places.flatten(1)",
    ),
    Mutant(
        "evaluation: the oracle looks ahead",
        "evaluate.choices",
        "(s > t[:, None])[None, :, None, None]",
        "(s > t[:, None] + nsa.l_sel)[None, :, None, None]",
    ),
    Mutant(
        "evaluation: every part of the sequences throws the same dice",
        "evaluate.interventions",
        "forward(model, rows, intervention, generator)",
        "forward(model, rows, intervention, seed)",
    ),
    Mutant(
        "evaluation: a silenced branch is only halved",
        "evaluate.interventions",
        "torch.zeros_like(out) if name",
        "0.5 * out if name",
    ),
    Mutant(
        "evaluation: twice as many blocks are as many as ever",
        "evaluate.interventions",
        "nsa.n_sel * intervention.times",
        "nsa.n_sel",
    ),
    Mutant("tiny recall: the selection loss is left out", "evaluate.tiny_recall", " + model.auxiliary_loss()", ""),
    Mutant("tiny recall: asked with what it was trained on", "evaluate.tiny_recall", "asked, seed, ASKED)", "asked, seed)"),
    Mutant("tiny recall: near questions count too", "evaluate.tiny_recall", "questions[:, -task.far :]", "questions"),
    Mutant(
        "tiny recall: a far pair is told where another is",
        "evaluate.tiny_recall",
        "places[:, :far], last]",
        "places[:, -far:], last]",
    ),
    Mutant(
        "trainer: statistics of the step after",
        "train.trainer",
        "self._log(step, *self._to_log.pop(step))",
        "self._log(step, self._to_log.pop(step)[0], None)",
    ),
    Mutant(
        "trainer: the rate of the step before",
        "train.trainer",
        "learning_rate(step, self.train),\n                self._poll",
        "learning_rate(max(step - 1, 1), self.train),\n                self._poll",
    ),
    Mutant(
        "step: the rate is set after the update",
        "train.step",
        'for group in self._optimizer.param_groups:\n            group["lr"] = lr\n        self._step_unless(self._bad)',
        'self._step_unless(self._bad)\n        for group in self._optimizer.param_groups:\n            group["lr"] = lr',
    ),
    Mutant(
        "step: the rate that is told is the one asked for",
        "train.step",
        "        self._step_unless(self._bad)\n\n    def _note_rate",
        "        self._step_unless(self._bad)\n        self.applied_lr = lr * 2\n\n    def _note_rate",
    ),
    Mutant(
        "trainer: bits per token are called bits per byte",
        "train.trainer",
        "/ math.log(2) / self.parts.dataset.bytes_per_token",
        "/ math.log(2)",
    ),
    Mutant(
        "evaluation: the mean of the means of batches",
        "train.measure",
        "torch.stack([loss, loss.new_tensor(float(read.targets.numel()))])",
        "torch.stack([loss / read.targets.numel(), loss.new_tensor(1.0)])",
    ),
    Mutant(
        "evaluation: the text depends on the micro-batch",
        "data.staged",
        "train.eval_batches * stage.batch_size,",
        "train.eval_batches * stage.sequences_at_once,",
    ),
    Mutant(
        "evaluation: the first windows, and none from further on",
        "data.batches",
        "return window * self._available // self.windows * self._seq_len",
        "return window * self._seq_len",
    ),
    Mutant(
        "evaluation: different texts have one name",
        "data.batches",
        "self._tokens.read(self._position(window), self._seq_len + 1)",
        "self._tokens.read(0, 1)",
    ),
    Mutant(
        "history: losses on different texts are compared",
        "runs.history",
        "for run in runs if run.evaluations}) > 1",
        "for run in runs if run.evaluations}) > 9",
    ),
    Mutant(
        "trainer: waits of the interval before",
        "train.trainer",
        "self.excluded_s, self.waits_s = 0.0, []",
        "self.excluded_s = 0.0",
    ),
    Mutant(
        "telemetry: a percentile of nothing in order",
        "train.telemetry.machine",
        "return sorted(values)[",
        "return list(values)[",
    ),
    Mutant(
        "telemetry: numbers of elements for bytes",
        "train.telemetry.machine",
        "own.numel() * own.element_size()",
        "own.numel()",
    ),
    Mutant(
        "export: a step that was done again",
        "runs.export",
        "for event in history.steps:",
        'for event in history.of_kind("step")[::-1]:',
    ),
    Mutant("trainer: a bad step counts as done", "train.trainer", "self.done = step - 1", "self.done = step"),
    Mutant(
        "checkpoint: sizes checked, contents not",
        "runs.checkpoints",
        'return None if found == entry["sha256"] else',
        "return None if found else",
    ),
    Mutant("checkpoint: the permanent ones pruned", "train.checkpoint", "if step not in permanent]", "if step >= 0]"),
    # Nothing lost and nothing silent: ranks, a full disk, damage, stalls.
    Mutant(
        "runs: a rank that outlives its supervisor counts as nobody",
        "runs.lock",
        "return orphans[0] if orphans else None",
        "return None",
    ),
    Mutant("runs: a reader opens the lock to write", "runs.lock", "os.O_RDONLY | os.O_CLOEXEC", "os.O_RDWR | os.O_CLOEXEC"),
    Mutant(
        "runs: the first rank is blamed for the one that was killed",
        "train.ranks",
        "first, deadline = min(failed, key=_blame), time.monotonic() + GRACE_S",
        "first, deadline = failed[0], time.monotonic() + GRACE_S",
    ),
    Mutant(
        "disk: what a failed save wrote stays",
        "train.checkpoint",
        "            self._remove_unfinished(target, error)\n",
        "",
    ),
    Mutant(
        "disk: a full one is not told as such",
        "train.checkpoint",
        "            if not is_full(error):\n                raise\n",
        "            raise\n",
    ),
    Mutant(
        "disk: an event that cannot be written ends the run",
        "train.telemetry.event_log",
        "self._lost, self._why = self._lost + 1, str(error)",
        "raise",
    ),
    Mutant(
        "disk: a torn event stays in the middle of the record",
        "train.telemetry.event_log",
        "if os.fstat(self._file).st_size == begun + written:",
        "if False:",
    ),
    Mutant(
        "disk: a short write is left short",
        "train.telemetry.event_log",
        "while written < len(line):",
        "while False:",
    ),
    Mutant(
        "disk: TensorBoard ends the run", "train.telemetry.mirror", "            self._on_off(error)", "            raise"
    ),
    Mutant(
        "disk: a run whose last save failed is DONE",
        "train.trainer",
        "            raise\n        self._save_at_last()",
        "            raise\n        self._save()",
    ),
    Mutant(
        "damage: an event needs no step",
        "runs.events",
        '_COUNTS = ("attempt", "step")',
        '_COUNTS = ("attempt",)',
    ),
    Mutant(
        "damage: lines that are no events are passed over in silence",
        "runs.events",
        '        say_once(f"{path}: {many}, torn',
        '        str(f"{path}: {many}, torn',
    ),
    Mutant(
        "damage: a cut file of JSON raises",
        "runs.files",
        "except (ValueError, RecursionError) as error:",
        "except RecursionError as error:",
    ),
    Mutant("damage: a file is taken for a checkpoint", "runs.checkpoints", "if path.is_dir() and _NUMBER", "if _NUMBER"),
    Mutant("damage: a manifest may name files elsewhere", "runs.checkpoints", "Path(name).name == name and ", ""),
    Mutant(
        "damage: a copied run hides the others",
        "runs.launch",
        "        except RunDirectoryError as error:\n            # A copy",
        "        except ZeroDivisionError as error:\n            # A copy",
    ),
    Mutant("data: the cache stands in for any source", "data.dataset", 'manifest["identity"] == identity and ', ""),
    Mutant(
        "data: shards without a source are not hashed",
        "data.dataset",
        "content=small or missing is not None",
        "content=small",
    ),
    Mutant("resume: the window of the spike rule begins anew", "train.attempt", 'state["guard"]["losses"]', "[]"),
    Mutant(
        "resume: what a killed status left is kept",
        "train.attempt",
        "            leftover.unlink()\n",
        "            pass\n",
    ),
    Mutant(
        "phases: waiting for the device is in none",
        "train.trainer",
        "with self.record.phases(phase, counts=False):",
        "with contextlib.nullcontext():",
    ),
    Mutant(
        "phases: a filling that goes on is a stall",
        "train.telemetry.phases",
        "max(self._now[1], self._moved)",
        "self._now[1]",
    ),
    Mutant(
        "stalls: a trainer that does not answer is waited for for ever",
        "train.telemetry.heartbeat",
        "self._waited_s() > ANSWER_WITHIN_S",
        "False",
    ),
    Mutant(
        "stalls: a save on the way out is no answer",
        "train.telemetry.heartbeat",
        "elif self._asked is not None and occurrence == self._reported and",
        "elif self._asked is not None and",
    ),
    Mutant("paired: two dense models are one", "health.paired", "but_seed(nsa) + but_seed(dense)", "but_seed(nsa)"),
    Mutant(
        "paired: bits of a token for those of a byte",
        "health.paired",
        'nats * event["bpb"] / event["loss"]',
        "nats / np.log(2)",
    ),
    Mutant(
        "paired: the best evaluation for the last",
        "health.paired",
        "run.validation()[1][-1] if",
        "run.validation()[1].min() if",
    ),
    Mutant(
        "compare: the first of two dense models is the baseline", "health.models", "if len(dense) != 1:", "if not dense:"
    ),
    Mutant("preflight: NaN is no error", "train.preflight.parity", "math.inf if math.isnan(ratio) else ratio", "ratio"),
    Mutant(
        "stages: a diagnosis names the text of another step",
        "data.staged",
        "positions(within, start",
        "positions(step, start",
    ),
    Mutant("report: the speed of the first stage", "runs.history", "tokens_per_s=speeds[-1]", "tokens_per_s=speeds[0]"),
    Mutant("report: a stage's first step is its pace", "runs.history", 'event["step"] in firsts or event', "event"),
    Mutant(
        "retrieval: interventions at shallow depths alone",
        "evaluate.retrieval",
        "number * len(DEPTHS) // count % len",
        "number % len",
    ),
    Mutant("retrieval: the last sequences are written", "evaluate.retrieval", "asked[:written]", "asked[-written:]"),
    Mutant(
        "bench decode: NaN is no error",
        "bench.decode_operator",
        "torch.stack(ours).max()",
        "torch.stack(ours).nan_to_num().max()",
    ),
    Mutant(
        "export-hf: another step than asked for",
        "inference.hf",
        "find_checkpoint(run_dir, step)",
        "find_checkpoint(run_dir)",
    ),
    Mutant(
        "transformers: documents in one row read each other",
        "inference.hf",
        "self.model(tokens, span)",
        "self.model(tokens)",
    ),
    Mutant(
        "the layer for other models: a base of rotary that is not handed on",
        "model.drop_in",
        "            rope_theta=rope_theta,\n",
        "",
    ),
    Mutant(
        "the layer for other models: turned as wide as a head, whatever share was asked",
        "model.drop_in",
        "c.rotary_width, c.rope_theta",
        "c.d_k, c.rope_theta",
    ),
    Mutant(
        "the layer for other models: after a pass that failed, the loss of the one before",
        "model.drop_in",
        "        self._taught = None  # if this pass fails, the one before it is not the last\n",
        "",
    ),
    Mutant(
        "n-grams: hashed without the second fold", "model.ngrams", "return (mixed ^ (mixed >> _HALF)) %", "return mixed %"
    ),
    Mutant(
        "the whole operator: blocks from outside unchecked",
        "attention.dispatch",
        "    if blocks is not None:\n        checks.check_blocks(q, k_sel, blocks, nsa, span)\n",
        "",
    ),
    Mutant(
        "blocks beside documents: those of the row",
        "attention.checks",
        "k.shape[1] if span is None else span.longest",
        "k.shape[1]",
    ),
    Mutant(
        "a span's compressed rows: kept for any length of block",
        "attention.compression",
        '("block_rows", device, nsa.l, nsa.d)',
        '("block_rows", device, nsa.d)',
    ),
    Mutant(
        "torch backward: dK added up in the keys' own dtype",
        "attention.torch_backend",
        "grad_k = torch.zeros(k.transpose(1, 2).shape, dtype=wide",
        "grad_k = torch.zeros(k.transpose(1, 2).shape, dtype=k.dtype",
    ),
    Mutant(
        "an indexer in packed rows: mixed over the borders of documents",
        "model.attention",
        "self.indexer(x, rotary, packing and packing.begins)",
        "self.indexer(x, rotary)",
    ),
    Mutant(
        "a norm in half precision: squares added up in it",
        "model.layers",
        "wide = torch.promote_types(x.dtype, torch.float32)\n    return rms",
        "wide = x.dtype\n    return rms",
    ),
    Mutant("transformers: a mask of other values is taken", "inference.hf", "mask.eq(0) | mask.eq(1)", "mask.eq(mask)"),
]


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from changed text."""

    def __init__(self, name: str, path: Path, text: str) -> None:
        super().__init__(name, str(path))
        self.text = text

    def get_code(self, fullname: str) -> object:
        # Triton's interpreter reads a kernel's source again, through this cache; an entry without a date stays.
        linecache.cache[self.path] = (len(self.text), None, self.text.splitlines(keepends=True), self.path)
        return compile(self.text, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, path: Path, text: str) -> None:
        self.name, self.path, self.loader = name, path, _Loader(name, path, text)

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self.path, loader=self.loader) if name == self.name else None


class _FirstFailure:
    """A pytest plugin that remembers which test failed first, and whether it was one; cheap tests go first."""

    name: str | None = None
    broken: str | None = None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """The fast tests of a file before its slow ones: most faults are caught by then."""
        items.sort(key=lambda item: item.get_closest_marker("slow") is not None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and self.name is None:
            self.name = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and self.broken is None:
            self.broken = f"{report.nodeid}: {str(report.longrepr).strip().splitlines()[-1]}"


def source(module: str) -> Path:
    path = ROOT / "nsa_lab" / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def run_tests(files: list[str]) -> _FirstFailure:
    """Runs them in this process, file by file, until a test fails."""
    first = _FirstFailure()
    options = [
        "-x",
        "-q",
        "-W",
        "error",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
        "-k",
        QUICK,
        "--rootdir",
        str(ROOT),
        "-p",
        "no:cacheprovider",
        "-p",
        "no:nbval",
        "--hypothesis-profile=mutants",
    ]
    for file in files:
        # Folders of its own: pytest numbers those of all processes, and warns where one gets in the way of another.
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), TemporaryDirectory() as folder:
            code = pytest.main([*options, f"--basetemp={folder}/tests", str(ROOT / file)], plugins=[first])
        if first.name or first.broken:
            break
        if code != 0:
            first.broken = f"pytest ended with {code!r} on {file}"
            break
    return first


def try_mutant(mutant: Mutant) -> tuple[bool, str]:
    """Whether the tests caught it, and what to say. Runs in a fork that has not imported the library."""
    path = source(mutant.module)
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return False, f"DOES NOT APPLY: its text occurs {text.count(mutant.old)} times in {path.name}"
    sys.meta_path.insert(0, _Finder(f"nsa_lab.{mutant.module}", path, text.replace(mutant.old, mutant.new)))
    first = run_tests(SUITES[mutant.module])
    if first.broken:
        return False, f"BROKEN: {first.broken}"
    return (True, f"caught by {first.name}") if first.name else (False, "SURVIVED")


def try_unchanged(files: list[str]) -> tuple[bool, str]:
    first = run_tests(files)
    return (False, f"FAILS: {first.name or first.broken}") if first.name or first.broken else (True, "passes")


def attempt(task: Mutant | list[str]) -> tuple[bool, str]:
    started = time.monotonic()
    good, said = try_mutant(task) if isinstance(task, Mutant) else try_unchanged(task)
    return good, f"{time.monotonic() - started:4.0f} s  {said}"


def main(words: list[str]) -> int:
    started = time.monotonic()
    chosen = [m for m in MUTANTS if not words or any(word in f"{m.module} {m.name}" for word in words)]
    suites = [] if words else [attention_tests("dispatch"), MODEL, *map(list, dict.fromkeys(map(tuple, OTHERS.values())))]
    failed = 0
    # One fork per task: a mutated module must not be found imported by the next.
    with multiprocessing.get_context("fork").Pool(WORKERS, maxtasksperchild=1) as pool:
        names = [f"unchanged: {Path(files[0]).stem} ..." for files in suites] + [m.name for m in chosen]
        for name, (good, said) in zip(names, pool.imap(attempt, [*suites, *chosen], chunksize=1), strict=True):
            failed += not good
            print(f"{name:<66} {said}", flush=True)
    print(f"{len(chosen)} mutants, {failed} lines to look at, {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
