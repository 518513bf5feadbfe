"""Render formulas as MathML, which browsers draw without a script or downloaded fonts."""

from __future__ import annotations

import re
from typing import Any

import latex2mathml.converter
from docutils import nodes
from sphinx.application import Sphinx

# A prime is raised already. As a superscript it is tiny and too high in fonts without variants of it.
PRIME = re.compile(r"<msup>(<mi>[^<]*</mi>)<mi>&#x02032;</mi></msup>")


def visit_math(translator: Any, node: nodes.Node) -> None:
    is_block = isinstance(node, nodes.math_block)
    formula = latex2mathml.converter.convert(node.astext().strip(), display="block" if is_block else "inline")
    formula = PRIME.sub(r'<mrow>\1<mo lspace="0" rspace="0">&#x02032;</mo></mrow>', formula)
    translator.body.append(f'<div class="math">{formula}</div>' if is_block else formula)
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
