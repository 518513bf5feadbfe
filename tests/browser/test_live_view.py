"""Notebook 04 in JupyterLab: run it, watch the live view, stop the run, resume it, and see it finish."""

import json
import re

import pytest
from notebook_page import (
    find_button,
    find_visible,
    open_notebook,
    read_property,
    run_all_cells,
    save_screenshot,
    wait_for_notebook,
    wait_until,
    wait_until_idle,
)

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

STEPS = 800
PARAMETERS = {
    "name: str": "'ci'",
    "sample_tokens: int": "20",
    "train: dict": f"{{'steps': {STEPS}, 'eval_every': 200, 'save_every': 200, 'stats_every': 20}}",
}


@pytest.fixture
def runs(project, tmp_path):
    """Return the folder of notebook 04's run. Only the .py is edited: Lab opens the pair."""
    outputs, source = tmp_path / "runs", project / "notebooks" / "04_smoke_training.py"
    text = source.read_text()
    for name, value in {**PARAMETERS, "outputs: str": repr(str(outputs))}.items():
        text, edited = re.subn(rf"^{name} = .*?  #", f"{name} = {value}  #".replace("\\", r"\\"), text, flags=re.MULTILINE)
        assert edited == 1, name
    source.write_text(text)
    return outputs


def test_watch_stop_resume_finish(runs, browser, lab, screenshots):
    start(browser, lab)
    curves = wait_until(lambda: find_visible(browser, ".widget-image"), "the live view has its curves")
    first, step = curves.get_attribute("src"), step_shown(browser)
    wait_until(lambda: step_shown(browser) > step, "the steps are counted")
    wait_until(lambda: curves.get_attribute("src") != first, "the curves are drawn again")
    for text in ("learning rate", "tokens per second", "time left", "phase", "gates", "start"):
        assert text in read_panel_text(browser)
    save_screenshot(browser, find_button(browser, "Stop"), screenshots, "live_view.png")

    find_button(browser, "Stop").click()
    wait_until(lambda: status(runs) == "PREEMPTED", "the trainer saved and left")
    wait_until(lambda: "PREEMPTED" in read_panel_text(browser) and find_button(browser, "Resume"), "the view says so")
    assert find_button(browser, "Stop") is None and find_button(browser, "Leave it stopped")
    stopped = step_shown(browser)
    assert 0 < stopped < STEPS
    save_screenshot(browser, find_button(browser, "Resume"), screenshots, "live_view_stopped.png")

    find_button(browser, "Resume").click()
    wait_until(lambda: step_shown(browser) > stopped, "the run goes on")
    wait_until(lambda: status(runs) == "DONE", "the run finishes", 240)
    wait_until(lambda: "none missing, none duplicated" in page_text(browser), "the notebook goes on to its verdict")
    wait_until_idle()
    assert find_visible(browser, ".widget-image") is None  # replaced by a static image
    final = wait_until(lambda: followed_cell(browser).find_elements("css selector", ".jp-RenderedImage img"), "a picture")[
        0
    ]
    if screenshots:
        final.screenshot(f"{screenshots}/live_view_done.png")


def test_reloaded_page_shows_the_run_and_its_buttons_work(runs, project, browser, lab):
    """Without a manual save, a reloaded page shows what Lab saved automatically."""
    start(browser, lab)
    wait_until(lambda: find_visible(browser, ".widget-image"), "the live view has its curves")
    saved = project / "notebooks" / "04_smoke_training.ipynb"
    wait_until(lambda: "widget-view" in saved.read_text(), "Lab saved the notebook by itself", 30)
    browser.refresh()
    wait_for_notebook(browser)
    wait_until(lambda: find_visible(browser, ".widget-image"), "the live view is back")
    step = step_shown(browser)
    wait_until(lambda: step_shown(browser) > step, "and goes on")
    wait_until(lambda: find_button(browser, "Stop"), "it can be stopped").click()
    wait_until(lambda: status(runs) == "PREEMPTED", "the trainer saved and left")
    wait_until(lambda: find_button(browser, "Leave it stopped"), "the view says so").click()
    wait_until_idle()


def start(browser, lab) -> None:
    open_notebook(browser, lab, "04_smoke_training")
    run_all_cells(browser)
    wait_until(lambda: find_button(browser, "Stop"), "the run is followed")


def read_panel_text(browser) -> str:
    return "\n".join(element.text for element in browser.find_elements("css selector", ".widget-html-content"))


def step_shown(browser) -> int:
    match = re.search(rf"([\d,]+) of {STEPS:,}", read_panel_text(browser))
    return int(match[1].replace(",", "")) if match else 0


def followed_cell(browser):
    cells = browser.find_elements("css selector", ".jp-CodeCell")
    return next(cell for cell in cells if "training.follow" in cell.get_attribute("textContent"))


def page_text(browser) -> str:
    return "\n".join(read_property(browser, ".jp-OutputArea-output", "innerText"))


def status(runs) -> str:
    (run,) = runs.glob("ci-*")
    return json.loads((run / "status.json").read_text())["status"]
