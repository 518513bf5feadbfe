"""Mutants of nsa_lab/data: one planted fault each."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    # The data.
    Mutant("data: targets are the inputs", "data.batches", "both[:, 1:].contiguous()", "both[:, :-1].contiguous()"),
    Mutant(
        "data: every epoch in the same windows",
        "data.batches",
        'return f"{self._seed}:{epoch}"',
        'return f"{self._seed}:0"',
    ),
    Mutant(
        "data: every micro-batch is the first",
        "data.batches",
        "first = step * self.sequences_per_step + start",
        "first = step * self.sequences_per_step",
    ),
    Mutant(
        "data: a permutation that repeats",
        "data.sequence_packing",
        "        if index < size:\n            return index",
        "        return index % size",
    ),
    Mutant(
        "data: documents run together",
        "data.build_shards",
        "ids.astype(self._dtype).tobytes() + self._separator)",
        "ids.astype(self._dtype).tobytes() + b' ')",
    ),
    Mutant(
        "data: documents are split by what came before them",
        "data.build_shards",
        '"validation" if fraction < self._options.val_fraction else "train"',
        '"validation" if self.state["splits"]["train"]["documents"] % 3 == 2 else "train"',
    ),
    Mutant(
        "data: characters counted for bytes",
        "data.build_shards",
        'counts["text_bytes"] += len(_to_bytes(part))',
        'counts["text_bytes"] += len(part)',
    ),
    Mutant(
        "data: a filling that goes on begins again",
        "data.build_shards",
        'self.state["cursor"] = self._cursor',
        'self.state["cursor"] = None',
    ),
    Mutant(
        "data: a read past a shard's end begins the next one late",
        "data.shards",
        "offset = start + filled - (self._ends[index] - len(shard))",
        "offset = max(start - (self._ends[index] - len(shard)), 0) + bool(filled)",
    ),
    Mutant("data: shards by their size alone", "data.shards", "if content and (digest", "if False and (digest"),
    Mutant(
        "data: a separator spelt out in a text is one",
        "data.tokenizer",
        "self._tokenizer.encode_special_tokens = True",
        "self._tokenizer.encode_special_tokens = False",
    ),
    Mutant(
        "data: a row is lost where a filling goes on",
        "data.sources.local",
        "if row >= first_row and",
        "if row > first_row and",
    ),
    Mutant("data: what a hidden folder holds is text", "data.sources.local", 'if entry.name.startswith("."):', "if False:"),
    Mutant(
        "paths: what the working directory has stays relative",
        "data.paths",
        "    return str(last)",
        "    return path",
    ),
    Mutant("documents: room for a power of two", "data.document_starts", "1 << twos + twos % 2", "1 << twos"),
    Mutant(
        "documents: no room beside one for each row",
        "data.document_starts",
        "2 * (int(documents[-1]) // seq_len)",
        "int(documents[-1]) // seq_len",
    ),
    Mutant(
        "documents: a document begins behind its separator",
        "data.document_starts",
        "is_separator = tokens == separator",
        "is_separator = np.append(False, (tokens == separator)[:-1])",
    ),
    Mutant(
        "documents: rows share a document",
        "data.document_starts",
        "find_document_starts(row, separator) + end)",
        "find_document_starts(row, separator)[end > 0 :] + end)",
    ),
    Mutant(
        "documents: room for those of an average row",
        "data.document_starts",
        "int(n_inside.max(initial=0))",
        "int(n_inside[:1].mean())",
    ),
    Mutant(
        "documents: worst fit",
        "data.sequence_packing",
        "(sufficient & -sufficient).bit_length()",
        "sufficient.bit_length()",
    ),
    Mutant(
        "documents: the rest of a long one in any row",
        "data.sequence_packing",
        "pack_best_fit(piece_lengths.tolist(), len(part_starts), capacity)",
        "pack_best_fit(piece_lengths.tolist(), 0, capacity)",
    ),
    Mutant(
        "documents: padding weighs as text does",
        "data.sequence_packing",
        "(np.arange(self._seq_len + 1) <= self._text_tokens_per_row[row])",
        "(np.arange(self._seq_len + 1) >= 0)",
    ),
    Mutant(
        "documents: facts across them",
        "data.stage_batches",
        "insert_per_document(inserter, separator) if",
        "inserter if",
    ),
    Mutant(
        "documents: short ones held out all the same",
        "data.build_shards",
        "max(self._options.min_document_bytes, 1)",
        "max(self._options.min_document_bytes * (compute_split_fraction(text) >= self._options.val_fraction), 1)",
    ),
    Mutant(
        "stages: as long as is left out all the same",
        "data.shards",
        "is_long = lengths > min_tokens",
        "is_long = lengths > min_tokens + 1",
    ),
    Mutant(
        "stages: a stretch that goes on in the next shard is cut",
        "data.shards",
        "bisect.bisect_right(ends, first), bisect.bisect_left(starts, last)",
        "bisect.bisect_left(starts, first), bisect.bisect_left(starts, last)",
    ),
    Mutant(
        "stages: short documents in all of them",
        "data.stage_batches",
        "tokens = tokens.drop_short_documents(separator, stage.min_document_tokens)",
        "pass",
    ),
    Mutant(
        "stages: facts in every sequence",
        "data.stage_batches",
        "return insert_in_share(document_inserter, stage.planted_share)",
        "return document_inserter",
    ),
    Mutant(
        "stages: the share all at once",
        "data.recall.needle_insertion",
        "if int((sequence + 1) * share) > int(sequence * share):",
        "if sequence % 10 < 10 * share:",
    ),
    Mutant(
        "documents: each separator of several in a row begins one",
        "data.document_starts",
        "(np.diff(ends, prepend=-2) > 1) & (ends > 0)",
        "ends > 0",
    ),
    Mutant(
        "recall: whether a task fits depends on what is drawn",
        "data.recall.retrieval_tasks",
        "len(insertions) * len(longest_fact.statement)",
        "sum(len(insertion.text) for insertion in insertions)",
    ),
    Mutant(
        "recall: the replaced value comes after the new one",
        "data.recall.needle_insertion",
        "Insertion(depth * rng.random(), fact.replaced)",
        "Insertion(1 - depth * rng.random(), fact.replaced)",
    ),
    Mutant(
        "recall: an update keeps the value",
        "data.recall.facts",
        "while value == fact.value.decode():",
        "while value is None:",
    ),
    Mutant(
        "recall: all facts are updated",
        "data.recall.facts",
        "if rng.random() >= recall.updates:",
        "if rng.random() >= 1.0:",
    ),
    Mutant(
        "recall: one wording of questions",
        "data.recall.facts",
        "questions[rng.integers(len(questions))]",
        "questions[0 * rng.integers(len(questions))]",
    ),
    Mutant(
        "recall: bytes of a replaced statement are not counted",
        "data.recall.facts",
        "len(fact.replaced) + len(fact.statement)",
        "len(fact.statement)",
    ),
    Mutant(
        "recall: mixed values without hex", "data.recall.facts", '("digits", "letters", "hex")', '("digits", "letters")'
    ),
    Mutant("stages: all with one seed", "data.stage_batches", "if index == 0:", "if index >= 0:"),
    Mutant(
        "recall: two facts with one value",
        "data.recall.facts",
        "if not can_differ or value not in used:",
        "if True:",
    ),
    Mutant(
        "recall: a question before its statement",
        "data.recall.needle_insertion",
        "Insertion(max(depth for _, depth in depths), fact.question",
        "Insertion(min(depth for depth, _ in depths) - 1e-3, fact.question",
    ),
    Mutant(
        "recall: the end of the line weighs as the answer",
        "data.recall.needle_insertion",
        "(answer_weight, len(insertion.answer)),\n            (1.0, len(_get_line_end(insertion))),",
        "(answer_weight, len(insertion.answer + _get_line_end(insertion))),",
    ),
    Mutant(
        "evaluation: the text depends on the micro-batch",
        "data.stage_batches",
        "train.eval_batches * stage.batch_size,",
        "train.eval_batches * stage.sequences_per_forward,",
    ),
    Mutant(
        "evaluation: the first windows, and none from further on",
        "data.batches",
        "return window * self._n_available // self.n_windows * self._seq_len",
        "return window * self._seq_len",
    ),
    Mutant(
        "evaluation: different texts have one name",
        "data.batches",
        "self._tokens.read(self._get_position(window), self._seq_len + 1)",
        "self._tokens.read(0, 1)",
    ),
    Mutant("data: the cache stands in for any source", "data.dataset", 'manifest["identity"] == identity and ', ""),
    Mutant(
        "data: shards without a source are not hashed",
        "data.dataset",
        "content=is_small or source_error is not None",
        "content=is_small",
    ),
    Mutant(
        "stages: a diagnosis names the text of another step",
        "data.stage_batches",
        "get_text_positions(within, start",
        "get_text_positions(step, start",
    ),
]
