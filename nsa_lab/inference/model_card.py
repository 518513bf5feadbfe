"""The model card of a model to hand on: every number from the record of its run or from its evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nsa_lab.runs.evaluation import EVALUATION, compute_wilson_interval
from nsa_lab.runs.history import History, collect_facts
from nsa_lab.runs.summary import format_settings

Row = Mapping[str, Any]


def build_model_card(name: str, history: History, evaluation: Row, weights_bytes: int, about: str) -> str:
    """Markdown: what it is, how to load it, what came out with 95 % intervals (Wilson), and `about` as it is."""
    known = collect_facts(history)
    code = evaluation["code"].get("commit") or evaluation["code"]["source"]
    parts = [
        f"# {name}",
        f"{known.parameters:,} parameters ({weights_bytes / 2**20:.1f} MiB in bfloat16): {format_settings(history.config)}. "
        f"Trained on {known.tokens:,} bytes by the run `{history.run}`.",
        f'```python\nfrom nsa_lab import load_model\n\nmodel = load_model("{name}")\n```',
        "## Evaluation",
        f"Of step {evaluation['step']:,} on {evaluation['device']}, weights and attention in {evaluation['dtype']}, by the "
        f"code {code}; [{EVALUATION}]({EVALUATION}) has all of it, by depth.",
        "### Facts found\n\nRight answers of those asked for, teacher-forced, and the 95 % interval of their share; below, "
        "those that the model wrote itself.",
        _format_retrieval(evaluation["retrieval"]),
        "### What the choice is worth\n\nRight answers where other blocks are read in place of the chosen ones, or a "
        "branch is silent, with the same weights.",
        _format_ablations(evaluation["selection"]),
        "### Text\n\nLoss in bits per byte. Positions and documents are of held-out text, ± a standard error over windows.",
        _format_text_losses(evaluation),
        about.strip(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _format_retrieval(cells: Sequence[Row]) -> str:
    lengths, tasks = (list(dict.fromkeys(cell[key] for cell in cells)) for key in ("length", "task"))
    rows = []
    for task in tasks:
        found = [[cell for cell in cells if (cell["task"], cell["length"]) == (task, length)] for length in lengths]
        rows.append([task, *(_format_proportion(of, "right", "answers") for of in found)])
        rows.append([f"{task}, written", *(_format_proportion(of, "written_right", "written") for of in found)])
    return _format_table(["bytes", *(f"{length:,}" for length in lengths)], rows)


def _format_proportion(cells: Sequence[Row], correct_key: str, total_key: str) -> str:
    """`198 of 200 (96.4 to 99.7 %)`."""
    of, found = sum(cell[total_key] for cell in cells), sum(cell[correct_key] for cell in cells)
    if not of:
        return "not asked"
    low, high = compute_wilson_interval(found, of)
    return f"{found} of {of} ({100 * low:.1f} to {100 * high:.1f} %)"


def _format_ablations(parts: Sequence[Row]) -> str:
    judged = [part for part in parts if part["interventions"]]
    if not judged:
        return "Not judged: every block is read at these lengths."
    rows = [
        [f"{part['length']:,}", part["sequences"], *(f"{effect['accuracy']:.0%}" for effect in part["interventions"])]
        for part in judged
    ]
    return _format_table(["bytes", "sequences", *(effect["name"] for effect in judged[0]["interventions"])], rows)


def _format_text_losses(evaluation: Row) -> str:
    documents = evaluation["documents"]
    rows = [
        [
            f"positions {octave['first']:,} to {octave['last']:,}",
            f"{octave['tokens']:,}",
            _format_bpb(octave["loss"], octave["error"]),
        ]
        for octave in evaluation["positions"]["octaves"]
    ]
    rows += [["whole documents, each by itself", f"{documents['tokens']:,}", _format_bpb(documents["alone"])]]
    rows += [
        [f"{name}, {text['documents']:,} documents", f"{text['tokens']:,}", _format_bpb(text["loss"])]
        for name, text in evaluation["texts"].items()
    ]
    return _format_table(["text", "bytes", "bits per byte"], rows)


def _format_bpb(nats: float, error: float = 0.0) -> str:
    told = f"{nats / math.log(2):.3f}"
    return f"{told} ± {error / math.log(2):.3f}" if error else told


def _format_table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
