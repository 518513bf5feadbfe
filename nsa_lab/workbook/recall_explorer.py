"""The explorer of notebook 07: a question of the tiny recall task, the blocks that its query selected, and the answer.

Without a front end no widget is created, and the figures are drawn once.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from string import ascii_lowercase, ascii_uppercase

import ipywidgets as widgets
import torch
from IPython.display import display
from matplotlib.figure import Figure

from nsa_lab.config import NSAConfig
from nsa_lab.evaluate.tiny_recall import EVAL_STREAM, TinyRecall
from nsa_lab.figures import plot_query_attention
from nsa_lab.figures.style import render_png
from nsa_lab.model import NSATransformer
from nsa_lab.workbook.display import has_front_end, show_figure
from nsa_lab.workbook.examples import Example, make_layer_examples
from nsa_lab.workbook.query_attention import compute_reads, describe_selected_blocks, mark_token


def format_letters(task: TinyRecall, tokens: torch.Tensor) -> str:
    """Return tokens [T] as text with one character each: keys are a, b, c ..., values are A, B, C ...

    Raises ValueError if the task has more symbols than there are letters.
    """
    if task.n_symbols > len(ascii_lowercase):
        raise ValueError(
            f"n_symbols: expected at most {len(ascii_lowercase)}, because the explorer shows letters; got {task.n_symbols}"
        )
    alphabet = ascii_lowercase[: task.n_symbols] + ascii_uppercase[: task.n_symbols]
    return "".join(alphabet[token] for token in tokens.tolist())


def make_layer_example(model: NSATransformer, task: TinyRecall, tokens: torch.Tensor, layer: int) -> Example:
    """Return the attention inputs of one layer of `model` on tokens [1, T]. Raises ValueError as `make_layer_examples`."""
    return make_layer_examples(model, tokens, format_letters(task, tokens[0]), "tiny recall")[layer]


def find_hidden_question(task: TinyRecall, nsa: NSAConfig, seed: int = 0) -> tuple[int, int]:
    """Return the first sequence and question whose answer is outside the forced blocks and the window.

    Raises ValueError if 100 sequences have none.
    """
    for sequence in range(100):
        for question in range(task.n_far):
            _, query, answer = _locate_question(task, sequence, question, seed)
            own_block, block = query // nsa.l_sel, answer // nsa.l_sel
            if block not in (0, own_block - 1, own_block) and answer <= query - nsa.w:
                return sequence, question
    raise ValueError(
        f"{task} with window w = {nsa.w}: no answer is outside the window and the forced blocks; "
        "use a longer task or a shorter window"
    )


def _locate_question(task: TinyRecall, sequence: int, question: int, seed: int) -> tuple[torch.Tensor, int, int]:
    """Return tokens [1, T], the position of the query, and the position of its answer."""
    tokens, places = task.make_batch(sequence, 1, seed, EVAL_STREAM)
    query = int(places[0, -task.n_far :].flatten().sort().values[question]) - 1
    row = tokens[0].tolist()
    return tokens, query, row.index(row[query]) + 1


@torch.no_grad()
def find_readers(model: NSATransformer, tokens: torch.Tensor, query: int, token: int) -> list[tuple[int, int]]:
    """Return (layer, group) of every selection of `query` that contains the block of `token`, in tokens int64 [1, T]."""
    block = token // model.config.nsa.l_sel
    contains = [(statistics["blocks"][0, query] == block).any(-1) for statistics in model.observe(tokens)]
    return [(layer, group) for layer, groups in enumerate(contains) for group in groups.nonzero().flatten().tolist()]


def plot_question(
    model: NSATransformer, name: str, task: TinyRecall, sequence: int, question: int, layer: int, group: int, seed: int = 0
) -> tuple[Figure, str]:
    """Return a plot of the attention of one far question, with the answer marked, and the same as text."""
    tokens, query, answer_position = _locate_question(task, sequence, question, seed)
    example = make_layer_example(model, task, tokens, layer)
    reads = compute_reads(example, model.config.nsa, query, group)
    with torch.no_grad():
        predicted = format_letters(task, model(tokens[:, : query + 1])[0, -1:].argmax(-1))
    expected, block = example.text[query + 1], answer_position // model.config.nsa.l_sel
    status = "read" if block in reads.blocks else "not read"
    readers = find_readers(model, tokens, query, answer_position)
    reader_names = ", ".join(f"layer {layer} group {reader_group}" for layer, reader_group in readers) or "no layer"
    caption = (
        f"{name}, {example.description}: the question is {example.text[query]!r}, the answer {expected!r} is at token "
        f"{answer_position} in block {block}, {status} here; the model predicts {predicted!r}"
    )
    figure = plot_query_attention(reads, caption)
    mark_token(figure, answer_position)
    return (
        figure,
        f"{caption}\nthe answer's block is read by {reader_names}\n{describe_selected_blocks(reads, example.text)}",
    )


def explore_recall(
    models: Mapping[str, NSATransformer],
    task: TinyRecall,
    *,
    layer: int = 1,
    group: int = 0,
    seed: int = 0,
    use_widgets: bool | None = None,
) -> None:
    """Show the explorer on trained models by name.

    `use_widgets`: True, False, or None for widgets only if a front end is open. Without widgets, the figure of each model
    shows the first layer and group that read the answer's block, if any did.
    """
    if has_front_end() if use_widgets is None else use_widgets:
        display(build_recall_explorer(models, task, layer=layer, group=group, seed=seed))
        return
    for name, model in models.items():
        sequence, question = find_hidden_question(task, model.config.nsa, seed)
        reader_layer, reader_group = next(
            iter(find_readers(model, *_locate_question(task, sequence, question, seed))), (layer, group)
        )
        figure, text = plot_question(model, name, task, sequence, question, reader_layer, reader_group, seed)
        show_figure(figure)
        print(text)


def build_recall_explorer(
    models: Mapping[str, NSATransformer], task: TinyRecall, *, layer: int = 1, group: int = 0, seed: int = 0
) -> widgets.VBox:
    """Return the controls and the figure as one widget."""
    config = next(iter(models.values())).config
    hidden_sequence, hidden_question = find_hidden_question(task, config.nsa, seed)
    model_control = widgets.Dropdown(options=list(models), description="model")
    sequence_control = widgets.BoundedIntText(value=hidden_sequence, min=0, max=10_000, description="sequence")
    question_slider = widgets.IntSlider(
        value=hidden_question, min=0, max=task.n_far - 1, description="question", continuous_update=False
    )
    layer_control = widgets.Dropdown(options=list(range(config.n_layers)), value=layer, description="layer")
    group_control = widgets.Dropdown(options=list(range(config.n_kv_groups)), value=group, description="head group")
    controls = (model_control, sequence_control, question_slider, layer_control, group_control)
    image = widgets.Image(format="png", layout=widgets.Layout(max_width="100%", height="auto", align_self="flex-start"))
    text_area = widgets.HTML()

    def redraw(_change: object = None) -> None:
        name, layer_index, group_index = model_control.value, layer_control.value, group_control.value
        assert name is not None and layer_index is not None and group_index is not None, "the controls have initial values"
        figure, description = plot_question(
            models[name], name, task, sequence_control.value, question_slider.value, layer_index, group_index, seed
        )
        image.value = render_png(figure)
        text_area.value = f"<pre style='font-size:85%; line-height:1.25'>{html.escape(description)}</pre>"

    for control in controls:
        control.observe(redraw, names="value")
    redraw()
    return widgets.VBox([widgets.HBox(list(controls[:3])), widgets.HBox(list(controls[3:])), image, text_area])
