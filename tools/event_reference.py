"""Generate docs/concepts/events.md from the schema of events (`nsa_lab/runs/event_schema.py`).

python tools/event_reference.py            write the page
python tools/event_reference.py --check    exit with 1 if the page is not current
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from nsa_lab.runs import event_fields, event_schema  # noqa: E402
from nsa_lab.runs.event_fields import FieldType  # noqa: E402
from nsa_lab.runs.tables import Table  # noqa: E402

PAGE = ROOT / "docs" / "concepts" / "events.md"
HEADER = """\
# Events

`events.jsonl` of a run has one event per line, a JSON object. The tables below list every kind and its fields. They are
generated from `nsa_lab/runs/event_schema.py` (`python tools/event_reference.py`), which the trainer writes through and all
readers read through.

* A number that was not finite is `null`, and its name is in `nonfinite`. Integers have at most 64 bits.
* Kinds and fields may be added, never removed. Readers return fields and kinds that they do not know.
* A line that violates the schema is skipped and reported with its number. An optional field of a wrong type becomes
  `null`, and the rest of its event counts.
* "Per layer" is a list with one number per layer, from the first layer on. Statistics are in every event whose step is a
  multiple of `train.stats_every`.

[Run directory](run_directory.md) describes the other files and the attempts of a run.
"""


def render_page() -> str:
    """Return the page as Markdown."""
    common = event_fields.get_fields("")
    kinds = [(f"[`{kind}`](#{kind})", _describe(definition)) for kind, definition in event_schema.KINDS.items()]
    parts = [HEADER, Table(("kind", "meaning"), kinds).to_markdown()]
    parts += ["\n## Fields of every event\n", _render_fields(list(common.values()))]
    for kind, definition in event_schema.KINDS.items():
        own = [field for name, field in event_fields.get_fields(kind).items() if name not in common]
        parts += [f"\n## {kind}\n", f"{_describe(definition)}\n", _render_fields(own)]
    return "\n".join(parts) + "\n"


def _describe(definition: type) -> str:
    return " ".join(inspect.getdoc(definition).split())  # pyright: ignore[reportOptionalMemberAccess]


def _render_fields(fields: list[FieldType]) -> str:
    rows = [
        (
            f"`{field.name}`",
            _describe_type(field),
            "always" if field.is_required else "optional",
            field.info.unit,
            field.info.description,
        )
        for field in fields
    ]
    return Table(("field", "type", "present", "unit", "meaning"), rows).to_markdown()


def _describe_type(field: FieldType) -> str:
    if field.form == "numbers":
        return "list of numbers" if field.name == "window_losses" else "per layer"
    label = field.label.removesuffix(" or null").removeprefix("an ").removeprefix("a ")
    return f"{label} or null" if field.is_nullable and field.form != "number" else label


def main() -> int:
    page = render_page()
    if "--check" in sys.argv[1:]:
        is_current = PAGE.is_file() and PAGE.read_text("utf-8") == page
        print(
            f"{PAGE.relative_to(ROOT)} is {'current' if is_current else 'not current; run python tools/event_reference.py'}"
        )
        return 0 if is_current else 1
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(page, "utf-8")
    print(PAGE.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
