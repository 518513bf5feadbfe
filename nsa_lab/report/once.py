"""Takes out of an executed notebook what the header of its page says already: verdicts, facts, what to do, the picture of
the run."""

from __future__ import annotations

from collections.abc import Iterable

from nbformat import NotebookNode
from nbformat.v4 import new_output

OVERVIEW = "overview("  # draws what the first screen shows, and what other cells show larger


def once(notebook: NotebookNode, said: Iterable[str]) -> None:
    """Cut the lines that are among `said`, spaces aside, from what is printed and what an error says, and the overview's
    picture, in place.

    Where all of an output goes, a line says where it stands; an error is left a line of its own.
    """
    known = frozenset(said)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [_without(output, known) for output in cell.outputs]
            if OVERVIEW in cell.source:
                cell.outputs = [_moved() if "image/png" in output.get("data", {}) else output for output in cell.outputs]


def _without(output: NotebookNode, said: frozenset[str]) -> NotebookNode:
    if output.output_type == "error":
        shown = [_kept(part, said) or part for part in output.traceback]
        return new_output("error", ename=output.ename, evalue=_kept(output.evalue, said) or output.evalue, traceback=shown)
    if output.output_type != "stream" or (kept := _kept(output.text, said)) == output.text:
        return output
    return new_output("stream", name=output.name, text=kept) if kept.strip() else _moved()


def _kept(text: str, said: frozenset[str]) -> str:
    """`text` without the lines that are among `said`; the very same text where none is."""
    lines = text.splitlines()
    kept = [line for line in lines if " ".join(line.split()) not in said]
    return text if len(kept) == len(lines) else "\n".join(kept)


def _moved() -> NotebookNode:
    return new_output("display_data", data={"text/html": '<p class="moved"><a href="#top">at the top of this page</a></p>'})
