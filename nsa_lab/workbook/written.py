"""What a model writes, with the blocks that it chose to read marked in the text: for notebook 07."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from nsa_lab.evaluate.tiny_recall import ASKED, TinyRecall
from nsa_lab.inference import Decoder
from nsa_lab.model import NSATransformer
from nsa_lab.workbook.choice_explorer import letters

MARK, RIGHT, WRONG = "#f7d9a8", "#0a7d38", "#b3261e"


class Written(NamedTuple):
    """A token that a model wrote: the text before it, the blocks that its query chose, and the token that was right."""

    text: str
    blocks: list[int]
    token: str
    right: str

    def found(self, l_sel: int) -> bool:
        """Whether one of the blocks holds what came after the last character's earlier place."""
        return (self.text.rindex(self.text[-1], 0, -1) + 1) // l_sel in self.blocks


@torch.no_grad()
def answers(model: NSATransformer, task: TinyRecall, layer: int, group: int, seed: int = 0) -> Iterator[Written]:
    """The answers that a model writes to the far questions of one sequence, decoded with a cache, as each is drawn."""
    tokens, places = task.batch(0, 1, seed, ASKED)
    decoder, begin = Decoder(model, task.length), 0
    for place in sorted(places[0, -task.far :].flatten().tolist()):
        # The question, and what was really said before it.
        likeliest = decoder.last(tokens[:, begin:place]).argmax(-1)
        chosen = model.observe(tokens[:, :place])[layer]["blocks"][0, -1, group].tolist()
        text = letters(task, tokens[0, :place])
        blocks = [block for block in chosen if block >= 0]
        yield Written(text, blocks, letters(task, likeliest), letters(task, tokens[0, place : place + 1]))
        begin = place


def marked(written: Sequence[Written], l_sel: int) -> str:
    """As HTML: a line for each token, blocks of `l_sel` characters that were read on a coloured ground."""
    lines = [_line(one, l_sel) for one in written]
    return f'<pre style="line-height: 1.6; overflow-x: auto">{"<br>".join(lines)}</pre>'


def told(written: Sequence[Written], l_sel: int) -> str:
    """The same as plain text, blocks that were read in brackets."""
    return "\n".join(
        "".join(f"[{part}]" if read else f" {part} " for part, read in _parts(one, l_sel)) + f" -> {one.token}"
        for one in written
    )


def _line(one: Written, l_sel: int) -> str:
    text = "".join(
        f'<span style="background: {MARK}; color: black">{html.escape(part)}</span>' if read else html.escape(part)
        for part, read in _parts(one, l_sel)
    )
    colour = RIGHT if one.token == one.right else WRONG
    return f'{text}<span style="color: {colour}; font-weight: bold">{html.escape(one.token)}</span>'


def _parts(one: Written, l_sel: int) -> Iterator[tuple[str, bool]]:
    """Blocks of the text, and whether each was read."""
    for block in range(-(-len(one.text) // l_sel)):
        yield one.text[block * l_sel : (block + 1) * l_sel], block in one.blocks
