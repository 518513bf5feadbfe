"""Load a trained model: of a run or a package of nsa_lab, or a pretrained model with the adapter that makes it sparse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nsa_lab import inference
from nsa_lab.runs import resolve

__all__ = ["load_model"]


def load_model(
    path: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
    base: str | Path | None = None,
) -> Any:
    """Load a trained model in evaluation mode.

    path: what `nsa_lab.inference.load_model` accepts, which returns an `NSATransformer`; or the folder or name of an
        adapter, as in `load_model("smollm2-135m-nsa")`, which returns a model of `transformers` with sparse attention.
    dtype: of the weights and of attention. backend: as in `NSATransformer`.
    base: for an adapter, where its dense model is found, as in `nsa_lab.convert.load_dense`. None: as the adapter says.

    Raises the errors of `nsa_lab.inference.load_model`, `nsa_lab.convert.load_dense` and `nsa_lab.convert.load_adapter`.
    """
    candidates = Path(path), resolve.MODELS_DIR / path
    folder = next((candidate for candidate in candidates if (candidate / resolve.ADAPTER_INFO).is_file()), None)
    if folder is None:
        return inference.load_model(path, device=device, dtype=dtype, backend=backend)
    from nsa_lab.convert import load_adapter, load_dense, read_adapter_info

    dense = load_dense(base or read_adapter_info(folder).base_model, dtype=dtype)
    converted: Any = load_adapter(dense, folder, backend=backend)
    return converted.to(device)
