"""Ablations: the unmodified forward pass equals the model; modified ones equal plain loops and the definition."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from looping import looped
from torch import Tensor

from nsa_lab.attention import geometry, reference
from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.evaluate import (
    ABLATIONS,
    block_selectors,
    compute_block_mass,
    forward_with_ablation,
    list_ablations,
    measure_selection_quality,
    run_ablations,
)
from nsa_lab.model import Block, NSATransformer, SparseAttention, get_rotary_table

NSA = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=11)
LENGTH = 101


def make_model(nsa: NSAConfig = NSA, **changes: Any) -> NSATransformer:
    sizes = {"dim": 24, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 6, "d_v": 5, "nsa": nsa}
    input_layers = {"embedding_norm": True, "ngrams": 3, "ngram_rows": 50, "ngram_width": 4}
    return NSATransformer(ModelConfig(**{**sizes, **input_layers, **changes}), seed=3, backend="torch").double().eval()


INDEXER = {"indexer_block": 4, "selection_loss": 0.05}
MEAN_KEY = {"nsa": NSA.model_copy(update={"scores": "mean_key"})}
# Sets of branches, other scores, and blocks that several layers share.
VARIANTS: dict[str, dict[str, Any]] = {
    "cmp sel win": {},
    "shared keys": {"shared_kv": True},
    "indexer": INDEXER,
    "indexer in every second layer": {**INDEXER, "n_layers": 3, "indexer_every": 2},
    "cmp sel": {"branches": ("cmp", "sel")},
    "cmp win": {"branches": ("cmp", "win")},
    "sel win by mean keys": {"branches": ("sel", "win"), **MEAN_KEY},
    "sel win by an indexer": {"branches": ("sel", "win"), **INDEXER, "indexer_every": 2},
    "sel": {"branches": ("sel",), **MEAN_KEY},
    "cmp": {"branches": ("cmp",)},
    "win": {"branches": ("win",)},
}


def make_tokens(length: int = LENGTH, rows: int = 2) -> Tensor:
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(1))


def make_queries_and_keys(length: int = LENGTH, groups: int = 2, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, length, 4, 6, generator=generator, dtype=torch.float64)
    return 3 * q, torch.randn(2, length, groups, 6, generator=generator, dtype=torch.float64)


def compute_mass_by_loops(q: Tensor, k: Tensor, nsa: NSAConfig) -> Tensor:
    B, T, H, D = q.shape
    G = k.shape[2]
    mass = torch.zeros(B, T, G, -(-T // nsa.l_sel), dtype=torch.float64)
    for b in range(B):
        for t in range(T):
            for head in range(H):
                group = head // (H // G)
                p = (k[b, : t + 1, group] @ q[b, t, head] * D**-0.5).softmax(0).tolist()
                for s, share in enumerate(p):
                    mass[b, t, group, s // nsa.l_sel] += share
    return mass


def select_oracle_by_loops(mass: Tensor, t: int, nsa: NSAConfig) -> list[int]:
    own = t // nsa.l_sel
    forced = {block for block in (0, own - 1, own) if block >= 0}
    rest = sorted(
        (block for block in range(own + 1) if block not in forced), key=lambda block: (-mass[block].item(), block)
    )
    return sorted(forced | set(rest[: nsa.n_sel - len(forced)]))


@pytest.mark.parametrize("rows", [1, 1 << 25])
def test_mass_and_oracle_equal_plain_loops(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(block_selectors, "MAX_SCORE_ELEMENTS", 7 * 2 * 4 * 53 if rows == 1 else rows)
    q, k = make_queries_and_keys(53)
    expected = compute_mass_by_loops(q, k, NSA)
    found = compute_block_mass(q, k, NSA)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.sum(-1), torch.full(found.shape[:3], 2.0), rtol=1e-5, atol=0)
    blocks = block_selectors.select_oracle_blocks(q, k, NSA)
    for b in range(2):
        for t in range(53):
            for g in range(2):
                assert [j for j in blocks[b, t, g].tolist() if j >= 0] == select_oracle_by_loops(expected[b, t, g], t, NSA)


def test_nearest_blocks_are_the_latest_and_the_first() -> None:
    q, _ = make_queries_and_keys()
    blocks = block_selectors.select_nearest_blocks(q, 2, NSA)
    for t in range(LENGTH):
        own = t // NSA.l_sel
        assert [j for j in blocks[0, t, 1].tolist() if j >= 0] == sorted({0, *range(max(own - 2, 0), own + 1)})


def test_random_blocks_are_valid_and_depend_on_the_seed() -> None:
    q, _ = make_queries_and_keys()
    first, again, other = (
        block_selectors.select_random_blocks(q, 2, NSA, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
    t = torch.arange(LENGTH)
    for blocks in (first, other):
        selected = torch.zeros(2, LENGTH, 2, geometry.num_selection(LENGTH, NSA) + 1, dtype=torch.long)
        selected.scatter_add_(
            -1, torch.where(blocks < 0, selected.shape[-1] - 1, blocks).long(), torch.ones_like(blocks).long()
        )
        selected = selected[..., :-1]
        assert selected.max() == 1 and not (selected.bool() & ~geometry.candidate_blocks(t, 13, NSA)[:, None]).any()
        forced = geometry.forced_blocks(t, 13, NSA) & geometry.candidate_blocks(t, 13, NSA)
        assert selected.bool()[:, forced.nonzero()[:, 0], :, forced.nonzero()[:, 1]].all()
        assert torch.equal(selected.sum(-1), (t // NSA.l_sel + 1).clamp_max(NSA.n_sel)[None, :, None].expand(2, -1, 2))
    free = first[:, 60:] != block_selectors.select_nearest_blocks(q, 2, NSA)[:, 60:]
    assert free.any()


@looped
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_ablation_equals_the_model(variant: str) -> None:
    model, tokens = make_model(**VARIANTS[variant]), make_tokens()
    assert torch.equal(forward_with_ablation(model, tokens, ABLATIONS["chosen"]), model(tokens))


@pytest.mark.slow
@looped
@pytest.mark.parametrize("variant", VARIANTS)
def test_ablations_apply_to_branches_that_exist(variant: str) -> None:
    """Each that applies changes the logits; any other is refused, by name too."""
    model, tokens = make_model(**VARIANTS[variant]), make_tokens()
    branches = model.config.branches
    selections = ["random", "nearest", "oracle", "twice", "all"] if "sel" in branches else []
    expected = ["chosen", *selections, *(f"no_{branch}" for branch in branches)]
    assert list_ablations(model.config) == expected
    logits = model(tokens)
    for name, ablation in ABLATIONS.items():
        if name in expected:
            changed = (forward_with_ablation(model, tokens, ablation) - logits).abs().max()
            assert name == "chosen" or changed > 1e-6, name
            continue
        message = "expected a branch of the model" if ablation.disabled_branch else "has no selected branch"
        with pytest.raises(ValueError, match=message):
            forward_with_ablation(model, tokens, ablation)
        with pytest.raises(ValueError, match=message):
            run_ablations(model, tokens, torch.tensor([[[40]]]).expand(2, 1, 1), names=[name])
    results = run_ablations(model, tokens, torch.tensor([[[40]]]).expand(2, 1, 1))
    assert [result.name for result in results] == expected


@looped
@pytest.mark.parametrize("branches", [("cmp", "win"), ("sel", "win"), ("cmp", "sel"), ("win",), ("sel",)])
def test_disabled_branch_of_any_set_equals_a_gate_of_zero(branches: tuple[str, ...]) -> None:
    """One layer: its output without a branch is the gated sum of the others, and 0 without the only one."""
    needs_scores = "sel" in branches and "cmp" not in branches
    model = make_model(n_layers=1, branches=branches, **(MEAN_KEY if needs_scores else {}))
    tokens = make_tokens()
    block = cast(Block, model.blocks[0])
    layer = cast(SparseAttention, block.attention)
    x, rotary = model.prepare_inputs(tokens)
    observed = layer.observe(block.attention_norm(x), rotary)
    for disabled in branches:
        combined = torch.zeros(2, LENGTH, 4, 5, dtype=torch.float64)
        for column, branch in enumerate(branches):
            if branch != disabled:
                combined += observed["gates"][..., column : column + 1] * observed[f"out_{branch}"]
        after = x + layer.out(combined.flatten(2))
        expected = model.head(model.norm(after + block.mlp(block.mlp_norm(after))))
        logits = forward_with_ablation(model, tokens, ABLATIONS[f"no_{disabled}"])
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)


def test_all_blocks_equals_selecting_every_block() -> None:
    few, every = make_model(), make_model(NSA.model_copy(update={"n_sel": 13}))
    every.load_state_dict(few.state_dict())
    found = forward_with_ablation(few, make_tokens(), ABLATIONS["all"])
    torch.testing.assert_close(found, every(make_tokens()), rtol=1e-9, atol=1e-9)
    assert (found - few(make_tokens())).abs().max() > 1e-6


@looped
@pytest.mark.parametrize("variant", [name for name in VARIANTS if "sel" in name or "indexer" in name])
def test_twice_equals_a_model_with_twice_n_sel(variant: str) -> None:
    """Blocks with the highest scores: of the compressed branch, of mean keys, of indexers that several layers share."""
    options = {"nsa": NSA, **VARIANTS[variant]}
    doubled = options["nsa"].model_copy(update={"n_sel": 2 * NSA.n_sel})
    model, expected_model = make_model(**options), make_model(**{**options, "nsa": doubled})
    expected_model.load_state_dict(model.state_dict())
    logits = forward_with_ablation(model, make_tokens(), ABLATIONS["twice"])
    torch.testing.assert_close(logits, expected_model(make_tokens()), rtol=1e-9, atol=1e-9)
    assert (logits - model(make_tokens())).abs().max() > 1e-6


@pytest.mark.slow
@looped
@pytest.mark.parametrize("name", ["random", "nearest", "oracle", "no_cmp", "no_sel", "no_win"])
def test_ablation_equals_the_definition(name: str) -> None:
    """One layer, assembled from the functions of the reference."""
    model, tokens, ablation = make_model(n_layers=1), make_tokens(), ABLATIONS[name]
    block = cast(Block, model.blocks[0])
    layer = cast(SparseAttention, block.attention)
    x = model.embed(tokens)
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = layer.project(
        block.attention_norm(x), get_rotary_table(LENGTH, 6, 10000.0, tokens.device)
    )
    out_cmp, lse = reference.compressed_attention(q, k_cmp, v_cmp, NSA)
    select = {
        "random": lambda: block_selectors.select_random_blocks(q, 2, NSA, torch.Generator().manual_seed(7)),
        "nearest": lambda: block_selectors.select_nearest_blocks(q, 2, NSA),
        "oracle": lambda: reference.select_by_importance(compute_mass_by_loops(q, k_sel, NSA).float(), NSA),
    }.get(name, lambda: reference.select_blocks(q, k_cmp, lse, NSA))
    blocks = select()
    out_sel, _ = reference.selected_attention(q, k_sel, v_sel, blocks, NSA)
    out_win, _ = reference.window_attention(q, k_win, v_win, NSA)
    branch_weights = [float(ablation.disabled_branch != branch) for branch in ("cmp", "sel", "win")]
    combined = sum(gates[..., i : i + 1] * out * branch_weights[i] for i, out in enumerate((out_cmp, out_sel, out_win)))
    x = x + layer.out(cast(Tensor, combined).flatten(2))
    expected = model.head(model.norm(x + block.mlp(block.mlp_norm(x))))
    logits = forward_with_ablation(model, tokens, ablation, seed=7)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    assert (logits - model(tokens)).abs().max() > 1e-6


def test_ablations_have_no_effect_if_all_blocks_are_selected() -> None:
    model, tokens = make_model(), make_tokens(NSA.n_sel * NSA.l_sel)
    for name in ("random", "nearest", "oracle", "twice", "all"):
        found = forward_with_ablation(model, tokens, ABLATIONS[name])
        torch.testing.assert_close(found, model(tokens), rtol=1e-9, atol=1e-9)
    assert measure_selection_quality(model, tokens) is None


def test_results_are_differences_from_the_unmodified_model() -> None:
    model, tokens = make_model(), make_tokens(rows=3)
    answer_positions = torch.tensor([[40, 41], [99, 100]]).expand(3, 2, 2)
    for place in (40, 41):  # causal: the first answer token stays the most likely
        tokens[0, place] = model(tokens)[0, place - 1].argmax(-1)
    tokens[1, 40] = model(tokens)[1, 39].argmax(-1)  # one correct token of two is not a correct answer
    results = run_ablations(model, tokens, answer_positions, batch_size=2)
    assert [result.name for result in results] == list(ABLATIONS)
    logits = model(tokens[:, :-1])
    losses = torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
    answers = torch.zeros_like(losses, dtype=torch.bool)
    answers[:, [39, 40, 98, 99]] = True
    tokens_right = (logits.argmax(-1) == tokens[:, 1:])[:, [39, 40, 98, 99]].view(3, 2, 2)
    is_correct = tokens_right.all(-1)
    assert tokens_right.any(-1)[1].tolist() == [True, False] and not is_correct[1].any()
    base = results[0]
    assert base.loss == pytest.approx(losses[~answers].mean().item(), rel=1e-5)
    assert base.answer_loss == pytest.approx(losses[answers].mean().item(), rel=1e-5)
    assert base.accuracy == pytest.approx(is_correct.float().mean().item())
    assert base.right == is_correct.float().mean(1).tolist() and 0 < base.accuracy < 1
    assert (base.d_loss, base.d_answer_loss, base.d_accuracy) == (0.0, 0.0, 0.0)
    for result in results[1:]:
        assert result.d_loss == result.loss - base.loss and result.d_answer_loss == result.answer_loss - base.answer_loss


def test_random_blocks_differ_per_sequence_at_any_batch_size() -> None:
    model, tokens = make_model(), make_tokens(rows=1)
    places = torch.tensor([[[40, 41]]])
    once, twice = (
        run_ablations(model, tokens.repeat(n, 1), places.repeat(n, 1, 1), names=("random", "nearest"), batch_size=1)
        for n in (1, 2)
    )
    assert twice[2].loss == pytest.approx(once[2].loss, abs=1e-9), "the nearest blocks are equal in both"
    assert abs(twice[1].loss - once[1].loss) > 1e-9, "both sequences got the same random blocks"


@pytest.mark.parametrize("stride", [1, 3])
def test_selection_quality_is_a_fraction_of_the_oracle_mass(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all queries, or over every third chunk of seven queries of a text that is too long."""
    monkeypatch.setattr(block_selectors, "MAX_SCORE_ELEMENTS", 7 * 4 * LENGTH)
    monkeypatch.setattr(block_selectors, "MAX_QUALITY_QUERIES", -(-LENGTH // stride))
    model, tokens = make_model(n_layers=1), make_tokens(rows=1)
    quality = measure_selection_quality(model, tokens, seed=2)
    assert quality is not None
    block = cast(Block, model.blocks[0])
    layer = cast(SparseAttention, block.attention)
    x, rotary = model.embed(tokens), get_rotary_table(LENGTH, 6, 10000.0, tokens.device)
    inputs = layer.project(block.attention_norm(x), rotary)
    mass = compute_mass_by_loops(inputs[0], inputs[3], NSA)[0]
    _, lse = reference.compressed_attention(*inputs[:3], NSA)
    selected = reference.select_blocks(inputs[0], inputs[1], lse, NSA)[0]
    covered = oracle = forced = 0.0
    for t in range(NSA.n_sel * NSA.l_sel, LENGTH):
        if ((LENGTH - 1) // 7 - t // 7) % stride:
            continue
        for g in range(2):
            covered += sum(mass[t, g, j].item() for j in selected[t, g].tolist())
            oracle += sum(mass[t, g, j].item() for j in select_oracle_by_loops(mass[t, g], t, NSA))
            forced += sum(mass[t, g, j].item() for j in {0, t // NSA.l_sel - 1, t // NSA.l_sel})
    assert quality["chosen"] == [pytest.approx(covered / oracle, rel=1e-4)]
    assert quality["chosen_free"] == [pytest.approx((covered - forced) / (oracle - forced), rel=1e-4)]
    assert all(0 <= quality[name][0] <= 1 + 1e-6 for name in quality)


@looped
@pytest.mark.parametrize("variant", VARIANTS)
def test_selection_quality_measures_the_blocks_of_the_model(variant: str) -> None:
    """Also of layers that use the blocks of an earlier one. A model without a selected branch is refused."""
    model, tokens = make_model(**VARIANTS[variant]), make_tokens(rows=1)
    if "sel" not in model.config.branches:
        with pytest.raises(ValueError, match="has no selected branch"):
            measure_selection_quality(model, tokens)
        return
    quality, observed = measure_selection_quality(model, tokens), model.observe(tokens)
    assert quality is not None and len(quality["chosen"]) == len(observed) == model.config.n_layers
    x, rotary = model.prepare_inputs(tokens)
    selected: Tensor | None = None
    for number, block in enumerate(cast("list[Block]", model.blocks)):
        layer = cast(SparseAttention, block.attention)
        q, _, _, k_sel, *_ = layer.project(block.attention_norm(x), rotary)
        mass = compute_block_mass(q, k_sel, NSA)
        chosen, oracle = (
            (mass.gather(-1, blocks.long().clamp_min(0)) * (blocks >= 0))[:, NSA.n_sel * NSA.l_sel :].double().sum().item()
            for blocks in (observed[number]["blocks"], block_selectors.select_oracle_blocks(q, k_sel, NSA))
        )
        assert quality["chosen"][number] == pytest.approx(chosen / oracle, rel=1e-6), number
        x, selection = block(x, rotary, blocks=None if layer.indexer or not model.config.has_indexer else selected)
        selected = selection.blocks


def test_dense_model_is_rejected() -> None:
    model = make_model(attention="dense")
    with pytest.raises(ValueError, match=r"model\.attention: nsa"):
        forward_with_ablation(model, make_tokens(), ABLATIONS["chosen"])
    with pytest.raises(ValueError, match=r"model\.attention: nsa"):
        measure_selection_quality(model, make_tokens())
    with pytest.raises(ValueError, match=r"model\.attention: nsa"):
        run_ablations(model, make_tokens(), torch.tensor([[[40]]]).expand(2, 1, 1))


def test_ablations_match_their_names() -> None:
    disabled = {name: ablation.disabled_branch for name, ablation in ABLATIONS.items() if ablation.disabled_branch}
    assert disabled == {"no_cmp": "cmp", "no_sel": "sel", "no_win": "win"}
    selections = {name: ablation.selection for name, ablation in ABLATIONS.items() if name not in disabled}
    assert selections == {name: "chosen" if name == "twice" else name for name in selections}


def test_random_ablation_depends_on_the_seed() -> None:
    model, tokens, places = make_model(), make_tokens(rows=1), torch.tensor([[[40, 41]]])
    first, again, other = (run_ablations(model, tokens, places, names=("random",), seed=seed)[1].loss for seed in (5, 5, 6))
    assert first == again != other


@pytest.mark.parametrize("at_once", [1, 1 << 25])
def test_selection_quality_of_every_layer_at_any_chunk_size(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(block_selectors, "MAX_SCORE_ELEMENTS", 7 * 4 * LENGTH if at_once == 1 else at_once)
    model, tokens, first = make_model(), make_tokens(rows=1), NSA.n_sel * NSA.l_sel
    quality = measure_selection_quality(model, tokens, seed=2)
    assert quality is not None
    x, rotary = model.prepare_inputs(tokens)
    generator = torch.Generator().manual_seed(2)
    for number, block in enumerate(cast("list[Block]", model.blocks)):
        layer = cast(SparseAttention, block.attention)
        normalized = block.attention_norm(x)
        inputs = layer.project(normalized, rotary)
        q, k_sel = inputs[0], inputs[3]
        mass = compute_block_mass(q, k_sel, NSA)
        selections = {
            "chosen": block_selectors.select_model_blocks(
                layer.project_selection_inputs(normalized, inputs, rotary), layer
            ),
            "nearest": block_selectors.select_nearest_blocks(q, 2, NSA),
            "random": block_selectors.select_random_blocks(q, 2, NSA, generator),
        }
        oracle = (
            mass.gather(-1, block_selectors.select_oracle_blocks(q, k_sel, NSA).long().clamp_min(0))[:, first:].sum().item()
        )
        for name, blocks in selections.items():
            covered = mass.gather(-1, blocks.long().clamp_min(0))[:, first:].sum().item()
            assert quality[name][number] == pytest.approx(covered / oracle, rel=1e-4), (name, number)
        x, _ = block(x, rotary)
