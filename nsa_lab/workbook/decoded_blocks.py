"""Show decoded answers with the selected blocks marked in the text, for notebook 08."""

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
    """A decoded token: the text before it, the blocks that its query selected, and the correct token."""

    text: str
    blocks: list[int]
    token: str
    expected: str

    def has_selected_answer(self, l_sel: int) -> bool:
        """Return whether a selected block contains the token that followed the last character's earlier occurrence."""
        return (self.text.rindex(self.text[-1], 0, -1) + 1) // l_sel in self.blocks


@torch.no_grad()
def decode_answers(
    model: NSATransformer, task: TinyRecall, layer: int, group: int, seed: int = 0
) -> Iterator[DecodedToken]:
    """Decode the answers to the far questions of one sequence with a cache, and yield each answer."""
    tokens, positions = task.make_batch(0, 1, seed, EVAL_STREAM)
    decoder, start = Decoder(model, task.length), 0
    for position in sorted(positions[0, -task.n_far :].flatten().tolist()):
        # The question, and the correct text before it.
        predicted = decoder.last(tokens[:, start:position]).argmax(-1)
        selected = model.observe(tokens[:, :position])[layer]["blocks"][0, -1, group].tolist()
        text = format_letters(task, tokens[0, :position])
        blocks = [block for block in selected if block >= 0]
        yield DecodedToken(
            text, blocks, format_letters(task, predicted), format_letters(task, tokens[0, position : position + 1])
        )
        start = position


def format_html(decoded: Sequence[DecodedToken], l_sel: int) -> str:
    """Format as HTML: one line per token, with the selected blocks of `l_sel` characters on a coloured background."""
    lines = [_format_line(token, l_sel) for token in decoded]
    return f'<pre style="line-height: 1.6; overflow-x: auto">{"<br>".join(lines)}</pre>'


def format_text(decoded: Sequence[DecodedToken], l_sel: int) -> str:
    """Format as plain text, with selected blocks in brackets."""
    return "\n".join(
        "".join(f"[{part}]" if read else f" {part} " for part, read in _split_blocks(token, l_sel)) + f" -> {token.token}"
        for token in decoded
    )


def _format_line(token: DecodedToken, l_sel: int) -> str:
    text = "".join(
        f'<span style="background: {SELECTED_COLOUR}; color: black">{html.escape(part)}</span>'
        if read
        else html.escape(part)
        for part, read in _split_blocks(token, l_sel)
    )
    colour = CORRECT_COLOUR if token.token == token.expected else WRONG_COLOUR
    return f'{text}<span style="color: {colour}; font-weight: bold">{html.escape(token.token)}</span>'


def _split_blocks(token: DecodedToken, l_sel: int) -> Iterator[tuple[str, bool]]:
    """Yield the blocks of the text, and whether each was selected."""
    for block in range(-(-len(token.text) // l_sel)):
        yield token.text[block * l_sel : (block + 1) * l_sel], block in token.blocks
