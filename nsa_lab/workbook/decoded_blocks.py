"""What a model writes, with the blocks that it chose to read marked in the text: for notebook 07."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from nsa_lab.evaluate.tiny_recall import EVAL_STREAM, TinyRecall
from nsa_lab.inference import Decoder
from nsa_lab.model import NSATransformer
from nsa_lab.workbook.recall_explorer import format_letters

SELECTED_COLOUR, CORRECT_COLOUR, WRONG_COLOUR = "#f7d9a8", "#0a7d38", "#b3261e"


class DecodedToken(NamedTuple):
    """A token that a model wrote: the text before it, the blocks that its query chose, and the token that was right."""

    text: str
    blocks: list[int]
    token: str
    expected: str

    def has_selected_answer(self, l_sel: int) -> bool:
        """Whether one of the blocks holds what came after the last character's earlier place."""
        return (self.text.rindex(self.text[-1], 0, -1) + 1) // l_sel in self.blocks


@torch.no_grad()
def decode_answers(
    model: NSATransformer, task: TinyRecall, layer: int, group: int, seed: int = 0
) -> Iterator[DecodedToken]:
    """The answers that a model writes to the far questions of one sequence, decoded with a cache, as each is drawn."""
    tokens, places = task.make_batch(0, 1, seed, EVAL_STREAM)
    decoder, begin = Decoder(model, task.length), 0
    for place in sorted(places[0, -task.n_far :].flatten().tolist()):
        # The question, and what was really said before it.
        likeliest = decoder.last(tokens[:, begin:place]).argmax(-1)
        chosen = model.observe(tokens[:, :place])[layer]["blocks"][0, -1, group].tolist()
        text = format_letters(task, tokens[0, :place])
        blocks = [block for block in chosen if block >= 0]
        yield DecodedToken(
            text, blocks, format_letters(task, likeliest), format_letters(task, tokens[0, place : place + 1])
        )
        begin = place


def format_html(decoded: Sequence[DecodedToken], l_sel: int) -> str:
    """As HTML: a line for each token, blocks of `l_sel` characters that were read on a coloured ground."""
    lines = [_format_line(one, l_sel) for one in decoded]
    return f'<pre style="line-height: 1.6; overflow-x: auto">{"<br>".join(lines)}</pre>'


def format_text(decoded: Sequence[DecodedToken], l_sel: int) -> str:
    """The same as plain text, blocks that were read in brackets."""
    return "\n".join(
        "".join(f"[{part}]" if read else f" {part} " for part, read in _split_blocks(one, l_sel)) + f" -> {one.token}"
        for one in decoded
    )


def _format_line(one: DecodedToken, l_sel: int) -> str:
    text = "".join(
        f'<span style="background: {SELECTED_COLOUR}; color: black">{html.escape(part)}</span>'
        if read
        else html.escape(part)
        for part, read in _split_blocks(one, l_sel)
    )
    colour = CORRECT_COLOUR if one.token == one.expected else WRONG_COLOUR
    return f'{text}<span style="color: {colour}; font-weight: bold">{html.escape(one.token)}</span>'


def _split_blocks(one: DecodedToken, l_sel: int) -> Iterator[tuple[str, bool]]:
    """Blocks of the text, and whether each was read."""
    for block in range(-(-len(one.text) // l_sel)):
        yield one.text[block * l_sel : (block + 1) * l_sel], block in one.blocks
