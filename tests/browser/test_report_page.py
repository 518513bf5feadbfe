"""A report in a browser: nothing is requested, nothing is complained about, a figure's link unfolds its code."""

import json

import pytest
from fake_run import write_run

from nsa_lab.report import write_index, write_report

pytestmark = pytest.mark.browser


def test_a_report_is_one_quiet_file(browser, tmp_path):
    page = write_report(write_run(tmp_path))
    browser.get(write_index(tmp_path).as_uri())
    browser.find_element("css selector", "th a").click()
    assert browser.current_url == page.as_uri()
    link = browser.find_element("css selector", "main p.source a")
    code = browser.find_element("id", link.get_attribute("href").partition("#")[2])
    assert not code.is_displayed()
    browser.execute_script("arguments[0].click()", link)
    assert code.is_displayed()

    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [message["params"]["request"]["url"] for message in sent if message["method"] == "Network.requestWillBeSent"]
    assert [url for url in asked if url.startswith(("http", "ws"))] == []
    assert browser.get_log("browser") == []
