"""`NgramEmbedding`; test_model_definition tests it within the model."""

from __future__ import annotations

import pytest
import torch
from looping import looped
from model_inputs import compute_loss, make_config, make_tokens

from nsa_lab.attention import Span
from nsa_lab.config import ModelConfig
from nsa_lab.model import NSATransformer
from nsa_lab.model.ngrams import NgramEmbedding

LENGTHS = [13, 1, 2, 0, 30]
ROWS = 1 << 20


def make_model(**more: object) -> NSATransformer:
    return NSATransformer(
        make_config(ngrams=4, ngram_rows=100, ngram_width=5, **more), dtype=torch.float64, seed=0
    ).double()


def compute_rows(tokens: list[int], **options: torch.Tensor) -> list[list[int]]:
    """Return the rows of the 2-, 3- and 4-grams of every token, in tables large enough to avoid collisions."""
    module = NgramEmbedding(make_config(ngrams=4, ngram_rows=ROWS, ngram_width=1))
    return module.compute_rows(torch.tensor([tokens]), **options)[0].tolist()


@looped
@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("capacity", [None, 9])
def test_packed_documents_equal_separate_documents(attention: str, capacity: int | None) -> None:
    model = make_model(attention=attention, matching_heads=1)
    tokens = make_tokens(model.config, sum(LENGTHS), batch=1)
    span = Span.packed(torch.tensor([0, *LENGTHS]).cumsum(0).int(), capacity)
    alone = [model(part) for part in tokens.split(LENGTHS, dim=1) if part.shape[1]]
    torch.testing.assert_close(model(tokens, span), torch.cat(alone, dim=1), rtol=1e-10, atol=1e-10)


def test_a_row_depends_only_on_the_last_tokens() -> None:
    expected_rows = compute_rows([5, 0, 7, 9, 3, 8])[-1]
    assert compute_rows([0, 5, 7, 9, 3, 8])[-1] == expected_rows
    for n, changed in ((2, [5, 0, 7, 9, 4, 8]), (3, [5, 0, 7, 8, 3, 8]), (4, [5, 0, 6, 9, 3, 8])):
        changed_rows = compute_rows(changed)[-1]
        assert [a == b for a, b in zip(expected_rows, changed_rows, strict=True)] == [length < n for length in (2, 3, 4)]
    assert compute_rows([5, 0, 7, 9, 8, 3])[-1][0] != expected_rows[0], "the order counts"


def test_token_0_differs_from_no_token() -> None:
    """A sequence that starts with tokens 0 differs from one that starts later."""
    first, second, third = (compute_rows([0] * count + [7])[-1] for count in (0, 1, 2))
    assert first[0] != second[0] and second[0] == third[0]
    assert second[1] != third[1]


def test_every_length_has_its_own_table() -> None:
    for row in compute_rows([3, 1, 4, 1, 5, 9, 2, 6]):
        assert [row_index // ROWS for row_index in row] == [0, 1, 2]


@pytest.mark.parametrize("rows", [37, 60_000])
def test_rows_equal_those_of_saved_models(rows: int) -> None:
    """Compute the hash with Python integers. With another hash, saved tables would be useless."""
    text = [9, 250, 0, 4, 255, 255, 1, 77]

    def signed(x: int) -> int:
        return (x + 2**63) % 2**64 - 2**63

    def fold_bits(x: int) -> int:
        return x ^ (x >> 32)

    module = NgramEmbedding(make_config(ngrams=4, ngram_rows=rows, ngram_width=1))
    for t, rows_of_token in enumerate(module.compute_rows(torch.tensor([text]))[0].tolist()):
        for n, row_index in zip((2, 3, 4), rows_of_token, strict=True):
            last = text[max(t - n + 1, 0) : t + 1][::-1]
            value = signed(sum((token + 1) * 0x5851F42D4C957F2D ** (k + 1) for k, token in enumerate(last)))
            hashed = fold_bits(signed(fold_bits(value) * 0x2545F4914F6CDD1D))
            assert row_index == hashed % rows + rows * (n - 2)


def test_hashes_fill_a_table_evenly() -> None:
    """All 65,536 pairs of bytes in as many rows: with a uniform hash, 1/e of the rows stay empty."""
    pairs = torch.cartesian_prod(torch.arange(256), torch.arange(256))
    for rows in (65_536, 60_000):
        module = NgramEmbedding(ModelConfig(ngrams=2, ngram_rows=rows, ngram_width=1))
        hashed_rows = module.compute_rows(pairs)[:, 1, 0]
        filled = hashed_rows.unique().numel() / rows
        assert filled == pytest.approx(1 - (1 - 1 / rows) ** 65_536, abs=0.01)
        assert hashed_rows.bincount().max() < 12


@pytest.mark.parametrize("tokens", [[1, 0, 0, 2], [255] * 9])
def test_previous_tokens_continue_a_sequence(tokens: list[int]) -> None:
    text = [9, 250, 0, 4, *tokens]
    whole = compute_rows(text)
    for cut in range(1, len(text)):
        previous = [-1, -1, -1, *text[:cut]][-3:]  # arbitrary before the first token
        rest = compute_rows(text[cut:], positions=torch.arange(cut, len(text)), previous_tokens=torch.tensor([previous]))
        assert rest == whole[cut:]


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_tables_add_parameters_but_no_flops(attention: str) -> None:
    with_tables, without = make_model(attention=attention), NSATransformer(make_config(attention=attention), seed=0)
    more = with_tables.parameter_count() - without.parameter_count()
    projection = 3 * 5 * 24
    assert more == 3 * 100 * 5 + projection
    assert with_tables.embedding_parameter_count() - without.embedding_parameter_count() == 3 * 100 * 5
    for kind in ("nsa", "dense"):
        extra_flops = with_tables.flops_per_token(31)[kind] - without.flops_per_token(31)[kind]
        assert extra_flops == 3 * 2 * projection


def test_only_looked_up_rows_get_a_gradient() -> None:
    model = make_model()
    tokens = make_tokens(model.config, 12)
    compute_loss(model, tokens).backward()
    table = model.ngrams.table.weight
    with_gradient = set(table.grad.abs().amax(1).nonzero().flatten().tolist())
    assert with_gradient == set(model.ngrams.compute_rows(tokens[:, :-1]).flatten().tolist())


def test_initialization_depends_only_on_the_seed() -> None:
    one, other = make_model(), make_model()
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name]), name
    assert one.ngrams.table.weight.std().item() == pytest.approx(0.02, rel=0.05)
