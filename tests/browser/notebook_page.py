"""Control a notebook in JupyterLab as a user does: run all cells, find elements, and wait for results."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

PORT, WAIT_S = 8931, 120


def open_notebook(browser, lab: str, name: str) -> None:
    """Open the notebook in a new workspace and wait for its kernel."""
    browser.get(f"{lab}/doc/tree/notebooks/{name}.ipynb?reset")
    wait_for_notebook(browser)


def wait_for_notebook(browser) -> None:
    wait_until(lambda: browser.find_elements("css selector", ".jp-NotebookPanel .jp-Cell"), "the notebook is open")
    wait_until(
        lambda: any(kernel["connections"] for kernel in query_server("/kernels") or []), "Lab is connected to the kernel"
    )
    time.sleep(2.0)  # until Lab notices


def wait_until_idle(seconds: float = WAIT_S) -> None:
    """Wait until all kernels are idle, so that the results of the last request are shown."""
    wait_until(
        lambda: all(
            kernel["execution_state"] == "idle" for kernel in query_server("/kernels") or [{"execution_state": ""}]
        ),
        "the kernel is idle",
        seconds,
    )


def wait_until_stable(get_value: Callable[[], object]) -> None:
    """Wait until the kernel has handled all requests: `get_value` returns the same for 3 s."""
    last, since = None, time.monotonic()
    while time.monotonic() - since < 3.0:
        wait_until_idle()
        if (now := get_value()) != last:
            last, since = now, time.monotonic()
        time.sleep(0.3)


def read_property(browser, selector: str, name: str) -> list[str]:
    """Return a property of all elements, read at once, because an element may be replaced meanwhile."""
    script = "return [...document.querySelectorAll(arguments[0])].map(element => element[arguments[1]])"
    return browser.execute_script(script, selector, name)


def read_explorer_text(browser) -> str:
    """Return the text that an explorer shows below its figures."""
    return "".join(read_property(browser, ".widget-html-content pre", "innerText"))


def list_image_sources(browser) -> list[str]:
    return read_property(browser, ".widget-image", "src")


def find_control(browser, label: str):
    """Return the list with this label."""
    path = f"//label[contains(@class,'widget-label') and normalize-space()='{label}']/..//select"
    return wait_until(lambda: next(iter(browser.find_elements("xpath", path)), None), f"there is a control {label}")


def list_options(browser, label: str) -> list[str]:
    return [option.text for option in find_control(browser, label).find_elements("css selector", "option")]


def list_selected(browser, label: str) -> list[str]:
    options = find_control(browser, label).find_elements("css selector", "option")
    return [option.text for option in options if option.is_selected()]


def select_options(browser, label: str, *texts: str) -> None:
    """Select exactly these options by clicking, and wait until the kernel has responded."""
    assert set(texts) <= set(list_options(browser, label))
    is_multiple = len(texts) > 1 or label == "runs"
    for option in find_control(browser, label).find_elements("css selector", "option"):
        if option.is_selected() != (option.text in texts) and (is_multiple or option.text in texts):
            option.click()
    assert set(list_selected(browser, label)) == set(texts)
    wait_until_stable(lambda: (read_explorer_text(browser), list_image_sources(browser)))


def run_all_cells(browser) -> None:
    browser.find_element("xpath", "//div[contains(@class,'lm-MenuBar-itemLabel') and text()='Run']").click()
    wait_until(lambda: find_visible(browser, ".lm-Menu [data-command='runmenu:run-all']"), "the menu Run is open").click()


def find_visible(browser, selector: str):
    """Return the first visible element, or None."""
    return next((element for element in browser.find_elements("css selector", selector) if element.is_displayed()), None)


def find_button(browser, label: str):
    """Return a widget's button by its label, or None while it is disabled."""
    path = f"//button[contains(@class,'jupyter-button') and normalize-space()='{label}']"
    buttons = browser.find_elements("xpath", path)
    return next((button for button in buttons if button.is_displayed() and button.is_enabled()), None)


def save_screenshot(browser, element, folder: str | None, name: str) -> None:
    """Save a screenshot for the documentation, starting at `element`, if a folder is given."""
    if folder:
        browser.execute_script("arguments[0].scrollIntoView({block: 'start'})", element)
        time.sleep(1.0)  # the page settles
        Path(folder).mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(str(Path(folder) / name))


def wait_until(get_value, description: str, seconds: float = WAIT_S):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = get_value()
        if value:
            return value
        time.sleep(0.3)
    raise AssertionError(f"not after {seconds} s: {description}")


def query_server(path: str):
    """Return the server's response, or None while it is not running."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/api{path}", timeout=2) as response:
            return json.load(response)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None
