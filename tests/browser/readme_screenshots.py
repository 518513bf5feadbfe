"""Take the screenshots in docs/pictures, at 1400 and 390 pixels, light and dark.

    python tests/browser/readme_screenshots.py RUN DIVERGED    # report.html of a run by `make run`, and of a diverged one

For a diverged run: `nsa-lab run ci -p train.lr=100 -p train.warmup_steps=4`. Needs chromium, its driver and selenium.
Screenshots of widgets come from the browser tests (`--screenshots docs`; notebook 06 after `make run`: `--screenshots
docs/pictures --made outputs -k after_make_run`), and those of figures from `make pages`.
"""

from __future__ import annotations

import argparse
import base64
import io
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import mistune
from conftest import CHROMIUM, DRIVER, ROOT
from PIL import Image
from selenium import webdriver

PICTURES, PAGES = ROOT / "docs" / "pictures", ROOT / "docs" / "pages"
PRODUCTION = ROOT / "outputs" / "production_50k-20261121T141448Z-afd3" / "report.html"
DESK, PHONE = (1400, 1000), (390, 1600)
COLOURS = 256
# The style of GitHub, without its frame: pictures within the column, code on grey.
README_STYLE = """body { font: 16px/1.5 system-ui, sans-serif; max-width: 980px; margin: 2rem auto; padding: 0 1rem }
img { max-width: 100% } pre { background: #f2f2f2; padding: .8rem; font-size: .8rem; overflow-x: auto }"""
HEADING = """const headings = [...document.querySelectorAll("h1, h2, h3")];
const at = headings.findIndex(heading => heading.textContent.includes(arguments[0]));
"""
# Top and height of the section under a heading.
SECTION = (
    HEADING
    + """const top = headings[at].getBoundingClientRect().top + window.scrollY - 12;
return [top, headings[at + 1].getBoundingClientRect().top + window.scrollY - 24 - top];"""
)
# The first picture after a heading.
FIGURE = (
    HEADING
    + """return [...document.querySelectorAll("img")].find(image =>
  headings[at].compareDocumentPosition(image) & Node.DOCUMENT_POSITION_FOLLOWING).src;"""
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="report.html of a run by make run")
    parser.add_argument("diverged", type=Path, help="report.html of a run that diverged")
    arguments = parser.parse_args()
    with chromium() as browser:
        for name, page in (("run", arguments.run), ("production", PRODUCTION)):
            for size in (DESK, PHONE):
                for scheme in ("light", "dark"):
                    open_page(browser, page, size, scheme)
                    save(browser.get_screenshot_as_png(), f"report_{name}_{size[0]}_{scheme}.png")
        open_page(browser, arguments.diverged, DESK, "light")
        save(browser.get_screenshot_as_png(), "report_diverged_1400_light.png")
        with tempfile.TemporaryDirectory() as folder:
            open_page(browser, readme(Path(folder)), (1200, 1100), "light")
            save(browser.get_screenshot_as_png(), "readme.png")
        open_page(browser, PAGES / "01_branches.html", (1040, 1000), "light")
        source = browser.execute_script(FIGURE, "NSA in one picture")
        save(base64.b64decode(source.partition(",")[2]), "nsa_architecture.png")
        top, height = browser.execute_script(SECTION, "NSA from scratch")
        save(part(browser, top, height), "nsa_from_scratch.png")
    return 0


@contextmanager
def chromium() -> Iterator[webdriver.Chrome]:
    """Yield a headless browser."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    try:
        yield browser
    finally:
        browser.quit()


def open_page(browser: webdriver.Chrome, page: Path, size: tuple[int, int], scheme: str) -> None:
    """Load a page with a viewport in CSS pixels, in a light or dark scheme."""
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    preferred = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", preferred)
    browser.get(page.resolve().as_uri())


def readme(folder: Path) -> Path:
    """Write README.md as a page into `folder`, with links relative to the project."""
    text = str(mistune.html((ROOT / "README.md").read_text(encoding="utf-8")))
    page = folder / "readme.html"
    base = f'<base href="{ROOT.as_uri()}/">'
    page.write_text(f"<!doctype html><meta charset=utf-8>{base}<style>{README_STYLE}</style>{text}", encoding="utf-8")
    return page


def part(browser: webdriver.Chrome, top: float, height: float) -> bytes:
    """Return a PNG of the page from `top` on, with the width of the page."""
    width = browser.execute_script("return document.documentElement.clientWidth")
    box = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
    options = {"format": "png", "captureBeyondViewport": True, "clip": box}
    return base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", options)["data"])


def save(png: bytes, name: str) -> None:
    """Save a picture with a colour palette, a third of the size."""
    # The default method merges colours of few pixels, for example of a curve, which turned from green to blue.
    image = Image.open(io.BytesIO(png)).convert("RGB")
    quantized = image.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    quantized.save(PICTURES / name, "PNG", optimize=True)
    print(name, flush=True)


if __name__ == "__main__":
    sys.exit(main())
