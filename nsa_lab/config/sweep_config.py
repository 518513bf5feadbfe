"""A sweep: one preset, changed in a few ways, each run at several seeds; the file in which it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from nsa_lab.config.base import MAX_COUNT, Section
from nsa_lab.config.errors import ConfigError
from nsa_lab.config.run_config import RunConfig, parse_override, read_mapping

# What the sweep itself says of every run.
RESERVED_KEYS = {"train.seed": "seeds", "name": "the names of the sweep and its variants"}
# Without the dot that joins them, so that no two of a sweep's runs, and no runs of two sweeps, have one name.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"


def _parse_overrides(given: Any) -> Any:
    """Dotted keys and values, from a mapping of them or of sections, or from a list of texts as `-p` takes them."""
    if given is None:
        return {}
    if isinstance(given, str):
        given = [given]
    if isinstance(given, dict):
        pairs = [pair for key, value in given.items() for pair in _flatten_section(key, value)]
    elif isinstance(given, list) and all(isinstance(text, str) for text in given):
        pairs = [parse_override(text) for text in given]
    else:
        raise ValueError(f"overrides are a mapping, or a list of texts like train.lr=1e-3, and this is {given!r:.60}")
    keys = [key for key, _ in pairs]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ValueError(f"{twice[0]} stands twice among the overrides; keep one")
    if taken := [key for key in keys if key in RESERVED_KEYS]:
        raise ValueError(f"{taken[0]} is no override of a sweep, which takes it from {RESERVED_KEYS[taken[0]]}; remove it")
    return dict(pairs)


def _flatten_section(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and "." not in key:
        yield from ((f"{key}.{leaf}", inner) for leaf, inner in value.items())
    else:
        yield key, value


Overrides = Annotated[dict[str, Any], BeforeValidator(_parse_overrides)]


@dataclass(frozen=True)
class SweepRun:
    """One run that a sweep asks for; its name is of sweep, variant, seed and, from the second on, repeat."""

    variant: str
    seed: int
    repeat: int
    config: RunConfig


class SweepConfig(Section):
    """What the file of a sweep says. The first variant is the baseline that the others are compared with."""

    name: str = Field(pattern=NAME_PATTERN, description="by default the stem of the file")
    preset: str = Field(description="a file of params/, without .yaml, or the path of a YAML file")
    common: Overrides = Field(default={}, description="overrides of every run")
    variants: dict[Annotated[str, Field(pattern=NAME_PATTERN)], Overrides] = Field(min_length=1)
    seeds: tuple[int, ...] = Field(strict=False, min_length=1)
    repeats: int = Field(default=1, ge=1, le=MAX_COUNT, description="runs of each seed: they differ on a GPU")
    gpus: tuple[int, ...] = Field(
        default=(), strict=False, description="numbers of the GPUs to use, one run on each; by default all there are"
    )

    @model_validator(mode="after")
    def _check_duplicates(self) -> SweepConfig:
        for key, values in (("seeds", self.seeds), ("gpus", self.gpus)):
            if twice := [value for value in values if values.count(value) > 1]:
                instead = "; for several runs of one seed say repeats" if key == "seeds" else ""
                raise ValueError(f"{key} = {list(values)}: {twice[0]} stands twice{instead}")
        return self

    @classmethod
    def from_yaml(cls, path: str | Path) -> SweepConfig:
        """Raises `ConfigError`, which names the file."""
        path = Path(path)
        said = read_mapping(path)
        try:
            return cls(**{"name": path.stem, **said})
        except ConfigError as error:
            raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from None

    @property
    def baseline(self) -> str:
        return next(iter(self.variants))

    def build_runs(self, preset: Path) -> list[SweepRun]:
        """Every run, the baseline's first. Raises `ConfigError` for all variants at once that cannot be run so."""
        found: list[SweepRun] = []
        wrong: list[str] = []
        for variant in self.variants:
            try:
                found += self._build_variant_runs(variant, preset)
            except ConfigError as error:
                wrong += [f"variant {variant}: {line}" for line in str(error).splitlines()]
        alike: dict[str, str] = {}
        for run in found:
            settings = repr({**run.config.to_dict(), "name": None})
            if (other := alike.setdefault(settings, run.variant)) != run.variant and run.seed == self.seeds[0]:
                wrong.append(f"variant {run.variant}: its configuration is that of {other}; remove one, or say repeats")
            if not run.config.train.eval_every and run.seed == self.seeds[0]:
                wrong.append(f"variant {run.variant}: train.eval_every = 0, and evaluations are what is compared; set it")
        if wrong:
            raise ConfigError("\n".join(dict.fromkeys(wrong)))
        return found

    def _build_variant_runs(self, variant: str, preset: Path) -> Iterator[SweepRun]:
        for seed in self.seeds:
            for repeat in range(1, self.repeats + 1):
                name = f"{self.name}.{variant}.s{seed}" + (f".r{repeat}" if repeat > 1 else "")
                its_own = {"name": name, "train.seed": seed}
                config = RunConfig.from_yaml(preset, {**self.common, **self.variants[variant], **its_own})
                yield SweepRun(variant, seed, repeat, config)
