"""What a model writes beside what it was to learn: held-out text, and samples before and after training, in columns."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nsa_lab.data import BuildProgress, DataError, prepare
from nsa_lab.runs.history import History
from nsa_lab.workbook.samples import make_printable

# Columns that stand beside each other where there is room, and below each other where there is none.
COLUMN_STYLE = "display: inline-block; vertical-align: top; width: 31%; min-width: 17em; margin-right: 1.5%"
TEXT_STYLE = "white-space: pre-wrap; overflow-wrap: anywhere; font-size: 85%; line-height: 1.35; margin-top: 0.3em"


class TextColumns:
    """Texts under their headings; in a terminal below each other."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def _repr_html_(self) -> str:
        return "".join(
            f'<div style="{COLUMN_STYLE}"><b>{html.escape(name)}</b><pre style="{TEXT_STYLE}">{html.escape(text)}</pre></div>'
            for name, text in self._texts.items()
        )

    def __repr__(self) -> str:
        return "\n\n".join(f"{name}\n{'-' * len(name)}\n{text}" for name, text in self._texts.items())


def read_held_out_text(run: str | Path | History, n_tokens: int) -> str:
    """At most `tokens` characters from the middle of the text that a run's validation reads, from the beginning of a line;
    or in a line why there is none to show. Nothing is filled or fetched for it."""
    history = History.read(run)
    config = history.config
    begun = next(iter(history.events_of_kind("start", "resume")), {})
    try:
        found = prepare(config.data, config.model.vocab_size, progress=_refuse_to_fill, identity=begun.get("data_identity"))
    except DataError as error:
        return f"not shown: {error}"
    first = len(found.validation) // 2
    read = found.validation.read(first, min(2 * n_tokens, len(found.validation) - first))
    begun_before, _, from_a_line = found.tokenizer.decode(read.tolist()).partition("\n")
    return make_printable(from_a_line or begun_before)[:n_tokens]


def _refuse_to_fill(_: BuildProgress) -> Any:
    raise DataError("the run's text is not in this machine's cache")
