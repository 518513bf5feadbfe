"""Errors that a user can put right, and what is said of a configuration that cannot be used: key, value, remedy, one line
per problem."""

from __future__ import annotations

import difflib
import math
import reprlib
from collections.abc import Mapping
from typing import Any

import pydantic

# Every key there is, for hints; a run, which is made of all sections, writes them here once it is defined.
KNOWN_KEYS: list[str] = []


class UsageError(Exception):
    """Something that a user can put right. The message is all they need: what was expected, what came, what to do."""


class ConfigError(UsageError, ValueError):
    """The configuration cannot be used. The message is one line per problem: key, value, remedy."""


_SECTION_BY_CLASS = {
    "NSAConfig": "nsa",
    "ModelConfig": "model",
    "RuntimeConfig": "runtime",
    "TrainConfig": "train",
    "StageConfig": "train",
    "RecallConfig": "data",
    "DataConfig": "data",
}


# What an error repeats of a value: its beginning and end, and of lists in lists two levels.
VALUE_REPR = reprlib.Repr()
VALUE_REPR.maxlevel, VALUE_REPR.maxstring, VALUE_REPR.maxother, VALUE_REPR.maxlong = 2, 100, 100, 40


def shorten(text: str) -> str:
    """`text` on one line, cut where it is longer than anyone would read."""
    line = " ".join(text.split())
    return line if len(line) <= 100 else f"{line[:97]}..."


def format_validation_error(error: pydantic.ValidationError, kind: type[pydantic.BaseModel]) -> str:
    # A sweep is no part of a run, and has keys of its own.
    known = KNOWN_KEYS if kind.__name__ in (*_SECTION_BY_CLASS, "RunConfig") else list_keys(kind)
    lines = []
    for problem in error.errors():
        path = [str(part) for part in problem["loc"]]
        if "nsa" in path:
            path = path[path.index("nsa") :]
        elif kind.__name__ in _SECTION_BY_CLASS:
            path = [_SECTION_BY_CLASS[kind.__name__], *path]
        lines.append(format_problem(".".join(path), problem, known))
    return "\n".join(lines)


def format_problem(key: str, problem: Mapping[str, Any], known: list[str] = KNOWN_KEYS) -> str:
    value = problem.get("input")
    if problem["type"] == "extra_forbidden":
        return f"{shorten(key)} = {VALUE_REPR.repr(value)}: no such key; {_suggest_key(key, known)}"
    if problem["type"] == "value_error":
        said = str(problem["ctx"]["error"])
        # A stage does not know which one it is.
        if key.startswith("train.stages."):
            return said.replace("train.", f"{key}.")
        # Nor does what a sweep changes.
        return f"{shorten(key)}: {said}" if key.startswith(("variants.", "common")) else said
    if problem["type"] == "missing":
        return f"{shorten(key)}: missing; say it"
    reason = problem["msg"][0].lower() + problem["msg"][1:]
    if isinstance(value, float) and not math.isfinite(value):
        reason = "expected a finite number"
    if key == "runtime.precision" and value == "fp16":
        reason = "fp16 needs loss scaling and loses small updates; use bf16 (fp32 master weights) or fp32"
    return f"{shorten(key)} = {VALUE_REPR.repr(value)}: {reason}"


def _suggest_key(key: str, known: list[str]) -> str:
    section = key.split(".")[0]
    sections = sorted({k.split(".")[0] for k in known})
    if section not in sections:
        near = difflib.get_close_matches(section, sections, n=1, cutoff=0.6) or _find_similar_key(key, known)
        return f"did you mean {near[0]}?" if near else f"known are {', '.join(sections)}"
    own = [k for k in known if k.startswith(section + ".")]
    moved = [k for k in known if k.split(".")[-1] == key.split(".")[-1]]
    if moved:
        return f"did you mean {moved[0]}?"
    near = difflib.get_close_matches(key, own, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]}?"
    elsewhere = _find_similar_key(key, known)
    return f"did you mean {elsewhere[0]}?" if elsewhere else f"{section} has {', '.join(k.split('.')[1] for k in own)}"


def _find_similar_key(key: str, known: list[str]) -> list[str]:
    leaves = {k.split(".")[-1]: k for k in known}
    near = difflib.get_close_matches(key.split(".")[-1], leaves, n=1, cutoff=0.75)
    return [leaves[near[0]]] if near else []


def list_keys(kind: type[pydantic.BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of the YAML form, for the nearest-key hint and the documentation."""
    keys = []
    for name, info in kind.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, pydantic.BaseModel):
            keys += list_keys(inner, "nsa." if name == "nsa" else f"{name}.")
        else:
            keys.append(prefix + name)
    return keys
