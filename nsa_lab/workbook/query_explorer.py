"""The explorer of notebooks 01 and 06: move a query, change layer and geometry, see what each branch reads and how hard.

Without a front end (papermill, nbval, nbconvert) no widget is created: `explore` draws the same picture once, since
widgets can hang a headless run and an error in a callback goes unnoticed there.
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
    """Show the explorer on the layers of a model (or one example), starting at one query of one of them.

    answer: a token that is marked in the picture. `with_widgets`: yes, no, or (None) only where a front end is open.
    """
    if has_front_end() if use_widgets is None else use_widgets:
        display(build_query_explorer(layers, nsa, position, group, layer=layer, answer=answer))
        return
    reads = compute_reads(layers[layer], nsa, position, group)
    figure = _plot_reads(layers[layer], reads, answer)
    display(make_image(figure, get_title(figure)))
    show_folded("What the chosen blocks say", describe_selected_blocks(reads, layers[layer].text), is_open=True)


def build_query_explorer(
    layers: Sequence[Example],
    nsa: NSAConfig,
    position: int,
    group: int = 0,
    *,
    layer: int = 0,
    answer: int | None = None,
) -> widgets.VBox:
    """The controls and the picture as one widget; an impossible geometry is explained in place of the picture."""
    example, narrow = layers[layer], widgets.Layout(width="11em")
    query = widgets.IntSlider(
        value=position,
        min=0,
        max=example.length - 1,
        description="query t",
        continuous_update=False,
        layout=widgets.Layout(width="60%"),
    )
    depth = widgets.Dropdown(options=list(range(len(layers))), value=layer, description="layer", layout=narrow)
    which = widgets.Dropdown(options=list(range(example.groups)), value=group, description="head group", layout=narrow)
    sizes = {
        name: widgets.Dropdown(
            options=sorted({*choices, getattr(nsa, name)}),
            value=getattr(nsa, name),
            description=name,
            style={"description_width": "3em"},
            layout=widgets.Layout(width="8.5em"),
        )
        for name, choices in SIZE_OPTIONS.items()
    }
    picture = widgets.Image(format="png", layout=widgets.Layout(max_width="100%", height="auto", align_self="flex-start"))
    text = widgets.HTML()

    def redraw(_change: object = None) -> None:
        try:
            geometry = nsa.__class__(**{**nsa.model_dump(), **{name: control.value for name, control in sizes.items()}})
        except ConfigError as error:
            text.value = f"<p style='color:#B00020'>{html.escape(str(error))}</p>"
            picture.layout.visibility = "hidden"
            return
        at_layer, group = depth.value, which.value
        assert at_layer is not None and group is not None, "the controls were made with values"
        example = layers[at_layer]
        reads = compute_reads(example, geometry, query.value, group)
        picture.value = render_png(_plot_reads(example, reads, answer))
        picture.layout.visibility = "visible"
        text.value = f"<pre style='font-size:85%; line-height:1.25'>{html.escape(describe_selected_blocks(reads, example.text))}</pre>"

    for control in (query, depth, which, *sizes.values()):
        control.observe(redraw, names="value")
    redraw()
    return widgets.VBox([widgets.HBox([query, depth, which]), widgets.HBox(list(sizes.values())), picture, text])


def _plot_reads(example: Example, reads: AttentionReads, answer: int | None) -> Figure:
    figure = plot_query_attention(reads, example.description)
    if answer is not None:
        mark_token(figure, answer)
    return figure
