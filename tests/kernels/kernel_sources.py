"""What the sources of the kernels say of their names."""

from __future__ import annotations

import ast
from pathlib import Path

from nsa_lab.attention import kernels

FOLDER = Path(kernels.__file__).parent
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.rglob("*.py"))}


def find_jitted(folder: str = "") -> set[str]:
    """Every function that Triton compiles; with a `part`, of that folder alone."""
    trees = (tree for path, tree in TREES.items() if path.is_relative_to(FOLDER / folder))
    functions = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return {f.name for f in functions if any(ast.unparse(d).startswith("triton.jit") for d in f.decorator_list)}


def find_constants_from_calls() -> list[str]:
    """`NAME: tl.constexpr = f(...)` where f is a function that Triton compiles."""
    assigned = (node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.AnnAssign))
    of_calls = [node for node in assigned if isinstance(node.value, ast.Call) and _is_name(node.value.func)]
    return [ast.unparse(node) for node in of_calls if ast.unparse(node.value.func) in find_jitted()]


def find_launched() -> set[str]:
    """Those that are launched: called as `kernel[grid](...)`."""
    calls = (node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Call))
    called = {call.func.value.id for call in calls if isinstance(call.func, ast.Subscript) and _is_name(call.func.value)}
    return called & find_jitted()


def find_launched_names() -> set[str]:
    """Under which names a profile shows them: one that serves both branches of the band has a name for each."""
    names = set()
    for name in find_launched():
        band = name.startswith("nsa_band_")
        names |= {name.replace("_band_", f"_{branch}_") for branch in ("compressed", "window")} if band else {name}
    return names


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name)
