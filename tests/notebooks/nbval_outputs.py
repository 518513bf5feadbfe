"""A pytest plugin that checks executed notebooks beyond nbval: `pytest -p nbval_outputs --nbval-lax ...`.

Every picture has alt text, a headless run creates no widget, and each notebook has at least the pictures and texts listed
here. Kernels are forked, as in the other tests.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from forker import Forker
from nbval.plugin import IPyNbCell

PICTURES = {
    "01_branches": 8,
    "02_in_practice": 5,
    "03_kernel_parity": 3,
    "07_does_selection_find": 4,
    "08_decoding": 3,
    "09_long_texts": 3,
}
TEXTS = {
    "07_does_selection_find": (
        "of the far questions correct after",
        "chosen   random  nearest   oracle    twice      all   no_cmp   no_sel   no_win",
        "NSA, recipe, tiny recall, layer 1: the question is",
    ),
    "08_decoding": ("1,500 tokens in 101 chunks: ", "4,096 tokens of context, dense", "of 6 correct"),
    "09_long_texts": ("2 texts of 2,048 bytes", "chosen blocks     │", "no selected branch│"),
    "10_convert": ("converted loss", "16 blocks of 64 tokens, 8 selected: the logits are different", "generated 8"),
}

outputs_by_notebook: dict[str, list[Any]] = {}
last_items: dict[str, pytest.Item] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Generator[None, Any, Any]:
    forker = Forker()
    with forker.forking():
        done = yield
    forker.close()
    return done


def pytest_collection_finish(session: pytest.Session) -> None:
    last_items.update({item.path.stem: item for item in session.items})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    yield
    if isinstance(item, IPyNbCell):
        notebook = item.path.stem
        outputs_by_notebook.setdefault(notebook, []).extend(item.test_outputs or [])
        assert "widget-view" not in str(item.test_outputs)
        assert all(output.metadata["image/png"]["alt"] for output in pictures(item.test_outputs or []))
        if last_items[notebook] is item:
            assert len(pictures(outputs_by_notebook[notebook])) >= PICTURES.get(notebook, 0)
            printed = "".join(
                output.get("text") or output.get("data", {}).get("text/plain", "")
                for output in outputs_by_notebook[notebook]
            )
            assert not [text for text in TEXTS.get(notebook, ()) if text not in printed]


def pictures(outputs: list[Any]) -> list[Any]:
    return [output for output in outputs if "image/png" in output.get("data", {})]
