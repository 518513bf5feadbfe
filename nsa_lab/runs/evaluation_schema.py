"""Schema of `evaluation.json`, `ruler.json` and `conversion.json`: the fields that readers use, with types and bounds.

Invariants
* A file that matches can be read without further checks: no reader divides by zero or meets lists of other lengths.
* Unknown fields, which a newer version may write, are valid. A field with a default is missing in files of older versions.
* Losses may be infinite or NaN, if the model diverged; `nsa_lab.health` judges those of conversion.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator

from nsa_lab.config.errors import VALUE_REPR
from nsa_lab.runs.event_fields import MAX_INT

Count = Annotated[int, Field(ge=0, le=MAX_INT)]
Positive = Annotated[int, Field(ge=1, le=MAX_INT)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
Score = Annotated[float, Field(ge=0, le=100)]
ROUNDING = 1e-3
SCORE_ROUNDING = 0.02  # of a percentage with two decimals
# A pair is a list in JSON.
PositionEdges = Annotated[tuple[Count, Positive], Strict(False)]
TextRow = Annotated[tuple[Positive, float], Strict(False)]


# Replacements in the reasons that pydantic gives.
_SHORT_WORDS = (
    ("Input should be", "expected"),
    ("greater than or equal to", "at least"),
    ("less than or equal to", "at most"),
    ("List should have", "expected"),
)


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class _SkippedTask(_Part):
    task: str
    length: Positive
    why: str


class _Record(_Part):
    run: str
    step: Count
    seed: int
    data_identity: str
    code: dict[str, str | bool | None]
    device: str
    dtype: Dtype
    attention: str
    not_asked: list[_SkippedTask]


class _RetrievalCell(_Part):
    task: str
    length: Positive
    depth: Fraction
    sequences: Positive
    answers: Positive
    right: Count
    right_at_depth: Count | None = None
    wordings: list[Annotated[list[Any], Field(min_length=1)]] | None = None
    tokens: Positive | None = None
    tokens_right: Count | None = None
    loss: float | None = None
    written: Count
    written_right: Count

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        _check_at_most("right", self.right, "answers", self.answers)
        if self.right_at_depth is not None:
            # The first answer of each sequence is at the depth of the cell.
            _check_at_most("right_at_depth", self.right_at_depth, "sequences", self.sequences)
            n_others = self.answers - self.sequences
            _check_between("right_at_depth", self.right_at_depth, self.right - n_others, self.right, self.right)
        if self.wordings is not None:
            _check_length("wordings", self.wordings, self.answers)
            n_right = sum(bool(wording[-1]) for wording in self.wordings)
            _check_between("wordings", n_right, self.right, self.right, self.right)
        _check_at_most("written_right", self.written_right, "written", self.written)
        if self.tokens is None or self.tokens_right is None:
            return self
        _check_at_most("tokens_right", self.tokens_right, "tokens", self.tokens)
        # Answers of a cell have the same number of tokens, and a right answer has right tokens only.
        per_answer = self.tokens // self.answers
        least, most = self.right * per_answer, self.tokens - (self.answers - self.right)
        _check_between("tokens_right", self.tokens_right, least, most, self.right)
        # A wrong token is not the most likely one, so it costs at least ln 2.
        lowest = (1 - self.tokens_right / self.tokens) * math.log(2)
        if self.loss is not None and self.loss < lowest * (1 - ROUNDING):
            raise ValueError(
                f"loss: expected at least {lowest:.4g} nats with {self.tokens_right} right tokens, got {self.loss:.4g}"
            )
        return self


class _PositionRange(_Part):
    first: Count
    last: Positive
    loss: float
    error: float
    windows: list[float] | None = None


class _Positions(_Part):
    length: Positive
    windows: Positive
    octaves: Annotated[list[_PositionRange], Field(min_length=1)]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        for position_range in self.octaves:
            if position_range.windows is not None:
                _check_length("octaves.windows", position_range.windows, self.windows)
        return self


class _Documents(_Part):
    documents: Count
    rows: Positive
    length: Positive
    tokens: Count
    alone: float
    across: float
    first_alone: float
    first_across: float
    difference: float
    error: float


class _Text(_Part):
    identity: str
    documents: Count
    tokens: Count
    length: Positive
    loss: float
    rows: Annotated[list[TextRow], Field(min_length=1)]
    octaves: Annotated[list[PositionEdges], Field(min_length=1)]
    windows: list[list[float]]
    window_documents: list[Count]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        _check_length("window_documents", self.window_documents, len(self.windows))
        for window in self.windows:
            _check_length("windows", window, len(self.octaves))
        return self


class _Intervention(_Part):
    name: str
    accuracy: Fraction
    d_loss: float
    right: list[Fraction] = []


class _Selection(_Part):
    length: Positive
    sequences: Count
    depths: list[Fraction] = []
    why_not: str | None
    interventions: list[_Intervention]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        for intervention in self.interventions:
            _check_length("interventions.right", intervention.right, len(self.depths))
        return self


class EvaluationRecord(_Record):
    """Content of `evaluation.json`."""

    text_tokens: Positive | None = None
    recall: dict[str, Any]
    retrieval: list[_RetrievalCell]
    positions: _Positions
    documents: _Documents | None = None
    texts: dict[str, _Text] = {}
    selection: list[_Selection]


class _RulerResult(_Part):
    task: str
    length: Positive
    questions: Positive
    references: Positive
    found: list[Count]
    prompt_tokens: Positive | None = None
    score: Score
    low: Score
    high: Score

    @model_validator(mode="after")
    def _check_found(self) -> Self:
        _check_length("found", self.found, self.questions)
        _check_at_most("found", max(self.found), "references", self.references)
        total = self.references * self.questions
        score = 100 * sum(self.found) / total
        if abs(self.score - score) > SCORE_ROUNDING:
            raise ValueError(f"score: expected {score:.2f} with {sum(self.found)} of {total} found, got {self.score:g}")
        if not self.low <= self.score <= self.high:
            raise ValueError(f"score: expected {self.low:g} to {self.high:g}, its interval, got {self.score:g}")
        return self


class RulerRecord(_Record):
    """Content of `ruler.json`."""

    tokenizer: str
    results: list[_RulerResult]

    @model_validator(mode="after")
    def _check_repetition(self) -> Self:
        cells = [(result.task, result.length) for result in self.results]
        for task, length in cells:
            if cells.count((task, length)) > 1:
                raise ValueError(f"results: expected {task} at {length:,} tokens once, got it twice")
        return self


class _AttentionLoss(_Part):
    attention: Literal["dense", "selected", "mean_key", "nearest", "oracle", "window", "control"]
    blocks: Positive | None
    windows: Annotated[list[list[float]], Field(min_length=1)]


class _AttentionMass(_Part):
    blocks: Positive
    windows: Count
    fractions: dict[str, list[float]]


class _ConvertedText(_Part):
    identity: str
    length: Positive
    ranges: Annotated[list[PositionEdges], Field(min_length=1)]
    losses: Annotated[list[_AttentionLoss], Field(min_length=1)]
    mass: list[_AttentionMass]

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        if self.losses[0].attention != "dense":
            raise ValueError(f"losses: expected dense in the first row, got {self.losses[0].attention}")
        for row in self.losses:
            _check_length(f"losses.{row.attention}.windows", row.windows, len(self.losses[0].windows))
            for window in row.windows:
                _check_length(f"losses.{row.attention}.windows", window, len(self.ranges))
        return self


class _Control(_Part):
    run: str
    step: Count


class ConversionRecord(_Part):
    """Content of `conversion.json`."""

    run: str
    step: Count
    config_hash: str
    data_identity: str
    code: dict[str, str | bool | None]
    device: str
    dtype: Dtype
    control: _Control | None = None
    texts: Annotated[dict[str, _ConvertedText], Field(min_length=1)]
    seconds: float


def find_problem(record: Mapping[str, Any], kind: type[BaseModel]) -> str | None:
    """Return the first field of a record with a wrong type or value, and the reason; None if all are valid."""
    try:
        kind.model_validate(record)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"]))
        if problem["type"] == "missing":
            return f"{place}: missing"
        if problem["type"] == "value_error":
            return ".".join(filter(None, (place, problem["msg"].removeprefix("Value error, "))))
        reason = problem["msg"].partition(" or instance of")[0]
        for long, short in _SHORT_WORDS:
            reason = reason.replace(long, short)
        return f"{place}: {reason}, got {VALUE_REPR.repr(problem['input'])}"
    return None


def _check_at_most(name: str, count: int, total_name: str, total: int) -> None:
    if count > total:
        raise ValueError(f"{name}: expected at most the {total:,} {total_name}, got {count:,}")


def _check_between(name: str, count: int, least: int, most: int, n_right: int) -> None:
    if not max(0, least) <= count <= most:
        expected = f"{max(0, least)} to {most}" if least < most else f"{most}"
        raise ValueError(f"{name}: expected {expected} with {n_right} right answers, got {count}")


def _check_length(name: str, values: list[Any], n_expected: int) -> None:
    if len(values) != n_expected:
        raise ValueError(f"{name}: expected {n_expected:,} values, got {len(values):,}")
