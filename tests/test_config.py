"""Configurations: loading, hashing, and errors that name every invalid key and the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from looping import looped

from nsa_lab.config import (
    ConfigError,
    DataConfig,
    ModelConfig,
    NSAConfig,
    RunConfig,
    StageConfig,
    SweepConfig,
    TrainConfig,
    apply_overrides,
    list_keys,
    parse_override,
    yaml_text,
)
from nsa_lab.model import NSATransformer
from nsa_lab.train.lr_schedule import compute_learning_rate

PARAMS = sorted((Path(__file__).parents[1] / "params").glob("*.yaml"))

# A widely used NSA configuration for A100 GPUs, without three switches that had no effect.
PRODUCTION = """
model: {dim: 768, n_layers: 12, n_heads: 12, n_kv_groups: 2, d_k: 64, d_v: 64}
nsa: {l: 32, d: 16, l_sel: 64, n_sel: 16, w: 512, phi: "avg"}
runtime: {device: "cuda", precision: "bf16", gradient_checkpointing: true}
train: {steps: 50000, seq_len: 2048, batch_size: 2, accumulate_grad_batches: 2, lr: 2.0e-4, lr_schedule: "cosine",
        warmup_steps: 2000, weight_decay: 0.01, grad_clip: 1.0, save_every: 5000}
"""
UNKNOWN_SWITCHES = {"use_flash": True, "use_triton_sel": False, "sel_triton_min_L": 4096}


def get_error(sections: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(sections)
    return str(caught.value)


def test_the_production_configuration_loads_unchanged() -> None:
    config = RunConfig.from_dict(yaml.safe_load(PRODUCTION))
    assert (config.model.dim, config.nsa.w, config.train.steps) == (768, 512, 50000)
    assert config.runtime.gradient_checkpointing
    assert config.train.tokens_per_step == 2 * 2 * 2048 and config.train.sequences_per_step == 4
    with torch.device("meta"):
        assert NSATransformer(config.model, device="meta", backend="torch").parameter_count() == 78_600_960


def test_all_unknown_keys_are_named_at_once() -> None:
    sections = yaml.safe_load(PRODUCTION)
    sections["runtime"] |= UNKNOWN_SWITCHES
    message = get_error(sections)
    assert all(f"runtime.{name}" in message for name in UNKNOWN_SWITCHES)


@looped
@pytest.mark.parametrize(
    ("section", "key", "nearest"),
    [
        ("train", "warmup", "train.warmup_steps"),
        ("train", "learning_rate", "train."),
        ("nsa", "lsel", "nsa.l_sel"),
        ("model", "n_head", "model.n_heads"),
        ("train", "precision", "runtime.precision"),
        ("model", "w", "nsa.w"),
        ("trian", "steps", "train"),
        ("data", "tokeniser", "data.tokenizer"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(section: str, key: str, nearest: str) -> None:
    message = get_error({section: {key: 1}})
    assert section in message and nearest in message and len(message.splitlines()) == 1


@looped
@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"nsa": {"l": 24}}, ["nsa.l = 24", "nsa.d = 16", "nsa.l = 16 or 32"]),
        ({"nsa": {"l_sel": 40}}, ["nsa.l_sel = 40", "32 or 48"]),
        ({"nsa": {"d": 0}}, ["nsa.d = 0", "greater than or equal to 1"]),
        ({"runtime": {"heartbeat_s": 1e30}}, ["runtime.heartbeat_s = 1e+30", "less than or equal to 86400"]),
        ({"runtime": {"heartbeat_s": 1e-300}}, ["runtime.heartbeat_s = 1e-300", "greater than or equal to 0.001"]),
        ({"nsa": {"n_sel": 2}}, ["nsa.n_sel = 2", "n_sel >= 3"]),
        ({"nsa": {"w": 0}}, ["nsa.w = 0"]),
        ({"nsa": {"phi": "max"}}, ["nsa.phi = 'max'", "avg", "linear", "mlp"]),
        ({"nsa": {"gate": "tanh"}}, ["nsa.gate", "sigmoid", "softmax"]),
        ({"nsa": {"l": 32.0}}, ["nsa.l = 32.0"]),
        ({"nsa": {"l": "32"}}, ["nsa.l = '32'"]),
        ({"nsa": 3}, ["nsa"]),
        ({"model": {"n_heads": 12, "n_kv_groups": 5}}, ["n_heads = 12", "n_kv_groups = 5", "is 4"]),
        ({"model": {"d_k": 63}}, ["model.d_k = 63", "62 or 64"]),
        ({"runtime": {"precision": "fp16"}}, ["runtime.precision = 'fp16'", "bf16"]),
        ({"runtime": {"backend": "cuda"}}, ["runtime.backend", "triton"]),
        ({"train": {"lr": float("nan")}}, ["train.lr", "finite"]),
        ({"train": {"lr": float("inf")}}, ["train.lr", "finite"]),
        ({"train": {"lr": True}}, ["train.lr"]),
        ({"train": {"steps": 10, "warmup_steps": 10}}, ["warmup_steps = 10", "at most 9", "optimizer steps"]),
        ({"train": {"min_lr": 1.0}}, ["train.min_lr", "above train.lr"]),
        ({"train": {"batch_size": 4, "micro_batch_size": 3}}, ["micro_batch_size = 3", "use 2"]),
        ({"train": {"optimizer": "sgd"}}, ["train.optimizer = 'sgd'", "adamw", "muon"]),
        ({"data": {"source": "local"}}, ["data.path"]),
        ({"data": {"path": "x"}}, ["data.path", "source: local"]),
        ({"data": {"val_fraction": 0.0}}, ["data.val_fraction"]),
        ({"name": "../x"}, ["name"]),
    ],
)
def test_an_invalid_value_names_the_remedy(sections: dict[str, Any], words: list[str]) -> None:
    message = get_error(sections)
    assert all(word in message for word in words), message


@looped
@pytest.mark.parametrize("path", PARAMS, ids=lambda path: path.stem)
def test_every_file_of_params_loads_and_its_model_can_be_built(path: Path) -> None:
    config = RunConfig.from_yaml(path)
    assert config.name == path.stem
    with torch.device("meta"):
        NSATransformer(config.model, device="meta", backend="torch")


@looped
@pytest.mark.parametrize("phi", ["avg", "linear", "mlp", "pool"])
@pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
def test_every_variant_can_be_set_in_yaml(phi: str, gate: str, tmp_path: Path) -> None:
    path = tmp_path / "variant.yaml"
    path.write_text(
        f"model: {{dim: 16, n_layers: 1, n_heads: 2, n_kv_groups: 1, d_k: 4, d_v: 4}}\n"
        f"nsa: {{l: 4, d: 2, l_sel: 4, n_sel: 3, w: 4, phi: {phi}, gate: {gate}}}\n",
        encoding="utf-8",
    )
    config = RunConfig.from_yaml(path)
    assert NSATransformer(config.model)(torch.zeros(1, 9, dtype=torch.int64)).isfinite().all()


def test_the_production_model_has_its_stated_size() -> None:
    (path,) = [path for path in PARAMS if path.stem == "production_50k"]
    config = RunConfig.from_yaml(path)
    settings = yaml.safe_load(PRODUCTION)
    assert config.model == RunConfig.from_dict(settings).model
    assert (config.train.steps, config.train.seq_len, config.train.sequences_per_step) == (50_000, 2048, 4)
    assert {key: getattr(config.train, key) for key in settings["train"]} == settings["train"]
    assert (config.runtime.precision, config.runtime.device) == ("bf16", "cuda")
    assert len(settings["train"]) == 10 and not config.train.stages
    # Settings that the report does not give, and that differ from a smoke run.
    assert (config.train.min_lr, config.train.seed, config.train.eval_every) == (0.0, 1337, 1000)
    assert config.data.max_tokens > config.train.tokens
    assert config.train.save_every > 0 and config.runtime.profile == "production" and config.data.source != "synthetic"


@given(d=st.integers(1, 32), a=st.integers(1, 4), b=st.integers(1, 4), n_sel=st.integers(3, 64), lr=st.floats(1e-6, 1.0))
def test_yaml_and_back_is_the_same_configuration(d: int, a: int, b: int, n_sel: int, lr: float) -> None:
    config = RunConfig(nsa={"d": d, "l": a * d, "l_sel": b * d, "n_sel": n_sel}, train=TrainConfig(lr=lr))
    again = RunConfig.from_dict(yaml.safe_load(config.to_yaml()))
    assert again == config and again.hash() == config.hash()


def test_added_keys_do_not_change_the_hash_of_older_runs() -> None:
    recorded = sorted((Path(__file__).parents[1] / "outputs").glob("production_50k*/config.yaml"))
    assert recorded
    for path in recorded:
        settings = json.loads(path.with_name("environment.json").read_text(encoding="utf-8"))["config_hash"]
        assert RunConfig.from_yaml(path).hash() == settings
    for later in (
        {"train": TrainConfig(stall_action="halt")},
        {"train": TrainConfig(optimizer="muon")},
        {"model": ModelConfig(embedding_norm=True)},
    ):
        config = RunConfig(**later)
        assert config.hash() != RunConfig().hash()
        assert RunConfig.from_dict(yaml.safe_load(config.to_yaml())) == config


def test_ngram_tables_need_ngrams() -> None:
    """Disabling the tables of a preset resets their sizes, and an unused size raises."""
    tables = {"ngram_rows": 100, "ngram_width": 5}
    without = RunConfig.from_dict({"model": {"ngrams": 0} | tables})
    assert without == RunConfig.from_dict({"model": {}}) and without.hash() == RunConfig.from_dict({"model": {}}).hash()
    with_tables = RunConfig.from_dict({"model": {"ngrams": 2} | tables})
    assert (with_tables.model.ngram_rows, with_tables.model.ngram_width) == (100, 5)
    assert RunConfig.from_dict(yaml.safe_load(with_tables.to_yaml())) == with_tables
    with pytest.raises(
        ConfigError, match=r"model\.ngram_rows = 100 is not used without model\.ngrams; set model\.ngrams: 2 "
    ):
        RunConfig.from_dict({"model": tables})
    with pytest.raises(ConfigError, match=r"model\.ngrams = 1: single tokens have an embedding anyway"):
        RunConfig.from_dict({"model": {"ngrams": 1}})


@pytest.mark.parametrize("name", ["smoke", "recall_taught"])
def test_presets_use_the_training_recipe_and_the_defaults_are_the_papers(name: str) -> None:
    (path,) = [path for path in PARAMS if path.stem == name]
    model = RunConfig.from_yaml(path).model
    assert (
        model.has_indexer
        and model.has_selection_loss
        and model.rotary_share == 0.5
        and 2 * model.matching_heads == model.heads_per_group
    )
    plain = RunConfig.from_dict({"model": {"attention": "nsa"}}).model
    assert (plain.rotary_share, plain.matching_heads, plain.selection_loss, plain.indexer_block) == (1.0, 0, 0.0, 0)
    assert not plain.has_indexer and not plain.has_selection_loss


def test_the_hash_depends_on_every_value() -> None:
    base = RunConfig()
    changed = [
        RunConfig(nsa={"w": 511}),
        RunConfig(train=TrainConfig(seed=1)),
        RunConfig(name="other"),
        RunConfig(data=DataConfig(val_fraction=0.03)),
        RunConfig(model=ModelConfig(rope_theta=1e5)),
    ]
    assert len({config.hash() for config in (base, *changed)}) == 6
    assert base.hash() == RunConfig().hash() and len(base.hash()) == 16


def test_nothing_changes_after_construction() -> None:
    config = RunConfig()
    for section, key in ((config, "name"), (config.nsa, "w"), (config.train, "lr"), (config.runtime, "device")):
        with pytest.raises(ValueError):
            setattr(section, key, getattr(section, key))


def test_overrides_are_read_as_yaml_and_checked_like_a_file(tmp_path: Path) -> None:
    assert parse_override("train.lr=1e-3") == ("train.lr", 1e-3)
    assert parse_override("nsa.phi=mlp") == ("nsa.phi", "mlp")
    path = tmp_path / "x.yaml"
    path.write_text("train: {steps: 7, lr: 1e-3}\n", encoding="utf-8")
    config = RunConfig.from_yaml(path, {"train.steps": 9, "nsa.w": 5})
    assert (config.train.steps, config.nsa.w, config.train.lr) == (9, 5, 1e-3)
    with pytest.raises(ConfigError, match=r"train\.step"):
        RunConfig.from_yaml(path, {"train.step": 9})
    with pytest.raises(ConfigError, match=r"expected section\.key=value"):
        parse_override("train.lr")
    sections = {"train": {"steps": 1}}
    apply_overrides(sections, {"train.steps": 2})
    assert sections == {"train": {"steps": 1}}


def test_a_section_cannot_be_replaced_by_nothing_and_mappings_are_merged() -> None:
    """`-p model=` would silently drop the model settings of the file."""
    sections = {"name": "x", "model": {"dim": 64}}
    with pytest.raises(ConfigError, match=r"^model: expected a key .* model\.key=value; found nothing$"):
        apply_overrides(sections, dict([parse_override("model=")]))
    assert apply_overrides(sections, {"model": {}}) == sections
    assert apply_overrides(sections, {"data": None}) == sections | {"data": None}


@pytest.mark.parametrize(("text", "words"), [("- 1\n", "mapping"), ("a: [\n", "not YAML"), ("3\n", "mapping")])
def test_a_file_that_is_not_a_configuration_raises(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        RunConfig.from_yaml(path)
    with pytest.raises(ConfigError, match="no such configuration file"):
        RunConfig.from_yaml(tmp_path / "missing.yaml")


# Invalid file contents, accidental or malicious, and a part of the one-line error.
INVALID_YAML = {
    "a section twice": (b"train: {steps: 5}\ntrain: {lr: 0.1}\n", "line 2, column 1: the key 'train' occurs twice"),
    "a key twice": (b"model:\n  dim: 4\n  dim: 8\n", "line 3, column 3: the key 'dim' occurs twice"),
    "a key twice in a stage": (b"train: {stages: [{steps: 1, steps: 2}]}", "the key 'steps' occurs twice"),
    "a number for a section": (b"1: {a: 2}", "the key '1' is not text"),
    "a number for a key": (b"train: {1: 2}", "the key '1' is not text"),
    "null for a key": (b"train: {~: 2}", "the key '~' is not text"),
    "a list for a key": (b"train: {[1, 2]: 2}", "the key 'a sequence' is not text"),
    "Latin-1": (b"name: a\n# caf\xe9\n", "line 2 has a byte 0xe9, which is not UTF-8; save"),
    "UTF-16": ("name: a".encode("utf-16"), "line 1 has a byte 0xff, which is not UTF-8"),
    "a zero byte": (b"name: a\0", "unacceptable character"),
    "brackets without end": (b"a: " + b"[" * 5000, "nested deeper than 16 levels"),
    "deep and well formed": (b"data: {path: " + b"[" * 900 + b"]" * 900 + b"}", "nested deeper than 16 levels"),
    "a tab": (b"train:\n\tsteps: 3", "line 2, column 1: not YAML: while scanning"),
    "two documents": (b"name: a\n---\nname: b\n", "line 2, column 1: not YAML: expected a single document"),
    "a tag of Python": (b"name: !!python/object/apply:os.system [ls]", "!!python/object/apply:os.system is not allowed"),
    "a tagged word": (b"train: {steps: !!int x}", "'x' is not a valid number"),
    "5,000 digits": (b"train: {steps: 1" + b"0" * 5000 + b"}", "is not a valid number"),
    "1e30 steps": (b"train: {steps: 1e30}", "train.steps = 1e+30"),
    "1 and 30 zeros": (b"train: {steps: 1" + b"0" * 30 + b"}", "less than or equal to 2147483647"),
    "more tokens than 64 bits count": (b"train: {steps: 2000000000, seq_len: 2000000000, batch_size: 9}", "3.6e+19 tokens"),
    "a model past any machine": (b"model: {dim: 1000000000000}", "model.dim = 1000000000000: input should be less"),
    "heads past any machine": (b"model: {n_heads: 1000000000, n_kv_groups: 3}", "model.n_heads = 1000000000"),
    "minutes and seconds": (b"train: {steps: 1:30}", "train.steps = '1:30'"),
    "a leading zero": (b"train: {steps: 0100}", "train.steps = '0100'"),
    "a long name": (b"name: " + b"x" * 300, "at most 100 characters"),
    "a long key": (b"train: {" + b"x" * 300 + b": 1}", "xxx... = 1: no such key"),
    "a long value": (b"runtime: {device: " + b"x" * 10_000 + b"}", "input should be 'auto', 'cpu' or 'cuda'"),
    "aliases of aliases": (
        b"a: &a [x, x, x, x, x, x, x, x, x]\n"
        + b"".join(b"%c: &%c [%s]\n" % (c, c, b", ".join([b"*%c" % (c - 1)] * 9)) for c in range(98, 112)),
        "o = [[",
    ),
}


@looped
@pytest.mark.parametrize("text", INVALID_YAML)
def test_an_invalid_file_raises_with_the_cause_in_one_line(text: str, tmp_path: Path) -> None:
    """Each line of the message is one problem of limited length, without a traceback."""
    (tmp_path / "spoilt.yaml").write_bytes(INVALID_YAML[text][0])
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_yaml(tmp_path / "spoilt.yaml")
    message = str(caught.value)
    assert INVALID_YAML[text][1] in message
    assert len(message.splitlines()) == (15 if text == "aliases of aliases" else 1)
    assert max(len(line.replace(str(tmp_path), "")) for line in message.splitlines()) < 500


@looped
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.steps=[1", "-p train.steps=[1: line 1, column 3: not YAML"),
        ("data.path=@x", "-p data.path=@x: line 1, column 1: not YAML"),
        ("train={steps: 1, steps: 2}", "-p train={steps: 1, steps: 2}: line 1, column 12: the key 'steps' occurs twice"),
        ("train={1: 2}", "the key '1' is not text"),
        ("train.steps=" + "[" * 5000, "nested deeper"),
        ("data.path=\udce9", "unacceptable character"),
    ],
)
def test_an_invalid_override_is_named_in_one_line(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_override(override)
    assert words in str(caught.value) and len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 300


def test_yaml_parses_common_number_formats_and_leaves_the_rest_as_text(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "name: 2026-01-31\ntrain: {lr: 1e-3, steps: 1_000, batch_size: 0x10, min_lr: .5e-4}\n"
        "data: {source: local, path: 0100, text_column: 1:30}\nruntime: {compile: yes}\n",
        encoding="utf-8-sig",
    )
    config = RunConfig.from_yaml(path)
    assert (config.name, config.train.lr, config.train.steps, config.train.batch_size) == ("2026-01-31", 1e-3, 1000, 16)
    assert (config.data.path, config.data.text_column, config.runtime.compile) == ("0100", "1:30", True)


@looped
@pytest.mark.parametrize(
    "text", ["1e-3", "0100", "1:30", "2026-01-31", "yes", "~", "12", "<<", "=", "a: b", "- a", " ", "☕"]
)
def test_text_that_looks_like_something_else_survives_a_run_directory(text: str, tmp_path: Path) -> None:
    config = RunConfig(data=DataConfig(source="local", path=text))
    (tmp_path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    assert RunConfig.from_yaml(tmp_path / "config.yaml") == config


def test_anchors_and_merges_work_in_stages(tmp_path: Path) -> None:
    """A merge is not a duplicate key: explicit keys replace merged ones, as in YAML."""
    path = tmp_path / "x.yaml"
    path.write_text(
        "train:\n  stages:\n  - &first {steps: 5, seq_len: 64, batch_size: 2, lr: 1e-3}\n"
        "  - &second {<<: *first, seq_len: 128}\n  - {<<: *second, lr: 1e-4}\n",
        encoding="utf-8",
    )
    stages = RunConfig.from_yaml(path).train.stages
    assert [(stage.steps, stage.seq_len, stage.lr) for stage in stages] == [(5, 64, 1e-3), (5, 128, 1e-3), (5, 128, 1e-4)]


def test_an_invalid_file_name_raises_in_one_line() -> None:
    for path in ("x" * 300 + ".yaml", "a\0b.yaml"):
        with pytest.raises(ConfigError, match="cannot be read") as caught:
            RunConfig.from_yaml(path)
        assert len(str(caught.value)) < 200


def test_no_environment_variable_changes_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    before = RunConfig().hash()
    for name in ("CONFIG", "NSA_PREFILL_BATCHED", "NSA_BATCH_SIZE", "NSA_GRADIENT_CHECKPOINTING"):
        monkeypatch.setenv(name, "1")
    assert RunConfig().hash() == before


def test_nothing_that_costs_speed_is_enabled_by_default() -> None:
    for config in (RunConfig(), RunConfig.from_yaml(Path(__file__).parents[1] / "params/production_50k.yaml")):
        runtime = config.runtime
        assert not runtime.gradient_checkpointing and not runtime.deterministic and runtime.backend == "auto"


def test_every_key_has_one_meaning() -> None:
    keys = list_keys(RunConfig)
    assert len(keys) == len(set(keys)) and {"nsa.l", "train.steps", "runtime.backend", "data.source"} <= set(keys)


def test_the_batch_does_not_depend_on_micro_batches() -> None:
    for batch, accumulate, micro in ((2, 2, None), (4, 1, 2), (1, 4, 4)):
        train = TrainConfig(batch_size=batch, accumulate_grad_batches=accumulate, micro_batch_size=micro, seq_len=2048)
        assert train.sequences_per_step == 4 and train.tokens_per_step == 8192


def test_defaults_of_the_geometry_are_the_papers() -> None:
    nsa = NSAConfig()
    assert (nsa.l, nsa.d, nsa.l_sel, nsa.n_sel, nsa.w, nsa.phi, nsa.gate) == (32, 16, 64, 16, 512, "avg", "sigmoid")


TWO_STAGES = [
    {"steps": 100, "seq_len": 1024, "batch_size": 4, "lr": 1e-3},
    {"steps": 100, "seq_len": 2048, "batch_size": 2, "lr": 1e-3},
]


def test_planted_share_needs_recall_in_every_stage() -> None:
    with pytest.raises(ConfigError, match=r"planted_share = 0\.5"):
        RunConfig.from_dict({"train": {"stages": [TWO_STAGES[0], {**TWO_STAGES[1], "planted_share": 0.5}]}})


def test_a_stage_omits_added_keys_at_their_default() -> None:
    """Otherwise the hash of every older run with stages would change."""
    later = {"decay_share", "token_budget", "rope_theta", "cuda_graph", "min_document_tokens", "planted_share"}
    stages = RunConfig.from_dict({"train": {"stages": TWO_STAGES}}).to_dict()["train"]["stages"]
    assert not any(later & set(stage) for stage in stages)


def test_an_override_that_is_a_mapping_wins() -> None:
    merged = apply_overrides({"train": {"steps": 1, "lr": 1.0}}, {"train": {"steps": 9}})
    assert merged == {"train": {"steps": 9, "lr": 1.0}}


def test_decay_steps_are_rounded_and_a_budget_can_be_one_step() -> None:
    assert StageConfig(steps=13, lr_schedule="wsd").decay_steps == 3
    assert StageConfig(token_budget=2048, seq_len=512, batch_size=4).steps == 1


def test_the_learning_rate_can_be_constant() -> None:
    train = TrainConfig(steps=20, lr=1e-3, min_lr=1e-3)
    assert {compute_learning_rate(step, train) for step in range(1, 21)} == {1e-3}


def test_the_longest_stage_need_not_be_the_last() -> None:
    stages = [{"steps": 1, "seq_len": n, "batch_size": 1, "lr": 1e-3} for n in (16, 64, 32)]
    config = RunConfig.from_dict({"train": {"stages": stages}})
    assert config.train.longest_stage.seq_len == 64 and config.train.seq_len == 32


def test_ranks_that_cannot_divide_the_sequences_of_a_step_share_each_sequence() -> None:
    stages = [{"steps": 1, "seq_len": 16, "batch_size": n, "lr": 1e-3} for n in (4, 3, 12)]
    config = RunConfig.from_dict({"train": {"stages": stages}})
    for n_ranks, sizes in ((1, [1, 1, 1]), (2, [1, 2, 1]), (3, [3, 1, 1]), (4, [1, 4, 1]), (8, [2, 8, 2])):
        config.check_ranks(n_ranks)
        assert config.list_context_sizes(n_ranks) == sizes
    with pytest.raises(ConfigError, match=r"3 sequences of 16 tokens .* 10 ranks cannot share evenly: 10 ranks"):
        config.check_ranks(10)
    config = RunConfig.from_dict({"train": {"stages": stages}, "runtime": {"context_parallel": 2}})
    assert config.list_context_sizes(4) == [2, 4, 2]
    with pytest.raises(ConfigError, match=r"context_parallel = 2: expected a divisor of the number of ranks, 3; set 1"):
        config.check_ranks(3)


@looped
@pytest.mark.parametrize("key", ["steps", "seq_len", "batch_size", "lr"])
def test_a_stage_needs_its_required_keys(key: str) -> None:
    stage = {"steps": 1, "seq_len": 16, "batch_size": 4, "lr": 1e-3}
    del stage[key]
    with pytest.raises(ConfigError, match=rf"train\.stages\.0 has no {key};"):
        RunConfig.from_dict({"train": {"stages": [stage]}})


def test_the_token_count_fits_63_bits() -> None:
    with pytest.raises(ConfigError, match="which exceeds 64 bits"):
        TrainConfig(steps=2**31 - 1, seq_len=2**31 - 1, batch_size=3)
    assert TrainConfig(steps=2**31 - 1, seq_len=2**31 - 1, batch_size=2).tokens < 2**63


def test_planted_share_needs_recall_without_stages_too() -> None:
    with pytest.raises(ConfigError, match=r"train\.planted_share = 0\.4, but data\.source = stdlib inserts no facts"):
        RunConfig.from_dict({"train": {"planted_share": 0.4}, "data": {"source": "stdlib"}})


def test_an_empty_file_is_not_a_configuration(tmp_path: Path) -> None:
    """An empty file must not silently train the default model of 12 layers."""
    path = tmp_path / "x.yaml"
    for nothing in ("", "# train:\n"):
        path.write_text(nothing)
        with pytest.raises(ConfigError, match=r"x\.yaml: expected a mapping of sections, found nothing"):
            RunConfig.from_yaml(path)


def test_an_empty_section_has_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("train:\ndata:\nmodel: {dim: 64}\n")
    assert RunConfig.from_yaml(path).train == TrainConfig()


def test_a_value_can_contain_an_equals_sign() -> None:
    assert parse_override("data.question=a=b") == ("data.question", "a=b")


def test_facts_can_be_inserted_into_local_files() -> None:
    assert RunConfig.from_dict({"data": {"source": "recall", "path": "texts"}}).data.path == "texts"


def test_surrogates_raise() -> None:
    for half in ("\ud83d", "\udcff", "\udfff"):
        with pytest.raises(ConfigError, match="surrogate"):
            RunConfig.from_dict({"data": {"source": "recall", "question": f"{half} {{name}}"}})


def test_a_dense_model_has_no_selection_loss() -> None:
    assert not RunConfig.from_dict({"model": {"attention": "dense", "selection_loss": 0.1}}).model.has_selection_loss


@looped
@pytest.mark.parametrize(
    ("text", "value"), [("0xFf", 255), ("0b11", 3), ("True", True), ("FALSE", False), ("Off", False), ("yEs", True)]
)
def test_numbers_and_booleans_ignore_case(text: str, value: object) -> None:
    merged = yaml_text.parse(text)
    assert merged == value and type(merged) is type(value)


def test_a_sweep_uses_each_gpu_once() -> None:
    with pytest.raises(ConfigError, match=r"gpus = \[0, 1, 0\]: 0 occurs twice$"):
        SweepConfig(name="x", preset="ci", variants={"a": {}}, seeds=[0], gpus=[0, 1, 0])
