"""Convert docstrings, which are plain text, to reStructuredText.

The docstrings of this project have four forms that reStructuredText would read as prose: lists that follow a line without
a blank line, parameters and other items as `name: text`, sections `Args:`, `Returns:` and `Raises:`, and indented examples
and tables.
"""

from __future__ import annotations

import re
import textwrap

SECTION = re.compile(r"(Args|Returns|Raises):$")
FIELD_BY_SECTION = {"Args": "param", "Returns": "returns", "Raises": "raises"}
BULLET = re.compile(r"[*-] ")
NAMED = re.compile(r"(?P<names>[A-Za-z_]\w*(?:, [A-Za-z_]\w*)*): (?P<text>.*)")
# At the start of a paragraph or of a sentence in it: `name:` or `first, second:`, also between backquotes.
PARAMETER = re.compile(r"(?:^|(?<=[.;)]) )`?(?P<names>[a-z_]\w*(?:`?, `?[a-z_]\w*)*)`?: ")
ERRORS = re.compile(r"(?<=\.) (?=Raises? )")


def convert_docstring(lines: list[str], parameters: frozenset[str] = frozenset()) -> list[str]:
    """Return the lines of a docstring as reStructuredText; `parameters` are the names of the object's parameters."""
    converted: list[str] = []
    for paragraph in _split_paragraphs(lines):
        converted += [*_convert_paragraph(paragraph, parameters), ""]
    return converted


def _split_paragraphs(lines: list[str]) -> list[list[str]]:
    """Return the runs of lines between blank lines."""
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if line.strip():
            paragraphs[-1].append(line.rstrip())
        elif paragraphs[-1]:
            paragraphs.append([])
    return [paragraph for paragraph in paragraphs if paragraph]


def _convert_paragraph(lines: list[str], parameters: frozenset[str]) -> list[str]:
    if lines[0].startswith("    "):
        return ["::", "", *lines]
    if (section := SECTION.match(lines[0])) and len(lines) > 1:
        return _convert_section(section[1], lines[1:])
    if fields := _convert_parameters(" ".join(line.strip() for line in lines), parameters):
        return fields
    converted: list[str] = []
    for kind, block in _split_items(lines):
        if kind == "literal":
            block = ["::", "", *block]
        elif kind == "named":
            match = NAMED.match(block[0])
            assert match
            text = " ".join([match["text"], *(line.strip() for line in block[1:])])
            block = [f"* ``{match['names']}``: {text}"]
        converted += [*block, ""]
    return converted


def _convert_parameters(text: str, parameters: frozenset[str]) -> list[str]:
    """Return a paragraph that starts with a parameter as a field list, one field per parameter; [] for other paragraphs."""
    found = [m for m in PARAMETER.finditer(text) if set(re.split("`?, `?", m["names"])) <= parameters]
    if not found or found[0].start() > 0:
        return []
    *texts, last = (text[m.end() : n.start() if n else None] for m, n in zip(found, [*found[1:], None], strict=True))
    last, *errors = ERRORS.split(last, maxsplit=1)
    names = [m["names"].replace("`", "") for m in found]
    return [*(f":param {name}: {text}" for name, text in zip(names, [*texts, last], strict=True)), "", *errors]


def _convert_section(section: str, lines: list[str]) -> list[str]:
    """Return a section as a field list: one field per entry that is not indented further."""
    body = textwrap.dedent("\n".join(lines)).splitlines()
    field = FIELD_BY_SECTION[section]
    if section == "Returns":
        return [f":{field}: {' '.join(line.strip() for line in body)}", ""]
    entries: list[list[str]] = []
    for line in body:
        entries.append([line]) if not line.startswith(" ") or not entries else entries[-1].append(line.strip())
    converted: list[str] = []
    for entry in entries:
        match = NAMED.match(entry[0])
        names, text = (match["names"], match["text"]) if match else ("", entry[0])
        converted.append(f":{field} {names}: {' '.join([text, *entry[1:]])}")
    return [*converted, ""]


def _split_items(lines: list[str]) -> list[tuple[str, list[str]]]:
    """Split a paragraph into runs of text, list items, `name: text` items and indented tables."""
    # A single `word: text` is prose. Several in a row, or one with an indented continuation, are items.
    starts = [bool(NAMED.match(line)) for line in lines]
    indented = [line.startswith("    ") for line in lines] + [False]
    items: list[tuple[str, list[str]]] = []
    for i, line in enumerate(lines):
        neighbours = starts[i - 1 : i] + starts[i + 1 : i + 2]
        follows_item = bool(items) and items[-1][0] == "named"
        if BULLET.match(line):
            items.append(("bullet", [line]))
        elif starts[i] and (any(neighbours) or indented[i + 1] or follows_item):
            items.append(("named", [line]))
        elif items and items[-1][0] == "bullet" and line.startswith("  "):
            items[-1][1].append("  " + line.strip())
        elif items and items[-1][0] in ("named", "literal") and line.startswith("    "):
            items[-1][1].append(line)
        elif line.startswith("    ") and items:
            items.append(("literal", [line]))
        elif items and items[-1][0] == "text":
            items[-1][1].append(line)
        else:
            items.append(("text", [line]))
    return items
