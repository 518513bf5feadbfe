"""Takes out of an executed notebook what the header of its page says already: verdicts, facts, the picture of the run."""

from __future__ import annotations

from collections.abc import Iterable

from nbformat import NotebookNode
from nbformat.v4 import new_output

OVERVIEW = "overview("  # draws what the first screen shows, and what other cells show larger


def once(notebook: NotebookNode, said: Iterable[str]) -> None:
    """Cut the printed lines that are among `said`, spaces aside, and the overview's picture, in place.

    Where all of an output goes, a line says where it stands.
    """
    known = frozenset(said)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [_without(output, known) for output in cell.outputs]
            if OVERVIEW in cell.source:
                cell.outputs = [_moved() if "image/png" in output.get("data", {}) else output for output in cell.outputs]


def _without(output: NotebookNode, said: frozenset[str]) -> NotebookNode:
    if output.output_type != "stream":
        return output
    lines = output.text.splitlines()
    kept = [line for line in lines if " ".join(line.split()) not in said]
    if len(kept) == len(lines):
        return output
    return new_output("stream", name=output.name, text="\n".join(kept)) if any(map(str.strip, kept)) else _moved()


def _moved() -> NotebookNode:
    return new_output("display_data", data={"text/html": '<p class="moved"><a href="#top">at the top of this page</a></p>'})
