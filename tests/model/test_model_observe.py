"""Statistics of a model equal counts over its observed blocks, gates and outputs."""

from __future__ import annotations

import math

import pytest
import torch
from model_inputs import make_config, make_tokens

from nsa_lab.attention import Span, reference
from nsa_lab.config import NSAConfig
from nsa_lab.model import BRANCHES, NSATransformer

T = 70


@pytest.fixture(scope="module")
def model() -> NSATransformer:
    return NSATransformer(make_config(), seed=0)


def test_observed_values_equal_the_forward_pass(model: NSATransformer) -> None:
    """The gated and projected sum of the observed branches is the layer's output."""
    tokens = make_tokens(model.config, T)
    inside = []
    handles = [block.attention.register_forward_hook(lambda _, __, out: inside.append(out[0])) for block in model.blocks]
    model(tokens)
    for handle in handles:
        handle.remove()
    for block, seen, out in zip(model.blocks, model.observe(tokens), inside, strict=True):
        mixed = reference.combine(seen["out_cmp"], seen["out_sel"], seen["out_win"], seen["gates"])
        torch.testing.assert_close(block.attention.out(mixed.flatten(2)), out)
        assert seen["blocks"].shape == (2, T, 2, 3) and seen["gates"].shape == (2, T, 4, 3)
        assert not any(x.requires_grad for x in seen.values())


def test_statistics_are_in_range_and_per_layer(model: NSATransformer) -> None:
    stats = model.statistics(make_tokens(model.config, T))
    assert all(x.shape == (2,) and x.isfinite().all() for x in stats.values())
    shares = torch.stack([stats[f"gate_share_{b}"] for b in BRANCHES])
    torch.testing.assert_close(shares.sum(0), torch.ones(2))
    assert (shares > 0).all()
    for name in ("gate_saturation", "sel_reuse", "sel_sink_share", "sel_window_overlap"):
        assert (stats[name] >= 0).all() and (stats[name] <= 1).all(), name
    assert (stats["gate_entropy"] > 0).all() and (stats["gate_entropy"] < math.log(3)).all()
    assert all((stats[f"norm_{b}"] > 0).all() for b in BRANCHES)


def test_selection_statistics_equal_counting(model: NSATransformer) -> None:
    tokens = make_tokens(model.config, T)
    stats, nsa = model.statistics(tokens), model.config.nsa
    for layer, seen in enumerate(model.observe(tokens)):
        reuse, distance, near, keys, per_query = [], [], 0, 0, []
        for sequence in seen["blocks"].tolist():
            for t, groups in enumerate(sequence):
                for g, row in enumerate(groups):
                    selected_tokens = {j for j in row if j >= 0}
                    distance += [t // nsa.l_sel - j for j in selected_tokens]
                    read = [s for j in selected_tokens for s in range(j * nsa.l_sel, (j + 1) * nsa.l_sel) if s <= t]
                    keys += len(read)
                    per_query.append(len(read))
                    near += sum(t - s < nsa.w for s in read)
                    if t:
                        before = {j for j in sequence[t - 1][g] if j >= 0}
                        reuse.append(len(selected_tokens & before) / len(selected_tokens))
        assert stats["sel_reuse"][layer].item() == pytest.approx(sum(reuse) / len(reuse), rel=1e-5)
        assert stats["sel_distance"][layer].item() == pytest.approx(sum(distance) / len(distance), rel=1e-5)
        assert stats["sel_window_overlap"][layer].item() == pytest.approx(near / keys, rel=1e-5)
        assert stats["sel_keys"][layer].item() == pytest.approx(sum(per_query) / len(per_query), rel=1e-5)
        assert stats["sel_keys_most"][layer].item() == max(per_query)
        for branch in ("cmp", "sel", "win"):
            out = seen[f"out_{branch}"]
            assert stats[f"norm_{branch}"][layer].item() == pytest.approx(out.norm().item() / out.numel() ** 0.5, rel=1e-5)


@pytest.mark.slow
def test_a_query_selects_752_5_keys_of_2048_on_average_and_1024_at_most() -> None:
    """At the defaults, for any selection."""
    config = make_config(nsa=NSAConfig().model_dump(exclude={"phi", "gate"}))
    stats = NSATransformer(config, seed=0).statistics(make_tokens(config, 2048, batch=1))
    assert stats["sel_keys"].tolist() == [752.5] * config.n_layers
    assert stats["sel_keys_most"].tolist() == [1024.0] * config.n_layers


def test_gate_shares_have_the_right_branch_names(model: NSATransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates in the order of the definition (`reference.combine`), with different values."""
    gates = torch.tensor([0.1, 0.3, 0.6])
    monkeypatch.setattr(type(model.blocks[0].attention), "compute_gates", lambda self, x: gates.expand(*x.shape[:2], 4, 3))
    stats = model.statistics(make_tokens(model.config, T))
    for name in ("cmp", "sel", "win"):
        # If only this branch's output is 1, the gated sum is its gate.
        outs = {f"out_{branch}": torch.full((1, 1, 1, 1), float(branch == name)) for branch in ("cmp", "sel", "win")}
        weight = reference.combine(*outs.values(), gates.view(1, 1, 1, 3)).item()
        assert stats[f"gate_share_{name}"].tolist() == pytest.approx([weight] * 2)


@pytest.mark.parametrize("sink_blocks", [0, 1])
def test_the_sink_share_is_the_attention_to_the_first_block(model: NSATransformer, sink_blocks: int) -> None:
    """If the first block is not forced, queries may not select it; their share is 0."""
    nsa = model.config.nsa.model_copy(update={"sink_blocks": sink_blocks, "local_blocks": 1})
    weights, model = model.state_dict(), NSATransformer(model.config.model_copy(update={"nsa": nsa})).to(model.head.weight)
    model.load_state_dict(weights)
    tokens = make_tokens(model.config, T, batch=1)
    x, rotary = model.prepare_inputs(tokens)
    layer = model.blocks[0]
    q, _, _, k, _, _, _, _ = layer.attention.project(layer.attention_norm(x), rotary)
    seen = model.observe(tokens)[0]
    shares = []
    for t in range(model.config.nsa.l_sel, T):
        for n in range(4):
            selected_tokens = [
                s for j in seen["blocks"][0, t, n // 2].tolist() if j >= 0 for s in range(8 * j, 8 * j + 8) if s <= t
            ]
            p = (k[0, selected_tokens, n // 2] @ q[0, t, n] * 6**-0.5).softmax(0)
            shares.append(sum(p[i].item() for i, s in enumerate(selected_tokens) if s < 8))
    expected = sum(shares) / len(shares)
    assert model.statistics(tokens)["sel_sink_share"][0].item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9])
def test_short_sequences_have_statistics_too(model: NSATransformer, length: int) -> None:
    assert all(x.isfinite().all() for x in model.statistics(make_tokens(model.config, length)).values())


@pytest.mark.parametrize("length", [1, 7, 8])
def test_a_text_within_the_first_block_has_a_sink_share_of_1(model: NSATransformer, length: int) -> None:
    """No query is after the block, so the last one counts."""
    assert model.statistics(make_tokens(model.config, length))["sel_sink_share"].tolist() == pytest.approx([1.0, 1.0])


def test_observing_changes_nothing(model: NSATransformer) -> None:
    tokens = make_tokens(model.config, T)
    before = model(tokens)
    model.statistics(tokens)
    assert torch.equal(model(tokens), before) and all(p.grad is None for p in model.parameters())


def test_equal_gates_have_an_entropy_of_ln_3(model: NSATransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal gates have the maximum entropy; gates of 0 or 1 are saturated."""
    kind = type(model.blocks[0].attention)
    monkeypatch.setattr(kind, "compute_gates", lambda self, x: torch.full((*x.shape[:2], 4, 3), 1 / 3))
    flat = model.statistics(make_tokens(model.config, T))
    torch.testing.assert_close(flat["gate_entropy"], torch.full((2,), math.log(3)))
    monkeypatch.setattr(kind, "compute_gates", lambda self, x: torch.tensor([1.0, 0.0, 0.0]).expand(*x.shape[:2], 4, 3))
    saturated = model.statistics(make_tokens(model.config, T))
    assert (saturated["gate_entropy"].abs() < 1e-6).all() and (saturated["gate_saturation"] == 1).all()


def test_a_gate_within_a_hundredth_of_its_ends_is_saturated(model: NSATransformer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the three gates is saturated: the first, then the last."""
    for gates in ([0.009, 0.011, 0.5], [0.5, 0.989, 0.991]):
        monkeypatch.setattr(
            type(model.blocks[0].attention),
            "compute_gates",
            lambda self, x, of=gates: torch.tensor(of).expand(*x.shape[:2], 4, 3),
        )
        found = model.statistics(make_tokens(model.config, T))["gate_saturation"]
        torch.testing.assert_close(found, torch.full((2,), 1 / 3))


def test_a_dense_model_has_no_branches_to_observe() -> None:
    model = NSATransformer(make_config(attention="dense"), seed=0)
    assert model.statistics(make_tokens(model.config, 9)) == {}
    with pytest.raises(ValueError, match=r"model\.attention: nsa"):
        model.observe(make_tokens(model.config, 9))


LENGTHS = (31, 0, 1, 9, 29)
PACKED = Span.packed(torch.tensor([0, *LENGTHS]).cumsum(0).int(), capacity=7)


def test_observed_values_of_packed_documents_equal_separate_ones(model: NSATransformer) -> None:
    tokens = make_tokens(model.config, T, batch=1)
    together = model.observe(tokens, PACKED)
    alone = [model.observe(part) for part in tokens.split(LENGTHS, 1) if part.numel()]
    for layer, seen in enumerate(together):
        for name, value in seen.items():
            torch.testing.assert_close(value, torch.cat([part[layer][name] for part in alone], 1), msg=name)


def test_statistics_respect_documents(model: NSATransformer) -> None:
    """Counts over observed blocks, with positions that restart: no reuse across documents, no distance to a neighbor."""
    tokens, nsa = make_tokens(model.config, T, batch=1), model.config.nsa
    stats = model.statistics(tokens, PACKED)
    places = [t for length in LENGTHS for t in range(length)]
    for layer, seen in enumerate(model.observe(tokens, PACKED)):
        reuse, distance, keys, near = [], [], [], 0
        rows = seen["blocks"][0].tolist()
        for row, t in enumerate(places):
            for g, found in enumerate(rows[row]):
                selected_tokens = {j for j in found if j >= 0}
                distance += [t // nsa.l_sel - j for j in selected_tokens]
                read = [s for j in selected_tokens for s in range(j * nsa.l_sel, (j + 1) * nsa.l_sel) if s <= t]
                keys.append(len(read))
                near += sum(t - s < nsa.w for s in read)
                if t:
                    reuse.append(len(selected_tokens & {j for j in rows[row - 1][g] if j >= 0}) / len(selected_tokens))
        shares = (seen["lse_sink"] - seen["lse_sel"]).exp()[0, [t >= nsa.l_sel for t in places]]
        expected = {
            "sel_reuse": sum(reuse) / len(reuse),
            "sel_distance": sum(distance) / len(distance),
            "sel_keys": sum(keys) / len(keys),
            "sel_keys_most": max(keys),
            "sel_window_overlap": near / sum(keys),
            "sel_sink_share": shares.mean().item(),
        }
        assert {name: stats[name][layer].item() for name in expected} == pytest.approx(expected, rel=1e-5)
