"""Facts in text: every answer occurs earlier exactly once, lengths are exact, and all is a function of seed and step."""

from __future__ import annotations

import functools
import hashlib
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from looping import looped

from nsa_lab.config import ConfigError, DataConfig, RecallConfig, TrainConfig
from nsa_lab.data import Batches, StagedBatches, TokenStore, check
from nsa_lab.data.recall import (
    compute_max_fact_bytes,
    insert_in_share,
    make_inserter,
    make_multi_key_task,
    make_multi_query_task,
    make_needle_task,
    make_updated_task,
    sample_facts,
)
from nsa_lab.data.recall.facts import ADJECTIVES, ALPHABETS, HELD_OUT_WORDINGS, NOUNS, QUESTIONS, STATEMENTS
from nsa_lab.data.recall.grammar import GRAMMARS, HELD_OUT_WORDS

TEXT = np.random.default_rng(0).integers(0x80, 0xFF, 40_000)  # no byte of it occurs in a fact
STATEMENT = re.compile(rb"\nThe secret number of the (.+?) is (.+?)\.\n")
QUESTION = re.compile(rb"\nQ: What is the secret number of the (.+?)\? A: (.+?)\n")

recalls = st.builds(
    RecallConfig,
    bytes_per_fact=st.sampled_from([320, 512, 700]),
    distractors=st.sampled_from([0.0, 0.5]),
    questions_together=st.integers(1, 4),
    names=st.sampled_from(["words", "codes"]),
    values=st.sampled_from(["digits", "letters", "hex"]),
    value_length=st.integers(3, 9),
    distance=st.sampled_from(["uniform", "log"]),
    answer_weight=st.sampled_from([0.5, 1.0, 5.0]),
)


def as_bytes(tokens: np.ndarray) -> bytes:
    return tokens.astype(np.uint8).tobytes()


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(recall=recalls, length=st.integers(700, 4001), seed=st.integers(0, 2**64 - 1), sequence=st.integers(0, 10**6))
def test_every_answer_occurs_earlier_exactly_once(recall: RecallConfig, length: int, seed: int, sequence: int) -> None:
    window = TEXT[: length + 1]
    tokens, weights = make_inserter(recall, length, seed)(window, sequence)
    assert tokens.shape == weights.shape == (length + 1,) and tokens.dtype == np.int64 and weights.dtype == np.float32
    said = as_bytes(tokens)
    statements, asked = list(STATEMENT.finditer(said)), list(QUESTION.finditer(said))
    facts = max(1, length // recall.bytes_per_fact)
    assert len(statements) == len({m[1] for m in statements}) == facts
    assert len(asked) == len({m[1] for m in asked}) == max(1, round(facts * (1 - recall.distractors)))
    by_name = {m[1]: m for m in statements}
    expected = np.ones(length + 1, np.float32)
    for question in asked:
        statement = by_name[question[1]]
        assert statement[2] == question[2] and statement.end() <= question.start()
        assert said.count(b"\nThe secret number of the " + question[1] + b" is ") == 1
        expected[question.start(2) : question.end(2)] = recall.answer_weight
    assert np.array_equal(weights, expected), "weights on the answers alone"
    around = QUESTION.sub(b"", STATEMENT.sub(b"", said))
    assert around == as_bytes(window)[: len(around)] and len(around) > 0, "the text around is unchanged and in order"


def test_a_sequence_is_deterministic_and_differs_from_others() -> None:
    window, made = TEXT[:2049], {}
    for seed in (0, 1):
        for sequence in (0, 1):
            tokens, _ = make_inserter(RecallConfig(), 2048, seed)(window, sequence)
            again, _ = make_inserter(RecallConfig(), 2048, seed)(window, sequence)
            assert np.array_equal(tokens, again)
            made[seed, sequence] = as_bytes(tokens)
    assert len(set(made.values())) == 4


def test_sequences_far_apart_have_different_facts() -> None:
    """A long run has more than 4,096 sequences. None has the facts of another, also not a power of two away."""
    window, insert = TEXT[:1025], make_inserter(RecallConfig(), 1024, 7)
    numbers = sorted({0, 1, *(2**n + more for n in range(1, 40) for more in (-1, 0, 1))} | {*range(5000, 9200, 70)})
    statements = [tuple(STATEMENT.findall(as_bytes(insert(window, number)[0]))) for number in numbers]
    assert len(set(statements)) == len(numbers) and all(statements)


def test_facts_of_batches_after_many_sequences() -> None:
    store, data = TokenStore([TEXT.astype(np.uint8)]), DataConfig(source="recall")
    batches = StagedBatches(store, TrainConfig(seq_len=1000, batch_size=3, steps=20_000, lr=1e-3), data)
    seen: dict[tuple, int] = {}
    for step in (1, 2, 1366, 1367, 2731, 2732, 4097, 4098, 5462, 5463, 16_385, 19_999):
        inputs, _, _, _ = batches.weighted_batch(step)
        for row in inputs.numpy():
            facts = tuple(STATEMENT.findall(as_bytes(row)))
            assert facts and facts not in seen, (step, seen.get(facts))
            seen[facts] = step
    assert len(seen) == 36


@pytest.mark.parametrize("share", [0.5, 0.3, 0.07, 1 / 3])
def test_a_share_of_the_sequences_has_facts_however_many_there_are(share: float) -> None:
    window = TEXT[:1025]
    insert = insert_in_share(lambda window, sequence: (window + 1, np.ones(len(window), np.float32)), share)
    is_planted = np.array([insert(window, number)[0] is not window for number in range(20_000)])
    for start in (0, 4000, 4096, 8192, 15_000):
        assert is_planted[start : start + 1000].sum() == pytest.approx(1000 * share, abs=1.01)
    gaps = np.diff(np.flatnonzero(is_planted))
    assert set(gaps.tolist()) <= {int(1 / share), int(1 / share) + 1}


def test_batch_weights_belong_to_their_targets() -> None:
    store = TokenStore([TEXT.astype(np.uint8)])
    data, train = DataConfig(source="recall"), TrainConfig(seq_len=1000, batch_size=3)
    batches = StagedBatches(store, train, data)
    inputs, targets, weights, _ = batches.weighted_batch(2)
    assert weights is not None and weights.dtype == torch.float32 and weights.shape == targets.shape == (3, 1000)
    for row, target in zip(weights, targets, strict=True):
        answers = bytes(target[row == 5].tolist())
        assert len(answers) == 7 and answers.isdigit()
    assert torch.equal(inputs[:, 1:], targets[:, :-1]) and torch.equal(batches.batch(2)[1], targets)
    _, part, part_weights, _ = batches.weighted_batch(2, 1, 2)
    assert torch.equal(part, targets[1:]) and torch.equal(part_weights, weights[1:])
    plain = Batches(store, 1000, 3, train.seed)
    assert batches.get_text_positions(2) == plain.get_text_positions(2) and batches.compute_hash(2) != plain.compute_hash(2)
    assert batches.compute_hash(2) == StagedBatches(store, train, data).compute_hash(2)


def test_stages_insert_different_facts() -> None:
    store = TokenStore([TEXT.astype(np.uint8)])
    stage = {"steps": 2, "seq_len": 1000, "batch_size": 2, "lr": 1e-3}
    batches = StagedBatches(store, TrainConfig.model_validate({"stages": [stage, stage]}), DataConfig(source="recall"))
    names = [STATEMENT.findall(bytes(batches.batch(step)[0].flatten().tolist())) for step in range(4)]
    assert len({str(found) for found in names}) == 4


def test_question_distances_follow_the_distribution() -> None:
    def distances(law: str) -> np.ndarray:
        plant = make_inserter(RecallConfig(distance=law, bytes_per_fact=10**6), 4000, 3)
        found = []
        for sequence in range(400):
            said = as_bytes(plant(TEXT[:4001], sequence)[0])
            found.append(QUESTION.search(said).start() - STATEMENT.search(said).end())
        return np.array(found)

    near = {law: float((distances(law) < 100).mean()) for law in ("uniform", "log")}
    assert near["uniform"] < 0.12 and 0.4 < near["log"] < 0.75, near


@looped
@pytest.mark.parametrize("make", [make_needle_task, make_multi_key_task, make_multi_query_task])
@pytest.mark.parametrize("depth", [0.0, 0.37, 1.0])
def test_a_task_states_its_fact_at_the_requested_depth(make, depth: float) -> None:
    recall, length = RecallConfig(values="hex", value_length=5), 3001
    asked = make(length, depth, recall, np.random.default_rng(5), TEXT)
    assert asked.tokens.shape == (length,) and asked.tokens.dtype == np.int64
    said = as_bytes(asked.tokens)
    assert asked.answers.shape == (4 if make is make_multi_query_task else 1, 5) and asked.answers[-1, -1] == length - 1
    statements = {m[1]: m for m in STATEMENT.finditer(said)}
    assert len(statements) == {make_needle_task: 1, make_multi_key_task: 1 + length // 512, make_multi_query_task: 4}[make]
    for index, (question, places) in enumerate(zip(QUESTION.finditer(said + b"\n"), asked.answers, strict=True)):
        statement = statements[question[1]]
        assert question[2] == as_bytes(asked.tokens[places]) == statement[2] and question.start(2) == places[0]
        if index == 0:
            others = sum(len(m[0]) for m in statements.values() if m.start() < statement.start())
            body = length - len(said) + said.index(b"\nQ: ") - sum(len(m[0]) for m in statements.values())
            assert statement.start() - others == int(depth * body)


def test_names_are_distinct_and_too_many_raise() -> None:
    assert len(set(ADJECTIVES)) == len(set(NOUNS)) == 24
    rng = np.random.default_rng(0)
    assert len({fact.question for fact in sample_facts(576, RecallConfig(), rng)}) == 576


def test_a_code_is_two_letters_and_three_digits() -> None:
    facts = sample_facts(300, RecallConfig(names="codes", question="{name}"), np.random.default_rng(0))
    codes = [fact.question.decode() for fact in facts]
    assert all(re.fullmatch("[a-z]{2}-[0-9]{3}", code) for code in codes) and any("-0" in code for code in codes)


def test_values_are_distinct_if_there_are_enough() -> None:
    for count, different in ((10, 10), (60, 10)):
        facts = sample_facts(count, RecallConfig(value_length=1), np.random.default_rng(0))
        assert len(facts) == count and len({fact.value for fact in facts}) == different


@looped
@pytest.mark.parametrize("field", ["{value:.3}", "{value:>9}", "{value!r}", "{value:{name}}", "{value}\ud800"])
def test_a_statement_contains_the_value_unchanged(field: str) -> None:
    with pytest.raises(ConfigError, match=r"data.statement = .* (unformatted value|half a character)"):
        RecallConfig(statement=f"\nThe {{name}}: {field}\n")


def test_facts_that_do_not_fit_raise(refuses) -> None:
    rng = np.random.default_rng(0)
    refuses(lambda: sample_facts(577, RecallConfig(), rng), "577 facts", "576 names", "data.names: codes")
    refuses(lambda: make_inserter(RecallConfig(bytes_per_fact=150), 2048, 0), "more than half", "data.bytes_per_fact")
    refuses(lambda: make_inserter(RecallConfig(), 100, 0), "train.seq_len")
    refuses(lambda: make_needle_task(60, 0.5, RecallConfig(), rng, TEXT), "do not fit")
    refuses(lambda: make_needle_task(3000, 0.5, RecallConfig(), rng, TEXT[:2999]), "2999 bytes", "give more text")
    refuses(lambda: check(DataConfig(source="recall", tokenizer="x.json")), "x.json")


@looped
@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"answer_weight": 3.0}, ["data.answer_weight", "not used by data.source = stdlib", "data.source: recall"]),
        ({"source": "recall", "statement": "{name} {x}"}, ["contains name, x", "{name} and {value}"]),
        ({"source": "recall", "question": "none"}, ["contains no field", "expected {name}"]),
        (
            {"source": "recall", "wordings": "grammar", "statement": "{name} {value}"},
            ["not used by data.wordings = grammar"],
        ),
        ({"source": "recall", "question": "{"}, ["data.question", "brace"]),
    ],
)
def test_impossible_settings_say_what_to_do(data: dict, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        DataConfig(**data)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.slow
def test_recall_reads_its_path_or_stdlib(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    assert check(DataConfig(source="recall", path=str(tmp_path)))["source"] == "local"
    assert check(DataConfig(source="recall"))["source"] == "stdlib"


GRAMMAR = RecallConfig(
    wordings="grammar", values="mixed", updates=0.5, first_values=0.5, distractors=0.3, bytes_per_fact=600
)
VARIED = RecallConfig(wordings="several", values="mixed", updates=0.5, distractors=0.3, bytes_per_fact=600)


@functools.cache
def match_template(template: str, **fields: str) -> re.Pattern[bytes]:
    pattern = re.escape(template)
    for name, expression in fields.items():
        pattern = pattern.replace(re.escape(f"{{{name}}}"), f"(?P<{name}>{expression})")
    return re.compile(pattern.encode())


def find_facts(templates: list[str], content: bytes, **fields: str) -> list[tuple[int, str, dict[str, str]]]:
    """Return (position, template, fields) of each occurrence, in order."""
    found = [
        (match.start(), template, {name: text.decode() for name, text in match.groupdict().items()})
        for template in templates
        for match in match_template(template, **fields).finditer(content)
    ]
    return sorted(found, key=lambda item: item[0])


def test_text_of_older_configurations_is_unchanged() -> None:
    digest = hashlib.sha256()
    codes = RecallConfig(distractors=0.5, questions_together=2, names="codes", values="hex", distance="log")
    for recall in (RecallConfig(), codes):
        for sequence in range(3):
            for part in make_inserter(recall, 4000, 7)(TEXT[:4001], sequence):
                digest.update(part.tobytes())
        for make in (make_needle_task, make_multi_key_task, make_multi_query_task):
            digest.update(make(3000, 0.3, recall, np.random.default_rng(5), TEXT).tokens.tobytes())
    assert digest.hexdigest()[:16] == "b1512d355b5c94cc"


def test_several_wordings_alphabets_and_updates() -> None:
    """The answer is the last value that was stated before the question, in any wording."""
    recall, updated, n_facts = VARIED, 0, 0
    seen: dict[str, set[str]] = {"statement": set(), "question": set()}
    alphabets = {name: re.compile(f"[{letters}]{{7}}") for name, letters in ALPHABETS.items() if name != "capitals"}
    used: set[str] = set()
    for sequence in range(40):
        tokens, weights = make_inserter(recall, 4000, 3)(TEXT[:4001], sequence)
        content = as_bytes(tokens)
        assert len(tokens) == len(weights) == 4001
        facts = find_facts([recall.statement, *STATEMENTS], content, name="[a-z]+ [a-z]+", value="[0-9a-z]{7}")
        questions = find_facts(
            [f"{text}{{value}}\n" for text in (recall.question, *QUESTIONS)],
            content,
            name="[a-z]+ [a-z]+",
            value="[0-9a-z]{7}",
        )
        names = [found["name"] for _, _, found in facts]
        assert len({*names}) == 6 and len(questions) == len({found["name"] for *_, found in questions}) == 4
        assert max(map(names.count, names)) <= 2
        updated, n_facts = updated + len(names) - 6, n_facts + 6
        for position, template, asked in questions:
            stated = [(at, found["value"]) for at, _, found in facts if found["name"] == asked["name"]]
            assert all(at < position for at, _ in stated) and stated[-1][1] == asked["value"]
            assert len({value for _, value in stated}) == len(stated), "an update changes the value"
            seen["question"].add(template)
        assert (weights > 1).sum() == 4 * 7
        seen["statement"] |= {template for _, template, _ in facts}
        # The first match: digits are hexadecimal too, so only a value of digits and letters is certainly of that alphabet.
        for *_, found in facts:
            used.add(next(name for name, letters in alphabets.items() if letters.fullmatch(found["value"])))
    assert len(seen["statement"]) == len(seen["question"]) == 5 and used == {*alphabets}
    assert abs(updated / n_facts - 0.5) < 0.12


def test_grammar() -> None:
    """Both orders have equal shares, and nothing that is held out can be trained on."""
    assert {name: tuple(map(len, lists)) for name, lists in GRAMMARS.items()} == {
        "grammar": (864, 432),
        "new_words": (12, 6),
        "new_sentences": (144, 144),
    }
    for statements, questions in GRAMMARS.values():
        assert len({*statements}) == len(statements) and len({*questions}) == len(questions)
        assert all(text.count("{name}") == text.count("{value}") == text.count("{") / 2 == 1 for text in statements)
        assert all(text.count("{name}") == text.count("{") == 1 for text in questions)
        value_first = sum(text.index("{value}") < text.index("{name}") for text in statements)
        assert 2 * value_first == len(statements)
    trained = {*GRAMMARS["grammar"][0], *GRAMMARS["grammar"][1]}
    assert RecallConfig().statement in trained and RecallConfig().question in trained, "the wording of other runs"
    words = {word for text in trained for word in re.findall("[a-z]+", text.lower())}
    held_out = {word for texts in HELD_OUT_WORDS.values() for text in texts for word in text.lower().split()} - {"to"}
    assert held_out == {"marker", "equals", "bears", "bear", "pertains", "insert", "recite"} and not held_out & words
    # The parts around name and value of every held-out sentence: at least one occurs in no trained text.
    for text in (*GRAMMARS["new_sentences"][0], *GRAMMARS["new_sentences"][1], *sum(HELD_OUT_WORDINGS, ())):
        parts = re.split(r"\{name\}|\{value\}", text)
        assert any(all(part not in other for other in trained) for part in parts), text
    new_words = {re.sub("marker", "code", text) for text in GRAMMARS["new_words"][1]}
    assert not new_words & trained and not trained.intersection(*GRAMMARS["new_words"])


def test_sequences_with_the_grammar() -> None:
    """The expected value is the last one before the question, or the first after "Before the change:"."""
    statements, questions = GRAMMARS["grammar"]
    asks = [text + "{value}\n" for text in questions]
    fields = {"name": "[a-z]+ [a-z]+", "value": "[0-9a-z]{7}"}
    orders, first, n_updated = [], 0, 0
    for sequence in range(40):
        content = as_bytes(make_inserter(GRAMMAR, 4000, 3)(TEXT[:4001], sequence)[0])
        assert content == as_bytes(make_inserter(GRAMMAR, 4000, 3)(TEXT[:4001], sequence)[0])
        facts, asked = find_facts(statements, content, **fields), find_facts(asks, content, **fields)
        assert len({found["name"] for *_, found in facts}) == 6 and len(asked) == 4
        orders += [template.index("{value}") < template.index("{name}") for _, template, _ in facts]
        for position, _, question in asked:
            values = [found["value"] for at, _, found in facts if found["name"] == question["name"] and at < position]
            asks_for_first = content[:position].endswith(b"\nBefore the change:")
            first, n_updated = first + asks_for_first, n_updated + (len(values) == 2)
            assert len(values) == len({*values}) <= 2 and question["value"] == values[0 if asks_for_first else -1]
            assert len(values) == 2 or not asks_for_first
    assert abs(np.mean(orders) - 0.5) < 0.1 and abs(first / n_updated - 0.5) < 0.15 and n_updated > 50


def test_held_out_wordings_and_capitals_are_not_trained_on(refuses) -> None:
    recall = VARIED
    trained = {recall.statement, recall.question, *STATEMENTS, *QUESTIONS}
    assert len(HELD_OUT_WORDINGS) == 2 and not trained & {text for wording in HELD_OUT_WORDINGS for text in wording}
    with pytest.raises(ConfigError, match=r"data\.values"):
        DataConfig(source="recall", values="capitals")  # pyright: ignore[reportArgumentType]
    facts = sample_facts(500, recall.model_copy(update={"values": "capitals"}), np.random.default_rng(0))
    assert all(re.fullmatch(rb"[A-Z]{7}", fact.value) for fact in facts)


def test_facts_of_any_wording_fit_in_their_bytes() -> None:
    for recall in (RecallConfig(), VARIED, RecallConfig(wordings="several"), RecallConfig(updates=1.0)):
        n_bytes = [
            len((fact.replaced.statement if fact.replaced else b"") + fact.statement + fact.question + fact.value) + 1
            for number in range(20)
            for fact in sample_facts(400, recall, np.random.default_rng(number))
        ]
        assert compute_max_fact_bytes(recall) - 12 <= max(n_bytes) <= compute_max_fact_bytes(recall), recall
    # The longest texts of the grammar are rarely drawn together.
    name = max((f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS), key=len)
    statement, question = (
        max(len(text.format(name=name, value="1234567")) for text in part) for part in GRAMMARS["grammar"]
    )
    assert (
        compute_max_fact_bytes(GRAMMAR) == 2 * statement + len("\nBefore the change:") + question + len("1234567\n") <= 256
    )


def test_an_updated_fact_has_its_later_value_at_the_depth() -> None:
    for recall in (RecallConfig(), VARIED):
        for number, depth in ((n, depth) for n in range(10) for depth in (0.0, 0.4, 0.9)):
            sample = make_updated_task(4000, depth, recall, np.random.default_rng(number), TEXT)
            content, value = as_bytes(sample.tokens), as_bytes(sample.tokens[sample.answers[0]]).decode()
            facts = find_facts([recall.statement, *STATEMENTS], content, name="[a-z]+ [a-z]+", value="[0-9a-z]{7}")
            (first, _, old), (second, _, new) = facts
            assert old["name"] == new["name"] and old["value"] != new["value"] == value and len(content) == 4000
            assert first < second and abs(second / 4000 - depth) < 0.06
