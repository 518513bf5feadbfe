"""Each rule reports its own problem and does not report similar, harmless cases."""

from __future__ import annotations

import math
import random

import pytest

from nsa_lab.train.guard import SPIKE_MIN_LOSSES, GateRule, SpikeRule, ThroughputRule, check_non_finite


def falling_losses(count: int = 200) -> list[float]:
    rng = random.Random(0)
    return [1.5 + 4 * math.exp(-n / 60) + rng.gauss(0, 0.05) for n in range(count)]


def test_non_finite_fires_and_names_the_good_step() -> None:
    verdict = check_non_finite(7, float("nan"), 1.0, 1.0)
    assert verdict.action == "halt" and verdict.step == 7 and "step 6" in verdict.text and "loss" in verdict.text
    assert "gradient norm" in check_non_finite(7, 2.0, float("inf"), 1.0).text


def test_non_finite_does_not_fire_on_large_numbers() -> None:
    assert check_non_finite(7, 1e30, 1e30, 0.0) is None


def test_spike_fires_on_a_spike() -> None:
    rule = SpikeRule(6.0, falling_losses())
    verdict = rule.observe(201, 5.0)
    assert verdict.rule == "spike" and verdict.action == "halt" and verdict.value == 5.0 > verdict.limit


def test_a_spike_is_not_part_of_its_own_window() -> None:
    # Among 33 numbers none can be six deviations above their mean.
    assert SpikeRule(6.0, [2.0, 2.1] * (SPIKE_MIN_LOSSES // 2)).observe(SPIKE_MIN_LOSSES + 1, 100.0).rule == "spike"


def test_spike_does_not_fire_on_a_noisy_falling_curve_or_a_plateau() -> None:
    rule = SpikeRule(6.0)
    assert not any(rule.observe(step, loss) for step, loss in enumerate(falling_losses(), 1))
    rule = SpikeRule(6.0, [2.0] * 128)
    assert rule.observe(129, 2.02) is None, "rounding around a plateau is no spike"
    assert SpikeRule(6.0, [200.0] * 128).observe(129, 202.0) is None, "on whatever scale"


def test_spike_does_not_fire_while_its_window_fills_or_when_it_is_off() -> None:
    rule = SpikeRule(6.0, [1.0] * (SPIKE_MIN_LOSSES - 1))
    assert rule.observe(1, 100.0) is None
    assert SpikeRule(0.0, falling_losses()).observe(201, 1e9) is None


def test_spike_resumes_from_a_saved_window() -> None:
    losses = falling_losses()
    whole, first = SpikeRule(6.0), SpikeRule(6.0)
    for loss in losses:
        whole.observe(1, loss)
    for loss in losses[:100]:
        first.observe(1, loss)
    second = SpikeRule(6.0, first.losses)
    for loss in losses[100:]:
        second.observe(1, loss)
    assert second.losses == whole.losses


def test_throughput_halts_when_it_stays_below_the_minimum() -> None:
    rule = ThroughputRule(1000.0, patience=4)
    verdicts = [rule.observe(step, 900.0) for step in range(4)]
    assert verdicts[:3] == [None] * 3 and verdicts[3].rule == "throughput" and verdicts[3].action == "halt"


def test_throughput_does_not_fire_on_a_pause_or_without_a_minimum() -> None:
    rule = ThroughputRule(1000.0, patience=4)
    assert not any(rule.observe(step, 10.0 if step % 4 == 3 else 1500.0) for step in range(40))
    rule = ThroughputRule(0.0)
    assert not any(rule.observe(step, 1.0) for step in range(40))


@pytest.mark.parametrize("pace", [500.0, 400.0, 50.0])
def test_a_drop_to_half_the_best_pace_or_less_warns_once(pace: float) -> None:
    rule = ThroughputRule(0.0, patience_slow=3)
    for step in range(20):
        assert rule.observe(step, 1000.0) is None
    verdicts = [rule.observe(step, pace) for step in range(20, 400)]
    assert [v.rule for v in verdicts if v] == ["slowdown"] and verdicts[2].action == "warn"
    assert "less than 60% of the best pace" in verdicts[2].text and "1,000 tokens/s" in verdicts[2].text


@pytest.mark.parametrize("points", [60, 2000])
def test_a_gradual_decline_to_a_twentieth_is_reported_at_any_rate(points: int) -> None:
    rule = ThroughputRule(0.0)
    rng = random.Random(0)
    findings = [rule.observe(n, (1000.0 - 950.0 * n / points) * rng.uniform(0.95, 1.05), 20.0) for n in range(points)]
    result = [finding for finding in findings if finding]
    assert result and {finding.rule for finding in result} == {"slowdown"}
    # Reported soon after 60%, and not repeatedly once it is well below.
    assert 0.35 * points < result[0].step < 0.55 * points and result[-1].step < 0.55 * points


def test_a_fluctuating_pace_is_not_a_slowdown() -> None:
    rule, rng = ThroughputRule(0.0), random.Random(0)
    assert not any(rule.observe(step, rng.uniform(750.0, 1000.0), 20.0) for step in range(2000))
    rule = ThroughputRule(0.0)
    assert not any(rule.observe(step, 3000.0 if step % 50 == 0 else 1000.0, 20.0) for step in range(2000)), "short bursts"


def test_a_gradual_slowdown_above_half_is_not_reported() -> None:
    rule = ThroughputRule(0.0)
    assert not any(rule.observe(step, 1000.0 - 10 * step) for step in range(40))


def test_saturated_gates_warn_and_name_the_layer() -> None:
    rule = GateRule(patience=3)
    verdicts = [rule.observe(step, [0.1, 0.99], [1e-3, 1e-3]) for step in range(5)]
    result = [v for row in verdicts for v in row]
    assert [(v.rule, v.action) for v in result] == [("saturated", "warn")] and "layer 1" in result[0].text
    assert verdicts[2] == result


def test_frozen_gates_warn_and_name_the_layer() -> None:
    rule = GateRule(patience=3)
    result = [v for step in range(5) for v in rule.observe(step, [0.1, 0.1], [0.0, 1e-7])]
    assert [(v.rule, v.value) for v in result] == [("frozen", 0.0)] and "layer 0" in result[0].text


def test_briefly_saturated_or_slow_gates_give_no_finding() -> None:
    rule = GateRule(patience=3)
    rows = [[0.99], [0.99], [0.5], [0.99], [0.99]]
    assert not any(rule.observe(step, row, [1e-9]) for step, row in enumerate(rows))


@pytest.mark.parametrize("step", [1, 50])
def test_empty_statistics_of_a_dense_model_give_no_finding(step: int) -> None:
    assert GateRule().observe(step, [], []) == []


def test_a_short_burst_of_slowness_is_not_called_a_slowdown() -> None:
    rule = ThroughputRule(0.0)
    for step in range(6):
        assert rule.observe(step, 1000.0, seconds=1.0) is None
    assert not any(rule.observe(step, 100.0, seconds=5.0) for step in range(6, 11)), "25 seconds"
    assert rule.observe(11, 100.0, seconds=5.0).rule == "slowdown"
    assert rule.observe(12, 100.0, seconds=5.0) is None, "said once"


def test_a_non_finite_norm_is_the_reported_value() -> None:
    result = check_non_finite(7, 2.0, math.inf, 1.0)
    assert result is not None and result.value == math.inf and "gradient norm is inf" in result.text


def test_spikes_are_checked_from_the_33rd_loss_on() -> None:
    result = SpikeRule(6.0, [2.0, 2.1] * (SPIKE_MIN_LOSSES // 2)).observe(1, 100.0)
    assert result is not None and result.rule == "spike"
    assert SpikeRule(6.0, ([2.0, 2.1] * SPIKE_MIN_LOSSES)[: SPIKE_MIN_LOSSES - 1]).observe(1, 100.0) is None


def test_a_second_slowdown_is_reported_with_its_own_duration() -> None:
    rule = ThroughputRule(0.0)

    def findings(pace: float, readings: int) -> list[bool]:
        return [rule.observe(1, pace, seconds=5.0) is not None for _ in range(readings)]

    findings(1000.0, 6)
    assert findings(100.0, 4) == [False] * 4
    findings(1000.0, 1)
    assert findings(100.0, 6) == [False] * 5 + [True], "30 seconds of its own, not 20 of the one before"
    findings(1000.0, 1)
    assert findings(100.0, 6) == [False] * 5 + [True], "told again"


def test_layers_are_counted_separately_and_counts_restart() -> None:
    rule = GateRule(patience=2)
    rows = [[0.99, 0.1], [0.1, 0.99], [0.99, 0.1], [0.1, 0.99]]
    assert not any(rule.observe(step, row, [1e-3, 1e-3]) for step, row in enumerate(rows))
