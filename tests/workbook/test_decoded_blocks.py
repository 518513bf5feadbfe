"""Decoded answers, with the selected blocks marked in the text."""

from __future__ import annotations

from nsa_lab import figures
from nsa_lab.evaluate.tiny_recall import EVAL_STREAM, TINY_NSA, TinyRecall, build_tiny_model
from nsa_lab.workbook.decoded_blocks import DecodedToken, decode_answers, format_html, format_text


def test_answers_equal_full_passes_and_blocks_equal_observed_ones() -> None:
    task, model = TinyRecall(), build_tiny_model(seed=3).eval()
    tokens, positions = task.make_batch(0, 1, 0, EVAL_STREAM)
    decoded = list(decode_answers(model, task, layer=1, group=1))
    assert len(decoded) == task.n_far
    for token, position in zip(decoded, sorted(positions[0, -task.n_far :].flatten().tolist()), strict=True):
        assert len(token.text) == position
        predicted = model(tokens[:, :position])[0, -1].argmax().item()
        assert token.token == "abcdefghijklmnopABCDEFGHIJKLMNOP"[predicted]
        assert token.expected == "abcdefghijklmnopABCDEFGHIJKLMNOP"[tokens[0, position]]
        own_block = (position - 1) // TINY_NSA.l_sel
        assert {0, own_block - 1, own_block} <= set(token.blocks) and len(token.blocks) == TINY_NSA.n_sel


def test_selected_blocks_and_answers_are_marked() -> None:
    token = DecodedToken("aAb<cCa", [0, 3], "B", "A")
    assert format_text([token], 2) == "[aA] b<  cC [a] -> B"
    page = format_html([token], 2)
    assert page.count("<span") == 3 and "b&lt;" in page and ">aA</span>b&lt;cC<span" in page
    assert token.has_selected_answer(2) and not token._replace(blocks=[1, 3]).has_selected_answer(2)
    assert format_html([token], 2) != format_html([token._replace(expected="B")], 2)


def test_decode_speed_plot() -> None:
    figure = figures.plot_decode_speed({"nsa": [(10, 2.0), (1, 1.0)], "dense": [(1, 3.0)]}, "MB", "here")
    (axes,) = figure.axes
    assert [line.get_xdata().tolist() for line in axes.lines] == [[1, 10], [1]] and axes.get_ylabel() == "MB"
