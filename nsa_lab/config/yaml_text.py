"""YAML as configurations are written in it: text, numbers, true and false, null, lists, and mappings from text.

Invariants
* What `write` wrote, `read` reads back as the same value.
* A key that stands twice, a key that is no text, and what has no place in a configuration (tags, nesting without end) is a
  `YAMLTextError` of one line, with the line and column.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable
from typing import Any

from nsa_lab.config.optional_deps import require

require("yaml")

import yaml

MAX_DEPTH = 16
"""Levels of nesting that are read. A configuration has five."""
TAG_PREFIX = "tag:yaml.org,2002:"
# Scalars that are no text, each with the characters that it may begin with. YAML 1.1 takes 1e-3 for text, 1:30 for 90 and
# 0100 for 64; here the first is the number that it is everywhere else, and the others are text, which no number may be.
SCALAR_PATTERNS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"(?i:yes|no|true|false|on|off)", list("yYnNtTfFoO")),
    "int": (r"[-+]?(0|[1-9][\d_]*|0b[01_]+|0x[\da-fA-F_]+)", list("-+0123456789")),
    "float": (
        r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*|(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+|\.(?i:inf))|\.(?i:nan)",
        list("-+.0123456789"),
    ),
    "merge": (r"<<", ["<"]),
}
DEFAULT_TAGS = tuple(f"{TAG_PREFIX}{kind}" for kind in ("null", "bool", "str", "seq", "map"))


class YAMLTextError(ValueError):
    """The text is not YAML, or not what a configuration can hold. One line: where, what was found, and what to do."""


def parse(text: str) -> Any:
    """The value that `text` spells; None for an empty one. Raises `YAMLTextError`."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        said = " ".join(filter(None, (error.context, error.problem)))
        raise _make_error(error.problem_mark, f"not YAML: {said}; quote a value that is meant as text") from None
    except yaml.YAMLError as error:
        raise YAMLTextError(f"not YAML: {' '.join(str(error).split())}") from None


def dump(value: Any) -> str:
    """`value` as YAML, keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


class _Loader(yaml.SafeLoader):
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self._depth == MAX_DEPTH:
            raise _make_error(self.peek_event().start_mark, f"nested deeper than {MAX_DEPTH} levels; no setting is")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        # As they are written: a merge brings keys later, and what stands beside it may replace them.
        for key, _ in node.value:
            if key.tag not in (f"{TAG_PREFIX}str", f"{TAG_PREFIX}merge"):
                written = key.value if isinstance(key.value, str) else f"a {key.id}"
                raise _make_error(
                    key.start_mark, f"the key {reprlib.repr(written)} is not text, as the names of settings are"
                )
            if key.value in seen:
                raise _make_error(
                    key.start_mark, f"the key {reprlib.repr(key.value)} stands twice; keep one, or join what they hold"
                )
            seen.add(key.value)
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader`, or another reader of YAML, would take for something else."""


def _make_number_constructor(kind: Callable[[str], float]) -> Callable[[Any, Any], float]:
    def construct(loader: _Loader, node: yaml.ScalarNode) -> float:
        written = loader.construct_scalar(node)
        try:
            return kind(written.replace("_", "").lower())
        except ValueError:
            raise _make_error(node.start_mark, f"{reprlib.repr(written)} is not a number that can be read") from None

    return construct


def _reject_tag(loader: _Loader, node: yaml.Node) -> None:
    raise _make_error(
        node.start_mark, f"{node.tag.replace(TAG_PREFIX, '!!')} has no place in a configuration; write it as text"
    )


def _make_error(mark: yaml.Mark | None, problem: str) -> YAMLTextError:
    return YAMLTextError(f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else problem)


# In place of PyYAML's own, which know dates, sets and numbers to the base of 60.
_Loader.yaml_implicit_resolvers = {}
for _kind, (_pattern, _first) in SCALAR_PATTERNS.items():
    _Loader.add_implicit_resolver(f"{TAG_PREFIX}{_kind}", re.compile(f"^(?:{_pattern})$"), _first)
_Dumper.add_implicit_resolver(
    f"{TAG_PREFIX}float", re.compile(f"^(?:{SCALAR_PATTERNS['float'][0]})$"), SCALAR_PATTERNS["float"][1]
)
_Loader.yaml_constructors = {
    **{tag: make for tag, make in yaml.SafeLoader.yaml_constructors.items() if tag in DEFAULT_TAGS},
    f"{TAG_PREFIX}int": _make_number_constructor(lambda text: int(text, 0)),
    f"{TAG_PREFIX}float": _make_number_constructor(lambda text: float(re.sub(r"\.(inf|nan)$", r"\1", text))),
    None: _reject_tag,
}
