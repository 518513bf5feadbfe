"""The four headline questions of a report, answered from the results of the checks."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_lab.health.verdict import WARNING, Verdict

# The checks that answer each question. For the first one, any failed check also answers it.
QUESTIONS = {
    "Did it work?": ("finished", "loss fell", "converted loss"),
    "How fast?": ("throughput",),
    "Is the gate alive?": ("gates moved", "gates alive"),
    "Is selection doing anything?": ("attention mass", "selection finds", "selection chooses", "selection reaches"),
}
DECIDING_CHECKS = ("selection finds", "attention mass")
BRANCH_QUESTIONS = ("Is the gate alive?", "Is selection doing anything?")


def answer_questions(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return one result per question, named by it.

    It is False, with the text of the failed checks, if one of its checks failed; otherwise None if one is unknown, and a
    warning if one is.
    """
    return [
        _answer_question(question, [verdict for verdict in verdicts if verdict.name in names], verdicts)
        for question, names in QUESTIONS.items()
    ]


def list_other_verdicts(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return the results that are not part of any answer."""
    used = []
    for question, names in QUESTIONS.items():
        own = [verdict for verdict in verdicts if verdict.name in names]
        used += _list_failed(question, own, verdicts) or own
    return [verdict for verdict in verdicts if verdict not in used]


def _answer_question(question: str, own: Sequence[Verdict], verdicts: Sequence[Verdict]) -> Verdict:
    """Answer a question from its `own` results; `verdicts` are the results of all checks."""
    if failed := _list_failed(question, own, verdicts):
        return Verdict(question, False, None, None, "; ".join(f"{verdict.name}: {verdict.text}" for verdict in failed))
    if not own:
        return Verdict(question, None, None, None, "not applicable to this model")
    # Answers or attention mass that need the selection decide, whatever the statistics of single layers are.
    decided = [verdict for verdict in own if verdict.name in DECIDING_CHECKS and verdict.ok]
    is_unknown = not decided and any(verdict.ok is None for verdict in own)
    level = WARNING if any(verdict.level == WARNING for verdict in own) else ""
    texts = dict.fromkeys(verdict.text for verdict in own)
    return Verdict(question, None if is_unknown else True, None, None, "; ".join(texts), level)


def _list_failed(question: str, own: Sequence[Verdict], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return at most two failed checks that answer the question.

    If answers or attention mass need the selection, a failed statistic of it does not answer whether it does anything.
    """
    if any(verdict.name in DECIDING_CHECKS and verdict.ok for verdict in own):
        return []
    return [verdict for verdict in (verdicts if question == next(iter(QUESTIONS)) else own) if verdict.ok is False][:2]
