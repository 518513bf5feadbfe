"""Train params/ci.yaml in one or two source trees and compare weights and events.

    python tools/golden_run.py TREE            print the digests of a run of the source tree TREE
    python tools/golden_run.py OLD NEW         run both, compare; exit 1 if they differ

Compared are the SHA-256 of the last checkpoint's model.safetensors and every field of every event but heartbeats,
except times, speeds, memory, paths, identities of code and machine, and message texts (strings with white space).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# Fields that differ between two runs of one code: times, speeds, memory, processes, identities of code and machine.
VOLATILE = {
    *("t", "run", "code", "versions", "pid", "host", "path", "tensorboard", "seconds", "tokens_per_s", "total_s"),
    *("duration_s", "bytes", "memory_bytes", "peak_memory_bytes", "rss_bytes", "git", "python", "threads", "cpu_s"),
}


def clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: clean(v) for k, v in value.items() if k not in VOLATILE and not re.search(r"_(s|ms|bytes)(_|$)", k)}
    if isinstance(value, list):
        return [clean(v) for v in value]
    return "text" if isinstance(value, str) and (" " in value or "/" in value) else value


def run_preset(tree: Path) -> tuple[str, list[dict[str, Any]]]:
    """Return the SHA-256 of the weights and the cleaned events of a run of params/ci.yaml by the code in `tree`."""
    with TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-m",
            "nsa_lab",
            "train",
            str(tree / "params" / "ci.yaml"),
            "--outputs",
            folder,
            "--foreground",
        ]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        (run_dir,) = (path.parent for path in Path(folder).glob("*/events.jsonl"))
        weights = sorted(run_dir.glob("checkpoints/*/model.safetensors"))[-1]
        events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text("utf-8").splitlines()]
        # Heartbeats come by the clock.
        events = [clean(event) for event in events if event["kind"] != "heartbeat"]
        return hashlib.sha256(weights.read_bytes()).hexdigest(), events


def main(trees: list[Path]) -> int:
    if not 1 <= len(trees) <= 2:
        print(__doc__)
        return 2
    results = [run_preset(tree.resolve()) for tree in trees]
    for tree, (weights, events) in zip(trees, results, strict=True):
        digest = hashlib.sha256(json.dumps(events, sort_keys=True).encode()).hexdigest()
        print(f"{tree}: model.safetensors {weights}, {len(events)} events {digest}")
    if len(results) == 1:
        return 0
    (old_weights, old_events), (new_weights, new_events) = results
    different = [
        f"event {i}: {a}\n      now: {b}" for i, (a, b) in enumerate(zip(old_events, new_events, strict=False)) if a != b
    ]
    print("\n".join(different[:10]))
    equal = old_weights == new_weights and old_events == new_events
    print("equal" if equal else "different")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main([Path(argument) for argument in sys.argv[1:]]))
