"""Notebook 01 in a real JupyterLab in headless chromium: run it, move a slider, see the picture change.

Run with `pytest tests/browser`; needs chromium, its driver and selenium, and is skipped where one is missing. Pictures for
the documentation are written with `--screenshots docs`.
"""

import pytest
from page import choose, keep, open_notebook, options, run_all, settle, shown, told, until, wait_until_idle

pytestmark = pytest.mark.browser

PAGE_DOWN = "\ue00f"  # selenium's code of the key


def test_the_slider_moves_the_picture(browser, lab, screenshots):
    open_notebook(browser, lab, "01_branch_derivations")
    run_all(browser)
    slider = until(lambda: shown(browser, ".widget-slider .noUi-handle"), "the explorer has its slider")
    picture = until(lambda: shown(browser, ".widget-image"), "the explorer has its picture")
    wait_until_idle()
    before, text = picture.get_attribute("src"), told(browser)
    assert "query 1,900" in text

    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", slider)
    slider.click()
    slider.send_keys(PAGE_DOWN * 3)
    until(lambda: told(browser) != text, "the text follows the slider")
    settle(lambda: told(browser))
    value = shown(browser, ".widget-slider .widget-readout").text
    assert f"query {int(value):,}," in told(browser) and value != "1900"
    after = shown(browser, ".widget-image").get_attribute("src")
    assert after and after != before
    keep(browser, slider, screenshots, "explorer.png")

    text = told(browser)
    choose(browser, "head group", "1")
    assert told(browser) != text and "group 1" in told(browser)
    text = told(browser)
    choose(browser, "layer", options(browser, "layer")[-1])
    assert told(browser) != text and "group 1" in told(browser)
    # Blocks of 8 tokens, one every 16: tokens in none of them. That is said in place of the picture, until it is mended.
    choose(browser, "l", "8")
    refused = until(lambda: shown(browser, ".widget-html-content p"), "the geometry is refused").text
    assert "nsa.l = 8" in refused and "nsa.d = 16" in refused and not shown(browser, ".widget-image")
    choose(browser, "d", "4")
    assert "group 1" in told(browser) and shown(browser, ".widget-image").get_attribute("src") != after
