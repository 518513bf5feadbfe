"""The indexer: its selection, its training by the selection loss, and no effect on other parameters."""

from __future__ import annotations

import sys

import pytest
import torch
from looping import looped
from model_inputs import compute_loss, make_config, make_tokens

from nsa_lab.attention import Span, reference, resolve_backend, score_and_select_blocks, selection_loss
from nsa_lab.attention.dispatch import PARTS
from nsa_lab.config import ConfigError, ModelConfig, NSAConfig
from nsa_lab.model import NSATransformer, SparseAttention

TRAINING_RECIPE = {"d_k": 8, "rotary_share": 0.5, "matching_heads": 2, "selection_loss": 0.1, "indexer_block": 2}


def make_model(**changes: object) -> NSATransformer:
    return NSATransformer(make_config(**{**TRAINING_RECIPE, **changes}), dtype=torch.float64, seed=0).double()


def is_indexer_parameter(name: str) -> bool:
    return ".indexer." in name


def test_the_selection_loss_trains_only_the_indexer() -> None:
    model = make_model()
    model(make_tokens(model.config, 61))
    model.auxiliary_loss().backward()
    for name, p in model.named_parameters():
        has_gradient = p.grad is not None and bool(p.grad.abs().sum() > 0)
        assert has_gradient == is_indexer_parameter(name), name


def test_the_language_loss_trains_everything_except_the_indexer() -> None:
    model = make_model()
    compute_loss(model, make_tokens(model.config, 62)).backward()
    for name, p in model.named_parameters():
        assert (p.grad is None) == is_indexer_parameter(name), name


@pytest.mark.parametrize(
    "changes", [{}, {"indexer_block": 1}, {"matching_heads": 0, "rotary_share": 1.0}], ids=["recipe", "one token", "plain"]
)
def test_the_losses_of_packed_documents_train_disjoint_parameters(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every run of long texts is packed. The gradient of a parameter must be that of the documents one by one, too."""
    # All queries: the sample of a packed sequence has other queries than those of its documents.
    module = sys.modules["nsa_lab.attention.selection_loss"]
    monkeypatch.setattr(module, "sample_rows", lambda length, count, device: torch.arange(length, device=device))
    model, lengths = make_model(**changes), (40, 1, 37, 45)
    tokens = make_tokens(model.config, sum(lengths))[:1]
    span = Span.packed(torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32))
    embeddings = model.embedding(tokens).detach().requires_grad_()
    model(None, span, embeddings=embeddings)
    model.auxiliary_loss().backward()
    assert embeddings.grad is None or not embeddings.grad.any(), "the selection loss reaches the input of the model"
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert gradients and all(map(is_indexer_parameter, gradients))
    model.zero_grad()
    logits = model(tokens, span)
    torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]).backward()
    for name, p in model.named_parameters():
        assert (p.grad is None) == is_indexer_parameter(name), name
    # The selection loss of a packed sequence is the mean over its queries, so documents count by their length.
    model.zero_grad()
    n_queries = 0
    for document in tokens.split(lengths, dim=1):
        model(document)
        (model.auxiliary_loss() * document.shape[1]).backward()
        n_queries += document.shape[1]
    for name, gradient in gradients.items():
        own = dict(model.named_parameters())[name].grad
        assert own is not None
        torch.testing.assert_close(own / n_queries, gradient, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("block", [1, 2])
def test_every_indexer_weight_gets_a_gradient(block: int) -> None:
    """Also if an index key covers a single token, which needs no weights."""
    model = make_model(indexer_block=block)
    model(make_tokens(model.config, 61))
    model.auxiliary_loss().backward()
    for name, p in filter(lambda named: is_indexer_parameter(named[0]), model.named_parameters()):
        assert p.grad is not None and p.grad.abs().max() > 0, name


def test_a_pool_of_one_token_raises() -> None:
    with pytest.raises(ConfigError, match=r"nsa.l = 1 has only one; use nsa.phi = avg"):
        ModelConfig(nsa=NSAConfig(phi="pool", l=1, d=1))


def test_blocks_are_selected_by_its_queries_and_keys() -> None:
    model = make_model(nsa={"n_sel": 5})
    layer, tokens = model.blocks[1].attention, make_tokens(model.config, 61)
    assert isinstance(layer, SparseAttention)
    for _, p in filter(lambda named: is_indexer_parameter(named[0]), model.named_parameters()):
        torch.nn.init.normal_(p)
    x, rotary = model.prepare_inputs(tokens)
    seen = layer.observe(x, rotary)
    inputs = layer.project(x, rotary)
    q, k, nsa = layer.project_selection_inputs(x, inputs, rotary)
    assert q.shape == (2, 61, 2, 8) and k.shape == (2, 30, 2, 8)
    assert torch.equal(seen["blocks"], score_and_select_blocks(q, k, nsa))
    own = reference.select_blocks(inputs[0], inputs[1], seen["lse_cmp"], model.config.nsa)
    assert not torch.equal(seen["blocks"], own)
    out, _ = layer(x, rotary)
    expected = reference.nsa_attention(*inputs, model.config.nsa, blocks=seen["blocks"])
    torch.testing.assert_close(out, layer.out(expected.flatten(2)))


@looped
@pytest.mark.parametrize(("width", "channels"), [(0, [*range(8)]), (4, [0, 2, 4, 6])])
@pytest.mark.parametrize("matching", [0, 1])
def test_it_starts_with_weights_of_the_first_head_of_its_group(matching: int, width: int, channels: list[int]) -> None:
    """It has the queries of the head and the keys of the selected branch. A narrow indexer has some channels
    of them: the first of the two rotated pairs, (0, 2) and (1, 3), and every second unrotated channel."""
    model = make_model(matching_heads=matching, indexer_width=width)
    layer, tokens = model.blocks[0].attention, make_tokens(model.config, 40)
    assert isinstance(layer, SparseAttention) and layer.indexer is not None
    x, rotary = model.prepare_inputs(tokens)
    heads, index = layer.project_heads(x, rotary), layer.indexer(x, rotary)
    torch.testing.assert_close(index.q, heads.q[:, :, ::2, channels])
    torch.testing.assert_close(index.k, heads.keys[1][..., channels])


def test_it_continues_from_the_previous_token() -> None:
    """Two parts equal the full sequence if the second gets the last key of the first."""
    model = make_model(matching_heads=1)
    layer, tokens = model.blocks[0].attention, make_tokens(model.config, 23)
    x, rotary = model.prepare_inputs(tokens)
    whole = layer.indexer(x, rotary)
    first, rest = (layer.indexer(x[:, at], tuple(table[at] for table in rotary)) for at in (slice(9), slice(9, 23)))
    continued = layer.indexer(x[:, 9:], tuple(table[9:] for table in rotary), previous_k=first.k_before_conv[:, -1:])
    torch.testing.assert_close(torch.cat([first.k, continued.k], 1), whole.k, rtol=0, atol=1e-12)
    torch.testing.assert_close(torch.cat([first.q, continued.q], 1), whole.q, rtol=0, atol=1e-12)
    assert not torch.allclose(rest.k[:, 0], continued.k[:, 0]) and torch.equal(rest.k[:, 1:], continued.k[:, 1:])


@pytest.mark.parametrize("matching", [0, 1])
def test_its_documents_are_separate(matching: int) -> None:
    """The selection depends on its scores, because there are more blocks than n_sel."""
    model = make_model(matching_heads=matching, nsa={"l_sel": 4, "n_sel": 4})
    for block in model.blocks:
        torch.nn.init.normal_(block.attention.indexer.qk.weight, generator=torch.Generator().manual_seed(1))
    lengths = (5, 0, 17, 1, 30)
    tokens = make_tokens(model.config, sum(lengths), batch=1)
    packed = model(tokens, Span.packed(torch.tensor([0, *lengths]).cumsum(0).int()))
    alone = [model(document) for document in tokens.split(lengths, dim=1) if document.shape[1]]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=0, atol=1e-12)
    layer, span = model.blocks[0].attention, Span.packed(torch.tensor([0, *lengths]).cumsum(0).int())
    x, rotary = model.prepare_inputs(tokens, span)
    found = layer.project_selection_inputs(x, layer.project(x, rotary, span), rotary, span)
    parts = [model.prepare_inputs(document) for document in tokens.split(lengths, dim=1) if document.shape[1]]
    each = [layer.project_selection_inputs(x, layer.project(x, rotary), rotary) for x, rotary in parts]
    for at in (0, 1):
        torch.testing.assert_close(found[at], torch.cat([inputs[at] for inputs in each], 1), rtol=0, atol=1e-12)


def test_the_loss_compares_its_scores_with_the_attention_of_the_heads() -> None:
    """By brute force: the attention mass of the heads on free blocks against the importances of the indexer."""
    config = make_config(**TRAINING_RECIPE)
    nsa, generator = config.selection_nsa, torch.Generator().manual_seed(0)
    T, G = 37, 2
    attention_q = torch.randn(1, T, 4, 8, generator=generator, dtype=torch.float64)
    k_sel = torch.randn(1, T, G, 8, generator=generator, dtype=torch.float64)
    # An indexer can be narrower than the heads.
    q, k = (torch.randn(1, n, G, 4, generator=generator, dtype=torch.float64) for n in (T, T // 2))
    _, lse = reference.compressed_attention(q, k, k, nsa)
    importance = reference.block_importance(q, k, lse, nsa).double()
    expected = 0.0
    for t in range(T):
        own = t // nsa.l_sel
        free = [j for j in range(own + 1) if j not in (0, own - 1, own)]
        for g in range(G):
            mass = torch.zeros(own + 1, dtype=torch.float64)
            for head in (2 * g, 2 * g + 1):
                shares = (k_sel[0, : t + 1, g] @ attention_q[0, t, head] * 8**-0.5).softmax(0)
                for s in range(t + 1):
                    mass[s // nsa.l_sel] += shares[s] / 2
            total = sum(importance[0, t, g, j] for j in free)
            expected -= sum(mass[j] * (importance[0, t, g, j] / total).log() for j in free)
    found = selection_loss(q, k, k_sel, nsa, attention_q=attention_q, n_queries=None)
    torch.testing.assert_close(found, torch.as_tensor(expected / (T * G)), rtol=1e-5, atol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:divide by zero encountered in log2:RuntimeWarning")  # of a row that sees no block
@pytest.mark.parametrize("T", [17, pytest.param(97, marks=pytest.mark.slow)])
def test_the_kernels_use_given_blocks(T: int) -> None:
    """Forward and all gradients equal the definition."""
    pytest.importorskip("triton")
    sizes = {"dim": 32, "d_k": 16, "d_v": 16, "nsa": {"l": 8, "d": 4, "l_sel": 16, "n_sel": 4}}
    tokens, found = make_tokens(make_config(**sizes), T + 1), {}
    for backend in ("triton", "reference"):
        config = make_config(**{**TRAINING_RECIPE, **sizes})
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = NSATransformer(config, backend=backend, seed=0)
        for block in model.blocks:
            torch.nn.init.normal_(block.attention.indexer.qk.weight, generator=torch.Generator().manual_seed(1))
        model.to(device)
        loss = compute_loss(model, tokens.to(device))
        (loss + model.auxiliary_loss()).backward()
        found[backend] = loss, model.auxiliary_loss(), *(p.grad for p in model.parameters())
    for a, b in zip(found["triton"], found["reference"], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-5)


@looped
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"indexer_block": 24, "selection_loss": 0.1}, "24 does not divide .* 64; use model.indexer_block = 16"),
        ({"indexer_block": 99, "selection_loss": 0.1}, "99 does not divide .* 64; use model.indexer_block = 64"),
        ({"indexer_block": 8}, "only this loss trains the indexer; use model.selection_loss = 0.05"),
        ({"indexer_width": 32}, "not used without model.indexer_block; set model.indexer_block: 1"),
        ({"indexer_width": 24, "indexer_block": 1, "selection_loss": 0.1}, "must divide .* model.indexer_width = 16"),
        ({"indexer_width": 128, "indexer_block": 1, "selection_loss": 0.1}, "must divide .* model.indexer_width = 64"),
        (
            {"indexer_width": 2, "indexer_block": 1, "selection_loss": 0.1, "rotary_share": 0.5},
            "must be even; use model.indexer_width = 4",
        ),
    ],
)
def test_invalid_indexers_raise(wrong: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ModelConfig(**wrong)


@pytest.mark.slow
def test_the_production_model_stays_under_80_million_parameters_with_it() -> None:
    config = ModelConfig(rotary_share=0.5, matching_heads=3, selection_loss=0.05, indexer_block=8, mlp_hidden=3008)
    assert 79_000_000 < NSATransformer(config, seed=0).parameter_count() <= 80_000_000


def test_the_target_is_the_attention_of_the_heads() -> None:
    model = make_model()
    layer, tokens = model.blocks[0].attention, make_tokens(model.config, 61)
    torch.nn.init.normal_(layer.indexer.qk.weight)
    x, rotary = model.prepare_inputs(tokens)
    x = 50 * x
    loss = layer(x, rotary)[1].loss
    inputs = layer.project(x, rotary)
    q, k, nsa = layer.project_selection_inputs(x, inputs, rotary)
    torch.testing.assert_close(loss, selection_loss(q, k, inputs[3], nsa, attention_q=inputs[0]))
    assert (loss - selection_loss(q, k, inputs[3], nsa)).abs() > 1e-3


def test_reset_parameters_equals_a_new_model() -> None:
    """After a reset, the pooling of index keys is the mean again, and the convolution a shift."""
    model, new = (NSATransformer(make_config(**TRAINING_RECIPE), seed=0) for _ in range(2))
    assert not any(p.any() for name, p in model.named_parameters() if ".phi." in name)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    model.reset_parameters(0)
    for (name, a), b in zip(model.named_parameters(), new.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("block", [1, 2, 64])
def test_the_kernels_support_any_indexer_block(block: int) -> None:
    pytest.importorskip("triton")
    model = ModelConfig(selection_loss=0.05, indexer_block=block, indexer_width=16)
    assert set(resolve_backend("cpu", torch.float32, model.nsa, model, "triton")) == set(PARTS)


def test_an_unsupported_index_width_raises() -> None:
    pytest.importorskip("triton")
    model = ModelConfig(selection_loss=0.05, indexer_block=1, indexer_width=8)
    with pytest.raises(NotImplementedError, match=r"multiples of 16 .* indexer_width = 8; the nearest is 16"):
        resolve_backend("cpu", torch.float32, model.nsa, model, "triton")


def test_removing_a_presets_indexer_resets_its_width() -> None:
    narrow = ModelConfig(selection_loss=0.05, indexer_block=1, indexer_width=16)
    assert narrow.index_width == 16
    assert ModelConfig(**narrow.model_dump() | {"indexer_block": 0}) == ModelConfig(selection_loss=0.05)


@pytest.mark.parametrize("width", [0, 4])
def test_its_scores_count_as_flops(width: int) -> None:
    """With 61 tokens and 61 // 2 keys of two tokens, query t scores (t + 1) // 2 keys, in 2 groups of 2 layers."""
    model = make_model(indexer_width=width)
    scores = sum((t + 1) // 2 for t in range(61)) / 61
    weights = sum(p.numel() for name, p in model.named_parameters() if is_indexer_parameter(name))
    without = NSATransformer(make_config(**{**TRAINING_RECIPE, "indexer_block": 0}), seed=0)
    more = model.flops_per_token(61)["nsa"] - without.flops_per_token(61)["nsa"]
    assert more == pytest.approx(3 * 2 * weights + 2 * 2 * 2 * (width or 8) * scores)
    assert model.flops_per_token(61)["dense"] - without.flops_per_token(61)["dense"] == pytest.approx(3 * 2 * weights)
