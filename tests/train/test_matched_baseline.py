"""The dense baseline matched in parameters: its width, the remaining differences, and configurations without one."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from nsa_lab.cli import app
from nsa_lab.config import ConfigError, RunConfig, SweepConfig
from nsa_lab.runs import resolve
from nsa_lab.train.estimate import build_meta_model
from nsa_lab.train.matched_baseline import build_matched_baseline

SMALL = RunConfig.from_dict({"model": {"dim": 64, "n_layers": 2, "n_heads": 4, "d_k": 16, "d_v": 16}})


def changed(**sections: dict) -> RunConfig:
    sections_before = SMALL.to_dict()
    return RunConfig.from_dict(
        {**sections_before, **{name: sections_before[name] | values for name, values in sections.items()}}
    )


@pytest.mark.parametrize("sections", [{"nsa": {"phi": "mlp"}}, {"nsa": {"phi": "linear"}}, {"model": {"mlp": "gated"}}])
def test_the_matched_width_is_the_closest_one(sections: dict) -> None:
    config = changed(**sections)
    nsa = build_meta_model(config.model).parameter_count()
    best = build_matched_baseline(config).config.model
    distances = [
        abs(build_meta_model(best.model_copy(update={"mlp_hidden": best.hidden_width + by})).parameter_count() - nsa)
        for by in (-1, 0, 1)
    ]
    assert min(distances) == distances[1] and distances[1] * 2 <= distances[0] + distances[1]


@pytest.mark.slow
def test_the_production_model_has_a_baseline_of_equal_size() -> None:
    result = CliRunner().invoke(app, ["plan", "production_50k", "--twin"])
    assert result.exit_code == 0
    lines = {
        line[:22].strip(): line[22:].split()
        for line in result.output.split("dense baseline of production_50k")[1].splitlines()
    }
    assert lines["parameters"] == ["78,600,960", "78,600,960", "+0.00%"]
    assert lines["MFLOPs per token"] == ["610.1", "583.7", "+4.52%"], "equal parameters, but more FLOPs"
    assert "-p model.attention=dense -p model.mlp_hidden=3346 -p name=production_50k_dense" in result.output


def test_a_dense_configuration_has_no_matched_baseline() -> None:
    with pytest.raises(ConfigError, match=r"expected model\.attention = nsa, got dense"):
        build_matched_baseline(changed(model={"attention": "dense"}))


@pytest.mark.parametrize(("sweep", "nsa"), [("reference_50k", "recipe"), ("fast_twins", "nsa")])
def test_dense_variants_of_sweeps_have_the_matched_width(sweep: str, nsa: str) -> None:
    sweep_config = SweepConfig.from_yaml(resolve.find_sweep_file(sweep))
    first = {
        run.variant: run.config for run in reversed(sweep_config.build_runs(resolve.find_params_file(sweep_config.preset)))
    }
    assert first["dense"].model.hidden_width == build_matched_baseline(first[nsa]).config.model.hidden_width
    assert first["dense"].train == first[nsa].train and first["dense"].data == first[nsa].data


def test_the_fast_preset_has_the_evaluation_windows_of_the_long_run_and_a_smaller_model_than_the_training_recipe() -> None:
    fast, long, recipe = (
        RunConfig.from_yaml(resolve.find_params_file(n)) for n in ("production_fast", "production_50k", "recall_taught")
    )
    windows = [(c.train.eval_batches * c.train.batch_size, c.train.seq_len) for c in (fast, long)]
    assert windows[0] == windows[1]
    assert (
        build_meta_model(fast.model).parameter_count()
        == 79_011_072
        <= build_meta_model(recipe.model).parameter_count()
        == 79_843_584
    )
