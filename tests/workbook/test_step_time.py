"""Floors of a training step equal hand calculations, and the recorded parts add up to the step."""

from __future__ import annotations

import pytest

from nsa_lab.attention import geometry
from nsa_lab.config import ModelConfig
from nsa_lab.train.estimate import load_reference_throughput
from nsa_lab.workbook import step_time


@pytest.fixture(scope="module")
def report() -> dict:
    return load_reference_throughput()


def test_parts_add_up_to_the_measured_step(report: dict) -> None:
    for row in report["rows"]:
        for kind in ("nsa", "dense"):
            parts = step_time.compute_part_times(row, kind)
            assert parts.keys() == row[kind]["breakdown"].keys()
            assert sum(parts.values()) * row[kind]["tokens_per_s"] == pytest.approx(1e9)


def test_floors_are_flops_divided_by_rates(report: dict) -> None:
    model = ModelConfig.model_validate(report["model"])
    least = step_time.compute_floors({"seq_len": 2048}, model, 800e12)
    # 12 layers x 12 heads; q k and p v are 64 wide, a product is two FLOPs, and the backward pass 2.5 times that.
    pair = 12 * 12 * 2 * (64 + 64) * 3.5
    assert least["dense"]["dense attention"] == pytest.approx(pair * 1024.5 / 500e12 * 1e9)
    keys = geometry.mean_reads(2048, model.nsa)
    assert least["nsa"]["selected"] == pytest.approx(pair * keys["sel"] / 500e12 * 1e9)
    assert least["nsa"]["window"] == pytest.approx(pair * keys["win"] / 500e12 * 1e9)
    assert least["nsa"]["compressed"] == pytest.approx(pair * keys["cmp"] / 500e12 * 1e9)
    joined = {"seq_len": 2048, "nsa": {"breakdown": {"compressed and window": 0.1}}}
    assert step_time.compute_floors(joined, model, 800e12)["nsa"]["compressed and window"] == pytest.approx(
        least["nsa"]["compressed"] + least["nsa"]["window"]
    )
    assert least["nsa"]["gemm"] == pytest.approx(6 * (78_600_960 - 256 * 768) / 800e12 * 1e9)


def test_no_part_is_faster_than_its_floor(report: dict) -> None:
    model = ModelConfig.model_validate(report["model"])
    for row in report["rows"]:
        for kind, least in step_time.compute_floors(row, model, report["gemm_flops_per_s"]).items():
            took = step_time.compute_part_times(row, kind)
            assert all(took[part] > 0.8 * floor for part, floor in least.items())


@pytest.mark.slow
def test_plot_and_table_have_every_part(report: dict) -> None:
    figure = step_time.plot_report(report)
    assert len(figure.axes) == len(report["rows"])
    text = step_time.format_table(report)
    assert "whole step" in text and all(part in text for part in report["rows"][0]["nsa"]["breakdown"])
