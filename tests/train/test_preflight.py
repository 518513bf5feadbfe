"""Each check before a run can fail, and a healthy run passes them all unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stage_config import make_staged_config
from torch import Tensor, nn

from nsa_lab.attention import torch_backend
from nsa_lab.config import RunConfig
from nsa_lab.data import BuildProgress, DataError, Dataset
from nsa_lab.runs import directory, lifecycle
from nsa_lab.train.build import Builders, TrainContext, build_context
from nsa_lab.train.distributed import World
from nsa_lab.train.estimate import estimate_resources
from nsa_lab.train.preflight import startup_checks
from nsa_lab.train.guard import PreflightCheck
from nsa_lab.train.preflight.kernel_parity import _compute_error_ratios

Tiny = Callable[..., RunConfig]

ALL = [
    "profile",
    "units",
    "disk",
    "data",
    "initial_loss",
    "causality",
    "gradients",
    "memory",
    "kernel_parity",
    "checkpoint",
    "throughput",
]


@pytest.fixture
def parts(tiny: Tiny, builders: Builders) -> Callable[..., TrainContext]:
    """`parts(**changes)`: what a trainer of that run would be made of."""

    def make(**changes: Any) -> TrainContext:
        stages = changes.pop("stages", None)
        config = tiny(**changes)
        config = make_staged_config(config, stages) if stages else config
        dataset = builders.data(config.data, config.model.vocab_size, config.train.longest_stage.seq_len, None)
        return build_context(config, World(), torch.device("cpu"), dataset, builders)

    return make


def failed(found: Any) -> list[str]:
    return [check.name for check in found if not check.ok]


@pytest.mark.slow
def test_a_healthy_run_passes_every_check_in_order(parts: Callable[..., TrainContext], tmp_path: Path) -> None:
    built = parts(min_tokens_per_s=1.0)
    before = [p.detach().clone() for p in built.model.parameters()]
    found = list(startup_checks.run_preflight(built, tmp_path))
    assert [c.name for c in found] == ALL and not failed(found)
    assert all(isinstance(c, PreflightCheck) and c.value and c.limit and c.seconds >= 0 for c in found)
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    assert all(torch.equal(a, b) for a, b in zip(before, built.model.parameters(), strict=True))
    assert not built.optimizer.state, "and no moments"


@pytest.mark.slow
def test_the_gate_is_checked_against_measured_speed(parts: Callable[..., TrainContext], tmp_path: Path) -> None:
    found = list(startup_checks.check_checkpoint_and_throughput(parts(min_tokens_per_s=1e12), tmp_path))
    assert failed(found) == ["throughput"] and "tokens/s" in found[-1].value


def test_a_first_stage_of_few_steps_is_timed_by_steps_of_its_own(
    parts: Callable[..., TrainContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the second are of another length and another batch."""
    few = {"steps": 2, "seq_len": 64, "batch_size": 3, "lr": 1e-3}
    stages = [few, few | {"seq_len": 96, "batch_size": 1}]
    built, seen = parts(stages=stages, min_tokens_per_s=1.0), []
    step = built.stepper.step

    def counted(x: Tensor, *others: Any, **how: Any) -> Tensor:
        seen.append(tuple(x.shape))
        return step(x, *others, **how)

    monkeypatch.setattr(built.stepper, "step", counted)
    assert not failed(startup_checks.check_checkpoint_and_throughput(built, tmp_path))
    assert len(seen) > 6 and set(seen) == {(3, 64)}


PROMISED = {
    "model": {"dim": 1024, "n_layers": 8},
    "data": {"source": "stdlib", "max_tokens": None, "val_fraction": 0.02},
}
PRODUCTION = {"runtime": {"profile": "production"}}


@pytest.mark.parametrize(
    "change", [{"model": {"dim": 128, "n_layers": 1}}, {"save_every": 0}, {"data": {"source": "synthetic"}}]
)
def test_a_production_run_refuses_a_toy_no_checkpoints_and_noise(tiny: Tiny, change: dict[str, Any]) -> None:
    """Each of them alone, in a run that keeps its other promises."""
    config = tiny(**PROMISED | change, **PRODUCTION)
    check = startup_checks.check_profile(config, estimate_resources(config))
    assert not check.ok and "50,000,000" in check.limit
    assert startup_checks.check_profile(tiny(**change), estimate_resources(tiny(**change))).ok, "a smoke run may"


def test_a_production_run_that_keeps_its_promises_passes(tiny: Tiny) -> None:
    config = tiny(**PROMISED, **PRODUCTION)
    assert startup_checks.check_profile(config, estimate_resources(config)).ok


def test_the_peak_of_every_stage_is_checked(parts: Callable[..., TrainContext], monkeypatch: pytest.MonkeyPatch) -> None:
    stage = {"steps": 4, "seq_len": 32, "batch_size": 2, "lr": 1e-3}
    built = parts(stages=[stage, stage])
    assert startup_checks.check_units(built).ok
    monkeypatch.setattr(startup_checks, "compute_learning_rate", lambda step, train: 1e-3 if step <= 4 else 5e-4)
    assert not startup_checks.check_units(built).ok


def test_a_full_disk_is_seen(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny()
    assert startup_checks.check_disk(config, estimate_resources(config), tmp_path).ok
    assert not startup_checks.check_disk(config, replace(estimate_resources(config), checkpoint_bytes=2**60), tmp_path).ok


def test_the_disk_has_room_for_every_checkpoint_that_is_kept(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(keep_last=2, save_every=1)
    planned = estimate_resources(config)
    for free, enough in ((3 * planned.checkpoint_bytes, False), (3 * planned.checkpoint_bytes + 1, True)):
        monkeypatch.setattr(startup_checks.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        assert startup_checks.check_disk(config, planned, tmp_path).ok == enough, (
            "two that are kept, and the one being written"
        )


def test_shards_that_changed_are_seen(parts: Callable[..., TrainContext], monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(self: Any) -> None:
        raise DataError("train-00000.bin does not match its sha256")

    built = parts()
    assert startup_checks.check_data(built).ok
    monkeypatch.setattr(type(built.dataset), "verify", changed)
    assert "train-00000.bin" in startup_checks.check_data(built).value and not startup_checks.check_data(built).ok


def test_a_head_that_starts_too_large_is_seen(parts: Callable[..., TrainContext]) -> None:
    built = parts()
    assert startup_checks.check_initial_loss(built).ok
    with torch.no_grad():
        built.model.head.weight.mul_(30)
    assert not startup_checks.check_initial_loss(built).ok


@pytest.mark.parametrize(("factor", "ok"), [(0.979, False), (0.981, True), (1.019, True), (1.021, False)])
def test_a_first_loss_may_be_two_percent_off_to_either_side(
    parts: Callable[..., TrainContext], monkeypatch: pytest.MonkeyPatch, factor: float, ok: bool
) -> None:
    loss = factor * math.log(256)
    monkeypatch.setattr(startup_checks, "sum_token_losses", lambda logits, targets: torch.tensor(loss * targets.numel()))
    assert startup_checks.check_initial_loss(parts()).ok == ok


@pytest.mark.parametrize(
    "future",
    [
        pytest.param(lambda x: x.mean(1, keepdim=True), id="all of it"),
        pytest.param(lambda x: x.roll(-1, 1), id="the next token alone"),
    ],
)
def test_a_model_that_sees_the_future_is_caught(
    parts: Callable[..., TrainContext], future: Callable[[Tensor], Tensor]
) -> None:
    built = parts()
    assert startup_checks.check_causality(built).ok
    built.model.blocks[0].mlp.register_forward_hook(lambda module, inputs, output: output + 1e-6 * future(output))
    assert not startup_checks.check_causality(built).ok


def test_a_parameter_without_gradient_is_named(parts: Callable[..., TrainContext]) -> None:
    built = parts(nsa={"phi": "mlp"})
    assert startup_checks.check_gradients(built).ok
    built.model.blocks[1].attention.gate.register_forward_hook(lambda module, inputs, output: output.detach())
    check = startup_checks.check_gradients(built)
    assert not check.ok and check.value == "without: blocks.1.attention.gate.weight"


def test_a_gradient_that_is_not_finite_is_named(parts: Callable[..., TrainContext]) -> None:
    built = parts()
    built.model.blocks[1].mlp.up.weight.register_hook(lambda grad: grad * float("nan"))
    assert startup_checks.check_gradients(built).value == "without: blocks.1.mlp.up.weight"


@pytest.mark.parametrize("seq_len", [7, 32])
def test_a_compression_that_learns_nothing_passes_only_where_no_block_fits(
    parts: Callable[..., TrainContext], seq_len: int
) -> None:
    built = parts(nsa={"phi": "mlp"}, seq_len=seq_len)
    for name, p in built.model.named_parameters():
        if ".phi_" in name:
            p.register_hook(torch.zeros_like)
    assert startup_checks.check_gradients(built).ok == (seq_len < built.config.nsa.l)


def test_gradients_are_those_of_the_micro_batch_with_the_most_tokens(parts: Callable[..., TrainContext]) -> None:
    """Its peak is what memory is judged by; the stage with the longest rows may have few of them."""
    wide = {"steps": 2, "seq_len": 64, "batch_size": 3, "lr": 1e-3}
    built, seen = parts(stages=[wide, wide | {"seq_len": 96, "batch_size": 1}]), []
    built.model.register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0].shape)))
    assert startup_checks.check_gradients(built).ok and seen == [(3, 64)]


@pytest.mark.parametrize("l_sel", [4, 8, 16])
def test_an_indexer_learns_from_its_own_loss(parts: Callable[..., TrainContext], l_sel: int) -> None:
    """Of 32 tokens: with blocks of 16 every one is read, and with blocks of 8 all but one, which has all of the choice."""
    model = {"selection_loss": 0.1, "indexer_block": 4}
    built = parts(model=model, nsa={"l_sel": l_sel})
    assert startup_checks.check_gradients(built).ok
    for name, p in built.model.named_parameters():
        if ".indexer.qk" in name:
            p.register_hook(torch.zeros_like)
    assert startup_checks.check_gradients(built).ok == (l_sel > 4)


def test_a_row_with_one_compressed_block_passes(parts: Callable[..., TrainContext]) -> None:
    """A query that sees one key has no gradient, of which no rounding is a share."""
    built = parts(seq_len=11)
    assert built.config.nsa.l <= 11 < built.config.nsa.l + built.config.nsa.d
    assert startup_checks.check_kernel_parity(built).ok


@pytest.mark.parametrize(("ratio", "ok"), [(1.0, True), (1.01, False)])
def test_an_error_of_all_that_is_allowed_is_the_largest(
    parts: Callable[..., TrainContext], monkeypatch: pytest.MonkeyPatch, ratio: float, ok: bool
) -> None:
    monkeypatch.setattr(startup_checks, "find_worst_error_ratio", lambda parts: (ratio, "window, output"))
    assert startup_checks.check_kernel_parity(parts()).ok == ok


@pytest.mark.parametrize("branch", ["compressed", "selected"])
def test_every_branch_is_held_against_the_definition(
    parts: Callable[..., TrainContext], monkeypatch: pytest.MonkeyPatch, branch: str
) -> None:
    right = getattr(torch_backend, f"{branch}_attention")

    def wrong(*inputs: Any, **how: Any) -> tuple[Tensor, Tensor]:
        out, lse = right(*inputs, **how)
        return 1.01 * out, lse

    monkeypatch.setattr(torch_backend, f"{branch}_attention", wrong)
    check = startup_checks.check_kernel_parity(parts())
    assert not check.ok and branch in check.value


def test_a_kernel_that_is_wrong_is_named(parts: Callable[..., TrainContext], monkeypatch: pytest.MonkeyPatch) -> None:
    built = parts()
    assert startup_checks.check_kernel_parity(built).ok
    right = torch_backend.window_attention

    def wrong(q: Tensor, k: Tensor, v: Tensor, nsa: Any) -> tuple[Tensor, Tensor]:
        return right(q, k, v, nsa.model_copy(update={"w": nsa.w + 1}))

    monkeypatch.setattr(torch_backend, "window_attention", wrong)
    check = startup_checks.check_kernel_parity(built)
    assert not check.ok and "window" in check.value


def test_an_indexers_choice_is_held_against_the_definition(
    parts: Callable[..., TrainContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = parts(model={"selection_loss": 0.1, "indexer_block": 2}, nsa={"l_sel": 4, "n_sel": 5})
    assert startup_checks.check_kernel_parity(built).ok
    right = torch_backend.select_blocks

    def wrong(q: Tensor, k_cmp: Tensor, lse: Tensor | None, nsa: Any) -> Tensor:
        return right(q, k_cmp.flip(1) if nsa.l == 2 else k_cmp, lse, nsa)

    monkeypatch.setattr(torch_backend, "select_blocks", wrong)
    check = startup_checks.check_kernel_parity(built)
    assert not check.ok and "selection" in check.value


def test_a_checkpoint_that_does_not_come_back_is_seen(
    parts: Callable[..., TrainContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup_checks.checkpoint_state, "restore", lambda path, parts: None)
    found = startup_checks.check_checkpoint_and_throughput(parts(), tmp_path)
    assert failed(found) == ["checkpoint"]


def test_steps_that_are_not_finite_are_seen(parts: Callable[..., TrainContext], tmp_path: Path) -> None:
    """The model is well where it is looked at, and not where it is trained."""
    built = parts()
    built.model.register_forward_hook(lambda module, inputs, out: out * float("nan") if module.training else None)
    check, _ = startup_checks.check_checkpoint_and_throughput(built, tmp_path)
    assert not check.ok and check.value.endswith("the steps in between were not finite")


def test_speed_is_that_of_tokens(
    parts: Callable[..., TrainContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock on which every step takes a second."""
    built, now = parts(min_tokens_per_s=1.0), [0.0]
    monkeypatch.setattr(startup_checks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    step = built.stepper.step
    monkeypatch.setattr(built.stepper, "step", lambda *x, **how: now.__setitem__(0, now[0] + 1.0) or step(*x, **how))
    *_, check = startup_checks.check_checkpoint_and_throughput(built, tmp_path)
    assert check.numbers == {"tokens_per_s": built.config.train.tokens_per_step}


def test_the_command_without_a_run_does_the_same_checks(tiny: Tiny, builders: Builders, tmp_path: Path) -> None:
    assert [c.name for c in startup_checks.run_preflight_without_run(tiny(), tmp_path, builders)] == ALL
    assert not list(tmp_path.iterdir())


def test_the_command_without_a_run_tells_how_the_filling_goes(tiny: Tiny, tmp_path: Path) -> None:
    told = []

    def data(*arguments: Any) -> Dataset:
        arguments[3](BuildProgress("waiting for the source", 0, 0, None))
        raise DataError("it never came")

    with pytest.raises(DataError):
        list(startup_checks.run_preflight_without_run(tiny(), tmp_path, Builders(data=data), told.append))
    assert told == ["waiting for the source"]


def test_a_run_that_fails_a_check_does_not_start(
    tiny: Tiny, train: Callable[..., int], tmp_path: Path, builders: Builders
) -> None:
    run_dir = lifecycle.create_run(tiny(runtime={"profile": "production"}), tmp_path)
    assert train(run_dir) == directory.EXIT_HALTED
    assert "profile" in directory.read_status(run_dir)["reason"]

    def blind(config: RunConfig, device: torch.device) -> nn.Module:
        model = builders.model(config, device)
        model.head.weight.requires_grad_(False)
        nn.init.zeros_(model.blocks[0].mlp.down.weight)
        return model

    run_dir = lifecycle.create_run(tiny(), tmp_path)
    assert train(run_dir, builders=replace(builders, model=blind)) == directory.EXIT_HALTED
    assert "blocks.0.mlp.up.weight" in directory.read_status(run_dir)["reason"]


def summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q * k).cumsum(1) * v


def test_what_is_not_a_number_is_the_worst_error() -> None:
    inputs = tuple(torch.randn(1, 8, 1, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    found = _compute_error_ratios(lambda *x: summed(*x) * float("nan"), summed, inputs)
    assert set(found.values()) == {float("inf")}


@pytest.mark.parametrize(("place", "name"), [(0, "gradient of q"), (1, "gradient of k"), (2, "gradient of v")])
def test_the_gradient_that_is_wrong_is_named(place: int, name: str) -> None:
    inputs = tuple(torch.randn(1, 8, 1, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))

    def wrong(*x: Tensor) -> Tensor:
        return summed(*(2 * one - one.detach() if i == place else one for i, one in enumerate(x)))

    assert [one for one, ratio in _compute_error_ratios(wrong, summed, inputs).items() if ratio > 1] == [name]


def test_an_output_may_err_twice_what_plain_low_precision_errs() -> None:
    inputs = tuple(torch.randn(1, 8, 1, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))

    def rough(off: float) -> Callable[..., Tensor]:
        return lambda *x: summed(*x) + (off if x[0].dtype == torch.float32 else 0.0)

    assert _compute_error_ratios(rough(0.3), rough(0.1), inputs)["output"] == pytest.approx(1.5, rel=1e-2)


def test_small_numbers_are_held_to_their_own_scale() -> None:
    inputs = tuple(1e-3 * torch.randn(1, 8, 1, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    assert min(_compute_error_ratios(lambda *x: 1.01 * summed(*x), summed, inputs).values()) > 1
