"""Mutants of nsa_lab/model: one planted fault each."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    # The model.
    Mutant(
        "model: Q rotated before the head split",
        "model.attention_layers",
        "* len(config.kv_sets)], dim=2)\n    return",
        "* len(config.kv_sets)], dim=2)\n    from nsa_lab.model.layers import get_rotary_table\n    raw = unrotated.qk[:, :, : config.n_heads].flatten(2).unsqueeze(2)\n    whole = get_rotary_table(raw.shape[1], raw.shape[3], config.rope_theta, raw.device)\n    q = rotate(raw, whole).squeeze(2).unflatten(-1, (config.n_heads, config.d_k))\n    return",
    ),
    Mutant(
        "model: K not rotated",
        "model.attention_layers",
        "* len(config.kv_sets)], dim=2)\n    return",
        "* len(config.kv_sets)], dim=2)\n    keys = unrotated.qk[:, :, config.n_heads :].split(config.n_kv_groups, dim=2)\n    return",
    ),
    Mutant(
        "model: compressed keys rotated by nothing",
        "model.attention_layers",
        "* len(config.kv_sets)], dim=2)\n    return",
        "* len(config.kv_sets)], dim=2)\n    keys = [unrotated.qk[:, :, config.n_heads : config.n_heads + config.n_kv_groups], *keys[1:]]\n    return",
    ),
    Mutant(
        "model: compressed values from the selected branch",
        "model.attention_layers",
        "compress_traceable(v, self.config.nsa, self.phi_v,",
        "compress_traceable(by_branch['sel'][1], self.config.nsa, self.phi_v,",
    ),
    Mutant(
        "model: compressed branch cut off from its keys",
        "model.attention_layers",
        "compress_traceable(k, self.config.nsa, self.phi_k,",
        "compress_traceable(k.detach(), self.config.nsa, self.phi_k,",
    ),
    Mutant(
        "model: window on the selected branch's keys",
        "model.attention_layers",
        "k_sel, v_sel, k_win, v_win, None if gates",
        "k_sel, v_sel, k_sel, v_sel, None if gates",
    ),
    Mutant(
        "model: gates by branch, then by head",
        "model.attention_layers",
        "logits.unflatten(-1, (self.config.n_heads, len(self.config.branches)))",
        "logits.unflatten(-1, (len(self.config.branches), self.config.n_heads)).mT",
    ),
    Mutant("model: a silent branch is heard", "model.attention_layers", "if self.config.silent:", "if False:"),
    Mutant(
        "model: the wrong branches are silent",
        "model.attention_layers",
        "name in self.config.silent else",
        "name not in self.config.silent else",
    ),
    Mutant("model: softmax gate over the heads", "model.attention_layers", "logits.softmax(-1)", "logits.softmax(-2)"),
    Mutant(
        "model: the late key of a document's first token is the last document's",
        "model.layers",
        "        if is_document_start is not None:\n",
        "        if False:\n",
    ),
    Mutant(
        "model: late keys are two tokens late",
        "model.layers",
        "[torch.zeros_like(x[:, :1]), x], dim=1)",
        "[torch.zeros_like(x[:, :1]), torch.zeros_like(x[:, :1]), x], dim=1)",
    ),
    Mutant(
        "model: decoding forgets the unread key",
        "model.layers",
        "if previous_k is None:",
        "if True:",
    ),
    Mutant(
        "model: the selection loss in evaluation too",
        "model.attention_layers",
        "if self.training and self.config.has_selection_loss",
        "if self.config.has_selection_loss",
    ),
    Mutant("model: the selection loss without its weight", "model.attention_layers", "else loss * weight", "else loss"),
    Mutant(
        "model: matching heads of the second group",
        "model.init_weights",
        "[: layer.config.matching_heads] = keys[0, 0]",
        "[: layer.config.matching_heads] = keys[0, -1]",
    ),
    Mutant("model: branches' keys start apart", "model.init_weights", "keys[1:] = keys[0].clone()", "pass"),
    Mutant(
        "model: the short convolution of every group starts as a shift",
        "model.layers",
        "self.weight[1, :, 0] = self.weight[0, :, 1:] = 1.0",
        "self.weight[1] = 1.0",
    ),
    Mutant(
        "model: the short convolution's weights change places",
        "model.layers",
        "current_weight, previous_weight = self",
        "previous_weight, current_weight = self",
    ),
    Mutant(
        "model: a pool does not start as the mean", "model.init_weights", "ShortConvolution | BlockPool", "ShortConvolution"
    ),
    Mutant("indexer: its loss reaches the trunk", "model.indexer", "self.qk(x.detach())", "self.qk(x)"),
    Mutant("indexer: its keys are not those of the token before", "model.indexer", "if self.convolution:", "if False:"),
    Mutant(
        "indexer: starts with every group's last head",
        "model.init_weights",
        "c.heads_per_group + torch.arange(c.indexer_heads) % c.heads_per_group",
        "c.heads_per_group + (torch.arange(c.indexer_heads) - 1) % c.heads_per_group",
    ),
    Mutant(
        "indexer: documents are compressed as the heads' keys",
        "model.attention_layers",
        "dict.fromkeys((config.nsa, config.selection_nsa)))",
        "dict.fromkeys((config.nsa,)))",
    ),
    Mutant(
        "indexer: taught by the geometry of the heads' keys",
        "model.attention_layers",
        "q, k, nsa = scoring\n",
        "q, k, _ = scoring\n            nsa = self.config.nsa\n",
    ),
    Mutant(
        "indexer: its scores are not counted", "model.transformer", 'if c.scores in ("indexer", "mean_key"):', "if False:"
    ),
    Mutant(
        "indexer: a narrow one is turned by the quickest angles",
        "model.layers",
        "return rotary[0][..., ::n], rotary[1][..., ::n]",
        "return rotary[0][..., : width // 2], rotary[1][..., : width // 2]",
    ),
    Mutant(
        "indexer: starts with the window's keys",
        "model.init_weights",
        'c.get_kv_set("sel"))]',
        'c.get_kv_set("win"))]',
    ),
    Mutant(
        "indexer: taught by its own attention",
        "model.attention_layers",
        "attention_q=inputs[0],",
        "attention_q=None,",
    ),
    Mutant(
        "indexer: the model does not read its blocks",
        "model.attention_layers",
        "blocks=blocks, backend",
        "blocks=None, backend",
    ),
    Mutant(
        "indexer: what is observed are the branch's own blocks",
        "model.attention_layers",
        "if blocks is None else None\n            if scoring is not None:",
        "if blocks is None else None\n            if scoring is not None:\n                scoring = q, k_cmp, nsa",
    ),
    Mutant(
        "model: gates start at zero",
        "model.init_weights",
        "std = (2.0 / (module.in_features + module.out_features)) ** 0.5",
        "std = 0.0",
    ),
    Mutant("model: head starts as large as any other", "model.init_weights", "std = 1.0 / module.in_features", "pass"),
    Mutant("model: residual outputs not reduced", "model.init_weights", "std *= residual_scale", "std *= 1.0"),
    Mutant(
        "model: embeddings are normed in no model",
        "model.transformer",
        "if self.config.embedding_norm else x",
        "if False else x",
    ),
    Mutant(
        "model: embeddings are normed in every model",
        "model.transformer",
        "if self.config.embedding_norm else x",
        "if True else x",
    ),
    Mutant(
        "n-grams: they reach over a document's begin",
        "model.ngrams",
        "(positions[..., None] >= offsets)",
        "torch.ones_like(offsets)",
    ),
    Mutant(
        "n-grams: a token 0 is none", "model.ngrams", "torch.stack(shifted, dim=-1) + 1", "torch.stack(shifted, dim=-1)"
    ),
    Mutant("n-grams: all lengths share a table", "model.ngrams", " + self.rows_per_length * offsets[:-1]", ""),
    Mutant("n-grams: the order of tokens does not count", "model.ngrams", ".cumprod(0)", ".cumprod(0)[-1:]"),
    Mutant("n-grams: high bits do not count", "model.ngrams", "0x2545F4914F6CDD1D, 32", "0x2545F4914F6CDD1D, 63"),
    Mutant(
        "n-grams: a model does not say where documents begin",
        "model.transformer",
        "self.embed(tokens, positions, embeddings=embeddings)",
        "self.embed(tokens, embeddings=embeddings)",
    ),
    Mutant(
        "n-grams: tables are counted as products",
        "model.transformer",
        " - self.embedding_parameter_count())",
        " - self.embedding.weight.numel())",
    ),
    Mutant("model: no norm before the MLP", "model.transformer", "self.mlp(self.mlp_norm(x))", "self.mlp(x)"),
    Mutant("model: the first layer's selection loss alone", "model.transformer", "torch.stack(losses).sum()", "losses[0]"),
    Mutant("model: a constant of the rotation frozen at 10000", "model.layers", "rate = theta ** (", "rate = 10000.0 ** ("),
    Mutant(
        "model: what is not turned is lost",
        "model.layers",
        "parts.append(unrotated.to(acc_dtype))",
        "parts.append(0 * unrotated.to(acc_dtype))",
    ),
    Mutant(
        "model: gate shares of compressed and selected swapped",
        "model.statistics",
        "for i, name in enumerate(config.branches)}",
        "for i, name in zip((1, 0, 2), config.branches)}",
    ),
    Mutant(
        "model: keys of all queries counted as one's",
        "model.statistics",
        "keys.sum(-1).float()",
        "keys.sum((1, -1)).float()",
    ),
    Mutant(
        "model: gate entropy in bits", "model.statistics", "share.clamp_min(1e-9).log()", "share.clamp_min(1e-9).log2()"
    ),
    Mutant(
        "model: reuse measured against any block",
        "model.statistics",
        "reused = (is_selected[:, 1:, :, :-1] & is_selected[:, :-1, :, :-1])",
        "reused = (is_selected[:, 1:, :, :-1])",
    ),
    Mutant(
        "model: reuse measured across documents",
        "model.statistics",
        "_average_rows(reused, positions[1:] > 0)",
        "_average_rows(reused, positions[1:] >= 0)",
    ),
    Mutant(
        "model: distance to blocks of another document",
        "model.statistics",
        "    positions = span.positions()",
        "    positions = geometry.positions(0, span.queries)",
    ),
    Mutant(
        "model: an indexer's keys of documents lie as the compressed branch's",
        "model.attention_layers",
        "layout, selection_layout = (layouts[0], layouts[-1])",
        "layout, selection_layout = (layouts[0], layouts[0])",
    ),
    Mutant(
        "layer: under autocast it takes anything",
        "model.nsa_layer",
        " and {x.dtype, weight_dtype} <= set(AUTOCAST_DTYPES):",
        ":",
    ),
    Mutant("model: any number is a token", "model.transformer", "if low < 0 or high >= c.vocab_size:", "if low < 0:"),
    Mutant("model: FLOPs of the forward pass alone", "model.transformer", "BACKWARD_FLOPS = 2.0", "BACKWARD_FLOPS = 0.0"),
    Mutant(
        "the layer for other models: a base of rotary that is not handed on",
        "model.nsa_layer",
        "            rope_theta=rope_theta,\n",
        "",
    ),
    Mutant(
        "the layer for other models: turned as wide as a head, whatever share was asked",
        "model.nsa_layer",
        "c.rotary_width, c.rope_theta",
        "c.d_k, c.rope_theta",
    ),
    Mutant(
        "the layer for other models: after a pass that failed, the loss of the one before",
        "model.nsa_layer",
        "        self._selection_loss = None  # in case this pass fails: do not return the loss of the pass before\n",
        "",
    ),
    Mutant(
        "n-grams: hashed without the second fold",
        "model.ngrams",
        "return (scrambled ^ (scrambled >> _HASH_SHIFT)) %",
        "return scrambled %",
    ),
    Mutant(
        "an indexer in packed rows: mixed over the borders of documents",
        "model.attention_layers",
        "self.indexer(x, rotary, layout and layout.is_document_start)",
        "self.indexer(x, rotary)",
    ),
    Mutant(
        "a norm in half precision: squares added up in it",
        "model.layers",
        "acc_dtype = torch.promote_types(x.dtype, torch.float32)\n    return rms",
        "acc_dtype = x.dtype\n    return rms",
    ),
    Mutant(
        "branches: a single branch has a gate",
        "model.attention_layers",
        "if len(config.branches) > 1 else 0",
        "if len(config.branches) > 0 else 0",
    ),
    Mutant(
        "branches: phi without a compressed branch",
        "model.attention_layers",
        'has_compression = "cmp" in config.branches',
        "has_compression = True",
    ),
    Mutant(
        "indexer: keys that are pooled first are rotated to their last token",
        "attention.compression",
        "return geometry.positions(0, n_blocks, device) * nsa.d\n",
        "return geometry.positions(0, n_blocks, device) * nsa.d + nsa.l - 1\n",
    ),
    Mutant("indexer: keys are not rounded", "model.indexer", "self.config.indexer_dtype)", '"bf16")'),
    Mutant(
        "indexer: a layer without one uses the blocks of two layers before",
        "model.transformer",
        "            selected = selection.blocks\n            if",
        "            selected = selected if selection.blocks is None or index % 3 else selection.blocks\n            if",
    ),
    Mutant("indexer: keys are not normalized", "model.indexer", "k = self.norm(k)", "pass"),
    Mutant(
        "FLOPs: an indexer in every layer",
        "model.transformer",
        "c.n_scoring_layers * per_index_key",
        "c.n_layers * per_index_key",
    ),
    Mutant(
        "FLOPs: of branches that do not exist",
        "model.transformer",
        "sum(reads[name] for name in c.branches)",
        'sum(reads[name] for name in ("cmp", "sel", "win"))',
    ),
]
