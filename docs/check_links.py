"""Check every link of a built site that leads to a file of the site: the file exists and, on a page, its anchor.

    python docs/check_links.py build/site

Also check that no page loads a script, style, picture or font from elsewhere. Exit with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADING_TAGS = ("img", "script", "link", "iframe", "source")


class Page(HTMLParser):
    """Anchors and links of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors = {"", "top"}
        self.links: list[str] = []  # to click
        self.loaded: list[str] = []  # fetched with the page
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value for name, value in attrs if value}
        self.anchors |= {attributes.get("id", ""), attributes.get("name", "")}
        addresses = [attributes[name] for name in ("href", "src") if name in attributes]
        if tag == "a":
            self.links += addresses
        elif tag in LOADING_TAGS and attributes.get("rel") != "canonical":
            self.loaded += addresses


@cache
def read_page(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def find_problem(path: Path, link: str, *, is_loaded: bool) -> str | None:
    """Return why a link of the page at `path` is wrong; None if it is right, or leads to another site."""
    parts = urlsplit(link)
    if parts.scheme in ("data", "mailto", "javascript"):
        return None
    if parts.scheme or parts.netloc:
        return "is loaded from another site" if is_loaded else None
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file():
        return "no such file"
    if parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in read_page(target).anchors:
        return "no such anchor"
    return None


def list_links(root: Path) -> Iterator[tuple[Path, str, bool]]:
    """Yield the page, the address and whether it is loaded with the page, of all links."""
    for path in sorted(root.rglob("*.html")):
        if "_static" not in path.relative_to(root).parts:
            page = read_page(path)
            yield from ((path, link, False) for link in page.links)
            yield from ((path, link, True) for link in page.loaded)


def main(root: Path) -> int:
    n_links, problems = 0, []
    for path, link, is_loaded in list_links(root):
        n_links += 1
        if problem := find_problem(path, link, is_loaded=is_loaded):
            problems.append(f"{path.relative_to(root)}: {link}: {problem}")
    print("\n".join([*problems, f"{n_links:,} links checked, {len(problems)} broken"]))
    return 1 if problems else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, help="folder of the built site")
    sys.exit(main(parser.parse_args().root.resolve()))
