"""Count wording that readers of this field stumble over, and identifiers that are no nouns or verbs. A ratchet.

    python tools/check_wording.py            compare the counts with tools/wording.json; exit 1 if one rose
    python tools/check_wording.py --list     print every hit
    python tools/check_wording.py --write    store lower counts

Counted are docstrings, comments, help texts, descriptions, error messages and Markdown. docs/glossary.md has the
terms to use instead. A hit that is right stays, if it is listed with its reason under `allowed` in
tools/wording.json.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = ROOT / "tools" / "wording.json"
PLACES = ("nsa_lab", "README.md", "notebooks", "docs", "tests", "tools")
SKIPPED = {"__pycache__", "log", "records"}

# rule -> (pattern, the texts that it applies to: the first line of a docstring or comment, any text, Markdown only)
RULES = {
    "opens with a clause": (
        r"^(What|Of|As|Whether|Those|Where|So|There|Told|Asked|How|Whatever|Whoever|That) (?!is required\b)",
        "first line",
    ),
    "verbs of speech for data flow": (
        r"\b(is|are|was|were|be|been) (told|asked|said)\b|\b(told|asked) (of|by|what|apart|which)\b"
        r"|\bsays? (so|what|which|how|why|whether)\b",
        "text",
    ),
    "clause in place of a noun": (
        r"\b[Ww]hat (it|they|is|was|are|were|has|had|came|comes|the [a-z]+ (is|was|has|did|gives?|takes?|reads?|makes?)"
        r"|a [a-z]+ (is|was|has|gives?|takes?|reads?|makes?)|no|every|each|can|cannot|may|must|stands?|there)\b",
        "text",
    ),
    "archaic": (
        r"\b(anew|beside|besides|whereof|thereof|therein|aught|naught|thrice|whoever|whatsoever|so many|as it were"
        r"|heretofore)\b",
        "text",
    ),
    "those of": (r"\b(those|that) of (it|its|the|a|an|each|every|all|one|other|this|both)\b", "text"),
    "apart, alone, kept": (
        r"\b(told apart|by itself alone|is kept|are kept|was kept|stands? for itself|of its own|of their own|bring home)\b",
        "text",
    ),
    "none such": (
        r"\b(that is none|that are none|which is none|is no [a-z]+ (at all|of)|where there is none|as there are none)\b",
        "text",
    ),
    "no leading zero": (r"(?<![\w.\d])\.\d+\b(?!\w)", "markdown"),
}
PATTERNS = {rule: (re.compile(pattern), kind) for rule, (pattern, kind) in RULES.items()}
# Bare participles and adverbs that name a function, method, attribute or module variable.
IDENTIFIERS = {"told", "asked", "kept", "anew", "beside", "besides", "apart", "once"}


def list_texts(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (line, kind, text) of a file; kind is `first line`, `text` or `markdown`."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        is_code = False
        for number, line in enumerate(source.splitlines(), 1):
            is_code ^= line.lstrip().startswith("```")
            if not is_code and not line.startswith("    "):
                yield number, "markdown", re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield node.body[0].lineno, "first line", text.splitlines()[0]
                yield node.body[0].lineno, "text", text
        elif isinstance(node, ast.keyword) and node.arg in ("help", "description"):
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                yield node.value.lineno, "text", node.value.value
        elif isinstance(node, ast.Raise) and node.exc is not None:
            for part in ast.walk(node.exc):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and " " in part.value:
                    yield part.lineno, "text", part.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            text = token.string.lstrip("# ")
            if not text.startswith(("%%", "type:", "noqa", "pyright:")):
                yield token.start[0], "first line", text
                yield token.start[0], "text", text


def list_identifiers(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of the functions, methods, attributes and module variables that are on the list."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    bodies = [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name.strip("_") in IDENTIFIERS:
            yield node.lineno, node.name
        if isinstance(node, ast.Attribute) and node.attr.strip("_") in IDENTIFIERS:
            yield node.lineno, node.attr
    for body in bodies:
        for statement in body.body:
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            for target in targets:
                if isinstance(target, ast.Name) and target.id.strip("_").lower() in IDENTIFIERS:
                    yield statement.lineno, target.id


def list_files(place: str) -> list[Path]:
    root = ROOT / place
    paths = [root] if root.is_file() else sorted(root.rglob("*"))
    return [p for p in paths if p.suffix in (".py", ".md") and not SKIPPED & set(p.relative_to(ROOT).parts)]


def list_hits(place: str, allowed: dict[str, str]) -> Iterator[str]:
    """Yield `path:line: rule: text` of every hit that is not allowed."""
    for path in list_files(place):
        name = path.relative_to(ROOT)
        hits = [
            (line, rule, " ".join(text.split()))
            for line, kind, text in list_texts(path)
            for rule, (pattern, applies_to) in PATTERNS.items()
            if applies_to == kind or (applies_to == "text" and kind == "markdown")
            for _ in pattern.findall(text)
        ]
        if path.suffix == ".py" and place == "nsa_lab":
            hits += [(line, "identifier", identifier) for line, identifier in list_identifiers(path)]
        for line, rule, text in hits:
            if not any(phrase in text for phrase in allowed):
                yield f"{name}:{line}: {rule}: {text[:110]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every hit")
    parser.add_argument("--write", action="store_true", help="store the counts that fell")
    args = parser.parse_args()
    stored = json.loads(LIMITS.read_text("utf-8")) if LIMITS.exists() else {"limits": {}, "allowed": {}}
    hits = {place: list(list_hits(place, stored["allowed"])) for place in PLACES}
    if args.list:
        print("\n".join(hit for place in PLACES for hit in hits[place]))
    counts = Counter({place: len(found) for place, found in hits.items()})
    risen = [place for place in PLACES if counts[place] > stored["limits"].get(place, counts[place])]
    for place in PLACES:
        print(f"{place}: {counts[place]} hits, at most {stored['limits'].get(place, counts[place])}")
    if args.write and not risen:
        stored["limits"] = {place: counts[place] for place in PLACES}
        LIMITS.write_text(json.dumps(stored, indent=1) + "\n", "utf-8")
    if risen:
        print(f"wording: more hits in {', '.join(risen)}; see python tools/check_wording.py --list and docs/glossary.md")
    return 1 if risen else 0


if __name__ == "__main__":
    sys.exit(main())
