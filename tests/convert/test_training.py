"""Training of converted models: the selection loss, its gradients, and gradient checkpointing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from looping import looped
from micro_batches import LENGTH, check_gradients
from tiny_dense_models import FEW, make_dense, make_tokens
from torch import Tensor
from transformers import PreTrainedModel

from nsa_lab import sparsify

WEIGHT = 0.3


def convert(**options: Any) -> PreTrainedModel:
    return sparsify(make_dense().double(), FEW, selection_loss=WEIGHT, **options).train()


def is_indexer(name: str) -> bool:
    return ".indexer." in name


def enable_checkpointing(model: PreTrainedModel, **options: Any) -> None:
    """Enable gradient checkpointing under the name of the installed version of transformers."""
    if hasattr(model, "activation_checkpointing_enable"):  # since 5.24
        model.activation_checkpointing_enable(options or None)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options or None)


def compute_gradients(model: PreTrainedModel, loss: Tensor) -> dict[str, Tensor]:
    names, weights = zip(*((n, p) for n, p in model.named_parameters() if p.requires_grad), strict=True)
    gradients = torch.autograd.grad(loss, weights, allow_unused=True)
    return {name: gradient for name, gradient in zip(names, gradients, strict=True) if gradient is not None}


def test_the_loss_includes_the_selection_loss() -> None:
    model, tokens = convert(), make_tokens()
    output = model(tokens, labels=tokens)
    model.eval()
    expected = model(tokens, labels=tokens)
    assert "aux_loss" not in expected or expected.aux_loss is None
    torch.testing.assert_close(output.loss, expected.loss + WEIGHT * output.aux_loss)
    model.train()
    as_tuple = model(tokens, labels=tokens, return_dict=False)
    torch.testing.assert_close(as_tuple[0], output.loss)
    torch.testing.assert_close(as_tuple[-1], output.aux_loss)
    n_labels = 2 * (tokens.shape[1] - 1)
    torch.testing.assert_close(
        sum(model(row[None], labels=row[None], num_items_in_batch=torch.tensor(n_labels)).loss for row in tokens),
        output.loss,
    )
    with torch.no_grad():
        assert model(tokens, labels=tokens).get("aux_loss") is None


def test_gradients_do_not_depend_on_micro_batches() -> None:
    check_gradients(convert(selection_queries=256), make_tokens(2, LENGTH))


def test_shifted_labels_give_the_loss_of_labels() -> None:
    """With and without `labels`, also as views that are not contiguous."""
    model, tokens = convert(), make_tokens()
    shifted = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    view = shifted.T.contiguous().T
    for is_training in (True, False):
        model.train(is_training)
        expected = model(tokens, labels=tokens).loss
        for arguments in ({"shift_labels": shifted}, {"shift_labels": view}, {"shift_labels": view, "labels": tokens}):
            torch.testing.assert_close(model(tokens, **arguments).loss, expected)
            torch.testing.assert_close(model(tokens, return_dict=False, **arguments)[0], expected)


def test_labels_that_padding_predicts_are_ignored() -> None:
    """The loss of padded rows is the mean over the labels of their tokens, with labels and with shifted labels."""
    model, tokens = convert().eval(), make_tokens()
    for side in (slice(0, 13), slice(-13, None), slice(20, 27)):
        mask = torch.ones_like(tokens)
        mask[0, side] = 0
        shifted = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
        logits = model(tokens, attention_mask=mask).logits
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="none")
        expected = nll[(mask.bool() & (shifted != -100)).flatten()].mean()
        for labels in ({"labels": tokens}, {"shift_labels": shifted}):
            torch.testing.assert_close(
                model(tokens, attention_mask=mask, **labels).loss.double(), expected, atol=1e-5, rtol=1e-5
            )


def test_the_selection_loss_trains_only_the_indexer() -> None:
    model, tokens = convert(), make_tokens()
    output = model(tokens, labels=tokens)
    from_selection = compute_gradients(model, output.aux_loss)
    assert from_selection and all(map(is_indexer, from_selection))
    assert len(from_selection) == sum(map(is_indexer, dict(model.named_parameters())))
    assert all(gradient.abs().max() > 0 for gradient in from_selection.values())
    output = model(tokens, labels=tokens)
    from_text = compute_gradients(model, output.loss - WEIGHT * output.aux_loss)
    trained = {name for name, gradient in from_text.items() if gradient.abs().max() > 0}
    assert trained == {name for name, _ in model.named_parameters() if not is_indexer(name)}


def test_a_loss_of_the_base_model_trains_the_indexer() -> None:
    model, tokens = convert(), make_tokens()
    gradients = compute_gradients(model, model.model(tokens, use_cache=False).last_hidden_state.sum())
    expected = compute_gradients(model, WEIGHT * model(tokens).aux_loss)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient)


def test_a_loss_of_the_logits_trains_the_indexer() -> None:
    """DPO and label smoothing compute such a loss."""
    model, tokens = convert(), make_tokens()
    expected = compute_gradients(model, WEIGHT * model(tokens).aux_loss)
    for logits in (model(tokens).logits, model(tokens, return_dict=False)[0]):
        gradients = compute_gradients(model, logits.sum())
        assert expected.keys() < gradients.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient)


@looped
@pytest.mark.parametrize("options", [{}, {"indexer_every": 2}])
def test_gradient_checkpointing_changes_nothing(options: dict[str, Any]) -> None:
    model, tokens = convert(**options), make_tokens()
    expected = compute_gradients(model, model(tokens, labels=tokens).loss)
    enable_checkpointing(model)
    actual = compute_gradients(model, model(tokens, labels=tokens).loss)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient)


def test_reentrant_checkpointing_is_refused() -> None:
    model, tokens = convert(), make_tokens()
    enable_checkpointing(model, use_reentrant=True)
    with pytest.raises(NotImplementedError, match="use_reentrant"):
        model(tokens, labels=tokens)


@looped
@pytest.mark.parametrize("attention", ["nsa_lab", "nsa_lab_dense"])
def test_the_indexer_learns_on_a_frozen_trunk(attention: str) -> None:
    """A random indexer; with dense attention, the hidden states equal the dense model's."""
    model, tokens = convert().float(), make_tokens(4, 64)
    model.set_attn_implementation(attention)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_indexer(name))
        if is_indexer(name):
            parameter.data.normal_(std=0.1)
    frozen = copy.deepcopy({n: p for n, p in model.named_parameters() if not is_indexer(n)})
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    losses = []
    for _ in range(30):
        losses.append(model(tokens).aux_loss)
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0], losses
    assert all(torch.equal(parameter, frozen[name]) for name, parameter in model.named_parameters() if name in frozen)
    if attention == "nsa_lab_dense":
        dense = make_dense()
        torch.testing.assert_close(model(tokens).logits, dense(tokens).logits, atol=1e-4, rtol=1e-4)


def test_packed_documents_have_the_losses_of_single_documents() -> None:
    model, tokens = convert(), make_tokens(1, 60)
    positions = torch.cat([torch.arange(40), torch.arange(20)])[None]
    alone = model(tokens[:, :40]).aux_loss, model(tokens[:, 40:]).aux_loss
    # The loss of a row is a mean over its queries.
    expected = (40 * alone[0] + 20 * alone[1]) / 60
    torch.testing.assert_close(model(tokens, position_ids=positions).aux_loss, expected, atol=1e-5, rtol=1e-5)
