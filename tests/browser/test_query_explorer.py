"""Notebook 02 in JupyterLab in headless chromium: run it, move a slider, and check that the figure changes.

Run with `pytest tests/browser`. Needs chromium, its driver and selenium, and is skipped without them. `--screenshots
docs` saves screenshots for the documentation.
"""

import pytest
from notebook_page import (
    find_visible,
    list_options,
    open_notebook,
    read_explorer_text,
    run_all_cells,
    save_screenshot,
    select_options,
    wait_until,
    wait_until_idle,
    wait_until_stable,
)

pytestmark = pytest.mark.browser

PAGE_DOWN = "\ue00f"  # selenium's code of the key


def test_slider_changes_the_figure(browser, lab, screenshots):
    open_notebook(browser, lab, "02_in_practice")
    run_all_cells(browser)
    slider = wait_until(lambda: find_visible(browser, ".widget-slider .noUi-handle"), "the explorer has its slider")
    picture = wait_until(lambda: find_visible(browser, ".widget-image"), "the explorer has its picture")
    wait_until_idle()
    before, text = picture.get_attribute("src"), read_explorer_text(browser)
    assert "query 1,900" in text

    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", slider)
    slider.click()
    slider.send_keys(PAGE_DOWN * 3)
    wait_until(lambda: read_explorer_text(browser) != text, "the text follows the slider")
    wait_until_stable(lambda: read_explorer_text(browser))
    value = find_visible(browser, ".widget-slider .widget-readout").text
    assert f"query {int(value):,}," in read_explorer_text(browser) and value != "1900"
    after = find_visible(browser, ".widget-image").get_attribute("src")
    assert after and after != before
    save_screenshot(browser, slider, screenshots, "explorer.png")

    text = read_explorer_text(browser)
    select_options(browser, "head group", "1")
    assert read_explorer_text(browser) != text and "group 1" in read_explorer_text(browser)
    text = read_explorer_text(browser)
    select_options(browser, "layer", list_options(browser, "layer")[-1])
    assert read_explorer_text(browser) != text and "group 1" in read_explorer_text(browser)
    # Blocks of 8 tokens every 16 tokens would omit tokens. An error replaces the figure until the sizes are valid.
    select_options(browser, "l", "8")
    error = wait_until(lambda: find_visible(browser, ".widget-html-content p"), "the sizes are rejected").text
    assert "nsa.l = 8" in error and "nsa.d = 16" in error and not find_visible(browser, ".widget-image")
    select_options(browser, "d", "4")
    assert "group 1" in read_explorer_text(browser) and find_visible(browser, ".widget-image").get_attribute("src") != after
