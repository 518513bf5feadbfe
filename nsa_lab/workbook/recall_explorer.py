"""The explorer of notebook 06: a question of the tiny recall task, what it chose to read, and where its answer stood.

Without a front end no widget is created, and the pictures are drawn once.
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
    """Tokens [T] as text, one character each: keys are a, b, c ..., and values A, B, C ...

    Raises ValueError for a task of more symbols than there are letters.
    """
    if task.n_symbols > len(ascii_lowercase):
        raise ValueError(f"symbols = {task.n_symbols}: the explorer writes letters; use at most {len(ascii_lowercase)}")
    alphabet = ascii_lowercase[: task.n_symbols] + ascii_uppercase[: task.n_symbols]
    return "".join(alphabet[token] for token in tokens.tolist())


def make_layer_example(model: NSATransformer, task: TinyRecall, tokens: torch.Tensor, layer: int) -> Example:
    """What attention is given in one layer of `model` on tokens [1, T]. Raises ValueError as `layer_examples` does."""
    return make_layer_examples(model, tokens, format_letters(task, tokens[0]), "tiny recall")[layer]


def find_hidden_question(task: TinyRecall, nsa: NSAConfig, seed: int = 0) -> tuple[int, int]:
    """The first sequence, and its question, whose answer stands where neither forced blocks nor the window reach.

    Raises ValueError where a hundred sequences have none.
    """
    for sequence in range(100):
        for question in range(task.n_far):
            _, query, told = _locate_question(task, sequence, question, seed)
            own, block = query // nsa.l_sel, told // nsa.l_sel
            if block not in (0, own - 1, own) and told <= query - nsa.w:
                return sequence, question
    raise ValueError(f"{task} with window w = {nsa.w}: no question is out of reach; use a longer task or a shorter window")


def _locate_question(task: TinyRecall, sequence: int, question: int, seed: int) -> tuple[torch.Tensor, int, int]:
    """Tokens [1, T], the query that is asked, and where its answer stood before."""
    tokens, places = task.make_batch(sequence, 1, seed, EVAL_STREAM)
    query = int(places[0, -task.n_far :].flatten().sort().values[question]) - 1
    row = tokens[0].tolist()
    return tokens, query, row.index(row[query]) + 1


@torch.no_grad()
def find_readers(model: NSATransformer, tokens: torch.Tensor, query: int, token: int) -> list[tuple[int, int]]:
    """(layer, group) of every choice of `query` that holds the block of `token`, in tokens int64 [1, T]."""
    block = token // model.config.nsa.l_sel
    holds = [(seen["blocks"][0, query] == block).any(-1) for seen in model.observe(tokens)]
    return [(layer, group) for layer, groups in enumerate(holds) for group in groups.nonzero().flatten().tolist()]


def plot_question(
    model: NSATransformer, name: str, task: TinyRecall, sequence: int, question: int, layer: int, group: int, seed: int = 0
) -> tuple[Figure, str]:
    """The reads of one far question of one fresh sequence, the answer's place marked; and the same in words."""
    tokens, query, told = _locate_question(task, sequence, question, seed)
    example = make_layer_example(model, task, tokens, layer)
    reads = compute_reads(example, model.config.nsa, query, group)
    with torch.no_grad():
        said = format_letters(task, model(tokens[:, : query + 1])[0, -1:].argmax(-1))
    right, block = example.text[query + 1], told // model.config.nsa.l_sel
    where = "read" if block in reads.blocks else "not read"
    all_of_them = (
        ", ".join(f"layer {layer} group {own}" for layer, own in find_readers(model, tokens, query, told)) or "nobody"
    )
    about = (
        f"{name}, {example.description}: asked for {example.text[query]!r}, the answer {right!r} stands at token {told} "
        f"in block {block}, {where} here; the model says {said!r}"
    )
    figure = plot_query_attention(reads, about)
    mark_token(figure, told)
    return figure, f"{about}\nthe answer's block is read by {all_of_them}\n{describe_selected_blocks(reads, example.text)}"


def explore_recall(
    models: Mapping[str, NSATransformer],
    task: TinyRecall,
    *,
    layer: int = 1,
    group: int = 0,
    seed: int = 0,
    use_widgets: bool | None = None,
) -> None:
    """Show the explorer on trained models by name. `with_widgets`: yes, no, or (None) only where a front end is open.

    Without one, each model's picture is of the first layer and group that read the answer's block, if any did.
    """
    if has_front_end() if use_widgets is None else use_widgets:
        display(build_recall_explorer(models, task, layer=layer, group=group, seed=seed))
        return
    for name, model in models.items():
        sequence, question = find_hidden_question(task, model.config.nsa, seed)
        at_layer, at_group = next(
            iter(find_readers(model, *_locate_question(task, sequence, question, seed))), (layer, group)
        )
        figure, words = plot_question(model, name, task, sequence, question, at_layer, at_group, seed)
        show_figure(figure)
        print(words)


def build_recall_explorer(
    models: Mapping[str, NSATransformer], task: TinyRecall, *, layer: int = 1, group: int = 0, seed: int = 0
) -> widgets.VBox:
    """The controls and the picture as one widget."""
    config = next(iter(models.values())).config
    first, hidden = find_hidden_question(task, config.nsa, seed)
    which = widgets.Dropdown(options=list(models), description="model")
    sequence = widgets.BoundedIntText(value=first, min=0, max=10_000, description="sequence")
    question = widgets.IntSlider(value=hidden, min=0, max=task.n_far - 1, description="question", continuous_update=False)
    depth = widgets.Dropdown(options=list(range(config.n_layers)), value=layer, description="layer")
    heads = widgets.Dropdown(options=list(range(config.n_kv_groups)), value=group, description="head group")
    controls = (which, sequence, question, depth, heads)
    picture = widgets.Image(format="png", layout=widgets.Layout(max_width="100%", height="auto", align_self="flex-start"))
    text = widgets.HTML()

    def redraw(_change: object = None) -> None:
        name, at_layer, at_group = which.value, depth.value, heads.value
        assert name is not None and at_layer is not None and at_group is not None, "the controls were made with values"
        figure, words = plot_question(models[name], name, task, sequence.value, question.value, at_layer, at_group, seed)
        picture.value = render_png(figure)
        text.value = f"<pre style='font-size:85%; line-height:1.25'>{html.escape(words)}</pre>"

    for control in controls:
        control.observe(redraw, names="value")
    redraw()
    return widgets.VBox([widgets.HBox(list(controls[:3])), widgets.HBox(list(controls[3:])), picture, text])
