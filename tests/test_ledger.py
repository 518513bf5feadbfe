"""`ledger.md` is complete and names tests that exist; and the few of its rows that have no better home."""

from __future__ import annotations

import ast
import functools
import re
import time
from pathlib import Path

import pytest

from nsa_lab.attention import geometry
from nsa_lab.config import NSAConfig, RunConfig, RuntimeConfig

ROOT = Path(__file__).parents[1]
LEDGER = (ROOT / "tests/ledger.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| (B\d+b?) \|(.*)$", LEDGER, re.MULTILINE))
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", LEDGER)))
LARGEST_TOLERANCE = 1e-2


@functools.cache
def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_every_failure_has_one_row_with_an_answer() -> None:
    assert set(ROWS) == {f"B{n:02d}" for n in range(1, 110)} | {"B01b", "B10b"}
    assert len(re.findall(r"^\| B\d", LEDGER, re.MULTILINE)) == len(ROWS)
    for number, row in ROWS.items():
        problem, answer, _ = row.split(" |")
        assert problem.strip() and ("::" in answer or "Cannot arise" in answer), number


@pytest.mark.parametrize(("file", "name"), NAMED, ids=[name for _, name in NAMED])
def test_every_test_that_is_named_exists(file: str, name: str) -> None:
    assert (ROOT / file).is_file(), file
    assert name in functions(ROOT / file), f"{file} has no {name}"


def test_no_attention_test_tolerates_an_error_of_a_hundredth() -> None:
    """Absolute tolerances that are written as numbers, in the tests of attention and of the model."""
    for path in [*(ROOT / "tests/attention").glob("*.py"), *(ROOT / "tests/model").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "atol" and isinstance(node.value, ast.Constant):
                assert node.value.value <= LARGEST_TOLERANCE, f"{path}:{node.value.lineno}"


def test_nothing_that_costs_speed_is_on_by_default() -> None:
    runtime = RuntimeConfig()
    assert not runtime.gradient_checkpointing and not runtime.deterministic
    production = RunConfig.from_yaml(ROOT / "params/production_50k.yaml").runtime
    assert not production.gradient_checkpointing and not production.deterministic and production.backend == "auto"


def test_the_overlap_of_a_long_sequence_takes_milliseconds() -> None:
    """In closed form; a Python loop took a third of a second at 16 384 tokens, in each layer of each step."""
    nsa, best = NSAConfig(), float("inf")
    for _ in range(5):
        start = time.perf_counter()
        geometry.overlap(geometry.num_compressed(16384, nsa), geometry.num_selection(16384, nsa), nsa)
        best = min(best, time.perf_counter() - start)
    assert best < 0.1


def test_the_one_length_threshold_is_the_measured_one() -> None:
    """The kernel log has the table of both ways that run today; the library follows it, and nobody can set it otherwise."""
    pytest.importorskip("triton")
    from nsa_lab.attention.kernels.selected import launch

    log = (ROOT / "docs/log/kernels.md").read_text(encoding="utf-8")
    assert f"union forward up to {launch.UNION_TOKENS} tokens, gather from there" in log
    assert f"up to {launch.UNION_TOKENS:,} tokens" in (ROOT / "docs/decisions.md").read_text(encoding="utf-8")
    length = launch.UNION_TOKENS
    assert [launch.get_forward_strategy(T, 64) for T in (1, length, length + 1, 16 * length)] == ["union"] * 2 + [
        "gather"
    ] * 2
    thresholds = {
        (path.name, target.id)
        for path in (ROOT / "nsa_lab/attention").rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id.endswith("_TOKENS")
    }
    assert thresholds == {("launch.py", "UNION_TOKENS")}


def test_every_folder_of_the_package_is_a_package() -> None:
    """So that an installed copy holds it."""
    folders = {path.parent for path in (ROOT / "nsa_lab").rglob("*.py")}
    assert all((folder / "__init__.py").is_file() for folder in folders)


def test_no_test_is_skipped_for_its_name() -> None:
    """Skips stand at the test, as markers with a reason; no conftest looks at names."""
    for path in (ROOT / "tests").rglob("conftest.py"):
        assert "pytest_collection_modifyitems" not in path.read_text(encoding="utf-8"), path
