"""API reference, generated from docstrings.

    :::{api} nsa_lab.attention
    :::

documents a module: its docstring, a table of its public names, and each of them. The public names of a module are its
`__all__`, or without one the names without underscore that it defines. Names that a package exports are documented there,
and not again in the module that defines them. Names of `nsa_lab` itself are links to the packages that define them.

    :::{api-modules} nsa_lab.train
    :::

lists all modules of a package with the first lines of their docstrings, and links to the source.

A build warns about a public name that no page documents. Functions without an underscore need neither Sphinx nor a build.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[2]
DIRECTIVE = re.compile(r"^:::\{api\} (\S+)$", re.MULTILINE)
LONGEST_VALUE = 100


def list_documented_modules() -> dict[str, str]:
    """Return the page of every module that a page of docs/api documents."""
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    return {
        module: f"docs/api/{page.stem}" for page in pages for module in DIRECTIVE.findall(page.read_text(encoding="utf-8"))
    }


@cache
def parse_module(module: str) -> ast.Module:
    return ast.parse(find_file(module).read_text(encoding="utf-8"))


def find_file(module: str) -> Path:
    folder = ROOT.joinpath(*module.split("."))
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def list_public_names(module: str) -> list[str]:
    """Return the public names of a module, without its submodules, from its source. The module is not imported."""
    names: list[str] = []
    for statement in parse_module(module).body:
        found = list_targets(statement)
        if found == ["__all__"]:
            exported = ast.literal_eval(statement.value)  # type: ignore[attr-defined]
            # Submodules have their own entries. A function may have the name of the submodule that defines it.
            return [name for name in exported if list_imports(module).get(name) != module]
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found = [statement.name]
        names += found
    exported_by_package = list_public_names(module.rpartition(".")[0])
    return [name for name in dict.fromkeys(names) if not name.startswith("_") and name not in exported_by_package]


def list_targets(statement: ast.stmt) -> list[str]:
    """Return the names that an assignment defines; `a, b = 1, 2` defines two. Empty for other statements."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        return []
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


@cache
def list_imports(module: str) -> dict[str, str]:
    """Return the module that each name is imported from."""
    imports = [statement for statement in ast.walk(parse_module(module)) if isinstance(statement, ast.ImportFrom)]
    return {alias.asname or alias.name: statement.module or "" for statement in imports for alias in statement.names}


def find_definition(module: str, name: str) -> str:
    """Return the module that defines `name`, which `module` defines or imports."""
    source = list_imports(module).get(name)
    return module if source is None else find_definition(source, name)


def find_home(module: str, name: str) -> str:
    """Return the full name under which `name` is documented: names of `nsa_lab` are documented in its packages."""
    return f"{list_imports(module).get(name, module)}.{name}" if module == "nsa_lab" else f"{module}.{name}"


def describe_constant(module: str, name: str) -> str:
    """Return the docstring below a module variable, or else the comment above it."""
    defined_in = find_definition(module, name)
    body, lines = parse_module(defined_in).body, find_file(defined_in).read_text(encoding="utf-8").splitlines()
    for statement, following in zip(body, [*body[1:], None], strict=True):
        if name not in list_targets(statement):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            return inspect.cleandoc(str(following.value.value))
        comment: list[str] = []
        for line in reversed(lines[: statement.lineno - 1]):
            if not line.startswith("# "):
                break
            comment.insert(0, line[2:])
        return " ".join(comment)
    return ""


def get_first_line(module: str) -> str:
    return (ast.get_docstring(parse_module(module)) or "").partition("\n")[0]


def list_modules(package: str) -> list[str]:
    """Return the modules of a package at all levels, without the package itself."""
    folder = find_file(package).parent
    files = [path for path in sorted(folder.rglob("*.py")) if path.name != "__main__.py" and path != folder / "__init__.py"]
    parts = [path.relative_to(ROOT).with_suffix("").parts for path in files]
    return [".".join(p[:-1] if p[-1] == "__init__" else p) for p in parts]


def write_module_text(module: str, items: dict[str, Any]) -> str:
    """Return the reStructuredText that documents a module with its public objects."""
    lines = [f".. automodule:: {module}", "   :no-members:", "", f".. currentmodule:: {module}", ""]
    if len(items) > 3:
        lines += [".. list-table::", "   :class: api-names", "   :widths: 30 70", ""]
        for name, item in items.items():
            link = f":py:obj:`{name} <{find_home(module, name)}>`"
            lines += [f"   * - {link}", f"     - {_summarize(module, name, item)}"]
        lines.append("")
    for name, item in items.items():
        if find_home(module, name) == f"{module}.{name}":
            lines += [*_write_object(module, name, item), ""]
    return "\n".join(lines)


def _write_object(module: str, name: str, item: Any) -> list[str]:
    if inspect.isclass(item):
        return [f".. autoclass:: {name}", "   :members:"]
    if inspect.isroutine(item):
        return [f".. autofunction:: {name}"]
    value = " ".join(repr(item).split())
    is_shown = len(value) <= LONGEST_VALUE and " at 0x" not in value and "<" not in value
    return [
        f".. py:data:: {name}",
        *([f"   :value: {value}"] if is_shown else []),
        "",
        f"   {describe_constant(module, name)}",
    ]


def _summarize(module: str, name: str, item: Any) -> str:
    """Return the first sentence of an object's documentation."""
    text = (
        inspect.getdoc(item) if inspect.isclass(item) or inspect.isroutine(item) else describe_constant(module, name)
    ) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.:]) (?=[A-Z`])", paragraph)[0]


def setup(app: Sphinx) -> dict[str, bool]:
    import pydantic
    from docstring_text import convert_docstring
    from docutils import nodes
    from sphinx.ext.autodoc.mock import _MockObject, mock, undecorate
    from sphinx.util import logging
    from sphinx.util.docutils import SphinxDirective

    logger = logging.getLogger(__name__)
    # Operators that modules apply to mocked objects while they are imported, for example in `Tensor | None`.
    for operator in ("__or__", "__ror__", "__sub__"):
        setattr(_MockObject, operator, lambda self, other: self)
    _MockObject.__contains__ = lambda self, key: True

    class Api(SphinxDirective):
        """Documentation of a module."""

        required_arguments = 1

        def run(self) -> list[nodes.Node]:
            module, names = self.arguments[0], list_public_names(self.arguments[0])
            self.env.note_dependency(find_file(module))
            with mock(self.config.autodoc_mock_imports):
                imported = importlib.import_module(module)
                text = write_module_text(module, {name: undecorate(getattr(imported, name)) for name in names})
            entries = self.parse_text_to_nodes(f"````{{eval-rst}}\n{text}\n````")
            aliases = [name for name in names if find_home(module, name) != f"{module}.{name}"]
            return [*map(self.make_alias, aliases), *entries]

        def make_alias(self, name: str) -> nodes.Node:
            """Register a name of `nsa_lab`, and return the target that it leads to."""
            anchor, module = f"{self.arguments[0]}.{name}", self.arguments[0]
            domain = self.env.domains.python_domain
            domain.note_object(f"{module}.{name}", "data", anchor, aliased=True, location=self.get_location())
            target = nodes.target("", "", ids=[anchor])
            self.state.document.note_explicit_target(target, target)
            return target

    class ApiModules(SphinxDirective):
        """Table of the modules of a package."""

        required_arguments = 1

        def run(self) -> list[nodes.Node]:
            rows = []
            for module in list_modules(self.arguments[0]):
                path = find_file(module).relative_to(ROOT).as_posix()
                url = f"{self.config.repository_url}/blob/{self.config.repository_branch}/{path}"
                link = f"{{py:mod}}`{module}`" if module in list_documented_modules() else f"[`{module}`]({url})"
                rows.append(f"| {link} | {get_first_line(module)} |")
            return self.parse_text_to_nodes("\n".join(["| module | contents |", "|---|---|", *rows]))

    def process_docstring(app: Sphinx, what: str, name: str, item: Any, options: Any, lines: list[str]) -> None:
        if [line for line in lines if line] and lines[0].startswith("Alias for field number"):
            lines.clear()  # of a NamedTuple
        try:
            parameters = frozenset(inspect.signature(item).parameters) if callable(item) else frozenset()
        except (TypeError, ValueError):
            parameters = frozenset()
        lines[:] = convert_docstring(lines, parameters)

    def process_signature(
        app: Sphinx, what: str, name: str, item: Any, options: Any, signature: str, returns: str
    ) -> tuple[str, str] | None:
        """Shorten the signature of a configuration section: its keys are on the page of the configuration."""
        is_section = inspect.isclass(item) and issubclass(item, pydantic.BaseModel)
        return ("(**settings)", returns) if is_section else None

    def check_complete(app: Sphinx, env: Any) -> None:
        """Warn about public names without an entry."""
        documented = env.domains.python_domain.objects
        for module, page in list_documented_modules().items():
            for name in list_public_names(module):
                if f"{module}.{name}" not in documented:
                    logger.warning("%s.%s has no entry in the API reference", module, name, location=page)

    app.add_directive("api", Api)
    app.add_directive("api-modules", ApiModules)
    app.connect("autodoc-process-docstring", process_docstring)
    app.connect("autodoc-process-signature", process_signature)
    app.connect("env-check-consistency", check_complete)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
