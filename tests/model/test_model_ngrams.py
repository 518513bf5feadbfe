"""`NgramEmbedding`: what is looked up beside a token. test_model_definition has the whole model."""

from __future__ import annotations

import pytest
import torch
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


def compute_rows(tokens: list[int], **given: torch.Tensor) -> list[list[int]]:
    """Of the last token of `tokens`: the rows for its 2, 3 and 4 tokens, in tables of so many rows that none share one."""
    module = NgramEmbedding(make_config(ngrams=4, ngram_rows=ROWS, ngram_width=1))
    return module.compute_rows(torch.tensor([tokens]), **given)[0].tolist()


@pytest.mark.parametrize("attention", ["nsa", "dense"])
@pytest.mark.parametrize("capacity", [None, 9])
def test_packed_documents_equal_separate_documents(attention: str, capacity: int | None) -> None:
    model = make_model(attention=attention, matching_heads=1)
    tokens = make_tokens(model.config, sum(LENGTHS), batch=1)
    span = Span.packed(torch.tensor([0, *LENGTHS]).cumsum(0).int(), capacity)
    alone = [model(part) for part in tokens.split(LENGTHS, dim=1) if part.shape[1]]
    torch.testing.assert_close(model(tokens, span), torch.cat(alone, dim=1), rtol=1e-10, atol=1e-10)


def test_a_row_depends_only_on_the_last_tokens() -> None:
    here = compute_rows([5, 0, 7, 9, 3, 8])[-1]
    assert compute_rows([0, 5, 7, 9, 3, 8])[-1] == here
    for n, changed in ((2, [5, 0, 7, 9, 4, 8]), (3, [5, 0, 7, 8, 3, 8]), (4, [5, 0, 6, 9, 3, 8])):
        there = compute_rows(changed)[-1]
        assert [a == b for a, b in zip(here, there, strict=True)] == [length < n for length in (2, 3, 4)]
    assert compute_rows([5, 0, 7, 9, 8, 3])[-1][0] != here[0], "the order counts"


def test_token_0_differs_from_no_token() -> None:
    """What begins with tokens 0 is not what begins later."""
    first, second, third = (compute_rows([0] * count + [7])[-1] for count in (0, 1, 2))
    assert first[0] != second[0] and second[0] == third[0]
    assert second[1] != third[1]


def test_every_length_has_its_own_table() -> None:
    for row in compute_rows([3, 1, 4, 1, 5, 9, 2, 6]):
        assert [place // ROWS for place in row] == [0, 1, 2]


@pytest.mark.parametrize("rows", [37, 60_000])
def test_rows_equal_those_of_saved_models(rows: int) -> None:
    """The hash of a text, in Python's integers: another one would read a saved table at random."""
    text = [9, 250, 0, 4, 255, 255, 1, 77]

    def signed(x: int) -> int:
        return (x + 2**63) % 2**64 - 2**63

    def folded(x: int) -> int:
        return x ^ (x >> 32)

    module = NgramEmbedding(make_config(ngrams=4, ngram_rows=rows, ngram_width=1))
    for t, found in enumerate(module.compute_rows(torch.tensor([text]))[0].tolist()):
        for n, place in zip((2, 3, 4), found, strict=True):
            last = text[max(t - n + 1, 0) : t + 1][::-1]
            told = signed(sum((token + 1) * 0x5851F42D4C957F2D ** (k + 1) for k, token in enumerate(last)))
            hashed = folded(signed(folded(told) * 0x2545F4914F6CDD1D))
            assert place == hashed % rows + rows * (n - 2)


def test_hashes_fill_a_table_evenly() -> None:
    """All 65,536 pairs of bytes in as many rows: evenly at random, 1/e of the rows stay empty."""
    pairs = torch.cartesian_prod(torch.arange(256), torch.arange(256))
    for rows in (65_536, 60_000):
        module = NgramEmbedding(ModelConfig(ngrams=2, ngram_rows=rows, ngram_width=1))
        found = module.compute_rows(pairs)[:, 1, 0]
        filled = found.unique().numel() / rows
        assert filled == pytest.approx(1 - (1 - 1 / rows) ** 65_536, abs=0.01)
        assert found.bincount().max() < 12


@pytest.mark.parametrize("tokens", [[1, 0, 0, 2], [255] * 9])
def test_previous_tokens_continue_a_sequence(tokens: list[int]) -> None:
    text = [9, 250, 0, 4, *tokens]
    whole = compute_rows(text)
    for cut in range(1, len(text)):
        kept = [-1, -1, -1, *text[:cut]][-3:]  # what stands in front of the first is any
        rest = compute_rows(text[cut:], positions=torch.arange(cut, len(text)), before=torch.tensor([kept]))
        assert rest == whole[cut:]


@pytest.mark.parametrize("attention", ["nsa", "dense"])
def test_tables_add_parameters_but_no_flops(attention: str) -> None:
    with_tables, without = make_model(attention=attention), NSATransformer(make_config(attention=attention), seed=0)
    more = with_tables.parameter_count() - without.parameter_count()
    mapped = 3 * 5 * 24
    assert more == 3 * 100 * 5 + mapped
    assert with_tables.embedding_parameter_count() - without.embedding_parameter_count() == 3 * 100 * 5
    for kind in ("nsa", "dense"):
        dearer = with_tables.flops_per_token(31)[kind] - without.flops_per_token(31)[kind]
        assert dearer == 3 * 2 * mapped


def test_only_looked_up_rows_get_a_gradient() -> None:
    model = make_model()
    tokens = make_tokens(model.config, 12)
    compute_loss(model, tokens).backward()
    table = model.ngrams.table.weight
    moved = set(table.grad.abs().amax(1).nonzero().flatten().tolist())
    assert moved == set(model.ngrams.compute_rows(tokens[:, :-1]).flatten().tolist())


def test_initialization_depends_only_on_the_seed() -> None:
    one, other = make_model(), make_model()
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, other.state_dict()[name]), name
    assert one.ngrams.table.weight.std().item() == pytest.approx(0.02, rel=0.05)
