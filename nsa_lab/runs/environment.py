"""Record the environment of a run: package versions, code and hardware. Standard library only.

Records are shared, so this module never records a folder, host name or kernel build of the machine.
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
    """Return the content of `environment.json`: versions, code identity and hardware."""
    return {
        "versions": get_versions(),
        "code": get_code_identity(),
        "system": platform.system(),
        "architecture": platform.machine(),
        "cpus": os.cpu_count(),
        "gpus": list_gpus(),
    }


def list_gpus() -> list[dict[str, str]]:
    """Return name and driver version of every NVIDIA GPU; empty if `nvidia-smi` is missing or lists none."""
    output = _run_command("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader") or ""
    rows = [[value.strip() for value in line.rsplit(",", 1)] for line in output.splitlines()]
    return [{"name": row[0], "driver": row[1]} for row in rows if len(row) == 2]


def get_versions() -> dict[str, str | None]:
    """Return the version of every package that can change a run's results; None if it is not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def get_code_identity() -> dict[str, str | bool | None]:
    """Return `source` (digest of this package's files), `commit` and `dirty` (from git; None outside a checkout)."""
    package = Path(__file__).resolve().parents[1]
    commit = _run_git(package, "rev-parse", "HEAD")
    changes = _run_git(package, "status", "--porcelain", "--", str(package))
    return {"source": compute_source_digest(package), "commit": commit, "dirty": bool(changes) if commit else None}


def compute_source_digest(package: Path) -> str:
    """Return a digest of the names and contents of the package's Python files, 16 hex digits."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _run_git(folder: Path, *arguments: str) -> str | None:
    return _run_command("git", "-C", str(folder), *arguments)


def _run_command(*command: str) -> str | None:
    """Return the standard output of a command; None if it is missing, cannot be started, fails or times out."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        # Also a folder on PATH that may not be searched.
        return None
    return process.stdout.strip() if process.returncode == 0 else None


def set_openmp_wait_policy(settings: MutableMapping[str, str]) -> None:
    """Set in a process's environment how OpenMP threads wait for each other, unless it is set already.

    With unlimited spinning, a step is up to 16 times slower if other processes use the same cores. Without spinning,
    threads must be woken for every operation, which takes 1.5 times as long on an idle machine. Threads therefore spin for
    a few microseconds, about the time from one operation to the next, and then sleep (timings: docs/log/kernels.md).
    OpenMP reads these variables when torch is loaded.
    """
    if "OMP_WAIT_POLICY" not in settings:
        settings["OMP_WAIT_POLICY"] = "PASSIVE"
        settings.setdefault("GOMP_SPINCOUNT", "2000")  # read only by GNU OpenMP, which torch ships on Linux
