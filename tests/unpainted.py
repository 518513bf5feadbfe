"""Reports of tests that do not look at pictures: figures are made and titled, and one pixel replaces the rendered PNG."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from nsa_lab import report
from nsa_lab.report import header, record_notebook

PIXEL = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x06\x00\x00\x00\x1f\x15\xc4\x89\x00\x00\x00\rIDATx"
    b"\x9cc\xf8\xcf\xc0\xf0\x1f\x00\x05\x00\x01\xff\x89\x99=\x1d\x00\x00\x00\x00IEND\xaeB`\x82"
)


@contextlib.contextmanager
def unpainted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (report, header, record_notebook):
            patch.setattr(module, "render_png", lambda figure: PIXEL)
        yield
