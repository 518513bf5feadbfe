"""Start ranks as processes of this machine, which communicate through gloo."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile


def start_ranks(script: str, n_ranks: int, *arguments: object) -> list[str]:
    """Run `python SCRIPT STORE RANK SIZE ARGUMENTS...` for every rank and return their outputs. STORE: path of a FileStore.

    Raises `AssertionError` with the outputs of the ranks that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0"}
        ranks = [
            subprocess.Popen(
                [sys.executable, script, f"{folder}/store", str(rank), str(n_ranks), *map(str, arguments)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(n_ranks)
        ]
        outputs = [rank.communicate()[0] for rank in ranks]
    failed = [f"rank {i}:\n{text}" for i, (rank, text) in enumerate(zip(ranks, outputs, strict=True)) if rank.returncode]
    assert not failed, "\n".join(failed)
    return outputs
