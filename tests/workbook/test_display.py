"""Folded text is complete: escaped on a page, and readable in a terminal."""

from __future__ import annotations

import pytest

from nsa_lab.report.sanitize import sanitize_html
from nsa_lab.workbook import display


def test_folded_text_is_closed_and_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    monkeypatch.setattr(display, "display", lambda data, raw: shown.append(data))
    display.show_folded("a < b", "T <= 3   yes\nT > 3    no")
    data = shown[0]
    assert data["text/plain"] == "a < b\nT <= 3   yes\nT > 3    no"
    assert "T &lt;= 3   yes\nT &gt; 3    no" in data["text/html"] and "<summary>a &lt; b</summary>" in data["text/html"]
    # Closed at first, and on a report's page as well, with lines that scroll and do not break.
    page = sanitize_html(data["text/html"])
    display.show_folded("a < b", "", is_open=True)
    assert "<details open" in sanitize_html(shown[1]["text/html"])
    assert page.startswith("<details><summary>") and "white-space:pre" in page.replace(" ", "") and "overflow-x" in page
