"""Section `data`: training text, and the facts inserted into it."""

from __future__ import annotations

import string
from typing import Literal, Self

from pydantic import Field, model_validator

from nsa_lab.config.base import MAX_COUNT, Section


class RecallConfig(Section):
    """Facts that `data.source: recall` inserts into text, and the questions about them. Lengths are in bytes."""

    bytes_per_fact: int = Field(
        default=512, ge=1, le=MAX_COUNT, description="recall: insert one fact per this many bytes of a sequence"
    )
    distractors: float = Field(default=0.0, ge=0, lt=1, description="recall: fraction of facts without a question")
    questions_together: int = Field(default=1, ge=1, le=MAX_COUNT, description="recall: number of questions in one place")
    names: Literal["words", "codes"] = Field(
        default="words", description="recall: name of a fact; words: as in 'amber anchor', codes: as in 'kq-417'"
    )
    values: Literal["digits", "letters", "hex", "mixed"] = Field(
        default="digits", description="recall: characters of a value; mixed: digits, letters or hex, drawn for each fact"
    )
    value_length: int = Field(default=7, ge=1, le=MAX_COUNT, description="recall: number of characters of a value")
    statement: str = Field(
        default="\nThe secret number of the {name} is {value}.\n", description="recall: template of a fact"
    )
    question: str = Field(
        default="\nQ: What is the secret number of the {name}? A: ", description="recall: template of a question"
    )
    wordings: Literal["single", "several", "grammar"] = Field(
        default="single",
        description="recall: single: data.statement and data.question; several: these or one of four other wordings, drawn "
        "for each fact and for its question; grammar: drawn from hundreds of other wordings",
    )
    updates: float = Field(
        default=0.0, ge=0, le=1, description="recall: fraction of facts with an earlier statement of another value"
    )
    first_values: float = Field(
        default=0.0, ge=0, le=1, description="recall: fraction of updated facts whose question is for the earlier value"
    )
    distance: Literal["uniform", "log"] = Field(
        default="uniform", description="recall: distribution of the distance from fact to question; log: log-uniform"
    )
    answer_weight: float = Field(default=5.0, gt=0, description="recall: loss weight of answer bytes; other text has 1")

    @model_validator(mode="after")
    def _check_templates(self) -> Self:
        for key, expected in (("statement", {"name", "value"}), ("question", {"name"})):
            text = getattr(self, key)
            try:
                parsed = list(string.Formatter().parse(text))
                fields = {name for _, name, _, _ in parsed if name is not None}
            except ValueError as error:
                raise ValueError(f"data.{key} = {text!r}: {error}; write a literal brace twice") from None
            if fields != expected:
                raise ValueError(
                    f"data.{key} = {text!r} contains {', '.join(sorted(fields)) or 'no field'}; "
                    f"expected {' and '.join(f'{{{field}}}' for field in sorted(expected))}"
                )
            if any(format_spec or conversion for _, _, format_spec, conversion in parsed):
                raise ValueError(
                    f"data.{key} = {text!r} formats a field, but an answer is the unformatted value; write "
                    f"{' and '.join(f'{{{field}}}' for field in sorted(expected))}"
                )
            if any(0xD800 <= ord(letter) < 0xE000 for letter in text):
                raise ValueError(f"data.{key} = {text!r} contains a surrogate, which is half a character; remove it")
        return self


class DataConfig(RecallConfig):
    """Source and preparation of the text. Only `source: synthetic` trains on noise."""

    source: Literal["stdlib", "local", "fineweb_edu", "synthetic", "recall"] = Field(
        default="stdlib", description="recall: text of data.path (default: stdlib) with inserted facts"
    )
    path: str | None = Field(
        default=None, description="local, recall: a file, folder or glob of txt, jsonl or parquet files"
    )
    text_column: str = Field(default="text", description="name of the text column in parquet and jsonl files")
    tokenizer: str = Field(default="byte", description="byte, or the path of a tokenizer.json")
    max_tokens: int | None = Field(
        default=None, ge=1, le=2**63 - 1, description="maximum number of training tokens to prepare; None: all"
    )
    val_fraction: float = Field(default=0.02, gt=0, lt=1, description="fraction of documents held out, by document hash")
    documents: Literal["cross", "mask"] = Field(
        default="cross",
        description="cross: attend across document boundaries; mask: compute each document of a sequence separately, "
        "with positions from 0",
    )
    packing: Literal["stream", "best_fit"] = Field(
        default="stream",
        description="stream: concatenate documents and cut at the end of each sequence; best_fit: keep documents whole if "
        "they fit, and pad",
    )
    min_document_bytes: int = Field(
        default=0, ge=0, le=MAX_COUNT, description="exclude shorter documents from training and held-out text"
    )
    dataset: str = Field(default="HuggingFaceFW/fineweb-edu", description="fineweb_edu: repository on the Hugging Face Hub")
    subset: str = Field(default="sample-10BT", description="fineweb_edu: configuration name of the dataset")
    timeout_s: float = Field(default=120.0, gt=0, description="seconds without data until the source counts as stalled")

    @model_validator(mode="after")
    def _check_path(self) -> DataConfig:
        if self.source == "local" and not self.path:
            raise ValueError("data.source = local needs data.path: a file, a folder or a glob of txt, jsonl or parquet")
        if self.source not in ("local", "recall") and self.path:
            raise ValueError(
                f"data.path = {self.path!r} is not used by data.source = {self.source}; "
                "set data.source: local, or remove the path"
            )
        return self

    @model_validator(mode="after")
    def _check_recall_keys(self) -> DataConfig:
        unused = sorted(self.model_fields_set & self.unused_keys)
        if unused:
            reason, remedy = (
                ("data.wordings = grammar", "remove it")
                if self.source == "recall"
                else (f"data.source = {self.source}", "set data.source: recall, or remove it")
            )
            raise ValueError(f"{', '.join(f'data.{key}' for key in unused)}: not used by {reason}; {remedy}")
        return self

    @model_validator(mode="after")
    def _check_packing(self) -> DataConfig:
        if self.source == "recall" and self.packing == "best_fit" and self.documents == "cross":
            raise ValueError(
                "data.packing = best_fit with data.source = recall: facts would be inserted into padding; set "
                "data.documents: mask, which inserts them into each document separately, or data.packing: stream"
            )
        return self

    @property
    def unused_keys(self) -> set[str]:
        """Keys that this run does not use."""
        if self.source != "recall":
            return set(RecallConfig.model_fields)
        return {"statement", "question"} if self.wordings == "grammar" else set()
