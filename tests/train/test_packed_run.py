"""Runs with document masking: training, evaluation and statistics treat each document as if alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_run import assert_unchanged
from safetensors.torch import load_file
from torch import Tensor, nn

from nsa_lab.attention import Span, geometry
from nsa_lab.config import RunConfig
from nsa_lab.data import Batch, split_documents
from nsa_lab.model.ngrams import NgramEmbedding
from nsa_lab.runs import directory, events
from nsa_lab.train import validation
from nsa_lab.train.build import Builders, TrainContext, build_context
from nsa_lab.train.distributed import World
from nsa_lab.train.estimate import compute_flops_per_token
from nsa_lab.train.preflight import startup_checks
from nsa_lab.train.step import AUXILIARY, FIRST_LOSS, FIRST_TOKENS, GRAD_NORM, LOSS, TEXT_LOSS, TEXT_TOKENS
from nsa_lab.train.trainer import Trainer

Make, Train = Callable[..., Path], Callable[..., int]
SEP = 0xFF


@pytest.fixture
def masked_changes(text_file: str) -> Callable[..., dict[str, Any]]:
    """Changes that give the tiny run these documents, with masking."""

    def changes(**data: Any) -> dict[str, Any]:
        section = {"source": "local", "path": text_file, "max_tokens": None, "documents": "mask", **data}
        return {
            "data": section,
            "steps": 6,
            "batch_size": 4,
            "accumulate_grad_batches": 1,
            "save_every": 1,
            "eval_every": 3,
        }

    return changes


@pytest.fixture
def make_context(
    make_tiny_config: Callable[..., RunConfig], builders: Builders, masked_changes: Callable[..., dict[str, Any]]
) -> Callable[..., TrainContext]:
    def make(packing: str = "stream", **changes: Any) -> TrainContext:
        config = make_tiny_config(**masked_changes(packing=packing), **changes)
        dataset = builders.data(config.data, 256, config.train.seq_len, None)
        return build_context(config, World(), torch.device("cpu"), dataset, builders)

    return make


def compute_separately(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses of all tokens, one document per call; their weights; and a mask of the first tokens of documents."""
    losses, weights, firsts = [], [], []
    for row, bounds in enumerate(split_documents(batch.documents, batch.inputs.shape[1])):
        for begin, end in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
            tokens, wanted = batch.inputs[row, begin:end], batch.targets[row, begin:end]
            losses.append(nn.functional.cross_entropy(model(tokens[None])[0], wanted, reduction="none"))
            weights.append(batch.weights[row, begin:end])
            firsts.append((torch.arange(end - begin) == 0) & (tokens == SEP) & (weights[-1] > 0))
    return torch.cat(losses), torch.cat(weights), torch.cat(firsts)


@pytest.mark.parametrize(
    ("packing", "micro", "attention"), [("stream", 4, "nsa"), ("best_fit", 2, "nsa"), ("stream", 1, "dense")]
)
def test_a_step_equals_that_of_separate_documents(
    make_context: Callable[..., TrainContext], packing: str, micro: int, attention: str
) -> None:
    """Loss, gradient and loss of first tokens, for every grouping of rows; padding does not count."""
    built = make_context(packing, micro_batch_size=micro, model={"attention": attention})
    batch = built.batches.weighted_batch(2)
    assert (batch.weights.sum() < batch.weights.numel()) == (packing == "best_fit")
    losses, weights, firsts = compute_separately(built.model, batch)
    loss = (losses * weights).sum() / weights.sum()
    norm = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(built.model.parameters()))]).norm()
    result = built.stepper.step(*batch[:2], 1e-3, lambda: None, weights=batch.weights, documents=batch.documents)
    expected = torch.stack([loss, losses[weights > 0].sum(), weights.sum(), losses[firsts].sum(), firsts.sum()]).detach()
    found = result[[LOSS, TEXT_LOSS, TEXT_TOKENS, FIRST_LOSS, FIRST_TOKENS]]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result[GRAD_NORM], norm, rtol=1e-4, atol=0)
    assert firsts.sum() > 2 and result[AUXILIARY] == 0


def test_an_evaluation_equals_that_of_separate_documents(make_context: Callable[..., TrainContext]) -> None:
    built = make_context()
    held_out = built.get_evaluation(0)
    found = validation.evaluate_held_out(built, held_out, lambda: None)
    recorded = []
    with torch.no_grad():
        for inputs, targets in held_out:
            recorded.append(
                compute_separately(
                    built.model, Batch(inputs, targets, torch.ones(inputs.shape), held_out.find_documents(inputs))
                )
            )
    losses, firsts = torch.cat([t[0] for t in recorded]), torch.cat([t[2] for t in recorded])
    assert found.loss == pytest.approx(losses.mean().item(), rel=1e-5)
    assert found.first_token_loss == pytest.approx(losses[firsts].mean().item(), rel=1e-5)
    cross = make_context()
    cross.evaluations[0]._separator = None
    assert validation.evaluate_held_out(cross, cross.evaluations[0], lambda: None).first_token_loss is None
    assert validation.evaluate_held_out(cross, cross.evaluations[0], lambda: None).loss != pytest.approx(
        found.loss, rel=1e-6
    )


def test_statistics_are_of_documents(make_context: Callable[..., TrainContext]) -> None:
    built = make_context()
    batch = built.batches.weighted_batch(0)
    seen = validation.compute_branch_statistics(built, batch)
    whole = validation.compute_branch_statistics(built, batch._replace(documents=None))
    assert all(value.shape == (2,) and value.isfinite().all() for value in seen.values())
    assert (seen["sel_keys"] < whole["sel_keys"]).all() and (seen["sel_distance"] < whole["sel_distance"]).all()


def test_statistics_of_a_long_text_are_those_of_its_beginning(
    make_context: Callable[..., TrainContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = make_context()
    length = built.config.train.seq_len - 3
    batch = next(batch for batch in map(built.batches.weighted_batch, range(9)) if 1 < batch.documents[1] < length)
    documents = torch.tensor([*(bound for bound in batch.documents.tolist() if bound < length), length], dtype=torch.int32)
    with torch.no_grad():
        expected = built.model.eval().statistics(batch.inputs[:1, :length], Span.packed(documents))
    monkeypatch.setattr(validation, "MAX_MEASURED_TOKENS", length)
    actual = validation.compute_branch_statistics(built, batch)
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        torch.testing.assert_close(value, expected[name], msg=name)


def test_preflight_detects_a_leak_between_documents(make_context: Callable[..., TrainContext]) -> None:
    """The leak is so small that only poison makes it visible."""
    built = make_context()
    check = startup_checks.check_documents(built)
    assert check.ok and "change by 0" in check.value and "rows, at most" in check.value
    built.model.blocks[1].attention.out.register_forward_hook(
        lambda module, inputs, output: output + 1e-10 * inputs[0].abs().mean()
    )
    assert not startup_checks.check_documents(built).ok


@pytest.mark.parametrize(
    "reach",
    [
        pytest.param(lambda x: x.cumsum(1), id="the one after it"),
        pytest.param(lambda x: x.flip(1).cumsum(1).flip(1), id="the one before it"),
    ],
)
def test_preflight_detects_a_leak_in_either_direction(
    make_context: Callable[..., TrainContext], reach: Callable[[Tensor], Tensor]
) -> None:
    built = make_context()
    built.model.blocks[1].attention.out.register_forward_hook(
        lambda module, inputs, output: output + 1e-10 * reach(inputs[0].abs().sum(-1, keepdim=True))
    )
    assert not startup_checks.check_documents(built).ok


def test_non_finite_logits_fail_the_leakage_check(make_context: Callable[..., TrainContext]) -> None:
    built = make_context()
    built.model.register_forward_hook(
        lambda module, inputs, out: out.index_fill(1, torch.tensor(out.shape[1] - 1), torch.nan)
    )
    assert not startup_checks.check_documents(built).ok


def test_a_document_that_becomes_nan_is_a_leak(make_context: Callable[..., TrainContext]) -> None:
    """A document that reads the poisoned one becomes NaN; the first document does not change."""
    built, calls = make_context(), []

    def spoil(module: Any, inputs: Any, out: Tensor) -> Tensor:
        calls.append(1)
        return out if len(calls) == 1 else out.index_fill(1, torch.tensor(out.shape[1] - 1), torch.nan)

    built.model.register_forward_hook(spoil)
    assert not startup_checks.check_documents(built).ok


def test_preflight_detects_tokens_that_leak_before_any_layer(
    make_context: Callable[..., TrainContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = make_context()
    model, config = built.model, built.config.model.model_copy(update={"ngrams": 3})
    model.config, model.ngrams = config, NgramEmbedding(config)
    assert startup_checks.check_documents(built).ok
    monkeypatch.setattr(
        model.ngrams,
        "forward",
        lambda tokens, positions, before: NgramEmbedding.forward(model.ngrams, tokens),
    )
    assert not startup_checks.check_documents(built).ok


def test_a_backend_without_packed_documents_is_refused_before_training(
    make_context: Callable[..., TrainContext], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*x: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError("backend = 'triton' (window) takes a full span only; use backend='torch'")

    built = make_context()
    monkeypatch.setattr("nsa_lab.model.attention_layers.nsa_attention", refuse)
    found = list(startup_checks.run_preflight(built, tmp_path))
    assert [check.name for check in found] == ["profile", "units", "disk", "data", "documents"] and not found[-1].ok
    assert "backend = 'triton'" in found[-1].value and "runtime.backend: torch" in found[-1].limit


@pytest.mark.slow
def test_a_killed_masked_run_resumes_only_as_the_same_run(
    new_run: Make, masked_changes: Callable[..., dict[str, Any]], train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    after = Trainer._finish_step

    def die(self: Trainer, step: int, batch: Batch, phase: str) -> None:
        after(self, step, batch, phase)
        if step == 3:
            raise Killed

    whole, parted = (new_run(**masked_changes(packing="best_fit")) for _ in range(2))
    assert train(whole) == 0
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Trainer, "_finish_step", die)
        train(parted)
    assert train(parted) == 0
    weights = [load_file(run_dir / "checkpoints/step-00000004/model.safetensors") for run_dir in (whole, parted)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    assert_unchanged(parted)
    record = events.read_events(whole)
    steps = events.get_step_events(record)
    assert [e["loss"] for e in steps] == [e["loss"] for e in events.get_step_events(events.read_events(parted))]
    assert all(e["first_loss"] > 0 and "marked_loss" not in e for e in [*steps, *events.get_eval_events(record)])
    assert [e["bpb"] * 0.6931471805599453 for e in steps] == pytest.approx([e["loss"] for e in steps], rel=1e-5)
    (start,) = [e for e in record if e["kind"] == "start"]
    (packing,) = start["packing"]
    assert packing["padded_tokens"] > 0 and 0 < packing["cut_share"] < 0.3 and packing["most_documents"] > 3
    config = RunConfig.from_yaml(whole / "config.yaml")
    assert start["reads_per_token"]["dense"] < geometry.mean_reads(32, config.nsa)["dense"]
    assert [e["name"] for e in record if e["kind"] == "preflight"][4] == "documents"

    path = parted / "config.yaml"
    path.write_text(path.read_text().replace("  documents: mask\n", ""))
    assert train(parted) == 2
    assert "data.documents: 'mask' in the checkpoint, 'cross' now" in directory.read_status(parted)["reason"]


def test_flops_per_token_depend_on_document_lengths(make_context: Callable[..., TrainContext]) -> None:
    built = make_context()
    (lengths,) = built.batches.count_document_lengths()
    tokens = sum(length * count for length, count in lengths.items())
    mean = sum(length * count * built.model.flops_per_token(length)["nsa"] for length, count in lengths.items()) / tokens
    train = built.config.train
    assert compute_flops_per_token(built.model, train, [lengths])["nsa"] == pytest.approx(mean)
    assert mean < compute_flops_per_token(built.model, train)["nsa"] == built.model.flops_per_token(32)["nsa"]


def test_short_documents_are_excluded_from_both_splits(
    make_tiny_config: Callable[..., RunConfig], builders: Builders, masked_changes: Callable[..., dict[str, Any]]
) -> None:
    data = make_tiny_config(**masked_changes(min_document_bytes=12)).data
    retained = builders.data(data, 256, 32, None)
    whole = builders.data(data.model_copy(update={"min_document_bytes": 0}), 256, 32, None)
    assert retained.identity != whole.identity and retained.folder != whole.folder
    assert retained.manifest["short_documents"] > 50 and "short_documents" not in whole.manifest
    for split in (retained.train, retained.validation):
        ends = split.find(SEP)
        assert (torch.tensor(ends).diff() > 12).all() and len(ends) > 20
    with pytest.raises(ValueError, match=r"all 300 documents are shorter than data\.min_document_bytes = 91; lower it"):
        builders.data(data.model_copy(update={"min_document_bytes": 91}), 256, 32, None)


@pytest.mark.slow
def test_flops_of_a_masked_run_follow_its_documents(
    new_run: Make, train: Train, masked_changes: Callable[..., dict[str, Any]]
) -> None:
    recorded = {}
    for documents in ("mask", "cross"):
        run_dir = new_run(**masked_changes(documents=documents))
        assert train(run_dir) == 0
        (start,) = [event for event in events.read_events(run_dir) if event["kind"] == "start"]
        recorded[documents] = start["flops_per_token"]
    assert all(recorded["mask"][kind] < recorded["cross"][kind] for kind in ("nsa", "dense"))
