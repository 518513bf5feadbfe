"""The bundled model does what its card says: it retrieves facts from 8,192 bytes, by block selection, with a cache.

Ten facts are at ten depths of one text and are questioned one after the other at its end, since a prefill of 8,192 bytes
takes a CPU about 20 s. The text is the manual that comes with Python, which is of the kind that it was trained on (an
edition of it is among its documents); the facts are new.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from nsa_lab import NSATransformer, cli, load_model
from nsa_lab.config import RunConfig
from nsa_lab.data.recall import Fact, sample_facts
from nsa_lab.evaluate import ABLATIONS, evaluate_retrieval, forward_with_ablation
from nsa_lab.inference import Decoder
from nsa_lab.runs import checkpoint_files, resolve
from nsa_lab.runs.evaluation import EVALUATION

NAME = "needle-8m"
FOLDER = resolve.MODELS_DIR / NAME
LENGTH, DEPTHS = 8192, 10
MAX_PARAMETERS, MAX_WEIGHT_BYTES = 8_000_000, 16 << 20


@pytest.fixture(scope="module")
def model() -> NSATransformer:
    return load_model(NAME)


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return RunConfig.from_yaml(FOLDER / "config.yaml")


@pytest.fixture(scope="module")
def facts(config: RunConfig) -> list[Fact]:
    return sample_facts(DEPTHS, config.data, np.random.default_rng(8))


@pytest.fixture(scope="module")
def document(facts: list[Fact]) -> bytes:
    """Return the manual with fact i after i tenths of it; with all questions and answers it has `LENGTH` bytes."""
    n_bytes = LENGTH - sum(len(fact.statement + fact.question + fact.value) + 1 for fact in facts)
    text = read_manual()[:n_bytes]
    cuts = np.linspace(0, n_bytes, DEPTHS + 1).astype(int)
    parts = zip(facts, cuts, cuts[1:], strict=False)
    return b"".join(fact.statement + text[first:last] for fact, first, last in parts)


def read_manual() -> bytes:
    return "\n".join(topics[topic] for topic in sorted(topics)).encode()


def make_tokens(text: bytes) -> torch.Tensor:
    return torch.tensor([list(text)])


def get_weights_path() -> Path:
    (step,) = checkpoint_files.list_steps(checkpoint_files.get_checkpoint_dir(FOLDER))
    return checkpoint_files.get_checkpoint_path(checkpoint_files.get_checkpoint_dir(FOLDER), step) / "model.safetensors"


def test_size_and_model_card(model: NSATransformer) -> None:
    assert model.parameter_count() <= MAX_PARAMETERS and get_weights_path().stat().st_size <= MAX_WEIGHT_BYTES
    assert {value.dtype for value in load_file(get_weights_path()).values()} == {torch.bfloat16}
    card = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert card.startswith(f"# {NAME}\n\n{model.parameter_count():,} parameters")
    assert all(f"\n## {title}\n" in card for title in ("Evaluation", "Data", "License", "Limitations"))


def test_evaluation_meets_the_target() -> None:
    """The recorded evaluation has an accuracy of at least 99% on single facts up to 8,192 bytes."""
    cells = json.loads((FOLDER / EVALUATION).read_text())["retrieval"]
    for length in {cell["length"] for cell in cells if cell["length"] <= LENGTH} | {LENGTH}:
        needle_cells = [cell for cell in cells if (cell["task"], cell["length"]) == ("needle", length)]
        n_correct, n_answers = sum(cell["right"] for cell in needle_cells), sum(cell["answers"] for cell in needle_cells)
        assert n_answers >= 100 and n_correct / n_answers >= 0.99, length


def test_files_have_no_local_paths(config: RunConfig) -> None:
    assert config.data.path is None
    texts = [path.read_text() for path in FOLDER.rglob("*") if path.suffix in (".json", ".yaml", ".md")]
    assert len(texts) == 4 and not [found for text in texts for found in re.findall(r"[\"' (]/[a-z]+/[^\"' )]*", text)]


@pytest.mark.slow
def test_command_line_generates_text() -> None:
    result = CliRunner().invoke(cli.app, ["generate", NAME, "--prompt", "The ", "--tokens", "8", "--temperature", "0"])
    assert result.exit_code == 0 and len(result.output.strip()) > 4


@pytest.mark.nightly
def test_generates_the_facts_of_ten_depths(model: NSATransformer, document: bytes, facts: list[Fact]) -> None:
    """Decode each answer greedily with the cache before the next question."""
    decoder, context = Decoder(model, LENGTH), document
    answers = []
    for fact in facts:
        logits, answer = decoder.last(make_tokens(context + fact.question)), b""
        while len(answer) < len(fact.value):
            answer += bytes([int(logits.argmax())])
            logits = decoder.last(make_tokens(answer[-1:]))
        answers.append(answer)
        context = b"\n"
    assert answers == [fact.value for fact in facts]


@pytest.mark.nightly
def test_random_blocks_lose_the_facts(model: NSATransformer, document: bytes, facts: list[Fact]) -> None:
    """With random blocks, most facts outside the window are wrong, teacher-forced."""
    text = document + b"\n".join(fact.question + fact.value for fact in facts)
    logits = forward_with_ablation(model, make_tokens(text), ABLATIONS["random"])[0]
    assert count_correct_facts(logits, text, facts) <= DEPTHS // 2


def count_correct_facts(logits: torch.Tensor, text: bytes, facts: list[Fact]) -> int:
    """Return the number of facts with all characters correct."""
    predicted = bytes(logits.argmax(-1).tolist())
    question_ends = [text.index(fact.question) + len(fact.question) for fact in facts]
    return sum(
        predicted[end - 1 : end - 1 + len(fact.value)] == fact.value for end, fact in zip(question_ends, facts, strict=True)
    )


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_single_fact_is_retrieved_at_every_depth(model: NSATransformer, config: RunConfig) -> None:
    """Evaluate like `nsa-lab evaluate`, with a separate text per depth."""
    text = np.frombuffer(read_manual(), np.uint8).astype(np.int64)
    cells = list(
        evaluate_retrieval(model, text, [LENGTH], tasks=["needle"], per_depth=1, generated_per_depth=0, recall=config.data)
    )
    assert [cell.right for cell in cells] == [1] * DEPTHS
