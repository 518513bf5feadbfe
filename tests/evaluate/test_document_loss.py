"""Loss of whole documents, against a forward pass of each document."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.data import BestFitPacking, DataError, TokenStore
from nsa_lab.evaluate import measure_document_loss
from nsa_lab.evaluate.document_loss import compute_token_losses, get_packed_row
from nsa_lab.model import NSATransformer

SEPARATOR = 255
LENGTHS = [5, 300, 41, 1, 17, 97, 64, 700, 2, 33]
LENGTH = 301


@pytest.fixture(scope="module")
def model() -> NSATransformer:
    nsa = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=11)
    built = NSATransformer(ModelConfig(dim=16, n_layers=2, n_heads=2, n_kv_groups=1, d_k=8, d_v=8, nsa=nsa), seed=1)
    return built.double().eval()


def make_store(documents: list[np.ndarray]) -> TokenStore:
    return TokenStore([np.concatenate([np.append(text, SEPARATOR) for text in documents])])


@pytest.fixture
def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 250, length) for length in LENGTHS]


def compute_losses(model: NSATransformer, text: np.ndarray) -> Tensor:
    """Return the losses of all tokens of a document and of its final separator, given the separator before it."""
    tokens = torch.from_numpy(np.concatenate([[SEPARATOR], text, [SEPARATOR]]))
    with torch.no_grad():
        return functional.cross_entropy(model(tokens[None, :-1])[0], tokens[1:], reduction="none").double()


def split_into_parts(text: np.ndarray) -> list[slice]:
    """Return the parts of a document in rows: n tokens have n + 1 targets."""
    return [slice(first, first + LENGTH) for first in range(0, len(text) + 1, LENGTH)]


def test_documents_are_scored_separately(model: NSATransformer, documents: list[np.ndarray]) -> None:
    found = measure_document_loss(model, make_store(documents), SEPARATOR, LENGTH, rows=100)
    wanted = []
    for text in documents:
        tokens = torch.from_numpy(np.concatenate([[SEPARATOR], text, [SEPARATOR]]))
        for part in split_into_parts(text):
            inputs, targets = tokens[:-1][part], tokens[1:][part]
            with torch.no_grad():
                wanted.append(functional.cross_entropy(model(inputs[None])[0], targets, reduction="none").double())
    every = torch.cat(wanted)
    assert found.tokens == len(every) == sum(LENGTHS) + len(LENGTHS)
    assert found.documents == len(wanted) == len(LENGTHS) + 2 and found.cut_documents == 1
    assert found.alone == pytest.approx(every.mean().item(), rel=1e-6)
    assert found.first_alone == pytest.approx(torch.stack([part[0] for part in wanted]).mean().item(), rel=1e-6)
    by_length = {(part.first, part.last): part for part in found.by_length}
    assert set(by_length) == {(0, 256), (256, LENGTH)}
    short = torch.cat([part for part in wanted if len(part) <= 256])
    assert by_length[0, 256].tokens == len(short) and by_length[0, 256].alone == pytest.approx(
        short.mean().item(), rel=1e-6
    )
    assert sum(part.documents for part in found.by_length) == found.documents


def test_across_scores_the_same_tokens_in_context(model: NSATransformer) -> None:
    """One row of three documents: earlier documents have an effect, padding has none."""
    dice = np.random.default_rng(1)
    texts = [dice.integers(0, 250, length) for length in (120, 90, 20)]
    found = measure_document_loss(model, make_store(texts), SEPARATOR, LENGTH)
    assert found.rows == 1 and found.documents == 3
    row = compute_losses(model, np.concatenate([texts[0], [SEPARATOR], texts[1], [SEPARATOR], texts[2]]))
    alone = [compute_losses(model, text) for text in texts]
    assert found.across == pytest.approx(row.mean().item(), rel=1e-6)
    assert found.alone == pytest.approx(torch.cat(alone).mean().item(), rel=1e-6)
    assert found.first_across == pytest.approx(row[[0, 121, 212]].mean().item(), rel=1e-6)
    assert found.difference == pytest.approx(found.across - found.alone, rel=1e-6) and found.error == 0


@pytest.mark.slow
def test_fewer_rows_cover_all_lengths(model: NSATransformer) -> None:
    dice = np.random.default_rng(2)
    texts = [dice.integers(0, 250, length) for length in [*range(150, 300, 10), *range(1, 60, 7), 900]]
    whole = measure_document_loss(model, make_store(texts), SEPARATOR, LENGTH, rows=1000)
    some = measure_document_loss(model, make_store(texts), SEPARATOR, LENGTH, rows=5)
    assert some.rows == 5 < whole.rows and some.error > 0
    assert some.tokens < whole.tokens and len(some.by_length) == len(whole.by_length) == 2


def test_scored_rows_are_evenly_spaced(model: NSATransformer) -> None:
    """Rows are in order of their longest document: the first rows contain only long documents."""
    dice = np.random.default_rng(2)
    text = make_store([dice.integers(0, 250, length) for length in range(150, 300, 10)])
    packed = BestFitPacking(text, LENGTH, SEPARATOR)
    rows = [get_packed_row(packed, third * packed.rows_per_epoch // 3, SEPARATOR) for third in range(3)]
    read = torch.cat([compute_token_losses(model, window, span)[:filled] for window, filled, span in rows])
    found = measure_document_loss(model, text, SEPARATOR, LENGTH, rows=3)
    assert packed.rows_per_epoch > 5 and found.tokens == len(read)
    assert found.alone == pytest.approx(read.mean().item(), rel=1e-9)


def test_text_without_a_separator_is_rejected(model: NSATransformer) -> None:
    with pytest.raises(DataError, match="no document ends"):
        measure_document_loss(model, TokenStore([np.zeros(1000, np.uint8)]), SEPARATOR, LENGTH)


def test_difference_is_a_mean_over_rows_with_standard_error(model: NSATransformer) -> None:
    dice = np.random.default_rng(2)
    texts = [dice.integers(0, 250, length) for length in (200, 90, 150, 120, 60)]
    packed = BestFitPacking(make_store(texts), LENGTH, SEPARATOR)
    found = measure_document_loss(model, make_store(texts), SEPARATOR, LENGTH)
    apart, every = [], []
    for row in range(packed.rows_per_epoch):
        window, filled, span = get_packed_row(packed, row, SEPARATOR)
        alone, across = (compute_token_losses(model, window, reading)[:filled] for reading in (span, None))
        apart.append((across - alone).mean().item())
        every.append(across)
    assert len({len(row) for row in every}) == len(every) > 1, "rows of unlike length"
    assert found.difference == pytest.approx(np.mean(apart), rel=1e-9)
    assert found.error == pytest.approx(np.std(apart, ddof=1) / len(apart) ** 0.5, rel=1e-9)
    (octave,) = found.by_length
    assert octave.across == pytest.approx(torch.cat(every).mean().item(), rel=1e-9) != octave.alone
