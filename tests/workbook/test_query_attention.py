"""The explorer's attention of one query equals the definition. Attention plots work for all shapes."""

import pytest
import torch
from looping import looped
from matplotlib.colors import to_rgba
from matplotlib.patches import Rectangle

from nsa_lab import figures
from nsa_lab.attention import geometry, reference
from nsa_lab.config import NSAConfig
from nsa_lab.figures.blocks import compute_equation_nine
from nsa_lab.figures.style import FORCED, SEL, get_title, render_png
from nsa_lab.workbook import examples
from nsa_lab.workbook.query_attention import compute_reads, describe_selected_blocks
from nsa_lab.workbook.query_explorer import SIZE_OPTIONS, build_query_explorer

TOY = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=12)


@pytest.fixture(scope="module")
def example():
    return examples.make_random_example(64, heads=4, groups=2, head_dim=8)


@looped
@pytest.mark.parametrize("position", [0, 6, 7, 8, 31, 57, 63])
@pytest.mark.parametrize("group", [0, 1])
def test_reads_equal_rows_of_the_definition(example, position, group):
    reads = compute_reads(example, TOY, position, group)
    k_cmp = reference.compress(example.k_cmp, TOY)
    out, lse = reference.compressed_attention(example.q, k_cmp, reference.compress(example.v_cmp, TOY), TOY)
    blocks = reference.select_blocks(example.q, k_cmp, lse, TOY)
    assert reads.blocks == [block for block in blocks[0, position, group].tolist() if block >= 0]
    importance = reference.block_importance(example.q, k_cmp, lse, TOY)[0, position, group, : len(reads.importance)]
    torch.testing.assert_close(reads.importance, importance)
    assert reads.count_keys() == geometry.decode_reads(position + 1, TOY)

    heads = slice(2 * group, 2 * group + 2)
    v_cmp = reference.compress(example.v_cmp, TOY)[0, : len(reads.cmp), group]
    torch.testing.assert_close(reads.cmp @ v_cmp, out[0, position, heads].mean(0))
    selected, _ = reference.selected_attention(example.q, example.k_sel, example.v_sel, blocks, TOY)
    torch.testing.assert_close(reads.sel @ example.v_sel[0, : position + 1, group], selected[0, position, heads].mean(0))
    window, _ = reference.window_attention(example.q, example.k_win, example.v_win, TOY)
    torch.testing.assert_close(reads.win @ example.v_win[0, : position + 1, group], window[0, position, heads].mean(0))


@looped
@pytest.mark.parametrize("position, group", [(-1, 0), (64, 0), (0, 2)])
def test_invalid_query_is_an_error(example, position, group):
    with pytest.raises(IndexError, match="positions 0 to 63"):
        compute_reads(example, TOY, position, group)


def test_text_heads_match_similar_passages():
    text = "the cat sat on the mat. " + "x" * 300 + " the cat sat on the mat"
    example = examples.make_text_example(text)
    reads = compute_reads(example, NSAConfig(l=8, d=4, l_sel=8, n_sel=64, w=16), len(text) - 1, group=1)
    # The token after the equal passage, the full stop, has the largest weight.
    assert text[int(reads.sel.argmax())] == "."
    assert "'the cat" in describe_selected_blocks(reads, text) and "forced" in describe_selected_blocks(reads, text)


@looped
@pytest.mark.parametrize("sizes", [{}, {"l": 16, "d": 16, "l_sel": 32}, {"l": 64, "d": 16, "l_sel": 32}, {"l": 8, "d": 2}])
def test_corrected_equation_nine_is_the_overlap(sizes):
    nsa = NSAConfig(**sizes)
    overlap = geometry.overlap(64, 12, nsa)
    assert torch.equal(compute_equation_nine(64, 12, nsa, as_printed=False), overlap)
    printed = compute_equation_nine(64, 12, nsa, as_printed=True)
    assert not torch.equal(printed, overlap)
    # With the printed formula, block j = 0 has only the first compressed block, once.
    assert printed[:, 0].nonzero().flatten().tolist() == [0] and printed[0, 0] == 1


@pytest.mark.slow
@looped
@pytest.mark.parametrize("length", [8, *(pytest.param(length, marks=pytest.mark.nightly) for length in (1, 7, 64))])
def test_plots_of_any_length_have_a_title(example, length):
    x = examples.make_random_example(length, heads=2, groups=1, head_dim=4)
    k_cmp = reference.compress(x.k_cmp, TOY)
    _, lse = reference.compressed_attention(x.q, k_cmp, k_cmp, TOY)
    importance = reference.block_importance(x.q, k_cmp, lse, TOY)[0, :, 0]
    blocks = reference.select_blocks(x.q, k_cmp, lse, TOY)[0, :, 0]
    plots = [
        figures.plot_block_geometry(length, TOY, length - 1),
        figures.plot_visible_blocks(length, TOY),
        figures.plot_importance(importance, blocks, TOY, "a toy"),
        figures.plot_query_attention(compute_reads(x, TOY, length - 1), "a toy"),
        figures.plot_selection_by_layer({0: blocks, 3: blocks}, TOY, "a toy"),
        figures.plot_reads_by_length([1, 64], TOY),
        figures.plot_architecture(compute_reads(x, TOY, length - 1)),
        figures.plot_branch_masks(blocks, TOY),
    ]
    for figure in plots:
        assert render_png(figure).startswith(b"\x89PNG") and get_title(figure)


def test_bar_of_a_token_is_inside_its_block(example):
    """Blocks, shades, bars and the line of the query extend from t to t + 1 for token t."""
    reads = compute_reads(example, TOY, 57)
    selected = [bar for bar in figures.plot_query_attention(reads, "a toy").axes[2].patches if bar.get_height() < 1][
        : reads.count_keys()["sel"]
    ]
    lefts = [bar.get_x() for bar in selected]
    assert lefts == (reads.sel > 0).nonzero().flatten().tolist() and {bar.get_width() for bar in selected} == {1.0}


def test_mask_pairs_equal_the_formulas(example):
    k_cmp = reference.compress(example.k_cmp, TOY)
    _, lse = reference.compressed_attention(example.q, k_cmp, k_cmp, TOY)
    blocks = reference.select_blocks(example.q, k_cmp, lse, TOY)[0, :, 0]
    counted = [
        int(axes.get_title().split("\n")[1].split()[0].replace(",", ""))
        for axes in figures.plot_branch_masks(blocks, TOY).axes
    ]
    read = geometry.mean_reads(64, TOY)
    assert counted == [round(64 * read[branch]) for branch in ("dense", "cmp", "sel", "win")]


def test_architecture_shows_the_number_of_keys(example):
    (axes,) = figures.plot_architecture(compute_reads(example, TOY, 57, 1)).axes
    texts = [text.get_text() for text in axes.texts]
    assert [text for text in texts if "attention of" in text] == [
        f"attention of $q_t$\nover {n} keys" for n in (13, 26, 12)
    ]
    # One of the four blocks is selected by score; three are forced.
    whole_block = pytest.approx(54 / 58 * 8 - 0.4)
    chosen = [bar.get_facecolor() for bar in axes.patches if isinstance(bar, Rectangle) and bar.get_width() == whole_block]
    assert chosen.count(to_rgba(SEL)) == 1 and chosen.count(to_rgba(FORCED)) == 2


def test_document_boundary_plot():
    """With the mask, no read starts in another document; without it, some do."""
    x, bounds = examples.make_random_example(64, heads=2, groups=1, head_dim=4), [0, 26, 64]
    unmasked, masked = compute_reads(x, TOY, 41), compute_reads(x.slice_document(26, 64), TOY, 41 - 26)
    figure = figures.plot_document_boundaries(unmasked, masked, bounds)
    unmasked_title, masked_title = (axes.get_title(loc="left") for axes in figure.axes)
    foreign = [
        sum(i * TOY.d < 26 for i in range(len(unmasked.cmp))),
        sum(j * TOY.l_sel < 26 for j in unmasked.blocks),
        max(26 - (41 - TOY.w + 1), 0),
    ]
    assert foreign[0] and foreign[1] and f"(cross): {sum(foreign)} reads start in other documents" in unmasked_title
    assert "(mask): 0 reads" in masked_title and "which is token 15 of its document" in get_title(figure)
    starts = [patch.get_x() for patch in figure.axes[1].patches if patch.get_height() < 0.9]
    read = len(masked.cmp) + len(masked.blocks) + int((masked.win > 0).sum())
    assert len(starts) == read and min(starts) == 26 and render_png(figure).startswith(b"\x89PNG")


@pytest.mark.slow
def test_explorer_updates_and_explains_invalid_sizes(example):
    box = build_query_explorer([example, examples.make_random_example(64, seed=1)], TOY, position=57, answer=40)
    (query, layer, _), sizes, picture, text = (
        box.children[0].children,
        box.children[1].children,
        box.children[2],
        box.children[3],
    )
    before = picture.value
    query.value = 20
    assert picture.value != before and "query 20" in text.value
    by_name = {control.description: control for control in sizes}
    assert set(by_name) == set(SIZE_OPTIONS)
    by_name["d"].value = 16
    assert "nsa.l = 8 is not a multiple of nsa.d = 16" in text.value and picture.layout.visibility == "hidden"
    by_name["d"].value = 4
    assert picture.layout.visibility == "visible" and "query 20" in text.value
    before = text.value
    layer.value = 1
    assert text.value != before and "query 20" in text.value


def test_all_panels_have_axis_labels(example):
    blocks = torch.zeros(64, 4, dtype=torch.int32)
    for axes in figures.plot_branch_masks(blocks, TOY).axes:
        assert any(label.get_visible() and label.get_text() for label in axes.get_yticklabels()), axes.get_title()
