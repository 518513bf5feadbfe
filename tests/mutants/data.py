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
        "data.rows",
        "        if index < size:\n            return index",
        "        return index % size",
    ),
    Mutant(
        "data: documents run together",
        "data.fill",
        "ids.astype(self._dtype).tobytes() + self._separator)",
        "ids.astype(self._dtype).tobytes() + b' ')",
    ),
    Mutant(
        "data: documents are split by what came before them",
        "data.fill",
        '"validation" if fraction < self._plan.val_fraction else "train"',
        '"validation" if self.state["splits"]["train"]["documents"] % 3 == 2 else "train"',
    ),
    Mutant(
        "data: characters counted for bytes",
        "data.fill",
        'counts["text_bytes"] += len(_bytes_of(text))',
        'counts["text_bytes"] += len(text)',
    ),
    Mutant(
        "data: a filling that goes on begins again",
        "data.fill",
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
        "data: a row is lost where a filling goes on", "data.sources.local", "if row >= first and", "if row > first and"
    ),
    Mutant(
        "data: what a hidden folder holds is text", "data.sources.local", 'part.startswith(".") for part', "False for part"
    ),
    Mutant(
        "paths: what the working directory has stays relative",
        "data.paths",
        "    return str(last)",
        "    return path",
    ),
    Mutant("documents: room for a power of two", "data.documents", "1 << twos + twos % 2", "1 << twos"),
    Mutant("documents: no room beside one for each row", "data.documents", "2 * len(self.rows)", "len(self.rows)"),
    Mutant(
        "documents: a document begins behind its separator",
        "data.documents",
        "separators = tokens == separator",
        "separators = np.append(False, (tokens == separator)[:-1])",
    ),
    Mutant(
        "documents: rows share a document",
        "data.documents",
        "ends.extend((row[1:] + ends[-1]).tolist())",
        "ends.extend((row[1:-1] + ends[-1]).tolist() + [ends[-1] + int(row[-1])] * (row is self.rows[-1]))",
    ),
    Mutant(
        "documents: room for those of an average row",
        "data.documents",
        "int(inside.max(initial=0))",
        "int(inside[:1].mean())",
    ),
    Mutant("documents: worst fit", "data.rows", "(fitting & -fitting).bit_length()", "fitting.bit_length()"),
    Mutant(
        "documents: the rest of a long one in any row",
        "data.rows",
        "best_fit(sizes.tolist(), len(rest), room)",
        "best_fit(sizes.tolist(), 0, room)",
    ),
    Mutant(
        "documents: padding weighs as text does",
        "data.rows",
        "(np.arange(self._seq_len + 1) <= self._filled[row])",
        "(np.arange(self._seq_len + 1) >= 0)",
    ),
    Mutant(
        "documents: facts across them",
        "data.staged",
        "by_document(plant, separator) if",
        "plant if",
    ),
    Mutant(
        "documents: short ones held out all the same",
        "data.fill",
        "max(self._plan.min_document_bytes, 1)",
        "max(self._plan.min_document_bytes * (split_fraction(document.text) >= self._plan.val_fraction), 1)",
    ),
    Mutant(
        "stages: as long as is left out all the same",
        "data.shards",
        "kept = lengths > least",
        "kept = lengths > least + 1",
    ),
    Mutant(
        "stages: a stretch that goes on in the next shard is cut",
        "data.shards",
        "bisect.bisect_right(ends, first), bisect.bisect_left(begins, last)",
        "bisect.bisect_left(begins, first), bisect.bisect_left(begins, last)",
    ),
    Mutant(
        "stages: short documents in all of them",
        "data.staged",
        "tokens = tokens.without_short_documents(separator, stage.min_document_tokens)",
        "pass",
    ),
    Mutant(
        "stages: facts in every sequence",
        "data.staged",
        "return sparingly(whole, stage.planted_share)",
        "return whole",
    ),
    Mutant(
        "stages: the share all at once",
        "data.recall.planting",
        "if int((sequence + 1) * share) > int(sequence * share):",
        "if sequence % 10 < 10 * share:",
    ),
    Mutant(
        "documents: each separator of several in a row begins one",
        "data.documents",
        "(np.diff(ends, prepend=-2) > 1) & (ends > 0)",
        "ends > 0",
    ),
    Mutant(
        "recall: whether a task fits depends on what is drawn",
        "data.recall.tasks",
        "len(inserts) * len(longest.statement)",
        "sum(len(insert.said) for insert in inserts)",
    ),
    Mutant("stages: all with one seed", "data.staged", "if index == 0:", "if index >= 0:"),
    Mutant(
        "recall: two facts with one value",
        "data.recall.facts",
        "if not enough or value not in drawn:",
        "if True:",
    ),
    Mutant(
        "recall: a question before its statement",
        "data.recall.planting",
        "Insert(max(place for _, place in told), fact.question",
        "Insert(min(place for place, _ in told) - 1e-3, fact.question",
    ),
    Mutant(
        "recall: the end of the line weighs as the answer",
        "data.recall.planting",
        "(answer_weight, len(insert.answer)), (1.0, len(_end(insert)))",
        "(answer_weight, len(insert.answer + _end(insert)))",
    ),
    Mutant(
        "evaluation: the text depends on the micro-batch",
        "data.staged",
        "train.eval_batches * stage.batch_size,",
        "train.eval_batches * stage.sequences_at_once,",
    ),
    Mutant(
        "evaluation: the first windows, and none from further on",
        "data.batches",
        "return window * self._available // self.windows * self._seq_len",
        "return window * self._seq_len",
    ),
    Mutant(
        "evaluation: different texts have one name",
        "data.batches",
        "self._tokens.read(self._position(window), self._seq_len + 1)",
        "self._tokens.read(0, 1)",
    ),
    Mutant("data: the cache stands in for any source", "data.dataset", 'manifest["identity"] == identity and ', ""),
    Mutant(
        "data: shards without a source are not hashed",
        "data.dataset",
        "content=small or missing is not None",
        "content=small",
    ),
    Mutant(
        "stages: a diagnosis names the text of another step",
        "data.staged",
        "positions(within, start",
        "positions(step, start",
    ),
]
