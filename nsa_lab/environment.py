"""What a run was made with: versions, code and machine. Only the standard library, and nothing is guessed."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "flash-attn", "numpy", "safetensors", "pydantic", "datasets", "pyarrow", "tokenizers",
            "tensorboard")


def environment() -> dict[str, Any]:
    """Versions, code identity and machine, for `environment.json`."""
    return {"versions": versions(), "code": code_identity(), "python": sys.executable, "platform": platform.platform(),
            "cpus": os.cpu_count()}


def versions() -> dict[str, str | None]:
    """Installed version of every package that can change a run's numbers; None where it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def code_identity() -> dict[str, str | bool | None]:
    """`source`: a digest of this package's files. `commit` and `dirty`: git's word, None outside a checkout."""
    package = Path(__file__).resolve().parent
    commit = _git(package, "rev-parse", "HEAD")
    changes = _git(package, "status", "--porcelain", "--", str(package))
    return {"source": source_digest(package), "commit": commit, "dirty": bool(changes) if commit else None}


def source_digest(package: Path) -> str:
    """Sixteen hex digits over the names and contents of the package's Python files."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10,
                              check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
