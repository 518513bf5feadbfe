"""Each check before a run can fail. A healthy run passes all of them and is unchanged afterwards."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from looping import looped
from stage_config import make_staged_config
from torch import Tensor, nn

from nsa_lab.attention import torch_backend
from nsa_lab.config import RunConfig
from nsa_lab.data import BuildProgress, DataError, Dataset
from nsa_lab.runs import directory, lifecycle, resolve
from nsa_lab.train.build import Builders, TrainContext, build_context
from nsa_lab.train.distributed import World
from nsa_lab.train.estimate import estimate_resources
from nsa_lab.train.guard import PreflightCheck
from nsa_lab.train.preflight import initial_loss, startup_checks
from nsa_lab.train.preflight.branch_parity import _compute_error_ratios

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
def make_context(make_tiny_config: Tiny, builders: Builders) -> Callable[..., TrainContext]:
    """`parts(**changes)`: the training context of that run."""

    def make(**changes: Any) -> TrainContext:
        stages = changes.pop("stages", None)
        config = make_tiny_config(**changes)
        config = make_staged_config(config, stages) if stages else config
        dataset = builders.data(config.data, config.model.vocab_size, config.train.longest_stage.seq_len, None)
        return build_context(config, World(), torch.device("cpu"), dataset, builders)

    return make


def failed(result: Any) -> list[str]:
    return [check.name for check in result if not check.ok]


@pytest.mark.slow
def test_a_healthy_run_passes_every_check_in_order(make_context: Callable[..., TrainContext], tmp_path: Path) -> None:
    context = make_context(min_tokens_per_s=1.0)
    before = [p.detach().clone() for p in context.model.parameters()]
    result = list(startup_checks.run_preflight(context, tmp_path))
    assert [c.name for c in result] == ALL and not failed(result)
    assert all(isinstance(c, PreflightCheck) and c.value and c.limit and c.seconds >= 0 for c in result)
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    assert all(torch.equal(a, b) for a, b in zip(before, context.model.parameters(), strict=True))
    assert not context.optimizer.state, "and no moments"


@pytest.mark.slow
def test_min_tokens_per_s_is_compared_with_the_measured_speed(
    make_context: Callable[..., TrainContext], tmp_path: Path
) -> None:
    result = list(startup_checks.check_checkpoint_and_throughput(make_context(min_tokens_per_s=1e12), tmp_path))
    assert failed(result) == ["throughput"] and "tokens/s" in result[-1].value


@pytest.mark.slow
def test_a_short_first_stage_is_timed_with_its_own_steps(
    make_context: Callable[..., TrainContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of the second stage have another length and batch size."""
    few = {"steps": 2, "seq_len": 64, "batch_size": 3, "lr": 1e-3}
    stages = [few, few | {"seq_len": 96, "batch_size": 1}]
    context, seen = make_context(stages=stages, min_tokens_per_s=1.0), []
    step = context.stepper.step

    def counted(x: Tensor, *others: Any, **kwargs: Any) -> Tensor:
        seen.append(tuple(x.shape))
        return step(x, *others, **kwargs)

    monkeypatch.setattr(context.stepper, "step", counted)
    assert not failed(startup_checks.check_checkpoint_and_throughput(context, tmp_path))
    assert len(seen) > 6 and set(seen) == {(3, 64)}


PROMISED = {
    "model": {"dim": 1024, "n_layers": 8},
    "data": {"source": "stdlib", "max_tokens": None, "val_fraction": 0.02},
}
PRODUCTION = {"runtime": {"profile": "production"}}


@pytest.mark.parametrize(
    "change", [{"model": {"dim": 128, "n_layers": 1}}, {"save_every": 0}, {"data": {"source": "synthetic"}}]
)
def test_a_production_run_refuses_a_tiny_model_no_checkpoints_and_synthetic_data(
    make_tiny_config: Tiny, change: dict[str, Any]
) -> None:
    """Each problem separately, in a run that satisfies the other requirements."""
    config = make_tiny_config(**PROMISED | change, **PRODUCTION)
    check = startup_checks.check_profile(config, estimate_resources(config))
    assert not check.ok and "50,000,000" in check.limit
    assert startup_checks.check_profile(make_tiny_config(**change), estimate_resources(make_tiny_config(**change))).ok, (
        "a smoke run may"
    )


def test_a_valid_production_run_passes(make_tiny_config: Tiny) -> None:
    config = make_tiny_config(**PROMISED, **PRODUCTION)
    assert startup_checks.check_profile(config, estimate_resources(config)).ok


def test_the_peak_of_every_stage_is_checked(
    make_context: Callable[..., TrainContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = {"steps": 4, "seq_len": 32, "batch_size": 2, "lr": 1e-3}
    context = make_context(stages=[stage, stage])
    assert startup_checks.check_units(context).ok
    monkeypatch.setattr(startup_checks, "compute_learning_rate", lambda step, train: 1e-3 if step <= 4 else 5e-4)
    assert not startup_checks.check_units(context).ok


def test_preflight_detects_a_full_disk(make_tiny_config: Tiny, tmp_path: Path) -> None:
    config = make_tiny_config()
    assert startup_checks.check_disk(config, estimate_resources(config), tmp_path).ok
    assert not startup_checks.check_disk(config, replace(estimate_resources(config), checkpoint_bytes=2**60), tmp_path).ok


def test_the_disk_has_space_for_every_retained_checkpoint(
    make_tiny_config: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_tiny_config(keep_last=2, save_every=1)
    planned = estimate_resources(config)
    for free, enough in ((3 * planned.checkpoint_bytes, False), (3 * planned.checkpoint_bytes + 1, True)):
        monkeypatch.setattr(startup_checks.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        assert startup_checks.check_disk(config, planned, tmp_path).ok == enough, (
            "two that are kept, and the one being written"
        )


def test_preflight_detects_changed_shards(
    make_context: Callable[..., TrainContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    def changed(self: Any) -> None:
        raise DataError("train-00000.bin does not match its sha256")

    context = make_context()
    assert startup_checks.check_data(context).ok
    monkeypatch.setattr(type(context.dataset), "verify", changed)
    assert "train-00000.bin" in startup_checks.check_data(context).value and not startup_checks.check_data(context).ok


# Number of heads. Their estimated standard deviation exceeds the true one by this factor in one of 10,000 tests.
N_HEADS, ESTIMATE_RANGE = 20, 1.64
INITIAL_VARIANTS: list[Any] = [
    {},
    {"dim": 8, "n_heads": 2, "n_kv_groups": 1},  # often more than 2% from ln V
    *(
        pytest.param(changes, marks=pytest.mark.nightly)
        for changes in ({"dim": 24, "attention": "dense"}, {"dim": 64, "n_heads": 8, "matching_heads": 1})
    ),
    {"vocab_size": 2048},
    {"dim": 128, "vocab_size": 300, "embedding_norm": True},
    {"ngrams": 3, "ngram_rows": 512, "ngram_width": 16, "embedding_norm": True, "matching_heads": 1, "rotary_share": 0.5},
]


@pytest.mark.slow
@looped
@pytest.mark.parametrize("changes", INITIAL_VARIANTS)
@pytest.mark.parametrize("seed", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_the_initial_loss_of_any_model_follows_from_its_head(
    builders: Builders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], seed: int
) -> None:
    """Variants of `ci` pass. A wrong loss, wrong logits and shifted targets of each do not."""
    (tmp_path / "text.txt").write_bytes((resolve.get_root() / "CONTRIBUTING.md").read_bytes() * 3)
    sections = resolve.load_config("ci", []).to_dict()
    sections["model"] |= changes
    sections["train"]["seed"] = seed
    sections["data"] = {"source": "local", "path": str(tmp_path), "val_fraction": 0.3}
    config = RunConfig.from_dict(sections)
    dataset = builders.data(config.data, config.model.vocab_size, config.train.longest_stage.seq_len, None)
    context = build_context(config, World(), torch.device("cpu"), dataset, builders)
    assert initial_loss.check_initial_loss(context).ok, initial_loss.check_initial_loss(context)
    expected, tolerance = initial_loss.compute_expected_loss(config.model, context.evaluations[0][0][1])
    low, high = initial_loss.compute_logit_bounds(config.model)
    # The bounds include five standard deviations of many heads.
    losses, deviations = list[float](), list[float]()
    generator = torch.Generator().manual_seed(seed + 100)  # the embeddings have another seed
    for _ in range(N_HEADS):
        context.model.initialize_layer("head", generator)
        check = initial_loss.check_initial_loss(context)
        loss, deviation = map(float, re.findall(r"[\d.]+", check.value))
        assert check.ok, check
        losses.append(loss - expected)
        deviations.append(deviation)
    assert max(map(abs, losses)) < tolerance and low < min(deviations) < max(deviations) < high
    estimate = np.std(losses, ddof=1)
    assert abs(np.mean(losses)) < 5 * estimate / N_HEADS**0.5 and 5 * estimate < ESTIMATE_RANGE * tolerance
    with torch.no_grad():
        for factor in (10, 0.1, 1.4):
            context.model.head.weight.mul_(factor)
            assert not initial_loss.check_initial_loss(context).ok, factor
            context.model.head.weight.div_(factor)
        tied = context.model.embedding.weight.clone()
        context.model.head.weight, own = torch.nn.Parameter(tied), context.model.head.weight
        assert not initial_loss.check_initial_loss(context).ok, "the scale of embeddings"
        context.model.head.weight = own
    for factor in (1 / math.log(2), math.log(2), 0.9):
        with monkeypatch.context() as patch:
            sum_losses = initial_loss.sum_token_losses
            patch.setattr(initial_loss, "sum_token_losses", lambda *a, f=factor, s=sum_losses: f * s(*a))
            assert not initial_loss.check_initial_loss(context).ok, factor
    inputs, targets = context.evaluations[0][0]
    for wrong in (inputs, targets.roll(-1, 1), targets.roll(1, 0)):
        monkeypatch.setattr(type(context.evaluations[0]), "__getitem__", lambda held_out, index, w=wrong: (inputs, w))
        assert not initial_loss.check_initial_loss(context).ok


@pytest.mark.parametrize(
    "future",
    [
        pytest.param(lambda x: x.mean(1, keepdim=True), id="all of it"),
        pytest.param(lambda x: x.roll(-1, 1), id="the next token alone"),
    ],
)
def test_preflight_detects_a_model_that_is_not_causal(
    make_context: Callable[..., TrainContext], future: Callable[[Tensor], Tensor]
) -> None:
    context = make_context()
    assert startup_checks.check_causality(context).ok
    context.model.blocks[0].mlp.register_forward_hook(lambda module, inputs, output: output + 1e-6 * future(output))
    assert not startup_checks.check_causality(context).ok


def test_a_parameter_without_gradient_is_named(make_context: Callable[..., TrainContext]) -> None:
    context = make_context(nsa={"phi": "mlp"})
    assert startup_checks.check_gradients(context).ok
    context.model.blocks[1].attention.gate.register_forward_hook(lambda module, inputs, output: output.detach())
    check = startup_checks.check_gradients(context)
    assert not check.ok and check.value == "missing or unusable: blocks.1.attention.gate.weight"


def test_a_gradient_that_is_not_finite_is_named(make_context: Callable[..., TrainContext]) -> None:
    context = make_context()
    context.model.blocks[1].mlp.up.weight.register_hook(lambda grad: grad * float("nan"))
    assert startup_checks.check_gradients(context).value == "missing or unusable: blocks.1.mlp.up.weight"


@pytest.mark.parametrize("seq_len", [7, 32])
def test_a_compression_without_gradient_passes_only_if_no_block_fits(
    make_context: Callable[..., TrainContext], seq_len: int
) -> None:
    context = make_context(nsa={"phi": "mlp"}, seq_len=seq_len)
    for name, p in context.model.named_parameters():
        if ".phi_" in name:
            p.register_hook(torch.zeros_like)
    assert startup_checks.check_gradients(context).ok == (seq_len < context.config.nsa.l)


def test_gradients_are_checked_on_the_micro_batch_with_the_most_tokens(make_context: Callable[..., TrainContext]) -> None:
    """The memory check uses its peak; the stage with the longest rows may have few of them."""
    wide = {"steps": 2, "seq_len": 64, "batch_size": 3, "lr": 1e-3}
    context, seen = make_context(stages=[wide, wide | {"seq_len": 96, "batch_size": 1}]), []
    context.model.register_forward_pre_hook(lambda module, inputs: seen.append(tuple(inputs[0].shape)))
    assert startup_checks.check_gradients(context).ok and seen == [(3, 64)]


@pytest.mark.parametrize("l_sel", [4, 8, 16])
def test_an_indexer_learns_from_its_own_loss(make_context: Callable[..., TrainContext], l_sel: int) -> None:
    """With 32 tokens and blocks of 16, every block is selected; with blocks of 8, all but one, which has probability 1."""
    model = {"selection_loss": 0.1, "indexer_block": 4}
    context = make_context(model=model, nsa={"l_sel": l_sel})
    assert startup_checks.check_gradients(context).ok
    for name, p in context.model.named_parameters():
        if ".indexer.qk" in name:
            p.register_hook(torch.zeros_like)
    assert startup_checks.check_gradients(context).ok == (l_sel > 4)


def test_a_row_with_one_compressed_block_passes(make_context: Callable[..., TrainContext]) -> None:
    """A query that sees one key has gradient 0, so its rounding error has no relative size."""
    context = make_context(seq_len=11)
    assert context.config.nsa.l <= 11 < context.config.nsa.l + context.config.nsa.d
    assert startup_checks.check_kernel_parity(context).ok


@pytest.mark.parametrize(("ratio", "ok"), [(1.0, True), (1.01, False)])
def test_the_largest_allowed_error_passes(
    make_context: Callable[..., TrainContext], monkeypatch: pytest.MonkeyPatch, ratio: float, ok: bool
) -> None:
    monkeypatch.setattr(startup_checks, "find_worst_error_ratio", lambda make_context: (ratio, "window, output"))
    assert startup_checks.check_kernel_parity(make_context()).ok == ok


@pytest.mark.parametrize("branch", ["compressed", "selected"])
def test_every_branch_is_compared_with_the_definition(
    make_context: Callable[..., TrainContext], monkeypatch: pytest.MonkeyPatch, branch: str
) -> None:
    right = getattr(torch_backend, f"{branch}_attention")

    def wrong(*inputs: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        out, lse = right(*inputs, **kwargs)
        return 1.01 * out, lse

    monkeypatch.setattr(torch_backend, f"{branch}_attention", wrong)
    check = startup_checks.check_kernel_parity(make_context())
    assert not check.ok and branch in check.value


@looped
@pytest.mark.parametrize("branches", [("sel", "win"), ("cmp", "win"), ("cmp",), ("sel",), ("win",)], ids="-".join)
def test_only_branches_that_exist_are_compared(
    make_context: Callable[..., TrainContext], monkeypatch: pytest.MonkeyPatch, branches: tuple[str, ...]
) -> None:
    """Blocks of a model without the compressed branch are selected by mean keys."""
    scores = {} if "cmp" in branches or "sel" not in branches else {"scores": "mean_key"}
    context = make_context(model={"branches": branches}, nsa={"l_sel": 4, "n_sel": 4, **scores})
    assert startup_checks.check_kernel_parity(context).ok
    for branch, name in {"cmp": "compressed", "sel": "selected", "win": "window"}.items():
        right = getattr(torch_backend, f"{name}_attention")

        def wrong(*inputs: Any, right: Any = right, **kwargs: Any) -> tuple[Tensor, Tensor]:
            out, lse = right(*inputs, **kwargs)
            return 1.01 * out, lse

        with monkeypatch.context() as patch:
            patch.setattr(torch_backend, f"{name}_attention", wrong)
            assert startup_checks.check_kernel_parity(context).ok == (branch not in branches)


def test_a_wrong_kernel_is_named(make_context: Callable[..., TrainContext], monkeypatch: pytest.MonkeyPatch) -> None:
    context = make_context()
    assert startup_checks.check_kernel_parity(context).ok
    right = torch_backend.window_attention

    def wrong(q: Tensor, k: Tensor, v: Tensor, nsa: Any) -> tuple[Tensor, Tensor]:
        return right(q, k, v, nsa.model_copy(update={"w": nsa.w + 1}))

    monkeypatch.setattr(torch_backend, "window_attention", wrong)
    check = startup_checks.check_kernel_parity(context)
    assert not check.ok and "window" in check.value


def test_an_indexers_selection_is_compared_with_the_definition(
    make_context: Callable[..., TrainContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"selection_loss": 0.1, "indexer_block": 2, "indexer_width": 2, "indexer_heads": 3}
    context = make_context(model=model, nsa={"l_sel": 4, "n_sel": 5})
    assert startup_checks.check_kernel_parity(context).ok
    right = torch_backend.select_blocks

    def wrong(q: Tensor, k_cmp: Tensor, lse: Tensor | None, nsa: Any) -> Tensor:
        """Fail only for the sizes of the indexer."""
        is_indexer = nsa.l == 2 and k_cmp.shape[3] == 2 and q.shape[2] == 3 * k_cmp.shape[2]
        return right(q, k_cmp.flip(1) if is_indexer else k_cmp, lse, nsa)

    monkeypatch.setattr(torch_backend, "select_blocks", wrong)
    check = startup_checks.check_kernel_parity(context)
    assert not check.ok and "selection" in check.value


def test_preflight_detects_a_checkpoint_that_is_not_restored(
    make_context: Callable[..., TrainContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup_checks.checkpoint_state, "restore", lambda path, make_context: None)
    result = startup_checks.check_checkpoint_and_throughput(make_context(), tmp_path)
    assert failed(result) == ["checkpoint"]


def test_preflight_detects_non_finite_steps(make_context: Callable[..., TrainContext], tmp_path: Path) -> None:
    """The model is finite in evaluation, but not in training."""
    context = make_context()
    context.model.register_forward_hook(lambda module, inputs, out: out * float("nan") if module.training else None)
    check, _ = startup_checks.check_checkpoint_and_throughput(context, tmp_path)
    assert not check.ok and check.value.endswith("the steps in between were not finite")


@pytest.mark.slow
def test_throughput_counts_tokens(
    make_context: Callable[..., TrainContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses a clock that advances by one second per step."""
    context, now = make_context(min_tokens_per_s=1.0), [0.0]
    monkeypatch.setattr(startup_checks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    step = context.stepper.step
    monkeypatch.setattr(
        context.stepper, "step", lambda *x, **kwargs: now.__setitem__(0, now[0] + 1.0) or step(*x, **kwargs)
    )
    *_, check = startup_checks.check_checkpoint_and_throughput(context, tmp_path)
    assert check.numbers == {"tokens_per_s": context.config.train.tokens_per_step}


def test_preflight_without_a_run_does_the_same_checks(make_tiny_config: Tiny, builders: Builders, tmp_path: Path) -> None:
    assert [c.name for c in startup_checks.run_preflight_without_run(make_tiny_config(), tmp_path, builders)] == ALL
    assert not list(tmp_path.iterdir())


def test_preflight_without_a_run_reports_data_preparation(make_tiny_config: Tiny, tmp_path: Path) -> None:
    recorded = []

    def data(*arguments: Any) -> Dataset:
        arguments[3](BuildProgress("waiting for the source", 0, 0, None))
        raise DataError("it never came")

    with pytest.raises(DataError):
        list(startup_checks.run_preflight_without_run(make_tiny_config(), tmp_path, Builders(data=data), recorded.append))
    assert recorded == ["waiting for the source"]


@pytest.mark.slow
def test_a_run_that_fails_a_check_does_not_start(
    make_tiny_config: Tiny, train: Callable[..., int], tmp_path: Path, builders: Builders
) -> None:
    run_dir = lifecycle.create_run(make_tiny_config(runtime={"profile": "production"}), tmp_path)
    assert train(run_dir) == directory.EXIT_HALTED
    assert "profile" in directory.read_status(run_dir)["reason"]

    def blind(config: RunConfig, device: torch.device) -> nn.Module:
        model = builders.model(config, device)
        model.head.weight.requires_grad_(False)
        nn.init.zeros_(model.blocks[0].mlp.down.weight)
        return model

    run_dir = lifecycle.create_run(make_tiny_config(), tmp_path)
    assert train(run_dir, builders=replace(builders, model=blind)) == directory.EXIT_HALTED
    assert "blocks.0.mlp.up.weight" in directory.read_status(run_dir)["reason"]


def summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q * k).cumsum(1) * v


def test_nan_is_the_worst_error() -> None:
    inputs = tuple(torch.randn(1, 8, 1, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    result = _compute_error_ratios(lambda *x: summed(*x) * float("nan"), summed, inputs)
    assert set(result.values()) == {float("inf")}


@pytest.mark.parametrize(("place", "name"), [(0, "gradient of q"), (1, "gradient of k"), (2, "gradient of v")])
def test_the_gradient_that_is_wrong_is_named(place: int, name: str) -> None:
    inputs = tuple(torch.randn(1, 8, 1, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))

    def wrong(*x: Tensor) -> Tensor:
        return summed(*(2 * one - one.detach() if i == place else one for i, one in enumerate(x)))

    assert [one for one, ratio in _compute_error_ratios(wrong, summed, inputs).items() if ratio > 1] == [name]


def test_an_output_may_have_twice_the_error_of_plain_low_precision() -> None:
    inputs = tuple(torch.randn(1, 8, 1, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))

    def rough(off: float) -> Callable[..., Tensor]:
        return lambda *x: summed(*x) + (off if x[0].dtype == torch.float32 else 0.0)

    assert _compute_error_ratios(rough(0.3), rough(0.1), inputs)["output"] == pytest.approx(1.5, rel=1e-2)


def test_errors_are_relative_to_the_scale_of_the_values() -> None:
    inputs = tuple(1e-3 * torch.randn(1, 8, 1, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    assert min(_compute_error_ratios(lambda *x: 1.01 * summed(*x), summed, inputs).values()) > 1
