"""Mutants of nsa_lab/config: one planted fault each."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "yaml: question marks that the parsers read differently are accepted",
        "config.yaml_text",
        'scalars.count("?") != written.count("?")',
        "False",
    ),
    Mutant(
        "ranks: context parallelism ignores the setting",
        "config.train_config",
        "math.gcd(n_sequences, n_ranks // context_parallel)",
        "math.gcd(n_sequences, n_ranks)",
    ),
    Mutant(
        "ranks: sequences of any length are shared",
        "config.train_config",
        "if stage.seq_len < 2 * size:",
        "if stage.seq_len < size:",
    ),
    Mutant(
        "config: a stage's graphs are those of the run",
        "config.run_config",
        "return self.runtime.cuda_graph if stage.cuda_graph is None else stage.cuda_graph",
        "return self.runtime.cuda_graph",
    ),
    # What a user, or a stranger, gives.
    Mutant("yaml: the last of two keys is taken", "config.yaml_text", "if key.value in keys:", "if False:"),
    Mutant("yaml: minutes and seconds are a number", "config.yaml_text", "[-+]?(0|[1-9][\\d_]*|", "[-+]?(0|[1-9][\\d_:]*|"),
    Mutant(
        "yaml: keys of any kind",
        "config.yaml_text",
        'if key.tag not in (STR_TAG, f"{TAG_PREFIX}merge"):',
        "if False:",
    ),
    Mutant(
        "yaml: the fast parser takes keys of any kind",
        "config.yaml_text",
        "if key.tag != STR_TAG or key.value in mapping:",
        "if key.value in mapping:",
    ),
    Mutant(
        "yaml: the fast parser takes the last of two equal keys",
        "config.yaml_text",
        "if key.tag != STR_TAG or key.value in mapping:",
        "if key.tag != STR_TAG:",
    ),
    Mutant(
        "yaml: quoted numbers are numbers for the fast parser",
        "config.yaml_text",
        "if kind is yaml.ScalarNode and implicit[0]\n",
        "if kind is yaml.ScalarNode\n",
    ),
    Mutant("yaml: nesting without end", "config.yaml_text", "if self._depth == MAX_DEPTH:", "if False:"),
    Mutant("indexer: plain means", "config.model_config", '"pool" if self', '"avg" if self'),
    Mutant(
        "indexer: one token is weighed", "config.model_config", "self.indexer_block > 1 else", "self.indexer_block > 0 else"
    ),
    Mutant(
        "indexer: the heads' blocks",
        "config.model_config",
        "if self.has_indexer:\n            phi",
        "if False:\n            phi",
    ),
    Mutant(
        "mean keys: of the blocks of phi",
        "config.model_config",
        'self.nsa.model_copy(update={"l": self.nsa.l_sel, "d": self.nsa.l_sel, "phi": "avg"})',
        'self.nsa.model_copy(update={"phi": "avg"})',
    ),
    Mutant(
        "indexer: blocks that overlap",
        "config.model_config",
        '"d": self.indexer_block',
        '"d": max(1, self.indexer_block // 2)',
    ),
    Mutant(
        "overrides: nothing takes the place of a section",
        "config.run_config",
        "elif value is None and isinstance(merged.get(section), dict):",
        "elif value is ... and isinstance(merged.get(section), dict):",
    ),
    Mutant(
        "config: the longest stage is the last",
        "config.train_config",
        "return max(self.plan, key=lambda stage: stage.seq_len)",
        "return self.plan[-1]",
    ),
    Mutant(
        "config: a rate may not stay where it is",
        "config.train_config",
        "if self.min_lr > self.lr:",
        "if self.min_lr >= self.lr:",
    ),
    Mutant(
        "overrides: a value ends at its last equals sign",
        "config.run_config",
        'text.partition("=")',
        'text.rpartition("=")',
    ),
    Mutant("n-grams: tables that nothing reads count", "config.model_config", "if not self.ngrams:", "if False:"),
    # The configuration.
    Mutant("config: unknown keys ignored", "config.base", 'extra="forbid"', 'extra="ignore"'),
    Mutant("config: a stride that does not divide the block", "config.nsa_config", "if length % self.d:", "if False:"),
    Mutant(
        "config: no room for the forced blocks",
        "config.nsa_config",
        "if self.n_sel < self.n_forced:",
        "if self.n_sel < 1:",
    ),
    Mutant(
        "config: steps counted in forward passes",
        "config.train_config",
        "return self.sequences_per_step * self.seq_len",
        "return self.batch_size * self.seq_len",
    ),
    Mutant(
        "sweep: a variant may set the seed",
        "config.sweep_config",
        "if reserved := [key for key in keys if key in RESERVED_KEYS]:",
        "if reserved := []:",
    ),
    Mutant(
        "config: runs that knew of no muon get another hash",
        "config.run_config",
        '        "optimizer": "adamw",\n',
        "",
    ),
    Mutant(
        "stages: a budget of tokens is overdrawn",
        "config.train_config",
        "self.token_budget // self.tokens_per_step)",
        "-(-self.token_budget // self.tokens_per_step))",
    ),
    Mutant(
        "recall: a value is told in a form of its own",
        "config.data_config",
        "if any(format_spec or conversion",
        "if any(False and format_spec",
    ),
]
