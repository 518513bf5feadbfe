"""Names of kernels, read from their sources."""

from __future__ import annotations

import ast
from pathlib import Path

from nsa_lab.attention import kernels

FOLDER = Path(kernels.__file__).parent
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.rglob("*.py"))}


def find_jitted(folder: str = "") -> set[str]:
    """Return the names of all triton.jit functions; with `folder`, only those of that subfolder."""
    trees = (tree for path, tree in TREES.items() if path.is_relative_to(FOLDER / folder))
    functions = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {f.name for f in functions if any(ast.unparse(d).startswith("triton.jit") for d in f.decorator_list)}


def find_constants_from_calls() -> list[str]:
    """Return all assignments `NAME: tl.constexpr = f(...)` where f is a triton.jit function."""
    assignments = (node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.AnnAssign))
    call_assignments = [node for node in assignments if isinstance(node.value, ast.Call) and _is_name(node.value.func)]
    return [ast.unparse(node) for node in call_assignments if ast.unparse(node.value.func) in find_jitted()]


def find_launched() -> set[str]:
    """Return the names of triton.jit functions that are launched as `kernel[grid](...)`."""
    calls = (node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Call))
    called = {call.func.value.id for call in calls if isinstance(call.func, ast.Subscript) and _is_name(call.func.value)}
    return called & find_jitted()


def find_launched_names() -> set[str]:
    """Return the names of launched kernels in a profile. A kernel of the band has one name per branch."""
    names = set()
    for name in find_launched():
        is_band = name.startswith("nsa_band_")
        names |= {name.replace("_band_", f"_{branch}_") for branch in ("compressed", "window")} if is_band else {name}
    return names


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name)
