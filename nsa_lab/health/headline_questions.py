"""The four headline questions of a report, answered from the results of the checks."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_lab.health.verdict import Verdict

# The checks that answer each question. For the first one, any failed check also answers it.
QUESTIONS = {
    "Did it work?": ("finished", "loss fell"),
    "How fast?": ("throughput",),
    "Is the gate alive?": ("gates moved", "gates alive"),
    "Is selection doing anything?": ("selection finds", "selection chooses", "selection reaches"),
}
BRANCH_QUESTIONS = ("Is the gate alive?", "Is selection doing anything?")


def answer_questions(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return one result per question, named by it.

    It is False, with the text of the failed checks, if one of its checks failed; otherwise None if one is unknown.
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
        return Verdict(question, None, None, None, "not applicable to a dense model")
    is_unknown = any(verdict.ok is None for verdict in own)
    texts = dict.fromkeys(verdict.text for verdict in own)
    return Verdict(question, None if is_unknown else True, None, None, "; ".join(texts))


def _list_failed(question: str, own: Sequence[Verdict], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Return at most two failed checks that answer the question."""
    return [verdict for verdict in (verdicts if question == next(iter(QUESTIONS)) else own) if verdict.ok is False][:2]
