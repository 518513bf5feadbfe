"""Errors that a user can fix, and messages for an invalid configuration: per problem one line with key, value, remedy."""

from __future__ import annotations

import difflib
import errno
import math
import os
import re
import reprlib
from collections.abc import Mapping
from typing import Any

import pydantic

# Keys of all sections, for suggestions. `run_config` fills the list when it defines `RunConfig`.
KNOWN_KEYS: list[str] = []


class UsageError(Exception):
    """An error that the user can fix. The message is complete: expected and actual value, and the remedy."""


_FILE_KIND = "expected a file where a folder is, or the reverse; move it away"
_RIGHTS = "check its owner and permissions, or choose another folder"
_REMEDIES = {
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: "choose a folder on a disk that is not read-only",
    **dict.fromkeys((errno.ENOTDIR, errno.EISDIR, errno.EEXIST), _FILE_KIND),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space"),
    errno.ELOOP: "remove the symbolic link",
    errno.ENAMETOOLONG: "choose a shorter path",
}


def describe_os_error(error: OSError) -> str | None:
    """Return path, reason and remedy of an error that the user can fix: rights, a file of another kind, a full disk, a
    deleted working directory. None for any other error.
    """
    if isinstance(error, UsageError):
        return str(error)
    if isinstance(error, FileNotFoundError) and not has_working_dir():
        return "the working directory was deleted; change to another folder"
    if isinstance(error, FileNotFoundError) and "temporary directory" in (error.strerror or ""):
        return "no folder for temporary files is writable; set the variable TMPDIR to one that is"
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"a file or the output: {os.strerror(error.errno).lower()}; {_REMEDIES[error.errno]}"
    if error.filename is None or error.errno not in _REMEDIES:
        return None
    return f"{os.fsdecode(error.filename)}: {os.strerror(error.errno).lower()}; {_REMEDIES[error.errno]}"


def describe_memory_error(error: BaseException) -> str | None:
    """Return size and remedy of an error for too little memory; None for any other error."""
    # Without importing torch, whose error on a CPU is a RuntimeError.
    is_torch_error = type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error)
    if not is_torch_error and not isinstance(error, MemoryError):
        return None
    size = re.search(r"[Tt]ried to allocate ([\d.,]+ \w+)", str(error))
    return f"not enough memory{f' for {size[1]}' if size else ''}; use fewer tokens, sequences or layers"


def has_working_dir() -> bool:
    """Return False if the working directory was deleted."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


class ConfigError(UsageError, ValueError):
    """An invalid configuration. The message has one line per problem: key, value, remedy."""


_SECTION_BY_CLASS = {
    "NSAConfig": "nsa",
    "ModelConfig": "model",
    "RopeScaling": "model.rope_scaling",
    "RuntimeConfig": "runtime",
    "TrainConfig": "train",
    "StageConfig": "train",
    "RecallConfig": "data",
    "DataConfig": "data",
}


# Shortens values in messages to their beginning and end, and nested lists to two levels.
VALUE_REPR = reprlib.Repr()
VALUE_REPR.maxlevel, VALUE_REPR.maxstring, VALUE_REPR.maxother, VALUE_REPR.maxlong = 2, 100, 100, 40
# A message lists at most this many keys of a section.
MAX_LISTED_KEYS = 20


def shorten(text: str) -> str:
    """Return `text` on one line of at most 100 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 100 else f"{line[:97]}..."


def format_validation_error(error: pydantic.ValidationError, kind: type[pydantic.BaseModel]) -> str:
    # A sweep is not a section of a run and has its own keys.
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
        message = str(problem["ctx"]["error"])
        # The message of a stage does not contain its index.
        if key.startswith("train.stages."):
            return message.replace("train.", f"{key}.")
        # Nor does the message of a sweep's override contain the variant.
        return f"{shorten(key)}: {message}" if key.startswith(("variants.", "common")) else message
    if problem["type"] == "missing":
        return f"{shorten(key)}: missing; set it"
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
        matches = difflib.get_close_matches(section, sections, n=1, cutoff=0.6) or _find_similar_key(key, known)
        return f"did you mean {matches[0]}?" if matches else f"known are {', '.join(sections)}"
    section_keys = [k for k in known if k.startswith(section + ".")]
    same_name = [k for k in known if k.split(".")[-1] == key.split(".")[-1]]
    if same_name:
        return f"did you mean {same_name[0]}?"
    matches = difflib.get_close_matches(key, section_keys, n=1, cutoff=0.6)
    if matches:
        return f"did you mean {matches[0]}?"
    similar = _find_similar_key(key, known)
    if similar:
        return f"did you mean {similar[0]}?"
    names = [k.split(".")[1] for k in section_keys]
    shown, rest = names[:MAX_LISTED_KEYS], len(names[MAX_LISTED_KEYS:])
    return f"{section} has {', '.join(shown)}{f' and {rest} more' if rest else ''}"


def _find_similar_key(key: str, known: list[str]) -> list[str]:
    key_by_name = {k.split(".")[-1]: k for k in known}
    matches = difflib.get_close_matches(key.split(".")[-1], key_by_name, n=1, cutoff=0.75)
    return [key_by_name[matches[0]]] if matches else []


def list_keys(kind: type[pydantic.BaseModel], prefix: str = "") -> list[str]:
    """Return every dotted key of the YAML form, for suggestions and documentation."""
    keys = []
    for name, info in kind.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, pydantic.BaseModel):
            keys += list_keys(inner, "nsa." if name == "nsa" else f"{name}.")
        else:
            keys.append(prefix + name)
    return keys
