"""Random forms of the model against the brute force: branches, scorers, shared keys and values, options of the indexer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from looping import looped
from model_forms import LIMITS, compute_errors, compute_kernel_errors, make_form, make_kernel_form
from model_inputs import make_config, make_tokens
from torch import Tensor

from nsa_lab.attention import Span, reference
from nsa_lab.attention.kernels.decoding import decoding_table
from nsa_lab.attention.key_storage import encode_keys
from nsa_lab.config import ConfigError, ModelConfig, NSAConfig, RunConfig, yaml_text
from nsa_lab.inference import kv_cache_size
from nsa_lab.model import NSATransformer, SparseAttention

INDEXER = {"indexer_block": 2, "indexer_width": 6, "selection_loss": 0.1}
# Forms that are cheap to serve, in shapes that the kernels support.
LEAN_FORMS: dict[str, dict[str, Any]] = {
    "fp8, one key for all groups": {"indexer_dtype": "fp8", "indexer_keys": "shared", "indexer_heads": 2},
    "mxfp4, normalized before rotation": {"indexer_dtype": "mxfp4", "indexer_order": ("pool", "norm", "rotate")},
    "reuse over two layers": {"indexer_every": 2},
}


@pytest.mark.slow
@looped
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[pytest.mark.nightly] * (seed >= 30)) for seed in range(300)])
def test_random_forms_equal_the_brute_force(seed: int) -> None:
    """In float64: logits of two backends, decoding in chunks, packed documents, and gradients."""
    config = make_form(seed)
    for name, error in compute_errors(config).items():
        assert error <= LIMITS[name], f"{name}: {error}: {config}"


@pytest.mark.slow
def test_layers_use_the_blocks_of_the_latest_indexer() -> None:
    """Layers 0 and 2 of four select blocks: layer 3 uses those of layer 2, which differ from those of layer 0."""
    nsa = {"l": 4, "l_sel": 4, "local_blocks": 1}
    config = make_config(branches=["sel"], n_layers=4, indexer_every=2, nsa=nsa, **INDEXER)
    for name, error in compute_errors(config).items():
        assert error <= LIMITS[name], f"{name}: {error}"


def test_random_forms_cover_all_settings() -> None:
    """Every value of every setting occurs in the forms that `make test` compares, and combinations that differ in code."""
    forms = [make_form(seed) for seed in range(30)]
    assert len({form.branches for form in forms}) == 7
    assert {form.scores for form in forms} == {None, "compressed", "mean_key", "indexer"}
    indexers = [form for form in forms if form.has_indexer]
    for key, n_values in (("heads", 3), ("keys", 2), ("every", 3), ("dtype", 3)):
        assert len({getattr(form, f"indexer_{key}") for form in indexers}) == n_values, key
    assert len({form.indexer_order for form in indexers}) >= 5 and {form.shared_kv for form in forms} == {True, False}
    for key in ("sink_blocks", "local_blocks", "head_reduction", "block_reduction"):
        assert len({getattr(form.nsa, key) for form in forms if form.scores}) >= 2, key


@pytest.mark.slow
@looped
@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=[pytest.mark.nightly] * (i > 1)) for i, form in enumerate(LEAN_FORMS)]
)
def test_kernels_equal_torch_for_lean_forms(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and gradients of a full sequence, and single tokens that are decoded after it."""
    nsa = NSAConfig(l=16, d=16, l_sel=16, n_sel=3, sink_blocks=1, local_blocks=1)
    sizes = {"dim": 24, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 32, "d_v": 16, "vocab_size": 40}
    lean = {"branches": ("sel",), "indexer_block": 4, "indexer_width": 32, "selection_loss": 0.1, **LEAN_FORMS[form]}
    check_kernels(ModelConfig(**(sizes | lean), nsa=nsa), monkeypatch)


@pytest.mark.nightly
@looped
@pytest.mark.parametrize("seed", range(20))
def test_kernels_equal_torch_for_random_forms(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_kernels(make_kernel_form(seed), monkeypatch)


def check_kernels(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_table, "DECODING_PROGRAMS", 8)  # the interpreter runs programs sequentially
    for name, error in compute_kernel_errors(config).items():
        assert error <= 2e-4, f"{name}: {error}: {config}"


@looped
@pytest.mark.parametrize("scores", ["mean_key", "indexer"])
@pytest.mark.parametrize("matching_heads", [0, 1])
def test_a_dense_model_loads_and_computes_the_same_if_all_blocks_are_selected(scores: str, matching_heads: int) -> None:
    """With only the selected branch, names and shapes of the weights are those of a dense model, plus the indexer's."""
    indexer = INDEXER if scores == "indexer" else {}
    nsa: dict[str, Any] = {"scores": scores, "n_sel": 9, "sink_blocks": 0, "local_blocks": 1}
    config = make_config(branches=["sel"], matching_heads=matching_heads, nsa=nsa, **indexer)
    models = [
        NSATransformer(c, dtype=torch.float64, seed=seed).double().train()
        for seed, c in enumerate((make_config(attention="dense", matching_heads=matching_heads), config))
    ]
    dense, sparse = models
    missing, unexpected = sparse.load_state_dict(dense.state_dict(), strict=False)
    assert not unexpected and all(".indexer." in name for name in missing) and bool(missing) == bool(indexer)
    tokens, span = make_tokens(config, 61, batch=1), Span.packed(torch.tensor([0, 40, 61], dtype=torch.int32))
    for layout in (None, span):
        losses = [model(tokens, layout).square().mean() for model in models]
        torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
        for model, loss in zip(models, losses, strict=True):
            model.zero_grad()
            loss.backward()
        for name, parameter in dense.named_parameters():
            torch.testing.assert_close(sparse.get_parameter(name).grad, parameter.grad, rtol=1e-9, atol=1e-12)


def test_an_absent_branch_has_no_weights_flops_or_cache() -> None:
    full = NSATransformer(make_config(phi="mlp"), seed=0)
    for branches in (["sel", "win"], ["cmp", "sel"], ["win"]):
        scores = "mean_key" if "sel" in branches and "cmp" not in branches else None
        model = NSATransformer(make_config(phi="mlp", branches=branches, nsa={"scores": scores}), seed=0)
        c, layer = model.config, model.blocks[0].attention
        assert isinstance(layer, SparseAttention)
        n_branches = len(branches)
        assert layer.qkv.weight.shape[0] == c.n_heads * c.d_k + n_branches * c.n_kv_groups * (c.d_k + c.d_v)
        assert (layer.gate is None) == (n_branches == 1)
        assert (layer.phi_k is None) == (layer.phi_v is None) == ("cmp" not in branches)
        kernels_of_branches = {"cmp": "out_cmp", "sel": "out_sel", "win": "out_win"}
        observed = layer.observe(torch.zeros(1, 20, c.dim), model.prepare_inputs(make_tokens(c, 20))[1])
        assert {name for name in observed if name.startswith("out_")} == {kernels_of_branches[name] for name in branches}
        if "cmp" not in branches:  # its scores are more FLOPs than those of mean keys
            assert model.flops_per_token(1000)["nsa"] < full.flops_per_token(1000)["nsa"]
        for length in (1000, 8000):
            assert kv_cache_size.compute_sequence_bytes(c, length, 2) < kv_cache_size.compute_sequence_bytes(
                full.config, length, 2
            )


READ_FORMS: list[dict[str, Any]] = [
    {},
    {"branches": ["sel"], **INDEXER},
    {"branches": ["sel"], **INDEXER, "indexer_dtype": "fp8", "indexer_keys": "shared", "indexer_block": 1},
    {"branches": ["sel", "win"], **INDEXER, "indexer_dtype": "mxfp4", "indexer_heads": 2, "indexer_every": 2},
    {"branches": ["sel"], "nsa": {"scores": "mean_key", "local_blocks": 1}},
    {"branches": ["cmp", "sel", "win"], "shared_kv": True, "nsa": {"head_reduction": "max"}},
    {"branches": ["cmp", "win"]},
]


@looped
@pytest.mark.parametrize("number", range(len(READ_FORMS)))
def test_plan_counts_the_bytes_that_the_definition_reads(number: int) -> None:
    """A row of a cache is read if the output of the last token, or a score of its blocks, depends on it."""
    config = make_config(**READ_FORMS[number])
    model = NSATransformer(config, backend="reference", dtype=torch.float64, seed=0).double()
    for length in (1, 7, 40, 61):
        tokens, n_bytes = make_tokens(config, length, batch=1), 0
        x, rotary = model.prepare_inputs(tokens)
        for index in range(config.n_layers):
            layer = model.blocks[index].attention
            assert isinstance(layer, SparseAttention)
            n_bytes += count_read_bytes(
                layer, x, rotary, has_scores=config.scores is not None and index % config.indexer_every == 0
            )
        assert kv_cache_size.compute_read_bytes(config, length, 8) == n_bytes


@looped
@pytest.mark.parametrize("number", range(len(READ_FORMS)))
def test_flops_are_those_of_the_keys_of_every_query(number: int) -> None:
    """Counted in a loop over queries: keys of the branches that exist, and keys that select blocks in some layers."""
    config, length = make_config(**READ_FORMS[number]), 61
    model, c = NSATransformer(config, seed=0), config.nsa
    n_weights = sum(x.numel() for name, x in model.named_parameters() if "embedding" not in name)
    n_keys, n_index_keys = 0, 0
    for t in range(length):
        n_ended = max(0, (t + 1 - c.l) // c.d + 1)
        n_earlier_blocks = min(c.n_sel - 1, t // c.l_sel)
        n_read = {"cmp": n_ended, "sel": n_earlier_blocks * c.l_sel + t % c.l_sel + 1, "win": min(c.w, t + 1)}
        n_keys += sum(n_read[branch] for branch in config.branches)
        n_index_keys += (t + 1) // (config.indexer_block or c.l_sel)
    expected = 3 * 2 * (n_weights + config.n_layers * config.n_heads * (config.d_k + config.d_v) * n_keys / length)
    widths = {"mean_key": config.n_heads * config.d_k, "indexer": config.n_index_queries * config.index_width}
    n_scoring = len(range(0, config.n_layers, config.indexer_every))
    expected += n_scoring * 2 * widths.get(str(config.scores), 0) * n_index_keys / length
    assert model.flops_per_token(length)["nsa"] == pytest.approx(expected)


def count_read_bytes(layer: SparseAttention, x: Tensor, rotary: tuple[Tensor, Tensor], has_scores: bool) -> int:
    """Return the bytes that the last token of x reads, by the gradients of the definition."""
    c, span = layer.config, Span.chunk(x.shape[1] - 1, 1)
    with torch.no_grad():
        q, *keys_and_values, gates = layer.project(x, rotary)
    leaves = [y if y is None else y.clone().requires_grad_() for y in keys_and_values]
    blocks, index_bytes = None, 0
    if has_scores and c.scores != "compressed":
        with torch.no_grad():
            index_q, k, nsa = layer.project_selection_inputs(x, (q, *keys_and_values, gates), rotary)
        # A key of all groups is stored once.
        k = k[:, :, : c.index_groups if c.has_indexer else None].clone().requires_grad_()
        expanded = k.expand(-1, -1, c.n_kv_groups, -1)
        lse = reference.compressed_attention(index_q[:, -1:], expanded, expanded, nsa, span=span)[1]
        importance = reference.block_importance(index_q[:, -1:], expanded, lse, nsa, span=span)
        if k.shape[1]:
            weight = torch.rand(lse.shape, generator=torch.Generator().manual_seed(0), dtype=lse.dtype)
            stored = encode_keys(k.detach(), c.indexer_dtype)
            read = torch.autograd.grad((lse.nan_to_num(neginf=0) * weight).sum(), k)[0]
            index_bytes = count_rows(read) * stored[0, 0, 0].nbytes
        blocks = reference.select_by_importance(importance.detach(), c.nsa, x.shape[1] - 1)
    elif c.scores == "indexer":  # the blocks of an earlier layer, of which there are as many
        blocks = reference.select_by_importance(
            q.new_zeros(1, 1, c.n_kv_groups, span.num_selection(c.nsa)), c.nsa, x.shape[1] - 1
        )
    gates = None if gates is None else gates[:, -1:]
    out = reference.nsa_attention(q[:, -1:], *leaves, gates, c.nsa, blocks=blocks, span=span)
    used = [y for y in leaves if y is not None]
    weight = torch.rand(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    values = torch.autograd.grad((out * weight).sum(), used)[1::2]
    # A key is read with its value. (The gradient of a key is 0 if a query attends to no other.)
    rows = [count_rows(gradient) for gradient in values]
    return index_bytes + sum(n * (c.d_k + c.d_v) * 8 for n in rows)


def count_rows(gradient: Tensor) -> int:
    """Return the number of rows [B, N, G] of a gradient that are not zero."""
    return int(gradient.any(-1).sum())


def test_reused_blocks_pass_through_gradient_checkpointing() -> None:
    """The blocks of the first layer are an output of its checkpoint and an input of the second."""
    config = make_config(branches=["sel", "win"], indexer_every=2, **INDEXER)
    tokens, results = make_tokens(config, 61), []
    for checkpointing in (False, True):
        model = NSATransformer(config, seed=0).double().train()
        model.gradient_checkpointing = checkpointing
        (model(tokens).square().mean() + model.auxiliary_loss()).backward()
        results.append([p.grad for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


SELECTED = {"branches": ["sel"], "indexer_block": 4, "selection_loss": 0.1}


@looped
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"branches": ["win", "sel"]}, r"in the order cmp, sel, win; use \['sel', 'win'\]"),
        ({"branches": []}, r"at least one branch, .* use \['cmp', 'sel', 'win'\]"),
        (
            {"branches": ["sel"]},
            r"nsa.scores = compressed \(the default\) selects .*; set nsa.scores: mean_key, or an indexer",
        ),
        (
            {"branches": ["sel"], "nsa": NSAConfig(scores="compressed")},
            "nsa.scores = compressed selects blocks by the branch cmp",
        ),
        ({"nsa": NSAConfig(scores="indexer")}, "there is no indexer; set model.indexer_block: 4"),
        ({**SELECTED, "nsa": NSAConfig(scores="mean_key")}, "the indexer would not be used; set nsa.scores: indexer"),
        ({**SELECTED, "branches": ["cmp", "win"]}, "model.indexer_block = 4: it selects blocks for the branch sel"),
        (
            {"branches": ["win"], "nsa": {"scores": "mean_key"}},
            "nsa.scores = mean_key: it selects blocks for the branch sel",
        ),
        ({"branches": ["win"], "selection_loss": 0.1}, "model.selection_loss = 0.1: it selects .*; remove it, or add sel"),
        (
            {"branches": ["cmp", "sel"], "silent": ["win"]},
            "win is not in model.branches = .*; a branch that does not exist",
        ),
        ({"branches": ["cmp", "sel"], "silent": ["cmp", "sel"]}, "name each branch once, and not all of cmp, sel"),
        ({**SELECTED, "indexer_order": ["rotate"]}, r"expected rotate and pool, each once, .*; use \[rotate, pool\]"),
        ({**SELECTED, "indexer_order": ["pool", "norm", "pool", "rotate"]}, "expected rotate and pool, each once"),
        (
            {**SELECTED, "indexer_dtype": "mxfp4", "d_k": 48},
            "a width of 48; use an even width below 32, or a multiple of it",
        ),
        ({**SELECTED, "indexer_every": 13}, "expected at most the number of layers; use model.indexer_every = 12"),
        ({"indexer_keys": "shared"}, "model.indexer_keys = shared is not used without model.indexer_block"),
        ({"nsa": {"n_sel": 4, "local_blocks": 9}}, r"nsa.n_sel = 4 is too small .* use nsa.n_sel >= 10"),
    ],
)
def test_invalid_forms_raise(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ModelConfig(**wrong)


def test_every_form_is_written_to_a_file_and_read_again() -> None:
    """Defaults are not written, so configurations without these settings keep their text and hash."""
    for seed in range(30):
        config = RunConfig(name="form", model=make_form(seed))
        again = RunConfig.from_dict(yaml_text.parse(config.to_yaml()))
        assert again == config and again.hash() == config.hash()
    assert not {"branches", "shared_kv", "indexer_keys"} & RunConfig().to_dict()["model"].keys()
    assert not {"sink_blocks", "local_blocks", "scores"} & RunConfig().to_dict()["nsa"].keys()
