r"""Formulas as MathML, which a browser shows without any script.

Two passes, because the Markdown converter would tear MathML apart: `hide` puts a word in the place of every formula
before the conversion, `show` puts the MathML in the place of the words after it.
"""

from __future__ import annotations

import html
import re

from latex2mathml import exceptions
from latex2mathml.converter import convert

CONVERSION_ERRORS = (
    IndexError,
    KeyError,
    ValueError,
    AttributeError,
    StopIteration,
    *(kind for kind in vars(exceptions).values() if isinstance(kind, type) and issubclass(kind, Exception)),
)

CODE = r"(?P<code>```.*?(?:```|\Z)|~~~.*?(?:~~~|\Z)|``.+?``|`[^`\n]+`)"
DISPLAY = r"\$\$(?P<display>.+?)\$\$|\\\[(?P<bracket>.+?)\\\]"
ENVIRONMENT = r"(?P<environment>\\begin\{(?P<name>\w+\*?)\}.+?\\end\{(?P=name)\})"
INLINE = r"(?<![\\$\w])\$(?P<inline>[^\s$](?:[^$\n]*[^\s$\\])?)\$(?![\w$])"
# Any other dollar is a dollar; the Markdown converter, which knows formulas too, must not see it.
DOLLAR = r"(?P<dollar>\\?\$)"
FORMULA = re.compile("|".join((CODE, DISPLAY, ENVIRONMENT, INLINE, DOLLAR)), re.DOTALL)

# The comma of `2{,}048`, which would be set with the space after it that one in a list has.
THOUSANDS = re.compile(r"(?<=\d)</mn><mrow><mo>&#x0002C;</mo></mrow><mn>(?=\d{3}\b)")
PLACEHOLDER = "NSAFORMULA{}ENDFORMULA"


class Formulas:
    """The formulas of one page, in the order in which they were hidden."""

    def __init__(self) -> None:
        self._mathml: list[str] = []

    def hide(self, markdown: str) -> str:
        """The Markdown with a word in the place of every formula; code is left alone."""
        return FORMULA.sub(self._hide, markdown)

    def restore(self, page: str) -> str:
        """The page with MathML in the place of the words."""
        return re.sub(PLACEHOLDER.format(r"(\d+)"), lambda found: self._mathml[int(found[1])], page)

    def _hide(self, found: re.Match[str]) -> str:
        if found["code"]:
            return found[0]
        display = found["display"] or found["bracket"] or found["environment"]
        self._mathml.append("&#36;" if found["dollar"] else to_mathml(display or found["inline"], display=bool(display)))
        return PLACEHOLDER.format(len(self._mathml) - 1)


def to_mathml(latex: str, *, display: bool = False) -> str:
    """One formula; as code, readable if not pretty, where the converter does not know what it says."""
    try:
        return THOUSANDS.sub(",", convert(latex.strip(), display="block" if display else "inline"))
    except CONVERSION_ERRORS:
        return f'<code class="formula">{html.escape(latex.strip())}</code>'
