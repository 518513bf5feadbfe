"""Text output in any locale: a character that the stream cannot encode is replaced instead of ending the command."""

from __future__ import annotations

import codecs
import io
import json
import sys
from typing import Any

ERROR_HANDLER = "nsa_lab.replace"
REPLACEMENTS = {
    "–": "-", "—": "-", "−": "-", "…": "...", "±": "+-", "→": "->", "←": "<-", "×": "x", "·": "*", "≤": "<=", "≥": ">=",
    "≈": "~", "│": "|", "─": "-", "•": "*", "“": '"', "”": '"', "‘": "'", "’": "'", "\N{NO-BREAK SPACE}": " ",
}  # fmt: skip


# Control characters, and marks that reorder or separate lines: a recorded value must not move the cursor, change the
# terminal or show its characters in another order.
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"} | {
    code: f"\\u{code:04x}" for code in (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
}
_CONTROL_AND_LINES = {**_CONTROL, ord("\t"): "\\t", ord("\n"): "\\n"}


def make_printable(text: str) -> str:
    """Return text with control characters, except tab and line feed, as escapes such as `\\x1b`."""
    return text.translate(_CONTROL)


def make_one_line(text: str) -> str:
    """Return text with all control characters as escapes, such as `\\n`: a name or a cell of a table."""
    return text.translate(_CONTROL_AND_LINES)


def allow_any_text() -> None:
    """Make stdout and stderr accept every text, whatever their encoding."""
    codecs.register_error(ERROR_HANDLER, _replace)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ERROR_HANDLER)


def dump_json(value: Any) -> str:
    """Return indented JSON; ASCII only if stdout is not UTF-8, so that no character of it is replaced."""
    is_utf8 = (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace("-", "").startswith("utf")
    return json.dumps(value, indent=1, ensure_ascii=not is_utf8)


def _replace(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    character = error.object[error.start]
    if 0xDC80 <= ord(character) <= 0xDCFF:
        # Python decodes a byte of a file name or argument that is not valid text to this character.
        return bytes([ord(character) - 0xDC00]), error.start + 1
    return REPLACEMENTS.get(character) or character.encode("ascii", "backslashreplace").decode(), error.start + 1
