"""What nbval leaves unasked of an executed notebook, as a plugin of it: `pytest -p nbval_outputs --nbval-lax ...`.

Every picture says in words what it shows; no widget is made where nobody could move one; and a notebook that is read,
rather than trained with, shows and says at least this. Kernels are forked, as those of the tests are.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
from forker import Forker
from nbval.plugin import IPyNbCell

PICTURES = {
    "01_branch_derivations": 9,
    "02_kernel_parity": 3,
    "06_does_selection_find": 4,
    "07_decoding": 3,
    "08_long_texts": 3,
}
WORDS = {
    "06_does_selection_find": (
        "of the far questions right after",
        "chosen   random  nearest   oracle    twice      all   no_cmp   no_sel   no_win",
        "NSA, recipe, tiny recall, layer 1: asked for",
    ),
    "07_decoding": ("1,500 tokens in 101 chunks: logits differ by", "4,096 tokens before, dense", "of 6 right"),
    "08_long_texts": ("2 texts of 2,048 bytes", "chosen blocks     │", "no selected branch│"),
}

shown: dict[str, list[Any]] = {}
last: dict[str, pytest.Item] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop() -> Generator[None, Any, Any]:
    forker = Forker()
    with forker.forking():
        done = yield
    forker.close()
    return done


def pytest_collection_finish(session: pytest.Session) -> None:
    last.update({item.path.stem: item for item in session.items})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    yield
    if isinstance(item, IPyNbCell):
        notebook = item.path.stem
        shown.setdefault(notebook, []).extend(item.test_outputs or [])
        assert "widget-view" not in str(item.test_outputs)
        assert all(output.metadata["image/png"]["alt"] for output in pictures(item.test_outputs or []))
        if last[notebook] is item:
            assert len(pictures(shown[notebook])) >= PICTURES.get(notebook, 0)
            said = "".join(output.get("text") or output.get("data", {}).get("text/plain", "") for output in shown[notebook])
            assert not [words for words in WORDS.get(notebook, ()) if words not in said]


def pictures(outputs: list[Any]) -> list[Any]:
    return [output for output in outputs if "image/png" in output.get("data", {})]
