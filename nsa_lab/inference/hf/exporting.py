"""Export a run to a folder for `from_pretrained`."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportUntypedBaseClass=false

from __future__ import annotations

from pathlib import Path

from transformers import GenerationConfig, PreTrainedTokenizerFast

from nsa_lab.config import RunConfig
from nsa_lab.data import ByteTokenizer, load_tokenizer
from nsa_lab.inference.hf.causal_lm import NSALabForCausalLM
from nsa_lab.inference.hf.configuration import NSALabConfig
from nsa_lab.inference.hf.tokenizer import NSALabTokenizer
from nsa_lab.inference.load import find_checkpoint, load_model
from nsa_lab.inference.package import check_new_folder
from nsa_lab.runs import checkpoint_files, directory


def export(run_dir: str | Path, folder: str | Path, *, step: int | None = None, max_shard_size: str = "5GB") -> Path:
    """Export the model of a run and its tokenizer to `folder`, in the format of `from_pretrained`. Return the folder.

    step: the checkpoint; default: the newest. `max_position_embeddings` and the tokenizer's `model_max_length` are the
    longest sequence length in training until then.

    Raises `NoCheckpoint` if there is none, `ConfigError` if `folder` has files.
    """
    folder = check_new_folder(folder)
    checkpoint = find_checkpoint(run_dir, step)
    run = RunConfig.from_yaml(directory.check_run_dir(run_dir) / directory.CONFIG)
    model, tokenizer = load_model(checkpoint), load_tokenizer(run.data.tokenizer)
    trained_step = checkpoint_files.parse_step(checkpoint)
    trained_length = max(stage.seq_len for stage in run.train.plan[: run.train.locate_step(trained_step)[0] + 1])
    special_token_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.separator)
    architecture = model.config.model_dump()
    config = NSALabConfig(architecture, max_position_embeddings=trained_length, **special_token_ids)
    exported = NSALabForCausalLM(config)
    exported.model.load_state_dict(model.state_dict())
    exported.generation_config = GenerationConfig(**special_token_ids, use_cache=True)
    exported.save_pretrained(folder, max_shard_size=max_shard_size)
    if isinstance(tokenizer, ByteTokenizer):
        NSALabTokenizer(model_max_length=trained_length).save_pretrained(folder)
    else:
        fast = PreTrainedTokenizerFast(tokenizer_file=run.data.tokenizer, model_max_length=trained_length)
        fast.save_pretrained(folder)
    return folder
