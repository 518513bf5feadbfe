"""Notebook parameters become a configuration, and select the run to follow."""

import json
import math

import pytest
from fake_run import write_run
from looping import looped

from nsa_lab.config import RunConfig
from nsa_lab.config.optional_deps import MissingPackage
from nsa_lab.health import examine
from nsa_lab.runs import directory, lifecycle
from nsa_lab.runs.environment import collect_environment
from nsa_lab.workbook import notebook
from nsa_lab.workbook.notebook import Stop, load_configuration


@looped
@pytest.mark.parametrize(
    "name, sections, run_dir, message",
    [
        ("ci", {"train": {"stepz": 10}}, "", "did you mean train.steps"),
        ("ci", {"nsa": {"d": 5}}, "", "not a multiple of nsa.d = 5"),
        ("ci", {"nsa": 5}, "", "expected a mapping"),
        ("ci", {"train": {"steps": math.inf}}, "", "train.steps = inf: expected a finite number"),
        ("ci", {"train": {"lr": math.nan}}, "", "train.lr = nan: expected a finite number"),
        ("ci", {"train": {"steps": 1e30}}, "", r"train.steps = 1e\+30: input should be a valid integer"),
        ("ci", {"train": {"steps": -6}}, "", "train.steps = -6: input should be greater than or equal to 1"),
        ("smok", {}, "", "did you mean smoke"),
        ("smok", {"train": {"steps": 5}}, "", "did you mean smoke"),
        ("smok.yaml", {"train": {"steps": 5}}, "", "smok.yaml: no such configuration file"),
        ("ci", {"train": {1: 5}}, "", "train: expected names of settings as keys, got 1"),
        ("ci", {}, "no-such-run", "no such run"),
        ("ci", {"train": {"steps": 5}}, "no-such-run", "the configuration of a run is fixed"),
    ],
)
def test_mistakes_are_explained(name, sections, run_dir, message):
    with pytest.raises(Stop, match=message) as caught:
        load_configuration(name, sections, run_dir)
    assert caught.value._render_traceback_() == [str(caught.value)]


def test_sections_override_the_file_or_are_the_configuration():
    overridden = load_configuration("ci", {"train": {"steps": 7}, "model": {}})
    assert overridden.train.steps == 7 and overridden.train.seq_len == RunConfig.from_yaml("params/ci.yaml").train.seq_len
    assert load_configuration("params/ci.yaml", {"train": {"steps": 7}}) == overridden
    without_file = load_configuration("of-my-own", {"train": {"steps": 7}})
    assert without_file.name == "of-my-own" and without_file.train.seq_len == RunConfig().train.seq_len


def test_columns_are_a_table(capsys):
    notebook.print_columns(("", "NSA", "dense", "NSA / dense"), [("training time", "1 h 02 min", None, 0.5)])
    head, row = capsys.readouterr().out.splitlines()
    assert row.split() == ["training", "time", "│", "1", "h", "02", "min", "–", "0.500"]
    assert head.index("│") == row.index("│") == 32 and len(row) == len(head)


def test_numbers_that_yaml_parses_as_text():
    config = load_configuration("ci", {"train": {"lr": "1e-3"}, "data": {"tokenizer": "byte"}})
    assert config.train.lr == 1e-3


@pytest.fixture
def config():
    return RunConfig.from_yaml("params/ci.yaml")


@pytest.fixture
def started(monkeypatch):
    """Return the names of the runs in which a trainer would have been started."""
    names = []
    monkeypatch.setattr(lifecycle, "start", lambda run, **_: names.append(run.name))
    return names


def make(config, folder, status, **code):
    """Return a run directory with this status, without training."""
    known = collect_environment()
    known = {**known, "config_hash": config.hash(), "code": {**known["code"], **code}}
    run = directory.create_run_dir(
        folder, config.name, {directory.CONFIG: config.to_yaml(), directory.ENVIRONMENT: json.dumps(known)}
    )
    directory.write_status(run, run=run.name, status=status)
    return run


BEGUN = {"kind": "start", "t": 1.0, "attempt": 1, "step": 0, "from_step": 0}


@pytest.mark.parametrize(
    ("events", "saved", "message"),
    [
        ([], [], "started: "),
        ([BEGUN], [], "started from step 0, because it has no checkpoint: "),
        ([BEGUN], [100, 200], "resumed from its checkpoint of step 200: "),
    ],
    ids=["made before", "killed early", "killed late"],
)
def test_only_a_continued_run_is_reported_as_resumed(config, started, tmp_path, capsys, events, saved, message):
    """The command line creates the run before the notebook starts it."""
    run = make(config, tmp_path, directory.PREEMPTED)
    (run / directory.EVENTS).write_text("".join(json.dumps(event) + "\n" for event in events))
    for step in saved:
        (run / directory.CHECKPOINTS / f"step-{step:08d}").mkdir(parents=True)
    assert notebook.start_run(config, outputs=str(tmp_path)) == run and started == [run.name]
    assert capsys.readouterr().out == f"{message}{run}\n"


def test_finished_run_is_shown(config, started, tmp_path, capsys):
    run = make(config, tmp_path, directory.DONE)
    assert notebook.start_run(config, outputs=str(tmp_path)) == run and not started
    assert "this run is finished" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("why", ["asked", "other code", "other configuration", "halted"])
def test_new_run_is_started_if_none_matches(why, config, started, tmp_path, capsys):
    other = config.model_copy(update={"train": config.train.model_copy(update={"steps": 30})})
    old = make(
        other if why == "other configuration" else config,
        tmp_path,
        directory.HALTED if why == "halted" else directory.DONE,
        **({"source": "0" * 16} if why == "other code" else {}),
    )
    run = notebook.start_run(config, outputs=str(tmp_path), new_run=why == "asked")
    assert run != old and started == [run.name] and "new run" in capsys.readouterr().out


def test_user_errors_are_one_line(config, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise MissingPackage("pyarrow is not installed; run: pip install 'nsa-lab[data]'", name="pyarrow")

    monkeypatch.setattr(lifecycle, "ensure", refuse)
    with pytest.raises(Stop, match=r"^MissingPackage: pyarrow is not installed; run: pip install 'nsa-lab\[data\]'$"):
        notebook.start_run(config, outputs=str(tmp_path))


@pytest.mark.parametrize("last", [200, 90], ids=["healthy", "failed"])
def test_checks_in_the_answers_are_not_printed_again(last, tmp_path, capsys):
    run = write_run(tmp_path, spoil=lambda events: [event for event in events if event["step"] <= last])
    notebook.print_answers(run)
    top = capsys.readouterr().out
    notebook.print_verdicts(run, without_answers=True)
    below = capsys.readouterr().out
    for verdict in examine(run).verdicts:
        assert (f"{verdict}\n" in below) != (verdict.text in top and len(verdict.text) > 5), verdict


def test_halted_run_stops_the_notebook(config, started, tmp_path, capsys):
    run = make(config, tmp_path, directory.HALTED)
    assert notebook.start_run(config, str(run)) == run and not started
    assert "halted" in capsys.readouterr().out
    with pytest.raises(Stop, match="nsa-lab resume"):
        notebook.print_final_verdict(run)


def test_latest_finished_run(config, tmp_path):
    with pytest.raises(Stop, match="nsa-lab run smoke"):
        notebook.find_latest_finished(str(tmp_path))
    run = make(config, tmp_path, directory.DONE)
    make(config, tmp_path, directory.PREEMPTED)
    assert notebook.find_latest_finished(str(tmp_path)) == run


def test_read_histories(config, tmp_path):
    run, other = make(config, tmp_path, directory.DONE), make(config, tmp_path, directory.PREEMPTED)
    assert [each.run for each in notebook.read_histories(outputs=str(tmp_path))] == [run.name]
    assert [each.run for each in notebook.read_histories(str(other), str(run))] == [other.name, run.name]
    with pytest.raises(Stop, match="no such run"):
        notebook.read_histories(str(run), "no-such-run")
    assert "\n| state | DONE |\n" in notebook.format_facts_table(notebook.read_histories(str(run))[0])
