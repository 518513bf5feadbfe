"""RULER's tasks on a model: all answers are generated, greedily, and scored as published.

`evaluate_ruler` takes a model of this project or a model of `transformers`, converted or not, each with its tokenizer.
`evaluate_run_with_ruler` writes `ruler.json` of a run, also of a conversion run.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from nsa_lab.config import ConfigError
from nsa_lab.data import DataError, Dataset, Tokenizer, TokenStore, prepare
from nsa_lab.evaluate.ruler_tasks import RULER_TASKS, count_matches, make_questions, split_words
from nsa_lab.inference import generate, load_model
from nsa_lab.model import NSATransformer
from nsa_lab.runs import directory
from nsa_lab.runs.checkpoint_files import parse_step
from nsa_lab.runs.environment import get_code_identity, get_versions
from nsa_lab.runs.evaluation import (
    RULER,
    RULER_UNFINISHED,
    VERSION,
    PartialEvaluation,
    compute_wilson_interval,
    write_evaluation,
)
from nsa_lab.runs.model_files import check_evaluable

Log = Callable[[str], object]
MAX_BATCH_TOKENS = 1 << 16
# Held-out text that is decoded: a multiple of the longest sequence, and at least these tokens.
TEXT_PER_LENGTH, MIN_TEXT_TOKENS = 4, 1 << 20


@dataclass(frozen=True)
class RulerResult:
    """Result of one task at one length, in tokens of the model.

    `found`: number of each question's `references` that occur in the generated text. `score`: 100 times the mean share of
    them, as published; `low`, `high`: its 95% Wilson interval over questions. `prompt_tokens`: of the longest prompt.
    """

    task: str
    length: int
    questions: int
    references: int
    found: list[int]
    prompt_tokens: int
    score: float
    low: float
    high: float


class _TextModel(Protocol):
    """A model with its tokenizer."""

    def encode(self, text: str) -> Tensor:
        """Return the tokens that the model reads, int64 [T] on the CPU."""
        ...

    def complete(self, prompts: Sequence[Tensor], max_new_tokens: int) -> list[str]:
        """Return the text that follows each prompt, up to the end-of-text token."""
        ...


class _OwnModel:
    def __init__(self, model: NSATransformer, tokenizer: Tokenizer) -> None:
        self._model, self._tokenizer = model, tokenizer

    def encode(self, text: str) -> Tensor:
        return torch.from_numpy(self._tokenizer.encode(text).astype(np.int64))

    def complete(self, prompts: Sequence[Tensor], max_new_tokens: int) -> list[str]:
        separator, n_ids = self._tokenizer.separator, self._tokenizer.vocab_size
        new = generate(self._model, prompts, max_new_tokens=max_new_tokens, stop=separator)
        # The model's vocabulary may be padded beyond the tokenizer's.
        return [self._tokenizer.decode(ids[(ids != separator) & (ids < n_ids)].numpy()) for ids in new]


class _TransformersModel:
    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer

    def encode(self, text: str) -> Tensor:
        return torch.tensor(self._tokenizer(text, verbose=False).input_ids, dtype=torch.int64)

    @torch.no_grad()
    def complete(self, prompts: Sequence[Tensor], max_new_tokens: int) -> list[str]:
        width = max(map(len, prompts))
        batch_size = max(1, MAX_BATCH_TOKENS // (width + max_new_tokens))
        pad = next((i for i in (self._tokenizer.pad_token_id, self._tokenizer.eos_token_id) if i is not None), 0)
        texts: list[str] = []
        for first in range(0, len(prompts), batch_size):
            batch = prompts[first : first + batch_size]
            tokens = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0), value=pad) for row in batch])
            mask = torch.stack([(torch.arange(width) >= width - len(row)).long() for row in batch])
            device = self._model.device
            new = self._model.generate(
                input_ids=tokens.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                pad_token_id=pad,
            )
            texts += self._tokenizer.batch_decode(new[:, width:], skip_special_tokens=True)
        return texts


def evaluate_ruler(
    model: Any,
    tokenizer: Any,
    documents: Sequence[str],
    lengths: Sequence[int],
    *,
    tasks: Sequence[str] = tuple(RULER_TASKS),
    questions: int = 20,
    seed: int = 0,
) -> Iterator[RulerResult]:
    """Evaluate a model on RULER's tasks and yield the result of each task and length as soon as it is complete.

    model, tokenizer: an `NSATransformer` and a tokenizer of `nsa_lab.data`, or a causal language model of `transformers`
        and its tokenizer. Prompts are continued as text, without a chat template.
    documents: texts that the model was not trained on, for haystacks. lengths: tokens of a prompt and its answer.
    questions: number of questions per task and length. Models with one tokenizer get the same questions.

    Raises ConfigError for an unknown task; DataError if a task does not fit into a length, or for too little text.
    """
    check_tasks(tasks)
    text_model: _TextModel = (_OwnModel if isinstance(model, NSATransformer) else _TransformersModel)(model, tokenizer)
    words = split_words(documents)
    for task, length in itertools.product(tasks, lengths):
        yield _evaluate_task(text_model, task, length, words, questions, seed)


def check_tasks(tasks: Sequence[str]) -> None:
    """Raise ConfigError for an unknown task."""
    if unknown := [task for task in tasks if task not in RULER_TASKS]:
        raise ConfigError(f"task = {unknown[0]}: unknown task of RULER; available: {', '.join(RULER_TASKS)}")


def _evaluate_task(
    model: _TextModel, task: str, length: int, words: Sequence[str], n_questions: int, seed: int
) -> RulerResult:
    questions = list(make_questions(task, length, n_questions, lambda text: len(model.encode(text)), words, seed))
    prompts = [model.encode(question.prompt) for question in questions]
    texts = model.complete(prompts, RULER_TASKS[task].tokens_to_generate)
    found = [count_matches(text, question.references) for text, question in zip(texts, questions, strict=True)]
    n_references = len(questions[0].references)
    share = sum(found) / (n_references * n_questions)
    # The references of one question are not independent, so the interval counts questions.
    low, high = compute_wilson_interval(share * n_questions, n_questions)
    return RulerResult(
        task,
        length,
        n_questions,
        n_references,
        found,
        max(map(len, prompts)),
        round(100 * share, 2),
        round(100 * low, 2),
        round(100 * high, 2),
    )


def evaluate_run_with_ruler(
    run_dir: str | Path,
    *,
    out: str | Path | None = None,
    step: int | None = None,
    lengths: Sequence[int] = (),
    tasks: Sequence[str] = tuple(RULER_TASKS),
    questions: int = 20,
    questions_at: Mapping[int, int] = MappingProxyType({}),
    seed: int = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    prepare_data: Callable[..., Dataset] = prepare,
    log: Log = lambda line: None,
) -> dict[str, Any]:
    """Evaluate a checkpoint of a run on RULER's tasks, write ruler.json and return its contents.

    Documents are the run's held-out text. A task that does not fit into a length is recorded with the reason.

    lengths: tokens of a prompt and its answer; default: the lengths of the run's stages.
    questions, questions_at: number of questions per task and length, and at these lengths.
    out, step, dtype, prepare_data, log: as in `evaluate_run`.

    Raises `NoCheckpoint`; `ConfigError` for an unknown task, and for a bundled model without `out`.
    """
    check_tasks(tasks)
    folder = directory.check_run_dir(run_dir)
    config, checkpoint, output_folder = check_evaluable(folder, out, step)
    target_device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    start, model = time.monotonic(), load_model(checkpoint, device=target_device, dtype=dtype)
    dataset = prepare_data(config.data, config.model.vocab_size, config.train.longest_stage.seq_len)
    requested_lengths = sorted({*(lengths or (stage.seq_len for stage in config.train.plan))})
    documents = read_documents(
        dataset.validation, dataset.tokenizer, max(TEXT_PER_LENGTH * requested_lengths[-1], MIN_TEXT_TOKENS)
    )
    text_model, words = _OwnModel(model, dataset.tokenizer), split_words(documents)
    identity = {
        "v": VERSION,
        "run": folder.name,
        "step": parse_step(checkpoint),
        "seed": seed,
        "config_hash": config.hash(),
        "data_identity": dataset.identity,
        "tokenizer": config.data.tokenizer if config.data.tokenizer == "byte" else dataset.tokenizer.identity,
        "code": get_code_identity(),
        "versions": get_versions(),
        "device": torch.cuda.get_device_name(target_device) if target_device.type == "cuda" else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "attention": config.model.attention,
    }
    counts = [questions, dict(questions_at)]
    parts = PartialEvaluation(output_folder, json.loads(json.dumps([identity, counts])), RULER_UNFINISHED)
    results: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for task, length in itertools.product(tasks, requested_lengths):
        n_questions = questions_at.get(length, questions)
        try:
            result = parts.get_or_compute(
                f"{task} at {length:,}",
                lambda t=task, n=length, q=n_questions: asdict(_evaluate_task(text_model, t, n, words, q, seed)),
            )
        except DataError as error:
            skipped.append({"task": task, "length": length, "why": str(error)})
            log(f"{task} at {length:,}: skipped: {error}")
            continue
        results.append(result)
        log(
            f"{task} at {length:,}: score {result['score']:.1f} of 100 [{result['low']:.1f}, {result['high']:.1f}], "
            f"{n_questions} questions"
        )
    record = {**identity, "results": results, "not_asked": skipped, "seconds": round(time.monotonic() - start, 3)}
    record = write_evaluation(output_folder, record, RULER)
    parts.delete()
    return record


def read_documents(text: TokenStore, tokenizer: Tokenizer, max_tokens: int) -> list[str]:
    """Return the documents in the first `max_tokens` tokens of a text; the last one may be cut."""
    tokens = text.read(0, min(max_tokens, len(text)))
    ends = np.flatnonzero(tokens == tokenizer.separator)
    parts = np.split(tokens, ends)
    return [tokenizer.decode(part[part != tokenizer.separator]) for part in parts]
