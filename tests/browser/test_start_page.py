"""`make lab` opens the start notebook with this environment's kernel."""

import pytest
from notebook_page import find_visible, run_all_cells, wait_for_notebook, wait_until

pytestmark = pytest.mark.browser


def test_lab_opens_the_start_notebook_and_it_runs(browser, lab):
    browser.get(lab)
    wait_for_notebook(browser)
    wait_until(lambda: "Start here" in headings(browser), "the start notebook is open")
    assert "Python 3" in find_visible(browser, ".jp-Toolbar-kernelName").text
    run_all_cells(browser)
    wait_until(
        lambda: (
            "torch" in browser.find_element("css selector", ".jp-NotebookPanel").text
            and browser.find_elements("css selector", ".jp-OutputArea table")
        ),
        "this machine is described",
    )


def headings(browser) -> str:
    return " ".join(element.text for element in browser.find_elements("css selector", ".jp-NotebookPanel h1"))
