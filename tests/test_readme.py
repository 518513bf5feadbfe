"""The README can be followed as it is written: its code runs, its commands exist, and what it points at is there."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from nsa_lab import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
SNIPPETS = [text for language, text in BLOCKS if language == "python"]
LINES = [line for language, text in BLOCKS if not language for line in text.splitlines()]
COMMANDS = [
    shlex.split(line, comments=True) for line in LINES if line.startswith(("nsa-lab ", "make ", "papermill ", "source "))
]
LINKS = sorted({link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link})


def test_the_readme_has_what_these_tests_look_for() -> None:
    assert SNIPPETS and "from nsa_lab import" in SNIPPETS[0]
    assert {command[0] for command in COMMANDS} == {"nsa-lab", "make", "papermill", "source"}
    assert len(LINKS) > 5


@pytest.mark.slow
def test_each_snippet_runs_as_pasted() -> None:
    """Each with names of its own, in one interpreter: what it costs is importing torch."""
    pasted = f"for snippet in {SNIPPETS!r}: exec(snippet, {{'__name__': '__main__'}})"
    done = subprocess.run(
        [sys.executable, "-c", pasted], capture_output=True, text=True, cwd=ROOT, timeout=300, check=False
    )
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("command", [c for c in COMMANDS if c[0] == "nsa-lab"], ids=" ".join)
def test_a_command_of_the_command_line_is_understood(command: list[str]) -> None:
    """Parsed down to the last option, and not carried out."""
    group, arguments = typer.main.get_command(cli.app), command[1:]
    while arguments and arguments[0] in getattr(group, "commands", {}):
        group, arguments = group.commands[arguments[0]], arguments[1:]
    if command[1:] != ["--version"]:
        assert not hasattr(group, "commands"), f"{command[1]}: no such command"
        group.make_context(command[1], arguments)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c[0] == "make"], ids=" ".join)
def test_a_target_is_in_the_makefile(command: list[str]) -> None:
    assert re.search(rf"^{command[1]}:.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c[0] == "papermill"], ids=" ".join)
def test_a_notebook_that_papermill_is_given_is_there(command: list[str]) -> None:
    given = [word for word in command[1:] if "/" in word]
    assert given and all((ROOT / word).is_file() for word in given)


def test_a_number_of_thousands_is_written_in_one_way() -> None:
    prose = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
    assert re.findall(r"\d,\d{3}\b", prose) and not re.findall(r"\b\d{1,3} \d{3}\b", prose)


@pytest.mark.parametrize("link", LINKS)
def test_a_link_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


def test_every_extra_that_is_offered_exists() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    offered = set(re.findall(r"'\.\[([\w,]+)\]'", README))
    assert offered and offered <= set(extras)


def test_every_parameter_file_that_a_command_names_is_there() -> None:
    named = {c[2] for c in COMMANDS if c[0] == "nsa-lab" and c[1] in ("run", "train", "plan", "preflight")}
    assert named and all((ROOT / f"params/{name}.yaml").is_file() for name in named)


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/decisions.md", "CHANGELOG.md"])
def test_a_path_that_a_page_names_is_there(page: str) -> None:
    """Paths of the checkout, as they are named between backquotes."""
    text = (ROOT / page).read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:nsa_lab|tests|docs|params|notebooks|\.github)/[\w./-]+)`", text))
    assert named and not {path for path in named if not (ROOT / path).exists()}
