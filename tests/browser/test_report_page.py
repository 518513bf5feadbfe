"""A report in a browser: it requests nothing and logs nothing, and its first screen shows the outcome of the run."""

import base64
import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from fake_run import write_run
from matplotlib.figure import Figure
from nbformat.v4 import new_code_cell, new_notebook, new_output
from notebook_page import save_screenshot

from nsa_lab.figures.style import render_png
from nsa_lab.report import export_notebook, write_comparison, write_index, write_report

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
HEIGHT = 900  # of the first screen, CSS pixels
FIVE_MB = 5_000_000
# The weights diverge in the first update, and the loss of the second step is NaN.
DIVERGING = ("-p", "train.lr=1e20", "-p", "train.warmup_steps=2")


def test_report_is_one_file_without_requests(browser, tmp_path):
    page = write_report(write_run(tmp_path))
    browser.get(write_index(tmp_path).as_uri())
    browser.find_element("css selector", "th a").click()
    assert browser.current_url == page.as_uri()
    link = browser.find_element("css selector", "main p.source a")
    code = browser.find_element("id", link.get_attribute("href").partition("#")[2])
    assert not code.is_displayed()
    browser.execute_script("arguments[0].click()", link)
    assert code.is_displayed()
    assert_quiet(browser)


OVERFLOW = """
return [...document.querySelectorAll("body *")].filter(element => {
  const inside = element.closest(".output_area, pre, table");
  return !inside && element.getBoundingClientRect().right > document.documentElement.clientWidth + 1;
}).map(element => element.outerHTML.slice(0, 80))"""
LEFTS = (
    "return [...document.querySelectorAll('div.panels')].map(f => [...f.querySelectorAll('img')].map(i => i.offsetLeft))"
)


def test_on_a_phone_nothing_overflows_and_panels_are_stacked(browser, tmp_path):
    page = write_report(write_run(tmp_path))
    browser.set_window_size(1400, HEIGHT)
    browser.get(page.as_uri())
    assert any(len(set(lefts)) > 1 for lefts in browser.execute_script(LEFTS)), (
        "panels are next to each other if there is room"
    )
    metrics = {"width": 390, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    assert browser.execute_script(OVERFLOW) == []
    assert all(len(set(lefts)) == 1 for lefts in browser.execute_script(LEFTS))
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    style = "return getComputedStyle(document.querySelector('.panels img')).filter"
    assert "invert" in browser.execute_script(style), "pictures are inverted on a dark page"
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_on_a_phone_a_wide_picture_scrolls(browser, tmp_path):
    notebook = tmp_path / "pictures.ipynb"
    pngs = [render_png(Figure(figsize=size)) for size in ((10, 5), (8, 4), (2, 1))]
    outputs = [new_output("display_data", data={"image/png": base64.b64encode(png).decode()}) for png in pngs]
    nbformat.write(new_notebook(cells=[new_code_cell("draw()", outputs=outputs)]), notebook)
    metrics = {"width": 390, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(export_notebook(notebook).as_uri())
    wide, chart, small = browser.find_elements("css selector", "main img")
    assert wide.size["width"] >= 700 and 340 <= chart.size["width"] <= 390 and small.size["width"] < 300
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390
    box = wide.find_element("xpath", "ancestor::div[contains(@class, 'output_area')]")
    browser.execute_script("arguments[0].scrollLeft = 9999", box)
    assert browser.execute_script("return arguments[0].scrollLeft", box) >= 300


def test_on_a_phone_the_run_list_and_a_comparison_fit(browser, tmp_path):
    (tmp_path / "runs").mkdir()
    names = ("production_50k-20260101T000000Z-abcd", "production_50k_dense-20260101T000000Z-abcd")
    runs = [write_run(tmp_path / name).rename(tmp_path / "runs" / name) for name in names]
    pages = write_index(tmp_path / "runs"), write_comparison(runs, tmp_path / "comparison.html")
    metrics = {"width": 390, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    for page in pages:
        browser.get(page.as_uri())
        (table, *_) = browser.find_elements("css selector", "table")
        assert browser.execute_script("return arguments[0].scrollWidth <= arguments[0].clientWidth", table), page.name
    browser.get(pages[0].as_uri())
    (_, loss, *_) = browser.find_elements("css selector", "tbody tr:first-child td")
    named = "return getComputedStyle(arguments[0], '::before').content"
    assert browser.execute_script(named, loss) == '"validation, bits per byte: "'
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.get(pages[0].as_uri())
    assert browser.execute_script(named, browser.find_element("css selector", "tbody td")) == "none"


@pytest.mark.slow
def test_report_of_a_run_through_its_notebook(browser, tmp_path):
    code, page = run_ci(tmp_path)
    assert code == 0 and page.stat().st_size < FIVE_MB
    open_first_screen(browser, page)
    seen = read_visible_text(browser)
    for words in (
        "trial run, no failures",
        "Did it work? ok",
        "step 20 of 20",
        "bits per byte on held-out text",
        "compressor xz on the same text",
    ):
        assert words in seen, words
    browser.find_element("link text", "all runs").click()
    assert browser.current_url == (page.parents[1] / "index.html").as_uri()
    browser.find_element("css selector", "th a").click()
    assert browser.current_url == page.as_uri()
    assert_quiet(browser)


@pytest.mark.slow
def test_first_screen_of_a_failed_run_has_advice(browser, tmp_path, screenshots):
    code, page = run_ci(tmp_path, *DIVERGING)
    assert code == 3
    open_first_screen(browser, page)
    seen = read_visible_text(browser)
    for words in (
        "NOT healthy",
        "step 2: the loss is nan",
        "The weights are those of step 1, the last good step.",
        f"nsa-lab resume {page.parent.name}",
        "Likely cause: the learning rate.",
        "nsa-lab run ci -p train.lr=0.001",
        "The notebook itself has no error",
    ):
        assert words in seen, words
    save_screenshot(browser, browser.find_element("css selector", "h1"), screenshots, "report_of_a_failed_run.png")
    browser.find_element("link text", "Go to the cell that failed").click()
    assert "training.print_verdict()" in read_visible_text(browser)
    assert "the run is HALTED" in browser.find_element("css selector", "body").text
    assert_quiet(browser)


def run_ci(folder: Path, *options: str) -> tuple[int, Path]:
    """Run `nsa-lab run ci` as in a terminal, and return its exit code and its report."""
    command = [sys.executable, "-m", "nsa_lab", "run", "ci", *options, "--outputs", str(folder / "outputs")]
    completed = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    return completed.returncode, Path(completed.stdout.splitlines()[-1])


def open_first_screen(browser, page: Path) -> None:
    """Open the page with a viewport of `HEIGHT`. The size of a window includes a frame that depends on the browser."""
    metrics = {"width": 1200, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page.as_uri())


def read_visible_text(browser) -> str:
    """Return the text of the elements that are completely on the screen."""
    leaves = "h1, h2, p, dl.numbers > div, dl.answers > div, dl.facts > div, pre"
    inside = """return [...document.querySelectorAll(arguments[0])].filter(element => {
        const box = element.getBoundingClientRect();
        return box.height > 0 && box.top >= 0 && box.bottom <= window.innerHeight }).map(element => element.innerText)"""
    return "\n".join(browser.execute_script(inside, leaves)).replace("\n", " ")


def assert_quiet(browser) -> None:
    """Assert that there was no network request and no console message since the last call."""
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [message["params"]["request"]["url"] for message in sent if message["method"] == "Network.requestWillBeSent"]
    assert any(url.startswith("file:") for url in urls)
    assert [url for url in urls if url.startswith(("http", "ws"))] == []
    assert browser.get_log("browser") == []
