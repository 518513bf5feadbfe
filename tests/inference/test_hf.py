"""The `transformers` model has the losses, gradients, masks, packed documents and outputs of the library."""

from __future__ import annotations

import copy
import functools
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from hf_models import INDEXER, PROMPTS, make_model, sample_bytes, tokenize_padded
from looping import looped
from micro_batches import LENGTH, check_gradients
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.utils.generic import find_labels

from nsa_lab.inference import hf


def switch_checkpointing(model: hf.NSALabForCausalLM, how: str, *arguments: dict) -> None:
    """Call `gradient_checkpointing_enable` or `_disable` by the name that is not deprecated."""
    names = (f"activation_checkpointing_{how}", f"gradient_checkpointing_{how}")
    next(getattr(model, name) for name in names if hasattr(model, name))(*arguments)


def test_labels_give_mean_loss_and_gradients(model: hf.NSALabForCausalLM) -> None:
    tokens = torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(1))
    labels = tokens.masked_fill(torch.arange(30) < 7, -100)
    loss = model(input_ids=tokens, labels=labels).loss
    ours = torch.nn.functional.cross_entropy(model.model(tokens)[:, 6:-1].flatten(0, 1), tokens[:, 7:].flatten())
    torch.testing.assert_close(loss.double(), ours, rtol=1e-5, atol=1e-5)
    loss.backward()
    assert model.model.embedding.weight.grad.abs().sum() > 0


def test_unsupported_inputs_are_named(model: hf.NSALabForCausalLM, tokenizer: hf.NSALabTokenizer) -> None:
    tokens = torch.randint(0, 255, (2, 9), generator=torch.Generator().manual_seed(0))
    with pytest.raises(TypeError, match="expected an NSALabCache, got DynamicCache"):
        model(tokens, cache=transformers.DynamicCache())
    with pytest.raises(TypeError, match=r"unexpected keyword argument lables=; the nearest is labels=$"):
        model(tokens, lables=tokens)
    for arguments in ({}, {"input_ids": tokens, "inputs_embeds": torch.zeros(2, 9, 24)}):
        with pytest.raises(ValueError, match="expected either input_ids= or inputs_embeds=, got both or neither"):
            model(**arguments)
    columns = torch.tensor([1, 4])
    assert torch.equal(model(tokens, logits_to_keep=columns).logits, model(tokens).logits[:, columns])


def test_packed_documents_equal_single_documents(model: hf.NSALabForCausalLM) -> None:
    """Documents packed by DataCollatorWithFlattening; also positions that start anywhere, with and without padding."""
    texts = [list(b"a first document, of some length"), list(b"the second"), list(b"x")]
    flat = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    batch = flat([{"input_ids": text, "labels": text} for text in texts])
    packed = model(**batch)
    separate = [model(torch.tensor([text])).logits for text in texts]
    assert torch.equal(packed.logits, torch.cat(separate, 1)) or (packed.logits - torch.cat(separate, 1)).abs().max() < 1e-5
    targets = [
        (logits[0, :-1], torch.tensor(text[1:], dtype=torch.int64)) for logits, text in zip(separate, texts, strict=True)
    ]
    losses = torch.cat([torch.nn.functional.cross_entropy(a, b, reduction="none") for a, b in targets])
    torch.testing.assert_close(packed.loss.double(), losses.mean(), rtol=1e-5, atol=1e-6)
    tokens = torch.tensor([texts[0], texts[0]])
    positions = torch.arange(len(texts[0]))[None]
    assert torch.equal(model(tokens, position_ids=positions + 100).logits, model(tokens).logits)
    padded = torch.cat([torch.full((2, 3), 255), tokens], 1)
    mask = torch.ones_like(padded).index_fill(1, torch.arange(3), 0)
    padded_logits = model(padded, attention_mask=mask, position_ids=mask.cumsum(1) - 1).logits[:, 3:]
    torch.testing.assert_close(padded_logits, model(tokens).logits, rtol=1e-5, atol=1e-5)


@looped
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position_ids": torch.tensor([[0, 1, 3]])}, "count up by one"),
        ({"position_ids": torch.tensor([[1, 0, 1]])}, "count up by one"),
        ({"position_ids": torch.tensor([[0, 0, 1]]), "use_cache": True}, "without padding and cache"),
        (
            {"position_ids": torch.tensor([[0, 0, 1]]), "attention_mask": torch.tensor([[1, 1, 0]])},
            "without padding and cache",
        ),
        (
            {"position_ids": torch.tensor([[0, 1, 2]]), "attention_mask": torch.tensor([[1, 0, 1]])},
            "count up by one from token to token, without a step at padding",
        ),
        ({"position_ids": torch.tensor([[0, 1]])}, r"the shape of input_ids, \(1, 3\), got \(1, 2\)"),
        *(
            ({"num_items_in_batch": n}, rf"num_items_in_batch = {n!r}: expected .* at least 1")
            for n in (0, -3, math.nan, "3")
        ),
        ({"num_items_in_batch": torch.tensor([0])}, r"num_items_in_batch = 0: expected .* at least 1"),
        ({"use_cache": "false"}, "use_cache = 'false': expected True, False or None"),
        ({"return_dict": "no"}, "return_dict = 'no': expected True, False or None"),
        ({"seq_idx": torch.tensor([[0, 0, 1]])}, "seq_idx: not supported alone; separate documents with position_ids="),
        ({"attention_mask": torch.tensor([[0, 1]])}, r"expected \[B, T\] as input_ids \(1, 3\)"),
        ({"attention_mask": torch.ones(2, 3)}, r"got \(2, 3\)"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, r"masks \[T, T\] are not supported"),
        ({"attention_mask": torch.tensor([[-1e9, 0.0, 0.0]])}, "1 for a token and 0 for padding"),
        (
            {"input_ids": torch.ones(1, 0, dtype=torch.int64)},
            "input_ids: expected .* begin an empty text with the separator",
        ),
        ({"input_ids": [[1, 2, 3]]}, "input_ids: expected a tensor, got a list"),
        ({"input_ids": None, "inputs_embeds": [[[0.5]]]}, "inputs_embeds: expected a tensor, got a list"),
        ({"labels": [[1, 2, 3]]}, "labels: expected a tensor, got a list"),
        ({"attention_mask": [[1, 1, 1]]}, "attention_mask: expected a tensor, got a list"),
        ({"position_ids": [[0, 1, 2]]}, "position_ids: expected a tensor, got a list"),
        (
            {"labels": torch.ones(1, 2, dtype=torch.int64)},
            r"labels: expected int64 \[B, T\], \(1, 3\), got torch.int64 \(1, 2\)",
        ),
        ({"labels": torch.ones(1, 3)}, "labels: expected int64 .* got torch.float32"),
        ({"shift_labels": torch.ones(3, dtype=torch.int64)}, "shift_labels: expected int64"),
        ({"logits_to_keep": -3}, "logits_to_keep = -3: expected a number of columns"),
        ({"attention_mask": torch.zeros(1, 3), "use_cache": True}, "attention_mask: expected a token in at least one row"),
    ],
)
def test_invalid_masks_and_positions_are_rejected(
    model: hf.NSALabForCausalLM, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": torch.tensor([[1, 2, 3]]), **arguments})


def test_other_outputs_and_vocabulary_sizes_are_rejected(model: hf.NSALabForCausalLM) -> None:
    with pytest.raises(NotImplementedError, match="omit output_attentions="):
        model(torch.tensor([[1, 2, 3]]), output_attentions=True)
    with pytest.raises(NotImplementedError, match="omit output_attentions="):
        model.base_model(torch.tensor([[1, 2, 3]]), output_attentions=True)
    with pytest.raises(NotImplementedError, match="expected 256 tokens, which are part of the architecture, got 300"):
        model.resize_token_embeddings(300)
    assert model.resize_token_embeddings(256) is model.get_input_embeddings()


@pytest.mark.parametrize("side", ["left", "right"])
def test_loss_of_padded_rows_is_the_loss_of_their_tokens(
    model: hf.NSALabForCausalLM, tokenizer: hf.NSALabTokenizer, side: str
) -> None:
    batch = tokenize_padded(tokenizer, side)
    # The first token is not a target. After padding it would be one, for undefined logits.
    labels = batch["input_ids"].masked_fill(batch["input_ids"] == 255, -100)
    rows = [tokenizer(text, return_tensors="pt")["input_ids"] for text in PROMPTS]
    losses = [torch.nn.functional.cross_entropy(model(row).logits[0, :-1], row[0, 1:], reduction="none") for row in rows]
    assert model(**batch, labels=labels).loss.item() == pytest.approx(torch.cat(losses).mean().item())


def test_tuple_output_and_text_pair(model: hf.NSALabForCausalLM, tokenizer: hf.NSALabTokenizer) -> None:
    tokens = torch.randint(0, 255, (1, 12), generator=torch.Generator().manual_seed(0))
    loss, logits = model(tokens, labels=tokens, return_dict=False)
    assert loss.ndim == 0 and logits.shape == (1, 12, 256)
    assert tokenizer("a", "b")["input_ids"] == [255, 97, 255, 98]


def test_labels_that_padding_predicts_are_ignored() -> None:
    """The first token of a row has a label, and the column before it is padding, whose logits are undefined."""
    model, tokens = make_model().eval(), sample_bytes(3, 20)
    mask = torch.ones_like(tokens)
    mask[0, :6] = mask[1, 15:] = mask[2, 8] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    losses = []
    for row, kept, row_labels in zip(tokens, mask.bool(), labels, strict=True):
        targets = torch.cat([row_labels[1:].masked_fill(~kept[:-1], -100), row_labels.new_tensor([-100])])[kept]
        losses.append(torch.nn.functional.cross_entropy(model(row[kept][None]).logits[0], targets, reduction="none"))
    expected = (torch.cat(losses).sum() / (13 + 14 + 17)).float()  # as transformers computes it
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    for arguments in ({"labels": labels}, {"shift_labels": shifted}, {"labels": labels, "num_items_in_batch": 44}):
        torch.testing.assert_close(model(tokens, attention_mask=mask, **arguments).loss, expected)


@pytest.mark.parametrize("options", [{}, INDEXER])
def test_loss_does_not_depend_on_micro_batches(options: dict) -> None:
    """Texts with 10 and 100 labels: the gradients of one batch equal those of two micro-batches."""
    model = make_model(**options).train()
    tokens = sample_bytes(2, 101)
    labels = tokens.clone()
    labels[0, 11:] = -100
    n_items = labels[:, 1:].ne(-100).sum()

    def compute_gradients(*batches: slice) -> Tensor:
        model.zero_grad()
        for rows in batches:
            model(tokens[rows], labels=labels[rows], num_items_in_batch=n_items).loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    whole, split = compute_gradients(slice(0, 2)), compute_gradients(slice(0, 1), slice(1, 2))
    assert model.accepts_loss_kwargs and n_items == 110
    assert find_labels(type(model)) == ["labels"]  # columns that a Trainer expects; without one, it reports no loss
    torch.testing.assert_close(split, whole, rtol=1e-4, atol=1e-7)
    mean = model(tokens, labels=labels).loss
    if not options:  # with its number, labels also weight the selection losses of the texts
        torch.testing.assert_close(model(tokens, labels=labels, num_items_in_batch=110).loss, mean)
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    torch.testing.assert_close(model(tokens, shift_labels=shifted).loss, mean)
    shifted[:, 5:] = -100  # other labels than the tokens
    other = model(tokens, shift_labels=shifted).loss
    assert not torch.isclose(other, mean)
    torch.testing.assert_close(model(tokens, labels=labels, shift_labels=shifted).loss, other)
    views = [x.T.contiguous().T for x in (tokens, labels, shifted)]
    assert not any(view.is_contiguous() for view in views)
    torch.testing.assert_close(model(views[0], labels=views[1], shift_labels=views[2]).loss, other)


def test_selection_loss_does_not_depend_on_micro_batches() -> None:
    """A text has the weight of its labels; those of padding and of other documents do not count."""
    model = make_model(**INDEXER, selection_queries=256).train()
    check_gradients(model, sample_bytes(2, LENGTH))
    # Without labels for a text, and for a whole batch.
    tokens, no_labels = sample_bytes(2, 40), torch.full((2, 40), -100)
    one = torch.cat([no_labels[:1], tokens[1:]])
    output, alone = (model(x, labels=y, num_items_in_batch=39) for x, y in ((tokens, one), (tokens[1:], tokens[1:])))
    torch.testing.assert_close(output.aux_loss, alone.aux_loss)
    assert model(tokens, labels=no_labels, num_items_in_batch=39).aux_loss == 0


def test_selection_loss_is_part_of_the_training_loss() -> None:
    """Weighted as in the configuration, reported before its weight; absent in evaluation and without an indexer."""
    model, tokens = make_model(**INDEXER).train(), sample_bytes(2, 40)
    output = model(tokens, labels=tokens)
    nll = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(output.loss, nll + 0.1 * output.aux_loss, check_dtype=False, rtol=1e-5, atol=1e-6)
    output.loss.backward()
    assert model.model.blocks[0].attention.indexer.qk.weight.grad.abs().sum() > 0
    # A third of the labels of an optimizer step has a third of the weight.
    nll_part = model(tokens, labels=tokens, num_items_in_batch=3 * 78).loss
    torch.testing.assert_close(nll_part, output.loss / 3, check_dtype=False)
    for other in (model.eval(), make_model().train()):
        output = other(tokens, labels=tokens)
        nll = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        assert output.aux_loss is None and torch.isclose(output.loss.double(), nll, atol=1e-5)


def test_loss_computed_from_logits_trains_the_indexer() -> None:
    """Label smoothing of a Trainer and DPO compute one. The gradients are equal to the gradients of `loss`."""
    model, tokens = make_model(**INDEXER).train(), sample_bytes(2, 70)
    model(tokens, labels=tokens).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    output = model(tokens)
    assert not output.aux_loss.requires_grad  # it is included, so it cannot be added again
    torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-7)
    assert expected["model.blocks.0.attention.indexer.qk.weight"].abs().sum() > 0


def test_base_model_returns_the_last_hidden_state(model: hf.NSALabForCausalLM) -> None:
    """With the same weights under the same names; a loss computed from it trains the indexer too."""
    tokens, base = sample_bytes(2, 30), model.base_model
    mask = torch.ones_like(tokens).index_fill(1, torch.arange(4), 0)
    for arguments in ({}, {"attention_mask": mask}, {"use_cache": True}):
        hidden = base(tokens, **arguments).last_hidden_state
        expected = model(tokens, **arguments).logits
        torch.testing.assert_close(model.get_output_embeddings()(hidden)[:, 4:], expected[:, 4:], rtol=0, atol=1e-10)
    assert base.state_dict().keys() == model.state_dict().keys() and base is model.base_model is model.get_decoder()
    assert copy.deepcopy(model).base_model.model is not model.model
    assert len(dict(model.named_parameters())) == len(dict(model.model.named_parameters()))
    if model.model.config.has_indexer:
        tokens = sample_bytes(2, 70)  # with blocks to choose from
        model.train()
        base(tokens).last_hidden_state.sum().backward()
        by_base = model.model.blocks[0].attention.indexer.qk.weight.grad.clone()
        model.zero_grad()
        model(tokens)
        model.model.auxiliary_loss().backward()
        expected = model.model.blocks[0].attention.indexer.qk.weight.grad
        torch.testing.assert_close(by_base, expected, rtol=1e-6, atol=0)
        assert expected.abs().sum() > 0


def test_hidden_states_and_embeddings(model: hf.NSALabForCausalLM) -> None:
    """With and without padding and cache: the inputs of the blocks, and embeddings instead of tokens."""
    tokens, caught = sample_bytes(2, 30), []
    handles = [block.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0])) for block in model.model.blocks]
    output = model(tokens, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    assert len(output.hidden_states) == 3
    for hidden in output.hidden_states:
        hidden.retain_grad()
    output.logits.sum().backward(retain_graph=True)
    assert all(hidden.grad.abs().sum() > 0 for hidden in output.hidden_states)
    for hidden, expected in zip(output.hidden_states, [*caught, model.base_model(tokens).last_hidden_state], strict=True):
        torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-10)
    first = model(tokens[:, :17], output_hidden_states=True, use_cache=True)
    model.config.output_hidden_states = True
    rest = model(tokens[:, 17:], cache=first[hf.CACHE_ARGUMENT])
    model.config.output_hidden_states = False
    for parts in zip(first.hidden_states, rest.hidden_states, output.hidden_states, strict=True):
        torch.testing.assert_close(torch.cat(parts[:2], dim=1), parts[2], rtol=0, atol=1e-10)
    padded, mask = torch.nn.functional.pad(tokens, (3, 0)), torch.nn.functional.pad(torch.ones_like(tokens), (3, 0))
    with_padding = model(padded, attention_mask=mask, output_hidden_states=True, logits_to_keep=2)
    torch.testing.assert_close(with_padding.hidden_states[1][:, 3:], output.hidden_states[1], rtol=0, atol=1e-10)
    torch.testing.assert_close(with_padding.logits, output.logits[:, -2:], rtol=0, atol=1e-10)
    embeddings = model.get_input_embeddings()(tokens)
    if model.model.ngrams:
        with pytest.raises(ValueError, match=r"expected tokens for a model with n-grams \(model.ngrams = 4\)"):
            model(inputs_embeds=embeddings)
        return
    torch.testing.assert_close(model(inputs_embeds=embeddings).logits, output.logits, rtol=0, atol=0)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    generated = model.generate(inputs_embeds=embeddings, **options)
    assert torch.equal(generated, model.generate(tokens, **options)[:, 30:])
    model.set_input_embeddings(torch.nn.Embedding.from_pretrained(model.get_input_embeddings().weight.detach() * 2))
    assert not torch.equal(model(tokens).logits, output.logits)


def test_gradient_checkpointing_is_the_switch_of_the_model(model: hf.NSALabForCausalLM) -> None:
    model.train()
    tokens = sample_bytes(2, 30)

    def compute_gradients() -> Tensor:
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    expected = compute_gradients()
    switch_checkpointing(model, "enable")
    assert model.supports_gradient_checkpointing and model.model.gradient_checkpointing
    torch.testing.assert_close(compute_gradients(), expected)
    switch_checkpointing(model, "disable")
    assert not model.model.gradient_checkpointing


def test_settings_of_gradient_checkpointing_have_an_effect() -> None:
    """Every second block is recomputed. The reentrant form, which would lose the selection loss, runs as the other one."""
    model, tokens = make_model(n_layers=4, **INDEXER).train(), sample_bytes(2, 30)

    def count_calls_of_blocks() -> tuple[list[int], Tensor]:
        calls, gradients = [0] * 4, []
        model.zero_grad()
        handles = [
            block.attention_norm.register_forward_pre_hook(lambda *_, i=i: calls.__setitem__(i, calls[i] + 1))
            for i, block in enumerate(model.model.blocks)
        ]
        model(tokens, labels=tokens).loss.backward()
        for handle in handles:
            handle.remove()
        gradients = [p.grad.flatten() for p in model.parameters()]
        return calls, torch.cat(gradients)

    calls, expected = count_calls_of_blocks()
    assert calls == [1, 1, 1, 1]
    used = []
    settings = {
        "preserve_rng_state": False,
        "use_reentrant": True,
        "context_fn": lambda: used.append(1) or (nullcontext(),) * 2,
    }
    model._set_gradient_checkpointing(True, functools.partial(checkpoint, **settings), every_n_layers=2)
    calls, gradients = count_calls_of_blocks()
    assert calls == [2, 1, 2, 1] and len(used) == 2
    torch.testing.assert_close(gradients, expected)
    switch_checkpointing(model, "enable", {"use_reentrant": True})
    calls, gradients = count_calls_of_blocks()
    assert calls == [2, 2, 2, 2]
    torch.testing.assert_close(gradients, expected)
