"""Check that `evaluation.json`, `ruler.json` and `conversion.json` are readable and belong to the run."""

from __future__ import annotations

from nsa_lab.health.conversion_relations import find_conversion_problem
from nsa_lab.health.evaluation_relations import find_evaluation_problem
from nsa_lab.runs import segment_digests
from nsa_lab.runs.checkpoint_files import get_checkpoint_dir, list_steps
from nsa_lab.runs.evaluation import (
    CONVERSION,
    DIGEST,
    EVALUATION,
    RULER,
    find_file_problem,
    read_conversion,
    read_evaluation,
    read_ruler,
)
from nsa_lab.runs.history import History


def find_foreign_evaluation(history: History) -> str | None:
    """Return a text on an evaluation that is damaged, contradictory, or of another run or step; None if there is none."""
    for name, read in ((EVALUATION, read_evaluation), (RULER, read_ruler), (CONVERSION, read_conversion)):
        if problem := find_file_problem(history.run_dir, name):
            return f"{name}: {problem}; restore the file, or run nsa-lab evaluate again"
        record = read(history.run_dir)
        if record is None:
            continue
        # Versions that record digests of events have written conversion.json without one.
        if name != CONVERSION and DIGEST not in record and len(history.events_of_kind(segment_digests.KIND)):
            return f"{name} has no digest, which every version writes that records digests; run nsa-lab evaluate again"
        recorded, hashes = record.get("config_hash"), _list_config_hashes(history)
        if recorded is not None and hashes and recorded not in hashes:
            return f"{name} belongs to configuration {recorded}, the run to {history.config.hash()}"
        if record["step"] not in _list_saved_steps(history):
            return f"{name} is of step {record['step']:,}, which the run did not save; run nsa-lab evaluate again"
        find_problem = find_conversion_problem if name == CONVERSION else find_evaluation_problem
        if problem := find_problem(history, record):
            return f"{name}: {problem}; run nsa-lab evaluate again"
    return None


def _list_config_hashes(history: History) -> set[str]:
    """Return the hashes of the configuration of every attempt. Settings may change when a run is resumed."""
    recorded = {event.get("config_hash") for event in history.first_events}
    return {history.config.hash(), *(value for value in recorded if isinstance(value, str))}


def _list_saved_steps(history: History) -> set[int]:
    """Return the steps of all checkpoints that are recorded or on disk, and the last step."""
    folder = get_checkpoint_dir(history.run_dir)
    saved = {event["step"] for event in history.events_of_kind("checkpoint")}
    resumed = {event.get("from_step") or 0 for event in history.events_of_kind("resume")}
    return {history.config.train.steps, *saved, *resumed, *(list_steps(folder) if folder.is_dir() else ())}
