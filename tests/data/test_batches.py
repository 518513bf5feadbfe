import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from looping import looped

from nsa_lab.data import Batches, EvalBatches, TokenStore, permute


def store(*lengths: int) -> TokenStore:
    """Consecutive numbers in shards of these lengths, so that a token equals its position."""
    ends = np.cumsum(lengths)
    return TokenStore([np.arange(end - length, end, dtype=np.uint16) for end, length in zip(ends, lengths, strict=True)])


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.data())
def test_a_store_reads_across_shards(lengths: list[int], data: st.DataObject) -> None:
    tokens = store(*lengths)
    start = data.draw(st.integers(0, len(tokens)))
    count = data.draw(st.integers(0, len(tokens) - start))
    assert tokens.read(start, count).tolist() == list(range(start, start + count))


def test_read_past_the_end_raises() -> None:
    with pytest.raises(IndexError, match="a store of 10 tokens"):
        store(4, 6).read(8, 3)


@pytest.mark.slow
@given(st.integers(1, 300), st.text(max_size=5))
def test_a_permutation_covers_everything_once(size: int, key: str) -> None:
    assert sorted(permute(index, size, key) for index in range(size)) == list(range(size))


def test_permutations_differ_by_key_and_mix() -> None:
    first, second = ([permute(index, 1000, key) for index in range(1000)] for key in ("a", "b"))
    assert first != second
    assert abs(np.corrcoef(first, np.arange(1000))[0, 1]) < 0.1
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.1


def test_targets_are_the_next_tokens() -> None:
    inputs, targets = Batches(store(300, 700), seq_len=16, sequences_per_step=4, seed=1).batch(3)
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(targets, inputs + 1)


@settings(deadline=None)
@given(length=st.integers(2, 400), seq_len=st.integers(1, 40), seed=st.integers(0, 5))
def test_an_epoch_reads_each_window_once(length: int, seq_len: int, seed: int) -> None:
    if length < seq_len + 1:
        return
    batches = Batches(store(length), seq_len, 1, seed)
    windows = batches.windows_per_epoch
    for epoch in range(3):
        starts = sorted(batches.get_text_positions(step)[0] for step in range(epoch * windows, (epoch + 1) * windows))
        assert np.diff(starts).tolist() == [seq_len] * (windows - 1)
        assert starts[0] >= 0 and starts[-1] + seq_len + 1 <= length
        assert starts[0] + windows * seq_len > length - 2 * seq_len - 1


@looped
@pytest.mark.parametrize("length", [9, 12, 16, 17, 41, 48])
def test_epoch_offsets_cover_all_positions_of_a_window(length: int) -> None:
    batches = Batches(store(length), 8, 1, seed=7)
    windows = batches.windows_per_epoch
    offsets = {min(batches.get_text_positions(epoch * windows + n)[0] for n in range(windows)) for epoch in range(200)}
    assert offsets == set(range(min(8, length - 8)))


def test_epochs_differ_in_order_and_offset() -> None:
    batches = Batches(store(5000), 32, 1, seed=7)
    windows = batches.windows_per_epoch
    epochs = [[batches.get_text_positions(step)[0] for step in range(e * windows, (e + 1) * windows)] for e in range(4)]
    assert len({min(starts) for starts in epochs}) > 1
    assert len({tuple(np.argsort(starts)) for starts in epochs}) == 4


def test_random_access_equals_sequential() -> None:
    tokens = store(900, 1100)
    batches = Batches(tokens, 16, 8, seed=3)
    sequential = [batches.batch(step)[0] for step in range(60)]
    for step in (59, 0, 31, 15, 31):
        assert torch.equal(Batches(tokens, 16, 8, seed=3).batch(step)[0], sequential[step])
    assert not torch.equal(Batches(tokens, 16, 8, seed=4).batch(0)[0], sequential[0])


@looped
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("micro", [1, 2])
def test_ranks_and_micro_batches_share_one_global_batch(world: int, micro: int) -> None:
    batches = Batches(store(3000), 16, 8, seed=3)
    share = 8 // world
    for step in (0, 25, 100):
        whole = batches.batch(step)
        for part in (0, 1):
            pieces = [
                batches.batch(step, rank * share + start, micro)[part]
                for rank in range(world)
                for start in range(0, share, micro)
            ]
            assert torch.equal(torch.cat(pieces), whole[part])


def test_hash_identifies_the_batch() -> None:
    batches = Batches(store(3000), 16, 8, seed=3)
    assert batches.compute_hash(5) == Batches(store(1000, 2000), 16, 8, seed=3).compute_hash(5)
    assert len({batches.compute_hash(step) for step in range(20)}) == 20
    assert len(batches.compute_hash(0)) == 16


def test_invalid_requests_raise(refuses) -> None:
    batches = Batches(store(100), 16, 4, seed=0)
    for step, start, count in ((-1, 0, None), (0, 4, None), (0, 2, 3), (0, -1, 1)):
        with pytest.raises(ValueError, match=r"0\.\.4"):
            batches.batch(step, start, count)
    refuses(lambda: Batches(store(16), 16, 4, seed=0), "16 tokens", "train.seq_len")
    refuses(lambda: EvalBatches(store(16), 16, 1, 1), "16 tokens", "train.seq_len")


def test_evaluation_windows_are_fixed_disjoint_and_spread() -> None:
    batches = EvalBatches(store(1000), seq_len=9, n_windows=20, batch_size=4)
    assert len(batches) == 5
    starts = torch.cat([inputs[:, 0] for inputs, _ in batches])
    assert len(starts) == 20 and starts.diff().min() >= 9
    assert starts[0] == 0 and starts[-1] > 900
    assert torch.equal(batches[3][0], EvalBatches(store(400, 600), 9, 20, 4)[3][0])


@looped
@pytest.mark.parametrize("windows", [1, 7, 20, 110, 500])
def test_evaluation_windows_do_not_depend_on_batch_size(windows: int) -> None:
    def text(batch_size: int) -> torch.Tensor:
        batches = EvalBatches(store(300, 700), 9, windows, batch_size)
        assert sum(len(inputs) for inputs, _ in batches) == batches.n_windows == min(windows, 111)
        return torch.cat([inputs for inputs, _ in batches])

    assert all(torch.equal(text(batch_size), text(1)) for batch_size in (2, 3, 64))
    identities = {EvalBatches(store(300, 700), 9, windows, batch_size).identity for batch_size in (1, 2, 64)}
    assert len(identities) == 1
    others = [EvalBatches(store(1000), 9, windows + 1, 2), EvalBatches(store(1000), 8, windows, 2)]
    others.append(EvalBatches(TokenStore([np.arange(1, 1001, dtype=np.uint16)]), 9, windows, 2))
    same = windows == 500  # all there is, either way
    assert [batches.identity in identities for batches in others] == [same, False, False]


def test_evaluation_covers_documents_in_proportion_to_length() -> None:
    """One window per equal segment of the text."""
    lengths = [50, 400, 90, 1000, 60, 200, 700]
    of_document = np.repeat(np.arange(len(lengths)), lengths)
    batches = EvalBatches(store(*lengths), 10, 50, 4)
    starts = torch.cat([inputs[:, 0] for inputs, _ in batches]).numpy()
    counts = np.bincount(of_document[starts], minlength=len(lengths))
    assert (np.abs(counts - 50 * np.array(lengths) / sum(lengths)) <= 1.01).all() and counts.min() >= 1


def test_evaluation_uses_all_windows_if_there_are_few() -> None:
    batches = EvalBatches(store(100), 9, 40, 4)
    assert [len(inputs) for inputs, _ in batches] == [4, 4, 3]
    assert torch.cat([inputs.flatten() for inputs, _ in batches]).tolist() == list(range(99))
