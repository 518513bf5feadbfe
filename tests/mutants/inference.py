"""Mutants of nsa_lab/inference: one planted fault each."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "decoding: a sequence's first key is mixed with what the cache held",
        "inference.cache.storage",
        "return previous.masked_fill((step.lengths == 0).view(-1, 1, 1, 1, 1), 0)",
        "return previous",
    ),
    Mutant(
        "decoding: a recorded step stands still",
        "inference.decode_graph",
        "cache.lengths.add_(self._counts)",
        "cache.lengths.add_(0 * self._counts)",
    ),
    Mutant(
        "decoding: a residual is lost",
        "inference.fused_linear",
        "outputs.append(output if residual is None else residual + output)",
        "outputs.append(output)",
    ),
    Mutant(
        "decoding: blocks that overlap forget what they share",
        "inference.kv_cache_size",
        "return nsa.l - 1 + MAX_STEP_TOKENS",
        "return MAX_STEP_TOKENS",
    ),
    Mutant(
        "decoding: padding past a sequence's room begins its neighbour",
        "inference.cache.cache_step",
        "torch.where(positions < capacity, rows * capacity + positions, len(rows) * capacity)",
        "(rows * capacity + positions).clamp_max(len(rows) * capacity)",
    ),
    Mutant(
        "decoding: what is worked out for one ring is taken for all",
        "inference.cache.cache_step",
        'self._memoize(("ring", n_slots),',
        'self._memoize("ring",',
    ),
    Mutant(
        "decoding: padding makes a sequence longer",
        "inference.decode",
        "self.cache.advance(chunk_counts)",
        "self.cache.advance([chunk.shape[1]] * len(chunk))",
    ),
    Mutant(
        "decoding: a ring begins with the padding of its prompt",
        "inference.cache.cache_step",
        "last = self.counts[:, None] - 1",
        "last = self.counts[:, None] * 0 + self.width - 1",
    ),
    Mutant(
        "decoding: a convolution reads the token itself",
        "inference.cache.cache_step",
        "_compute_ring_indices(self.rows, self.positions[:, :1] + offsets, n_slots)",
        "_compute_ring_indices(self.rows, self.positions[:, :1] + offsets + 1, n_slots)",
    ),
    Mutant(
        "generation: the seed is not used", "inference.generate", "manual_seed(seed or 0)", "manual_seed(seed and 0 or 0)"
    ),
    Mutant(
        "decoding: a recorded step completes no block",
        "inference.cache.compressed_cache",
        "-(-step.width // self.nsa.d)",
        "0",
    ),
    Mutant(
        "decoding: a recorded step forgets which rows are padding",
        "inference.decode_graph",
        "self._counts.copy_(torch.tensor(counts, dtype=torch.int64), non_blocking=True)",
        "self._counts.fill_(1)",
    ),
    Mutant("decoding: a recording outlives its cache", "inference.decode", "self._decode_graph = None\n\n", "pass\n\n"),
    Mutant(
        "decoding: lengths are elsewhere after a step",
        "inference.cache.model_cache",
        "self.lengths.copy_(torch.tensor(self.starts, dtype=torch.int32), non_blocking=True)",
        "self.lengths = torch.tensor(self.starts, dtype=torch.int32, device=self.lengths.device)",
    ),
    Mutant("generation: nothing stops it", "inference.generate", "stops.is_reached(new_tokens[row])", "False"),
    Mutant(
        "generation: ids past the tokenizer's are drawn",
        "inference.generate",
        "logits[:, :sampled_vocab_size]",
        "logits[:, :None]",
    ),
    Mutant(
        "generation: a stop by its last token alone",
        "inference.generate",
        "list(tokens[-len(sequence) :]) == sequence",
        "tokens[-1:] == sequence[-1:]",
    ),
    Mutant(
        "generation: no separator before the prompt", "inference.text_generation", "[tokenizer.separator, *map(", "[*map("
    ),
    Mutant("sampling: temperature multiplies", "inference.sampling", "/ self.temperature)", "* self.temperature)"),
    Mutant("sampling: top-k drops the last of them", "inference.sampling", "logits < floor", "logits <= floor"),
    Mutant(
        "sampling: top-p without the token that reaches it",
        "inference.sampling",
        "preceding = descending.cumsum(-1) - descending",
        "preceding = descending.cumsum(-1)",
    ),
    Mutant(
        "memory: an indexer's past is as wide as a head's",
        "inference.kv_cache_size",
        "config.has_indexer * config.index_width",
        "config.has_indexer * config.d_k",
    ),
    Mutant(
        "indexer: a prompt is read by other blocks",
        "inference.cache.attention_cache",
        "blocks=blocks, backend",
        "blocks=None, backend",
    ),
    Mutant(
        "indexer: decoding forgets its unread key",
        "inference.cache.attention_cache",
        "previous_k=self.previous_keys and self.previous_keys.read_previous(step)\n        )",
        "previous_k=None\n        )",
    ),
    Mutant(
        "decode: embeddings are never normed",
        "inference.cache.model_cache",
        "return model.embed(tokens)",
        "return model.embedding(tokens)",
    ),
    Mutant(
        "decoding: what n-grams reach back to is not kept",
        "inference.cache.model_cache",
        "self.latest_tokens.put(tokens, step)",
        "pass",
    ),
    Mutant(
        "decoding: what n-grams reach back to stays with its row",
        "inference.cache.model_cache",
        "yield self.latest_tokens.ring.data",
        "pass",
    ),
    Mutant(
        "decoding: padding overwrites what n-grams reach back to",
        "inference.kv_cache_size",
        "return max_ngram - 1 + MAX_STEP_TOKENS",
        "return MAX_STEP_TOKENS",
    ),
    Mutant(
        "load: a checkpoint's rotary base is that of no stage",
        "inference.load",
        "config.model_at(checkpoint_files.parse_step(folder))",
        "config.model",
    ),
    Mutant(
        "export-hf: another step than asked for",
        "inference.hf",
        "find_checkpoint(run_dir, step)",
        "find_checkpoint(run_dir)",
    ),
    Mutant(
        "transformers: documents in one row read each other",
        "inference.hf",
        "self.model(tokens, span)",
        "self.model(tokens)",
    ),
    Mutant("transformers: a mask of other values is taken", "inference.hf", "mask.eq(0) | mask.eq(1)", "mask.eq(mask)"),
]
