"""The explorer of notebook 01: move a query, change the geometry, see what each branch reads and how much it weighs.

Without a front end (papermill, nbval, nbconvert) no widget is created: `explore` draws the same picture once, since
widgets can hang a headless run and an error in a callback goes unnoticed there.
"""

from __future__ import annotations

import html

import ipywidgets as widgets
from IPython.display import display

from nsa_lab.config import ConfigError, NSAConfig
from nsa_lab.figures import query_reads
from nsa_lab.figures.style import png, title
from nsa_lab.workbook.examples import Example
from nsa_lab.workbook.reads import describe, reads_of
from nsa_lab.workbook.show import fold, has_front_end, image

CHOICES = {
    "l": (8, 16, 32, 64),
    "d": (4, 8, 16, 32),
    "l_sel": (16, 32, 64, 128),
    "n_sel": (3, 4, 8, 16, 32),
    "w": (32, 128, 512, 1024),
}


def explore(example: Example, nsa: NSAConfig, position: int, group: int = 0, *, with_widgets: bool | None = None) -> None:
    """Show the explorer, starting at one query. `with_widgets`: yes, no, or (None) only where a front end is open."""
    if has_front_end() if with_widgets is None else with_widgets:
        display(explorer(example, nsa, position, group))
        return
    reads = reads_of(example, nsa, position, group)
    figure = query_reads(reads, example.about)
    display(image(figure, title(figure)))
    fold("What the chosen blocks say", describe(reads, example.text), opened=True)


def explorer(example: Example, nsa: NSAConfig, position: int, group: int = 0) -> widgets.VBox:
    """The controls and the picture as one widget; an impossible geometry is explained in place of the picture."""
    query = widgets.IntSlider(
        value=position,
        min=0,
        max=example.length - 1,
        description="query t",
        continuous_update=False,
        layout=widgets.Layout(width="60%"),
    )
    which = widgets.Dropdown(
        options=list(range(example.groups)), value=group, description="head group", layout=widgets.Layout(width="11em")
    )
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
        group = which.value
        assert group is not None, "the control was made with a value"
        reads = reads_of(example, geometry, query.value, group)
        picture.value = png(query_reads(reads, example.about))
        picture.layout.visibility = "visible"
        text.value = f"<pre style='font-size:85%; line-height:1.25'>{html.escape(describe(reads, example.text))}</pre>"

    for control in (query, which, *sizes.values()):
        control.observe(redraw, names="value")
    redraw()
    return widgets.VBox([widgets.HBox([query, which]), widgets.HBox(list(sizes.values())), picture, text])
