"""The dense baseline of an NSA configuration with the same number of parameters, and the remaining differences.

NSA has key and value projections for three branches, and gates, so a dense model with the same settings has fewer
parameters. The baseline adds them to the MLP, whose width is one number for all layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.runs.summary import format_size
from nsa_lab.train.estimate import ResourceEstimate, build_meta_model, estimate_resources


@dataclass(frozen=True)
class MatchedBaseline:
    """`config`: the configuration of the dense baseline; `estimates`: the estimates of NSA and of the baseline."""

    config: RunConfig
    estimates: tuple[ResourceEstimate, ResourceEstimate]

    @property
    def command(self) -> str:
        model = self.config.model
        return f"-p model.attention=dense -p model.mlp_hidden={model.hidden_width} -p name={self.config.name}"

    def __str__(self) -> str:
        nsa, dense = self.estimates
        rows = [
            ("parameters", nsa.params, dense.params, "{:,}".format),
            ("MFLOPs per token", nsa.flops_per_token_nsa / 1e6, dense.flops_per_token_dense / 1e6, "{:,.1f}".format),
            ("peak memory", nsa.memory_bytes, dense.memory_bytes, format_size),
        ]
        return "\n".join(
            [
                f"dense baseline of {nsa.name}, matched in parameters: mlp_hidden = {self.config.model.hidden_width:,}",
                f"  {'':<20}{'NSA':>14}{'dense':>14}{'NSA / dense':>13}",
                *(
                    f"  {name:<20}{format_number(x):>14}{format_number(y):>14}{x / y - 1:>+13.2%}"
                    for name, x, y, format_number in rows
                ),
                f"  options for training it: {self.command}",
            ]
        )


def build_matched_baseline(config: RunConfig) -> MatchedBaseline:
    """Return the dense baseline of `config` whose parameter count is as close as an integer MLP width allows.

    Raises `ConfigError` for a dense configuration, or if the baseline has too many parameters even without an MLP.
    """
    if config.model.attention != "nsa":
        raise ConfigError(f"{config.name}: expected model.attention = nsa, got dense; give the NSA configuration")
    hidden = compute_matched_hidden(config)
    if hidden < 1:
        raise ConfigError(
            f"{config.name}: a dense model with these settings has more parameters than NSA even without an MLP"
        )
    dense = _make_dense_config(config, hidden)
    return MatchedBaseline(dense, (estimate_resources(config), estimate_resources(dense)))


def compute_matched_hidden(config: RunConfig) -> int:
    """Return the MLP width that matches the parameter count. The count is linear in the width."""
    n_nsa, n_width_1, n_width_2 = (
        build_meta_model(variant.model).parameter_count()
        for variant in (config, _make_dense_config(config, 1), _make_dense_config(config, 2))
    )
    return 1 + round((n_nsa - n_width_1) / (n_width_2 - n_width_1))


def _make_dense_config(config: RunConfig, hidden: int) -> RunConfig:
    model = config.model.model_copy(update={"attention": "dense", "mlp_hidden": hidden})
    return config.model_copy(update={"name": f"{config.name}_dense", "model": model})
