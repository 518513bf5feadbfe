"""Export of a run that trained an indexer on frozen pretrained weights: an adapter with a model card.

adapter.safetensors, adapter.json    as `nsa_lab.convert.adapter` writes them
README.md                            model card: sizes, usage, training, and the losses of an evaluation
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nsa_lab.config import ConfigError, NSAConfig, RunConfig
from nsa_lab.convert.adapter import AdapterInfo, save_adapter
from nsa_lab.convert.nsa_model import MARKER, convert_with_trained_indexers, make_nsa_transformer
from nsa_lab.convert.sources import load_dense
from nsa_lab.inference import load_model
from nsa_lab.model import NSATransformer
from nsa_lab.runs import checkpoint_files, directory
from nsa_lab.runs.atomic_io import write_text
from nsa_lab.runs.model_files import check_new_folder, find_checkpoint
from nsa_lab.runs.tables import Table, TableColumn

MODEL_CARD = "README.md"


def export_adapter(
    run_dir: str | Path,
    folder: str | Path,
    *,
    step: int | None = None,
    dtype: str = "bfloat16",
    evaluation: Mapping[str, Any] | None = None,
    about: str = "",
) -> AdapterInfo:
    """Write the indexers of a run to `folder` as an adapter with a model card. Return what `adapter.json` contains.

    The folder name becomes the model name. step: of the checkpoint; default: the newest. dtype: as in `save_adapter`.
    evaluation: contents of `conversion.json`; the model card has its losses if they were measured at this step.
    about: Markdown on data, license and limitations, appended to the model card.

    Raises ConfigError for a run that trained other weights than the indexers, or from another source than a pretrained
    model of transformers; for a folder that has files; and the errors of `load_dense` and `load_model`.
    """
    config = RunConfig.from_yaml(directory.check_run_dir(run_dir) / directory.CONFIG)
    source = config.train.initial_weights
    if config.train.trainable != "indexer" or source is None:
        raise ConfigError(
            f"{run_dir}: expected a run with train.trainable: indexer, got {config.train.trainable}: an adapter has the "
            "weights of the indexers only; use nsa-lab export-hf, which exports all weights"
        )
    if (Path(source) / directory.CONFIG).is_file():
        raise ConfigError(
            f"train.initial_weights = {source}: expected a pretrained model of transformers, got a run of this project; "
            "use nsa-lab export-hf, which exports all weights"
        )
    checkpoint, folder = find_checkpoint(run_dir, step), check_new_folder(folder)
    trained, dense = load_model(checkpoint), load_dense(source)
    _check_trunk(trained, make_nsa_transformer(dense, NSAConfig(scores="mean_key")), source)
    converted = convert_with_trained_indexers(dense, trained)
    info = save_adapter(converted, folder, base_model=source, dtype=dtype)
    n_steps = checkpoint_files.parse_step(checkpoint)
    write_text(folder / MODEL_CARD, build_adapter_card(folder.name, config, n_steps, info, evaluation, about))
    return info


def _check_trunk(trained: NSATransformer, dense: NSATransformer, source: str) -> None:
    own = trained.state_dict()
    for name, weight in dense.state_dict().items():
        if not torch.equal(own[name], weight):
            raise ConfigError(
                f"{name} of the run differs from {source}: the pretrained weights have changed since the run started; use "
                "those that it was trained with"
            )
    assert own.keys() - dense.state_dict().keys() == {name for name in own if MARKER in name}


def build_adapter_card(
    name: str, config: RunConfig, step: int, info: AdapterInfo, evaluation: Mapping[str, Any] | None, about: str = ""
) -> str:
    """Return Markdown on an adapter, then `about`. Every number comes from the run's configuration or its evaluation."""
    nsa, c = config.nsa, config.model
    keys = "shared by all groups" if c.indexer_keys == "shared" else "one per group"
    parts = [
        f"# {name}",
        f"Sparse attention for {info.base_model}: {info.n_bytes:,} bytes of indexer weights in {info.dtype}. The weights "
        f"of {info.base_model} are not included and do not change.",
        f"Every query attends to at most {nsa.n_sel} blocks of {nsa.l_sel} tokens ({nsa.n_sel * nsa.l_sel:,} tokens): "
        f"{nsa.sink_blocks} from the start, the {nsa.local_blocks} latest, and the blocks with the highest scores.",
        f"Indexer: query heads per group {c.indexer_heads}, width {c.index_width}, tokens per index key {c.indexer_block}, "
        f"index keys {keys} in {c.indexer_dtype}.",
        f'```python\nfrom nsa_lab import load_model\n\nmodel = load_model("{name}")  # or the path of this folder\n```',
        "## Training",
        f"{config.train.tokens_until(step):,} tokens in {step:,} optimizer steps, in texts of "
        f"{config.train.longest_stage.seq_len:,} tokens. The indexer learns to predict the attention mass of each block; "
        "all other weights are frozen.",
        "## Evaluation",
        _format_losses(evaluation, step),
        *([about.strip()] if about.strip() else []),
    ]
    return "\n\n".join(parts) + "\n"


def _format_losses(evaluation: Mapping[str, Any] | None, step: int) -> str:
    """Return tables of the loss minus that of dense attention, by text, attention and position range."""
    if evaluation is None or evaluation["step"] != step:
        return "This adapter has not been evaluated: `nsa-lab evaluate RUN --blocks N` compares it with dense attention."
    parts = [
        "Loss in nats per token, by position. The first row is dense attention; the others are differences from it, with "
        "the same weights and windows."
    ]
    for text, result in evaluation["texts"].items():
        means = [(row["attention"], row["blocks"], np.mean(row["windows"], axis=0)) for row in result["losses"]]
        (dense,) = (mean for attention, _, mean in means if attention == "dense")
        columns = [TableColumn(f"{first:,} to {last - 1:,}", "right") for first, last in result["ranges"]]
        rows = [["dense", "all", *(f"{loss:.4f}" for loss in dense)]]
        rows += [
            [attention, str(blocks), *(f"{loss:+.4f}" for loss in mean - dense)]
            for attention, blocks, mean in means
            if attention not in ("dense", "control")
        ]
        n_windows = len(result["losses"][0]["windows"])
        parts += [
            f"### {text}, {n_windows} windows of {result['length']:,} tokens",
            Table(["attention", TableColumn("blocks", "right"), *columns], rows).to_markdown(),
        ]
    return "\n\n".join(parts)
