"""Mutants of nsa_lab/cli: one planted fault each."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant("cli: any number of ranks is started", "cli.common", "min=1, max=MAX_RANKS,", "min=1,"),
    Mutant("cli: a picture has any suffix", "cli.common", "file.suffix.lower() not in PICTURE_SUFFIXES", "False"),
    Mutant(
        "export: a run without steps is an empty table",
        "cli.inspect_commands",
        "if not len(history.steps) and not len(history.evaluations):",
        "if False:",
    ),
    Mutant("errors: any error is one of memory", "config.errors", "if not is_torch_error and not", "if False and not"),
    Mutant("cli: an empty path is the working directory", "cli.common", "if not str(text).strip():", "if False:"),
    Mutant(
        "bench: --layers is ignored",
        "cli.bench_commands",
        "layers=layers,",
        "layers=None,",
    ),
    Mutant(
        "plan: --tokens-per-s is not compared with the run",
        "cli.training_commands",
        "compare_plan_with_run(History.read(run_dir), tokens_per_s)",
        "compare_plan_with_run(History.read(run_dir))",
    ),
    Mutant(
        "evaluate: --windows is ignored with --blocks",
        "cli.model_commands",
        "blocks=blocks, texts=texts, windows=windows,",
        "blocks=blocks, texts=texts, windows=16,",
    ),
    Mutant(
        "options: an output file is not checked",
        "cli.common",
        "            check_output_file(file)\n",
        "            pass\n",
    ),
    Mutant(
        "generate: --tokens has no upper bound",
        "cli.model_commands",
        "tokens: Annotated[int, typer.Option(min=1, max=MAX_TOKENS,",
        "tokens: Annotated[int, typer.Option(min=1,",
    ),
    Mutant(
        "evaluate: a length has no upper bound", "cli.model_commands", "low <= int(text) <= MAX_TOKENS", "low <= int(text)"
    ),
    Mutant(
        "evaluate: a number of thousands of digits is parsed",
        "cli.model_commands",
        "len(text) <= len(str(MAX_TOKENS)) and ",
        "",
    ),
    Mutant(
        "health, compare, report: a run that cannot be read hides the others",
        "cli.common",
        "            print_usage_error(reason)\n",
        "            raise\n",
    ),
    Mutant(
        "health: a run that was not judged passes",
        "cli.inspect_commands",
        "if problems:  # not all runs were judged",
        "if False:",
    ),
    Mutant(
        "compare: a run that was not compared passes",
        "cli.inspect_commands",
        "if problems:  # not all runs were compared",
        "if False:",
    ),
    Mutant(
        "compare: the first unreadable run ends the command",
        "cli.inspect_commands",
        ", partial(read_each, problems=problems))",
        ")",
    ),
    Mutant(
        "report: a run that is not on the page passes",
        "cli.inspect_commands",
        "if problems:  # the page does not show all runs",
        "if False:",
    ),
    Mutant(
        "status: a missing folder has no runs",
        "cli.inspect_commands",
        "folder = resolve.get_readable_outputs_dir(outputs)",
        "folder = resolve.get_outputs_dir(outputs)",
    ),
    Mutant(
        "report: --record is ignored",
        "cli.inspect_commands",
        "record_only=record)",
        "record_only=False)",
    ),
]
