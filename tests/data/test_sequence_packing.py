"""Documents in batches: their starts and their packing, both functions of the step alone."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from looping import looped

from nsa_lab.config import ConfigError, DataConfig, RecallConfig, TrainConfig
from nsa_lab.config.run_config import RunConfig
from nsa_lab.data import Batches, BestFitPacking, EvalBatches, StagedBatches, StreamPacking, TokenStore
from nsa_lab.data.document_starts import (
    compute_document_capacity,
    count_max_documents,
    find_document_starts,
    split_documents,
)
from nsa_lab.data.recall import insert_per_document, make_inserter
from nsa_lab.data.sequence_packing import pack_best_fit

SEP = 255
LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=30)


def text_of(lengths: list[int]) -> np.ndarray:
    """Return documents of these lengths. A token identifies its document and its position."""
    documents = [np.append((np.arange(length) + 7 * number) % 250, SEP) for number, length in enumerate(lengths)]
    return np.concatenate(documents).astype(np.uint8)


def store_of(lengths: list[int]) -> TokenStore:
    """Return two shards that split a document."""
    text = text_of(lengths)
    return TokenStore([text[: len(text) // 2], text[len(text) // 2 :]])


def batches_of(lengths: list[int], seq_len: int = 16, packing: str = "stream", sequences: int = 4) -> Batches:
    tokens = store_of(lengths)
    rows = BestFitPacking(tokens, seq_len, SEP) if packing == "best_fit" else None
    return Batches(tokens, seq_len, sequences, 3, packing=rows, separator=SEP)


MANY = [random.Random(1).choice([1, 3, 9, 30, 70]) for _ in range(120)]


@pytest.mark.slow
def test_max_documents_equals_brute_force() -> None:
    draw = np.random.default_rng(0)
    for _ in range(500):
        tokens = np.where(draw.random(draw.integers(1, 40)) < draw.random(), SEP, 7)
        length = int(draw.integers(1, len(tokens) + 1))
        found = [len(find_document_starts(tokens[at : at + length], SEP)) for at in range(len(tokens) - length + 1)]
        assert count_max_documents(np.flatnonzero(tokens == SEP), length) == max(found)


def test_find_returns_all_positions_of_a_token() -> None:
    tokens = store_of([3, 1, 8])
    assert tokens.find(SEP).tolist() == [3, 5, 14] and tokens.find(251).tolist() == []
    assert tokens.find(SEP) is tokens.find(SEP) and TokenStore([]).find(SEP).tolist() == []


@looped
@pytest.mark.parametrize(
    ("tokens", "begins"),
    [
        ([1, 2, SEP, 3, 4, SEP, 5], [0, 2, 5]),
        ([SEP, 1, 2], [0]),
        ([1, SEP], [0, 1]),
        ([1, SEP, SEP, SEP], [0, 1]),
        ([1, 2], [0]),
    ],
)
def test_a_document_starts_at_the_separator_before_it(tokens: list[int], begins: list[int]) -> None:
    """The separator predicts the first token. Several separators are padding and form one document."""
    assert find_document_starts(np.array(tokens), SEP).tolist() == begins


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_batches_record_document_starts_and_padding(packing: str) -> None:
    batches = batches_of(MANY, packing=packing)
    seen = 0
    for step in range(12):
        inputs, targets, weights, documents = batches.weighted_batch(step)
        assert weights.dtype == torch.float32 and weights.shape == targets.shape == (4, 16)
        rows = split_documents(documents, 16)
        for row, bounds in zip(inputs.numpy(), rows, strict=True):
            assert bounds.dtype == torch.int32 and bounds.tolist() == [*find_document_starts(row, SEP), 16]
            assert len(bounds) - 1 <= batches.max_documents_per_row
            seen = max(seen, len(bounds) - 1)
        lengths = torch.cat([bounds.diff() for bounds in rows])
        assert documents.tolist() == [0, *lengths.cumsum(0).tolist()] and documents.dtype == torch.int32
        wanted, capacity = max(len(lengths), 2 * len(inputs)), compute_document_capacity(documents, 16)
        assert capacity / 4 < wanted <= capacity == 4 ** round(math.log(capacity, 4))
        padding = (inputs == SEP) & (targets == SEP)
        assert torch.equal(weights == 0, padding) and (weights[~padding] == 1).all()
    assert seen > 1


def test_capacity_is_equal_whether_or_not_documents_end() -> None:
    """Otherwise a rare size would be compiled in the middle of a run."""
    rows = [9 * row for row in range(17)]
    for documents in (rows, sorted([*rows, *(start + 4 for start in rows[1:-1:2])])):
        assert compute_document_capacity(torch.tensor(documents, dtype=torch.int32), 9) == 64


def test_split_keeps_the_documents_of_the_rows() -> None:
    whole = batches_of(MANY).weighted_batch(2)
    parts = whole.split(3)
    assert [len(part.inputs) for part in parts] == [3, 1] and [int(part.documents[-1]) for part in parts] == [48, 16]
    assert torch.equal(torch.cat([part.weights for part in parts]), whole.weights)
    rows = split_documents(whole.documents, 16)
    assert parts[1].documents.tolist() == rows[3].tolist() == [*find_document_starts(whole.inputs[3].numpy(), SEP), 16]
    assert [row.tolist() for row in split_documents(parts[0].documents, 16)] == [row.tolist() for row in rows[:3]]
    one = batches_of(MANY).weighted_batch(2, 3, 1)
    assert torch.equal(one.inputs, parts[1].inputs) and torch.equal(one.documents, rows[3])
    assert all(
        part.documents is part.weights is None for part in Batches(store_of(MANY), 16, 4, 3).weighted_batch(2).split(3)
    )


@settings(deadline=None)
@given(lengths=LENGTHS, seq_len=st.integers(2, 40))
def test_best_fit_reads_every_document_once_and_cuts_only_long_ones(lengths: list[int], seq_len: int) -> None:
    tokens, text = store_of(lengths), np.append([SEP], text_of(lengths))
    rows = BestFitPacking(tokens, seq_len, SEP)
    pairs: Counter[tuple[int, int]] = Counter()
    pieces = []
    for number in range(rows.rows_per_epoch):
        window, weights = rows.read_window(number), rows.get_weights(number)
        assert window.shape == weights.shape == (seq_len + 1,) and window.dtype == np.int64
        filled = int(weights.sum()) - 1
        assert (weights[: filled + 1] == 1).all() and ((window[filled:] == SEP).all() or filled == seq_len)
        pairs.update(zip(window[:filled].tolist(), window[1 : filled + 1].tolist(), strict=True))
        bounds = [*find_document_starts(window[:filled], SEP), filled]
        pieces += [int(size) for size in np.diff(bounds)]
        assert len(find_document_starts(window[:seq_len], SEP)) <= rows.count_max_documents()
    assert pairs == Counter(zip(text[:-1].tolist(), text[1:].tolist(), strict=True)), "every token is a target once"
    expected = Counter()
    for length in lengths:
        whole, rest = divmod(length + 1, seq_len)
        expected.update({seq_len: whole} | ({rest: 1 + (whole if rest == seq_len else 0)} if rest else {}))
    assert +expected == Counter(pieces) == Counter(rows.count_document_lengths("")), (
        "only documents longer than a row are cut, into the fewest possible pieces"
    )
    report = rows.summarize("")
    assert report["cut_documents"] == sum(length + 1 > seq_len for length in lengths)
    assert report["padded_tokens"] == rows.rows_per_epoch * seq_len - len(text) + 1 and report["documents"] == len(lengths)


def test_best_fit_selects_the_fullest_row_with_space() -> None:
    assert pack_best_fit([6, 3, 5, 5, 4, 3, 2, 1], n_openers=2, capacity=8) == [[0, 6], [1, 2], [3, 5], [4, 7]]
    assert pack_best_fit([8, 8], 0, 8) == [[0], [1]]


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 12), max_size=30), room=st.integers(12, 20))
def test_best_fit_equals_plain_loops(sizes: list[int], room: int) -> None:
    left: list[int] = []
    for size in sizes:
        fitting = [r for r in left if r >= size]
        if fitting:
            left.remove(min(fitting))
        left.append((min(fitting) if fitting else room) - size)
    found = [room - sum(sizes[item] for item in row) for row in pack_best_fit(sizes, 0, room)]
    assert sorted(found) == sorted(left)


def test_position_of_a_packed_row_is_its_first_token() -> None:
    """The first row's separator is not in the text; its position is the start of the text."""
    tokens = store_of([70, 30, 9, 9, 3])
    rows = BestFitPacking(tokens, 16, SEP)
    begins = [rows.get_position(row) for row in range(rows.rows_per_epoch)]
    assert min(begins) == 0
    for row, begin in enumerate(begins):
        first, *rest = rows.read_window(row)[:3].tolist()
        if begin == 0:
            assert [first, *rest] == [SEP, *tokens.read(0, 2)]
        else:
            assert [first, *rest] == tokens.read(begin, 3).tolist()


@settings(deadline=None)
@given(lengths=LENGTHS, seq_len=st.integers(2, 40))
def test_stream_summary_equals_the_content_of_its_rows(lengths: list[int], seq_len: int) -> None:
    tokens = store_of(lengths)
    if len(tokens) <= seq_len:
        return
    batches = Batches(tokens, seq_len, 1, 0, separator=SEP)
    pieces: Counter[int] = Counter()
    for step in range(batches.windows_per_epoch):
        found = batches.weighted_batch(step).documents
        pieces.update(found.diff().tolist())
        assert len(found) - 1 <= batches.max_documents_per_row
    assert pieces == Counter(dict(batches.count_document_lengths()))
    report = batches.summarize_packing()
    assert report["padded_tokens"] == 0 and report["rows"] == batches.windows_per_epoch
    rows = sorted(batches.get_text_positions(step)[0] for step in range(batches.windows_per_epoch))
    ends = tokens.find(SEP).tolist()
    spans = [(max(b, rows[0]), e) for b, e in zip([0, *ends], [*ends, len(tokens)], strict=True)]
    inside = [(b, e) for b, e in spans if b < min(e, rows[-1] + seq_len)]
    assert report["documents"] == len(inside)
    assert report["cut_documents"] == sum(any(b < row < e for row in rows[1:]) for b, e in inside)


@pytest.mark.parametrize("packing", ["stream", "best_fit"])
def test_a_batch_is_a_function_of_the_step_and_an_epoch_has_every_row(packing: str) -> None:
    sequential = batches_of(MANY, packing=packing, sequences=1)
    epoch = [sequential.weighted_batch(step) for step in range(2 * sequential.windows_per_epoch)]
    again = batches_of(MANY, packing=packing, sequences=1)
    for step in (5, 0, 3):
        assert torch.equal(again.weighted_batch(step).inputs, epoch[step].inputs) and again.compute_hash(
            step
        ) == sequential.compute_hash(step)
    halves = [epoch[: len(epoch) // 2], epoch[len(epoch) // 2 :]]
    orders = [[part.inputs.numpy().tobytes() for part in half] for half in halves]
    assert orders[0] != orders[1]
    if packing == "best_fit":
        assert sorted(orders[0]) == sorted(orders[1])


def test_validation_batches_record_documents() -> None:
    batches = EvalBatches(store_of(MANY), 16, 9, 2, SEP)
    inputs, _ = batches[1]
    found = batches.find_documents(inputs)
    assert [bounds.tolist() for bounds in split_documents(found, 16)] == [
        [*find_document_starts(row, SEP), 16] for row in inputs.numpy()
    ]
    plain = EvalBatches(store_of(MANY), 16, 9, 2)
    assert plain.find_documents(inputs) is None and plain.identity == batches.identity, "the text is the same"


def test_stages_follow_the_data_section() -> None:
    tokens, train = store_of(MANY), TrainConfig(seq_len=16, batch_size=2)
    mask = StagedBatches(tokens, train, DataConfig(documents="mask"), SEP)
    whole = StagedBatches(tokens, train, DataConfig(packing="best_fit"), SEP)
    plain = StagedBatches(tokens, train, DataConfig())
    assert (
        torch.equal(mask.weighted_batch(1).inputs, plain.weighted_batch(1).inputs)
        and mask.weighted_batch(1).documents is not None
    )
    assert whole.weighted_batch(1).documents is None and not torch.equal(
        whole.weighted_batch(1).inputs, plain.weighted_batch(1).inputs
    )
    assert (
        plain.weighted_batch(1)[2:] == (None, None)
        and plain.count_document_lengths() == [{16: 1}] == whole.count_document_lengths()
    )
    assert (
        mask.count_document_lengths()[0] != {16: 1}
        and mask.summarize_packing()[0]["most_documents"] > 1 > 0 == mask.summarize_packing()[0]["padded_share"]
    )
    with pytest.raises(ValueError, match="pass the tokenizer's separator"):
        StagedBatches(tokens, train, DataConfig(documents="mask"))


def test_facts_are_inserted_per_document() -> None:
    """Statement and question are in the same document; document borders and lengths are unchanged."""
    rng = np.random.default_rng(0)
    text = rng.integers(97, 123, 1501)
    text[[0, 40, 700]] = SEP
    window = np.append(text, [SEP, SEP])
    recall = RecallConfig(bytes_per_fact=240)
    plant = insert_per_document(make_inserter(recall, len(window) - 1, 5), SEP)
    tokens, weights = plant(window, 9)
    assert tokens.shape == weights.shape == window.shape and tokens.dtype == np.int64
    assert np.array_equal(np.flatnonzero(tokens == SEP), np.flatnonzero(window == SEP))
    parts = [bytes(part.astype(np.uint8)) for part in np.split(tokens, find_document_starts(tokens, SEP)[1:])]
    assert [part.count(b"The secret number") for part in parts] == [0, 2, 3, 0], "a few facts, if there is space"
    for part in parts:
        assert part.count(b"The secret number") == part.count(b"Q: What")
        for question in part.split(b"Q: What is the secret number of the ")[1:]:
            name, answer = question.split(b"? A: ")[0], question.split(b"? A: ")[1][:7]
            assert b"The secret number of the " + name + b" is " + answer in part
    assert (weights[tokens == SEP] == 1).all() and (weights == recall.answer_weight).sum() == 5 * 7
    assert bytes(tokens[weights == recall.answer_weight].astype(np.uint8)).isdigit(), "only the answers"
    asked = [said.split(b"?")[0] for part in parts for said in part.split(b"Q: What is the secret number of the ")[1:]]
    assert len(set(asked)) == 5, "every document has different facts"
    again, _ = plant(window, 9)
    assert np.array_equal(tokens, again) and not np.array_equal(tokens, plant(window, 10)[0])
    alone = make_inserter(recall, len(window) - 1, 5)(window, 9)[0]
    assert not np.array_equal(alone, tokens)


def test_a_masked_run_inserts_facts_per_document() -> None:
    rng = np.random.default_rng(1)
    text = rng.integers(97, 123, 40_000).astype(np.uint8)
    text[700::900] = SEP
    data, train = DataConfig(source="recall", documents="mask", bytes_per_fact=256), TrainConfig(seq_len=2000, batch_size=4)
    batch = StagedBatches(TokenStore([text]), train, data, SEP).weighted_batch(1)
    asked = 0
    for row, bounds in zip(batch.inputs.numpy().astype(np.uint8), split_documents(batch.documents, 2000), strict=True):
        for document in np.split(row, bounds[1:-1].numpy()):
            for question in bytes(document).split(b"Q: What is the secret number of the ")[1:]:
                name = question.split(b"?")[0]
                asked += bytes(document).count(b"The secret number of the " + name + b" is ") == 1
    assert asked == batch.inputs.numpy().astype(np.uint8).tobytes().count(b"Q: What is the secret number of the ") > 8


def test_incompatible_settings_raise(refuses: Callable[..., str]) -> None:
    with pytest.raises(ConfigError, match=r"facts would be inserted into padding; set data\.documents: mask"):
        DataConfig(source="recall", packing="best_fit")
    unended = TokenStore([np.arange(100, dtype=np.uint8)])
    refuses(lambda: BestFitPacking(unended, 8, SEP), "no document ends in these tokens", "data.packing: stream")
    assert StreamPacking(unended, 8, SEP).count_max_documents() == 1


def test_older_configurations_keep_their_meaning() -> None:
    """Default values are not written, so that hashes and checkpoints of earlier runs stay valid."""
    assert not {"documents", "packing", "min_document_bytes"} & RunConfig().to_dict()["data"].keys()
    masked = RunConfig(data=DataConfig(documents="mask", min_document_bytes=9))
    assert masked.to_dict()["data"]["documents"] == "mask" and RunConfig.from_dict(masked.to_dict()) == masked
    assert masked.hash() != RunConfig().hash()
