"""A benchmark's record says of which code it is, and the documentation claims no more than that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nsa_lab.bench import records
from nsa_lab.bench.attention_speed import AttentionRow, _compute_shares
from nsa_lab.cli import app
from nsa_lab.runs import environment

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"
RECORDS = sorted(DOCS.glob("*.json"))


def test_a_record_names_its_code_and_stands_until_a_source_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "nsa_lab"
    for part in records.PARTS:
        (package / part).mkdir(parents=True)
        (package / part / "code.py").write_text("x = 1\n")
    monkeypatch.setattr(records, "PACKAGE", package)
    made = records.origin("a GPU")
    assert set(made) == {"when", "device", "versions", "code"} and made["device"] == "a GPU"
    assert made["code"]["commit"] == environment.get_code_identity()["commit"] and made["code"]["source"]
    assert records.standing(made) == "as it stands"
    (package / "report.py").write_text("what no speed depends on")
    assert records.standing(made) == "as it stands"
    (package / "attention" / "code.py").write_text("x = 2\n")
    assert records.standing(made) == "of other code: nsa_lab/attention changed since"
    # A kernel's record does not age by what decodes.
    kernels, decoding = (records.origin("a GPU", of) for of in (records.OPERATOR, records.DECODING))
    (package / "inference" / "code.py").write_text("x = 2\n")
    assert records.standing(kernels) == "as it stands"
    assert records.standing(decoding) == "of other code: nsa_lab/inference changed since"
    (package / "bench" / "code.py").unlink()
    (package / "bench").rmdir()
    assert records.standing(kernels) == "of other code: nsa_lab/bench changed since"


def test_what_was_not_committed_is_marked() -> None:
    code = {"commit": "0123456789abcdef", "dirty": True}
    text = records.code_text({"when": "2026-11-22T00:00:00", "code": code})
    assert text == "commit 0123456789, with changes that were not committed, 2026-11-22"
    assert "not committed" not in records.code_text({"when": "2026-11-22T00:00:00", "code": code | {"dirty": False}})
    assert "its commit is not recorded" in records.code_text({"when": "2026-11-22T00:00:00"})


def test_the_command_line_says_which_records_stand(tmp_path: Path) -> None:
    def stands(file: Path) -> tuple[int, str]:
        told = CliRunner().invoke(app, ["bench", "stands", str(file)])
        return told.exit_code, told.output if told.exception is None or told.exit_code != 1 else str(told.exception)

    new, old, none = tmp_path / "new.json", tmp_path / "old.json", tmp_path / "none.json"
    records.write(new, records.origin("cpu"))
    records.write(old, {"when": "2026-01-01T00:00:00"})
    none.write_text("[]")
    assert stands(new)[0] == 0 and "new.json: as it stands (commit" in stands(new)[1]
    assert stands(old)[0] == 3 and "it does not say what it is of" in stands(old)[1]
    assert "does not say when it was made" in stands(none)[1]


def test_shares_are_of_flash_and_of_the_fastest() -> None:
    row = AttentionRow("2048x8", "whole", "triton", forward_ms=1.0, backward_ms=1.0)
    assert _compute_shares(row, {"SDPA flash": 8.0, "SDPA cuDNN": 4.0}) == (0.25, 0.5)
    assert _compute_shares(row, {"SDPA math": 4.0}) == (None, 0.5)
    assert _compute_shares(AttentionRow("", "whole", ""), {"SDPA flash": 8.0}) == (None, None)


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.name)
def test_the_page_says_of_each_record_which_code_it_is_of(file: Path) -> None:
    """And claims that it is of the code as it stands for none that is not."""
    found = records.read(file)
    (row,) = [line for line in (DOCS / "README.md").read_text().splitlines() if line.startswith(f"| [{file.name}]")]
    commit = (found.get("code") or {}).get("commit")
    assert (commit[:10] if commit else "not recorded") in row and found["when"][:10] in row
    assert records.standing(found) == records.STANDS or records.STANDS not in row


@pytest.mark.parametrize("name", ["attention-h200.json", "attention-wide-h200.json"])
def test_the_shares_on_the_page_are_those_of_the_record(name: str) -> None:
    """Of the whole operator, against SDPA flash and against cuDNN."""
    rows = json.loads((DOCS / name).read_text())["rows"]
    page = (DOCS / "README.md").read_text().splitlines()
    for by, told in (("SDPA flash", "| whole attention |"), ("SDPA cuDNN", "| whole attention, of cuDNN |")):
        (line,) = [line for line in page if line.startswith(told)]
        for shape in dict.fromkeys(row["shape"] for row in rows):
            took = {(r["part"], r["by"]): r["forward_ms"] + (r["backward_ms"] or 0) for r in rows if r["shape"] == shape}
            assert f"{took['whole', 'triton'] / took['dense', by]:.3f}" in line, (shape, by)


def test_one_record_that_does_not_stand_is_exit_code_3(tmp_path, monkeypatch):
    for name in "ab":
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(records, "read", lambda file: {"name": file.name})
    monkeypatch.setattr(records, "code_text", lambda one: "")
    monkeypatch.setattr(records, "get_run_states", lambda one: records.STANDS if one["name"] == "a" else "stale")
    found = CliRunner().invoke(app, ["bench", "stands", str(tmp_path / "a"), str(tmp_path / "b")])
    assert found.exit_code == 3
