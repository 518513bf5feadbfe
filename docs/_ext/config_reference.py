"""Tables of configuration keys, generated from the pydantic models of `nsa_lab.config`.

    :::{config-section} train
    :::

shows the keys of one section of SECTIONS. Every key has an anchor, an entry in the search (`train.lr`), and one in the API
reference (`nsa_lab.config.TrainConfig.lr`). `list_keys` needs neither Sphinx nor a build.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pydantic
from pydantic.fields import FieldInfo

from nsa_lab import config

if TYPE_CHECKING:
    from sphinx.application import Sphinx

# Name of a section of the page -> (model, prefix of its keys). Keys that a model inherits are in the section of its base.
SECTIONS: dict[str, tuple[type[pydantic.BaseModel], str]] = {
    "run": (config.RunConfig, ""),
    "model": (config.ModelConfig, "model."),
    "rope_scaling": (config.RopeScaling, "model.rope_scaling."),
    "nsa": (config.NSAConfig, "nsa."),
    "runtime": (config.RuntimeConfig, "runtime."),
    "train": (config.TrainConfig, "train."),
    "stage": (config.StageConfig, "train."),
    "data": (config.DataConfig, "data."),
    "recall": (config.RecallConfig, "data."),
    "sweep": (config.SweepConfig, ""),
}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
# The largest values of most keys are limits of 64-bit or 32-bit indices, which nobody reaches.
LARGEST_SHOWN_BOUND = 100_000


@dataclass(frozen=True)
class Key:
    """One row of a table."""

    name: str
    identifier: str
    attribute: str
    type: str
    default: str
    meaning: str


def list_keys(section: str) -> list[Key]:
    """Return the keys that the model of a section defines itself, in the order of its source."""
    model, prefix = SECTIONS[section]
    return [
        Key(
            name=prefix + name,
            identifier=f"sweep.{name}" if section == "sweep" else prefix + name,
            attribute=f"nsa_lab.config.{model.__name__}.{name}",
            type=_format_type(field),
            default=_format_default(field),
            meaning=field.description or _describe_section(field.annotation),
        )
        for name, field in model.model_fields.items()
        if name in model.__annotations__
    ]


def _describe_section(annotation: Any) -> str:
    is_section = isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel)
    return f"keys of `nsa_lab.config.{annotation.__name__}`" if is_section else ""


def _format_type(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {value:,}" if isinstance(value, int) else f"{sign} {value:g}"
        for rule in field.metadata
        for bound, sign in BOUNDS.items()
        if (value := getattr(rule, bound, None)) is not None and not (bound in ("le", "lt") and value > LARGEST_SHOWN_BOUND)
    ]
    return ", ".join([_format_annotation(field.annotation), *bounds])


def _format_annotation(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " | ".join(str(value) for value in arguments)
    if origin is typing.Annotated:
        return _format_annotation(arguments[0])
    if origin in (tuple, list):
        return f"list of {_format_annotation(arguments[0])}"
    if origin is dict:
        return f"mapping of {_format_annotation(arguments[0])} to {_format_annotation(arguments[1])}"
    if arguments:  # a union
        return " | ".join(_format_annotation(argument) for argument in arguments)
    return {type(None): "None", Any: "any"}.get(annotation) or annotation.__name__


def _format_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, pydantic.BaseModel):
        return "see below"
    if isinstance(default, tuple):
        return "[" + ", ".join(str(value) for value in default) + "]"
    return str(default).lower() if isinstance(default, bool) else str(default) or '""'


def setup(app: Sphinx) -> dict[str, bool]:
    from docutils import nodes
    from sphinx.util.docutils import SphinxDirective

    class ConfigSection(SphinxDirective):
        """The table of one section."""

        required_arguments = 1

        def run(self) -> list[nodes.Node]:
            group = nodes.tgroup(cols=4)
            group += [nodes.colspec(colwidth=width) for width in (20, 20, 12, 48)]
            table = nodes.table("", group, classes=["config-keys"])
            head, body = nodes.thead(), nodes.tbody()
            group += [head, body]
            head += nodes.row(
                "", *(nodes.entry("", nodes.paragraph(text=t)) for t in ("key", "type", "default", "meaning"))
            )
            for key in list_keys(self.arguments[0]):
                body += self.make_row(key)
            return [table]

        def make_row(self, key: Key) -> nodes.row:
            anchor = nodes.make_id(f"config-{key.identifier}")
            self.env.domains.standard_domain.note_object("confval", key.identifier, anchor, location=self.get_location())
            self.env.domains.python_domain.note_object(key.attribute, "attribute", anchor, location=self.get_location())
            name = nodes.literal(text=key.name)
            name_link = nodes.reference("", "", name, internal=True, refid=anchor)
            meaning, _ = self.parse_inline(key.meaning)
            row = nodes.row(
                "",
                nodes.entry("", nodes.paragraph("", "", name_link)),
                nodes.entry("", nodes.paragraph(text=key.type)),
                nodes.entry("", nodes.paragraph("", "", nodes.literal(text=key.default))),
                nodes.entry("", nodes.paragraph("", "", *meaning)),
                ids=[anchor],
            )
            self.state.document.note_explicit_target(row, row)
            return row

    app.add_directive("config-section", ConfigSection)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
