"""Remove everything from a page that would run, or load data, when the page is opened. Links to click remain.

A notebook may contain any markup, since a report may be of a run that somebody else sent. nh3 (the Python binding of
ammonia) parses the page and keeps only the elements, attributes and styles listed here. As a second protection, `POLICY`
makes the browser block the rest.
"""

from __future__ import annotations

import html
import re
from urllib.parse import quote, unquote

import nh3

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Content-Security-Policy of the page: only inline styles and embedded pictures. No script, no request, no form."""


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The elements and attributes that latex2mathml writes.
MATHML = _word_set(
    "math mfrac mi mn mo mover mpadded mphantom mroot mrow mspace msqrt mstyle msub msubsup msup mtable mtd mtext mtr "
    "munder munderover menclose merror mmultiscripts mprescripts none"
)
MATHML_ATTRIBUTES = _word_set(
    "xmlns display mathvariant fence separator stretchy symmetric largeop movablelimits accent form minsize maxsize "
    "lspace rspace width height depth linethickness columnalign columnspacing columnlines rowspacing rowlines "
    "columnspan rowspan displaystyle scriptlevel mathcolor mathbackground notation accentunder"
)
TAGS = nh3.ALLOWED_TAGS - {"area", "map"} | {"section", "tfoot"} | MATHML
ATTRIBUTES = {
    **{tag: set(names) for tag, names in nh3.ALLOWED_ATTRIBUTES.items() if tag in TAGS},
    **{tag: set(MATHML_ATTRIBUTES) for tag in MATHML},
    "*": {"class", "dir", "id", "lang", "role", "style", "tabindex", "title"},
    "details": {"open"},
    "li": {"value"},
    "th": nh3.ALLOWED_ATTRIBUTES["th"] | {"valign"},
    "td": nh3.ALLOWED_ATTRIBUTES["td"] | {"valign"},
}
# None of these properties loads data, and none can place an element over the rest of the page.
STYLE_PROPERTIES = _word_set(
    "border border-bottom border-collapse border-color border-left border-right border-spacing border-style "
    "border-top border-width color background-color display float font-family font-size font-style font-variant "
    "font-weight height letter-spacing line-height margin margin-bottom margin-left margin-right margin-top "
    "max-height max-width min-height min-width opacity overflow overflow-wrap overflow-x overflow-y padding "
    "padding-bottom padding-left padding-right padding-top tab-size text-align text-decoration text-indent "
    "text-transform vertical-align visibility white-space width word-break word-wrap"
)
# An address on the web, an anchor in the page, or a file next to it.
LINK = re.compile(r"https?://|mailto:|#|[\w./%~-]+([?#]|$)", re.IGNORECASE)
EMBEDDED_PICTURE = "data:image/"
# Marks the address of a picture that is not embedded, until a note replaces the whole element.
MISSING_SOURCE = "data:missing,"
# An element as nh3 writes it: every value is quoted and contains no quote.
MISSING_PICTURE = re.compile(rf'<img(?: [\w:-]+="[^"]*")*? src="{MISSING_SOURCE}([^"]*)"(?: [\w:-]+="[^"]*")*>')
_CLEANER = nh3.Cleaner(
    tags=set(TAGS),
    clean_content_tags={"script", "style", "iframe", "object", "noscript", "template", "svg"},
    attributes=ATTRIBUTES,
    attribute_filter=lambda tag, name, value: _filter_attribute(tag, name, value),
    generic_attribute_prefixes={"aria-"},
    filter_style_properties=set(STYLE_PROPERTIES),
    url_schemes={"data", "http", "https", "mailto"},
    link_rel=None,
)


def sanitize_html(fragment: str) -> str:
    """Return the fragment without scripts, frames, forms, handlers and external data.

    An external picture is replaced by a note with its address.
    """
    return MISSING_PICTURE.sub(
        lambda match: f'<span class="missing">[picture not embedded: {html.escape(unquote(match[1]))}]</span>',
        _CLEANER.clean(fragment),
    )


def _filter_attribute(tag: str, name: str, value: str) -> str | None:
    """Return the new value of the attribute, or None to remove it."""
    if name == "src":
        return value if value.strip().lower().startswith(EMBEDDED_PICTURE) else MISSING_SOURCE + quote(value)
    if name == "href":
        return value if LINK.match(value) else None
    return value
