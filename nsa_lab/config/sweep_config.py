"""Configuration of a sweep: one preset in several variants, each trained with several seeds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from nsa_lab.config.base import MAX_COUNT, Section
from nsa_lab.config.errors import ConfigError
from nsa_lab.config.run_config import RunConfig, apply_overrides, parse_override, read_mapping

# Overrides that a sweep may not have, and the key that sets their value.
RESERVED_KEYS = {"train.seed": "seeds", "name": "the names of the sweep and its variants"}
# Without dots, because a dot separates the parts of a run's name: names of different runs and sweeps are then different.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"

SOURCE_KEY = "train.initial_weights"
DescribeSource = Callable[[str], Mapping[str, Any]]
"""Source of the initial weights -> settings that follow from it, by dotted key, `SOURCE_KEY` among them."""


def name_source(source: str) -> dict[str, Any]:
    """Return `SOURCE_KEY` only: the preset and the sweep have the other settings."""
    return {SOURCE_KEY: source}


def _parse_overrides(raw: Any) -> Any:
    """Return {dotted key: value} from a mapping of keys or sections, or from a list of texts as for `-p`."""
    if raw is None:
        return {}
    if isinstance(raw, str):
        raw = [raw]
    if isinstance(raw, dict):
        pairs = [pair for key, value in raw.items() for pair in _flatten_section(key, value)]
    elif isinstance(raw, list) and all(isinstance(text, str) for text in raw):
        pairs = [parse_override(text) for text in raw]
    else:
        raise ValueError(f"overrides: expected a mapping, or a list of texts like train.lr=1e-3, got {raw!r:.60}")
    keys = [key for key, _ in pairs]
    if repeated := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"{repeated[0]} occurs twice in the overrides; keep one")
    if reserved := [key for key in keys if key in RESERVED_KEYS]:
        raise ValueError(
            f"{reserved[0]} cannot be overridden in a sweep, it follows from {RESERVED_KEYS[reserved[0]]}; remove it"
        )
    return dict(pairs)


def _flatten_section(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and "." not in key:
        yield from ((f"{key}.{leaf}", inner) for leaf, inner in value.items())
    else:
        yield key, value


Overrides = Annotated[dict[str, Any], BeforeValidator(_parse_overrides)]


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep. Its name consists of sweep, variant, seed and, from the second on, repeat."""

    variant: str
    seed: int
    repeat: int
    config: RunConfig


class SweepConfig(Section):
    """A sweep file. The first variant is the baseline that the others are compared with."""

    name: str = Field(pattern=NAME_PATTERN, description="default: the file name without its extension")
    preset: str = Field(description="a file of params/ without .yaml, or the path of a YAML file")
    common: Overrides = Field(default={}, description="overrides for all runs")
    variants: dict[Annotated[str, Field(pattern=NAME_PATTERN)], Overrides] = Field(
        min_length=1, description="overrides of each variant, by its name; the first is the baseline"
    )
    seeds: tuple[int, ...] = Field(strict=False, min_length=1, description="values of train.seed for every variant")
    repeats: int = Field(default=1, ge=1, le=MAX_COUNT, description="runs per seed; repeated runs differ on a GPU")
    gpus: tuple[int, ...] = Field(
        default=(), strict=False, description="indices of the GPUs to use, one run on each; default: all"
    )

    @model_validator(mode="after")
    def _check_duplicates(self) -> SweepConfig:
        for key, values in (("seeds", self.seeds), ("gpus", self.gpus)):
            if repeated := [value for value in values if values.count(value) > 1]:
                hint = "; for several runs of one seed set repeats" if key == "seeds" else ""
                raise ValueError(f"{key} = {list(values)}: {repeated[0]} occurs twice{hint}")
        return self

    @classmethod
    def from_yaml(cls, path: str | Path) -> SweepConfig:
        """Read a sweep file. Raise `ConfigError` with the file name if it is invalid."""
        path = Path(path)
        values = read_mapping(path)
        try:
            return cls(**{"name": path.stem, **values})
        except ConfigError as error:
            raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None

    @property
    def baseline(self) -> str:
        return next(iter(self.variants))

    def build_runs(self, preset: Path, describe_source: DescribeSource = name_source) -> list[SweepRun]:
        """Return all runs, first of the baseline. Raise one `ConfigError` for all variants that are invalid.

        Settings of `describe_source` take precedence over the preset, and the overrides of the sweep over them.
        """
        describe_source = functools.cache(describe_source)
        runs: list[SweepRun] = []
        variants_by_error: dict[str, list[str]] = {}
        for variant in self.variants:
            try:
                runs += self._build_variant_runs(variant, preset, describe_source)
            except ConfigError as error:
                for line in str(error).splitlines():
                    variants_by_error.setdefault(line, []).append(variant)
        problems = [
            f"variant{'s' * (len(names) > 1)} {', '.join(names)}: {line}" for line, names in variants_by_error.items()
        ]
        variant_by_settings: dict[str, str] = {}
        for run in runs:
            settings = repr({**run.config.to_dict(), "name": None})
            if (other := variant_by_settings.setdefault(settings, run.variant)) != run.variant and run.seed == self.seeds[
                0
            ]:
                problems.append(f"variant {run.variant}: same configuration as {other}; remove one, or use repeats")
            if not run.config.train.eval_every and run.seed == self.seeds[0]:
                problems.append(f"variant {run.variant}: train.eval_every = 0, but sweeps compare evaluations; set it")
        if problems:
            raise ConfigError("\n".join(dict.fromkeys(problems)))
        return runs

    def _build_variant_runs(self, variant: str, preset: Path, describe_source: DescribeSource) -> Iterator[SweepRun]:
        overrides = {**self.common, **self.variants[variant]}
        train = apply_overrides(read_mapping(preset), overrides).get("train")
        if isinstance(train, dict) and isinstance(source := train.get("initial_weights"), str):
            overrides.pop(SOURCE_KEY, None)
            overrides = {**describe_source(source), **overrides}
        for seed in self.seeds:
            for repeat in range(1, self.repeats + 1):
                name = f"{self.name}.{variant}.s{seed}" + (f".r{repeat}" if repeat > 1 else "")
                run_overrides = {"name": name, "train.seed": seed}
                config = RunConfig.from_yaml(preset, {**overrides, **run_overrides})
                yield SweepRun(variant, seed, repeat, config)
