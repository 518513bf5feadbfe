"""What git has to say of a checkout in which somebody has worked: runs belong to whoever made them, and stay out of it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from nsa_lab.runs import directory
from nsa_lab.workbook import start_page

ROOT = Path(__file__).parents[1]
# What `make run`, `nsa-lab report`, a comparison and a sweep leave behind.
MADE = (
    "outputs/index.html",
    "outputs/comparison.html",
    "outputs/smoke-20260101T000000Z-abcd/report.html",
    "outputs/smoke-20260101T000000Z-abcd/checkpoints/latest",
    "outputs/sweeps/smoke_rates/sweep.json",
)


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(autouse=True)
def checkout() -> None:
    if git("ls-files", "--error-unmatch", "outputs/README.md").returncode:
        pytest.skip("not a checkout")


def test_training_leaves_it_as_it_was() -> None:
    """Ignored, and not tracked: an ignored file that is tracked shows up as changed."""
    assert git("check-ignore", *MADE).stdout.split() == list(MADE)
    assert git("ls-files", *MADE).stdout == ""


def test_what_is_shared_is_not_ignored() -> None:
    """Or a file that is added to a shared run would be missed without a word."""
    assert git("ls-files", "--cached", "--ignored", "--exclude-standard").stdout == ""


def test_the_first_page_shows_the_latest_runs_that_are_shared() -> None:
    """It was executed before: whoever shares another run makes it anew."""
    shared = {ROOT / path.rsplit("/", 1)[0] for path in git("ls-files", "outputs/*/config.yaml").stdout.splitlines()}
    latest = sorted(shared, key=directory.get_creation_time)[-start_page.MAX_LISTED_RUNS :]
    page = (ROOT / "docs" / "pages" / "00_start_here.html").read_text(encoding="utf-8")
    assert [run.name for run in latest if run.name not in page] == []
