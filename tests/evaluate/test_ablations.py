"""The forward pass with changes: unchanged it is the model's; changed, it is what plain loops say."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

from nsa_lab.attention import geometry, reference
from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.evaluate import ABLATIONS, compute_block_mass, forward_with_ablation, measure_selection_quality, run_ablations
from nsa_lab.evaluate import block_selectors as made
from nsa_lab.model import Block, NSATransformer, SparseAttention, get_rotary_table

NSA = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=11)
LENGTH = 101


def make_model(nsa: NSAConfig = NSA, **changes: object) -> NSATransformer:
    sizes = {"dim": 24, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 6, "d_v": 5, "nsa": nsa}
    enters = {"embedding_norm": True, "ngrams": 3, "ngram_rows": 50, "ngram_width": 4}
    return NSATransformer(ModelConfig(**{**sizes, **enters, **changes}), seed=3, backend="torch").double().eval()


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
def test_mass_and_oracle_are_those_of_plain_loops(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(made, "MAX_SCORE_ELEMENTS", 7 * 2 * 4 * 53 if rows == 1 else rows)
    q, k = make_queries_and_keys(53)
    expected = compute_mass_by_loops(q, k, NSA)
    found = compute_block_mass(q, k, NSA)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.sum(-1), torch.full(found.shape[:3], 2.0), rtol=1e-5, atol=0)
    blocks = made.select_oracle_blocks(q, k, NSA)
    for b in range(2):
        for t in range(53):
            for g in range(2):
                assert [j for j in blocks[b, t, g].tolist() if j >= 0] == select_oracle_by_loops(expected[b, t, g], t, NSA)


def test_the_nearest_are_the_latest_and_the_first() -> None:
    q, _ = make_queries_and_keys()
    blocks = made.select_nearest_blocks(q, 2, NSA)
    for t in range(LENGTH):
        own = t // NSA.l_sel
        assert [j for j in blocks[0, t, 1].tolist() if j >= 0] == sorted({0, *range(max(own - 2, 0), own + 1)})


def test_random_blocks_are_legal_and_a_function_of_the_seed() -> None:
    q, _ = make_queries_and_keys()
    first, again, other = (made.select_random_blocks(q, 2, NSA, torch.Generator().manual_seed(seed)) for seed in (5, 5, 6))
    assert torch.equal(first, again) and not torch.equal(first, other)
    t = torch.arange(LENGTH)
    for blocks in (first, other):
        chosen = torch.zeros(2, LENGTH, 2, geometry.num_selection(LENGTH, NSA) + 1, dtype=torch.long)
        chosen.scatter_add_(
            -1, torch.where(blocks < 0, chosen.shape[-1] - 1, blocks).long(), torch.ones_like(blocks).long()
        )
        chosen = chosen[..., :-1]
        assert chosen.max() == 1 and not (chosen.bool() & ~geometry.candidate_blocks(t, 13, NSA)[:, None]).any()
        wanted = geometry.forced_blocks(t, 13, NSA) & geometry.candidate_blocks(t, 13, NSA)
        assert chosen.bool()[:, wanted.nonzero()[:, 0], :, wanted.nonzero()[:, 1]].all()
        assert torch.equal(chosen.sum(-1), (t // NSA.l_sel + 1).clamp_max(NSA.n_sel)[None, :, None].expand(2, -1, 2))
    free = first[:, 60:] != made.select_nearest_blocks(q, 2, NSA)[:, 60:]
    assert free.any()


def test_nothing_changed_is_the_model() -> None:
    model, tokens = make_model(), make_tokens()
    assert torch.equal(forward_with_ablation(model, tokens, ABLATIONS["chosen"]), model(tokens))


def test_all_blocks_are_a_selection_of_all_of_them() -> None:
    few, every = make_model(), make_model(NSA.model_copy(update={"n_sel": 13}))
    every.load_state_dict(few.state_dict())
    found = forward_with_ablation(few, make_tokens(), ABLATIONS["all"])
    torch.testing.assert_close(found, every(make_tokens()), rtol=1e-9, atol=1e-9)
    assert (found - few(make_tokens())).abs().max() > 1e-6


@pytest.mark.parametrize("indexer", [0, 4])
def test_twice_as_many_blocks_are_those_of_a_model_that_chooses_so_many(indexer: int) -> None:
    """The best of its own scores, with an indexer and without."""
    taught = {"indexer_block": indexer, "selection_loss": 0.05} if indexer else {}
    few, many = (make_model(NSA.model_copy(update={"n_sel": n * NSA.n_sel}), **taught) for n in (1, 2))
    many.load_state_dict(few.state_dict())
    found = forward_with_ablation(few, make_tokens(), ABLATIONS["twice"])
    torch.testing.assert_close(found, many(make_tokens()), rtol=1e-9, atol=1e-9)
    assert (found - few(make_tokens())).abs().max() > 1e-6


@pytest.mark.parametrize("name", ["random", "nearest", "oracle", "no_cmp", "no_sel", "no_win"])
def test_a_change_is_what_the_definition_gives_with_it(name: str) -> None:
    """One layer, put together by hand from the definition's own functions."""
    model, tokens, change = make_model(n_layers=1), make_tokens(), ABLATIONS[name]
    block = cast(Block, model.blocks[0])
    layer = cast(SparseAttention, block.attention)
    x = model.embed(tokens)
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = layer.project(
        block.attention_norm(x), get_rotary_table(LENGTH, 6, 10000.0, tokens.device)
    )
    out_cmp, lse = reference.compressed_attention(q, k_cmp, v_cmp, NSA)
    choose = {
        "random": lambda: made.select_random_blocks(q, 2, NSA, torch.Generator().manual_seed(7)),
        "nearest": lambda: made.select_nearest_blocks(q, 2, NSA),
        "oracle": lambda: reference.select_by_importance(compute_mass_by_loops(q, k_sel, NSA).float(), NSA),
    }.get(name, lambda: reference.select_blocks(q, k_cmp, lse, NSA))
    blocks = choose()
    out_sel, _ = reference.selected_attention(q, k_sel, v_sel, blocks, NSA)
    out_win, _ = reference.window_attention(q, k_win, v_win, NSA)
    keep = [float(change.disabled_branch != branch) for branch in ("cmp", "sel", "win")]
    mixed = sum(gates[..., i : i + 1] * out * keep[i] for i, out in enumerate((out_cmp, out_sel, out_win)))
    x = x + layer.out(cast(Tensor, mixed).flatten(2))
    expected = model.head(model.norm(x + block.mlp(block.mlp_norm(x))))
    found = forward_with_ablation(model, tokens, change, seed=7)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert (found - model(tokens)).abs().max() > 1e-6


def test_where_everything_is_read_the_choice_changes_nothing() -> None:
    model, tokens = make_model(), make_tokens(NSA.n_sel * NSA.l_sel)
    for name in ("random", "nearest", "oracle", "twice", "all"):
        found = forward_with_ablation(model, tokens, ABLATIONS[name])
        torch.testing.assert_close(found, model(tokens), rtol=1e-9, atol=1e-9)
    assert measure_selection_quality(model, tokens) is None


def test_effects_are_differences_from_the_model_as_it_is() -> None:
    model, tokens = make_model(), make_tokens(rows=3)
    places = torch.tensor([[40, 41], [99, 100]]).expand(3, 2, 2)
    for place in (40, 41):  # causal: the first stays the likeliest
        tokens[0, place] = model(tokens)[0, place - 1].argmax(-1)
    tokens[1, 40] = model(tokens)[1, 39].argmax(-1)  # half of an answer is none
    effects = run_ablations(model, tokens, places, batch_size=2)
    assert [effect.name for effect in effects] == list(ABLATIONS)
    logits = model(tokens[:, :-1])
    losses = torch.nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none")
    answers = torch.zeros_like(losses, dtype=torch.bool)
    answers[:, [39, 40, 98, 99]] = True
    tokens_right = (logits.argmax(-1) == tokens[:, 1:])[:, [39, 40, 98, 99]].view(3, 2, 2)
    right = tokens_right.all(-1)
    assert tokens_right.any(-1)[1].tolist() == [True, False] and not right[1].any()
    base = effects[0]
    assert base.loss == pytest.approx(losses[~answers].mean().item(), rel=1e-5)
    assert base.answer_loss == pytest.approx(losses[answers].mean().item(), rel=1e-5)
    assert base.accuracy == pytest.approx(right.float().mean().item())
    assert base.right == right.float().mean(1).tolist() and 0 < base.accuracy < 1
    assert (base.d_loss, base.d_answer_loss, base.d_accuracy) == (0.0, 0.0, 0.0)
    for effect in effects[1:]:
        assert effect.d_loss == effect.loss - base.loss and effect.d_answer_loss == effect.answer_loss - base.answer_loss


def test_every_sequence_has_dice_of_its_own_however_many_go_at_once() -> None:
    model, tokens = make_model(), make_tokens(rows=1)
    places = torch.tensor([[[40, 41]]])
    once, twice = (
        run_ablations(model, tokens.repeat(n, 1), places.repeat(n, 1, 1), names=("random", "nearest"), batch_size=1)
        for n in (1, 2)
    )
    assert twice[2].loss == pytest.approx(once[2].loss, abs=1e-9), "the nearest blocks are the same in both"
    assert abs(twice[1].loss - once[1].loss) > 1e-9, "the second draw is the first again"


def test_quality_is_the_share_of_the_oracles_mass() -> None:
    model, tokens = make_model(n_layers=1), make_tokens(rows=1)
    quality = measure_selection_quality(model, tokens, seed=2)
    assert quality is not None
    block = cast(Block, model.blocks[0])
    layer = cast(SparseAttention, block.attention)
    x, rotary = model.embed(tokens), get_rotary_table(LENGTH, 6, 10000.0, tokens.device)
    inputs = layer.project(block.attention_norm(x), rotary)
    mass = compute_mass_by_loops(inputs[0], inputs[3], NSA)[0]
    _, lse = reference.compressed_attention(*inputs[:3], NSA)
    own = reference.select_blocks(inputs[0], inputs[1], lse, NSA)[0]
    caught = best = forced = 0.0
    for t in range(NSA.n_sel * NSA.l_sel, LENGTH):
        for g in range(2):
            caught += sum(mass[t, g, j].item() for j in own[t, g].tolist())
            best += sum(mass[t, g, j].item() for j in select_oracle_by_loops(mass[t, g], t, NSA))
            forced += sum(mass[t, g, j].item() for j in {0, t // NSA.l_sel - 1, t // NSA.l_sel})
    assert quality["chosen"] == [pytest.approx(caught / best, rel=1e-4)]
    assert quality["chosen_free"] == [pytest.approx((caught - forced) / (best - forced), rel=1e-4)]
    assert all(0 <= quality[name][0] <= 1 + 1e-6 for name in quality)


def test_a_dense_model_is_refused() -> None:
    model = make_model(attention="dense")
    with pytest.raises(ValueError, match=r"model\.attention: nsa"):
        forward_with_ablation(model, make_tokens(), ABLATIONS["chosen"])
    with pytest.raises(ValueError, match=r"model\.attention: nsa"):
        measure_selection_quality(model, make_tokens())


def test_interventions_are_what_they_are_called() -> None:
    silent = {name: change.disabled_branch for name, change in ABLATIONS.items() if change.disabled_branch}
    assert silent == {"no_cmp": "cmp", "no_sel": "sel", "no_win": "win"}
    reads = {name: change.selection for name, change in ABLATIONS.items() if name not in silent}
    assert reads == {name: "chosen" if name == "twice" else name for name in reads}


def test_random_blocks_are_those_of_the_seed() -> None:
    model, tokens, places = make_model(), make_tokens(rows=1), torch.tensor([[[40, 41]]])
    first, again, other = (run_ablations(model, tokens, places, names=("random",), seed=seed)[1].loss for seed in (5, 5, 6))
    assert first == again != other


@pytest.mark.parametrize("at_once", [1, 1 << 25])
def test_quality_is_that_of_every_layer_and_choice_however_it_is_cut(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(made, "MAX_SCORE_ELEMENTS", 7 * 4 * LENGTH if at_once == 1 else at_once)
    model, tokens, first = make_model(), make_tokens(rows=1), NSA.n_sel * NSA.l_sel
    quality = measure_selection_quality(model, tokens, seed=2)
    assert quality is not None
    x, rotary = model.prepare_inputs(tokens)
    dice = torch.Generator().manual_seed(2)
    for number, block in enumerate(cast("list[Block]", model.blocks)):
        layer = cast(SparseAttention, block.attention)
        normed = block.attention_norm(x)
        inputs = layer.project(normed, rotary)
        q, k_sel = inputs[0], inputs[3]
        mass = compute_block_mass(q, k_sel, NSA)
        choices = {
            "chosen": made.select_model_blocks(layer.project_selection_inputs(normed, inputs, rotary), layer),
            "nearest": made.select_nearest_blocks(q, 2, NSA),
            "random": made.select_random_blocks(q, 2, NSA, dice),
        }
        best = mass.gather(-1, made.select_oracle_blocks(q, k_sel, NSA).long().clamp_min(0))[:, first:].sum().item()
        for name, blocks in choices.items():
            held = mass.gather(-1, blocks.long().clamp_min(0))[:, first:].sum().item()
            assert quality[name][number] == pytest.approx(held / best, rel=1e-4), (name, number)
        x, _ = block(x, rotary)
