"""A notebook from somebody else may contain any markup. Nothing in it runs or loads anything on its page."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from external_loads import find_external_loads
from looping import looped
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from nsa_lab.report import export_notebook, write_index
from nsa_lab.report.sanitize import POLICY, sanitize_html

HOSTILE = {
    "a script": "<script>go()</script>",
    "a script in a script": "<scr<script></script>ipt>go()</scr<script></script>ipt>",
    "a script without an end": "<script>go()",
    "a script spelt oddly": "<ScRiPt/x>go()</sCrIpT >",
    "an svg with a handler after a slash": "<svg/onload=go()>",
    "a script in an svg": "<svg><script>go()</script></svg>",
    "an animated address": '<svg><a><animate attributeName=href values=javascript:go() /><text y="9">x</text></a></svg>',
    "a handler after a slash": "<img/src=x/onerror=go()>",
    "a handler after a line": "<img src=x\nonerror\n=\ngo()>",
    "a handler behind a quoted bracket": '<b title="x>y" onclick=go()>b</b>',
    "a handler that fires by itself": "<details open ontoggle=go()>x</details>",
    "a handler in a tag without an end": '<img src="data:image/png;base64,AA" onerror=go() ',
    "a javascript link": '<a href="javascript:go()">x</a>',
    "a javascript link with holes": '<a href="jav&#x09;ascript&colon;go()">x</a>',
    "a document in a link": '<a href="data:text/html,<script>go()</script>">x</a>',
    "a frame": '<iframe srcdoc="&lt;script&gt;go()&lt;/script&gt;"></iframe>',
    "an object": '<object data="https://far.example/x"></object><embed src="https://far.example/x">',
    "a form": '<form action="https://far.example"><input name=q><button formaction="javascript:go()">x</button></form>',
    "a base": '<base href="https://far.example/">',
    "a refresh": '<meta http-equiv="refresh" content="0;url=https://far.example">',
    "a sheet from afar": '<link rel=stylesheet href="https://far.example/x.css">',
    "an import": '<style>@import "https://far.example/x.css";</style>',
    "an escaped address in a style": r'<p style="background:u\72l(https://far.example/x)">x</p>',
    "a background": '<table background="https://far.example/x"><tr><td>x</td></tr></table>',
    "a set of pictures": '<img alt=x srcset="https://far.example/x 2x">',
    "a film": '<video poster="https://far.example/x"><source src="https://far.example/y"></video>',
    "an svg that changes its kind": '<svg></p><style><a id="</style><img src=1 onerror=go()>">',
    "a formula that changes its kind": (
        '<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror=go()&gt;">'
    ),
    "a comment that ends early": "<!--><img src=x onerror=go()>-->",
    "a noscript that ends in a title": '<noscript><p title="</noscript><img src=x onerror=go()>">',
}
ELEMENTS = (
    {"html", "head", "meta", "title", "style", "body", "header", "main", "nav", "section", "details", "summary", "div", "p"}
    | {"h1", "h2", "h3", "span", "a", "img", "pre", "code", "b", "i", "em", "strong", "ol", "ul", "li", "table", "thead"}
    | {"tbody", "tr", "td", "th", "dl", "dt", "dd", "math", "mtext", "mrow", "mi", "mo", "mn", "msup", "mstyle"}
)


class Elements(HTMLParser):
    """Elements of a page that run or load something, by an independent list."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ELEMENTS:
            self.wrong.append(tag)
        for name, value in attrs:
            text = (value or "").strip()
            allowed = {
                "src": text.startswith("data:image/"),
                "href": bool(re.match(r"https?://|#|mailto:|[\w.]+\.html$", text)),
                "style": not re.search(r"[\\(@]", text),
                "http-equiv": text == "Content-Security-Policy",
            }
            names = {
                "id",
                "class",
                "alt",
                "title",
                "open",
                "charset",
                "content",
                "name",
                "lang",
                "xmlns",
                "display",
                "role",
            }
            if not allowed.get(name, name in names or name.startswith("aria-")):
                self.wrong.append(f"{tag} {name}={text}")


@looped
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_markup_is_removed_and_its_surroundings_remain(kind: str) -> None:
    sanitized = sanitize_html(f"<p>before</p>{HOSTILE[kind]}<p>after</p>")
    assert (
        Elements(sanitized).wrong == [] and find_external_loads(sanitized) == [] and sanitized.startswith("<p>before</p>")
    )
    assert sanitize_html(sanitized) == sanitized, "sanitizing again changes nothing"


# Broken deliberately: only the parser of a browser finds the hostile part.
BROKEN = ("script in a script", "changes its kind", "in a title", "tag without an end", "comment that ends early")


@looped
@pytest.mark.parametrize("kind", [kind for kind in HOSTILE if not any(word in kind for word in BROKEN)])
def test_external_loads_are_found(kind: str) -> None:
    assert find_external_loads(f"<p>before</p>{HOSTILE[kind]}")


def test_no_cell_type_brings_hostile_markup_to_the_page(tmp_path: Path) -> None:
    """The markup is in an HTML output, in text, in a heading (and so in the contents), in a formula and in an SVG."""
    cells = []
    for number, hostile in enumerate(HOSTILE.values()):
        shown = [
            new_output("display_data", data={"text/html": f"{hostile}</div></main></body></html>{hostile}"}),
            new_output("display_data", data={"text/markdown": hostile}),
            new_output("display_data", data={"image/svg+xml": f"<svg>{hostile}</svg>"}),
            new_output("display_data", data={"application/javascript": "go()"}),
            new_output("stream", name="stdout", text=hostile),
        ]
        titled = f'<h2 id="t{number}"><b title="x>{hostile}">t</b></h2>\n\n## {hostile}\n\n$\\text{{{hostile}}}$'
        cells += [new_markdown_cell(f"{titled}\n\n{hostile}\n\nkept {number}"), new_code_cell(hostile, outputs=shown)]
    nbformat.write(new_notebook(cells=cells), tmp_path / "sent.ipynb")
    page = export_notebook(tmp_path / "sent.ipynb").read_text(encoding="utf-8")
    assert Elements(page).wrong == [] and find_external_loads(page) == []
    assert page.count("</main>") == 1 and page.endswith("</main>\n</body>\n</html>\n")


def test_allowed_markup_remains(tmp_path: Path) -> None:
    markup = (
        '<h2 id="results">Results</h2><table class="dataframe"><thead><tr><th colspan="2" style="text-align:right">loss'
        '</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table><pre style="color:red">x &lt; y</pre>'
        '<a href="#results">up</a><a href="https://example.org">far</a><details open=""><summary>more</summary>x</details>'
        '<img alt="a curve" src="data:image/png;base64,AA==">'
    )
    assert sanitize_html(markup) == markup
    drawing = '<svg xmlns="http://www.w3.org/2000/svg"><circle r="4"/></svg>'
    shown = new_output("display_data", data={"image/svg+xml": drawing, "text/plain": "<Figure>"})
    nbformat.write(new_notebook(cells=[new_code_cell("draw()", outputs=[shown])]), tmp_path / "drawn.ipynb")
    page = export_notebook(tmp_path / "drawn.ipynb").read_text(encoding="utf-8")
    assert f"data:image/svg+xml;base64,{base64.b64encode(drawing.encode()).decode()}" in page


def test_external_picture_is_replaced_by_its_address() -> None:
    far = 'https://far.example/x?a=1&b="<script>go()</script>'
    sanitized = sanitize_html(f"<img alt='a > b' src='{far}' width=3>")
    assert Elements(sanitized).wrong == []
    assert sanitized == (
        '<span class="missing">[picture not embedded: '
        "https://far.example/x?a=1&amp;b=&quot;&lt;script&gt;go()&lt;/script&gt;]</span>"
    )


def test_pages_have_a_content_security_policy(tmp_path: Path) -> None:
    """The policy precedes everything that it applies to."""
    nbformat.write(new_notebook(cells=[new_markdown_cell("# x")]), tmp_path / "x.ipynb")
    for page in (export_notebook(tmp_path / "x.ipynb"), write_index(tmp_path)):
        text = page.read_text(encoding="utf-8")
        (policy,) = re.findall(r'<meta [^>]*http-equiv="Content-Security-Policy"[^>]*>', text)
        assert re.search(r'content="([^"]*)"', policy)[1].replace("&#39;", "'") == POLICY
        assert text.index(policy) < text.index("<style") and "script" not in POLICY and "default-src 'none'" in POLICY
