"""What a model wrote, and the blocks that it read marked in the text."""

from __future__ import annotations

from nsa_lab import figures
from nsa_lab.evaluate.tiny_recall import EVAL_STREAM, TINY_NSA, TinyRecall, build_tiny_model
from nsa_lab.workbook.decoded_blocks import DecodedToken, decode_answers, format_html, format_text


def test_answers_are_those_of_full_passes_and_blocks_those_that_are_observed() -> None:
    task, model = TinyRecall(), build_tiny_model(seed=3).eval()
    tokens, places = task.make_batch(0, 1, 0, EVAL_STREAM)
    found = list(decode_answers(model, task, layer=1, group=1))
    assert len(found) == task.n_far
    for one, place in zip(found, sorted(places[0, -task.n_far :].flatten().tolist()), strict=True):
        assert len(one.text) == place
        likeliest = model(tokens[:, :place])[0, -1].argmax().item()
        assert one.token == "abcdefghijklmnopABCDEFGHIJKLMNOP"[likeliest]
        assert one.expected == "abcdefghijklmnopABCDEFGHIJKLMNOP"[tokens[0, place]]
        own = (place - 1) // TINY_NSA.l_sel
        assert {0, own - 1, own} <= set(one.blocks) and len(one.blocks) == TINY_NSA.n_sel


def test_blocks_that_were_read_are_marked_and_the_answer_told() -> None:
    one = DecodedToken("aAb<cCa", [0, 3], "B", "A")
    assert format_text([one], 2) == "[aA] b<  cC [a] -> B"
    page = format_html([one], 2)
    assert page.count("<span") == 3 and "b&lt;" in page and ">aA</span>b&lt;cC<span" in page
    assert one.has_selected_answer(2) and not one._replace(blocks=[1, 3]).has_selected_answer(2)
    assert format_html([one], 2) != format_html([one._replace(expected="B")], 2)


def test_a_quantity_is_drawn_against_context() -> None:
    figure = figures.plot_decode_speed({"nsa": [(10, 2.0), (1, 1.0)], "dense": [(1, 3.0)]}, "MB", "here")
    (axes,) = figure.axes
    assert [line.get_xdata().tolist() for line in axes.lines] == [[1, 10], [1]] and axes.get_ylabel() == "MB"
