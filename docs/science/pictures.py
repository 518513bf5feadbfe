"""The pictures of retrieval.md, long_texts.md and convert.md, from the records: `python docs/science/pictures.py`.

Nothing is computed again. Those of convert.md read FOLDER, the unpacked records: `python docs/science/pictures.py FOLDER`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from nsa_lab.figures.conversion_plots import plot_conversion
from nsa_lab.figures.evaluation_plots import get_position_ranges, plot_retrieval
from nsa_lab.figures.style import DENSE, SEL, add_legend, add_legend_below, make_panel, render_png
from nsa_lab.health.comparison import compare_models
from nsa_lab.health.model_runs import find_baseline, group_runs
from nsa_lab.runs.resolve import find_runs

HERE = Path(__file__).parent
OUTPUTS = HERE.parents[1] / "outputs"
LONG, LONG_DENSE = "long_64k_shallow.a_key_per_byte.*", "long_64k_shallow.dense.*"
# NSA by how many bytes share a key of its indexer, and with text read once: label, colour, marker and line, twin.
KEYS = {
    "long_64k_shallow.nsa.*": ("a key per 8 bytes, one seed", "#CC79A7", "s:", LONG_DENSE),
    "long_64k_shallow.a_key_per_2_bytes.*": ("per 2 bytes, one seed", "#0072B2", "^--", LONG_DENSE),
    "long_64k_shallow.a_key_per_byte.*": ("per byte, two seeds", SEL, "o-", LONG_DENSE),
    "long_64k-20261126*": ("per byte, text read once, three seeds", "#009E73", "D-", "long_64k_dense-20261126*"),
}
# Model, embeddings, colour and line of the runs of the eighth and the ninth question and of their controls, seed by seed.
COURSES = (
    ("NSA, embeddings normed", SEL, "-", ("recall_normed", "recall_normed_seed1", "recall_seed2", "recall_seed3")),
    ("NSA, as they were looked up", SEL, ":", ("recall_block2", "recall_block2_seed1")),
    ("dense, embeddings normed", DENSE, "-", ("recall_normed_dense",)),
    ("dense, as many parameters as NSA", DENSE, "--", ("recall_wide_dense", "recall_wide_dense_seed1_cut")),
    ("dense, as they were looked up", DENSE, ":", ("recall_block2_dense", "recall_block2_dense_seed1")),
    ("NSA without the recipe", "#CC79A7", "--", ("recall_nsa_cut",)),
)
ASKED = {
    "NSA, seed 0": "recall_normed",
    "NSA, seed 1": "recall_normed_seed1",
    "dense, seed 0": "recall_normed_dense",
    "dense, as many parameters, seed 0": "recall_wide_dense",
}
CHANGES_OF_LENGTH = {393: "8,192", 916: "32,768"}


def read(name: str) -> dict[str, Any]:
    return json.loads((HERE / "records" / f"{name}.json").read_text(encoding="utf-8"))


def courses() -> Figure:
    """What an answer costs against steps: when copying forms."""
    figure, axes = make_panel(8.5, 4.4, "What a digit of an answer costs while it is learned (chance: 2.30 nats)")
    for label, colour, line, names in COURSES:
        for number, name in enumerate(names):
            points = [(e["step"], e["marked_loss"]) for e in read(name)["curve"] if "marked_loss" in e and e["step"] > 25]
            axes.plot(*zip(*points, strict=True), line, color=colour, linewidth=1.4, label=None if number else label)
    for step, length in CHANGES_OF_LENGTH.items():
        axes.axvline(step, color="black", linewidth=0.6)
        axes.annotate(f" from here on {length} bytes", (step, 2.72), fontsize=7)
    axes.set(xlabel="optimiser step", ylabel="nats per byte of the answers", ylim=(-0.05, 2.85))
    add_legend_below(axes)
    return figure


def needles() -> Figure:
    """Single needles by length and depth."""
    cells = [
        _cell(model, int(length.split()[-1]), depth, right, asked)
        for model, name in ASKED.items()
        for length, row in read(name)["needle_depth_right_asked_loss"].items()
        for depth, right, asked, _ in row
    ]
    return plot_retrieval({"run": "the recipe and its dense twin", "step": 1424, "retrieval": cells})


def tasks() -> Figure:
    """Three tasks by length and depth, at the seed that `nsa-lab evaluate` asked them of."""
    record = read("recall_seed3")
    cells = [
        _cell(task, int(length), depth, right, asked, questions=4 if task == "multi_query" else 1)
        for task in ("needle", "multi_key", "multi_query")
        for length, row in record[f"{task}_depth_right_asked_loss"].items()
        for depth, right, asked, _ in row
    ]
    return plot_retrieval({"run": "the recipe, seed 3", "step": 1424, "retrieval": cells})


def _cell(task: str, length: int, depth: float, right: int, asked: int, questions: int = 1) -> dict[str, Any]:
    return {
        "task": task,
        "length": length,
        "depth": depth,
        "right": right,
        "answers": asked,
        "sequences": asked // questions,
    }


def difference() -> Figure:
    """What NSA loses to its dense twin on long documents, by position: each pair by itself."""
    figure, axes = make_panel(8, 3.8, "long documents: NSA less its dense twin; below 0 NSA is better")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.axhline(0.005, color=DENSE, linewidth=0.8, linestyle="--", label="+0.005")
    for aside, (name, (label, colour, marker, twin)) in enumerate(KEYS.items()):
        models = group_runs([run for one in (twin, name) for run in find_runs(one, OUTPUTS)], {}, print)
        found = compare_models(models, find_baseline(models, None))
        places = get_position_ranges(next(text for text in found.texts if text.text == "long"))
        mean, low, high = np.array([(place.difference, *(place.over_windows or ())) for place in places]).T
        at = np.arange(len(places)) + (aside - 1.5) * 0.1
        axes.errorbar(at, mean, [mean - low, high - mean], fmt=marker, color=colour, ms=4, lw=1, capsize=2, label=label)
        axes.set_xticks(range(len(places)), [place.place.replace(" to ", "–") for place in places], fontsize=7)
    axes.set(xlabel="position, bytes; 95 % intervals over windows", ylabel="bits per byte")
    add_legend(axes, columns=2)
    return figure


# Picture of convert.md -> the run whose conversion.json it shows.
CONVERSIONS = {
    "conversion_stage_1": "convert_b.two_heads.s0-*",
    "conversion_stage_2": "convert_c.train.s0-*",
    "conversion_stage_3": "convert_c.extend.s0-*",
}


def save(name: str, figure: Figure) -> None:
    path = HERE.parent / "pictures" / f"{name}.png"
    path.write_bytes(render_png(figure))
    print(path)


if __name__ == "__main__":
    if sys.argv[1:]:
        for name, run in CONVERSIONS.items():
            [path] = Path(sys.argv[1]).glob(f"{run}/conversion.json")
            save(name, plot_conversion(json.loads(path.read_text(encoding="utf-8")), "long", 40))
    else:
        for page, pictures in {"retrieval": (courses, needles, tasks), "long_texts": (difference,)}.items():
            for drawn in pictures:
                save(f"{drawn.__name__}_{page}", drawn())
