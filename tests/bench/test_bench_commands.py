"""Every command line option reaches its benchmark function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from looping import looped
from typer.testing import CliRunner

from nsa_lab.bench.attention_rows import Shape
from nsa_lab.cli import app
from nsa_lab.config import ConfigError, RunConfig
from nsa_lab.runs.resolve import find_params_file

SMOKE = RunConfig.from_yaml(find_params_file("smoke")).model
DENSE = RunConfig.from_yaml(find_params_file("long_64k_dense")).model
WIDE = Shape(64, 1, 8, 2, 48, 16)


@looped
@pytest.mark.parametrize(
    ("function", "command", "handed"),
    [
        (
            "attention_speed.run_attention_bench",
            "attention --shape 64x2 --shape 64x1xH8xG2xD48xV16 --backend torch --parts --device cpu",
            (
                ((Shape(64, 2), WIDE), None),
                {"backend": "torch", "model": None, "picture": None, "parts": True, "device": "cpu"},
            ),
        ),
        (
            "attention_speed.run_attention_bench",
            "attention --shape 64x2 --shape 64x1xH8xG2xD48xV16 --preset smoke --device cpu",
            (
                ((Shape(64, 2).with_heads_of(SMOKE), WIDE), None),
                {"backend": "auto", "model": SMOKE, "picture": None, "parts": False, "device": "cpu"},
            ),
        ),
        (
            "attention_speed.run_attention_bench",
            "attention --json {json} --picture {picture} --device cpu",
            (
                (None, "{json}"),
                {"backend": "auto", "model": None, "picture": "{picture}", "parts": False, "device": "cpu"},
            ),
        ),
        (
            "packed_attention.run_packed_bench",
            "attention --packed --backend torch --device cpu",
            ((None,), {"backend": "torch", "device": "cpu"}),
        ),
        (
            "tune_tiles.run_tune",
            "tune --shape 64x2 --most 7 --device cpu",
            (((Shape(64, 2),), None), {"kernels": None, "max_tiles": 7, "device": "cpu"}),
        ),
        (
            "decode_speed.run_decode_bench",
            "decode --length 600 --length 700 --batch 2 --batch 3 --layers 5 --backend torch --json {json}",
            (
                ([600, 700], "{json}"),
                {"batches": [2, 3], "layers": 5, "backend": "torch", "device": None, "picture": None},
            ),
        ),
        (
            "decode_speed.run_decode_bench",
            "decode --picture {picture}",
            ((None, None), {"batches": (1,), "layers": None, "backend": None, "device": None, "picture": "{picture}"}),
        ),
        (
            "decode_speed.run_decode_bench",
            "decode --preset smoke --device cpu",
            (
                (None, None),
                {
                    "batches": (1,),
                    "layers": None,
                    "backend": None,
                    "device": "cpu",
                    "model": SMOKE,
                    "picture": None,
                },
            ),
        ),
        (
            "decode_speed.run_decode_bench",
            "decode --preset smoke --preset long_64k_dense",
            (
                (None, None),
                {
                    "batches": (1,),
                    "layers": None,
                    "backend": None,
                    "device": None,
                    "model": SMOKE,
                    "baseline": DENSE,
                    "picture": None,
                },
            ),
        ),
        (
            "training_speed.run_train_bench",
            "train --shape 64x2 --preset smoke --picture {picture} --device cpu",
            ((((64, 2),), None), {"model": SMOKE, "picture": "{picture}", "device": "cpu"}),
        ),
        (
            "document_masking.run_documents_bench",
            "train --documents --text a/b.txt --device cpu",
            ((None, None), {"text": Path("a/b.txt"), "device": "cpu"}),
        ),
        (
            "trainer_overhead.run_trainer_bench",
            "trainer --ranks 3 --parallel fsdp --steps 9 --device cpu",
            ((None,), {"ranks": 3, "parallel": "fsdp", "steps": 9, "device": "cpu"}),
        ),
    ],
)
def test_options_reach_the_benchmark(
    function: str, command: str, handed: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(f"nsa_lab.bench.{function}", lambda *given, **named: asked.append((given, named)))
    files = {"json": str(tmp_path / "json"), "picture": str(tmp_path / "picture.PNG")}
    said = CliRunner().invoke(app, ["bench", *command.format_map(files).split()])
    assert said.exit_code == 0, said.output
    given, named = handed

    def meant(value: Any) -> Any:
        return Path(value.format_map(files)) if isinstance(value, str) and value.startswith("{") else value

    assert asked == [(tuple(map(meant, given)), {key: meant(value) for key, value in named.items()})]


def test_gpu_benchmarks_stop_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for command in (
        "attention",
        "attention --packed",
        "tune",
        "train",
        "train --documents",
        "trainer",
        "trainer --device cuda",
    ):
        result = CliRunner().invoke(app, ["bench", *command.split()])
        assert isinstance(result.exception, ConfigError) and "--device cpu" in str(result.exception), command
        assert not result.output
    for command in ("trainer", "decode"):
        result = CliRunner().invoke(app, ["bench", command, "--device", "tpu"])
        assert "expected cuda or cpu" in str(result.exception)
    result = CliRunner().invoke(app, ["bench", "decode", "--device", "cuda"])
    assert isinstance(result.exception, ConfigError) and "no CUDA device" in str(result.exception)
    result = CliRunner().invoke(app, ["bench", "decode", *3 * ["--preset", "smoke"]])
    assert result.exit_code == 2 and "got 3 presets" in result.output
