"""Mutants of nsa_lab/convert: one planted fault each."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant("convert: documents are not separated", "convert.forward_pass", "        span=span,\n        layouts=", "        span=None,\n        layouts="),
    Mutant("convert: padding stays before the tokens", "convert.forward_pass", "permutation = None if mask is None else", "permutation = None if mask is not None else"),
    Mutant("convert: positions are not moved with the tokens", "convert.forward_pass", "permutation.apply(positions.expand(n_rows, -1))", "positions.expand(n_rows, -1)"),
    Mutant("convert: columns are not moved back", "convert.forward_pass", "return permutation.restore(value) if", "return value if"),
    Mutant("convert: layers without an indexer use the first blocks", "convert.forward_pass", "self.blocks[index - index % c.indexer_every, 0]", "self.blocks[0, 0]"),
    Mutant("convert: dense attention in sparse passes", "convert.forward_pass", "        if self.is_dense:\n", "        if True:\n"),
    Mutant("convert: another attention function keeps the hooks", "convert.forward_pass", "in (SPARSE, DENSE)", "is not None"),
    Mutant("convert: micro-batches all have the full selection loss", "convert.forward_pass", "weighted * _compute_label_share(arguments) if", "weighted if"),
    Mutant("convert: a loss of the logits does not train the indexer", "convert.forward_pass", "else AddedLoss.apply(first, weighted)", "else first"),
    Mutant("convert: a cached chunk starts at the first token", "convert.cache", "start + min(begin, count)", "start"),
    Mutant("convert: the cache is not advanced", "convert.cache", "self._tokens.advance(counts, width=max(counts))", "pass"),
    Mutant("convert: RoPE tables of the smaller cache", "convert.cache", "tokens.grow(2 * n_tokens)\n            self._rotary.clear()", "tokens.grow(2 * n_tokens)"),
    Mutant("convert: queries of the wrong heads", "convert.indexer", "[:, None] * c.heads_per_group", "[:, None]"),
    Mutant("convert: the bias counts twice", "convert.indexer", "outputs[1:] - outputs[:1]", "outputs[1:]"),
    Mutant("convert: the configuration is shared", "convert.models", "own_config = copy.deepcopy(dense.config)", "own_config = dense.config"),
    Mutant("convert: an adapter of another architecture", "convert.adapter", "if info.base_hash != base_hash:", "if False:"),
    Mutant("convert: a coarser int8", "convert.adapter", "clamp_min(torch.finfo(torch.float32).tiny) / 127", "clamp_min(1) / 127"),
    Mutant("convert: int8 without its scale is loaded", "convert.adapter", "if weight.dtype == torch.int8 and (", "if False and ("),
    Mutant("convert: damaged weights", "convert.adapter", "if hashlib.sha256(data).hexdigest() != info.sha256:", "if False:"),
    Mutant("convert: gate and up are swapped", "convert.nsa_model", "[layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight]", "[layer.mlp.up_proj.weight, layer.mlp.gate_proj.weight]"),
    Mutant("convert: trained indexers are not copied", "convert.nsa_model", "own.indexer.load_state_dict(attention.indexer.state_dict())", "init_indexer(own, own.indexer)"),
    Mutant("convert: sliding windows are converted", "convert.settings", "if getattr(dense, \"sliding_window\", None) is not None and has_window:", "if False:"),
    Mutant("convert: missing weights are random", "convert.sources", "    if names:\n", "    if False:\n"),
    Mutant("convert: the RoPE base of the first stage", "convert.run_settings", "run.model_at(run.train.steps)", "run.model"),
    Mutant("convert: an adapter of a changed trunk", "convert.export", "if not torch.equal(own[name], weight):", "if False:"),
    Mutant("teacher: the divergence is reversed", "train.teacher", "functional.kl_div(own, expected", "functional.kl_div(expected, own"),
    Mutant("teacher: weights of tokens are ignored", "train.teacher", ".sum(-1) * weights[:, 0]).sum()", ".sum(-1)).sum()"),
    Mutant("teacher: it shares the trained weights", "train.teacher", "weights[name].clone()", "weights[name]"),
    Mutant("teacher: the fingerprint is that of the names", "train.teacher", "        digest.update(weight.detach()", "        bytes(weight.detach()"),
    Mutant("teacher: the divergence is a sum", "train.step", "computed.weights) / total_weight", "computed.weights)"),
    Mutant("teacher: the divergence has weight 1", "train.step", "self._train.teacher_weight * teacher_kl", "teacher_kl"),
    Mutant("teacher: another one continues the run", "train.checkpoint_state", 'if state.get("teacher") != teacher:', "if False:"),
    Mutant("rope: YaRN scales the fast frequencies", "model.layers", "rate * (1 - share) + scaled * share", "rate * share + scaled * (1 - share)"),
    Mutant("rope: YaRN does not scale queries and keys", "model.layers", "return factor * angle.cos(), factor * angle.sin()", "return angle.cos(), angle.sin()"),
    Mutant("conversion: losses are not paired with the control", "evaluate.conversion", "self._find_row(attention, blocks), self._find_row(reference, None)", 'self._find_row(attention, blocks), self._find_row("dense", None)'),
    Mutant("convert: the trunk is trained", "train.build", "        freeze_all_but_indexers(model)\n", ""),
]  # fmt: skip
