"""The four questions that a reader of a report has, answered from the verdicts."""

from __future__ import annotations

from collections.abc import Sequence

from nsa_lab.health.verdict import Verdict

# The verdicts that answer each; "did it work" asks all of them.
QUESTIONS = {
    "Did it work?": ("finished", "loss fell"),
    "How fast?": ("throughput",),
    "Is the gate alive?": ("gates moved", "gates alive"),
    "Is selection doing anything?": ("selection finds", "selection chooses", "selection reaches"),
}
BRANCH_QUESTIONS = ("Is the gate alive?", "Is selection doing anything?")


def answer_questions(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """One verdict per question, named by it: False if one of its verdicts is, and that one speaks; else None if one is."""
    return [
        _answer_question(question, [verdict for verdict in verdicts if verdict.name in names], verdicts)
        for question, names in QUESTIONS.items()
    ]


def list_other_verdicts(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts that none of the answers tells."""
    told = []
    for question, names in QUESTIONS.items():
        asked = [verdict for verdict in verdicts if verdict.name in names]
        told += _list_failed(question, asked, verdicts) or asked
    return [verdict for verdict in verdicts if verdict not in told]


def _answer_question(question: str, asked: Sequence[Verdict], every: Sequence[Verdict]) -> Verdict:
    if failed := _list_failed(question, asked, every):
        return Verdict(question, False, None, None, "; ".join(f"{verdict.name}: {verdict.text}" for verdict in failed))
    if not asked:
        return Verdict(question, None, None, None, "a dense model has none")
    unknown = any(verdict.ok is None for verdict in asked)
    told = dict.fromkeys(verdict.text for verdict in asked)
    return Verdict(question, None if unknown else True, None, None, "; ".join(told))


def _list_failed(question: str, asked: Sequence[Verdict], every: Sequence[Verdict]) -> list[Verdict]:
    """Those that speak where the answer is no: two at most."""
    return [verdict for verdict in (every if question == next(iter(QUESTIONS)) else asked) if verdict.ok is False][:2]
