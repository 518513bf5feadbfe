"""Parameters of a notebook: papermill's values are refused before they are used, and the message names the right form."""

from __future__ import annotations

import nbformat
import papermill
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbformat.v4 import new_code_cell, new_notebook
from papermill.exceptions import PapermillExecutionError

from nsa_lab.runs import resolve
from nsa_lab.workbook import load_ipython_extension, parameters
from nsa_lab.workbook.notebook import Stop

CELL = """name: str = "smoke"  # base configuration
train: dict = {}  # settings
new_run: bool = False
seed: int = 0
count: int = 400
target: float = 0.5
lengths: list = [1, 33]
show: bool = None
anything: object = None
names: list = ["a"]
rate: float = 5e-3 * 2
"""

WRONG = {
    "trian = {'steps': 6}": "did you mean train?",
    "train.steps = 6": 'use -y "train: {steps: 6}"',
    "train.stepz = 6": 'use -y "train: {steps: 6}"',
    "steps = 6": 'use -y "train: {steps: 6}"',
    "no.such.name = 6": "the parameters are name, train, ",
    "new-run = True": "did you mean new_run?",
    "class = 1": "the parameters are name, train, ",
    'new_run = "false"': "use -p new_run False",
    'new_run = "yes"': "use -p new_run True",
    "new_run = 1": "use -p new_run True",
    "new_run = None": "expected True or False",
    'train = "steps: 6"': 'use -y "train: {steps: 6}"',
    "train = None": "expected a mapping; use its default",
    "name = 3": "use -r name 3",
    "name = True": "expected text",
    "seed = 1.5": "use -p seed 0",
    "seed = True": "expected an integer",
    'seed = "3"': "expected an integer",
    "seed = -3": "expected an integer, at least 0; use -p seed 0",
    "count = -4": "expected an integer, above 0; use -p count 400",
    "count = 0": "expected an integer, above 0; use -p count 400",
    'target = "x"': "use -p target 0.5",
    "target = float('nan')": "target = nan: expected a number, above 0",
    "target = float('-inf')": "target = -inf: expected a number, above 0",
    "lengths = 512": 'use -y "lengths: [512]"',
    'lengths = [1, "b"]': "expected a list like [1, 33]",
    """names = 'a"b'""": """use -y 'names: ['"'"'a"b'"'"']'""",
    "rate = 'x'": "use -p rate 0.01",
    "lengths = [1, -33]": "expected a list like [1, 33], above 0; use",
    'show = "false"': "use -p show False",
}
RIGHT = (
    "name = 'ci'",
    "PAPERMILL_OUTPUT_PATH = 'out.ipynb'",  # --inject-paths
    "train = {'steps': 6}",
    "new_run = True",
    "train = {'steps': float('inf'), 'lr': [float('nan'), -1e30]}",  # load_configuration refuses it
    "seed = 3",
    "count = 1",
    "target = 1",
    "lengths = []",
    "lengths = [5]",
    "show = None",
    "show = True",
    "anything = 'text'",
)


@pytest.fixture
def check() -> parameters.ParameterCheck:
    """Return the check of a notebook whose parameters cell has run."""
    check = parameters.ParameterCheck()
    assert check(CELL.splitlines(keepends=True)) == CELL.splitlines(keepends=True)
    return check


def test_every_parameter_of_the_notebooks_has_a_type_that_is_checked() -> None:
    for path in sorted((resolve.get_root() / "notebooks").glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        (cell,) = [cell for cell in cells if "parameters" in cell.metadata.get("tags", [])]
        found = parameters.parse_parameters(cell.source)
        assert found and [p.name for p in found if p.kind not in parameters.KINDS] == [], path.name


def inject(check: parameters.ParameterCheck, *assignments: str) -> list[str]:
    return check(["# Parameters\n", *(f"{assignment}\n" for assignment in assignments)])


def test_wrong_names_and_values_are_refused_with_the_right_form(check) -> None:
    for assignment, answer in WRONG.items():
        with pytest.raises(Stop) as stop:
            inject(check, assignment)
        (line,) = str(stop.value).splitlines()
        assert line.startswith(assignment.partition(" = ")[0]) and answer in line, line
    with pytest.raises(Stop) as stop:
        inject(
            check,
            "seed = 1",
            *[assignment for assignment in WRONG if "-run" not in assignment and "class" not in assignment],
        )
    assert len(str(stop.value).splitlines()) == len(WRONG) - 2, "one line per problem"


def test_right_values_are_unchanged(check) -> None:
    for assignment in RIGHT:
        assert inject(check, assignment) == ["# Parameters\n", f"{assignment}\n"]


def test_every_default_satisfies_its_annotation_and_every_suggestion_is_accepted(check) -> None:
    """The suggested form is parsed as papermill parses its options."""
    import shlex

    import yaml
    from papermill.cli import _resolve_type

    n_checked = 0
    for assignment in WRONG:
        with pytest.raises(Stop) as stop:
            inject(check, assignment)
        _, found, form = str(stop.value).partition("; use -")
        if not found:
            continue
        option, *values = shlex.split(f"-{form}")
        given = (
            yaml.safe_load(values[0])
            if option == "-y"
            else {values[0]: _resolve_type(values[1]) if option == "-p" else values[1]}
        )
        inject(check, *(f"{name} = {value!r}" for name, value in given.items()))
        n_checked += 1
    assert n_checked >= 15


def test_other_cells_are_unchanged_and_do_not_replace_the_parameters(check) -> None:
    for cell in (
        "x = 3",
        "%matplotlib inline",
        "def f(:",
        "",
        "# Parameters of the plot\nwidth = 3",
        "rows: list = make()",
    ):
        assert check([cell]) == [cell]
    with pytest.raises(Stop):
        inject(check, "trian = {}")


def test_an_edited_parameters_cell_is_checked(check) -> None:
    with pytest.raises(Stop, match="expected True or False"):
        check([CELL.replace("= False", '= "false"')])
    with pytest.raises(Stop, match="expected an integer"):
        check(["seed: int = 1.5\n"])


def test_without_a_parameters_cell_nothing_is_checked() -> None:
    assert inject(parameters.ParameterCheck(), "trian = {}")


def test_the_extension_is_registered_once_and_stops_the_cell() -> None:
    shell = InteractiveShell()
    for _ in range(2):
        load_ipython_extension(shell)
    assert sum(isinstance(each, parameters.ParameterCheck) for each in shell.input_transformers_cleanup) == 1
    assert shell.run_cell(CELL).success
    result = shell.run_cell("# Parameters\ntrain.steps = 6\n")
    assert isinstance(result.error_before_exec, Stop)
    assert shell.run_cell("# Parameters\nseed = 5\n").success and shell.user_ns["seed"] == 5


@pytest.mark.slow
def test_papermill_ends_with_the_line(tmp_path) -> None:
    cells = [new_code_cell("%load_ext nsa_lab.workbook"), new_code_cell(CELL, metadata={"tags": ["parameters"]})]
    nbformat.write(new_notebook(cells=[*cells, new_code_cell("print(train)")]), tmp_path / "a.ipynb")
    for wrong in ({"trian": {"steps": 6}}, {"train.steps": 6}, {"new_run": "false"}):
        with pytest.raises(PapermillExecutionError) as error:
            papermill.execute_notebook(
                tmp_path / "a.ipynb",
                tmp_path / "b.ipynb",
                wrong,
                kernel_name="python3",
                language="python",
                progress_bar=False,
            )
        assert error.value.ename == "Stop" and error.value.exec_count == 3 and str(error.value.evalue).startswith(*wrong)
