"""YAML subset of configurations: text, numbers, booleans, null, lists, and mappings with text keys.

Invariants
* `parse` returns the value that was passed to `dump`.
* Duplicate keys, keys that are not text, and features without use in a configuration (tags, deep nesting) raise
  `YAMLTextError` with one line that has the line and column.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import reprlib
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from nsa_lab.config.optional_deps import require

require("yaml")

import yaml

MAX_DEPTH = 16
"""Maximum nesting that is parsed. A configuration has five levels."""
MAX_PAIRS = 100_000
"""Maximum number of keys after merges (`<<`), which can multiply a small text to any size."""
TAG_PREFIX = "tag:yaml.org,2002:"
STR_TAG = f"{TAG_PREFIX}str"
# Scalars that are not text, each with the characters that it can start with. YAML 1.1 parses 1e-3 as text, 1:30 as 90 and
# 0100 as 64. Here, 1e-3 is a number and the other two are text, which a numeric setting rejects.
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
    """The text is not YAML, or not valid in a configuration. The message is one line: position, problem and remedy."""


def parse(text: str) -> Any:
    """Return the value of `text`; None if it is empty. Raise `YAMLTextError`."""
    if _is_simple(text):
        # Ten times as fast. The other parser reports errors.
        with contextlib.suppress(yaml.YAMLError, YAMLTextError):
            return _parse_simple(text)
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        message = " ".join(filter(None, (error.context, error.problem)))
        raise _make_error(error.problem_mark, f"not YAML: {message}; quote a value that is meant as text") from None
    except yaml.YAMLError as error:
        raise YAMLTextError(f"not YAML: {' '.join(str(error).split())}") from None


def dump(value: Any) -> str:
    """Return `value` as YAML, with keys in their order."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False)


def _is_simple(text: str) -> bool:
    """Return whether both parsers of PyYAML agree on the text: no anchors, tags, directives, tabs or deep brackets.

    They may still disagree on question marks, see `_parse_simple`.
    """
    if _FastLoader is None or not text.isascii() or text.count("[") + text.count("{") > 64:
        return False
    # Most texts have none of these characters, which is found faster without the pattern.
    return not (any(mark in text for mark in _SPECIAL_MARKS) and _SPECIAL.search(text))


def _parse_simple(text: str) -> Any:
    assert _FastLoader is not None, "checked by _is_simple"
    loader = _FastLoader(text)
    try:
        node = loader.get_single_node()
        value = None if node is None else _construct(node, 1)
    finally:
        loader.dispose()
    if "?" in text:
        # It can separate a key, or end a word in brackets for one parser only. Both parsers agree if all are in quotes, in
        # words outside brackets or in comments. A text with escapes, which could add some, is left to the other parser.
        scalars = "".join(_list_scalars(node, False))
        written = text if "#" in scalars else _COMMENT.sub("", text)
        if "\\" in text or scalars.count("?") != written.count("?"):
            raise YAMLTextError("a question mark is not in quotes, in a word outside brackets or in a comment")
    return value


def _list_scalars(node: yaml.Node | None, in_brackets: bool) -> Iterator[str]:
    """Yield the scalars of a node, without the question marks of unquoted ones in brackets."""
    if isinstance(node, yaml.ScalarNode):
        yield node.value.replace("?", "") if in_brackets and not node.style else node.value
    elif isinstance(node, yaml.CollectionNode):
        in_brackets = in_brackets or bool(node.flow_style)
        for child in itertools.chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value:
            yield from _list_scalars(child, in_brackets)


def _construct(node: yaml.Node, depth: int) -> Any:
    """Return the value of a node of a simple text, as `_Loader` does, but faster: `nsa-lab status` reads many files.

    Raise `YAMLTextError` for what `_Loader` refuses: deep nesting, and keys that are not text or occur twice.
    """
    if depth > MAX_DEPTH:
        raise YAMLTextError("nested too deeply")
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key, value in node.value:
            if key.tag != STR_TAG or key.value in mapping:
                raise YAMLTextError("keys are not distinct texts")
            mapping[key.value] = _construct(value, depth + 1)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_construct(value, depth + 1) for value in node.value]
    return _construct_scalar(node.tag, node.value)


@lru_cache(maxsize=4096)
def _construct_scalar(tag: str, text: str) -> Any:
    """Return the value of a number, text, boolean or null. Configurations have few different ones."""
    return _Loader("").construct_object(yaml.ScalarNode(tag, text))


class _Loader(yaml.SafeLoader):
    _depth = 0
    _n_pairs = 0

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        self._n_pairs += len(node.value)
        if self._n_pairs > MAX_PAIRS:
            raise _make_error(node.start_mark, f"more than {MAX_PAIRS:,} keys after merges (<<); write fewer merges")

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self._depth == MAX_DEPTH:
            raise _make_error(self.peek_event().start_mark, f"nested deeper than {MAX_DEPTH} levels; remove some levels")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def scan_flow_scalar_non_spaces(self, double: bool, start_mark: yaml.Mark) -> list[str]:
        try:
            return super().scan_flow_scalar_non_spaces(double, start_mark)
        except (ValueError, OverflowError):  # of `chr`
            problem = "an escape (\\U) expects a character of Unicode, at most 0010FFFF"
            raise _make_error(self.get_mark(), f"{problem}; correct its digits") from None

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys: set[str] = set()
        # Check keys as they are written: a merge adds keys later, and explicit keys may replace them.
        for key, _ in node.value:
            if key.tag not in (STR_TAG, f"{TAG_PREFIX}merge"):
                key_text = key.value if isinstance(key.value, str) else f"a {key.id}"
                raise _make_error(
                    key.start_mark, f"the key {reprlib.repr(key_text)} is not text; keys are names of settings"
                )
            if key.value in keys:
                raise _make_error(
                    key.start_mark, f"the key {reprlib.repr(key.value)} occurs twice; keep one, or merge their values"
                )
            keys.add(key.value)
        return node


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` or another YAML reader would parse as another type."""


def _make_number_constructor(kind: Callable[[str], float]) -> Callable[[Any, Any], float]:
    def construct(loader: _Loader, node: yaml.ScalarNode) -> float:
        number_text = loader.construct_scalar(node)
        try:
            return kind(number_text.replace("_", "").lower())
        except ValueError:
            raise _make_error(node.start_mark, f"{reprlib.repr(number_text)} is not a valid number") from None

    return construct


def _reject_tag(loader: _Loader, node: yaml.Node) -> None:
    raise _make_error(
        node.start_mark, f"{node.tag.replace(TAG_PREFIX, '!!')} is not allowed in a configuration; write it as text"
    )


def _make_error(mark: yaml.Mark | None, problem: str) -> YAMLTextError:
    return YAMLTextError(f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else problem)


# Replace PyYAML's resolvers and constructors, which parse dates, sets and sexagesimal numbers.
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

# Characters that the two parsers of PyYAML may read differently, or that can multiply a text.
_SPECIAL_MARKS = (*"&*!%@`|>\t", "<<", "---", "...")
_SPECIAL = re.compile(r"(^|[\s\[{,])[&*!%@`|>]|\t|<<|^---|^\.\.\.", re.MULTILINE)
_COMMENT = re.compile(r"#(?<!\S#).*$", re.MULTILINE)  # begins with a character, which is fast to search for
_FastLoader: type[yaml.CSafeLoader] | None = None
if yaml.__with_libyaml__:

    class _LibraryLoader(yaml.CSafeLoader):
        """The parser of libyaml with the resolvers and constructors of `_Loader`."""

        yaml_constructors = _Loader.yaml_constructors

        def resolve(self, kind: type[yaml.Node], value: str, implicit: tuple[bool, bool]) -> str:
            """Return the tag of a node. The scalars of configurations repeat."""
            return (
                _resolve_scalar(value)
                if kind is yaml.ScalarNode and implicit[0]
                else super().resolve(kind, value, implicit)
            )

    @lru_cache(maxsize=4096)
    def _resolve_scalar(value: str) -> str:
        return _Loader("").resolve(yaml.ScalarNode, value, (True, False))

    _FastLoader = _LibraryLoader
