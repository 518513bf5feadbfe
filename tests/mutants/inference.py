"""Mutants of nsa_lab/inference: one planted fault each."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "decoding: the first key is convolved with stale cache contents",
        "inference.cache.storage",
        "return previous.masked_fill((step.lengths == 0).view(-1, 1, 1, 1, 1), 0)",
        "return previous",
    ),
    Mutant(
        "decoding: a graph replay does not advance the lengths",
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
        "decoding: the ring of raw tokens has no room for overlapping blocks",
        "inference.kv_cache_size",
        "return nsa.l - 1 + MAX_STEP_TOKENS",
        "return MAX_STEP_TOKENS",
    ),
    Mutant(
        "decoding: padding beyond the capacity overwrites the next sequence",
        "inference.cache.cache_step",
        "torch.where(positions < capacity, rows * capacity + positions, len(rows) * capacity)",
        "(rows * capacity + positions).clamp_max(len(rows) * capacity)",
    ),
    Mutant(
        "decoding: ring indices are memoized without the ring size",
        "inference.cache.cache_step",
        'self._memoize(("ring", n_slots),',
        'self._memoize("ring",',
    ),
    Mutant(
        "decoding: padding counts as tokens",
        "inference.decode",
        "self.cache.advance(chunk_counts, width=chunk.width)",
        "self.cache.advance([chunk.width] * len(counts), width=chunk.width)",
    ),
    Mutant(
        "decoding: prefill writes padding into rings",
        "inference.cache.cache_step",
        "last = self.counts[:, None] - 1",
        "last = self.counts[:, None] * 0 + self.width - 1",
    ),
    Mutant(
        "decoding: the convolution uses the current token as the previous one",
        "inference.cache.cache_step",
        "_compute_ring_indices(self.rows, self.positions[:, :1] + offsets, n_slots)",
        "_compute_ring_indices(self.rows, self.positions[:, :1] + offsets + 1, n_slots)",
    ),
    Mutant(
        "generation: the seed is ignored", "inference.generate", "manual_seed(seed or 0)", "manual_seed(seed and 0 or 0)"
    ),
    Mutant(
        "decoding: a graph step completes no block",
        "inference.cache.compressed_cache",
        "-(-step.width // self.nsa.d)",
        "0",
    ),
    Mutant(
        "decoding: a graph step ignores which rows are padding",
        "inference.decode_graph",
        "self._counts.copy_(torch.tensor(counts, dtype=torch.int64), non_blocking=True)",
        "self._counts.fill_(1)",
    ),
    Mutant(
        "decoding: the graph is kept when the cache grows",
        "inference.decode",
        "        self._rotary.clear()\n        self._decode_graph = None\n",
        "        self._rotary.clear()\n",
    ),
    Mutant(
        "decoding: kernels read the weights of a module with a forward hook",
        "inference.plain_weights",
        "if module._forward_hooks or module._forward_pre_hooks or",
        "if module._forward_pre_hooks or",
    ),
    Mutant(
        "decoding: kernels read the weight of a layer with a replaced forward method",
        "inference.plain_weights",
        "or not _get_method_names(cls).isdisjoint(module.__dict__)",
        "",
    ),
    Mutant(
        "decoding: kernels read the weight of a layer with a bias",
        "inference.plain_weights",
        "isinstance(module, nn.Linear) and module.bias is not None",
        "False",
    ),
    Mutant(
        "decoding: kernels read the data of a tensor subclass",
        "inference.plain_weights",
        "type(weight) is nn.Parameter",
        "isinstance(weight, nn.Parameter)",
    ),
    Mutant(
        "decoding: the graph outlives the weights that it reads",
        "inference.plain_weights",
        "            and self._get_addresses() == self._addresses\n",
        "",
    ),
    Mutant(
        "decoding: the graph is replayed for a model with a new adapter",
        "inference.plain_weights",
        "            and all(map(is_, children, self._children))\n",
        "",
    ),
    Mutant(
        "decoding: the graph is replayed under autocast",
        "inference.plain_weights",
        "    if torch.is_autocast_enabled(like.device.type):\n        return False\n",
        "",
    ),
    Mutant(
        "decoding: more tokens are removed than the rings can restore",
        "inference.cache.model_cache",
        "n_overwritten > kv_cache_size.MAX_STEP_TOKENS",
        "n_overwritten > 2 * kv_cache_size.MAX_STEP_TOKENS",
    ),
    Mutant(
        "decoding: advance allocates a new tensor of lengths",
        "inference.cache.model_cache",
        "self.lengths.copy_(torch.tensor(self.starts, dtype=torch.int32), non_blocking=True)",
        "self.lengths = torch.tensor(self.starts, dtype=torch.int32, device=self.lengths.device)",
    ),
    Mutant("generation: stop sequences are ignored", "inference.generate", "stops.is_reached(new_tokens[row])", "False"),
    Mutant(
        "generation: padding ids of the vocabulary are sampled",
        "inference.generate",
        "logits[:, :sampled_vocab_size]",
        "logits[:, :None]",
    ),
    Mutant(
        "generation: a stop sequence matches by its last token",
        "inference.generate",
        "list(tokens[-len(sequence) :]) == sequence",
        "tokens[-1:] == sequence[-1:]",
    ),
    Mutant(
        "generation: no separator before the prompt", "inference.text_generation", "[tokenizer.separator, *map(", "[*map("
    ),
    Mutant("sampling: temperature multiplies", "inference.sampling", "/ self.temperature)", "* self.temperature)"),
    Mutant("sampling: top-k excludes the k-th token", "inference.sampling", "logits < floor", "logits <= floor"),
    Mutant(
        "sampling: top-p excludes the token that reaches it",
        "inference.sampling",
        "preceding = descending.cumsum(-1) - descending",
        "preceding = descending.cumsum(-1)",
    ),
    Mutant(
        "memory: previous keys of an indexer counted with the head width",
        "inference.kv_cache_size",
        "widths += c.n_scoring_layers * c.index_groups * c.index_width",
        "widths += c.n_scoring_layers * c.index_groups * c.d_k",
    ),
    Mutant(
        "indexer: prefill ignores the blocks of the indexer",
        "inference.cache.attention_cache",
        "blocks=blocks, backend",
        "blocks=None, backend",
    ),
    Mutant(
        "indexer: decoding loses the previous key",
        "inference.cache.attention_cache",
        "indexer(x, step.select_rotary(rotary_table), previous_k=self._read_previous(step))",
        "indexer(x, step.select_rotary(rotary_table), previous_k=None)",
    ),
    Mutant(
        "decoding: embeddings are not normalized",
        "inference.cache.cached_pass",
        "return model.embed(tokens, embeddings=embeddings)",
        "return model.embedding(tokens)",
    ),
    Mutant(
        "decoding: tokens for n-grams are not cached",
        "inference.cache.cached_pass",
        "latest.put(tokens, self._step)",
        "pass",
    ),
    Mutant(
        "decoding: reorder leaves tokens for n-grams in place",
        "inference.cache.model_cache",
        "yield self.latest_tokens.ring.rows",
        "pass",
    ),
    Mutant(
        "decoding: padding overwrites tokens for n-grams",
        "inference.kv_cache_size",
        "return max_ngram - 1 + MAX_STEP_TOKENS",
        "return MAX_STEP_TOKENS",
    ),
    Mutant(
        "load: the rotary base of the stage is ignored",
        "inference.load",
        "config.model_at(checkpoint_files.parse_step(folder))",
        "config.model",
    ),
    Mutant(
        "export-hf: the requested step is ignored",
        "inference.hf.exporting",
        "find_checkpoint(run_dir, step)",
        "find_checkpoint(run_dir)",
    ),
    Mutant(
        "export-hf: the trained length is that of the first stage",
        "inference.hf.exporting",
        "[: run.train.locate_step(trained_step)[0] + 1]",
        "[:1]",
    ),
    Mutant(
        "transformers: packed documents attend to each other",
        "inference.hf.modeling",
        "self.model(tokens, span, embeddings=embeddings, columns",
        "self.model(tokens, embeddings=embeddings, columns",
    ),
    Mutant(
        "transformers: masks with other values are accepted",
        "inference.hf.inputs",
        "mask.eq(0) | mask.eq(1)",
        "mask.eq(mask)",
    ),
    Mutant(
        "transformers: the number of labels of all micro-batches is ignored",
        "inference.hf.modeling",
        "num_items_in_batch=num_items_in_batch,\n        )\n        if",
        "num_items_in_batch=None,\n        )\n        if",
    ),
    Mutant(
        "transformers: labels that are already shifted are ignored",
        "inference.hf.modeling",
        "shift_labels=shift_labels,\n",
        "shift_labels=None if labels is None else shift_labels,\n",
    ),
    Mutant(
        "transformers: the selection loss does not train the indexer",
        "inference.hf.modeling",
        "return loss + weighted",
        "return loss + weighted.detach()",
    ),
    Mutant(
        "transformers: each micro-batch has the whole selection loss",
        "inference.hf.modeling",
        "        if num_items_in_batch is not None:\n            # The losses",
        "        if False:\n            # The losses",
    ),
    Mutant(
        "transformers: a loss from the last hidden state does not train the indexer",
        "inference.hf.modeling",
        "return grad_outputs[0], ctx.like",
        "return grad_outputs[0], 0 * ctx.like",
    ),
    Mutant(
        "transformers: columns with padding are removed from the cache",
        "inference.hf.cache",
        "n_removed > self._n_last_columns",
        "n_removed > self._n_columns",
    ),
    Mutant(
        "transformers: a saved folder has no file to import from",
        "inference.hf.configuration",
        "        write_remote_code(save_directory)\n",
        "",
    ),
]
