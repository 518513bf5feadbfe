"""Architecture: import order, optional packages, exception handlers and environment variables."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest
from looping import looped

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nsa_lab"
FILES = sorted(PACKAGE.rglob("*.py"))

# Allowed imports between packages of the library. `cli` and `__main__` may import all of them.
MAY_IMPORT = {
    "config": set(),
    "attention": {"config"},
    "model": {"config", "attention"},
    "data": {"config"},
    "runs": {"config", "data"},
    "inference": {"config", "attention", "model", "data", "runs"},
    "convert": {"config", "attention", "model", "data", "runs", "inference"},
    "evaluate": {"config", "attention", "model", "data", "runs", "inference"},
    "train": {"config", "attention", "model", "data", "runs", "convert", "evaluate"},
    "health": {"config", "model", "runs"},  # model: readers of sharded checkpoints
    "figures": {"config", "attention", "runs", "health"},
    "report": {"config", "runs", "health", "figures"},
    "bench": {"config", "attention", "model", "data", "runs", "inference", "train"},
}
READER_PACKAGES = ["health", "report", "figures", "runs"]  # they read files and never import the trainer

# Optional packages, and the only modules that import each.
OPTIONAL_IMPORTS: dict[str, str | tuple[str, ...]] = {
    "triton": "attention/kernels/",
    "flash_attn": "attention/flash.py",
    "datasets": "data/sources/fineweb_edu.py",
    "huggingface_hub": "data/sources/fineweb_edu.py",
    "tokenizers": "data/tokenizer.py",
    "transformers": ("inference/hf/", "convert/"),
    "torch.utils.tensorboard": "train/telemetry/tensorboard_writer.py",
    "ipywidgets": "workbook/",
    "IPython": "workbook/",
    "papermill": "report/notebook_runner.py",
    "nbconvert": "report/",
    "latex2mathml": "report/formulas.py",
    "nh3": "report/sanitize.py",
}
# Benchmarks compare with external kernels.
BENCH_IMPORTS = {"triton", "flash_attn"}


def get_module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def parse_file(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def list_nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(parse_file(path)))


@functools.cache
def list_imports(path: Path) -> list[str]:
    """Return all imported modules, also inside functions; `from a import b` returns a and a.b."""
    names = []
    for node in list_nodes(path):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def get_part(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


@looped
@pytest.mark.parametrize("part", MAY_IMPORT)
def test_imports_point_one_way(part: str) -> None:
    wrong = []
    for path in FILES:
        if get_part(get_module_name(path)) == part:
            others = {get_part(name) for name in list_imports(path) if name.startswith("nsa_lab.")}
            wrong += [f"{path.relative_to(ROOT)} imports {other}" for other in others - MAY_IMPORT[part] - {part}]
    assert not wrong


@looped
@pytest.mark.parametrize("reader", READER_PACKAGES)
def test_readers_of_runs_never_load_the_trainer(reader: str) -> None:
    """Neither directly nor indirectly, nor inside a function."""
    known = {get_module_name(path): path for path in FILES}
    waiting, reached = [m for m in known if m.split(".")[1:2] == [reader]], set()
    assert waiting
    while waiting:
        module = waiting.pop()
        if module in reached:
            continue
        reached.add(module)
        waiting += [name for name in list_imports(known[module]) if name in known]
    assert not [m for m in reached if m.startswith("nsa_lab.train")]


def test_launching_and_reading_need_no_torch() -> None:
    modules = [get_module_name(path) for path in FILES if get_part(get_module_name(path)) == "runs"]
    code = f"import importlib, sys; [importlib.import_module(m) for m in {modules!r}]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, check=False).returncode == 0


@pytest.mark.slow
def test_documentation_data_is_used_only_by_the_documentation() -> None:
    """Records that the library uses are package data; files under docs/ can be renamed or missing."""
    sources = [*FILES, *(ROOT / "notebooks").glob("*.py")]
    for path in sources:
        strings = {
            node.value for node in list_nodes(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not [text for text in strings if "docs/benchmarks" in text], path


def test_no_two_classes_share_a_name() -> None:
    """Class names are unique, so that tracebacks, logs and searches are unambiguous."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in list_nodes(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(path.relative_to(PACKAGE).as_posix())
    assert not {name: where for name, where in places.items() if len(where) > 1}


@looped
@pytest.mark.parametrize("package", OPTIONAL_IMPORTS)
def test_an_optional_package_is_imported_in_one_place(package: str) -> None:
    places = []
    for path in FILES:
        if any(name == package or name.startswith(package + ".") for name in list_imports(path)):
            places.append(path.relative_to(PACKAGE).as_posix())
    places_of_package = OPTIONAL_IMPORTS[package]
    allowed = (places_of_package,) if isinstance(places_of_package, str) else places_of_package
    allowed += ("bench/",) if package in BENCH_IMPORTS else ()
    assert all(place.startswith(allowed) for place in places), places


@pytest.mark.slow
def test_the_library_loads_without_any_optional_package() -> None:
    names = ["config", "attention", "model", "data", "train.attempt", "health", "runs.history", "runs.lifecycle", "cli"]
    code = (
        "import sys\n"
        f"for name in {sorted(OPTIONAL_IMPORTS)!r}: sys.modules[name] = None\n"
        f"for name in {names!r}: __import__('nsa_lab.' + name)\n"
        "from nsa_lab.attention import resolve_backend\n"
        "from nsa_lab.config import NSAConfig\n"
        "import torch\n"
        "assert resolve_backend('cpu', torch.float32, NSAConfig())['window'].backend == 'torch'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=300)


def is_broad(node: ast.AST) -> bool:
    named = isinstance(node, ast.ExceptHandler) and isinstance(node.type, ast.Name)
    return named and node.type.id in ("Exception", "BaseException")


def test_no_handler_swallows_all_exceptions() -> None:
    """`except:` and `except Exception: pass` turn an error into a silent fallback."""
    wrong = []
    for path in FILES:
        for node in list_nodes(path):
            if isinstance(node, ast.ExceptHandler):
                silent = all(isinstance(s, ast.Pass | ast.Continue) for s in node.body)
                if node.type is None or (is_broad(node) and silent):
                    wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong


def test_broad_handlers_are_few() -> None:
    """Broad handlers hide errors. Handlers that raise again do not count."""
    broad = [
        path.relative_to(PACKAGE).as_posix()
        for path in FILES
        for node in list_nodes(path)
        if is_broad(node) and not any(isinstance(n, ast.Raise) for n in ast.walk(node))
    ]
    assert len(broad) <= 6, broad
    assert not [place for place in broad if place.startswith(("attention/", "model/", "config/"))]


def test_no_switch_hides_in_the_environment() -> None:
    """The library defines no variables of its own, and the mathematics reads only Triton's interpreter switch."""
    for path in FILES:
        strings = {n.value for n in list_nodes(path) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        assert not {s for s in strings if s.startswith("NSA_") and s.isupper()}, path
        reads = [n for n in list_nodes(path) if (isinstance(n, ast.Attribute) and n.attr in ("environ", "getenv"))]
        place = path.relative_to(PACKAGE).as_posix()
        if place.startswith(("attention/", "config/", "model/", "health/", "report/", "runs/history.py")) and reads:
            assert place == "attention/kernels/__init__.py" and "TRITON_INTERPRET" in strings


def test_the_mathematics_has_no_state() -> None:
    """Forbid global statements and lower-case module-level containers in attention, model and config."""
    for path in FILES:
        if get_part(get_module_name(path)) in ("attention", "model", "config"):
            assert not [n for n in list_nodes(path) if isinstance(n, ast.Global)], path
            for node in parse_file(path).body:
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict | ast.List | ast.Set):
                    names = [t.id for t in node.targets if isinstance(t, ast.Name)]
                    assert all(name.isupper() or name == "__all__" for name in names), f"{path}: {names}"


def test_every_folder_of_the_package_is_a_package() -> None:
    """An installed copy contains only packages."""
    folders = {path.parent for path in FILES}
    assert all((folder / "__init__.py").is_file() for folder in folders)


def test_no_tolerance_of_attention_or_model_tests_exceeds_a_hundredth() -> None:
    """Absolute tolerances that are written as numbers."""
    for path in [*(ROOT / "tests/attention").glob("*.py"), *(ROOT / "tests/model").glob("*.py")]:
        for node in list_nodes(path):
            if isinstance(node, ast.keyword) and node.arg == "atol" and isinstance(node.value, ast.Constant):
                assert node.value.value <= 1e-2, f"{path}:{node.value.lineno}"


def test_no_test_is_skipped_by_its_name() -> None:
    """Skips are markers with a reason at the test; no conftest selects tests."""
    for path in (ROOT / "tests").rglob("conftest.py"):
        assert "pytest_collection_modifyitems" not in path.read_text(encoding="utf-8"), path


def test_every_notebook_has_its_pair() -> None:
    folder = ROOT / "notebooks"
    sources = {path.stem for path in folder.glob("[0-9]*.py")}
    assert sources and sources == {path.stem for path in folder.glob("[0-9]*.ipynb")}


def test_no_continuous_check_is_allowed_to_fail() -> None:
    """`|| true` after a check would make it always pass."""
    recipes = [ROOT / "Makefile", *ROOT.glob(".github/workflows/*.yml")]
    for path in recipes:
        assert "|| true" not in path.read_text(encoding="utf-8"), path
