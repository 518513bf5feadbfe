"""Training text of a stage: documents of a minimum length, and facts in a share of the sequences."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa_lab.config import ConfigError, DataConfig, RunConfig, TrainConfig
from nsa_lab.data import DataError, Prefetcher, StagedBatches, TokenStore
from nsa_lab.data import stage_batches as data_of_stages

SEP = 255
FACTS: dict[str, Any] = {"bytes_per_fact": 100, "value_length": 4, "statement": "{name}={value}.", "question": "{name}?"}
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=25)
STAGES: list[dict[str, Any]] = [
    {"steps": 3, "seq_len": 300, "batch_size": 2, "lr": 1e-3},
    {"steps": 5, "seq_len": 411, "batch_size": 3, "lr": 1e-3, "min_document_tokens": 130, "planted_share": 0.4},
]


def documents_of(lengths: list[int]) -> list[np.ndarray]:
    """Return documents with their own sequences of letters, so that a token identifies its document and position."""
    return [((np.arange(length) + 7 * number) % 250).astype(np.uint8) for number, length in enumerate(lengths)]


def joined(documents: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.append(document, np.uint8(SEP)) for document in documents])


def store_of(text: np.ndarray, cuts: list[int]) -> TokenStore:
    return TokenStore(np.split(text, sorted(cut % (len(text) + 1) for cut in cuts)))


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.lists(st.integers(0, 2000), max_size=4), st.integers(0, 41))
def test_drop_short_documents_keeps_exactly_the_long_ones(lengths: list[int], cuts: list[int], least: int) -> None:
    """Whole and in order, for any shard borders, compared with a filtered and joined list."""
    documents = documents_of(lengths)
    kept = [document for document in documents if len(document) >= least]
    store = store_of(joined(documents), cuts)
    if not kept:
        with pytest.raises(
            DataError, match=rf"= {least}: the longest of {len(lengths)} documents has {max(lengths)} tokens"
        ):
            store.drop_short_documents(SEP, least)
        return
    found, wanted = store.drop_short_documents(SEP, least), joined(kept)
    assert found.read(0, len(found)).tolist() == wanted.tolist()
    assert found.find(SEP).tolist() == np.flatnonzero(wanted == SEP).tolist()


def text() -> TokenStore:
    dice = random.Random(5)
    return store_of(joined(documents_of([dice.choice([3, 60, 129, 130, 250]) for _ in range(80)])), [4000, 4001])


def batches(documents: str = "mask", packing: str = "stream", **second: Any) -> StagedBatches:
    data = DataConfig(source="recall", documents=documents, packing=packing, **FACTS)
    train = TrainConfig(stages=[STAGES[0], {**STAGES[1], **second}])
    return StagedBatches(text(), train, data, SEP)


@pytest.mark.parametrize(("documents", "packing"), [("mask", "stream"), ("mask", "best_fit"), ("cross", "stream")])
def test_a_stage_reads_its_documents_and_inserts_in_its_share(documents: str, packing: str) -> None:
    """A share of 0.4 of 15 sequences is 6. The others are the unchanged text of long documents, with weight 1."""
    both = batches(documents, packing)
    plain = StagedBatches(
        text().drop_short_documents(SEP, 130),
        TrainConfig(stages=[STAGES[0], {**STAGES[1], "min_document_tokens": 0}]),
        DataConfig(source="synthetic", documents=documents, packing=packing),
        SEP,
    )
    planted = []
    for step in range(3, 8):
        ours, theirs = both.weighted_batch(step), plain.weighted_batch(step)
        heavy = ours.weights > 1
        for row in range(3):
            planted.append(bool(heavy[row].any()))
            if not planted[-1]:
                assert torch.equal(ours.targets[row], theirs.targets[row])
                assert theirs.weights is None or torch.equal(ours.weights[row], theirs.weights[row])
    assert sum(planted) == 6 and planted == [int((n + 1) * 0.4) > int(n * 0.4) for n in range(15)]
    assert all((both.weighted_batch(step).weights > 1).any(1).all() for step in range(3)), (
        "the first stage plants everywhere"
    )


def test_every_stage_and_seed_inserts_different_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    plant = data_of_stages.make_inserter
    monkeypatch.setattr(
        data_of_stages, "make_inserter", lambda data, length, seed: seeds.append(seed) or plant(data, length, seed)
    )
    for seed in (1, 2):
        StagedBatches(
            text(), TrainConfig(seed=seed, stages=[*STAGES, STAGES[0]]), DataConfig(source="recall", **FACTS), SEP
        )
    assert seeds[::3] == [1, 2] and len(set(seeds)) == 6


def test_share_zero_inserts_nothing_and_share_one_inserts_everywhere() -> None:
    none, whole = batches(planted_share=0.0), batches(planted_share=1.0)
    assert all((none.weighted_batch(step).weights == 1).all() for step in range(3, 8))
    assert all((whole.weighted_batch(step).weights > 1).any(1).all() for step in range(3, 8))
    some = batches(planted_share=0.4)
    assert torch.equal(some.weighted_batch(3).inputs[2], whole.weighted_batch(3).inputs[2]), (
        "a sequence's facts are its own"
    )


def test_batches_are_a_pure_function_of_the_step() -> None:
    """In reverse order, in parts per rank, and prefetched by a thread, across stages."""
    inorder = [batches().weighted_batch(step) for step in range(8)]
    again = batches()
    for step in reversed(range(8)):
        rows = len(inorder[step].inputs)
        parts = [again.weighted_batch(step, row, 1) for row in range(rows)]
        assert torch.equal(torch.cat([part.inputs for part in parts]), inorder[step].inputs)
        assert torch.equal(torch.cat([part.weights for part in parts]), inorder[step].weights)
    with Prefetcher(batches().weighted_batch, first=2, stop=8) as ahead:
        for step in range(2, 8):
            made = ahead.get(step)
            assert torch.equal(made.targets, inorder[step].targets) and torch.equal(made.weights, inorder[step].weights)


def test_a_stage_without_readable_documents_raises() -> None:
    with pytest.raises(DataError, match=r"train\.min_document_tokens = 251: the longest of 80 documents has 250 tokens"):
        batches(min_document_tokens=251)
    with pytest.raises(ValueError, match="pass the tokenizer's separator"):
        StagedBatches(text(), TrainConfig(stages=STAGES), DataConfig(source="recall", bytes_per_fact=400))
    with pytest.raises(ConfigError, match=r"train\.planted_share = 0\.4, but data\.source = stdlib inserts no facts"):
        RunConfig.from_dict({"train": {"stages": STAGES}})


def test_defaults_of_newer_keys_are_not_written() -> None:
    old = [{key: value for key, value in stage.items() if key in STAGES[0]} for stage in STAGES]
    config = RunConfig.from_dict({"train": {"stages": old}, "data": {"source": "recall"}})
    assert not {"min_document_tokens", "planted_share"} & {k for s in config.to_dict()["train"]["stages"] for k in s}
    said = RunConfig.from_dict({"train": {"stages": STAGES}, "data": {"source": "recall"}})
    assert RunConfig.from_dict(said.to_dict()) == said and said.hash() != config.hash()
    alone = RunConfig().to_dict()["train"]
    assert not {"min_document_tokens", "planted_share"} & alone.keys()


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_find_documents_equals_the_documents_of_the_batch(packing: str) -> None:
    masked, crossed = batches("mask", packing), batches("cross")
    for step in range(8):
        found, planted = masked.find_documents(step), masked.weighted_batch(step).documents
        assert found is not None and planted is not None
        assert torch.equal(found, planted)
        assert crossed.find_documents(step) is None


def test_positions_and_hash_belong_to_the_stage_of_the_step() -> None:
    """The diagnosis reports both."""
    stage = {"steps": 3, "seq_len": 16, "batch_size": 2, "lr": 1e-3}
    text = np.random.default_rng(3).integers(0, 256, 60_000).astype(np.uint8)
    train = TrainConfig(stages=[stage, {**stage, "seq_len": 32}])
    found = StagedBatches(TokenStore([text]), train, DataConfig())
    for step in range(6):
        inputs, targets = found.batch(step)
        for row, at in zip(inputs, found.get_text_positions(step), strict=True):
            assert row.tolist() == text[at : at + len(row)].tolist()
        whole = torch.cat([inputs, targets[:, -1:]], 1).numpy().astype("<i8")
        assert found.compute_hash(step) == hashlib.sha256(whole.tobytes()).hexdigest()[:16]
