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
from nsa_lab.figures import query_reads
from nsa_lab.figures.query import Reads
from nsa_lab.figures.style import png, title
from nsa_lab.workbook.examples import Example
from nsa_lab.workbook.reads import describe, mark, reads_of
from nsa_lab.workbook.show import fold, has_front_end, image

CHOICES = {
    "l": (8, 16, 32, 64),
    "d": (4, 8, 16, 32),
    "l_sel": (16, 32, 64, 128),
    "n_sel": (3, 4, 8, 16, 32),
    "w": (32, 128, 512, 1024),
}


def explore(
    layers: Sequence[Example],
    nsa: NSAConfig,
    position: int,
    group: int = 0,
    *,
    layer: int = 0,
    answer: int | None = None,
    with_widgets: bool | None = None,
) -> None:
    """Show the explorer on the layers of a model (or one example), starting at one query of one of them.

    answer: a token that is marked in the picture. `with_widgets`: yes, no, or (None) only where a front end is open.
    """
    if has_front_end() if with_widgets is None else with_widgets:
        display(explorer(layers, nsa, position, group, layer=layer, answer=answer))
        return
    reads = reads_of(layers[layer], nsa, position, group)
    figure = _picture(layers[layer], reads, answer)
    display(image(figure, title(figure)))
    fold("What the chosen blocks say", describe(reads, layers[layer].text), opened=True)


def explorer(
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
        for name, choices in CHOICES.items()
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
        reads = reads_of(example, geometry, query.value, group)
        picture.value = png(_picture(example, reads, answer))
        picture.layout.visibility = "visible"
        text.value = f"<pre style='font-size:85%; line-height:1.25'>{html.escape(describe(reads, example.text))}</pre>"

    for control in (query, depth, which, *sizes.values()):
        control.observe(redraw, names="value")
    redraw()
    return widgets.VBox([widgets.HBox([query, depth, which]), widgets.HBox(list(sizes.values())), picture, text])


def _picture(example: Example, reads: Reads, answer: int | None) -> Figure:
    figure = query_reads(reads, example.about)
    if answer is not None:
        mark(figure, answer)
    return figure
