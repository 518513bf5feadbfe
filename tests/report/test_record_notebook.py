"""The report of a run as a notebook that is built from its record, the sentence at its top, levels, and linked terms."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest
from fake_evaluation import make_run_factory
from fake_run import make_config, write_run
from nbformat.v4 import new_code_cell, new_notebook
from unpainted import unpainted

from nsa_lab import report
from nsa_lab.health import examine, summary_sentence
from nsa_lab.report import header, record_notebook, write_report
from nsa_lab.report.glossary import link_terms, read_glossary, render_glossary
from nsa_lab.runs import directory
from nsa_lab.runs.history import History


@unpainted()
@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_record_notebook_shows_every_part_and_is_rebuilt_equally(attention: str, tmp_path: Path) -> None:
    config = make_config(model__attention=attention).model_copy(update={"description": "Tests the <report>."})
    run_dir = write_run(tmp_path, config)
    page = write_report(run_dir).read_text(encoding="utf-8")
    file = run_dir / "report.ipynb"
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    prose = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert prose.startswith(f"# {run_dir.name}\n\nTests the <report>.\n\n**This ")
    assert re.findall(r"^# ", prose, re.MULTILINE) == ["# "]
    for part in ("## Checks", "## Key numbers", "## Curves", "### Loss", "## Configuration", "n_layers: 3"):
        assert part in prose
    assert ("### Gates" in prose) == (attention == "nsa")
    for verdict in examine(run_dir).verdicts:
        assert f"| {verdict.name} | {verdict.level} |" in prose
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert all(output.metadata["image/png"]["alt"] for cell in code[1:] for output in cell.outputs)
    # The page has the description and the sentence in its header, and the rest of the notebook once.
    assert page.index("Tests the &lt;report&gt;.") < page.index('class="outcome">This ') < page.index('class="numbers"')
    assert page.count("n_layers: 3") == 1 and "## Checks" not in page
    before = file.read_bytes()
    write_report(run_dir, record_only=True)
    assert file.read_bytes() == before


@unpainted()
def test_code_of_the_record_notebook_runs_in_the_directory_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = write_run(tmp_path)
    write_report(run_dir)
    shown = []
    monkeypatch.setattr("nsa_lab.workbook.display.show_figure", shown.append)
    monkeypatch.chdir(run_dir)
    cells = [cell for cell in nbformat.read("report.ipynb", as_version=4).cells if cell.cell_type == "code"]
    setup = next(cell for cell in cells if "History.read" in cell.source)
    names: dict = {}
    for cell in (setup, *(cell for cell in cells if cell is not setup)):
        exec(cell.source, names)
    assert len(shown) == len(cells) - 1 >= 3


@unpainted()
def test_executed_notebook_is_never_replaced(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    nbformat.write(new_notebook(cells=[new_code_cell("secret = 1")]), run_dir / "report.ipynb")
    before = (run_dir / "report.ipynb").read_bytes()
    assert "secret" in write_report(run_dir).read_text(encoding="utf-8")
    assert "secret" not in write_report(run_dir, record_only=True).read_text(encoding="utf-8")
    write_report(run_dir, tmp_path / "page.html", record_only=True)
    assert (run_dir / "report.ipynb").read_bytes() == before


@unpainted()
def test_notebook_of_a_record_follows_the_run(tmp_path: Path) -> None:
    """A notebook that was built from an earlier record is built again, not shown."""
    run_dir = write_run(tmp_path, status={"status": directory.RUNNING})
    write_report(run_dir)
    (run_dir / "status.json").write_text(json.dumps({"status": directory.HALTED, "reason": "the disk is full"}))
    assert "the disk is full" in write_report(run_dir).read_text(encoding="utf-8")
    assert "the disk is full" in (run_dir / "report.ipynb").read_text(encoding="utf-8")


@unpainted()
def test_verdict_of_a_recorded_run_stays_as_it_is(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    (run_dir / "RECORDED").touch()
    (run_dir / directory.VERDICT).write_text("{}")
    write_report(run_dir)
    assert (run_dir / directory.VERDICT).read_text() == "{}"


def test_sentence_states_progress_loss_facts_and_checks(tmp_path: Path) -> None:
    done = write_run(tmp_path / "done")
    history, health = History.read(done), examine(done)
    sentence = summary_sentence.describe_outcome(history, health.verdicts)
    assert re.fullmatch(
        r"This NSA model of [\d.]+ M parameters finished its 200 steps, has 2\.140 bits per byte on held-out text "
        r"\(untrained: 8\.000\), and passed its checks(?: \(\d+ unknown\))?\.",
        sentence,
    )
    first, *others = health.verdicts
    failed = replace(health, verdicts=[replace(first, ok=False), *others])
    assert summary_sentence.describe_outcome(history, failed.verdicts).endswith(f"and failed 1 check: {first.name}.")
    warned = replace(health, verdicts=[replace(first, ok=True, level="warning"), *others])
    assert "with 1 warning" in summary_sentence.describe_outcome(history, warned.verdicts)
    halted = write_run(tmp_path / "halted", status={"status": directory.HALTED, "reason": "nan"})
    assert "was halted at step 200 of 200" in summary_sentence.describe_outcome(
        History.read(halted), examine(halted).verdicts
    )
    evaluated = make_run_factory(tmp_path)("long", 0)
    assert re.search(
        r"retrieves 6 of 21 single facts from 4,096 bytes",
        summary_sentence.describe_outcome(History.read(evaluated), examine(evaluated).verdicts),
    )


def test_levels_have_their_own_colour(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path)
    history, health = History.read(run_dir), examine(run_dir)
    first, *others = health.verdicts
    assert header.get_status_class(health, history) == "ok"
    for level, ok, expected in (("warning", True, "warn"), ("failed", False, "bad")):
        changed = replace(health, verdicts=[replace(first, ok=ok, level=level), *others])
        assert header.get_status_class(changed, history) == expected
        assert header._make_row(changed.verdicts[0])["status_class"] == expected
        assert f"| {first.name} | {level} |" in "\n".join(record_notebook._format_checks(changed))
    unknown = replace(first, ok=None, level="passed")
    assert unknown.level == "unknown"


def test_terms_are_linked_once_and_defined() -> None:
    glossary = {"gate share": "a part of the `gates`", "fact": "a sentence", "needle": "a sentence"}
    page = (
        "<header><h1>fact</h1><p class='fact'>Gate shares, a fact, another fact and artifacts</p><pre>needle</pre></header>"
    )
    linked, terms = link_terms(page, glossary)
    assert terms == ["gate share", "fact"]
    assert '<a class="term" href="#term-gate-share">Gate shares</a>, a <a class="term" href="#term-fact">fact</a>' in linked
    assert "<h1>fact</h1><p class='fact'>" in linked and "another fact and artifacts" in linked
    assert "<pre>needle</pre>" in linked
    rendered = render_glossary(terms, glossary)
    assert '<dt id="term-gate-share">gate share</dt><dd>a part of the <code>gates</code></dd>' in rendered
    assert link_terms(page, {}) == (page, []) and render_glossary([], glossary) == ""


@unpainted()
def test_terms_of_a_page_lead_to_definitions(tmp_path: Path) -> None:
    assert {"gate share", "attempt", "fact", "needle"} <= read_glossary().keys()
    page = write_report(write_run(tmp_path)).read_text(encoding="utf-8")
    targets = set(re.findall(r'href="#(term-[\w-]+)"', page))
    assert len(targets) >= 3 and targets == set(re.findall(r'id="(term-[\w-]+)"', page))
    assert report.PAGE == "report.html"
