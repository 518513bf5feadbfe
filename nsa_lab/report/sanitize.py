"""Takes out of a page everything that would run or be fetched when it is opened. Links to click stay.

Markup of a notebook is anyone's: a report may be of a run that somebody else sent. What stays is a list of elements,
attributes and styles, taken from the parsed page (nh3, the binding of the ammonia library) and written anew; what is not
on the list goes. `POLICY` has the browser refuse the same things, should something pass all the same.
"""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from urllib.parse import quote, unquote

import nh3

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""The page's Content-Security-Policy: its own styles and the pictures in it. No script, no request, no form."""


def _word_set(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What latex2mathml writes.
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
# Of these none fetches, and none moves anything over the rest of the page.
STYLE_PROPERTIES = _word_set(
    "border border-bottom border-collapse border-color border-left border-right border-spacing border-style "
    "border-top border-width color background-color display float font-family font-size font-style font-variant "
    "font-weight height letter-spacing line-height margin margin-bottom margin-left margin-right margin-top "
    "max-height max-width min-height min-width opacity overflow overflow-wrap overflow-x overflow-y padding "
    "padding-bottom padding-left padding-right padding-top tab-size text-align text-decoration text-indent "
    "text-transform vertical-align visibility white-space width word-break word-wrap"
)
# A place on the web or in the page, or a file beside it.
LINK = re.compile(r"https?://|mailto:|#|[\w./%~-]+([?#]|$)", re.IGNORECASE)
EMBEDDED_PICTURE = "data:image/"
# Stands for the address of a picture that is not in the page, until a word can take the place of the whole element.
MISSING_SOURCE = "data:missing,"
# As nh3 writes an element: every value is quoted, and no quote is in it.
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

ACTIVE_TAGS = _word_set("script iframe frame object embed applet audio video source track base link form animate set")
SCRIPT_SCHEMES = ("javascript:", "vbscript:", "data:")
FETCHING_ATTRIBUTES = {"src", "srcset", "poster", "background", "data", "action", "formaction", "ping", "lowsrc", "dynsrc"}
STYLE_LOAD = re.compile(r"@import[^;]*;?|(?:url|image|image-set|src)\(\s*[\"']?\s*(?!data:|#)[^)]*\)|\\[0-9a-f]", re.I)


def sanitize_html(fragment: str) -> str:
    """The inside of a page without scripts, frames, forms, handlers, and anything that is not embedded; in the place of a
    picture that is elsewhere stands its address."""
    return MISSING_PICTURE.sub(
        lambda found: f'<span class="missing">[picture not embedded: {html.escape(unquote(found[1]))}]</span>',
        _CLEANER.clean(fragment),
    )


def _filter_attribute(tag: str, name: str, value: str) -> str | None:
    """What `value` becomes; None takes the attribute away."""
    if name == "src":
        return value if value.strip().lower().startswith(EMBEDDED_PICTURE) else MISSING_SOURCE + quote(value)
    if name == "href":
        return value if LINK.match(value) else None
    return value


def find_external_loads(page: str) -> list[str]:
    """What opening the page would fetch or run, as it stands in the page; empty for a self-contained one.

    A check of well-formed pages. It reads markup that is broken on purpose in another way than a browser; `inert` does not.
    """
    found = _ExternalLoads()
    found.feed(page)
    found.close()
    return found.loads


class _ExternalLoads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_style = tag == "style"
        written = (self.get_starttag_text() or tag)[:80]
        given = [(name, "".join((value or "").split()).lower()) for name, value in attrs]
        if tag in ACTIVE_TAGS or (tag == "meta" and ("http-equiv", "refresh") in given):
            self.loads.append(written)
            return
        for name, value in given:
            fetches = name in FETCHING_ATTRIBUTES and not value.startswith("data:")
            runs = name.startswith("on") or (
                name.endswith("href") and value.startswith(("javascript:", "vbscript:", "data:"))
            )
            styled = name == "style" and STYLE_LOAD.search(value)
            if fetches or runs or styled:
                self.loads.append(f"{name} of {written}")

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.loads += STYLE_LOAD.findall(data)

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False
