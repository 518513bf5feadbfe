r"""Convert formulas to MathML, which browsers show without a script.

This takes two passes, because the Markdown converter would break MathML: `hide` replaces each formula by a placeholder
before the conversion, and `restore` replaces the placeholders by MathML after it.
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
# Any other dollar sign is text. It is hidden too, because the Markdown converter would take it for a formula.
DOLLAR = r"(?P<dollar>\\?\$)"
FORMULA = re.compile("|".join((CODE, DISPLAY, ENVIRONMENT, INLINE, DOLLAR)), re.DOTALL)

# The comma of `2{,}048`, which MathML would set with a space after it, as in a list.
THOUSANDS = re.compile(r"(?<=\d)</mn><mrow><mo>&#x0002C;</mo></mrow><mn>(?=\d{3}\b)")
PLACEHOLDER = "NSAFORMULA{}ENDFORMULA"


class Formulas:
    """Formulas of one page, in the order in which they were hidden."""

    def __init__(self) -> None:
        self._mathml: list[str] = []

    def hide(self, markdown: str) -> str:
        """Replace each formula in the Markdown by a placeholder. Code is not changed."""
        return FORMULA.sub(self._hide, markdown)

    def restore(self, page: str) -> str:
        """Replace the placeholders in the page by MathML."""
        return re.sub(PLACEHOLDER.format(r"(\d+)"), lambda match: self._mathml[int(match[1])], page)

    def _hide(self, match: re.Match[str]) -> str:
        if match["code"]:
            return match[0]
        display = match["display"] or match["bracket"] or match["environment"]
        self._mathml.append("&#36;" if match["dollar"] else to_mathml(display or match["inline"], display=bool(display)))
        return PLACEHOLDER.format(len(self._mathml) - 1)


def to_mathml(latex: str, *, display: bool = False) -> str:
    """Convert one formula. If the converter cannot parse it, return it as code."""
    try:
        return THOUSANDS.sub(",", convert(latex.strip(), display="block" if display else "inline"))
    except CONVERSION_ERRORS:
        return f'<code class="formula">{html.escape(latex.strip())}</code>'
