"""The section `data`: text, and the facts planted into it."""

from __future__ import annotations

import string
from typing import Literal, Self

from pydantic import Field, model_validator

from nsa_lab.config.base import MAX_COUNT, Section


class RecallConfig(Section):
    """Facts that data.source: recall plants into text, and their questions. Lengths are in bytes."""

    bytes_per_fact: int = Field(
        default=512, ge=1, le=MAX_COUNT, description="recall: one fact for this many bytes of a sequence"
    )
    distractors: float = Field(default=0.0, ge=0, lt=1, description="recall: share of the facts that nobody asks for")
    questions_together: int = Field(default=1, ge=1, le=MAX_COUNT, description="recall: questions that stand in one place")
    names: Literal["words", "codes"] = Field(default="words", description="recall: amber anchor, or kq-417")
    values: Literal["digits", "letters", "hex"] = Field(default="digits", description="recall: what a value is made of")
    value_length: int = Field(default=7, ge=1, le=MAX_COUNT, description="recall: characters of a value")
    statement: str = Field(
        default="\nThe secret number of the {name} is {value}.\n", description="recall: how a fact is told"
    )
    question: str = Field(
        default="\nQ: What is the secret number of the {name}? A: ", description="recall: how it is asked for"
    )
    distance: Literal["uniform", "log"] = Field(
        default="uniform", description="recall: from fact to question; log: every order of magnitude alike"
    )
    answer_weight: float = Field(default=5.0, gt=0, description="recall: weight of an answer's bytes in the loss; text: 1")

    @model_validator(mode="after")
    def _check_templates(self) -> Self:
        for key, wanted in (("statement", {"name", "value"}), ("question", {"name"})):
            text = getattr(self, key)
            try:
                parsed = list(string.Formatter().parse(text))
                found = {name for _, name, _, _ in parsed if name is not None}
            except ValueError as error:
                raise ValueError(f"data.{key} = {text!r}: {error}; double a brace that is meant as one") from None
            if found != wanted:
                raise ValueError(
                    f"data.{key} = {text!r} holds {', '.join(sorted(found)) or 'no field'}; "
                    f"expected {' and '.join(f'{{{field}}}' for field in sorted(wanted))}"
                )
            if any(form or conversion for _, _, form, conversion in parsed):
                raise ValueError(
                    f"data.{key} = {text!r} gives a field a form, and an answer is the value as it is; write "
                    f"{' and '.join(f'{{{field}}}' for field in sorted(wanted))}"
                )
            if any(0xD800 <= ord(letter) < 0xE000 for letter in text):
                raise ValueError(f"data.{key} = {text!r} holds half a character, a surrogate; leave it out")
        return self


class DataConfig(RecallConfig):
    """Where the text comes from. Noise is trained on only with `source: synthetic`."""

    source: Literal["stdlib", "local", "fineweb_edu", "synthetic", "recall"] = Field(
        default="stdlib", description="recall: facts planted into the text of data.path, or of stdlib without one"
    )
    path: str | None = Field(default=None, description="local, recall: a file, a folder or a glob of txt, jsonl or parquet")
    text_column: str = Field(default="text", description="name of the text column of parquet and jsonl")
    tokenizer: str = Field(default="byte", description="byte, or the path of a tokenizer.json")
    max_tokens: int | None = Field(
        default=None, ge=1, le=2**63 - 1, description="stop filling shards after this many training tokens"
    )
    val_fraction: float = Field(default=0.02, gt=0, lt=1, description="share of documents held out, by document hash")
    documents: Literal["cross", "mask"] = Field(
        default="cross",
        description="cross: a sequence is read as one text; mask: nothing reads across the border of two documents, and "
        "positions restart in each",
    )
    packing: Literal["stream", "best_fit"] = Field(
        default="stream",
        description="stream: text as it comes, cut where a sequence ends; best_fit: documents whole where they fit, and "
        "padding where none does",
    )
    min_document_bytes: int = Field(
        default=0, ge=0, le=MAX_COUNT, description="shorter documents are left out, of training and of what is held out"
    )
    dataset: str = Field(default="HuggingFaceFW/fineweb-edu", description="fineweb_edu: repository on the hub")
    subset: str = Field(default="sample-10BT", description="fineweb_edu: configuration of the data set")
    timeout_s: float = Field(default=120.0, gt=0, description="longest wait for the source before it is called stalled")

    @model_validator(mode="after")
    def _check_path(self) -> DataConfig:
        if self.source == "local" and not self.path:
            raise ValueError("data.source = local needs data.path: a file, a folder or a glob of txt, jsonl or parquet")
        if self.source not in ("local", "recall") and self.path:
            raise ValueError(
                f"data.path = {self.path!r} is not read by data.source = {self.source}; "
                "set data.source: local, or remove the path"
            )
        return self

    @model_validator(mode="after")
    def _check_recall_keys(self) -> DataConfig:
        given = sorted(self.model_fields_set & self.unused_keys)
        if given:
            raise ValueError(
                f"{', '.join(f'data.{key}' for key in given)}: not read by data.source = {self.source}; "
                "set data.source: recall, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _check_packing(self) -> DataConfig:
        if self.source == "recall" and self.packing == "best_fit" and self.documents == "cross":
            raise ValueError(
                "data.packing = best_fit with data.source = recall: facts would be planted into padding; set "
                "data.documents: mask, which plants them into every document by itself, or data.packing: stream"
            )
        return self

    @property
    def unused_keys(self) -> set[str]:
        """The keys that this run does not read."""
        return set() if self.source == "recall" else set(RecallConfig.model_fields)
