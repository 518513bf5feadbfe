"""Notebook 01 in a real JupyterLab in headless chromium: run it, move a slider, see the picture change.

Run with `pytest tests/browser`; needs chromium, its driver and selenium, and is skipped where one is missing. The picture
for the documentation is written with `--screenshots docs`.
"""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

selenium = pytest.importorskip("selenium", reason="needs selenium: pip install selenium")
webdriver = pytest.importorskip("selenium.webdriver")

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
PORT, WAIT_S = 8931, 120

# Every cell drawn wherever it is, and no question about news.
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker.jupyterlab-settings": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification.jupyterlab-settings": {"fetchNews": "false", "checkForUpdates": False},
}

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and its driver: apt-get install chromium-driver"),
]


@pytest.fixture
def lab(tmp_path):
    """The address of notebook 01 in a JupyterLab on a copy of the notebooks."""
    folder = tmp_path / "project"
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={PORT}", "--port-retries=0",
               "--IdentityProvider.token=", f"--notebook-dir={folder}",
               f"--LabApp.user_settings_dir={tmp_path / 'settings'}"]
    for file, values in SETTINGS.items():
        (tmp_path / "settings" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "settings" / file).write_text(json.dumps(values))
    with open(tmp_path / "lab.log", "wb") as log:
        # A session of its own, so that its kernels end with it.
        server = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"},
                                  start_new_session=True)
        try:
            _until(lambda: _ask("") is not None, "JupyterLab answers")
            # A workspace that is reset: one tab, nothing left of an earlier visit.
            yield f"http://127.0.0.1:{PORT}/doc/tree/notebooks/01_branch_derivations.ipynb?reset"
        finally:
            server.terminate()
            server.wait(30)


@pytest.fixture
def browser(tmp_path):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1200,1350",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
        "--disable-default-apps", f"--user-data-dir={tmp_path / 'profile'}",
    ):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    yield driver
    (tmp_path / "last.png").write_bytes(driver.get_screenshot_as_png())
    driver.quit()


def test_the_slider_moves_the_picture(lab, browser, request):
    browser.get(lab)
    _until(lambda: browser.find_elements("css selector", ".jp-NotebookPanel .jp-Cell"), "the notebook is open")
    _until(lambda: any(kernel["connections"] and kernel["execution_state"] == "idle" for kernel in _ask("/kernels")),
           "the kernel is ready and Lab is connected to it")
    time.sleep(2.0)  # Lab hears of it
    _run_all(browser)
    slider = _until(lambda: _shown(browser, ".widget-slider .noUi-handle"), "the explorer has its slider")
    picture = _until(lambda: _shown(browser, ".widget-image"), "the explorer has its picture")
    before, text = picture.get_attribute("src"), _text(browser)
    assert "query 1900" in text

    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", slider)
    slider.click()
    slider.send_keys(selenium.webdriver.Keys.PAGE_DOWN * 3)
    _until(lambda: _text(browser) != text, "the text follows the slider")
    after = _shown(browser, ".widget-image").get_attribute("src")
    assert after and after != before
    assert "query 1900" not in _text(browser)
    _keep(browser, slider, request.config.getoption("--screenshots"), "explorer.png")


def _run_all(browser):
    browser.find_element("xpath", "//div[contains(@class,'lm-MenuBar-itemLabel') and text()='Run']").click()
    item = _until(lambda: _shown(browser, "[data-command='runmenu:run-all']"), "the Run menu is open")
    item.click()


def _text(browser) -> str:
    return "".join(element.text for element in browser.find_elements("css selector", ".widget-html-content pre"))


def _shown(browser, selector):
    return next((found for found in browser.find_elements("css selector", selector) if found.is_displayed()), None)


def _keep(browser, element, folder, name):
    if folder:
        browser.execute_script("arguments[0].scrollIntoView({block: 'start'})", element)
        time.sleep(1.0)  # the page settles
        Path(folder).mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(str(Path(folder) / name))


def _until(what, saying, seconds=WAIT_S):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.5)
    raise AssertionError(f"not after {seconds} s: {saying}")


def _ask(what: str):
    """The server's own word, or None while it is not up."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/api{what}", timeout=2) as response:
            return json.load(response)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return None
