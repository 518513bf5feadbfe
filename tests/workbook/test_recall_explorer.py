"""The explorer of notebook 07 shows the selected blocks of a query and the position of the answer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from looping import looped

from nsa_lab.config import ModelConfig
from nsa_lab.evaluate.block_selectors import select_model_blocks
from nsa_lab.evaluate.tiny_recall import EVAL_STREAM, TINY_NSA, TinyRecall, build_tiny_model
from nsa_lab.model import NSATransformer, get_rotary_table
from nsa_lab.workbook.examples import make_byte_examples
from nsa_lab.workbook.query_attention import compute_reads
from nsa_lab.workbook.recall_explorer import (
    build_recall_explorer,
    explore_recall,
    find_hidden_question,
    find_readers,
    format_letters,
    make_layer_example,
    plot_question,
)

TASK = TinyRecall()


def model_of(**changes: object):
    enters = {"embedding_norm": True, "ngrams": 3, "ngram_rows": 50, "ngram_width": 4}
    return build_tiny_model(TASK, seed=1, rotary_share=0.5, matching_heads=1, **enters, **changes).eval()


@torch.no_grad()
@looped
@pytest.mark.parametrize("indexer", [{}, {"selection_loss": 0.2, "indexer_block": 2}], ids=["compressed", "indexer"])
@pytest.mark.parametrize("layer", [0, 1])
def test_layer_reads_the_selected_blocks(layer: int, indexer: dict[str, float]) -> None:
    model, (tokens, _) = model_of(**indexer), TASK.make_batch(0, 1)
    if indexer:
        torch.nn.init.normal_(model.blocks[layer].attention.indexer.qk.weight)
    example = make_layer_example(model, TASK, tokens, layer)
    x, rotary = model.embed(tokens), get_rotary_table(64, 8, model.config.rope_theta, tokens.device)
    for block in model.blocks[:layer]:
        x, _ = block(x, rotary)
    inner = model.blocks[layer].attention
    normed = model.blocks[layer].attention_norm(x)
    chosen = select_model_blocks(inner.project_selection_inputs(normed, inner.project(normed, rotary), rotary), inner)
    for t in (20, 52, 63):
        for group in (0, 1):
            assert compute_reads(example, TINY_NSA, t, group).blocks == [b for b in chosen[0, t, group].tolist() if b >= 0]


def test_indexer_keys_select_blocks_of_another_length() -> None:
    """The importance of a block of twice the length is the sum of two blocks."""
    model = model_of(selection_loss=0.2, indexer_block=2)
    torch.nn.init.normal_(model.blocks[1].attention.indexer.qk.weight)
    example = make_layer_example(model, TASK, TASK.make_batch(0, 1)[0], 1)
    wider = TINY_NSA.model_copy(update={"l_sel": 2 * TINY_NSA.l_sel})
    short, long = (compute_reads(example, nsa, 63).importance for nsa in (TINY_NSA, wider))
    torch.testing.assert_close(long, short.view(-1, 2).sum(-1))


INDEXER = {"indexer_block": 2, "selection_loss": 0.2}


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"shared_kv": True},
        {"nsa": TINY_NSA.model_copy(update={"scores": "mean_key"})},
        {**INDEXER, "indexer_heads": 2, "indexer_every": 2},
    ],
)
def test_byte_model_reads_its_selected_blocks(variant: dict[str, Any]) -> None:
    """Also with shared keys, and with the blocks of an earlier layer."""
    sizes = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 8, "d_v": 8, "nsa": TINY_NSA}
    model, text = NSATransformer(ModelConfig(**{**sizes, **variant}), seed=0).eval(), "caf\u00e9 ".encode() * 12
    for name, parameter in model.named_parameters():
        if ".indexer.qk" in name:
            torch.nn.init.normal_(parameter)
    layers = make_byte_examples(model, text, "a text")
    observed = model.observe(torch.tensor([list(text)]))
    for group in range(2):
        blocks = [[j for j in seen["blocks"][0, -1, group].tolist() if j >= 0] for seen in observed]
        assert [compute_reads(one, TINY_NSA, len(text) - 1, group).blocks for one in layers] == blocks
    assert [one.description for one in layers] == ["a text, layer 0", "a text, layer 1"] and len(layers[0].text) == len(
        text
    )


def test_models_that_the_explorer_cannot_show_are_refused() -> None:
    for changes in ({"attention": "dense"}, {"branches": ("cmp", "sel")}):
        with pytest.raises(ValueError, match="the explorer shows"):
            make_byte_examples(model_of(**changes), b"a text", "a text")


def test_first_question_is_hidden_and_its_answer_is_described() -> None:
    sequence, question = find_hidden_question(TASK, TINY_NSA)
    figure, words = plot_question(model_of(), "NSA", TASK, sequence, question, layer=1, group=0)
    text = format_letters(TASK, TASK.make_batch(sequence, 1, 0, EVAL_STREAM)[0][0])
    key = text[52 + 2 * question]
    answer = text.index(key) + 1
    assert f"the question is {key!r}, the answer {text[answer]!r} is at token {answer} in block {answer // 8}" in words
    assert answer <= 52 + 2 * question - 16 and answer >= 8
    assert {answer + 0.5} <= {line.get_xdata()[0] for line in figure.axes[0].lines}


@pytest.mark.parametrize("w", [1, 15, 17])
def test_hidden_question_is_reachable_by_selection_only(w: int) -> None:
    """This includes queries whose previous block reaches further back than their window."""
    nsa = TINY_NSA.model_copy(update={"w": w})
    for seed in range(40):
        for sequence, question in itertools.product(range(100), range(TASK.n_far)):
            text = format_letters(TASK, TASK.make_batch(sequence, 1, seed, EVAL_STREAM)[0][0])
            query = 52 + 2 * question
            answer = text.index(text[query]) + 1
            if 8 <= answer < query // 8 * 8 - 8 and answer <= query - w:
                break
        assert find_hidden_question(TASK, nsa, seed) == (sequence, question)


@pytest.mark.slow
def test_find_readers() -> None:
    """Compared with `compute_reads` of each layer and group. A token in an unselected block has no reader."""
    model, query = model_of(), 63
    tokens = TASK.make_batch(0, 1, 0, EVAL_STREAM)[0]
    for token in range(0, query, 7):
        expected = [
            (layer, group)
            for layer in range(2)
            for group in range(2)
            if token // TINY_NSA.l_sel
            in compute_reads(make_layer_example(model, TASK, tokens, layer), TINY_NSA, query, group).blocks
        ]
        assert find_readers(model, tokens, query, token) == expected
    assert any(len(find_readers(model, tokens, query, token)) not in (0, 4) for token in range(query)), (
        "nothing tells them apart"
    )


@pytest.mark.nightly
def test_explorer_updates() -> None:
    box = build_recall_explorer(
        {"one": model_of(), "two": model_of(nsa=TINY_NSA.__class__(**{**TINY_NSA.model_dump(), "w": 4}))}, TASK
    )
    (which, sequence, question), (layer, group), picture, text = (
        *(row.children for row in box.children[:2]),
        *box.children[2:],
    )
    for control, value in ((which, "two"), (sequence, 9), (question, 4), (layer, 0), (group, 1)):
        before = text.value, picture.value
        control.value = value
        assert (text.value, picture.value) != before, control.description
    assert "two, tiny recall, layer 0" in text.value and "group 1" in text.value


def test_without_a_front_end_one_question_per_model_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    explore_recall({"one": model_of()}, TASK, use_widgets=False)
    printed = capsys.readouterr().out
    assert ", read here; the model predicts" in printed and "the answer's block is read by layer " in printed


def test_unsupported_tasks_and_models_are_errors() -> None:
    with pytest.raises(ValueError, match="attention = dense"):
        make_layer_example(build_tiny_model(TASK, attention="dense"), TASK, TASK.make_batch(0, 1)[0], 0)
    with pytest.raises(ValueError, match=r"n_symbols: expected at most 26, .* got 27"):
        format_letters(TinyRecall(n_symbols=27), torch.tensor([0]))
    with pytest.raises(ValueError, match="no answer is outside the window"):
        find_hidden_question(TASK, TINY_NSA.__class__(w=64))
