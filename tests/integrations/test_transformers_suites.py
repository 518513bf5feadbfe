"""The test classes of `transformers` pass, except for the tests listed here with their reasons.

Their source is not in the wheel. Give a test tree of the installed version, the folder that contains `tests/`:
`pytest tests/integrations -m nightly --transformers-tests=FOLDER`. `make integrations` fetches it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from fnmatch import fnmatch
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[2]

# Tests that fail, and why. One that passes must leave the list.
_SWITCH = "expects modules of class GradientCheckpointingLayer; here NSATransformer has a switch that recomputes its blocks"
_COPIES = "with padding, hidden states are copies in the order of the mask; without it they have gradients (test_hf.py)"
EXPECTED_FAILURES = {
    "test_gradient_checkpointing_enable_disable": _SWITCH,
    "test_training_gradient_checkpointing": _SWITCH,
    "test_training_gradient_checkpointing_use_reentrant_false": _SWITCH,
    "test_training_gradient_checkpointing_use_reentrant_true": _SWITCH,
    "test_retain_grad_hidden_states_attentions": _COPIES,
}
# Tests that `transformers` skips for this model: the reason, and patterns of their names. One that passes must leave it.
SKIPS = {
    "attention weights are not an output, because no kernel computes their matrix": (
        "test_attention_outputs",
        "test_multimodal_outputs_are_returned",
        "test_custom_4d_attention_mask",
        "test_eager_matches_sdpa_inference_*",
        "test_eager_padding_matches_padding_free_with_position_ids",
        "test_sdpa_padding_matches_padding_free_with_position_ids",
        "test_sliding_window_mask",
    ),
    "the kernels are those of nsa_lab, not sdpa, grouped_mm or an implementation that can be replaced": (
        "test_sdpa_can_dispatch_*",
        "test_can_set_attention_dynamically*",
        "test_attn_implementation_composite_models",
        "test_eager_matches_batched_and_grouped_inference_*",
    ),
    "the cache is an NSALabCache, which grows with the text; its steps are not captured as one graph of fixed size": (
        "test_bc_cache_name_forward",
        "test_generate_compilation_all_outputs",
        "test_generate_*with_static_cache",
        "test_generate_with_quant_cache",
        "test_generate_compile_model_forward_fullgraph",
        "test_static_cache_no_recompile_with_smaller_length",
    ),
    "the vocabulary is part of the architecture": ("test_resize_embeddings_untied*", "test_resize_tokens_embeddings*"),
    "positions are RoPE without scaling, inside NSATransformer": (
        "test_model_rope_*",
        "test_vision_axial_rope",
        "test_resize_position_vector_embeddings",
    ),
    "hidden states are returned by the model, not captured by a decorator of transformers": (
        "test_capture_outputs_decorator",
        "test_can_capture_specific_layers_hidden_states",
    ),
    "compares with torch.nn.init, and initial weights come from a generator; test_hf_saving.py tests missing weights": (
        "test_can_init_all_missing_weights",
    ),
    "all weights have one dtype": ("test_keep_in_fp32_modules*",),
    "weights have one name, so no conversion of names": (
        "test_can_load_from_already_mapped_keys",
        "test_reverse_loading_mapping",
    ),
    "a decoder without experts, recurrence, encoder, sub-configurations, MTP or a plan for tensor parallelism": (
        "test_moe_models_record_router_logits",
        "test_output_router_logits_from_config",
        "test_recurrent_layers_mask_padding_on_continued_forward",
        "test_encoder_decoder_loss_no_double_shift",
        "test_internal_model_config_and_subconfig_are_same",
        "test_generate_with_mtp",
        "test_tp_plan_matches_params",
    ),
}
# The message of a test that needs a device, package or setting that is absent here. Elsewhere it may run, and must pass.
UNAVAILABLE = r"test requires |test is slow"
MIN_PASSED = 90  # so that a tree without these classes does not pass


def test_suites_pass_except_what_is_listed(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    tree = request.config.getoption("--transformers-tests")
    if tree is None:
        pytest.skip("no test tree of transformers: give --transformers-tests=FOLDER, the folder that contains tests/")
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'nsa-lab[integrations]'")
    pytest.importorskip("parameterized", reason="parameterized is not installed: pip install 'nsa-lab[integrations]'")
    results = tmp_path / "results.xml"
    suite = Path(__file__).with_name("transformers_suite.py")
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", str(suite), "-q", "--noconftest"]
    command += ["--import-mode=importlib", "-p", "no:cacheprovider", f"--junitxml={results}"]
    environment = {"PYTHONPATH": f"{Path(tree).resolve()}:{ROOT}", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PATH": "", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=3000)
    assert results.exists(), done.stdout[-2000:] + done.stderr[-2000:]
    failures, skipped, passed = dict[str, str](), dict[str, str](), set[str]()
    for case in ET.parse(results).iter("testcase"):
        name = case.get("name", "").split(" ")[0]
        problem, skip = case.find("failure"), case.find("skipped")
        problem = case.find("error") if problem is None else problem
        if problem is not None:
            failures[name] = problem.get("message", "")
        elif skip is not None:
            skipped[name] = skip.get("message", "")
        else:
            passed.add(name)
    listed = {pattern: {name for name in skipped if fnmatch(name, pattern)} for pattern in sum(SKIPS.values(), ())}
    absent = {name for name in skipped if re.match(UNAVAILABLE, skipped[name])}
    print(
        f"{len(passed)} passed, {len(failures)} failed as listed, {len(skipped) - len(absent)} skipped as listed, "
        f"{len(absent)} skipped without their device, package or setting"
    )
    assert failures.keys() == EXPECTED_FAILURES.keys(), {
        name: failures.get(name, "passed") for name in failures.keys() ^ EXPECTED_FAILURES.keys()
    }
    unlisted = skipped.keys() - absent - set().union(*listed.values())
    assert not unlisted, {name: skipped[name] for name in unlisted}
    no_longer_skipped = {name for name in passed for pattern in listed if fnmatch(name, pattern)}
    assert not no_longer_skipped and all(listed.values()), [pattern for pattern in listed if not listed[pattern]]
    assert len(passed) >= MIN_PASSED
