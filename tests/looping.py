"""Run the cases of `pytest.mark.parametrize` in a loop: one test instead of hundreds, and the same proof."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

stop_at_first = False
"""True: the first case that fails ends the loop. tests/mutants/run.py sets it."""


def tiered(cases: Iterable[tuple[Any, ...]], *, nightly: Callable[..., bool]) -> list[Any]:
    """Return the cases, with the mark `nightly` on those for which `nightly(*case)` is true."""
    return [pytest.param(*case, marks=[pytest.mark.nightly] * nightly(*case)) for case in cases]


def looped(test: Callable[..., None]) -> Callable[..., None]:
    """Decorate a parametrized test, above its `parametrize` decorators: all cases with the same marks become one test.

    Cases with other marks, such as `pytest.param(x, marks=pytest.mark.nightly)`, form another test, so that the cases of a
    function can be in different tiers. A case that fails does not stop the loop, and the failure names all such cases. To
    run a single case, remove this decorator and use `-k`.

    Each case gets a new `monkeypatch`, and a new `tmp_path` if the test has no other fixture. All other fixtures are shared
    by the cases, so do not use this for a test that changes one of them.
    """
    marks = [mark for mark in test.pytestmark if mark.name == "parametrize"]
    test.pytestmark = [mark for mark in test.pytestmark if mark.name != "parametrize"]
    groups: dict[str, tuple[list[pytest.MarkDecorator], list[tuple[str, dict[str, Any]]]]] = {}
    names: set[str] = set()
    for axes in itertools.product(*(_list_cases(mark) for mark in reversed(marks))):
        values = {name: value for _, arguments, _ in axes for name, value in arguments.items()}
        case_marks = {mark.name: mark for _, _, given in axes for mark in given}
        if {"slow", "nightly"} <= case_marks.keys():
            del case_marks["slow"]
        group = groups.setdefault("-".join(sorted(case_marks)) or "base", ([*case_marks.values()], []))
        group[1].append(("-".join(case_id for case_id, _, _ in axes), values))
        names |= values.keys()

    @functools.wraps(test)
    def run(looped_cases: list[tuple[str, dict[str, Any]]], **fixtures: Any) -> None:
        failed: list[str] = []
        first: BaseException | None = None
        for number, (case_id, values) in enumerate(looped_cases):
            with pytest.MonkeyPatch.context() as patch:
                own = dict(fixtures)
                if "monkeypatch" in own:
                    own["monkeypatch"] = patch
                if "tmp_path" in own and own.keys() <= {"monkeypatch", "tmp_path"}:
                    own["tmp_path"] = own["tmp_path"] / f"case-{number}"
                    own["tmp_path"].mkdir()
                try:
                    test(**own, **values)
                except (Exception, pytest.fail.Exception) as error:
                    if stop_at_first:
                        raise
                    failed.append(case_id)
                    first = first or error
        if failed:
            raise AssertionError(f"{len(failed)} of {len(looped_cases)} cases failed: {', '.join(failed)}") from first

    parameters = [p for name, p in inspect.signature(test).parameters.items() if name not in names]
    if len(groups) == 1:
        ((common_marks, cases),) = groups.values()
        only = functools.wraps(test)(lambda **fixtures: run(looped_cases=cases, **fixtures))
        only.__signature__ = inspect.Signature(parameters)
        for mark in common_marks:
            getattr(pytest.mark, mark.name)(*mark.args, **mark.kwargs)(only)
        return only
    added = inspect.Parameter("looped_cases", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = inspect.Signature([*parameters, added])
    params = [pytest.param(cases, marks=marks_of_group, id=group) for group, (marks_of_group, cases) in groups.items()]
    return pytest.mark.parametrize("looped_cases", params)(run)


def _list_cases(mark: pytest.Mark) -> Iterator[tuple[str, dict[str, Any], Sequence[Any]]]:
    """Yield (id, arguments, marks) of each case of a `parametrize` mark."""
    argnames, argvalues, *_ = mark.args
    assert "indirect" not in mark.kwargs, "looped: parameters of fixtures are not supported"
    names = argnames.replace(" ", "").split(",") if isinstance(argnames, str) else list(argnames)
    ids = mark.kwargs.get("ids")
    listed = None if ids is None or callable(ids) else list(ids)
    for number, given in enumerate(argvalues):
        case_id, case_marks = (listed[number] if listed else None), ()
        if hasattr(given, "marks"):
            case_id, case_marks, given = given.id or case_id, given.marks, given.values
        else:
            given = (given,) if len(names) == 1 else given
        if case_id is None:
            parts = [(ids(value) if callable(ids) else None) for value in given]
            case_id = "-".join(str(value if part is None else part)[:40] for value, part in zip(given, parts, strict=True))
        yield str(case_id), dict(zip(names, given, strict=True)), case_marks
