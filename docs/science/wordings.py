"""Print the tables of wordings.md from run directories, and write its figure to docs/pictures/wordings.png.

    python docs/science/wordings.py FOLDER

FOLDER holds the runs of the sweeps long_64k_wordings, long_64k_lean (seed 0) and long_64k_lean_seeds
(`tools/records.py unpack --to FOLDER`).
"""

import json
import math
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from lean_seeds import SEEDS, average, find_run, mean_difference
from learning_rates_and_parts import TASKS, TEXTS, Run, T, difference, percent, table
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from nsa_lab.config import RecallConfig
from nsa_lab.data.recall.facts import QUESTIONS, STATEMENTS
from nsa_lab.evaluate.retrieval import _make_sample
from nsa_lab.figures.style import DENSE, SEL, render_png

PICTURE = Path(__file__).parents[1] / "pictures" / "wordings.png"
ARMS = ("window", "dense")
LENGTHS = (4096, 65536)
HELD_OUT_WORDINGS = ("other_words", "more_words")
HELD_OUT = (*HELD_OUT_WORDINGS, "capitals")
# Held out in the controls only.
OTHERS = ("updated", "letters", "hex", "five_digits", "twelve_digits", "codes")
# Least share of right answers of dense attention for which a target counts, and the target.
COUNTS, TARGET = 0.5, 0.9
# A fact among others is found only by its name; a single fact also as the only value in the text.
AMONG_OTHERS = ("multi_key", "multi_query")

Counts = dict[tuple[str, str, int], tuple[int, int]]
# (statement, question) -> class of an answer.
Classify = Callable[[str, str], str]


def main() -> None:
    folder = Path(sys.argv[1])
    paths = {(arm, seed): max(folder.glob(f"long_64k_wordings.{arm}.s{seed}-*")) for arm in ARMS for seed in SEEDS}
    control_paths = {(arm, seed): find_run(folder, arm, seed) for arm in ARMS for seed in SEEDS}
    runs = {key: Run(path) for key, path in paths.items()}
    controls = {key: Run(path) for key, path in control_paths.items()}

    print("## Targets\n")
    print_targets(pool_answers(runs), runs, controls)

    print("## Right answers, percent\n")
    for tasks in (TASKS, HELD_OUT, OTHERS):
        print_answers(runs, controls, tasks)

    print("## Held-out wordings, answers byte by byte\n")
    print_bytes(runs)

    print("## Right answers by statement and by question, facts among others, percent\n")
    asked = {key: Asked(path, runs[key]) for key, path in paths.items()}
    print_forms(asked)
    PICTURE.write_bytes(render_png(plot_orders(asked)))

    print("## Bits per byte minus the control of the same seed\n")
    rows = []
    for arm in ARMS:
        for seed in SEEDS:
            run, control = runs[arm, seed], controls[arm, seed]
            own = f"{run.validation - control.validation:+.4f}"
            rows.append([f"`{arm}`", f"{seed}", own, *(difference(run, control, text) for text in TEXTS)])
        own_differences = [runs[arm, seed].validation - controls[arm, seed].validation for seed in SEEDS]
        means = [average(differ(runs, controls, arm, arm, text)) for text in TEXTS]
        rows.append([f"`{arm}`", "mean", average(own_differences), *means])
    table(["run", "seed", "own validation", *(f"`{text}`" for text in TEXTS)], rows)

    print("## `window` minus `dense`, both with several wordings\n")
    table(list(map("`{}`".format, TEXTS)), [[average(differ(runs, runs, "window", "dense", text)) for text in TEXTS]])

    print("## `long` by position, minus the control, mean over seeds\n")
    spans = runs["window", 0].texts["long"]["octaves"]
    rows = [
        [f"{first:,} to {last - 1:,}", *(average(differ(runs, controls, arm, arm, "long", k)) for arm in ARMS)]
        for k, (first, last) in enumerate(spans)
    ]
    table(["positions", *(f"`{arm}`" for arm in ARMS)], rows)

    print("## RULER: scores of seeds 0 / 1 / 2, and of the control of seed 2\n")
    print_ruler(paths, control_paths)

    print("## Health\n")
    rows = []
    for (arm, seed), path in paths.items():
        verdict = json.loads((path / "verdict.json").read_text())
        remarks = [f"{v['name']} ({v['level']}): {v['text']}" for v in verdict["verdicts"] if v["level"] != "passed"]
        rows.append([f"`{arm}`", f"{seed}", verdict["headline"], "; ".join(remarks)])
    table(["run", "seed", "checks", "not passed"], rows)


def pool_answers(runs: dict[tuple[str, int], Run]) -> Counts:
    """Right answers and all answers of all seeds, by arm, task and length."""
    pooled = {}
    for arm in ARMS:
        for task in (*TASKS, *HELD_OUT, *OTHERS):
            for length in LENGTHS:
                counts = [runs[arm, seed].count(task, length) for seed in SEEDS]
                pooled[arm, task, length] = (sum(right for right, _ in counts), sum(n for _, n in counts))
    return pooled


def print_targets(pooled: Counts, runs: dict[tuple[str, int], Run], controls: dict[tuple[str, int], Run]) -> None:
    rows = []
    for task in HELD_OUT:
        for length in LENGTHS:
            (found, n), (control, control_n) = pooled["window", task, length], pooled["dense", task, length]
            counted, met = control >= COUNTS * control_n, found >= TARGET * control
            numbers = f"{found} of {n}; dense {control} of {control_n}"
            share = f", share {100 * found / control:.0f}%" if control else ""
            outcome = ("met" if met else "missed") if counted else "missed: dense answers less than half"
            rows.append([f"`{task}` at {length:,}, share of dense", "at least 90%", numbers + share, outcome])
    for length in LENGTHS:
        (found, n), (control, control_n) = pooled["window", "updated", length], pooled["dense", "updated", length]
        numbers = (
            f"{found} of {n} ({100 * found / n:.0f}%); dense {control} of {control_n} ({100 * control / control_n:.0f}%)"
        )
        rows.append([f"`updated` at {length:,}", "at least 90%", numbers, "met" if found >= TARGET * n else "missed"])
    for arm in ARMS:
        values = average(differ(runs, controls, arm, arm, "long"))
        rows.append([f"loss on `long` minus the control's, `{arm}`", "reported", values, "–"])
    table(["target", "value", "measured", ""], rows)


def print_answers(runs: dict[tuple[str, int], Run], controls: dict[tuple[str, int], Run], tasks: tuple[str, ...]) -> None:
    rows = []
    for task in tasks:
        for length in LENGTHS:
            counts = {arm: [runs[arm, seed].count(task, length) for seed in SEEDS] for arm in ARMS}
            points = [
                100 * (found / n - other / other_n)
                for (found, n), (other, other_n) in zip(counts["window"], counts["dense"], strict=True)
            ]
            half = T[len(points) - 2] * statistics.stdev(points) / math.sqrt(len(points))
            mean = statistics.mean(points)
            before = [[controls[arm, seed].count(task, length) for seed in SEEDS] for arm in ARMS]
            rows.append(
                [
                    f"{task}, {length:,}",
                    *(format_seeds(counts[arm]) for arm in ARMS),
                    f"{mean:+.0f} [{mean - half:+.0f}, {mean + half:+.0f}]",
                    *map(format_seeds, before),
                ]
            )
    head = ["task, length", "`window`", "`dense`", "difference, points", "`window`, control", "`dense`, control"]
    table(head, rows)


def format_seeds(counts: list[tuple[int, int]]) -> str:
    """Percent of each seed that was evaluated, and of all with its Wilson interval."""
    known = [(right, n) for right, n in counts if n]
    seeds = " / ".join(f"{100 * right / n:.0f}" for right, n in known)
    return f"{seeds}: {percent(sum(right for right, _ in known), sum(n for _, n in known))}"


def print_bytes(runs: dict[tuple[str, int], Run]) -> None:
    """Print right bytes per answer in held-out wordings, given the true bytes before each; complete answers if errors were
    independent; and the loss of an answer in nats.
    """
    rows = []
    for task in HELD_OUT_WORDINGS:
        for length in LENGTHS:
            row = [f"{task}, {length:,}"]
            for arm in ARMS:
                cells = [
                    cell
                    for seed in SEEDS
                    for cell in runs[arm, seed].cells
                    if (cell["task"], cell["length"]) == (task, length)
                ]
                answers, tokens = (sum(cell[key] for cell in cells) for key in ("answers", "tokens"))
                right = sum(cell["tokens_right"] for cell in cells) / tokens
                nats = sum(cell["loss"] * cell["tokens"] for cell in cells) / answers
                n = tokens / answers
                row.append(f"{right * n:.1f} of {n:.0f}; {100 * right**n:.0f}%; {nats:.1f}")
            rows.append(row)
    table(["task, length", *(f"`{arm}`" for arm in ARMS)], rows)


class Asked:
    """The statement and the question of every answer of one evaluation, and the right answers by cell.

    The record has right answers by cell (task, length, depth). Its questions follow from the seed and are made again.
    """

    def __init__(self, path: Path, run: Run) -> None:
        evaluation = json.loads((path / "evaluation.json").read_text())
        recall = RecallConfig(**evaluation["recall"])
        statements, questions = (recall.statement, *STATEMENTS), (recall.question, *QUESTIONS)
        # Text without words: all words of a sample are those of facts and questions.
        text = np.zeros(max(LENGTHS), np.int64)
        self.cells: list[tuple[str, int, int, list[tuple[str, str]]]] = []
        for cell in run.cells:
            task, length, forms = cell["task"], cell["length"], []
            if task in HELD_OUT_WORDINGS:
                continue
            for index in range(cell["sequences"]):
                sample = _make_sample(task, length, cell["depth"], index, recall, evaluation["seed"], text)
                content = bytes(sample.tokens.tolist())
                for answer in sample.answers:
                    value, end = content[answer[0] : answer[-1] + 1].decode(), int(answer[0])
                    question = content[content.rfind(b"\n", 0, end) : end].decode()
                    # A value is stated once, before all questions.
                    place = content.find(value.encode())
                    statement = content[content.rfind(b"\n", 0, place) : content.find(b"\n", place) + 1].decode()
                    forms.append((match(statements, statement, value), match(questions, question, value)))
            assert len(forms) == cell["answers"]
            self.cells.append((task, length, cell["right"], forms))


def match(templates: tuple[str, ...], text: str, value: str) -> str:
    """The template of a text, found by its parts around the name and the value."""
    fits = []
    for template in templates:
        start, end = template.replace("{value}", value).split("{name}")
        # Names are two words or a code.
        name = text[len(start) : len(text) - len(end)]
        if text.startswith(start) and text.endswith(end) and name.replace("-", " ").replace(" ", "", 1).isalnum():
            fits.append(template)
    (template,) = fits
    return template


def is_value_first(statement: str) -> bool:
    return statement.index("{value}") < statement.index("{name}")


def fit_shares(
    asked: list[Asked], tasks: tuple[str, ...], length: int, classify: Classify
) -> dict[str, tuple[float, float]]:
    """Percent of right answers by class, and the half width of its 95% interval.

    Least squares: the right answers of a cell are the sum over classes of the number of its answers times the share of the
    class. Cells are weighted by the inverse of their number of answers. All classes are taken to vary equally, so the
    interval of a class near 0 or 100% is too wide.
    """
    cells = [(right, forms) for one in asked for task, at, right, forms in one.cells if task in tasks and at == length]
    classes = sorted({classify(*form) for _, forms in cells for form in forms})
    scale = np.array([1 / math.sqrt(len(forms)) for _, forms in cells])
    counts = np.array([[sum(classify(*form) == name for form in forms) for name in classes] for _, forms in cells])
    scaled, right = counts * scale[:, None], np.array([right for right, _ in cells]) * scale
    shares = np.linalg.lstsq(scaled, right, rcond=None)[0]
    variance = ((right - scaled @ shares) ** 2).sum() / (len(cells) - len(classes))
    errors = np.sqrt(variance * np.diag(np.linalg.inv(scaled.T @ scaled)))
    return {name: (100 * share, 196 * error) for name, share, error in zip(classes, shares, errors, strict=True)}


def print_forms(asked: dict[tuple[str, int], Asked]) -> None:
    kinds: dict[str, Classify] = {
        "statement": lambda statement, _: statement,
        "question": lambda _, question: question,
        "order": lambda statement, _: "value first" if is_value_first(statement) else "name first",
    }
    for kind, classify in kinds.items():
        columns = [
            fit_shares([asked[arm, seed] for seed in SEEDS], AMONG_OTHERS, length, classify)
            for length in LENGTHS
            for arm in ARMS
        ]
        rows = [
            [f"`{name.strip()}`", *(f"{column[name][0]:.0f} ± {column[name][1]:.0f}" for column in columns)]
            for name in columns[0]
        ]
        table([kind, *(f"`{arm}`, {length:,}" for length in LENGTHS for arm in ARMS)], rows)


def plot_orders(asked: dict[tuple[str, int], Asked]) -> Figure:
    """Plot the right answers by task, length and arm: statements with the name first and with the value first."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    tasks = (*TASKS, "updated", "capitals", "letters", "hex", "five_digits", "twelve_digits")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, length in zip(panels, LENGTHS, strict=True):
        for arm, color, shift in (("window", SEL, -0.13), ("dense", DENSE, 0.13)):
            runs = [asked[arm, seed] for seed in SEEDS]
            for row, task in enumerate(tasks):
                shares = fit_shares(runs, (task,), length, lambda statement, _: f"{is_value_first(statement)}")
                for order, (share, half) in shares.items():
                    fill = "white" if order == "True" else color
                    axes.errorbar(share, row + shift, xerr=half, fmt="o", color=color, markerfacecolor=fill, markersize=5)
        axes.axvline(100, color="black", linewidth=0.6)
        axes.axvline(0, color="black", linewidth=0.6)
        axes.set(xlabel="right answers, percent (estimated from cells)", xlim=(-25, 125))
        axes.set_title(f"{length:,} bytes, 3 seeds", fontsize=9)
        axes.set_yticks(range(len(tasks)), tasks)
    panels[0].invert_yaxis()
    marks = [
        Line2D([], [], marker="o", linestyle="", color=color, markerfacecolor=fill, label=f"{arm}, {order} first")
        for arm, color in (("window", SEL), ("dense", DENSE))
        for order, fill in (("name", color), ("value", "white"))
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def differ(
    runs: dict[tuple[str, int], Run],
    others: dict[tuple[str, int], Run],
    arm: str,
    other: str,
    text: str,
    position: int | None = None,
) -> list[float]:
    """Bits per byte of `runs` of an arm minus those of `others` of another arm, by seed."""
    return [mean_difference(runs[arm, seed], others[other, seed], text, position) for seed in SEEDS]


def print_ruler(paths: dict[tuple[str, int], Path], control_paths: dict[tuple[str, int], Path]) -> None:
    def read_scores(path: Path) -> dict[tuple[str, int], float]:
        return {(result["task"], result["length"]): result["score"] for result in json.loads((path / "ruler.json").read_text())["results"]}

    columns = {arm: [read_scores(paths[arm, seed]) for seed in SEEDS] for arm in ARMS}
    controls = {arm: read_scores(control_paths[arm, max(SEEDS)]) for arm in ARMS}
    rows = []
    for task, length in columns["window"][0]:
        row = [f"{task}, {length:,}"]
        for arm in ARMS:
            row += [
                " / ".join(f"{scores[task, length]:.4g}" for scores in columns[arm]),
                f"{controls[arm][task, length]:.4g}",
            ]
        rows.append(row)
    table(["task, length", *(f"`{arm}`{kind}" for arm in ARMS for kind in ("", ", control"))], rows)


if __name__ == "__main__":
    main()
