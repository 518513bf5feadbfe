"""The dense twin of a configuration with as many parameters, and what still differs.

NSA has key and value projections for three branches, and gates; a dense model of the same sections has fewer parameters.
Its twin gets them back in the MLP, whose width is the one knob that every layer shares.
"""

from __future__ import annotations

from dataclasses import dataclass

from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.runs.summary import format_size
from nsa_lab.train.estimate import ResourceEstimate, build_meta_model, estimate_resources


@dataclass(frozen=True)
class MatchedBaseline:
    """`config` is the dense twin's; `planned` are the plans of NSA and of its twin."""

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
            ("memory at the peak", nsa.memory_bytes, dense.memory_bytes, format_size),
        ]
        return "\n".join(
            [
                f"the dense twin of {nsa.name} with as many parameters has model.mlp_hidden = {self.config.model.hidden_width:,}",
                f"  {'':<20}{'NSA':>14}{'twin':>14}{'NSA / twin':>13}",
                *(
                    f"  {name:<20}{write(ours):>14}{write(theirs):>14}{ours / theirs - 1:>+13.2%}"
                    for name, ours, theirs, write in rows
                ),
                f"  train it with: {self.command}",
            ]
        )


def build_matched_baseline(config: RunConfig) -> MatchedBaseline:
    """The dense twin of `config` whose parameters are as near as the width of its MLP allows.

    Raises `ConfigError` for a dense configuration, which is a twin itself, and for a model whose twin would need no MLP.
    """
    if config.model.attention != "nsa":
        raise ConfigError(f"{config.name} is dense: a twin is made of an NSA configuration; give that one")
    hidden = compute_matched_hidden(config)
    if hidden < 1:
        raise ConfigError(
            f"{config.name}: a dense model of these sections has more parameters than NSA even without an MLP"
        )
    dense = _make_dense_config(config, hidden)
    return MatchedBaseline(dense, (estimate_resources(config), estimate_resources(dense)))


def compute_matched_hidden(config: RunConfig) -> int:
    """The width of a dense twin's MLP at which it has as many parameters: they grow by the same number with every unit."""
    nsa, one, two = (
        build_meta_model(c.model).parameter_count()
        for c in (config, _make_dense_config(config, 1), _make_dense_config(config, 2))
    )
    return 1 + round((nsa - one) / (two - one))


def _make_dense_config(config: RunConfig, hidden: int) -> RunConfig:
    model = config.model.model_copy(update={"attention": "dense", "mlp_hidden": hidden})
    return config.model_copy(update={"name": f"{config.name}_twin", "model": model})
