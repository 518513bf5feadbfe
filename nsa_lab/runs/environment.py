"""What a run was made with: versions, code and machine. Only the standard library, and nothing is guessed.

Records are shared: nothing here names a folder, a host or a kernel build of the machine.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "triton",
    "flash-attn",
    "numpy",
    "safetensors",
    "pydantic",
    "datasets",
    "pyarrow",
    "tokenizers",
    "tensorboard",
)


def collect_environment() -> dict[str, Any]:
    """Versions, code identity and machine, for `environment.json`."""
    return {
        "versions": get_versions(),
        "code": get_code_identity(),
        "system": platform.system(),
        "architecture": platform.machine(),
        "cpus": os.cpu_count(),
        "gpus": list_gpus(),
    }


def list_gpus() -> list[dict[str, str]]:
    """Name and driver of every NVIDIA GPU; empty where the driver's own tool does not name any."""
    told = _run_command("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or ""
    rows = [[value.strip() for value in line.rsplit(",", 1)] for line in told.splitlines()]
    return [{"name": row[0], "driver": row[1]} for row in rows if len(row) == 2]


def get_versions() -> dict[str, str | None]:
    """Installed version of every package that can change a run's numbers; None where it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def get_code_identity() -> dict[str, str | bool | None]:
    """`source`: a digest of this package's files. `commit` and `dirty`: git's word, None outside a checkout."""
    package = Path(__file__).resolve().parents[1]
    commit = _run_git(package, "rev-parse", "HEAD")
    changes = _run_git(package, "status", "--porcelain", "--", str(package))
    return {"source": compute_source_digest(package), "commit": commit, "dirty": bool(changes) if commit else None}


def compute_source_digest(package: Path) -> str:
    """Sixteen hex digits over the names and contents of the package's Python files."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _run_git(folder: Path, *arguments: str) -> str | None:
    return _run_command("git", "-C", str(folder), *arguments)


def _run_command(*command: str) -> str | None:
    """What the command prints; None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def set_openmp_wait_policy(settings: MutableMapping[str, str]) -> None:
    """Say in a process's variables how OpenMP's threads wait for each other, unless somebody did.

    Threads that spin as long as they like make a step up to sixteen times slower where the cores are shared with others;
    threads that sleep at once have to be woken for every operation, which takes half as long again where they are not. So
    they spin for some microseconds, about as long as it is from one operation to the next, and then sleep
    (docs/kernel_log.md has the times). OpenMP reads this when torch is loaded.
    """
    if "OMP_WAIT_POLICY" not in settings:
        settings["OMP_WAIT_POLICY"] = "PASSIVE"
        settings.setdefault("GOMP_SPINCOUNT", "2000")  # GNU's OpenMP alone, which torch brings on Linux
