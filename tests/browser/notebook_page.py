"""A notebook in JupyterLab as a person handles it: run all cells, find what is shown, wait for what must come."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

PORT, WAIT_S = 8931, 120


def open_notebook(browser, lab: str, name: str) -> None:
    """Open it in a workspace of its own, nothing left of an earlier visit, and wait for its kernel."""
    browser.get(f"{lab}/doc/tree/notebooks/{name}.ipynb?reset")
    wait_for_notebook(browser)


def wait_for_notebook(browser) -> None:
    wait_until(lambda: browser.find_elements("css selector", ".jp-NotebookPanel .jp-Cell"), "the notebook is open")
    wait_until(
        lambda: any(kernel["connections"] for kernel in query_server("/kernels") or []), "Lab is connected to the kernel"
    )
    time.sleep(2.0)  # Lab hears of it


def wait_until_idle(seconds: float = WAIT_S) -> None:
    """Until no kernel works: what is shown then is what the last request made."""
    wait_until(
        lambda: all(
            kernel["execution_state"] == "idle" for kernel in query_server("/kernels") or [{"execution_state": ""}]
        ),
        "the kernel is idle",
        seconds,
    )


def wait_until_stable(what: Callable[[], object]) -> None:
    """Until the kernel has answered all that was asked of it: `what` it shows does not change any more."""
    last, since = None, time.monotonic()
    while time.monotonic() - since < 3.0:
        wait_until_idle()
        if (now := what()) != last:
            last, since = now, time.monotonic()
        time.sleep(0.3)


def read_property(browser, selector: str, name: str) -> list[str]:
    """A property of all elements, read in one go: one that is replaced meanwhile would be gone when its turn came."""
    script = "return [...document.querySelectorAll(arguments[0])].map(element => element[arguments[1]])"
    return browser.execute_script(script, selector, name)


def read_explorer_text(browser) -> str:
    """The text that an explorer shows beside its pictures."""
    return "".join(read_property(browser, ".widget-html-content pre", "innerText"))


def list_image_sources(browser) -> list[str]:
    return read_property(browser, ".widget-image", "src")


def find_control(browser, label: str):
    """The list that is labelled so."""
    path = f"//label[contains(@class,'widget-label') and normalize-space()='{label}']/..//select"
    return wait_until(lambda: next(iter(browser.find_elements("xpath", path)), None), f"there is a choice of {label}")


def list_options(browser, label: str) -> list[str]:
    return [option.text for option in find_control(browser, label).find_elements("css selector", "option")]


def list_selected(browser, label: str) -> list[str]:
    every = find_control(browser, label).find_elements("css selector", "option")
    return [option.text for option in every if option.is_selected()]


def select_options(browser, label: str, *wanted: str) -> None:
    """Choose these and no others, by pressing on them, and wait until the kernel has answered."""
    assert set(wanted) <= set(list_options(browser, label))
    several = len(wanted) > 1 or label == "runs"
    for option in find_control(browser, label).find_elements("css selector", "option"):
        if option.is_selected() != (option.text in wanted) and (several or option.text in wanted):
            option.click()
    assert set(list_selected(browser, label)) == set(wanted)
    wait_until_stable(lambda: (read_explorer_text(browser), list_image_sources(browser)))


def run_all_cells(browser) -> None:
    browser.find_element("xpath", "//div[contains(@class,'lm-MenuBar-itemLabel') and text()='Run']").click()
    wait_until(lambda: find_visible(browser, ".lm-Menu [data-command='runmenu:run-all']"), "the menu Run is open").click()


def find_visible(browser, selector: str):
    """The first visible element, or None."""
    return next((found for found in browser.find_elements("css selector", selector) if found.is_displayed()), None)


def find_button(browser, named: str):
    """A widget's button by its label, or None while it cannot be pressed."""
    path = f"//button[contains(@class,'jupyter-button') and normalize-space()='{named}']"
    found = browser.find_elements("xpath", path)
    return next((each for each in found if each.is_displayed() and each.is_enabled()), None)


def save_screenshot(browser, element, folder: str | None, name: str) -> None:
    """A screenshot for the documentation, from `element` down, where a folder for it was named."""
    if folder:
        browser.execute_script("arguments[0].scrollIntoView({block: 'start'})", element)
        time.sleep(1.0)  # the page settles
        Path(folder).mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(str(Path(folder) / name))


def wait_until(what, saying: str, seconds: float = WAIT_S):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.3)
    raise AssertionError(f"not after {seconds} s: {saying}")


def query_server(what: str):
    """The server's own word, or None while it is not up."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/api{what}", timeout=2) as response:
            return json.load(response)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None
