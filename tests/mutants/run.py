"""Plant one fault at a time into the library and run the tests on it: `python tests/mutants/run.py [part of a name ...]`.

A mutant is a piece of source text and its replacement. Each runs in a forked process that imports the changed module, until
the first test fails. Prints a line per mutant, `caught by <test>` or `SURVIVED`. The exit status is 1 if a mutant survives, if
one does not apply to the source any more, or if the unchanged library fails. A mutant of tier "test" must be caught without
the tests that only `make nightly` runs.

    --check        only report the mutants whose text does not occur exactly once in its module, and missing tests
    --workers N    number of processes (default: the CPUs that this process may use)
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.machinery
import importlib.util
import io
import linecache
import multiprocessing
import os
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
# Started as a script, Python puts this folder first, and its files would hide packages of the same names.
sys.path[:] = [str(ROOT / "tests"), *(p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent)]

from mutants import MUTANTS
from mutants.mutant import Mutant
from mutants.suites import QUICK, SUITES


def import_slow_packages() -> None:
    """Import packages that are slow to import, but not the library; every fork inherits them."""
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import torch
    import yaml  # noqa: F401

    if not torch.cuda.is_available():
        # As in tests/conftest.py, which comes too late here: Triton reads this once, and torch's compiler imports Triton.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch._dynamo


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module from changed text."""

    def __init__(self, name: str, path: Path, text: str) -> None:
        super().__init__(name, str(path))
        self.text = text

    def get_code(self, fullname: str) -> object:
        # Triton's interpreter reads the source of a kernel through this cache, which keeps an entry without a date.
        linecache.cache[self.path] = (len(self.text), None, self.text.splitlines(keepends=True), self.path)
        return compile(self.text, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, path: Path, text: str) -> None:
        self.name, self.path, self.loader = name, path, _Loader(name, path, text)

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_file_location(name, self.path, loader=self.loader) if name == self.name else None


class _FirstFailure:
    """A pytest plugin that records the first failure, of a test or of the collection. Fast tests run first."""

    name: str | None = None
    broken: str | None = None

    def pytest_collection_modifyitems(self, items: list) -> None:
        """The fast tests of a file before its slow ones: most faults are caught by then."""
        items.sort(key=lambda item: item.get_closest_marker("slow") is not None)

    def pytest_runtest_logreport(self, report: object) -> None:
        if report.failed and self.name is None:
            self.name = report.nodeid

    def pytest_collectreport(self, report: object) -> None:
        if report.failed and self.broken is None:
            self.broken = f"{report.nodeid}: {str(report.longrepr).strip().splitlines()[-1]}"


def source(module: str) -> Path:
    path = ROOT / "nsa_lab" / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def run_tests(files: list[str], tier: str = "test") -> _FirstFailure:
    """Run the tests of this tier in this process, file by file, until one fails."""
    import looping
    import pytest

    looping.stop_at_first = True
    first = _FirstFailure()
    options = [
        "-x",
        "-q",
        "-k",
        QUICK,
        "--rootdir",
        str(ROOT),
        "-p",
        "no:cacheprovider",
        "-p",
        "no:nbval",
        "--hypothesis-profile=mutants",
    ]
    if tier == "test":
        options += ["-m", "not nightly"]
    for file in files:
        # A separate folder, because pytest numbers the folders of all processes and warns of conflicts.
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), TemporaryDirectory() as folder:
            code = pytest.main([*options, f"--basetemp={folder}/tests", str(ROOT / file)], plugins=[first])
        if first.name or first.broken:
            break
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            first.broken = f"pytest ended with {code!r} on {file}"
            break
    return first


def try_mutant(mutant: Mutant) -> tuple[bool, str]:
    """Return whether the tests caught it, and the result as text. Runs in a fork that has not imported the library."""
    path = source(mutant.module)
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        return False, f"DOES NOT APPLY: its text occurs {text.count(mutant.old)} times in {path.name}"
    sys.meta_path.insert(0, _Finder(f"nsa_lab.{mutant.module}", path, text.replace(mutant.old, mutant.new)))
    first = run_tests(SUITES[mutant.module], mutant.tier)
    if first.broken:
        return False, f"BROKEN: {first.broken}"
    return (True, f"caught by {first.name}") if first.name else (False, "SURVIVED")


def try_unchanged(test: str) -> tuple[bool, str]:
    first = run_tests([test])
    return (False, f"FAILS: {first.name or first.broken}") if first.name or first.broken else (True, "passes")


def attempt(task: Mutant | str) -> tuple[str, bool, str]:
    """Return the name of the task, whether its result is as it should be, and the result with the duration.

    A task is a mutant, or the tests of a file on the unchanged library.
    """
    started = time.monotonic()
    name = task.name if isinstance(task, Mutant) else f"unchanged: {task.removeprefix('tests/')}"
    is_good, result = try_mutant(task) if isinstance(task, Mutant) else try_unchanged(task)
    return name, is_good, f"{time.monotonic() - started:4.0f} s  {result}"


def list_stale() -> list[str]:
    """Return the mutants whose text does not occur exactly once in its module."""
    stale = []
    for mutant in MUTANTS:
        path = source(mutant.module)
        count = path.read_text(encoding="utf-8").count(mutant.old) if path.exists() else 0
        if count != 1:
            stale.append(f"{mutant.module}: {mutant.name}: found {count} times")
    return stale


def list_missing_tests() -> list[str]:
    """Return the files and tests in suites.py that do not exist, and the modules with mutants that have no tests there."""
    missing = [f"{module}: no tests in suites.py" for module in sorted({m.module for m in MUTANTS} - SUITES.keys())]
    for name in sorted({name for names in SUITES.values() for name in names}):
        file, _, test = name.partition("::")
        path = ROOT / file
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        if not path.is_file() or (test and test.split("[")[0] not in functions):
            missing.append(name)
    return missing


def count_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def report_stale() -> int:
    stale, missing = list_stale(), list_missing_tests()
    summary = f"{len(MUTANTS)} mutants, {len(stale)} do not apply, {len(missing)} tests missing"
    print(*stale, *missing, summary, sep="\n")
    return 1 if stale or missing else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run the mutants whose module and name contain one of these texts")
    parser.add_argument("--check", action="store_true", help="run no test; report what does not apply")
    parser.add_argument("--workers", type=int, default=count_cpus(), help="number of processes")
    args = parser.parse_args()
    if args.check:
        return report_stale()
    import_slow_packages()
    started = time.monotonic()
    mutants = [m for m in MUTANTS if not args.words or any(word in f"{m.module} {m.name}" for word in args.words)]
    # The longest first, so that none is left over at the end.
    mutants.sort(key=lambda m: m.tier != "nightly")
    # A test that fails without a mutant would catch every one.
    tests = dict.fromkeys(test for names in SUITES.values() for test in names)
    tasks = [*([] if args.words else tests), *mutants]
    failed = 0
    # One fork per task: a mutated module must not be found imported by the next.
    with multiprocessing.get_context("fork").Pool(args.workers, maxtasksperchild=1) as pool:
        for name, is_good, result in pool.imap_unordered(attempt, tasks, chunksize=1):
            failed += not is_good
            print(f"{name:<66} {result}", flush=True)
    print(f"{len(mutants)} mutants, {failed} lines to look at, {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
