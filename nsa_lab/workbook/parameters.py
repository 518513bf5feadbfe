"""Check the parameters of a notebook before papermill's values are used. Load it above the parameters cell:

    %load_ext nsa_lab.workbook

The parameters cell consists of annotated assignments, for example `new_run: bool = False`. papermill adds a cell of
assignments below it. Both cells are checked when they are about to run, because papermill itself checks nothing: a misspelt
name would have no effect, the text "false" would be true, and `train.steps = 6` would be an AttributeError.

A wrong name or value raises `Stop` with one line per problem, which ends with the option of papermill to use.
"""

from __future__ import annotations

import ast
import difflib
import math
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nsa_lab.config import RunConfig, list_keys
from nsa_lab.config.errors import VALUE_REPR
from nsa_lab.workbook.notebook import Stop

INJECTED_HEADER = "# Parameters"  # first line of the cell that papermill adds
PATH_NAMES = ("PAPERMILL_INPUT_PATH", "PAPERMILL_OUTPUT_PATH")  # assignments that papermill itself adds for --inject-paths

# Text of an annotation: types of its values, their description, and papermill's option for a value.
KINDS: dict[str, tuple[tuple[type, ...], str, str]] = {
    "bool": ((bool,), "True or False", "-p {name} True"),
    "int": ((int,), "an integer", "-p {name} {default}"),
    "float": ((int, float), "a number", "-p {name} {default}"),
    "str": ((str,), "text", "-r {name} {value}"),
    "list": ((list,), "a list", "-y {value}"),
    "dict": ((dict,), "a mapping", "-y {value}"),
}
# Example of a setting for each section of a configuration.
SECTION_EXAMPLES = {
    "model": "dim: 256",
    "nsa": "w: 256",
    "runtime": "device: cpu",
    "train": "steps: 6",
    "data": "source: stdlib",
}


@dataclass(frozen=True)
class NotebookParameter:
    """An annotated assignment of the parameters cell. `annotation`: its text, `default`: its value."""

    name: str
    annotation: str
    default: Any

    @property
    def kind(self) -> str:
        return self.annotation.partition("[")[0]

    def find_problem(self, value: Any) -> str | None:
        """Return why `value` has the wrong type, and the right form; None if it is right or the annotation says nothing.

        None is right if it is the default. papermill does not read the annotation `bool | None`.
        """
        if self.kind not in KINDS or (value is None and self.default is None):
            return None
        types, description, option = KINDS[self.kind]
        has_type = isinstance(value, types) and (bool in types or not isinstance(value, bool))
        if has_type and isinstance(value, list) and self.default:
            has_type, description = _have_one_type([*self.default, *value]), f"a list like {self.default}"
        numbers: list[Any] = [n for n in (value if isinstance(value, list) else [value]) if type(n) in (int, float)]
        if has_type and not all(map(self._has_range, numbers)):
            has_type, description = False, f"{description}, {'at least' if self._is_from_zero else 'above'} 0"
        if has_type:
            return None
        return f"{self.name} = {VALUE_REPR.repr(value)}: expected {description}; use {self._format_option(option, value)}"

    @property
    def _is_from_zero(self) -> bool:
        """Return whether 0 is a value: the default of an index, a seed, or a number that is found otherwise."""
        return self.default == 0

    def _has_range(self, value: float) -> bool:
        """Return whether a number is finite and not negative: counts, indices, seeds and limits are all parameters."""
        return math.isfinite(value) and (value >= 0 if self._is_from_zero else value > 0)

    def _format_option(self, option: str, value: Any) -> str:
        if self.kind == "bool":
            is_false = str(value).lower() in ("false", "no", "off", "0", "0.0", "none", "")
            return f"-p {self.name} {not is_false}"
        if value is None:
            return f"its default, without an option for {self.name}"
        default = self.default
        if self.kind == "list":
            default = [value] if default and _have_one_type([*default, value]) else default
        value = shlex.quote(str(value))
        if self.kind in ("list", "dict"):
            example = default if self.kind == "list" else f"{{{SECTION_EXAMPLES.get(self.name, 'key: value')}}}"
            value = _quote(f"{self.name}: {example}")
        return option.format(name=self.name, default=default, value=value)


class ParameterCheck:
    """Input transformer for IPython. It returns every cell unchanged, or raises `Stop`."""

    has_side_effects = True  # IPython then calls it only for cells that are about to run

    def __init__(self) -> None:
        self._known: dict[str, NotebookParameter] = {}

    def __call__(self, lines: list[str]) -> list[str]:
        source = "".join(lines)
        if self._known and source.partition("\n")[0] == INJECTED_HEADER:
            _stop(self._find_injected_problems(source))
        elif parameters := parse_parameters(source):
            self._known = {parameter.name: parameter for parameter in parameters}
            _stop([p.find_problem(p.default) for p in parameters])
        return lines

    def _find_injected_problems(self, source: str) -> list[str | None]:
        try:
            statements = ast.parse(source).body
        except SyntaxError as error:
            name = source.splitlines()[(error.lineno or 1) - 1].partition(" = ")[0]
            return [f"{name}: not the name of a parameter; {self._suggest(name)}"]
        problems: list[str | None] = []
        for statement in statements:
            if not isinstance(statement, ast.Assign):
                continue  # added by hand
            name, value = ast.unparse(statement.targets[0]), _read_injected(statement.value)
            if name in PATH_NAMES:
                continue
            if name in self._known:
                problems.append(self._known[name].find_problem(value))
            else:
                problems.append(f"{name} = {VALUE_REPR.repr(value)}: {self._describe_unknown(name, value)}")
        return problems

    def _describe_unknown(self, name: str, value: Any) -> str:
        """Return the problem of a name that the notebook does not define, and the right form."""
        sections = [known for known, parameter in self._known.items() if parameter.kind == "dict"]
        settings = [setting for setting in list_keys(RunConfig) if setting.partition(".")[0] in sections]
        if "." in name and (nearest := difflib.get_close_matches(name, settings, n=1)):
            return f"papermill sets whole parameters; use {_format_setting(nearest[0], value)}"
        setting = next((setting for setting in settings if setting.partition(".")[2] == name), None)
        if setting:
            return f"it is a setting of {setting.partition('.')[0]}; use {_format_setting(setting, value)}"
        return f"this notebook has no such parameter; {self._suggest(name)}"

    def _suggest(self, name: str) -> str:
        nearest = difflib.get_close_matches(name, self._known, n=1)
        return f"did you mean {nearest[0]}?" if nearest else f"the parameters are {', '.join(self._known)}"


def parse_parameters(source: str) -> list[NotebookParameter]:
    """Return the parameters of a cell that consists of annotated constants; an empty list for any other cell."""
    try:
        statements = ast.parse(source).body
    except SyntaxError:
        return []
    parameters = []
    for statement in statements:
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value):
            return []
        try:
            default = _evaluate_constant(statement.value)
        except (ArithmeticError, TypeError, ValueError):
            return []
        annotation = statement.annotation
        text = annotation.value if isinstance(annotation, ast.Constant) else ast.unparse(annotation)
        parameters.append(NotebookParameter(statement.target.id, str(text), default))
    return parameters


def _evaluate_constant(node: ast.expr) -> Any:
    """Return the value of a literal or of arithmetic with literals, such as 2 * 1024. Raises ValueError for others."""
    if any(isinstance(part, ast.Name | ast.Call | ast.Attribute | ast.Subscript | ast.Await) for part in ast.walk(node)):
        raise ValueError("not a constant")
    return eval(compile(ast.Expression(node), "<parameters>", "eval"), {"__builtins__": {}})


def register(cleanup_transforms: list[Callable[[list[str]], list[str]]]) -> None:
    """Add the check to the input transformers of a shell, once."""
    if not any(isinstance(transform, ParameterCheck) for transform in cleanup_transforms):
        cleanup_transforms.insert(0, ParameterCheck())


def _quote(text: str) -> str:
    """Return `text` as one word of a shell, in double quotes where nothing in it has a meaning there."""
    return shlex.quote(text) if set('"$`\\!') & set(text) else f'"{text}"'


def _stop(problems: list[str | None]) -> None:
    if found := [problem for problem in problems if problem]:
        raise Stop("\n".join(found))


def _read_injected(node: ast.expr) -> Any:
    return ast.literal_eval(_FloatCalls().visit(node))


class _FloatCalls(ast.NodeTransformer):
    """Replaces float('nan') and float('inf') by their values. Otherwise papermill writes literals."""

    def visit_Call(self, node: ast.Call) -> ast.Constant:
        return ast.Constant(float(ast.literal_eval(node.args[0])))


def _have_one_type(values: list[Any]) -> bool:
    return len({type(value) for value in values}) <= 1


def _format_setting(setting: str, value: Any) -> str:
    """Return papermill's option for one setting of a section."""
    section, _, key = setting.partition(".")
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f'-y "{section}: {{{key}: {text}}}"'
