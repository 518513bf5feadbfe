"""Environment variables that older NSA trainers read, and that nothing here reads: named at the start, with what to use.

A setting that is believed to be on and is not costs more than an error. No variable of the environment changes a run of
this project; its settings are those of its configuration.
"""

from __future__ import annotations

from collections.abc import Iterable

# What older trainers' variables begin with, in lower case; then the beginnings of what follows, and what takes its place.
# The longest beginning that fits a name counts.
FAMILY = "nsa_"
REPLACED_BY = {
    "accum": "set train.accumulate_grad_batches",
    "allow_ada": "nothing to allow: any device trains",
    "allow_single_rank": "say --ranks",
    "allow_sliding_fa2": "set runtime.backend: flash",
    "batch_size": "set train.batch_size",
    "chunk_t": "nothing to set: chunks are sized by memory",
    "clip_norm": "set train.grad_clip",
    "data_cache": "nothing to set: shards are kept in .cache/data of the project, or of the user",
    "dataloader": "nothing to set: batches are prefetched",
    "dataset": "set data.source and data.dataset",
    "ddp": "set runtime.parallel: ddp",
    "debug": "nothing to set: nsa-lab preflight NAME and the run's record say what it did",
    "detect_anomaly": "nothing to set: a step that is not finite halts the run with a diagnosis",
    "disable_aux_stats": "set train.stats_every",
    "dtype": "set runtime.precision",
    "fa2": "set runtime.backend: flash",
    "force_branch": "nsa-lab evaluate RUN takes branches away from a trained model",
    "force_parity": "set runtime.backend: reference",
    "force_sel_mask": "set runtime.backend: torch",
    "force_uniform_gate": "nsa-lab evaluate RUN changes a trained model's gates",
    "fsdp": "set runtime.parallel: fsdp",
    "fwe": "set data.source: fineweb_edu, with data.dataset, data.subset and data.max_tokens",
    "gate": "set nsa.gate",
    "gc": "set runtime.gradient_checkpointing",
    "heartbeat_every": "set runtime.heartbeat_s",
    "hf_timeout_s": "set data.timeout_s",
    "log_grad_norm": "nothing to set: the gradient norm is always recorded",
    "logdir": "say --outputs DIR",
    "lr": "set train.lr",
    "max_seq_len": "set train.seq_len",
    "no_gc": "set runtime.gradient_checkpointing: false",
    "p_": "nothing to set: the block choice is always computed wide",
    "prefill": "nothing to set: all queries of a sequence are computed together",
    "scaler": "nothing to set: bf16 needs no loss scaling",
    "sdpa": "set runtime.backend",
    "seed": "set train.seed",
    "sel_": "set runtime.backend; the kernels choose their own strategy by length",
    "seq_len": "set train.seq_len",
    "split": "set data.val_fraction",
    "tb_disable": "nothing to set: TensorBoard only mirrors the record",
    "tokenizer": "set data.tokenizer",
    "train_lr": "set train.lr",
    "train_seed": "set train.seed",
    "train_steps": "set train.steps",
    "triton": "set runtime.backend: triton",
    "use_cmp_mask": "set runtime.backend",
    "use_fa2": "set runtime.backend: flash",
    "use_sel": "set runtime.backend",
    "use_triton_sel": "set runtime.backend: triton",
    "use_win_mask": "set runtime.backend",
    "val_every": "set train.eval_every",
    "watch": "set train.spike_sigma, train.min_tokens_per_s and train.stall_action",
}
NO_SUCCESSOR = "nothing takes its place"


def older_variables(names: Iterable[str]) -> dict[str, str]:
    """Those of the variables called `names` that older NSA trainers read, and what to use in the place of each."""
    found = {}
    for name in sorted(names):
        if name.lower().startswith(FAMILY):
            rest = name.lower().removeprefix(FAMILY)
            fitting = max((key for key in REPLACED_BY if rest.startswith(key)), key=len, default=None)
            found[name] = REPLACED_BY[fitting] if fitting else NO_SUCCESSOR
    return found


def warning(names: Iterable[str]) -> str | None:
    """One sentence about every such variable, or None where there is none."""
    found = older_variables(names)
    if not found:
        return None
    told = "; ".join(f"{name}: {instead}" for name, instead in found.items())
    return f"set in the environment, and read by nothing here: {told}. Unset {'it' if len(found) == 1 else 'them'}"
