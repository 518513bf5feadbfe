"""Relations in `ruler.json`: it has the tokenizer of the run, and tasks of RULER with prompts of their length."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

from nsa_lab.config.errors import shorten
from nsa_lab.runs.evaluation import RULER, RULER_NAMES, read_ruler
from nsa_lab.runs.history import History

STORED_TOKENIZER = re.compile(r"[0-9a-f]{16}")  # name of a tokenizer's file: the beginning of its digest
# Shortest of the longest prompts, relative to its length (0.94 measured), and missing tokens that are always accepted.
LEAST_PROMPT, OTHER_TOKENS = 0.5, 1024


def find_ruler_problem(history: History) -> str | None:
    """Return a text on the first relation of a valid `ruler.json` that does not hold; None if all do, or without it."""
    record = read_ruler(history.run_dir)
    problem = record and next(filter(None, (find(history, record) for find in RELATIONS)), None)
    return f"{RULER}: {problem}; run nsa-lab evaluate again" if problem else None


def _find_other_tokenizer(history: History, record: dict[str, Any]) -> str | None:
    configured, recorded = history.config.data.tokenizer, record["tokenizer"]
    name = PurePosixPath(configured).stem
    is_other = (configured == "byte") != (recorded == "byte")
    is_other |= STORED_TOKENIZER.fullmatch(name) is not None and not recorded.startswith(name)
    return (
        f"the tokenizer is {recorded:.16}, but config.yaml has data.tokenizer = {shorten(configured)}" if is_other else None
    )


def _find_other_task(history: History, record: dict[str, Any]) -> str | None:
    """Every task is one of RULER's, and was either asked at a length or not."""
    asked, skipped = ([(own["task"], own["length"]) for own in record[key]] for key in ("results", "not_asked"))
    for task, length in (*asked, *skipped):
        if task not in RULER_NAMES:
            return f"{shorten(task)!r} is no task of RULER, expected one of {', '.join(RULER_NAMES)}"
        if (task, length) in asked and (task, length) in skipped:
            return f"{task} at {length:,} tokens was asked, but is also listed as not asked"
    return None


def _find_short_prompt(history: History, record: dict[str, Any]) -> str | None:
    """A prompt fills its length, except for the answer and a part of the haystack that does not fit."""
    for result in record["results"]:
        task, length, prompt = result["task"], result["length"], result.get("prompt_tokens")
        lowest = min(LEAST_PROMPT * length, length - OTHER_TOKENS)
        if prompt is not None and prompt < lowest:
            return f"{task} at {length:,} tokens has prompts of {prompt:,} tokens, expected at least {lowest:,.0f}"
    return None


RELATIONS: tuple[Callable[[History, dict[str, Any]], str | None], ...] = (
    _find_other_tokenizer,
    _find_other_task,
    _find_short_prompt,
)
