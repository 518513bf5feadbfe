"""`nsa-lab demo`: lengths, repetitions, the live plot, the picture, and the time that it takes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from nsa_lab.bench import demo
from nsa_lab.bench.decode_speed import StepTime
from nsa_lab.config import ModelConfig, NSAConfig

TINY = ModelConfig(
    dim=32, n_layers=1, n_heads=2, n_kv_groups=1, d_k=8, d_v=8, nsa=NSAConfig(l=8, d=4, l_sel=16, n_sel=4, w=16)
)


class FakeClock:
    """Time passes only while a length is measured: its number of tokens in milliseconds."""

    def __init__(self) -> None:
        self.now, self.measured = 0.0, list[int]()

    def monotonic(self) -> float:
        return self.now

    def measure(self, config: ModelConfig, lengths: list[int]) -> list[StepTime]:
        (length,) = lengths
        self.now += length / 1e3
        self.measured.append(length)
        n = self.measured.count(length)
        return [StepTime("model", "nsa", length, 1, 8.0 + n, 1), StepTime("model", "dense", length, 1, length / 512 + n, 1)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(demo.time, "monotonic", clock.monotonic)
    return clock


def run(clock: FakeClock, seconds: float, console: Console, **options: object) -> demo.DecodeTimes:
    return demo.run_demo(seconds, console=console, config=TINY, measure=clock.measure, **options)


def test_lengths_double_within_the_time_and_are_then_repeated(clock: FakeClock) -> None:
    for seconds, longest, expected in (
        (1, 8192, [1024]),
        (30, 8192, [1024, 2048, 4096, 8192]),
        (33, 8192, [1024, 2048, 4096, 8192, 1024, 2048, 4096, 8192]),
        (16, 131_072, [1024, 2048, 4096, 1024, 2048, 4096]),
    ):
        clock.now, clock.measured = 0.0, []
        times = run(clock, seconds, Console(file=io.StringIO()), longest=longest)
        assert clock.measured == expected, (seconds, longest)
        assert clock.now <= max(seconds, 1.1)
        repetitions = expected.count(1024)
        assert times.get_ms(1024, "nsa") == 8 + (repetitions + 1) / 2


def test_the_result_is_stated_and_the_bars_are_drawn(clock: FakeClock, tmp_path: Path) -> None:
    shown = io.StringIO()
    picture = tmp_path / "demo.png"
    run(clock, 30, Console(file=shown, force_terminal=True, width=90), longest=8192, picture=picture)
    text = shown.getvalue()
    assert "█" in text and "8,192" in text
    assert "a token takes 9.0 ms with NSA and 17.0 ms with dense attention; NSA is 1.9 times as fast." in text
    assert "Dense attention is at least as fast at 1,024, 2,048, 4,096 tokens." in text
    assert picture.read_bytes().startswith(b"\x89PNG") and str(picture) in text.replace("\n", "")


def test_without_a_terminal_each_length_is_a_line(clock: FakeClock) -> None:
    shown = io.StringIO()
    run(clock, 4, Console(file=shown, width=200))
    assert "1,024 tokens: NSA 9.0 ms, dense 3.0 ms\n" in shown.getvalue() and "█" not in shown.getvalue()


def test_without_matplotlib_it_says_so(clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nsa_lab.config.optional_deps._is_installed", lambda module: module != "matplotlib")
    shown = io.StringIO()
    run(clock, 1, Console(file=shown, width=200), picture=tmp_path / "demo.png")
    assert "no picture: matplotlib is not installed; run: pip install" in shown.getvalue()
    assert not list(tmp_path.iterdir())


def test_the_bundled_model_gives_the_shape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert demo.find_demo_config().n_layers > 2
    monkeypatch.setattr(demo.resolve, "MODELS_DIR", tmp_path)
    assert demo.find_demo_config().n_layers == 2


@pytest.mark.slow
def test_real_models_are_timed() -> None:
    times = demo.run_demo(1, console=Console(file=io.StringIO()), config=TINY)
    assert times.lengths[0] == demo.SHORTEST and all(row.ms and row.ms > 0 for row in times.list_rows())
