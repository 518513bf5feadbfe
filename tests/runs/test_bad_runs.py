"""One bad run does not hide the others: `nsa-lab status` reads each run separately, with bounds on time and memory."""

from __future__ import annotations

import json
import os
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import fake_run
import pytest
from fake_evaluation import make_run_factory
from typer.testing import CliRunner

from nsa_lab import cli
from nsa_lab.cli import status_table
from nsa_lab.config import ConfigError, UsageError
from nsa_lab.health.references import find_references
from nsa_lab.health.verdict_file import write_verdict
from nsa_lab.report.index import write_index
from nsa_lab.runs import directory, events
from nsa_lab.runs.atomic_io import write_text
from nsa_lab.runs.history import History

Break = Callable[[Path], None]
ENVELOPE = {"v": 1, "t": 5000.0, "run": "x", "attempt": 1, "tokens": 9}


def append_event(run_dir: Path, **fields: object) -> None:
    with open(run_dir / directory.EVENTS, "a", encoding="utf-8") as file:
        file.write(json.dumps({**ENVELOPE, **fields}) + "\n")


def lower_steps(run_dir: Path) -> None:
    path = run_dir / directory.CONFIG
    path.write_text(path.read_text().replace("steps: 200", "steps: 50"))


def add_late_step(run_dir: Path) -> None:
    append_event(run_dir, **{**fake_run.make_step_event(200, fake_run.make_config()), "step": 2_000_000_000})


def add_long_integer(run_dir: Path) -> None:
    append_event(run_dir, kind="step", step=10**400)


def set_long_status(run_dir: Path) -> None:
    path = run_dir / directory.STATUS
    path.write_text(json.dumps({**json.loads(path.read_text()), "step": 10**400}))


def write_wrong_verdict(run_dir: Path) -> None:
    path = write_verdict(run_dir)
    path.write_text(json.dumps({**json.loads(path.read_text()), "headline": [1], "facts": 7, "verdicts": "x"}))


def put_fifo(name: str) -> Break:
    def put(run_dir: Path) -> None:
        (run_dir / name).unlink(missing_ok=True)
        os.mkfifo(run_dir / name)

    return put


def make_folder(run_dir: Path) -> None:
    (run_dir / directory.EVENTS).unlink()
    (run_dir / directory.EVENTS).mkdir()


def make_config_folder(run_dir: Path) -> None:
    (run_dir / directory.CONFIG).unlink()
    (run_dir / directory.CONFIG).mkdir()


def write_config(run_dir: Path, text: str) -> None:
    (run_dir / directory.CONFIG).write_text(text)


def put_markup(run_dir: Path) -> None:
    path = run_dir / directory.STATUS
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "status": "[red]HALTED[/red] [/]", "reason": "[/b] [link=x]"})
    )


def write_merge_bomb(run_dir: Path) -> None:
    levels = ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 20))]
    (run_dir / directory.CONFIG).write_text("\n".join(levels))


def put_link(name: str, target: str) -> Break:
    def link(run_dir: Path) -> None:
        (run_dir / name).unlink()
        (run_dir / name).symlink_to(target)

    return link


def write_deep_json(run_dir: Path) -> None:
    (run_dir / directory.VERDICT).write_text('{"digest": ' + "[" * 200_000)


# Name -> how to break a run, and what its line or its reason says.
BREAKS: dict[str, tuple[Break, str]] = {
    "steps lowered": (lower_steps, "config.yaml has 50 steps, but a later step is recorded"),
    "late step": (add_late_step, "a later step is recorded"),
    "long integer": (add_long_integer, "DONE"),
    "long status": (set_long_status, "DONE"),
    "wrong verdict": (write_wrong_verdict, "not checked yet"),
    "fifo events": (put_fifo(directory.EVENTS), "expected a regular file"),
    "folder of events": (make_folder, "expected a regular file"),
    "fifo status": (put_fifo(directory.STATUS), "DONE"),
    "fifo verdict": (put_fifo(directory.VERDICT), "not checked yet"),
    "fifo config": (put_fifo(directory.CONFIG), "expected a file, got a FIFO"),
    "fifo lock": (put_fifo(directory.LOCK), "DONE"),
    "markup": (put_markup, "[red]HALTED[/red] [/]"),
    "merge bomb": (write_merge_bomb, "keys after merges"),
    "endless events": (put_link(directory.EVENTS, "/dev/zero"), "expected a regular file"),
    "broken link to events": (put_link(directory.EVENTS, "/absent/events.jsonl"), "No such file or directory"),
    "events that link to themselves": (put_link(directory.EVENTS, directory.EVENTS), "too many levels of symbolic links"),
    "broken link to config": (put_link(directory.CONFIG, "/absent/config.yaml"), "got a link to nothing"),
    "config that links to itself": (put_link(directory.CONFIG, directory.CONFIG), "got a link to nothing"),
    "deep verdict": (write_deep_json, "not checked yet"),
}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_each_bad_run_has_a_line_with_its_reason(tmp_path: Path) -> None:
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    good = fake_run.write_run(tmp_path / "new")
    names = {}
    for number, (name, (break_run, _)) in enumerate(BREAKS.items()):
        run_dir = outputs / f"bad-202601{number + 1:02d}T000000Z-abcd"
        shutil.copytree(good, run_dir)
        for file in (directory.STATUS, directory.EVENTS):
            path = run_dir / file
            path.write_text(path.read_text().replace(good.name, run_dir.name))
        break_run(run_dir)
        names[name] = run_dir.name
    good.rename(outputs / good.name)
    result = CliRunner().invoke(cli.app, ["status", "--outputs", str(outputs)], env={"COLUMNS": "200"})
    assert result.exception is None, result.exception
    lines = result.output.splitlines()
    assert [line.split()[1:4] for line in lines if line.startswith(good.name)] == [["DONE", "200", "2.140"]]
    for name, (_, text) in BREAKS.items():
        own = [line for line in lines if line.startswith(names[name])]
        assert own and text in " ".join(own), (name, own)
        assert all(len(line) < 600 for line in own), name
    summaries = CliRunner().invoke(cli.app, ["status", "--outputs", str(outputs), "--json"])
    assert len(json.loads(summaries.output)) == len(BREAKS) + 1


# The same for runs that cannot be read at all.
UNREADABLE: dict[str, tuple[Break, str]] = {
    "no run": (shutil.rmtree, "no such run"),
    "folder of events": (make_folder, "events.jsonl: cannot be read"),
    "folder of config": (make_config_folder, "config.yaml: expected a file, got a folder"),
    "config of no mapping": (lambda run_dir: write_config(run_dir, "[1"), "line 1"),
    "wrong key": (lambda run_dir: write_config(run_dir, "train: {stepz: 3}"), "no such key"),
    "wrong type": (lambda run_dir: write_config(run_dir, "train: {steps: many}"), "should be a valid integer"),
}


def test_health_shows_the_others_of_a_bad_run(tmp_path: Path) -> None:
    first, last = (fake_run.write_run(tmp_path / name) for name in ("first", "last"))
    bad = tmp_path / "bad-20260101T000000Z-aaaa"
    for name, (break_run, text) in UNREADABLE.items():
        shutil.copytree(first, bad)
        break_run(bad)
        for runs in ((bad, first, last), (first, bad, last), (first, last, bad)):
            result = CliRunner().invoke(cli.app, ["health", *map(str, runs)], env={"COLUMNS": "300"})
            assert result.exit_code == directory.EXIT_USAGE, (name, result.output)
            assert result.stdout.count("finished its 200 steps") == 2, (name, result.stdout)
            lines = result.stderr.splitlines()
            assert len(lines) == 1 and bad.name in lines[0] and text in lines[0], (name, lines)
        shutil.rmtree(bad, ignore_errors=True)
    # A failed check of another run does not replace the code of a run that was not judged.
    lower_steps(first)
    assert CliRunner().invoke(cli.app, ["health", str(first), str(last)]).exit_code == directory.EXIT_HALTED
    assert CliRunner().invoke(cli.app, ["health", str(first), str(bad)]).exit_code == directory.EXIT_USAGE


def test_compare_and_report_show_the_others_of_a_bad_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[str] = []
    monkeypatch.setattr("nsa_lab.report.write_report", lambda run, page, **_: reported.append(run.run))
    monkeypatch.setattr("nsa_lab.report.write_comparison", lambda runs, page: reported.extend(run.run for run in runs))
    make_run = make_run_factory(tmp_path / "outputs")
    sparse, dense = make_run("one", 0), make_run("other", 0, model__attention="dense")
    bad = tmp_path / "bad-20260101T000000Z-aaaa"

    def run_cli(*arguments: object) -> tuple[int, str, list[str]]:
        result = CliRunner().invoke(cli.app, [*map(str, arguments)])
        return result.exit_code, result.stdout, result.stderr.splitlines()

    code, tables, lines = run_cli("compare", sparse, dense)
    assert code == directory.EXIT_DONE and not lines
    for name, (break_run, text) in UNREADABLE.items():
        shutil.copytree(sparse, bad)
        break_run(bad)
        for runs in ((bad, sparse, dense), (sparse, bad, dense), (sparse, f"third={bad}", dense)):
            code, output, lines = run_cli("compare", *runs)
            assert code == directory.EXIT_USAGE and len(lines) == 1 and bad.name in lines[0] and text in lines[0], (
                name,
                lines,
            )
            note = f"* {lines[0].removeprefix('nsa-lab: ')}"
            assert note in output and output.replace(f"{note}\n", "") == tables, name
        code, output, lines = run_cli("compare", sparse, bad)  # one model cannot be compared
        assert code == directory.EXIT_USAGE and not output and text in lines[0], (name, lines)
        assert "expected at least two models" in lines[1] and len(lines) == 2, (name, lines)
        for runs, shown in (((sparse, bad, dense), [sparse, dense]), ((bad, dense), [dense]), ((bad,), [])):
            reported.clear()
            code, _, lines = run_cli("report", *runs, "--page", tmp_path / "page.html")
            assert code == directory.EXIT_USAGE and len(lines) == 1 and bad.name in lines[0] and text in lines[0], (
                name,
                lines,
            )
            assert reported == [run.name for run in shown], name
        shutil.rmtree(bad, ignore_errors=True)
    assert run_cli("report", sparse, dense, "--page", tmp_path / "page.html")[0] == directory.EXIT_DONE


def test_events_outside_the_run_are_reported_by_health(tmp_path: Path) -> None:
    for name, break_run in (("lowered", lower_steps), ("late", add_late_step)):
        run_dir = fake_run.write_run(tmp_path / name)
        break_run(run_dir)
        result = CliRunner().invoke(cli.app, ["health", str(run_dir)], env={"COLUMNS": "300"})
        assert result.exit_code == 3 and "step: expected 0 to" in result.output


def test_follow_survives_damaged_events(tmp_path: Path) -> None:
    run_dir = fake_run.write_run(tmp_path)
    add_late_step(run_dir)
    add_long_integer(run_dir)
    (run_dir / "evaluation.json").write_text('{"v": 1, "retrieval": [7, {"task": "needle"}], "selection": "x"}')
    assert "step 200/200" in CliRunner().invoke(cli.app, ["follow", str(run_dir)]).output
    assert "finished its 200 steps" in CliRunner().invoke(cli.app, ["health", str(run_dir)], env={"COLUMNS": "300"}).output


@pytest.mark.slow
def test_a_reading_of_millions_of_layers_is_skipped(tmp_path: Path) -> None:
    """Only the losses of an evaluation may be that many."""
    run_dir = fake_run.write_run(tmp_path)
    append_event(run_dir, kind="step", step=200, gate_entropy=[1] * 2_000_000)
    events_read = events.read_events(run_dir)
    assert [violation.is_skipped for violation in events_read.violations.listed] == [True]
    assert max(len(event.get("gate_entropy", ())) for event in events_read) == fake_run.LAYERS
    append_event(run_dir, kind="eval", step=200, split="validation", loss=1.0, bpb=1.0, window_losses=[1.0] * 1_000_000)
    assert len(events.read_events(run_dir)[-1]["window_losses"]) == 1_000_000


def test_stale_verdict_is_not_shown(tmp_path: Path) -> None:
    run_dir = fake_run.write_run(tmp_path)
    write_verdict(run_dir)

    def read_line() -> str:
        return CliRunner().invoke(cli.app, ["status", "--outputs", str(tmp_path)], env={"COLUMNS": "200"}).output

    assert "healthy" in read_line()
    text = (run_dir / directory.EVENTS).read_text()
    (run_dir / directory.EVENTS).write_text(text.replace('"grad_norm": 0.8', '"grad_norm": 0.9', 1))
    assert "healthy" not in read_line() and "not checked yet" in read_line()


def test_unreadable_record_is_a_usage_error(tmp_path: Path) -> None:
    run_dir = fake_run.write_run(tmp_path)
    put_fifo(directory.EVENTS)(run_dir)
    with pytest.raises(directory.RunDirectoryError, match="expected a regular file"):
        History.read(run_dir)
    make_folder(run_dir)
    with pytest.raises(UsageError, match=r"events\.jsonl: expected a regular file; replace it"):
        events.read_events(run_dir)
    write_merge_bomb(run_dir)
    with pytest.raises(ConfigError, match="merges"):
        History.read(run_dir)


def test_numbers_from_the_end_of_a_record_equal_those_of_all(tmp_path: Path) -> None:
    """Also where the last attempt repeats steps of an earlier one, or has not logged a step yet."""
    config = fake_run.make_config()
    healthy = fake_run.make_healthy_events(config)
    first = [event for event in healthy if event["step"] <= 130 and event["kind"] != "end"]
    resume = {"kind": "resume", "attempt": 2, "step": 100, "from_step": 100, "steps": 200}
    later = [{**event, "attempt": 2} for event in healthy if event["step"] > 100]
    other = next({**event, "attempt": 2, "split": "training", "bpb": 9.0} for event in first if event["kind"] == "eval")
    for number, count in enumerate(range(0, len(later) + 1, 4)):
        record = [
            *first,
            resume,
            *later[:count],
            {**other, "step": max(event["step"] for event in [resume, *later[:count]])},
        ]
        run_dir = fake_run.write_run(tmp_path / str(number), spoil=lambda _, record=record: record)
        (run_dir / directory.STATUS).unlink()
        history = History.read(run_dir)
        quick = status_table._read_quick_facts(run_dir)
        assert quick["step"] == history.last_step
        assert quick["validation_bpb"] == history.validation()[1][-1]
        speeds = events.read_progress(run_dir, config.train.steps, 8).speeds
        recorded = dict(zip(*(values.tolist() for values in history.series("tokens_per_s")), strict=True))
        assert len(speeds) >= 8 and sorted(speeds.items()) == sorted(recorded.items())[-len(speeds) :]
        assert quick["tokens_per_s"] == [statistics.median(speeds.values())]
    # Blocks that end within a line.
    for size in (1, 7, 100, 5000):
        lines = [b"a" * 30, b"", b"b" * 3, b"c"]
        (tmp_path / "lines").write_bytes(b"\n".join(lines))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(events, "TAIL_BYTES", size)
            assert list(events._read_lines_backwards(tmp_path / "lines", 1000)) == [b"c", b"b" * 3, b"a" * 30]
            assert list(events._read_lines_backwards(tmp_path / "lines", 6)) == [b"c", b"b" * 3]


def test_report_of_a_good_run_beside_bad_ones(tmp_path: Path) -> None:
    """Neither the references of a run nor the index of runs depend on a run that cannot be read."""
    good = fake_run.write_run(tmp_path)
    for number, name in enumerate((directory.EVENTS, directory.STATUS)):
        bad = tmp_path / f"bad-20260101T00000{number}Z-aaaa"
        shutil.copytree(good, bad)
        put_fifo(name)(bad)
    late = tmp_path / "late-20260101T000009Z-aaaa"
    shutil.copytree(good, late)
    lines = (good / directory.EVENTS).read_text().splitlines()
    (late / directory.EVENTS).write_text("".join(json.dumps({**json.loads(line), "t": 1e300}) + "\n" for line in lines))
    find_references(History.read(good))
    page = write_index(tmp_path).read_text()
    assert all(run_dir.name in page for run_dir in tmp_path.iterdir() if run_dir.is_dir())
    assert "expected a regular file" in page


def test_values_do_not_control_the_terminal(tmp_path: Path) -> None:
    run_dir = fake_run.write_run(tmp_path)
    status = json.loads((run_dir / directory.STATUS).read_text())
    (run_dir / directory.STATUS).write_text(json.dumps({**status, "status": "HALTED", "reason": "\x1b[2J\x9b"}))
    for command in ("status", "health"):
        result = CliRunner().invoke(cli.app, [command, str(run_dir), "--outputs", str(tmp_path)])
        assert result.exception is None or isinstance(result.exception, SystemExit), command
        assert "\x1b" not in result.output and "\x9b" not in result.output and "\\x1b[2J" in result.output, command


def test_lone_surrogates_can_be_written(tmp_path: Path) -> None:
    """They come from damaged values and from names of files that are not UTF-8."""
    path = tmp_path / directory.VERDICT
    write_text(path, json.dumps({"reason": "\ud800 \udcff"}, ensure_ascii=False))
    assert json.loads(path.read_text()) == {"reason": "\ud800 \udcff"}
