"""Link the terms of a page to their definitions in docs/glossary.md, which the page then contains.

Outside a checkout there is no glossary, and terms are not linked.
"""

from __future__ import annotations

import html
import re
from functools import lru_cache

from nsa_lab.runs import resolve

ROW = re.compile(r"^\| (?P<terms>[^|]+) \| (?P<meaning>[^|]+) \|$", re.MULTILINE)
TAG = re.compile(r"(<[^>]+>)")
# Elements whose text is not linked: titles, links, and text that is not prose.
SKIPPED = {"h1", "h2", "h3", "th", "a", "pre", "code", "style", "title", "summary", "nav", "math"}


@lru_cache(maxsize=1)
def read_glossary() -> dict[str, str]:
    """Return the meaning of each term, in Markdown, by its lower-case name. Synonyms have separate entries."""
    page = resolve.get_root() / "docs" / "glossary.md"
    if not page.is_file():
        return {}
    rows = list(ROW.finditer(page.read_text(encoding="utf-8")))
    return {
        term.strip(): row["meaning"].strip()
        for row in rows
        if row["terms"].strip() not in ("term", "---")
        for term in row["terms"].split(",")
    }


def link_terms(page: str, glossary: dict[str, str]) -> tuple[str, list[str]]:
    """Return the HTML with the first occurrence of each term as a link to `#term-...`, and the linked terms."""
    if not glossary:
        return page, []
    names = "|".join(re.escape(term) for term in sorted(glossary, key=len, reverse=True))
    pattern, linked = re.compile(rf"(?<![\w-])({names})(s?)(?![\w-])", re.IGNORECASE), list[str]()

    def link(match: re.Match[str]) -> str:
        term = match[1].lower()
        if term in linked or term not in glossary:
            return match[0]
        linked.append(term)
        return f'<a class="term" href="#term-{_make_anchor(term)}">{match[0]}</a>'

    parts, depth = TAG.split(page), 0
    for number, part in enumerate(parts):
        if part.startswith("<"):
            name = part.strip("</>").split()[0].lower() if part.strip("</>") else ""
            if name in SKIPPED:
                depth += -1 if part.startswith("</") else 1
        elif depth == 0:
            parts[number] = pattern.sub(link, part)
    return "".join(parts), linked


def render_glossary(terms: list[str], glossary: dict[str, str]) -> str:
    """Return the definitions of these terms as folded HTML; empty if there are none. A link into it opens it."""
    if not terms:
        return ""
    rows = "".join(
        f'<dt id="term-{_make_anchor(term)}">{html.escape(term)}</dt><dd>{_render_code(glossary[term])}</dd>'
        for term in sorted(terms)
    )
    return f'<details class="glossary"><summary>Glossary</summary><dl>{rows}</dl></details>'


def _make_anchor(term: str) -> str:
    return re.sub(r"\W+", "-", term)


def _render_code(markdown: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(markdown))
