"""The explorer of notebooks 02 and 07: change query, layer and block sizes, and see the attention of each branch.

Without a front end (papermill, nbval, nbconvert), `explore_query` draws the figure once and creates no widget: widgets can
block a headless run, and an error in a callback would go unnoticed.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

import ipywidgets as widgets
from IPython.display import display
from matplotlib.figure import Figure

from nsa_lab.config import ConfigError, NSAConfig
from nsa_lab.figures import plot_query_attention
from nsa_lab.figures.query_plot import AttentionReads
from nsa_lab.figures.style import get_title, render_png
from nsa_lab.workbook.display import has_front_end, make_image, show_folded
from nsa_lab.workbook.examples import Example
from nsa_lab.workbook.query_attention import compute_reads, describe_selected_blocks, mark_token

SIZE_OPTIONS = {
    "l": (8, 16, 32, 64),
    "d": (4, 8, 16, 32),
    "l_sel": (16, 32, 64, 128),
    "n_sel": (3, 4, 8, 16, 32),
    "w": (32, 128, 512, 1024),
}


def explore_query(
    layers: Sequence[Example],
    nsa: NSAConfig,
    position: int,
    group: int = 0,
    *,
    layer: int = 0,
    answer: int | None = None,
    use_widgets: bool | None = None,
) -> None:
    """Show the explorer on the layers of a model (or on one example), starting with one query of one layer.

    `answer` is a token to mark in the figure. `use_widgets`: True, False, or None for widgets only if a front end is open.
    """
    if has_front_end() if use_widgets is None else use_widgets:
        display(build_query_explorer(layers, nsa, position, group, layer=layer, answer=answer))
        return
    reads = compute_reads(layers[layer], nsa, position, group)
    figure = _plot_reads(layers[layer], reads, answer)
    display(make_image(figure, get_title(figure)))
    show_folded("Text of the selected blocks", describe_selected_blocks(reads, layers[layer].text), is_open=True)


def build_query_explorer(
    layers: Sequence[Example],
    nsa: NSAConfig,
    position: int,
    group: int = 0,
    *,
    layer: int = 0,
    answer: int | None = None,
) -> widgets.VBox:
    """Return the controls and the figure as one widget. Invalid block sizes are explained in place of the figure."""
    example, layout = layers[layer], widgets.Layout(width="11em")
    query_slider = widgets.IntSlider(
        value=position,
        min=0,
        max=example.length - 1,
        description="query t",
        continuous_update=False,
        layout=widgets.Layout(width="60%"),
    )
    layer_control = widgets.Dropdown(options=list(range(len(layers))), value=layer, description="layer", layout=layout)
    group_control = widgets.Dropdown(
        options=list(range(example.groups)), value=group, description="head group", layout=layout
    )
    size_controls = {
        name: widgets.Dropdown(
            options=sorted({*options, getattr(nsa, name)}),
            value=getattr(nsa, name),
            description=name,
            style={"description_width": "3em"},
            layout=widgets.Layout(width="8.5em"),
        )
        for name, options in SIZE_OPTIONS.items()
    }
    image = widgets.Image(format="png", layout=widgets.Layout(max_width="100%", height="auto", align_self="flex-start"))
    text = widgets.HTML()

    def redraw(_change: object = None) -> None:
        try:
            new_nsa = nsa.__class__(
                **{**nsa.model_dump(), **{name: control.value for name, control in size_controls.items()}}
            )
        except ConfigError as error:
            text.value = f"<p style='color:#B00020'>{html.escape(str(error))}</p>"
            image.layout.visibility = "hidden"
            return
        selected_layer, group = layer_control.value, group_control.value
        assert selected_layer is not None and group is not None, "the controls have initial values"
        example = layers[selected_layer]
        reads = compute_reads(example, new_nsa, query_slider.value, group)
        image.value = render_png(_plot_reads(example, reads, answer))
        image.layout.visibility = "visible"
        lines = html.escape(describe_selected_blocks(reads, example.text))
        text.value = f"<pre style='font-size:85%; line-height:1.25'>{lines}</pre>"

    for control in (query_slider, layer_control, group_control, *size_controls.values()):
        control.observe(redraw, names="value")
    redraw()
    return widgets.VBox(
        [
            widgets.HBox([query_slider, layer_control, group_control]),
            widgets.HBox(list(size_controls.values())),
            image,
            text,
        ]
    )


def _plot_reads(example: Example, reads: AttentionReads, answer: int | None) -> Figure:
    figure = plot_query_attention(reads, example.description)
    if answer is not None:
        mark_token(figure, answer)
    return figure
