"""The package: its exports, the modules that importing it loads, and errors for missing extras."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from looping import looped

import nsa_lab
from nsa_lab.config.optional_deps import EXTRA_BY_MODULE, MissingPackage, require

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
CORE = {"torch", "numpy", "pydantic"}
# The last one is PyTorch's compiler, whose import takes 1.2 s.
HEAVY_MODULES = ("matplotlib", "pyarrow", "tensorboard", "triton", "typer", "rich", "yaml", "safetensors", "torch._dynamo")


def run_fresh_python(code: str) -> str:
    """Return the output of `code` in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert not done.returncode, done.stderr
    return done.stdout.strip()


# Reads [missing, code] from each line, runs the code in a fork that has imported torch and in which the missing packages
# cannot be imported, and prints its output.
FORK_SERVER = """
import contextlib, io, json, os, sys, traceback
import torch
for line in sys.stdin:
    missing, code = json.loads(line)
    if os.fork() == 0:
        for name in missing:
            for loaded in [known for known in sys.modules if known.split(".")[0] == name]:
                del sys.modules[loaded]
            sys.modules[name] = None
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                exec(code, {"__name__": "__main__"})
            except BaseException:
                traceback.print_exc()
        print(json.dumps(said.getvalue().strip()), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def run_without_packages() -> Iterator[Callable[..., str]]:
    """Return a function (missing, code) -> output of `code` without these packages, before nsa_lab is imported."""
    command = [sys.executable, "-c", FORK_SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as forks:

        def run(missing: Iterable[str], code: str) -> str:
            print(json.dumps([list(missing), code]), file=forks.stdin, flush=True)
            return json.loads(forks.stdout.readline())

        yield run
        forks.stdin.close()


def get_names(requirements: list[str]) -> set[str]:
    """Return the package names in requirements, with extras of this project resolved."""
    found = set()
    for requirement in requirements:
        name, inner = re.match(r"([\w-]+)(?:\[([\w,-]+)\])?", requirement).groups()
        if name == "nsa-lab":
            found |= set().union(*(get_names(EXTRAS[extra]) for extra in inner.split(",")))
        else:
            found.add(name)
    return found


def test_the_exports_equal_the_contract() -> None:
    exported = {
        "__version__",
        "NSAttention",
        "nsa_attention",
        "NSAConfig",
        "Span",
        "NSATransformer",
        "load_model",
        "generate",
        "sparsify",
    }
    assert set(nsa_lab.__all__) == exported == set(dir(nsa_lab))
    with pytest.raises(AttributeError, match="module 'nsa_lab' has no attribute 'nsa_atention'; it has NSAConfig, "):
        nsa_lab.nsa_atention  # noqa: B018


@looped
@pytest.mark.parametrize("name", nsa_lab.__all__)
def test_every_export_can_be_imported(name: str) -> None:
    found = getattr(nsa_lab, name)
    assert isinstance(found, str) if name == "__version__" else callable(found)
    assert name == "__version__" or (found.__name__ == name and found.__doc__)


def test_type_checkers_see_every_export() -> None:
    """Type checkers use the imports under TYPE_CHECKING, Python uses `_MODULE_BY_NAME`; both must agree."""
    tree = ast.parse((ROOT / "nsa_lab/__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == nsa_lab._MODULE_BY_NAME
    assert (ROOT / "nsa_lab/py.typed").is_file()


def test_the_version_is_the_packages() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", nsa_lab.__version__)
    assert PROJECT["dynamic"] == ["version"]
    assert f"version: {nsa_lab.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    told = subprocess.run(
        [sys.executable, "-m", "nsa_lab", "--version"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert told.stdout.strip() == f"nsa-lab {nsa_lab.__version__}"


def test_importing_the_package_loads_nothing() -> None:
    loaded = run_fresh_python(
        "import sys, nsa_lab; print(sorted(n for n in sys.modules if n.startswith(('torch', 'numpy', 'nsa_lab'))))"
    )
    assert loaded == "['nsa_lab']"


@pytest.mark.slow
def test_a_name_loads_only_what_it_needs() -> None:
    code = "import sys, nsa_lab\nfor name in ('NSAttention', 'NSATransformer', 'generate'):\n    getattr(nsa_lab, name)\n"
    code += f"    print(name, [n for n in {HEAVY_MODULES!r} if n in sys.modules])\n"
    # Only sharded runs import FSDP.
    code += (
        "from nsa_lab.train import run\nprint('run', [n for n in sys.modules if n.startswith('torch.distributed.fsdp')])"
    )
    assert run_fresh_python(code).splitlines() == ["NSAttention []", "NSATransformer []", "generate []", "run []"]


@pytest.mark.slow
def test_the_core_trains_and_generates_without_any_extra(run_without_packages: Callable[..., str]) -> None:
    code = """
import torch, nsa_lab
from nsa_lab.config import ModelConfig
model = nsa_lab.NSATransformer(ModelConfig(dim=16, n_layers=1, n_heads=2, n_kv_groups=1, d_k=8, d_v=8), seed=0)
tokens = torch.zeros(1, 40, dtype=torch.int64)
torch.nn.functional.cross_entropy(model(tokens)[0], tokens[0]).backward()
print(all(p.grad.isfinite().all() for p in model.parameters()), len(nsa_lab.generate(model, ["a"], max_new_tokens=2)[0]))
"""
    assert run_without_packages(EXTRA_BY_MODULE, code) == "True 2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "package", "extra"),
    [
        ("import nsa_lab.figures", "matplotlib", "notebooks"),
        ("import nsa_lab.report", "nbformat", "notebooks"),
        ("import nsa_lab.train", "safetensors", "train"),
        ("import nsa_lab.inference.hf", "transformers", "hf"),
        ("import nsa_lab; nsa_lab.load_model('outputs')", "safetensors", "train"),
        ("from nsa_lab.config import RunConfig; RunConfig.from_yaml('params/ci.yaml')", "yaml", "train"),
        ("from nsa_lab.config import RunConfig; RunConfig().to_yaml()", "yaml", "train"),
    ],
)
def test_a_missing_package_names_its_extra(
    run_without_packages: Callable[..., str], code: str, package: str, extra: str
) -> None:
    caught = (
        "from nsa_lab.config.optional_deps import MissingPackage\n"
        f"try: {code}\nexcept MissingPackage as error: print(error)"
    )
    assert run_without_packages([package], caught) == f"{package} is not installed; run: pip install 'nsa-lab[{extra}]'"


def test_the_command_line_names_a_missing_package() -> None:
    code = "import sys; sys.modules['typer'] = None; from nsa_lab.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "nsa-lab: typer is not installed; run: pip install 'nsa-lab[train]'\n"


def test_an_import_that_fails_for_another_reason_is_a_bug_and_keeps_its_traceback() -> None:
    code = "import sys; sys.modules['nsa_lab.cli.bench_commands'] = None; from nsa_lab.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" in done.stderr and "nsa_lab.cli.bench_commands" in done.stderr


def test_requiring_an_installed_package_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    require("yaml", "typer")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match="tensorboard is not installed") as caught:
        require("yaml", "tensorboard")
    assert isinstance(caught.value, MissingPackage) and caught.value.name == "tensorboard"


def test_every_optional_package_is_in_the_extra_that_is_named() -> None:
    distributions = packages_distributions()
    assert get_names(PROJECT["dependencies"]) == CORE
    for package, extra in EXTRA_BY_MODULE.items():
        # A package that is not installed here, such as flash-attn, has the name of its distribution.
        known = {one.lower().replace("_", "-") for one in distributions.get(package, [package])}
        assert known & {one.lower() for one in get_names(EXTRAS[extra])}, f"{package} is not in [{extra}]"


def parse_pins(text: str) -> dict[str, str]:
    return {
        name.lower().replace("_", "-"): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)
    }


@pytest.mark.slow
def test_the_lock_and_the_conda_environment_have_every_package() -> None:
    """requirements.lock has all packages of [dev]; environment.yml has them and flash-attn, by conda names."""
    wanted = get_names(PROJECT["dependencies"]) | get_names(EXTRAS["dev"])
    locked = parse_pins((ROOT / "requirements.lock").read_text(encoding="utf-8"))
    assert not {name for name in wanted if name not in locked}
    added = parse_pins((ROOT / "tests/integrations/requirements.lock").read_text(encoding="utf-8"))
    assert not locked.keys() & added.keys() and get_names(EXTRAS["integrations"]) <= locked.keys() | added.keys()
    conda = set(re.findall(r"^  - ([\w-]+)", (ROOT / "environment.yml").read_text(encoding="utf-8"), re.MULTILINE))
    renamed = {"torch": "pytorch-gpu", "matplotlib": "matplotlib-base", "huggingface-hub": "huggingface_hub"}
    assert not {renamed.get(name, name) for name in wanted | get_names(EXTRAS["flash"])} - conda
