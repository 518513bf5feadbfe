"""Loss of a converted model next to its dense attention, and the attention mass of its blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from nsa_lab import NSAConfig, NSATransformer
from nsa_lab.config import ConfigError, ModelConfig
from nsa_lab.evaluate.conversion import format_result, measure_conversion, share_weights

NSA = {"l": 4, "d": 4, "l_sel": 4, "n_sel": 5, "sink_blocks": 1, "local_blocks": 2}
SIZES: dict[str, Any] = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_groups": 2, "d_k": 8, "d_v": 8, "vocab_size": 50}
LENGTH, BLOCKS = 300, 75


def make_model(**options: Any) -> NSATransformer:
    indexer = {"branches": ("sel",), "indexer_block": 1, "selection_loss": 0.05}
    model = NSATransformer(ModelConfig(**(SIZES | indexer | options), nsa=NSAConfig(**NSA)), seed=1).double().eval()
    for parameter in model.parameters():
        parameter.data.mul_(4)  # attention far from uniform
    return model


def make_windows(count: int = 3) -> list[torch.Tensor]:
    return list(torch.randint(50, (count, LENGTH + 1), generator=torch.Generator().manual_seed(0)))


def compute_losses(model: NSATransformer, windows: list[torch.Tensor]) -> np.ndarray:
    """Return the mean losses over windows at positions 0, 256 and on."""
    logits = model(torch.stack(windows)[:, :-1])
    losses = functional.cross_entropy(logits.float().transpose(1, 2), torch.stack(windows)[:, 1:], reduction="none")
    return np.array([losses[:, :256].mean().item(), losses[:, 256:].mean().item()])


def test_every_row_has_the_loss_of_its_attention() -> None:
    model, windows = make_model(), make_windows()
    result = measure_conversion(model, windows, [5, BLOCKS])
    assert result.ranges == [(0, 256), (256, LENGTH)]
    dense = NSATransformer(ModelConfig(**SIZES, attention="dense")).double().eval()
    dense.load_state_dict({name: value for name, value in model.state_dict().items() if ".indexer." not in name})
    expected = compute_losses(dense, windows)
    np.testing.assert_allclose(result.average("dense"), expected, atol=1e-5)
    for name in ("selected", "mean_key", "nearest", "oracle"):
        # Every block is selected.
        np.testing.assert_allclose(result.average(name, BLOCKS), expected, atol=1e-5)
        assert not np.allclose(result.average(name, 5), expected, atol=1e-3)
    np.testing.assert_allclose(result.average("selected", 5), compute_losses(model, windows), atol=1e-5)
    few = compute_losses(share_weights(model, 3), windows)
    np.testing.assert_allclose(result.average("window"), few, atol=1e-5)
    mean_key = ModelConfig(**SIZES, branches=("sel",), nsa=NSAConfig(**NSA, scores="mean_key"))
    by_mean_key = NSATransformer(mean_key).double().eval()
    by_mean_key.load_state_dict(dense.state_dict())
    np.testing.assert_allclose(result.average("mean_key", 5), compute_losses(by_mean_key, windows), atol=1e-5)
    five, every = result.mass
    assert five.windows == 3 and len(five.fractions["chosen"]) == 2 and not every.fractions
    assert all(0 < share <= 1 + 1e-6 for share in five.fractions["chosen"] + five.fractions["nearest"])
    with pytest.raises(KeyError, match="oracle with 6 blocks"):
        result.average("oracle", 6)


def test_a_control_is_compared_by_window() -> None:
    model, windows = make_model(), make_windows(4)
    dense = {"branches": ("cmp", "sel", "win"), "indexer_block": 0, "selection_loss": 0.0, "attention": "dense"}
    control = make_model(**dense)
    result = measure_conversion(model, windows, [5], control=control)
    np.testing.assert_allclose(result.average("control"), compute_losses(control, windows), atol=1e-5)
    by_window = np.array([compute_losses(model, [w]) - compute_losses(control, [w]) for w in windows])
    expected = np.array([by_window.mean(0), 1.96 * by_window.std(0, ddof=1) / 2]).T
    np.testing.assert_allclose(result.compare("selected", 5, "control"), expected, atol=1e-5)
    (line,) = (line for line in format_result(result) if line.startswith("selected, 5 blocks"))
    assert line.endswith(f"from control: {expected[1, 0]:+.4f} ± {expected[1, 1]:.4f}")
    single = measure_conversion(model, windows[:1], [5], control=control)
    assert np.isnan(single.compare("selected", 5)[0][1]) and "±" not in "".join(format_result(single))
    with pytest.raises(ConfigError, match=r"control: expected a run with model\.attention: dense"):
        measure_conversion(model, windows, [5], control=model)


def test_weights_are_shared_not_copied() -> None:
    model = make_model(indexer_every=2)
    shared = share_weights(model, 9)
    assert shared.config.nsa.n_sel == 9 and shared.head.weight.data_ptr() == model.head.weight.data_ptr()
    mean_key = share_weights(model, 9, "mean_key")
    assert mean_key.config.scores == "mean_key" and mean_key.config.indexer_every == 1
    assert model.config.nsa.n_sel == 5


def test_models_that_are_not_converted_are_refused() -> None:
    for options in ({"branches": ("sel", "win")}, {"attention": "dense"}):
        with pytest.raises(ConfigError, match="evaluate a converted model"):
            measure_conversion(make_model(**options), make_windows(), [5])
    with pytest.raises(ConfigError, match=r"nsa.n_sel = 2 is too small"):
        measure_conversion(make_model(), make_windows(), [2])
