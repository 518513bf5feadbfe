"""The tests that have to catch the mutants of a module, the likeliest first."""

from __future__ import annotations


def attention_tests(*names: str) -> list[str]:
    """Return these files, then the general ones, so that the tests of a module run first on its mutants."""
    rest = ("definition", "branches", "block_selection", "gradcheck", "torch_parity", "causality", "block_arithmetic")
    return [f"tests/attention/test_{name}.py" for name in dict.fromkeys(names + rest)]


def cases(file: str, *names: str) -> list[str]:
    """Single tests of a file whose others take long: a kernel is interpreted."""
    return [f"tests/{file}::test_{name}" for name in names]


LINEAR = cases("runs/test_scale.py", "the_work_of_health_is_linear_in_the_number_of_attempts")
MODEL = [
    f"tests/model/test_{name}.py"
    for name in (
        "model_definition",
        "disabled_branches",
        "induction_heads",
        "model_indexer",
        "model_forms",
        "model_ngrams",
        "transformer",
        "model_observe",
        "model_precision",
        "nsa_layer",
    )
]
RUNS = [f"tests/train/test_{part}_run.py" for part in ("training", "resumed", "halted")]
PACKED = cases(
    "kernels/test_packed_tiles.py",
    "every_tile_of_every_document_has_one_program",
    "operator_equals_brute_force_and_documents_are_independent",
)
BAND = cases(
    "kernels/band/test_band.py",
    "the_gradient_of_lse_is_exact",
    "output_is_causal_bit_for_bit",
    "matches_the_definition[base]",
)
SELECTED = cases(
    "kernels/selected/test_selected.py",
    "block_after_the_query_is_ignored",
    "later_tokens_change_nothing",
    "matches_the_definition[base]",
)
DECODING = cases(
    "kernels/decoding/test_decoding_kernels.py",
    "equals_plain_loops[base]",
    "branches_and_rules_equal_plain_loops[base]",
    "positive_and_negative_scores_are_ranked",
    "heads_with_different_score_scales",
    "ties_go_to_the_lower_index",
)
USAGE = cases(
    "cli/test_usage_errors.py",
    "output_path_that_is_no_regular_file_is_refused_before_the_work",
    "evaluation_is_not_written_over_a_fifo",
    "wrong_usage_is_reported_before_any_work",
)
# A fork of this script may start no process, as a filling that is killed needs.
FILLING = [
    *cases(
        "data/test_build_shards.py", "nothing_is_lost_and_documents_are_separated", "copies_of_a_text_are_in_the_same_split"
    ),
    *cases(
        "data/test_interrupted_build.py",
        "interruptions_change_nothing",
        "damage_is_detected_and_reported",
        "a_damaged_record_of_progress_starts_the_build_again",
    ),
]
CHUNKS = cases("kernels/test_packed_tiles.py", "chunks[base]")
SHARDS = cases(
    "model/test_context_parallel.py",
    "ranks_hold_chunks_in_zigzag_order",
    "every_token_has_one_rank_and_all_ranks_have_about_as_many",
    "pieces_cover_the_rows_of_a_rank_with_the_positions_and_keys_of_their_documents",
    "three_ranks_equal_one_process_as_threads",
)
# Without the kernels under the interpreter, which take long.
GRAPHS = cases(
    "train/test_cuda_graph.py",
    "steps_with_graphs_equal_those_without",
    "a_graph_replays_long_documents_of_any_length",
    "each_stage_has_its_own_graphs",
    "a_stage_may_disable_graphs",
    "gradients_may_differ_as_much_as_two_passes_without_graph",
    "a_model_that_reads_document_starts_on_the_host_is_rejected",
    "nan_fails_the_replay_check",
    "a_gradient_that_a_replay_does_not_reproduce_is_rejected",
    "moments_are_allocated_before_the_first_capture_only",
    "micro_batches_of_a_step_have_one_capacity",
    "the_different_span_differs_as_much_as_possible",
    "the_different_span_differs_in_many_tokens",
)
MASKED = cases(
    "train/test_packed_run.py",
    "a_step_equals_that_of_separate_documents",
    "an_evaluation_equals_that_of_separate_documents",
    "statistics_of_a_long_text_are_those_of_its_beginning",
    "preflight_detects_a_leak_between_documents",
    "preflight_detects_tokens_that_leak_before_any_layer",
)
# A mutant's process may have no children, so these are the tests of one process.
STOP = cases(
    "runs/test_stop_and_ensure.py",
    "stop_sends_no_signal_to_a_process_of_another_host",
    "stop_sends_no_signal_to_a_pid_that_is_no_trainer",
    "stop_sends_no_signal_to_a_process_that_has_the_pid_of_an_earlier_trainer",
    "two_callers_at_once_share_one_run",
)
CLOCK = cases(
    "train/test_signals.py",
    "the_clock_stands_still_only_during_a_suspension",
    "a_clock_without_ticks_ignores_sigcont",
    "waiting_for_data_does_not_time_out_in_a_suspension",
    "a_suspension_is_no_stall_in_whichever_order_threads_continue",
)
DAMAGED = cases(
    "crash/test_damaged_checkpoint.py",
    "a_flipped_byte_in_any_file_costs_one_checkpoint_and_no_accuracy",
    "with_no_valid_checkpoint_left_the_run_halts_and_is_not_started_over",
    "signed_but_bad_files_cost_one_checkpoint",
    "frozen_weights_need_no_moments",
    "moments_are_those_of_the_optimizer",
    "odd_files_among_the_checkpoints_block_no_save",
    "files_that_cannot_be_removed_block_no_save",
    "later_and_broken_entries_do_not_cost_the_new_checkpoint",
    "checkpoints_that_are_a_file_stop_the_run_with_a_line",
    "many_files_of_a_manifest_start_few_threads",
    "manifest_without_weights_is_not_whole",
)
CONVERT = [
    f"tests/convert/test_{name}.py" for name in ("sparsify", "cached_passes", "training", "saved_models", "nsa_model")
]
SUITES = {
    **{
        f"convert.{name}": CONVERT
        for name in ("forward_pass", "hooks", "cache", "indexer", "models", "adapter", "settings")
    },
    "convert.nsa_model": ["tests/convert/test_nsa_model.py"],
    "convert.sources": ["tests/convert/test_saved_models.py"],
    "convert.run_settings": ["tests/convert/test_describe_source.py"],
    "convert.export": ["tests/convert/test_conversion_run.py"],
    "train.teacher": ["tests/train/test_teacher.py"],
    "train.checkpoint_state": ["tests/train/test_teacher.py"],
    "evaluate.conversion": ["tests/evaluate/test_conversion.py"],
    "attention.layout": [
        *attention_tests("replace_documents", "packed_compression", "layout", "dense_limit"),
        *MODEL,
    ],
    "attention.padding": attention_tests("padding"),
    "attention.geometry": attention_tests("block_arithmetic"),
    "attention.reference": attention_tests(),
    "attention.compression": [
        *attention_tests("packed_compression", "layout", "definition"),
        "tests/model/test_model_forms.py",
        *cases("inference/test_module_calls.py", "linear_layers_get_the_batch_as_first_dimension"),
    ],
    "attention.key_storage": ["tests/attention/test_key_storage.py"],
    "attention.segment_ops": [
        "tests/attention/test_packed_compression.py",
        *cases("model/test_export.py", "forward_mode_runs_on_the_reference"),
        *attention_tests("layout"),
    ],
    "attention.compile_utils": cases(
        "model/test_export.py",
        "forward_mode_runs_on_the_reference",
        "forward_mode_of_dense_attention",
        "torch_func_is_refused_with_the_way_out",
    ),
    "attention.torch_backend": attention_tests("layout", "definition", "gradcheck", "torch_parity"),
    "attention.input_checks": attention_tests("input_checks", "dispatch"),
    "attention.dispatch": [
        *attention_tests("backend_launches", "dispatch", "input_checks"),
        *cases("attention/test_branches.py", "mean_keys_are_those_of_the_selected_branch"),
        "tests/model/test_model_indexer.py",
    ],
    **{f"model.{name}": [*MODEL, "tests/inference/test_decode.py"] for name in ("attention_layers", "head_projections")},
    "model.indexer": [*MODEL, *SHARDS],
    "model.init_weights": MODEL,
    "model.ngrams": ["tests/model/test_model_ngrams.py"],
    "model.layers": [*MODEL, "tests/inference/test_decode.py"],
    "model.statistics": MODEL,
    "model.nsa_layer": ["tests/model/test_nsa_layer.py"],
    "model.transformer": MODEL,
}
HF_MODELS = [
    *cases(
        "inference/test_hf.py",
        "packed_documents_equal_single_documents",
        "loss_does_not_depend_on_micro_batches",
        "selection_loss_is_part_of_the_training_loss",
        "base_model_returns_the_last_hidden_state",
        "loss_computed_from_logits_trains_the_indexer",
        "settings_of_gradient_checkpointing_have_an_effect",
        "labels_that_padding_predicts_are_ignored",
        "selection_loss_does_not_depend_on_micro_batches",
    ),
    *cases("inference/test_hf_saving.py", "missing_weights_are_those_of_a_new_model", "tied_embedding_is_saved"),
    *cases(
        "inference/test_hf_generation.py",
        "calls_return_a_cache_as_configured",
        "a_generated_pad_token_is_a_token_for_an_assistant",
        "early_exit_is_refused",
    ),
]
OTHERS = {
    "config.base": ["tests/test_config.py"],
    "cli.bench_commands": ["tests/bench/test_bench_commands.py"],
    "cli.common": [
        *cases("cli/test_options.py", "every_path_refuses_an_empty_text_and_expands_the_home_folder"),
        *cases("runs/test_bad_runs.py", "health_shows_the_others_of_a_bad_run"),
        *USAGE,
    ],
    "cli.training_commands": ["tests/cli/test_options.py::test_values_arrive[plan]"],
    "cli.model_commands": ["tests/cli/test_options.py::test_values_arrive[evaluate]", *USAGE],
    "runs.record_digest": ["tests/health/test_verdict_file.py"],
    "cli.status_table": cases("runs/test_scale.py", "status_reads_only_the_end_of_records"),
    "cli.inspect_commands": [
        *cases("cli/test_commands.py", "report_record_option_is_passed_on"),
        *cases(
            "runs/test_bad_runs.py",
            "health_shows_the_others_of_a_bad_run",
            "compare_and_report_show_the_others_of_a_bad_run",
        ),
        *cases("runs/test_damaged_records.py", "a_run_without_steps_is_not_exported"),
        "tests/runs/test_resolve.py",
    ],
    "data.paths": ["tests/data/test_paths.py"],
    "runs.event_fields": ["tests/runs/test_event_schema.py"],
    **{
        f"runs.event_{name}": [
            *cases("runs/test_history.py", "first_events_are_built_once"),
            "tests/runs/test_event_schema.py",
            "tests/runs/test_damaged_records.py",
        ]
        for name in ("columns", "table", "builder")
    },
    "runs.resolve": [*cases("runs/test_permissions.py", "private_runs_are_listed"), "tests/runs/test_resolve.py"],
    "config.errors": [
        *cases(
            "runs/test_permissions.py",
            "errors_of_the_system_that_a_user_can_fix_have_a_remedy",
            "trainer_is_started_from_a_deleted_working_directory",
        ),
        *cases("cli/test_usage_errors.py", "too_little_memory_is_one_line"),
    ],
    "data.prefetch": ["tests/data/test_prefetch.py", *CLOCK],
    "config.run_config": [
        "tests/test_config.py",
        *cases("train/test_stages.py", "a_stage_overrides_cuda_graph"),
    ],
    "config.train_config": [
        "tests/test_config.py",
        *cases("train/test_stages.py", "a_token_budget_is_rounded_down_to_whole_steps"),
    ],
    **{f"config.{name}": ["tests/test_config.py", *MODEL] for name in ("model_config", "nsa_config")},
    **{f"attention.{part}": ["tests/attention/test_dense_limit.py"] for part in ("dense", "flash")},
    "attention.context_parallel": SHARDS,
    "model.context_parallel": SHARDS,
    "attention.selection_loss": [
        "tests/attention/test_selection_loss.py",
        "tests/attention/test_packed_compression.py",
        *SHARDS,
    ],
    **{
        f"health.{part}": [
            "tests/health/test_record_edits.py",
            "tests/health/test_status_edits.py",
            *(f"tests/health/test_{name}.py" for name in ("stage_verdicts", "verdicts", "fault_classes", "edited_records")),
            "tests/runs/test_finite_weights.py",
        ]
        for part in ("step_accounting", "verdict")
    },
    **{
        f"health.{part}": [
            f"tests/health/test_{name}.py"
            for name in (
                "exchange",
                "conversion_checks",
                "status_edits",
                "real_faults",
                "record_edits",
                "stage_verdicts",
                "selection_geometry",
                "verdicts",
                "fault_classes",
                "edited_records",
            )
        ]
        for part in (
            "ablation_relations",
            "attempt_checks",
            "branch_checks",
            "configured_work",
            "consistency_checks",
            "comparison_relations",
            "ending_checks",
            "evaluation_relations",
            "heartbeat_relations",
            "identity_checks",
            "level_shifts",
            "loss_checks",
            "loss_course",
            "repetition_checks",
            "run_checks",
            "selection_checks",
            "text_relations",
            "throughput_checks",
        )
    },
    "health.selection_geometry": [
        f"tests/health/test_{name}.py" for name in ("selection_geometry", "real_faults", "fault_classes")
    ],
    "health.evaluation_checks": ["tests/health/test_record_edits.py", "tests/health/test_status_edits.py"],
    "health.conversion_relations": ["tests/health/test_conversion_relations.py"],
    "health.ruler_relations": ["tests/health/test_real_faults.py"],
    "health.preflight_relations": ["tests/health/test_preflight_relations.py"],
    "health.start_checks": ["tests/health/test_start_checks.py", "tests/health/test_real_faults.py"],
    "health.verdict_file": ["tests/health/test_verdict_file.py", "tests/health/test_references.py"],
    "health.summary_sentence": ["tests/health/test_references.py"],
    "health.due_steps": ["tests/health/test_due_steps.py", "tests/health/test_verdicts.py"],
    "health.completeness_checks": [
        "tests/health/test_attempts.py",
        "tests/health/test_verdicts.py",
        "tests/health/test_fault_classes.py",
        "tests/health/test_edited_records.py",
    ],
    "health.record_checks": [
        "tests/health/test_status_edits.py",
        "tests/health/test_record_edits.py",
        "tests/health/test_edited_config.py",
        "tests/health/test_real_faults.py",
        "tests/health/test_attempts.py",
        "tests/health/test_verdicts.py",
        "tests/health/test_edited_records.py",
        "tests/health/test_fault_classes.py",
    ],
    "health.matched_pair": ["tests/health/test_verdicts.py", "tests/health/test_paired_difference.py"],
    "bench.decode_attention": cases("bench/test_decode_speed.py", "nan_gets_no_speed"),
    "bench.decode_parity": cases("bench/test_decode_speed.py", "a_model_that_fails_parity_gets_no_speed"),
    "bench.decode_speed": cases(
        "bench/test_decode_speed.py",
        "a_preset_is_timed_with_its_planned_bytes",
        "a_model_that_fails_parity_gets_no_speed",
        "random_caches_hold_finite_index_keys",
    ),
    "inference.hf.inputs": [
        *cases(
            "inference/test_hf.py",
            "invalid_masks_and_positions_are_rejected",
            "selection_loss_does_not_depend_on_micro_batches",
        ),
        *cases("inference/test_hf_generation.py", "masks_with_holes_generate_as_their_tokens"),
        *cases("convert/test_cached_passes.py", "padding_after_a_prompt_repeats_its_last_token"),
    ],
    "inference.hf.exporting": cases(
        "inference/test_hf_saving.py",
        "requested_step_is_exported_with_the_settings_of_its_stage",
        "trained_length_is_exported",
    ),
    **dict.fromkeys(("inference.hf.modeling", "inference.hf.causal_lm"), HF_MODELS),
    "inference.hf.cache": cases(
        "inference/test_hf_generation.py",
        "cropped_cache_continues",
        "cropped_padding_leaves_no_trace",
        "positions_continue_the_cached_tokens",
    ),
    "inference.hf.configuration": cases(
        "inference/test_hf_saving.py",
        "model_saved_without_a_tokenizer_can_be_imported",
        "arguments_that_contradict_the_architecture_are_rejected",
    ),
    "bench.harness": ["tests/bench/test_harness.py"],
    "bench.attention_rows": [
        *cases("bench/test_attention_speed.py", "shapes_are_parsed_or_rejected"),
        *cases("bench/test_training_speed.py", "unusable_shapes_are_rejected"),
        "tests/bench/test_harness.py",
        "tests/bench/test_roofline.py",
    ],
    "bench.attention_speed": ["tests/bench/test_harness.py", "tests/bench/test_attention_speed.py"],
    "bench.attention_parts": ["tests/bench/test_attention_speed.py"],
    "bench.attention_parity": ["tests/bench/test_attention_speed.py"],
    "bench.tune_tiles": ["tests/bench/test_tune_tiles.py"],
    "bench.timing": cases("bench/test_training_speed.py", "the_matmul_rate_is_that_of_the_fastest_round"),
    "bench.roofline": ["tests/bench/test_roofline.py"],
    "workbook.run_explorer": ["tests/workbook/test_run_explorer.py"],
    "workbook.samples": ["tests/workbook/test_samples.py"],
    "report.header": cases(
        "train/test_validation_loss.py", "evaluations_record_their_text_and_different_texts_are_not_compared"
    ),
    "report": cases("report/test_report.py", "header_summarizes_the_run"),
    "figures.query_plot": cases("workbook/test_query_attention.py", "bar_of_a_token_is_inside_its_block"),
    "figures.run_difference": ["tests/workbook/test_run_difference.py"],
    "figures.conversion_plots": ["tests/workbook/test_conversion_tables.py"],
    "figures.evaluation_plots": [
        "tests/workbook/test_evaluated_runs.py",
        *cases("evaluate/test_tiny_recall.py", "model_colors_are_consistent_across_figures"),
    ],
    "workbook.evaluated_runs": ["tests/workbook/test_evaluated_runs.py"],
    "health.paired_difference": ["tests/health/test_paired_difference.py"],
    "runs.evaluation": [
        "tests/evaluate/test_evaluation_files.py",
        "tests/health/test_comparison.py",
        "tests/inference/test_model_package.py",
    ],
    "runs.evaluation_schema": ["tests/evaluate/test_evaluation_files.py"],
    "health.conversion_checks": ["tests/health/test_conversion_checks.py", "tests/health/test_stage_verdicts.py"],
    "health.model_runs": ["tests/health/test_comparison.py"],
    "health.paired_text_loss": ["tests/health/test_comparison.py"],
    "health.comparison": ["tests/health/test_comparison.py"],
    "train.matched_baseline": ["tests/train/test_matched_baseline.py"],
    "runs.attempts": ["tests/runs/test_history.py", *LINEAR, "tests/health/test_verdicts.py"],
    "runs.events": [
        "tests/runs/test_event_schema.py",
        "tests/runs/test_bad_runs.py",
        "tests/runs/test_history.py",
        "tests/train/test_telemetry.py",
        "tests/runs/test_damaged_records.py",
        "tests/health/test_verdicts.py",
    ],
    "train.guard": ["tests/train/test_guard.py"],
    "train.estimate": ["tests/train/test_estimate.py"],
    "train.communication": ["tests/train/test_estimate.py"],
    "train.lr_schedule": ["tests/train/test_lr_schedule.py"],
    "train.step": ["tests/train/test_step.py", "tests/train/test_teacher.py", *MASKED, *GRAPHS],
    "train.cuda_graph": GRAPHS,
    "train.muon": ["tests/train/test_muon.py"],
    "runs.trajectory": [
        "tests/train/test_resume_rules.py",
        *cases("train/test_resumed_run.py", "a_run_without_an_optimizer_setting_resumes_only_with_adamw"),
    ],
    "train.packing": [*GRAPHS, *MASKED, *cases("train/test_stage_switch.py", "steps_with_new_capacity_match_a_full_scan")],
    "train.preflight.leakage": MASKED,
    "attention.kernels.block_scores": cases(
        "kernels/test_block_topk.py",
        "one_head_with_disjoint_blocks_needs_no_lse[base]",
        "rules_match_the_reference",
        "scores_are_stored_for_a_few_tiles_at_a_time",
        "several_heads_with_disjoint_blocks_match_the_definition",
        "local_blocks_are_part_of_the_lse_of_each_head",
    ),
    "attention.kernels.block_topk": cases(
        "kernels/test_block_topk.py",
        "better_block_replaces_higher_of_two_ties",
        "matches_the_definition[base]",
        "one_head_with_disjoint_blocks_needs_no_lse[base]",
        "ties_go_to_the_lower_index_without_lse",
        "rules_match_the_reference",
        "scores_are_stored_for_a_few_tiles_at_a_time",
        "several_heads_with_disjoint_blocks_match_the_definition",
    ),
    "attention.kernels.band.forward": BAND,
    "attention.kernels.band.band_ranges": [*BAND, *CHUNKS],
    "attention.kernels.band.launch": [*CHUNKS, *cases("kernels/test_packed_tiles.py", "chunks[nightly]")],
    "attention.kernels.selected.launch": CHUNKS,
    "attention.kernels.band.backward": [*BAND, *PACKED],
    "attention.kernels.packed_tiles": PACKED,
    "attention.kernels.selected.inverted_index": PACKED,
    "attention.kernels.tiles": ["tests/kernels/test_tiles.py", *SELECTED, *BAND],
    "attention.kernels.selected.forward": SELECTED,
    "attention.kernels.selected.backward": SELECTED,
    **{f"attention.kernels.decoding.{part}": DECODING for part in ("kv_tiles", "split_kv_attention", "decode_topk")},
    "attention.kernels.stored_keys": cases(
        "kernels/decoding/test_decoding_kernels.py", "index_keys_in_few_bits_give_the_output_of_their_decoded_values"
    ),
    "attention.kernels.decoding.rope_kv_append": ["tests/kernels/decoding/test_rope_kv_append.py"],
    "attention.kernels.decoding.index_append": ["tests/kernels/decoding/test_rope_kv_append.py"],
    "attention.kernels.decoding.compress_update": ["tests/kernels/decoding/test_rope_kv_append.py"],
    "attention.kernels.decoding.embedding": ["tests/kernels/decoding/test_embedding.py"],
    "attention.kernels.decoding.decode_linear": ["tests/kernels/decoding/test_decode_linear.py"],
    "attention.kernels.parallel_compile": ["tests/kernels/test_fast_launch.py"],
    "attention.kernels.fast_launch": ["tests/kernels/test_fast_launch.py"],
    "attention.kernels.launch_table": ["tests/kernels/test_launch_table.py"],
    "attention.kernels.block_mass": ["tests/kernels/test_block_mass.py"],
    "attention.kernels.gating": ["tests/kernels/test_gating.py"],
    "attention.kernels.nsa_operator": [
        *cases("model/test_model_indexer.py", "the_kernels_use_given_blocks"),
        *cases("kernels/test_nsa_operator.py", "branches_and_rules_match_the_reference[base]"),
    ],
    "train.preflight.startup_checks": ["tests/train/test_preflight.py"],
    "train.preflight.branch_parity": ["tests/train/test_preflight.py"],
    "attention.cached_attention": attention_tests("cached_attention", "fp32_selection"),
    "attention.fp32_selection": ["tests/attention/test_fp32_selection.py"],
    **{
        f"inference.{part}": ["tests/inference/test_decode.py", "tests/model/test_model_forms.py"]
        for part in ("decode", "fused_linear", "kv_cache_size", "decode_graph")
    },
    "inference.plain_weights": ["tests/inference/test_module_calls.py"],
    "inference.decode": [
        "tests/inference/test_decode.py",
        "tests/model/test_model_forms.py",
        *cases(
            "inference/test_module_calls.py",
            "copied_decoder_continues_from_the_same_tokens[graph]",
            "change_between_steps_takes_effect[graph]",
        ),
    ],
    **{
        f"inference.cache.{part}": ["tests/inference/test_decode.py", "tests/model/test_model_forms.py"]
        for part in ("compressed_cache", "attention_cache", "model_cache", "cache_step", "cached_pass", "storage")
    },
    "inference.generate": ["tests/inference/test_generate.py", "tests/inference/test_load.py"],
    "inference.sampling": ["tests/inference/test_sampling.py"],
    "inference.text_generation": ["tests/inference/test_text_generation.py"],
    **{
        f"data.{part}": ["tests/data/test_batches.py", "tests/data/test_sequence_packing.py"]
        for part in ("batches", "sequence_packing")
    },
    "data.document_starts": ["tests/data/test_sequence_packing.py"],
    "data.build_shards": [*FILLING, *cases("train/test_packed_run.py", "short_documents_are_excluded_from_both_splits")],
    "data.shards": ["tests/data/test_batches.py", "tests/data/test_stage_batches.py", *FILLING],
    "data.tokenizer": ["tests/data/test_tokenizer.py"],
    "data.file_search": ["tests/data/test_folders.py"],
    "data.sources.local": [
        "tests/data/test_sources.py",
        *cases(
            "data/test_folders.py",
            "links_to_folders_are_followed",
            "loops_and_second_names_are_read_once_and_named",
            "hidden_folders_and_texts_are_left_out_and_named",
            "unreadable_file_is_named",
            "a_text_that_is_removed_while_it_is_read_is_a_data_error",
        ),
    ],
    "config.yaml_text": ["tests/test_yaml_text.py", "tests/test_config.py"],
    "report.sanitize": ["tests/report/test_sanitize.py"],
    "health.references": ["tests/health/test_references.py"],
    "health.divergence": ["tests/health/test_rerun_command.py", "tests/health/test_references.py"],
    "figures.style": cases("workbook/test_query_attention.py", "all_panels_have_axis_labels"),
    "workbook.notebook": [*STOP, "tests/workbook/test_notebook.py"],
    "train.build": [
        *cases("train/test_stage_switch.py", "compiled_blocks_serve_every_stage"),
        "tests/convert/test_conversion_run.py",
        "tests/train/test_stages.py",
    ],
    "inference.load": [
        *cases("train/test_stages.py", "a_checkpoint_uses_the_rotary_base_of_its_stage"),
        *cases("inference/test_load.py", "edited_configuration_is_refused"),
    ],
    "data.stage_batches": [
        "tests/data/test_stage_batches.py",
        "tests/data/test_sequence_packing.py",
        "tests/train/test_stages.py",
        "tests/train/test_validation_loss.py",
    ],
    "config.data_config": ["tests/data/test_recall.py"],
    "data.recall.facts": ["tests/data/test_recall.py", "tests/evaluate/test_retrieval.py"],
    "data.recall.grammar": ["tests/data/test_recall.py"],
    "data.recall.retrieval_tasks": ["tests/evaluate/test_retrieval.py", "tests/data/test_recall.py"],
    "data.recall.needle_insertion": ["tests/data/test_recall.py", "tests/data/test_stage_batches.py"],
    "evaluate.scoring": ["tests/evaluate/test_retrieval.py"],
    "evaluate.ruler": ["tests/evaluate/test_ruler.py"],
    "evaluate.ruler_tasks": ["tests/evaluate/test_ruler.py"],
    "evaluate.block_selectors": ["tests/evaluate/test_ablations.py"],
    "evaluate.selection_benefit": ["tests/evaluate/test_selection_benefit.py"],
    "evaluate.retrieval": ["tests/evaluate/test_retrieval.py"],
    "evaluate.document_loss": ["tests/evaluate/test_document_loss.py"],
    "evaluate.ablations": ["tests/evaluate/test_ablations.py"],
    "evaluate.tiny_recall": cases(
        "evaluate/test_tiny_recall.py",
        "every_question_repeats_an_earlier_pair",
        "training_is_deterministic_and_uses_the_selection_loss",
        "evaluation_uses_far_questions_of_the_evaluation_stream",
    ),
    "train.trainer": [
        "tests/train/test_trainer.py",
        "tests/train/test_validation_loss.py",
        *RUNS,
        *cases("train/test_stage_switch.py", "every_document_capacity_is_compiled_ahead"),
    ],
    "train.checkpoint_manager": cases(
        "train/test_halted_run.py",
        "a_run_whose_last_save_failed_is_not_done",
        "one_failed_save_is_recorded_and_the_next_one_is_tried",
        "two_failed_saves_in_a_row_halt",
    ),
    # A mutant's process may have no children, so these are the tests of one process.
    "train.distributed": [
        *cases("train/test_step.py", "adjacent_ranks_have_the_same_sequences_if_they_share_each_of_them"),
        "tests/train/test_fsdp.py::test_the_ranks_of_a_host_share_one_copy",
        "tests/train/test_torchrun.py::test_an_incomplete_environment_is_refused_with_the_remedy",
    ],
    "train.matrix_exchange": ["tests/train/test_fsdp.py::test_expensive_matrices_are_spread_over_the_ranks"],
    "model.sharded_files": ["tests/train/test_sharded_checkpoint.py::test_a_malicious_index_runs_no_code"],
    "train.checkpoint": [
        "tests/crash/test_full_disk.py",
        *DAMAGED,
        "tests/crash/test_checkpoint_save.py",
    ],
    "train.checkpoint_content": DAMAGED,
    "runs.finite_weights": ["tests/runs/test_finite_weights.py"],
    "runs.checkpoint_files": [
        *cases("runs/test_permissions.py", "a_checkpoint_folder_without_permission_is_not_an_empty_one"),
        "tests/runs/test_damaged_records.py",
        *DAMAGED,
        "tests/crash/test_checkpoint_save.py",
        "tests/runs/test_checkpoint_files.py",
        "tests/health/test_status_edits.py",
    ],
    # Not the whole file: a mutant's process may have no children.
    "runs.environment": cases("runs/test_environment.py", "commands_that_cannot_be_started_are_missing"),
    "runs.directory": cases(
        "runs/test_permissions.py",
        "private_runs_are_listed",
        "checkpoints_that_are_no_folder_are_named_before_a_trainer_starts",
    ),
    "runs.lock": [
        *STOP,
        "tests/train/test_multi_rank.py::test_resume_refuses_while_a_rank_lives_and_names_it",
        "tests/runs/test_damaged_records.py",
    ],
    "runs.atomic_io": [
        *cases(
            "runs/test_permissions.py",
            "files_are_not_written_through_links",
            "files_that_a_run_appends_to_are_no_links_and_no_other_kind",
        ),
        *cases(
            "crash/test_damaged_checkpoint.py",
            "odd_files_among_the_checkpoints_block_no_save",
            "manifest_with_a_key_twice_is_damaged",
        ),
        "tests/runs/test_damaged_records.py",
        *cases("runs/test_event_schema.py", "lines_are_decoded_as_by_json"),
        *USAGE,
    ],
    "runs.model_files": USAGE,
    "runs.lifecycle": [*STOP, "tests/runs/test_damaged_records.py", "tests/train/test_launch.py"],
    "runs.sweep_runner": ["tests/runs/test_sweep_runner.py"],
    "config.sweep_config": ["tests/runs/test_sweep_runner.py"],
    "health.sweep_results": ["tests/health/test_sweep_results.py"],
    # Not the whole file: a mutant's process may have no children of its own.
    "data.dataset": [
        "tests/data/test_interrupted_build.py::test_a_run_continues_from_the_cache_if_its_source_is_missing",
        "tests/data/test_interrupted_build.py::test_without_a_source_every_shard_is_hashed_whatever_its_size",
        "tests/data/test_interrupted_build.py::test_a_cache_folder_of_another_kind_is_named",
    ],
    "train.attempt": [
        *cases("crash/test_damaged_checkpoint.py", "run_with_a_signed_but_bad_checkpoint_resumes_from_the_one_before"),
        "tests/train/test_resume_rules.py",
        "tests/train/test_resumed_run.py::test_a_run_resumes_without_its_source_if_the_cache_is_complete",
        "tests/train/test_halted_run.py::test_the_window_of_the_spike_rule_outlives_a_resume",
    ],
    "train.launcher": ["tests/train/test_multi_rank.py::test_the_rank_ended_by_a_signal_is_reported_before_later_failures"],
    "train.telemetry.event_log": ["tests/crash/test_full_disk.py", "tests/health/test_digest_checks.py"],
    "train.preflight.initial_loss": cases("train/test_preflight.py", "the_initial_loss_of_any_model_follows_from_its_head"),
    "runs.segment_digests": [
        "tests/health/test_status_edits.py",
        "tests/health/test_digest_checks.py",
        *cases("runs/test_scale.py", "each_byte_of_a_record_is_hashed_once"),
    ],
    "health.digest_checks": ["tests/health/test_digest_checks.py", "tests/health/test_status_edits.py"],
    "health.edited_config": ["tests/health/test_edited_config.py"],
    "train.telemetry.heartbeat": ["tests/train/test_telemetry.py"],
    "train.telemetry.tensorboard_writer": ["tests/crash/test_full_disk.py"],
    "train.telemetry.awake_clock": CLOCK,
    "train.telemetry.phases": [*CLOCK, "tests/train/test_telemetry.py"],
    "train.telemetry.system_metrics": ["tests/train/test_telemetry.py", *RUNS],
    "runs.csv_export": ["tests/runs/test_csv_export.py"],
    "train.validation": ["tests/train/test_validation_loss.py", *MASKED],
    "runs.history": [
        "tests/runs/test_history.py",
        *cases("report/test_consistent_numbers.py", "run_list_has_verdict_loss_speed_and_model"),
        *cases(
            "health/test_verdicts.py",
            "training_loss_is_a_mean_of_the_latest_readings",
            "number_of_latest_readings",
        ),
        "tests/health/test_sweep_results.py",
        "tests/health/test_attempts.py",
        "tests/train/test_validation_loss.py",
        "tests/runs/test_summary.py",
    ],
    "figures.blocks": cases("workbook/test_query_attention.py", "corrected_equation_nine_is_the_overlap"),
    "figures.architecture": cases(
        "workbook/test_query_attention.py",
        "mask_pairs_equal_the_formulas",
        "architecture_shows_the_number_of_keys",
    ),
    "workbook.display": ["tests/workbook/test_display.py"],
    "workbook.parameters": ["tests/workbook/test_parameters.py"],
    "runs.text_output": ["tests/runs/test_tables.py"],
    "workbook.speeds": cases("workbook/test_speeds.py", "nsa_must_be_faster_than_every_dense_baseline"),
}
SUITES |= OTHERS
# Long sequences prove parity, not logic; the mutants do without them.
QUICK = "not 1025 and not 2048 and not 65536 and not needle and not at_the_default_geometry"
