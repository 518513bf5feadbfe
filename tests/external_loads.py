"""Find everything that an HTML page would load or run when it is opened."""

from __future__ import annotations

import re
from html.parser import HTMLParser

ACTIVE_TAGS = {"script", "iframe", "frame", "object", "embed", "applet", "audio", "video", "source", "track", "base"}
ACTIVE_TAGS |= {"link", "form", "animate", "set"}
SCRIPT_SCHEMES = ("javascript:", "vbscript:", "data:")
FETCHING_ATTRIBUTES = {"src", "srcset", "poster", "background", "data", "action", "formaction", "ping", "lowsrc", "dynsrc"}
STYLE_LOAD = re.compile(r"@import[^;]*;?|(?:url|image|image-set|src)\(\s*[\"']?\s*(?!data:|#)[^)]*\)|\\[0-9a-f]", re.I)


def find_external_loads(page: str) -> list[str]:
    """List what opening the page would load or run, as written in the page. Empty for a self-contained page.

    This is for well-formed pages. A browser parses deliberately broken markup differently.
    """
    parser = _ExternalLoads()
    parser.feed(page)
    parser.close()
    return parser.loads


class _ExternalLoads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._in_style = tag == "style"
        start_tag = (self.get_starttag_text() or tag)[:80]
        attributes = [(name, "".join((value or "").split()).lower()) for name, value in attrs]
        if tag in ACTIVE_TAGS or (tag == "meta" and ("http-equiv", "refresh") in attributes):
            self.loads.append(start_tag)
            return
        for name, value in attributes:
            is_loaded = name in FETCHING_ATTRIBUTES and not value.startswith("data:")
            is_script = name.startswith("on") or (
                name.endswith("href") and value.startswith(("javascript:", "vbscript:", "data:"))
            )
            is_style_load = name == "style" and STYLE_LOAD.search(value)
            if is_loaded or is_script or is_style_load:
                self.loads.append(f"{name} of {start_tag}")

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.loads += STYLE_LOAD.findall(data)

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False
