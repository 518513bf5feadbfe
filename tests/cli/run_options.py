"""Options of the commands that inspect runs."""

from __future__ import annotations

from option_cases import OUT, case, stop

case(
    "status",
    "run",
    f"status {{run}} {OUT} --json",
    "nsa_lab.cli.status_table.summarize_run",
    lambda run: run.name.startswith("fake"),
    {},
)
case(
    "status",
    "outputs",
    f"status {OUT} --json",
    "nsa_lab.cli.status_table.summarize_runs",
    lambda folder, **_: folder.name == "outputs",
    [],
)
case("status", "as_json", f"status {OUT} --json", "nsa_lab.cli.status_table.summarize_runs", lambda folder, **_: True, [])
case(
    "status",
    "recorded",
    f"status {OUT} --json --recorded",
    "nsa_lab.cli.status_table.summarize_runs",
    lambda folder, recorded: recorded,
    [],
)
WATCH = "nsa_lab.runs.live_view.watch"
case("follow", "run", f"follow {{run}} {OUT}", WATCH, lambda run, *_: run.name.startswith("fake"))
case("follow", "outputs", f"follow {{run}} {OUT}", WATCH, lambda run, *_: run.parent.name == "outputs")
EXAMINE = "nsa_lab.health.examine"
case("health", "runs", f"health {{run}} {OUT}", EXAMINE, lambda history: history.run.startswith("fake"), stop)
case("health", "outputs", f"health {{run}} {OUT}", EXAMINE, lambda history: history.run_dir.parent.name == "outputs", stop)
GROUP, BASELINE = "nsa_lab.health.model_runs.group_runs", "nsa_lab.health.model_runs.find_baseline"
case("compare", "runs", f"compare a={{run}} {OUT}", GROUP, lambda runs, named, *_: "a" in named, stop)
case("compare", "outputs", f"compare {{run}} {OUT}", GROUP, lambda runs, *_: runs[0].parent.name == "outputs", stop)
case("compare", "against", f"compare {{run}} {OUT} --against base", BASELINE, lambda models, name: name == "base", stop)
case(
    "compare",
    "as_json",
    f"compare {{run}} {OUT} --json",
    "nsa_lab.cli.inspect_commands.dump_json",
    lambda value: value["v"] == 1,
    "{}",
)
for name, options, check in (
    ("runs", "", lambda history, page, record_only: history.run.startswith("fake")),
    ("outputs", "", lambda history, page, record_only: history.run_dir.parent.name == "outputs"),
    ("page", "--page {folder}/p.html", lambda history, page, record_only: page.name == "p.html"),
    ("record", "--record", lambda history, page, record_only: record_only),
):
    case("report", name, f"report {{run}} {OUT} {options}", "nsa_lab.report.write_report", check, stop)
CSV = "nsa_lab.runs.csv_export.write_csv"
case("export", "run", f"export {{run}} {OUT} --csv", CSV, lambda history, file: history.run.startswith("fake"), 3)
case(
    "export",
    "outputs",
    f"export {{run}} {OUT} --csv",
    CSV,
    lambda history, file: history.run_dir.parent.name == "outputs",
    3,
)
case("export", "csv", f"export {{run}} {OUT} --csv", CSV, lambda history, file: True, 3)
case(
    "export",
    "into",
    f"export {{run}} {OUT} --csv --into {{folder}}/t.csv",
    CSV,
    lambda history, file: file.name.endswith("t.csv"),
    3,
)

# Options that go to a second function: in another mode of the command, or to a check before it starts.
for name, options, check in (
    ("run: table", "{run}", lambda run: run.name.startswith("fake")),
    ("outputs: table", "{run}", lambda run: run.parent.name == "outputs"),
):
    case("status", name, f"status {options} {OUT}", "nsa_lab.cli.status_table.build_run_table", check, stop)
for name, options, check in (
    ("outputs: runs", "", lambda folder, width, recorded: folder.name == "outputs"),
    ("recorded: table", "--recorded", lambda folder, width, recorded: recorded),
):
    case("status", name, f"status {OUT} {options}", "nsa_lab.cli.status_table.render_runs", check, stop)
for name, options, check in (
    ("runs: compared", "", lambda runs, page: len(runs) == 2),
    ("outputs: compared", "", lambda runs, page: page.parent.name == "outputs"),
    ("page: compared", "--page {folder}/p.html", lambda runs, page: page.name == "p.html"),
):
    case("report", name, f"report {{run}} {{run}} {OUT} {options}", "nsa_lab.report.write_comparison", check, stop)
