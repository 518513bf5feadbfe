"""JupyterLab, started by `make lab` on a copy of the notebooks, and chromium to look at it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from notebook_page import PORT, query_server, wait_until

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

# Render all cells, so that the driver can see cells outside the window.
SETTINGS = {"@jupyterlab/notebook-extension/tracker.jupyterlab-settings": {"windowingMode": "none"}}


def pytest_addoption(parser):
    parser.addoption("--screenshots", metavar="DIR", help="browser tests: save screenshots in this folder")
    parser.addoption("--made", metavar="DIR", help="browser tests: outputs/ of a project after `make run`")


@pytest.fixture
def screenshots(request):
    """Return the folder for screenshots, or None."""
    return request.config.getoption("--screenshots")


@pytest.fixture
def project(tmp_path):
    """Return a folder with a copy of the notebooks, which a test may change before Lab opens them."""
    shutil.copytree(ROOT / "notebooks", tmp_path / "project" / "notebooks")
    return tmp_path / "project"


@pytest.fixture
def lab(project, tmp_path):
    """Yield the address of a JupyterLab on the project."""
    for file, values in SETTINGS.items():
        (tmp_path / "settings" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "settings" / file).write_text(json.dumps(values))
    options = (
        f"--no-browser --port={PORT} --ServerApp.port_retries=0 --IdentityProvider.token= "
        f"--LabApp.user_settings_dir={tmp_path / 'settings'}"
    )
    # -o: test this environment, whether make installed it or not.
    command = [
        "make",
        "--no-print-directory",
        "-C",
        str(ROOT),
        "-o",
        f"{sys.prefix}/.ready",
        "lab",
        f"VENV={sys.prefix}",
        f"LAB_FOLDER={project}",
        f"LAB={options}",
    ]
    with open(tmp_path / "lab.log", "wb") as log:
        # A new session, so that make and the server can be stopped together.
        server = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True
        )
        try:
            wait_until(lambda: query_server("") is not None, "JupyterLab answers")
            yield f"http://127.0.0.1:{PORT}"
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(30)
            wait_until(lambda: query_server("") is None, "JupyterLab is gone", 30)


@pytest.fixture
def browser(tmp_path):
    if not (CHROMIUM and DRIVER):
        pytest.skip("needs chromium and its driver: apt-get install chromium-driver")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1200,1350",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        "--disable-default-apps",
        f"--user-data-dir={tmp_path / 'profile'}",
    ):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    yield driver
    driver.quit()
