"""The documentation covers the public names and the configuration, checked from its sources without building the site."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import pydantic
import pytest

import nsa_lab
from nsa_lab import config

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs" / "_ext"))

import api_reference  # noqa: E402
import config_reference  # noqa: E402
import docstring_text  # noqa: E402
import notebook_pages  # noqa: E402

# Packages without an API page: the command line has a page of commands, and models/ has no code.
UNDOCUMENTED_PACKAGES = {"nsa_lab.cli", "nsa_lab.models"}


def list_imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of every name that a file imports from nsa_lab; the name can be a submodule."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "nsa_lab":
            yield from ((node.module or "", alias.name) for alias in node.names)


def test_every_package_has_an_api_page() -> None:
    packages = {f"nsa_lab.{path.parent.name}" for path in ROOT.glob("nsa_lab/*/__init__.py")}
    assert packages - UNDOCUMENTED_PACKAGES <= set(api_reference.list_documented_modules())


def test_api_pages_cover_the_public_names() -> None:
    """Every name of `nsa_lab.__all__` is on the page of nsa_lab, and documented in the package that it is imported from."""
    documented = api_reference.list_documented_modules()
    names = api_reference.list_public_names("nsa_lab")
    assert names == nsa_lab.__all__
    for name in names:
        module = api_reference.find_home("nsa_lab", name).rpartition(".")[0]
        assert module in documented and name in api_reference.list_public_names(module), name


def test_api_pages_cover_the_exported_names_of_every_package() -> None:
    """The names that a page shows are `__all__` of the package; a name that is not there is public in no page."""
    for module in api_reference.list_documented_modules():
        assert api_reference.find_file(module).is_file(), f"{module}: no such module"
        for name in api_reference.list_public_names(module):
            definition = api_reference.find_definition(module, name)
            assert api_reference.find_file(definition).is_file(), f"{module}.{name}"


def test_api_pages_cover_the_imports_of_the_notebooks() -> None:
    documented, missing = api_reference.list_documented_modules(), set()
    for notebook in sorted(ROOT.glob("notebooks/[0-9]*.py")):
        for module, name in list_imports(notebook):
            exporters = {module, module.rpartition(".")[0]} & set(documented)
            is_exported = any(name in api_reference.list_public_names(exporter) for exporter in exporters)
            if f"{module}.{name}" not in documented and not is_exported:
                missing.add(f"{notebook.name}: {module}.{name}")
    assert not missing, "add them to a page of docs/api:\n" + "\n".join(sorted(missing))


def test_configuration_page_covers_every_key() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    sections = [section for section in config_reference.SECTIONS if f":::{{config-section}} {section}\n" in page]
    shown = {key.attribute: key for section in sections for key in config_reference.list_keys(section)}
    classes = [getattr(config, name) for name in config.__all__]
    models = [model for model in classes if isinstance(model, type) and issubclass(model, pydantic.BaseModel)]
    assert len(models) >= 8
    for model in models:
        for name in model.model_fields:
            owner = next(base for base in model.__mro__ if name in inspect.get_annotations(base))
            key = shown[f"nsa_lab.config.{owner.__name__}.{name}"]
            assert key.type and key.default and key.meaning, f"{key.name}: give the field a description"


def test_rows_show_type_limits_and_default() -> None:
    rows = {key.name: key for section in config_reference.SECTIONS for key in config_reference.list_keys(section)}
    assert (rows["nsa.l"].type, rows["nsa.l"].default) == ("int, ≥ 1", "32")
    assert (rows["nsa.phi"].type, rows["nsa.phi"].default) == ("avg | linear | mlp | pool", "avg")
    assert (rows["train.decay_share"].type, rows["train.decay_share"].default) == ("float, > 0, ≤ 1", "0.2")
    assert (rows["train.token_budget"].type, rows["train.token_budget"].default) == ("int | None, ≥ 1", "None")
    assert (rows["runtime.compile"].type, rows["runtime.compile"].default) == ("bool", "false")
    assert (rows["model.silent"].type, rows["model.silent"].default) == ("list of cmp | sel | win", "[]")
    assert rows["preset"].default == "required"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Return it.\nFacts\n* one\n* two\n  more", "Return it. Facts * one * two more"),
        (
            "step: the checkpoint. path: a folder: its name. Raises `X`.",
            ":param step: the checkpoint. :param path: a folder: its name. Raises `X`.",
        ),
        ("Args:\n    step: the\n        checkpoint.\n    other: more.", ":param step: the checkpoint. :param other: more."),
        ("Raises:\n    ValueError: for x.", ":raises ValueError: for x."),
        ("    code = 1\n    more", ":: code = 1 more"),
        ("note: prose with a colon", "note: prose with a colon"),
        ("first: one\nsecond: two", "* ``first``: one * ``second``: two"),
    ],
)
def test_docstrings_are_converted(text: str, expected: str) -> None:
    lines = docstring_text.convert_docstring(text.splitlines(), frozenset({"step", "path"}))
    assert " ".join(" ".join(lines).split()) == expected
    if "* one" in text:  # reStructuredText needs a blank line before a list
        assert lines[lines.index("* one") - 1] == ""


def test_cells_of_a_notebook_are_joined() -> None:
    sources = ["# A\n[x][1], [y][1]\n\n[1]: a.md", "# B\n```\n# comment\n```\n## C\n[z][1]\n\n[1]: b.md"]
    cells = [{"cell_type": "markdown", "source": [text]} for text in sources]
    code = {"cell_type": "code", "metadata": {}, "source": "x"}
    joined = notebook_pages.join_cells({"cells": [*cells, code]})["cells"]
    assert joined[0]["source"] == "# A\n[x][1-0], [y][1-0]\n\n[1-0]: a.md"
    assert joined[1]["source"] == "## B\n```\n# comment\n```\n### C\n[z][1-1]\n\n[1-1]: b.md"
    assert joined[2]["metadata"]["tags"] == ["hide-input"]
    tags_and_code = [
        (["lesson"], "import x"),
        ([], "y = 1"),
        ([], "import x"),
        (["parameters"], "z = 1"),
        ([], "a = 1\nshow_figure(a)"),
    ]
    lesson = [{"cell_type": "code", "metadata": {"tags": tags}, "source": code} for tags, code in tags_and_code]
    folded = ["hide-input" in cell["metadata"]["tags"] for cell in notebook_pages.join_cells({"cells": lesson})["cells"]]
    assert folded == [False, False, True, True, True]
    one_title = notebook_pages.join_cells({"cells": [{"cell_type": "markdown", "source": "# A\n## B"}]})["cells"]
    assert one_title[0]["source"] == "# A\n## B"
