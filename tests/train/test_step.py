"""The optimizer step: equal results for every grouping into micro-batches, and no update from a bad gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from looping import looped
from stage_config import make_staged_config
from torch import Tensor, nn

from nsa_lab.config import RunConfig
from nsa_lab.data import Batch
from nsa_lab.train.build import build_model
from nsa_lab.train.distributed import World
from nsa_lab.train.step import AUXILIARY, GRAD_NORM, LOSS, NON_FINITE, TEXT_LOSS, Readback, Stepper, make_optimizer

Tiny = Callable[..., RunConfig]
CPU = torch.device("cpu")


def stepper(config: RunConfig) -> tuple[nn.Module, torch.optim.Optimizer, Stepper]:
    model = build_model(config, CPU)
    optimizer = make_optimizer(model, config.train)
    auxiliary = model.auxiliary_loss if config.model.has_selection_loss else None
    settings = {"device": CPU, "use_bf16": False, "world": World(), "auxiliary_loss": auxiliary}
    return model, optimizer, Stepper(model, model, optimizer, config.train, **settings)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(256, (4, 33), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1], tokens[:, 1:]


def do_nothing() -> None:
    pass


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_regrouping_the_batch_changes_rounding_only(make_tiny_config: Tiny, micro: int) -> None:
    results, weights = [], []
    for size in (4, micro):
        model, _, step = stepper(make_tiny_config(batch_size=4, accumulate_grad_batches=1, micro_batch_size=size))
        results.append(torch.stack([step.step(*batch(n), 1e-3, do_nothing) for n in range(3)]))
        weights.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(weights[1], weights[0], rtol=0, atol=1e-5)


def test_the_loss_is_the_mean_over_tokens_and_the_norm_is_that_of_its_gradient(make_tiny_config: Tiny) -> None:
    config = make_tiny_config(accumulate_grad_batches=2)
    model, _, step = stepper(config)
    model.double()  # the loss is computed in float64 too
    inputs, targets = batch()
    loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    result = step.step(inputs, targets, 1e-3, do_nothing)
    torch.testing.assert_close(result[LOSS], loss.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(result[GRAD_NORM], norm, rtol=1e-12, atol=0)


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_the_auxiliary_loss_is_trained_on_and_reported_for_any_grouping(make_tiny_config: Tiny, micro: int) -> None:
    taught = {"matching_heads": 1, "selection_loss": 0.3}
    blocks = {"l_sel": 4}  # so that selection has a choice among 32 tokens
    grouped = {"batch_size": 4, "accumulate_grad_batches": 1, "micro_batch_size": micro}
    model, _, step = stepper(make_tiny_config(**grouped, model=taught, nsa=blocks))
    inputs, targets = batch()
    loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    added = model.auxiliary_loss()
    assert added > 0
    gradients = torch.autograd.grad(loss + added, list(model.parameters()))
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    result = step.step(inputs, targets, 1e-3, do_nothing)
    torch.testing.assert_close(result[LOSS], loss.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(result[AUXILIARY], added.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(result[GRAD_NORM], norm, rtol=1e-4, atol=0)


def test_a_step_uses_the_settings_of_its_stage(make_tiny_config: Tiny) -> None:
    """The stages differ in length, batch size and grouping; check results, update and grouping."""
    stage = {"steps": 2, "seq_len": 32, "batch_size": 4, "micro_batch_size": 2, "lr": 1e-3}
    taught = make_tiny_config(model={"matching_heads": 1, "selection_loss": 0.3}, nsa={"l_sel": 4})
    config = make_staged_config(taught, [stage, {**stage, "seq_len": 64, "batch_size": 1, "micro_batch_size": 1}])
    model, _, step = stepper(config)
    inputs, targets = batch()
    loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    added = model.auxiliary_loss()
    gradients = torch.autograd.grad(loss + added, list(model.parameters()))
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    result = step.step(inputs, targets, 1e-3, do_nothing)
    recorded = torch.stack([result[LOSS], result[AUXILIARY], result[GRAD_NORM]])
    torch.testing.assert_close(recorded, torch.stack([loss.detach(), added.detach(), norm]), rtol=1e-4, atol=0)
    assert [len(part.inputs) for part in step.split_micro_batches(Batch(inputs, targets))] == [2, 2]


def test_the_gradient_that_is_applied_is_clipped_and_the_norm_reported_is_not(make_tiny_config: Tiny) -> None:
    model, _, step = stepper(make_tiny_config(grad_clip=1e-3))
    norm = step.step(*batch(), 1e-3, do_nothing)[GRAD_NORM]
    applied = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert norm > 0.1
    torch.testing.assert_close(applied.item(), 1e-3, rtol=1e-3, atol=0)


def test_weight_decay_spares_vectors(make_tiny_config: Tiny) -> None:
    config = make_tiny_config(weight_decay=0.3)
    decayed, spared = make_optimizer(build_model(config, CPU), config.train).param_groups
    assert decayed["weight_decay"] == 0.3 and all(p.ndim >= 2 for p in decayed["params"])
    assert spared["weight_decay"] == 0.0 and all(p.ndim == 1 for p in spared["params"])


def test_applied_lr_is_the_rate_that_updated_the_weights(make_tiny_config: Tiny) -> None:
    """Adam's first update equals the rate for any gradient; later updates are at most a few times larger."""
    model, optimizer, step = stepper(make_tiny_config(weight_decay=0.0))
    learning_rates: list[float] = []
    optimizer.register_step_pre_hook(lambda opt, *_: learning_rates.extend(group["lr"] for group in opt.param_groups))
    for n, lr in enumerate((1e-3, 1e-5, 1e-4)):
        before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        step.step(*batch(n), lr, do_nothing)
        moved = (nn.utils.parameters_to_vector(model.parameters()).detach() - before).abs().max().item()
        assert learning_rates[-2:] == [lr, lr] and step.applied_lr == lr
        assert 0.5 * lr < moved < (1.001 if n == 0 else 20) * lr + 1e-7


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moments = [t for state in optimizer.state.values() for t in state.values()]
    return [t.detach().clone() for t in (*model.parameters(), *moments)]


@looped
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_gradient_changes_no_weight_or_moment_and_the_flag_stays_set(
    make_tiny_config: Tiny, value: float, kind: str
) -> None:
    model, optimizer, step = stepper(make_tiny_config(optimizer=kind))
    step.step(*batch(0), 1e-3, do_nothing)
    before = state_of(model, optimizer)
    handle = model.head.register_forward_hook(lambda module, inputs, output: output * value)
    assert step.step(*batch(1), 1e-3, do_nothing)[NON_FINITE] == 1
    handle.remove()
    assert step.step(*batch(2), 1e-3, do_nothing)[NON_FINITE] == 1, "nothing is applied until the host has seen it"
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(model, optimizer), strict=True))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_good_gradient_changes_every_weight_and_raises_no_flag(make_tiny_config: Tiny, kind: str) -> None:
    model, optimizer, step = stepper(make_tiny_config(optimizer=kind))
    step.step(*batch(0), 1e-3, do_nothing)
    before = state_of(model, optimizer)
    assert step.step(*batch(1), 1e-3, do_nothing)[NON_FINITE] == 0
    assert not any(torch.equal(a, b) for a, b in zip(before, state_of(model, optimizer), strict=True))


def test_a_poll_that_raises_leaves_no_effect(make_tiny_config: Tiny) -> None:
    class Stop(BaseException):
        pass

    def stop_at_second() -> None:
        polls.append(1)
        if len(polls) == 2:
            raise Stop

    polls: list[int] = []
    model, optimizer, step = stepper(make_tiny_config())
    before = state_of(model, optimizer)
    with pytest.raises(Stop):
        step.step(*batch(), 1e-3, stop_at_second)
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(model, optimizer), strict=True))


@looped
@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("bad", [LOSS, GRAD_NORM])
def test_a_non_finite_loss_or_gradient_alone_skips_the_update(make_tiny_config: Tiny, bad: int, kind: str) -> None:
    """A sum of losses that overflows has a finite gradient; a square root at zero has a finite value."""
    corruptions: dict[int, Callable[[Tensor], Tensor]] = {
        LOSS: lambda logits: logits + 3e38 * nn.functional.one_hot(torch.tensor(0), 256),
        GRAD_NORM: lambda logits: logits + (0 * logits).sqrt(),
    }
    model, optimizer, step = stepper(make_tiny_config(optimizer=kind))
    step.step(*batch(0), 1e-3, do_nothing)
    before = state_of(model, optimizer)
    model.head.register_forward_hook(lambda module, inputs, output: corruptions[bad](output))
    result = step.step(*batch(1), 1e-3, do_nothing)
    assert [kind for kind in (LOSS, GRAD_NORM) if not result[kind].isfinite()] == [bad] and result[NON_FINITE] == 1
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(model, optimizer), strict=True))


def test_readback_gives_each_result_once_in_order() -> None:
    readback = Readback(CPU)
    for step in (1, 2):
        readback.push(step, torch.tensor([float(step)]))
    assert readback.take() == [(1, [1.0]), (2, [2.0])]
    assert readback.take(include_newest=True) == []


def test_bf16_computes_in_bf16_and_keeps_float32_weights(make_tiny_config: Tiny) -> None:
    config = make_tiny_config(runtime={"device": "cpu", "precision": "bf16"})
    model = build_model(config, CPU)
    step = Stepper(
        model, model, make_optimizer(model, config.train), config.train, device=CPU, use_bf16=True, world=World()
    )
    seen = []
    model.blocks[0].mlp.up.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    result = step.step(*batch(), 1e-3, do_nothing)
    assert seen[0] == torch.bfloat16 and result[LOSS].dtype == torch.float32
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())


def test_adjacent_ranks_have_the_same_sequences_if_they_share_each_of_them() -> None:
    assert World(rank=1, size=2).get_sequence_share(6) == (3, 3)
    assert [World(rank, 4).get_sequence_share(6) for rank in range(4)] == [(0, 3), (0, 3), (3, 3), (3, 3)]
    assert [World(rank, 4, context_parallel=4).get_sequence_share(4) for rank in range(4)] == [(0, 4)] * 4


def make_weights(seed: int = 0) -> Tensor:
    """Return weights: mostly 1, some 5, one 0."""
    weights = torch.ones(4, 32)
    weights[torch.rand(4, 32, generator=torch.Generator().manual_seed(seed)) < 0.2] = 5.0
    weights[0, 3] = 0.0
    return weights


@pytest.mark.parametrize("micro", [1, 4])
def test_a_weighted_loss_is_the_mean_over_the_sum_of_weights(make_tiny_config: Tiny, micro: int) -> None:
    """Tokens with weight 0 are padding: neither text nor marked."""
    model, _, step = stepper(make_tiny_config(batch_size=4, accumulate_grad_batches=1, micro_batch_size=micro))
    (inputs, targets), weights = batch(), make_weights()
    losses = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none").double()
    w = weights.flatten().double()
    loss = (losses * w).sum() / w.sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    result = step.step(inputs, targets, 1e-3, do_nothing, weights=weights)
    torch.testing.assert_close(result[LOSS].double(), loss.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(result[GRAD_NORM].double(), norm.double(), rtol=1e-4, atol=0)
    marked = (w != 1) & (w != 0)
    by_kind = [losses[w == 1].sum(), (w == 1).sum(), losses[marked].sum(), marked.sum()]
    torch.testing.assert_close(result[TEXT_LOSS:].double(), torch.stack([x.double() for x in by_kind]), rtol=1e-5, atol=0)


def test_weights_of_one_equal_no_weights_up_to_rounding(make_tiny_config: Tiny) -> None:
    results = []
    for weights in (None, torch.ones(4, 32)):
        step = stepper(make_tiny_config())[2]
        results.append(step.step(*batch(), 1e-3, do_nothing, weights=weights)[:4])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=0)


def test_adamw_and_checkpointing_follow_the_configuration(make_tiny_config: Callable[..., RunConfig]) -> None:
    config = make_tiny_config(beta1=0.8, beta2=0.7, eps=1e-3, runtime={"device": "cpu", "gradient_checkpointing": True})
    model = build_model(config, torch.device("cpu"))
    assert model.gradient_checkpointing
    for group in make_optimizer(model, config.train).param_groups:
        assert (group["betas"], group["eps"]) == ((0.8, 0.7), 1e-3)
