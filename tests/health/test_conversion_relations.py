"""`conversion.json` of a converted run: damage, other runs, and relations between rows of one model."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_run import LAYERS, make_config, write_run

from nsa_lab.health.evaluation_checks import find_foreign_evaluation
from nsa_lab.runs.evaluation import CONVERSION, read_conversion, write_evaluation
from nsa_lab.runs.history import History

Record = dict[str, Any]
RANGES = [[0, 256], [256, 512], [512, 1024], [1024, 2048]]
DENSE = [[3.0, 2.5, 2.4, 2.3], [3.1, 2.52, 2.3, 2.2]]
BLOCKS = 8
EVALUATED = {"text": "e" * 16, "windows": 2, "seq_len": 2048, "loss": 2.4}  # by the run, after its last step


def write_converted_run(folder: Path, trainable: str = "indexer") -> tuple[History, Record]:
    """Return a run with 32 blocks of 64 tokens and the evaluation of eight selected ones."""
    model = {"branches": ["sel"], "indexer_block": 1, "selection_loss": 0.05}
    config = make_config(
        train__initial_weights="somewhere",
        train__trainable=trainable,
        nsa__n_sel=BLOCKS,
        **{f"model__{key}": v for key, v in model.items()},
    )
    assert config.model.nsa.l_sel == 64

    def evaluate_other_windows(events: list[dict[str, Any]]) -> None:
        [event.update(EVALUATED) for event in events if event["kind"] == "eval" and event["step"] == 200]

    run_dir = write_run(folder, config, evaluate_other_windows)
    history = History.read(run_dir)

    def make_row(attention: str, blocks: int | None, gap: float) -> Record:
        late = 1 if attention == "window" else 2  # first range with more blocks
        windows = [[loss + gap * (index >= late) for index, loss in enumerate(window)] for window in DENSE]
        return {"attention": attention, "blocks": blocks, "windows": windows}

    gaps = {"selected": 0.01, "mean_key": 0.02, "nearest": 0.05, "oracle": -0.002}
    shares = {"chosen": 0.99, "nearest": 0.9, "random": 0.8, "chosen_free": 0.97, "nearest_free": 0.6, "random_free": 0.3}
    text = {
        "identity": "0123456789abcdef",
        "length": 2048,
        "ranges": RANGES,
        "losses": [make_row("dense", None, 0.0), make_row("window", config.model.nsa.n_forced, 0.2)]
        + [make_row(name, BLOCKS, gap) for name, gap in gaps.items()],
        "mass": [{"blocks": BLOCKS, "windows": 2, "fractions": {name: [v] * LAYERS for name, v in shares.items()}}],
    }
    record = {
        "v": 1,
        "run": run_dir.name,
        "step": 200,
        "config_hash": config.hash(),
        "data_identity": "d" * 64,
        "code": {"source": "abc"},
        "device": "cpu",
        "dtype": "float32",
        "texts": {"validation": text},
        "seconds": 5.0,
    }
    return history, record


def set_losses(attention: str, value: float, first: int = 0, last: int = 4) -> Callable[[Record], None]:
    """Return an edit of the losses of a row in some ranges."""

    def edit(record: Record) -> None:
        for row in record["texts"]["validation"]["losses"]:
            if row["attention"] == attention:
                for window in row["windows"]:
                    window[first:last] = [value] * len(window[first:last])

    return edit


def edit_text(edit: Callable[[Record], Any]) -> Callable[[Record], Any]:
    return lambda record: edit(record["texts"]["validation"])


def set_mass(**values: list[float]) -> Callable[[Record], Any]:
    return edit_text(lambda text: text["mass"][0]["fractions"].update(values))


def swap_chance(record: Record) -> None:
    fractions = record["texts"]["validation"]["mass"][0]["fractions"]
    for suffix in ("", "_free"):
        chosen, chance = f"chosen{suffix}", f"random{suffix}"
        fractions[chosen], fractions[chance] = fractions[chance], fractions[chosen]


def copy_row(source: str, target: str) -> Callable[[Record], None]:
    """Return an edit that gives a row, which is added if there is none, the losses of another one."""

    def edit(record: Record) -> None:
        losses = record["texts"]["validation"]["losses"]
        windows = next(row["windows"] for row in losses if row["attention"] == source)
        if target == "control":
            record["control"] = {"run": "another", "step": 200}
            losses.append({"attention": "control", "blocks": None})
        next(row for row in losses if row["attention"] == target)["windows"] = copy.deepcopy(windows)

    return edit


def swap_rows(one: str, other: str) -> Callable[[Record], None]:
    def edit(record: Record) -> None:
        for row in record["texts"]["validation"]["losses"]:
            row["attention"] = {one: other, other: one}.get(row["attention"], row["attention"])

    return edit


def copy_text(record: Record) -> None:
    texts = record["texts"]
    texts["long"] = copy.deepcopy(texts["validation"]) | {"identity": "f" * 16}


def add_control(record: Record) -> None:
    copy_row("dense", "control")(record)
    record["texts"]["validation"]["losses"][-1]["windows"][0][0] += 1e-9
    record["control"]["run"] = record["run"]


def repeat_windows(record: Record) -> None:
    for row in record["texts"]["validation"]["losses"]:
        row["windows"] = [row["windows"][0]] * 2


def scale_losses(factor: float) -> Callable[[Record], None]:
    def edit(record: Record) -> None:
        for row in record["texts"]["validation"]["losses"]:
            row["windows"] = [[loss * factor for loss in window] for window in row["windows"]]

    return edit


def measure_evaluated_windows(factor: float) -> Callable[[Record], None]:
    """Evaluate the windows of the run's own evaluation, with a loss that differs by a factor."""

    def edit(record: Record) -> None:
        text = record["texts"]["validation"]
        text.update(identity=EVALUATED["text"], losses=copy.deepcopy(text["losses"]))
        losses = text["losses"]
        lengths = [last - first for first, last in RANGES]
        mean = sum(loss * n for window in losses[2]["windows"] for loss, n in zip(window, lengths, strict=True))
        scale_losses(factor * EVALUATED["loss"] / (mean / 2 / sum(lengths)))(record)

    return edit


def select_forced_blocks(record: Record) -> None:
    """Select the forced blocks only. The oracle has no mass outside them, so shares of it are rounding errors."""
    text = record["texts"]["validation"]
    n_forced = text["losses"][1]["blocks"]
    for row in text["losses"][2:]:
        row.update(blocks=n_forced, windows=text["losses"][1]["windows"])
    text["mass"][0].update(blocks=n_forced)
    text["mass"][0]["fractions"].update({name: [-50.0] * LAYERS for name in ("chosen_free", "random_free")})


EDITS: list[tuple[Callable[[Record], Any], str]] = [
    (lambda r: r.pop("texts"), "texts: missing"),
    (lambda r: r.update(step="200"), "step: expected a valid integer"),
    (lambda r: r.update(dtype="float31"), "dtype: expected"),
    (lambda r: r.update(run="another"), "it is of another run: 'another'"),
    (lambda r: r.update(step=150), "is of step 150, which the run did not save"),
    (lambda r: r.update(config_hash="0" * 16), "belongs to configuration 0000"),
    (lambda r: r.update(seconds=-1.0), "it took -1.0 s"),
    (lambda r: r.update(control={"run": "another", "step": 200}), "a control has losses and a run"),
    (edit_text(lambda text: text["losses"].pop(0)), "expected dense in the first row"),
    (edit_text(lambda text: text["losses"].pop(2)), "selected has losses with [] blocks, expected [8]"),
    (edit_text(lambda text: text["losses"].append(text["losses"][3])), "mean_key with 8 blocks was evaluated twice"),
    (edit_text(lambda text: text["losses"][2]["windows"].pop()), "losses.selected.windows: expected 2 values, got 1"),
    (edit_text(lambda text: text["losses"][2]["windows"][1].pop()), "losses.selected.windows: expected 4 values, got 3"),
    (edit_text(lambda text: text.update(length=4096)), "windows of 4,096 tokens, but config.yaml has 2,048"),
    (edit_text(lambda text: text["ranges"].__setitem__(1, [128, 512])), "starts at 128, the one before it ends at 256"),
    (set_losses("oracle", math.nan), "a loss of oracle with 8 blocks is nan"),
    (set_losses("dense", -1.0), "a loss of dense is -1"),
    (set_losses("nearest", 30.0), "a loss of nearest with 8 blocks is 30"),
    (set_losses("selected", 2.0, 1, 2), "selected with 8 blocks differs by 0.52 nats from dense at positions 256 to 511"),
    (edit_text(lambda text: text["losses"][2].update(windows=DENSE)), "selected with 8 blocks has the losses of dense"),
    (set_losses("selected", 1.9, 3), "selected with 8 blocks is 0.350 nats below dense at positions 1,024 to 2,047"),
    (edit_text(lambda text: text["mass"][0].update(windows=3)), "the mass of 8 blocks is of 3 windows, the losses of 2"),
    (set_mass(nearest=[0.9] * (LAYERS - 1)), "nearest has 2 layers, but config.yaml has 3"),
    (set_mass(chosen=[0.9, 1.2, 0.9]), "chosen is 1.2 of the oracle's, expected 0 to 1"),
    (set_mass(random_free=[0.9, 0.3, 0.3]), "random_free is above random in layer 0"),
    (edit_text(lambda text: text["mass"][0]["fractions"].clear()), "chosen has 0 layers"),
    (set_mass(nearest_free=[0.3] * LAYERS), "nearest and random have the same shares in all layers"),
    (repeat_windows, "all 2 windows of dense have the same losses"),
    (scale_losses(0.1), "dense has a loss of 0.2"),
    (measure_evaluated_windows(1.03), "on the windows on which the run measured"),
    (add_control, "the control is the run itself, expected another run"),
    (copy_text, "dense has the same losses in the texts validation and long"),
    (copy_row("selected", "nearest"), "nearest with 8 blocks has the losses of selected with 8 blocks"),
    (copy_row("dense", "control"), "control has the losses of dense"),
    (swap_rows("oracle", "nearest"), "oracle is 0.039 nats above nearest with 8 blocks, expected at most 0.0005"),
    (swap_rows("selected", "nearest"), "selected is 0.03 nats above nearest with 8 blocks"),
    (swap_chance, "the indexer's have 0.800 of the oracle's, random ones 0.990: worse than chance in 3 of 3 layers"),
    (set_mass(random=[0.8, 0.8, 0.995]), "random ones 0.865: worse than chance in 1 of 3 layers"),
]


def test_edited_evaluations_of_a_conversion(tmp_path: Path) -> None:
    history, recorded = write_converted_run(tmp_path)
    path = history.run_dir / CONVERSION
    path.write_text(json.dumps(recorded))
    assert find_foreign_evaluation(history) is None and read_conversion(history.run_dir) == recorded
    for edit, text in EDITS:
        record = copy.deepcopy(recorded)
        edit(record)
        path.write_text(json.dumps(record))
        problem = find_foreign_evaluation(history) or ""
        assert problem.startswith(CONVERSION) and text in problem, (text, problem)
    path.write_text(json.dumps(write_evaluation(history.run_dir, recorded, CONVERSION) | {"device": "another"}))
    assert "digest: does not match" in (find_foreign_evaluation(history) or "")


def test_possible_evaluations_of_a_conversion(tmp_path: Path) -> None:
    """A trained trunk may prefer blocks, and dense attention may fail at long texts. A new indexer selects by chance."""
    history, recorded = write_converted_run(tmp_path)
    trained, _ = write_converted_run(tmp_path / "trained", "all")
    cases: list[tuple[History, list[Callable[[Record], Any]]]] = [
        (trained, [set_losses("selected", 1.9, 3)]),
        (history, [set_losses("dense", 5.0, 3)]),
        (history, [lambda r: r.update(step=0), swap_chance]),
        (history, [select_forced_blocks]),
        (history, [measure_evaluated_windows(1.0)]),
        (history, [add_control, lambda r: r["control"].update(run="another")]),
        (history, [copy_text, lambda r: r["texts"]["long"].update(identity=r["texts"]["validation"]["identity"])]),
        (history, [measure_evaluated_windows(1.01)]),
        (history, [lambda r: r.update(dtype="bfloat16"), set_losses("selected", 2.53, 1, 2)]),
    ]
    for own, edits in cases:
        record = copy.deepcopy(recorded)
        record.update(run=own.run, config_hash=own.config.hash())
        for edit in edits:
            edit(record)
        if record["step"] == 0:
            (own.run_dir / "checkpoints" / "step-00000000").mkdir(parents=True)
        (own.run_dir / CONVERSION).write_text(json.dumps(record))
        assert find_foreign_evaluation(own) is None
