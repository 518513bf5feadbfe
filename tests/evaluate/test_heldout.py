"""Loss on held-out texts, against a forward pass of each document and window."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.data import DataError, TokenStore
from nsa_lab.evaluate import measure_text_loss, read_text
from nsa_lab.evaluate.heldout import compute_text_digest
from nsa_lab.model import NSATransformer

SEPARATOR, LENGTH = 255, 301
# With its final separator, a document of 300 letters fills a window exactly, and one of 301 letters has one more target.
LENGTHS = [5, 300, 41, 0, 301, 97, 700, 2]


@pytest.fixture(scope="module")
def model() -> NSATransformer:
    nsa = NSAConfig(l=8, d=4, l_sel=8, n_sel=4, w=11)
    built = NSATransformer(ModelConfig(dim=16, n_layers=2, n_heads=2, n_kv_groups=1, d_k=8, d_v=8, nsa=nsa), seed=1)
    return built.double().eval()


@pytest.fixture(scope="module")
def documents() -> list[str]:
    rng = np.random.default_rng(0)
    return ["".join(map(chr, rng.integers(97, 123, length))) for length in LENGTHS]


@pytest.fixture(scope="module")
def path(documents: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("texts") / "some.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return str(file)


@torch.no_grad()
def compute_losses(model: NSATransformer, tokens: list[int]) -> np.ndarray:
    """Return the losses of all tokens but the first."""
    window = torch.tensor(tokens)
    return functional.cross_entropy(model(window[None, :-1])[0], window[1:], reduction="none").numpy()


def test_documents_are_scored_separately_and_windows_are_inside_documents(
    model: NSATransformer, documents: list[str], path: str
) -> None:
    result = measure_text_loss(model, read_text(path), LENGTH)
    part_losses, window_losses, window_documents = [], [], []
    for index, text in enumerate(text for text in documents if text):
        tokens = [SEPARATOR, *text.encode(), SEPARATOR]
        for first in range(0, len(tokens) - 1, LENGTH):
            losses = compute_losses(model, tokens[first : first + LENGTH + 1])
            part_losses.append(losses)
            if len(losses) == LENGTH:
                window_losses.append([losses[:256].mean(), losses[256:].mean()])
                window_documents.append(index)
    every = np.concatenate(part_losses)
    assert (result.documents, result.tokens, result.length) == (7, len(every), LENGTH)
    assert result.loss == pytest.approx(every.mean(), rel=1e-6)
    assert sum(tokens for tokens, _ in result.rows) == len(every)
    assert sum(tokens * loss for tokens, loss in result.rows) == pytest.approx(every.sum(), rel=1e-6)
    assert result.octaves == [(0, 256), (256, 301)] and result.window_documents == window_documents == [1, 3, 5, 5]
    np.testing.assert_allclose(result.windows, window_losses, rtol=1e-6)


def test_digest_depends_on_the_bytes(path: str, documents: list[str], tmp_path: Path) -> None:
    text = read_text(path)
    assert text.read(0, len(text)).tolist() == [
        b for document in documents if document for b in (*document.encode(), SEPARATOR)
    ]
    copies = [TokenStore([text.read(0, 400).astype(np.uint8), text.read(400, len(text) - 400).astype(np.uint8)])]
    assert (
        compute_text_digest(copies[0])
        == compute_text_digest(text)
        != compute_text_digest(TokenStore([text.read(0, 400).astype(np.uint8)]))
    )
    (tmp_path / "none.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match=r"none\.jsonl: the file contains no text; remove it or fill it"):
        read_text(str(tmp_path / "none.jsonl"))


def test_short_documents_have_no_windows(model: NSATransformer, path: str) -> None:
    result = measure_text_loss(model, read_text(path), 999)
    assert result.windows == [] and len(result.rows) == 2 and result.loss > 0
