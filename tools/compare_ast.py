"""Compare two versions of the library: equal syntax trees up to names, docstrings and the wording of messages.

    python tools/compare_ast.py OLD NEW             compare nsa_lab of two git revisions (NEW may be `.`, the working tree)
    python tools/compare_ast.py OLD . FILE ...      compare only these files of the new tree
    python tools/compare_ast.py OLD NEW --write     also write the identifiers that differ into tools/renames.json

Compared: every module-level statement and definition, with its structure, numbers, operators, format codes,
dictionary keys and every string without a space (configuration keys, event names, file names). Not compared:
docstrings, other strings, imports, the order of definitions. In an f-string the set of its values is compared. Files
are matched by `files` in tools/renames.json; several old files that map to one new file are compared as the union of
their definitions. Files that were merged later than the compared revision have there the name that `proof.files` gives.

Names may differ, but consistently: within a function an old name has one new name, and two old names never become
one. Exits with 1 if a difference is found outside the files listed under `changed` in tools/renames.json.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAP = ROOT / "tools" / "renames.json"
IDENTIFIERS = {"name", "id", "attr", "arg", "names", "rest", "asname", "module"}


class Different(Exception):
    """Two nodes differ in more than names and wording."""


def read_revision(revision: str, folder: str = "nsa_lab") -> dict[str, str]:
    """Return path -> source of every Python file below `folder`; "." reads the working tree."""
    if revision == ".":
        return {str(p.relative_to(ROOT)): p.read_text("utf-8") for p in sorted((ROOT / folder).rglob("*.py"))}
    command = ["git", "ls-tree", "-r", "--name-only", revision, folder]
    paths = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    paths = [path for path in paths if path.endswith(".py")]
    objects = "\n".join(f"{revision}:{path}" for path in paths)
    batch = subprocess.run(
        ["git", "cat-file", "--batch"], cwd=ROOT, input=objects.encode(), capture_output=True, check=True
    )
    sources, rest = {}, batch.stdout
    for path in paths:
        header, _, rest = rest.partition(b"\n")
        size = int(header.split()[-1])
        sources[path], rest = rest[:size].decode("utf-8"), rest[size + 1 :]
    return sources


def is_masked(text: str) -> bool:
    """Tell whether a string is wording. Strings without white space are keys, names or codes."""
    return bool(re.search(r"\s", text.strip())) or not text.strip()


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """The body without docstrings, imports and `pass`, which a docstring can replace."""
    return [s for s in body if not is_docstring(s) and not isinstance(s, ast.Import | ast.ImportFrom | ast.Pass)]


def shape(node: ast.AST) -> str:
    """A dump without identifiers and wording, to find the counterpart of a definition."""
    parts: list[str] = []

    def visit(value: object) -> None:
        if isinstance(value, ast.Constant):
            masked = isinstance(value.value, str)
            parts.append("text" if masked else repr(value.value))
        elif isinstance(value, ast.JoinedStr):
            parts.append("fstring")
        elif isinstance(value, ast.AST):
            parts.append(type(value).__name__)
            for field, child in ast.iter_fields(value):
                if field in IDENTIFIERS and not isinstance(child, ast.AST):
                    continue
                visit(statements(child) if field == "body" and isinstance(child, list) else child)
        elif isinstance(value, list):
            for child in value:
                visit(child)

    visit(node)
    return " ".join(parts)


class Comparison:
    """Walks two trees at once and records which identifiers differ."""

    def __init__(self) -> None:
        self.pairs: dict[str, set[str]] = defaultdict(set)
        self.scope: list[dict[str, dict[str, str]]] = [{"forward": {}, "backward": {}}]

    def fail(self, a: object, b: object, why: str) -> None:
        line = getattr(a, "lineno", "?"), getattr(b, "lineno", "?")
        raise Different(f"old line {line[0]}, new line {line[1]}: {why}")

    def identifier(self, a: str | None, b: str | None, node: ast.AST, other: ast.AST, local: bool) -> None:
        if a is None or b is None:
            if a is not b:
                self.fail(node, other, f"{a} became {b}")
            return
        if a != b:
            self.pairs[a].add(b)
        if local:
            forward, backward = self.scope[-1]["forward"], self.scope[-1]["backward"]
            if forward.setdefault(a, b) != b:
                self.fail(node, other, f"{a} is {forward[a]} elsewhere in this function, and {b} here")
            if backward.setdefault(b, a) != a:
                self.fail(node, other, f"both {backward[b]} and {a} became {b} in this function")

    def compare(self, a: object, b: object) -> None:
        if isinstance(a, list) and isinstance(b, list):
            self.compare_lists(a, b)
        elif isinstance(a, ast.AST) and isinstance(b, ast.AST):
            self.compare_nodes(a, b)
        elif a != b:
            raise Different(f"{a!r} became {b!r}")

    def compare_lists(self, a: list, b: list) -> None:
        if len(a) != len(b):
            first = next((n for n in [*b, *a] if isinstance(n, ast.AST)), None)
            raise Different(f"near line {getattr(first, 'lineno', '?')}: {len(a)} items became {len(b)}")
        for x, y in zip(a, b, strict=True):
            self.compare(x, y)

    def compare_nodes(self, a: ast.AST, b: ast.AST) -> None:
        if isinstance(a, ast.JoinedStr | ast.Constant) and isinstance(b, ast.JoinedStr | ast.Constant):
            self.compare_texts(a, b)
            return
        if type(a) is not type(b):
            self.fail(a, b, f"{type(a).__name__} became {type(b).__name__}")
        if isinstance(a, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            outer = next(scope for scope in reversed(self.scope) if "class" not in scope)
            self.scope.append({"forward": dict(outer["forward"]), "backward": dict(outer["backward"])})
            self.shadow(arguments(a), arguments(b))
            self.compare_fields(a, b)
            self.scope.pop()
        elif isinstance(a, ast.ClassDef):
            # Methods do not see the names of the class body, only those outside it.
            self.scope.append({"forward": {}, "backward": {}, "class": {}})
            self.compare_fields(a, b)
            self.scope.pop()
        elif isinstance(a, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            self.scope.append({"forward": dict(self.scope[-1]["forward"]), "backward": dict(self.scope[-1]["backward"])})
            self.shadow(targets(a), targets(b))
            self.compare_fields(a, b)
            self.scope.pop()
        else:
            self.compare_fields(a, b)

    def shadow(self, old: list[str], new: list[str]) -> None:
        """Forget what these names meant outside: arguments and targets of comprehensions hide outer names."""
        forward, backward = self.scope[-1]["forward"], self.scope[-1]["backward"]
        for x, y in zip(old, new, strict=False):
            backward.pop(forward.pop(x, ""), None)
            forward.pop(backward.pop(y, ""), None)

    def compare_fields(self, a: ast.AST, b: ast.AST) -> None:
        for field in a._fields:
            x, y = getattr(a, field, None), getattr(b, field, None)
            if field in ("type_comment", "ctx", "kind"):
                continue
            if field in ("body", "orelse", "finalbody") and isinstance(x, list) and isinstance(y, list):
                x, y = statements(x), statements(y)
            if field in IDENTIFIERS and isinstance(x, str | None) and isinstance(y, str | None):
                self.identifier(x, y, a, b, local=isinstance(a, ast.Name | ast.arg))
            elif field in ("names", "kwd_attrs") and isinstance(x, list) and isinstance(y, list):
                for old, new in zip(x, y, strict=True):
                    self.identifier(str(old), str(new), a, b, local=False)
            elif field == "keys" and isinstance(a, ast.Dict):
                self.compare_keys(a, b)
            else:
                self.compare(x, y)

    def compare_keys(self, a: ast.Dict, b: ast.AST) -> None:
        if not isinstance(b, ast.Dict) or len(a.keys) != len(b.keys):
            self.fail(a, b, "keys of a dictionary differ")
            return
        for x, y in zip(a.keys, b.keys, strict=True):
            if isinstance(x, ast.Constant) and isinstance(y, ast.Constant):
                if x.value != y.value and not (isinstance(x.value, str) and is_masked(x.value)):
                    self.fail(x, y, f"key {x.value!r} became {y.value!r}")
            elif x is not None and y is not None:
                self.compare(x, y)

    def compare_texts(self, a: ast.JoinedStr | ast.Constant, b: ast.JoinedStr | ast.Constant) -> None:
        if isinstance(a, ast.Constant) and isinstance(b, ast.Constant):
            x, y = a.value, b.value
            if isinstance(x, str) and isinstance(y, str):
                if x != y and not (is_masked(x) and is_masked(y)):
                    self.text_pair(x, y, a, b)
            elif x != y or type(x) is not type(y):
                self.fail(a, b, f"{x!r} became {y!r}")
            return
        old, new = values(a), values(b)
        if len(old) != len(new):
            self.fail(a, b, f"a text with {len(old)} values became one with {len(new)}")
        for x in old:
            for y in new:
                before = {k: set(v) for k, v in self.pairs.items()}
                scopes = [{k: dict(v) for k, v in s.items()} for s in self.scope]
                try:
                    self.compare_fields(x, y)
                except Different:
                    self.pairs = defaultdict(set, before)
                    self.scope = scopes
                else:
                    new = [other for other in new if other is not y]
                    break
            else:
                self.fail(a, b, f"the value {ast.unparse(x)} of a text is gone")

    def text_pair(self, x: str, y: str, a: ast.AST, b: ast.AST) -> None:
        # A name in a string (`__all__`, getattr) follows the name.
        if x.isidentifier() and y.isidentifier():
            self.pairs[f"'{x}'"].add(f"'{y}'")
        elif is_masked(x) or is_masked(y):
            self.pairs[f"'{x}'"].add("text")
        else:
            self.fail(a, b, f"{x!r} became {y!r}")


def arguments(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[str]:
    args = node.args
    optional = [x for x in (args.vararg, args.kwarg) if x]
    return [x.arg for x in [*args.posonlyargs, *args.args, *args.kwonlyargs, *optional]]


def targets(node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> list[str]:
    return [n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)]


def values(node: ast.JoinedStr | ast.Constant) -> list[ast.FormattedValue]:
    return [v for v in node.values if isinstance(v, ast.FormattedValue)] if isinstance(node, ast.JoinedStr) else []


def names_of(node: ast.stmt) -> str | None:
    """The name that a module-level statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(target, ast.Name) else None


def compare_files(old: list[str], new: str) -> tuple[dict[str, set[str]], list[str]]:
    """Compare the union of the definitions of `old` sources with `new`. Returns renamed identifiers and differences."""
    before = [s for source in old for s in statements(ast.parse(source).body)]
    after = statements(ast.parse(new).body)
    pairs: dict[str, set[str]] = defaultdict(set)
    differences = []
    rest = list(after)

    def attempt(x: ast.stmt, y: ast.stmt) -> str | None:
        comparison = Comparison()
        try:
            comparison.compare(x, y)
        except Different as difference:
            return str(difference)
        for k, v in comparison.pairs.items():
            pairs[k] |= v
        return None

    def is_export(s: ast.stmt) -> bool:
        return names_of(s) == "__all__"

    before = [s for s in before if not is_export(s)]
    rest = [s for s in rest if not is_export(s)]
    left = []
    # By name first, then by shape, then by order.
    for x in before:
        y = next((s for s in rest if names_of(x) and names_of(s) == names_of(x) and type(s) is type(x)), None)
        if y is not None and shape(x) == shape(y) and attempt(x, y) is None:
            rest.remove(y)
        else:
            left.append(x)
    for x in list(left):
        y = next((s for s in rest if shape(x) == shape(s) and attempt(x, s) is None), None)
        if y is not None:
            rest.remove(y)
            left.remove(x)
    for x in left:
        y = next((s for s in rest if names_of(x) and names_of(s) == names_of(x)), None)
        y = (
            y
            or next((s for s in rest if shape(s) == shape(x)), None)
            or next((s for s in rest if type(s) is type(x)), None)
        )
        if y is None:
            differences.append(f"{names_of(x) or type(x).__name__}: gone")
            continue
        rest.remove(y)
        why = attempt(x, y)
        if why:
            differences.append(f"{names_of(x) or type(x).__name__} -> {names_of(y) or type(y).__name__}: {why}")
    differences += [f"{names_of(y) or type(y).__name__} (line {y.lineno}): new" for y in rest]
    return pairs, differences


def groups(old: dict[str, str], new: dict[str, str], files: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each new path with the old paths that became it; a path that vanished is yielded under its own name."""
    sources = defaultdict(list)
    for path in old:
        target = path
        # A file may have been renamed first and merged later.
        while target in files and files[target] != target:
            target = files[target]
        sources[target].append(path)
    for path in new:
        sources.setdefault(path, [])
    yield from sorted(sources.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", help="git revision")
    parser.add_argument("new", help="git revision, or . for the working tree")
    parser.add_argument("paths", nargs="*", help="new paths to compare (default: all)")
    parser.add_argument("--write", action="store_true", help="write the renamed identifiers into tools/renames.json")
    args = parser.parse_args()
    renames = json.loads(MAP.read_text("utf-8")) if MAP.exists() else {"files": {}, "changed": {}}
    old, new = read_revision(args.old), read_revision(args.new)
    wanted = {str(Path(p).resolve().relative_to(ROOT)) if Path(p).exists() else p for p in args.paths}
    identifiers: dict[str, dict[str, list[str]]] = {}
    equal, changed, failures = 0, 0, 0
    earlier = {path: target for path, target in renames.get("proof", {}).get("files", {}).items() if target in new}
    for path, origins in groups(old, new, renames["files"] | earlier):
        if wanted and path not in wanted:
            continue
        pairs, differences = compare_files([old[p] for p in origins], new.get(path, ""))
        if pairs:
            identifiers[path] = {k: sorted(v) for k, v in sorted(pairs.items())}
        if not differences:
            equal += 1
        elif path in renames.get("changed", {}):
            changed += 1
        else:
            failures += 1
            print(f"{path}  (from {', '.join(origins) or 'nothing'})")
            for difference in differences[:12]:
                print(f"    {difference}")
    print(f"{equal} files equal, {changed} changed and listed with a reason, {failures} different")
    if args.write:
        renames["identifiers"] = identifiers
        MAP.write_text(json.dumps(renames, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
