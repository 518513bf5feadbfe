"""Recorders in place of the functions that a command calls, and the list of cases of `test_options.py`.

A case is a command line, the function that the command calls, and a check of the values that arrive there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_run import write_run


class Recorder:
    """Stand-in for a function: records its calls, and returns `result`."""

    def __init__(self, result: Any = None) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.result = result

    def __call__(self, *given: Any, **named: Any) -> Any:
        self.calls.append((given, named))
        return self.result(*given, **named) if callable(self.result) else self.result


class Workspace:
    """A folder with a finished run and its name, a second run, a text and a params file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.outputs = folder, folder / "outputs"
        self.run = write_run(self.outputs)
        self.text = folder / "about.md"
        self.text.write_text("some text")
        self.params = folder / "params.yaml"
        self.params.write_text("train: {steps: 7, warmup_steps: 1}\nruntime: {device: cpu}\n")
        self.sweep = folder / "rates.yaml"
        self.sweep.write_text(f"preset: '{self.params}'\nvariants: {{one: }}\nseeds: [0, 1]\n")

    def format(self, text: str) -> str:
        names = ("folder", "outputs", "text", "params", "sweep")
        return text.format(run=self.run.name, **{name: getattr(self, name) for name in names})


# (command line, function to replace, its result, check of the call) by command and parameter. A parameter that goes to
# several functions has several cases, "step", "step: checked"; the text after the colon names the function.
Case = tuple[str, str, Any, Callable[..., bool]]
CASES: dict[str, dict[str, Case]] = {}
OUT = "--outputs {outputs}"


def case(command: str, name: str, line: str, function: str, check: Callable[..., bool], result: Any = None) -> None:
    CASES.setdefault(command, {})[name] = (line, function, result, check)


class Stopped(Exception):
    """Ends a command where its option has arrived."""


def stop(*_: Any, **__: Any) -> Any:
    raise Stopped
