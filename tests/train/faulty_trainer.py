"""A trainer with a planted fault, for tests that need a separate process: `python faulty_trainer.py RUN_DIR FAULT`.

A number after the fault makes the process the supervisor of that many ranks.

Faults: `slow_data`, `slow_eval`, `slow_compile`, `slow_step` never finish that phase; `deaf` hangs in a call that never
returns to Python; `nan_on_rank_1` gives NaN from step 4 on the second rank; `none`. The word `judged` after a fault sets
a stall limit of three seconds in data, eval and step, and gives the trainer ten seconds to respond.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from nsa_lab.config import RunConfig
from nsa_lab.data import Batches
from nsa_lab.runs.lock import take_lock
from nsa_lab.train import attempt, launcher, trainer
from nsa_lab.train.build import Builders, build_model
from nsa_lab.train.distributed import World
from nsa_lab.train.signals import STOP_SIGNALS
from nsa_lab.train.telemetry import heartbeat
from nsa_lab.train.telemetry.heartbeat import StallRule


def make_faulty_builders(fault: str) -> Builders:
    def build(config: RunConfig, device: torch.device) -> nn.Module:
        model, calls = build_model(config, device), []

        def before(module: nn.Module, inputs: object) -> None:
            # Count only calls during training, not those of preflight.
            if not is_training:
                return
            calls.append(module.training)
            steps = sum(calls) // 2
            phases = {"slow_eval": not module.training and steps > 5, "slow_compile": module.training and not steps}
            if phases.get(fault):
                wait_forever()
            elif fault == "slow_step" and steps > 2:
                time.sleep(0.3)
            elif fault == "deaf" and steps > 2:
                os.write(1, b"deaf\n")
                # The signals go to other threads, so nothing interrupts this one.
                signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
                ctypes.CDLL(None).pause()

        def after(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor | None:
            bad = fault == "nan_on_rank_1" and World.from_environment().rank == 1 and sum(calls) > 12 and module.training
            return output * float("nan") if bad and is_training else None

        model.register_forward_pre_hook(before)
        model.register_forward_hook(after)
        return model

    return replace(Builders(), model=build)


is_training: list[bool] = []


has_waited: list[bool] = []


def wait_forever() -> None:
    """Never return, the first time; the save after a stop request calls the model too."""
    if has_waited:
        return
    has_waited.append(True)
    os.write(1, b"waiting\n")
    while True:
        time.sleep(0.01)


def train_with_fault(run_dir: str, fault: str, *options: str) -> int:
    if options and options[0].isdecimal():
        lock = take_lock(Path(run_dir))
        return launcher.supervise([sys.executable, __file__, run_dir, fault], Path(run_dir), int(options[0]), lock)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    torch.set_num_threads(1)
    whole_run = trainer.Trainer.run

    def run(self: trainer.Trainer) -> None:
        is_training.append(True)
        whole_run(self)

    trainer.Trainer.run = run
    if options == ("judged",):
        # Wide enough for a machine that other processes use too, where any phase may be slow.
        attempt.StallRule = lambda floors_s: StallRule(factor=2.0, floors_s=dict.fromkeys(("data", "eval", "step"), 3.0))
        heartbeat.STOP_TIMEOUT_S, options = 10.0, ()
    if fault == "slow_data":
        weighted = Batches.weighted_batch

        def slow(self: Batches, step: int, *rest: int) -> object:
            if step == 3:
                wait_forever()
            return weighted(self, step, *rest)

        Batches.weighted_batch = slow
    lock, store = launcher.bind_to_supervisor(options[1]) if options else (None, None)
    return attempt.run(run_dir, builders=make_faulty_builders(fault), lock=lock, store=store)


if __name__ == "__main__":
    sys.exit(train_with_fault(*sys.argv[1:]))
