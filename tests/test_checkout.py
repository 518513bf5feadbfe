"""What git has to say of a checkout in which somebody has worked: runs belong to whoever made them, and stay out of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_damaged_records_are_named(tmp_path: Path) -> None:
    """In copies of the tool, the manifest and the archive."""
    tool, records = Path("tools/records.py"), Path("docs/science/records")
    for folder in (tool.parent, records):
        shutil.copytree(ROOT / folder, tmp_path / folder)

    def fail(*arguments: str) -> str:
        result = subprocess.run([sys.executable, tmp_path / tool, *arguments], capture_output=True, text=True, check=False)
        assert result.returncode == 1, result.stderr
        return result.stderr.strip()

    assert fail("unpack", "--to", str(tmp_path / tool)) == f"{tmp_path / tool}: expected a folder, got a file"
    archive = tmp_path / records / "runs.tar.xz"
    archive.write_bytes(archive.read_bytes()[:100_000])
    assert fail("verify").startswith(f"{archive}: damaged (")
    (tmp_path / records / "runs.json").write_text('{"a": 5}')
    assert fail("list").endswith("runs.json: expected a digest and a place for every run; restore the file from git")
