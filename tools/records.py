"""Recorded runs: list them, unpack them from the archive, verify them, add to the archive.

    python tools/records.py list                     every recorded run, its digest and its place
    python tools/records.py unpack [RUN ...] [--to DIR]   unpack runs (default: all) into DIR (default: outputs)
    python tools/records.py verify                   compare every record with the digests in the manifest
    python tools/records.py add DIR ...              add run directories to the archive and the manifest

A record is a run directory without weights, logs and reports: config.yaml, environment.json, events.jsonl,
status.json and, if the run has them, evaluation.json, conversion.json, ruler.json and verdict.json. A few recorded runs
are in outputs/; the others are in docs/science/records/runs.tar.xz. docs/science/records/runs.json lists all of them.
The digest of a run is the SHA-256 of its files' names and SHA-256 digests, in the order of the names.
`nsa-lab report RUN --record` rebuilds a report from a record.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTPUTS = ROOT / "outputs"
ARCHIVE = ROOT / "docs" / "science" / "records" / "runs.tar.xz"
MANIFEST = ARCHIVE.with_name("runs.json")
RECORD_FILES = (
    "config.yaml",
    "conversion.json",
    "environment.json",
    "evaluation.json",
    "events.jsonl",
    "ruler.json",
    "status.json",
    "verdict.json",
)
# `nsa-lab status` counts runs with this file instead of listing them, and `latest` is never one of them.
MARKER = "RECORDED"


def read_record(run_dir: Path) -> dict[str, bytes]:
    """The files of a record, by name."""
    return {name: (run_dir / name).read_bytes() for name in RECORD_FILES if (run_dir / name).is_file()}


def compute_digest(record: dict[str, bytes]) -> str:
    lines = (f"{name} {hashlib.sha256(data).hexdigest()}\n" for name, data in sorted(record.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def read_archive() -> dict[str, dict[str, bytes]]:
    """The archived records, by run and file name."""
    records: dict[str, dict[str, bytes]] = {}
    if not ARCHIVE.exists():
        return records
    try:
        with tarfile.open(ARCHIVE) as archive:
            for member in archive:
                run, _, name = member.name.partition("/")
                file = archive.extractfile(member)
                if name not in RECORD_FILES or file is None:
                    raise SystemExit(f"{ARCHIVE}: unexpected member {member.name!r}; restore the file from git")
                records.setdefault(run, {})[name] = file.read()
    except (EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise SystemExit(f"{ARCHIVE}: damaged ({error}); restore the file from git") from None
    return records


def write_archive(records: dict[str, dict[str, bytes]]) -> None:
    """Write the archive; equal records give equal bytes."""
    with tarfile.open(ARCHIVE, "w:xz", preset=9) as archive:
        for run, record in sorted(records.items()):
            for name, data in sorted(record.items()):
                member = tarfile.TarInfo(f"{run}/{name}")
                member.size, member.mode = len(data), 0o644
                archive.addfile(member, io.BytesIO(data))


def read_manifest() -> dict[str, dict[str, str]]:
    try:
        manifest = json.loads(MANIFEST.read_text("utf-8")) if MANIFEST.exists() else {}
        if all(isinstance(entry[key], str) for entry in manifest.values() for key in ("digest", "place")):
            return manifest
    except (AttributeError, KeyError, TypeError, ValueError):
        pass
    raise SystemExit(f"{MANIFEST}: expected a digest and a place for every run; restore the file from git")


def list_runs() -> int:
    for run, entry in sorted(read_manifest().items()):
        print(f"{run}  {entry['digest'][:16]}  {entry['place']}")
    return 0


def unpack(runs: list[str], target: Path) -> int:
    if target.is_file():
        raise SystemExit(f"{target}: expected a folder, got a file")
    records = read_archive()
    manifest = read_manifest()
    unknown = [run for run in runs if run not in records]
    for run in unknown:
        place = manifest.get(run, {}).get("place")
        print(
            f"{run}: {f'is in {place}' if place else 'is not a recorded run; see python tools/records.py list'}",
            file=sys.stderr,
        )
    for run in runs or sorted(records):
        if run in unknown:
            continue
        folder = target / run
        if folder.exists():
            print(f"{folder}: exists, left as it is")
            continue
        folder.mkdir(parents=True)
        for name, data in records[run].items():
            (folder / name).write_bytes(data)
        (folder / MARKER).write_text(manifest[run]["digest"] + "\n", "utf-8")
        print(folder)
    return 1 if unknown else 0


def verify() -> int:
    records, wrong = read_archive(), 0
    manifest = read_manifest()
    for run, entry in sorted(manifest.items()):
        record = records.get(run) or read_record(ROOT / entry["place"] / run)
        if not record or compute_digest(record) != entry["digest"]:
            print(f"{run}: {'missing' if not record else 'digest differs from the manifest'}")
            wrong += 1
    extra = sorted(set(records) - set(manifest))
    for run in extra:
        print(f"{run}: in the archive, not in the manifest")
    print(f"{len(manifest)} recorded runs, {wrong + len(extra)} wrong")
    return 1 if wrong or extra else 0


def add(folders: list[Path]) -> int:
    records, manifest = read_archive(), read_manifest()
    for folder in folders:
        record = read_record(folder)
        if missing := {"config.yaml", "events.jsonl", "status.json"} - set(record):
            raise SystemExit(f"{folder}: not a run directory, {', '.join(sorted(missing))} missing")
        place = (
            str(folder.resolve().parent.relative_to(ROOT))
            if folder.resolve().parent == OUTPUTS and (folder / MARKER).exists()
            else None
        )
        if place is None:
            records[folder.name] = record
        manifest[folder.name] = {"digest": compute_digest(record), "place": place or str(ARCHIVE.relative_to(ROOT))}
    write_archive(records)
    MANIFEST.write_text(json.dumps(dict(sorted(manifest.items())), indent=1) + "\n", "utf-8")
    return verify()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list")
    commands.add_parser("verify")
    unpacking = commands.add_parser("unpack")
    unpacking.add_argument("runs", nargs="*")
    unpacking.add_argument("--to", type=Path, default=OUTPUTS)
    adding = commands.add_parser("add")
    adding.add_argument("folders", nargs="+", type=Path)
    args = parser.parse_args()
    match args.command:
        case "list":
            return list_runs()
        case "unpack":
            return unpack(args.runs, args.to)
        case "verify":
            return verify()
        case _:
            return add(args.folders)


if __name__ == "__main__":
    sys.exit(main())
