"""Takes out of a page everything that would run or be fetched when it is opened. Links to click stay."""

from __future__ import annotations

import html
import re

ELEMENTS = re.compile(r"<(script|iframe|object|embed|audio|video)\b.*?(?:</\1\s*>|/>|\Z)", re.DOTALL | re.IGNORECASE)
SINGLE = re.compile(r"<(?:link|base|meta)\b[^>]*>", re.IGNORECASE)
TAG = re.compile(r"<[a-z][^<>]*>", re.IGNORECASE)
HANDLER = re.compile(r"\son\w+\s*=\s*(\"[^\"]*\"|'[^']*'|[^\s>]+)", re.IGNORECASE)
FETCHED = re.compile(r"\b(?:src|srcset|poster|background)\s*=\s*[\"']?\s*(?!data:)(?P<url>[^\"'\s>]+)", re.IGNORECASE)
STYLE_ELEMENT = re.compile(r"<style\b[^>]*>.*?</style\s*>", re.DOTALL | re.IGNORECASE)
STYLE_LOAD = re.compile(r"@import[^;]*;?|url\(\s*[\"']?\s*(?!data:|#)[^)]*\)", re.IGNORECASE)


def inert(page: str) -> str:
    """The page without scripts, frames, handlers, and anything that is not embedded; a missing picture says its address."""
    page = SINGLE.sub("", ELEMENTS.sub("", page))
    page = STYLE_ELEMENT.sub(lambda found: STYLE_LOAD.sub("", found[0]), page)
    return TAG.sub(_inert_tag, page)


def external_loads(page: str) -> list[str]:
    """What opening the page would fetch or run, as it stands in the page; empty for a self-contained one."""
    loads = [found[0][:80] for found in ELEMENTS.finditer(page)]
    loads += [found[0] for found in SINGLE.finditer(page) if re.search(r"(href|url)\s*=", found[0], re.IGNORECASE)]
    for found in STYLE_ELEMENT.finditer(page):
        loads += STYLE_LOAD.findall(found[0])
    for found in TAG.finditer(page):
        loads += [load[0] for load in FETCHED.finditer(found[0])]
    return loads


def _inert_tag(found: re.Match[str]) -> str:
    tag = STYLE_LOAD.sub("", HANDLER.sub("", found[0]))
    fetched = FETCHED.search(tag)
    if fetched is None:
        return tag
    if tag[:4].lower() == "<img":
        return f'<span class="missing">[picture not embedded: {html.escape(fetched["url"])}]</span>'
    return FETCHED.sub("", tag)
