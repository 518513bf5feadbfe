"""Print the tables of the runs with the grammar for wordings.md from run directories.

    python docs/science/wordings_grammar.py FOLDER

FOLDER holds the runs of the sweeps long_64k_grammar (seed 0), long_64k_grammar_seeds and long_64k_grammar_twice, and the
controls of long_64k_lean (seed 0) and long_64k_lean_seeds (`tools/records.py unpack --to FOLDER`). Missing runs are
left out.
"""

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from lean_seeds import SEEDS, find_run, mean_difference
from learning_rates_and_parts import TEXTS, Run, percent, table

from nsa_lab.data.recall.grammar import HELD_OUT_QUESTIONS, HELD_OUT_STATEMENTS, QUESTIONS, STATEMENTS, WORDS, expand

ARMS = ("dense", "window", "dense_twice", "window_twice", "dense_no_ngrams")
# A run and the run with dense attention that it is compared with.
PAIRS = {"window": "dense", "window_twice": "dense_twice"}
LENGTHS = (4096, 65536)
AMONG_OTHERS = ("multi_key", "multi_query")
# Held-out task -> the task whose share it is; None: the share of all answers. With the target.
TARGETS = {"new_words": ("multi_key", 0.9), "new_sentences": ("multi_key", 0.9), "other_words": (None, 0.5)}
TARGETS |= {"more_words": (None, 0.5), "updated": (None, 0.9), "first_value": (None, 0.9)}
HELD_OUT = ("new_words", "new_sentences", "other_words", "more_words", "capitals")
# Least share of right answers of the reference for which a share of it counts.
COUNTS = 0.5
SENTENCES = {
    text: sentence
    for sentence in (*STATEMENTS, *QUESTIONS, *HELD_OUT_STATEMENTS, *HELD_OUT_QUESTIONS)
    for text in expand([sentence], WORDS)
}


class Answers:
    """All answers of one run: (task, length) -> (statement, question, right) in the order of the evaluation."""

    def __init__(self, path: Path) -> None:
        evaluation = json.loads((path / "evaluation.json").read_text())
        self.found: dict[tuple[str, int], list[tuple[str, str, int]]] = defaultdict(list)
        for cell in evaluation["retrieval"]:
            self.found[cell["task"], cell["length"]] += [
                (evaluation["statements"][statement], evaluation["questions"][question], right)
                for statement, question, right in cell["wordings"]
            ]
        self.tasks = list(dict.fromkeys(task for task, _ in self.found))

    def rights(self, task: str, length: int) -> list[int]:
        return [right for *_, right in self.found[task, length]]


def main() -> None:
    folder = Path(sys.argv[1])
    paths = {(arm, seed): path for arm in ARMS for seed in SEEDS for path in find_newest(folder, arm, seed)}
    answers = {key: Answers(path) for key, path in paths.items()}
    controls = {(arm, seed): Run(find_run(folder, arm.split("_")[0], seed)) for arm, seed in paths}
    arms = [arm for arm in ARMS if (arm, 0) in paths]
    pooled = {
        (arm, task, length): [right for (a, _), one in answers.items() if a == arm for right in one.rights(task, length)]
        for arm in arms
        for task in answers["dense", 0].tasks
        for length in LENGTHS
    }

    print("## Targets\n")
    print_targets(pooled, arms)

    print("## Right answers, percent\n")
    rows = [
        [f"{task}, {length:,}", *(percent(sum(found), len(found)) for arm in arms for found in [pooled[arm, task, length]])]
        for task in answers["dense", 0].tasks
        for length in LENGTHS
    ]
    table(["task, length", *map("`{}`".format, arms)], rows)

    print("## The wording of the controls: `control_form`, and `multi_key` of the controls of the same seeds, percent\n")
    rows = []
    for arm in arms:
        for length in LENGTHS:
            counts = [control.count("multi_key", length) for (a, _), control in controls.items() if a == arm]
            found = pooled[arm, "control_form", length]
            rows.append(
                [
                    f"`{arm}`, {length:,}",
                    percent(sum(found), len(found)),
                    percent(sum(right for right, _ in counts), sum(n for _, n in counts)),
                ]
            )
    table(["run, length", "`control_form`", "controls"], rows)

    print("## Points at seed 0, minus `dense`, same questions\n")
    others = [arm for arm in arms if arm != "dense"]
    rows = [
        [
            f"{task}, {length:,}",
            *(compare(answers[arm, 0].rights(task, length), answers["dense", 0].rights(task, length)) for arm in others),
        ]
        for task in answers["dense", 0].tasks
        for length in LENGTHS
    ]
    table(["task, length", *map("`{}`".format, others)], rows)

    kinds: dict[str, Callable[[str, str], str]] = {
        "order": lambda statement, _: name_order(statement),
        "statement": lambda statement, _: SENTENCES[statement].strip(),
        "question": lambda _, question: SENTENCES[question].strip(),
    }
    for tasks in (AMONG_OTHERS, ("new_sentences",)):
        for kind, classify in kinds.items():
            print(f"## {', '.join(tasks)}, right answers by {kind}, percent\n")
            print_classes(answers, arms, tasks, kind, classify)

    print("## Bits per byte minus the control of the same seed and arm\n")
    rows = []
    for (arm, seed), path in paths.items():
        run, control = Run(path), controls[arm, seed]
        rows.append([f"`{arm}`", f"{seed}", *(f"{mean_difference(run, control, text):+.4f}" for text in TEXTS)])
    table(["run", "seed", *map("`{}`".format, TEXTS)], rows)


def find_newest(folder: Path, arm: str, seed: int) -> list[Path]:
    """The newest evaluated run of an arm and seed, if there is one."""
    sweeps = "long_64k_grammar", "long_64k_grammar_seeds", "long_64k_grammar_twice"
    found = [path.parent for sweep in sweeps for path in folder.glob(f"{sweep}.{arm}.s{seed}-*/evaluation.json")]
    return sorted(found, key=lambda path: path.name.rpartition("-")[0][-16:])[-1:]


def print_targets(pooled: dict[tuple[str, str, int], list[int]], arms: list[str]) -> None:
    rows = []
    for length in LENGTHS:
        for arm in arms:
            for task, (base, target) in TARGETS.items():
                reference = pooled[arm, base, length] if base else [1]
                label = f"{target:.0%} of `{base}`" if base else f"{target:.0%}"
                rows.append(
                    [f"`{arm}`, `{task}`", f"{length:,}", label, *judge(pooled[arm, task, length], reference, target)]
                )
        for arm, dense in PAIRS.items():
            for task in (*HELD_OUT, *AMONG_OTHERS, "updated", "first_value") if {arm, dense} <= set(arms) else ():
                found, reference = pooled[arm, task, length], pooled[dense, task, length]
                rows.append([f"`{arm}`, `{task}`", f"{length:,}", f"90% of `{dense}`", *judge(found, reference, 0.9)])
    table(["run, task", "length", "target", "right", "reference", ""], rows)


def judge(found: list[int], reference: list[int], target: float) -> tuple[str, str, str]:
    share, other = statistics.mean(found), statistics.mean(reference)
    outcome = ("met" if share >= target * other else "missed") if other >= COUNTS else "missed: too few to compare with"
    return percent(sum(found), len(found)), f"{other:.0%}", outcome


def compare(rights: list[int], others: list[int]) -> str:
    """Difference in points with its 95% interval over pairs of answers to the same question."""
    pairs = [100 * (right - other) for right, other in zip(rights, others, strict=True)]
    half = 1.96 * statistics.stdev(pairs) / len(pairs) ** 0.5
    return f"{statistics.mean(pairs):+.0f} [{statistics.mean(pairs) - half:+.0f}, {statistics.mean(pairs) + half:+.0f}]"


def name_order(statement: str) -> str:
    return "value first" if statement.index("{value}") < statement.index("{name}") else "name first"


def print_classes(
    answers: dict[tuple[str, int], Answers],
    arms: list[str],
    tasks: tuple[str, ...],
    kind: str,
    classify: Callable[[str, str], str],
) -> None:
    classes: dict[str, dict[tuple[str, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for (arm, _), one in answers.items():
        for task in tasks:
            for length in LENGTHS:
                for statement, question, right in one.found[task, length]:
                    classes[classify(statement, question)][arm, length].append(right)
    columns = [(arm, length) for length in LENGTHS for arm in arms]
    rows = [
        [f"`{name}`", *(percent(sum(cells[column]), len(cells[column])) if cells[column] else "–" for column in columns)]
        for name, cells in sorted(classes.items())
    ]
    table([kind, *(f"`{arm}`, {length:,}" for arm, length in columns)], rows)


if __name__ == "__main__":
    main()
