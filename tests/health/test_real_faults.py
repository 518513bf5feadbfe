"""Faults of a run that leave a well-formed record: an edit of a recorded run fails its check, the record passes."""

from __future__ import annotations

import copy
import json
import math
import random
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_run import Event, edit_history, make_config, write_run

from nsa_lab.health import LIMITS, Limits, Verdict, examine
from nsa_lab.health.attempt_checks import check_attempts_agree
from nsa_lab.health.branch_checks import check_branch_outputs, check_gates_moved
from nsa_lab.health.configured_work import compute_read_bounds
from nsa_lab.health.consistency_checks import check_consistent
from nsa_lab.health.ending_checks import check_status_agrees
from nsa_lab.health.evaluation_checks import find_foreign_evaluation
from nsa_lab.health.loss_checks import check_gradients
from nsa_lab.health.loss_course import check_loss_course
from nsa_lab.health.record_checks import check_clock, check_one_run
from nsa_lab.health.repetition_checks import check_layers_differ
from nsa_lab.health.ruler_relations import find_ruler_problem
from nsa_lab.health.run_checks import check_finite
from nsa_lab.health.selection_checks import check_sink_share
from nsa_lab.health.throughput_checks import check_memory
from nsa_lab.runs import resolve
from nsa_lab.runs.evaluation import EVALUATION, RULER
from nsa_lab.runs.history import History

OUTPUTS = resolve.get_root() / "outputs"
# A run with all fields of today, one of several stages, one of two attempts, and one with dense attention.
RECENT, STAGED, RESUMED, DENSE = (
    *("whole4-20261126T030637Z-8c93", "long_64k-20261126T122445Z-0d29"),
    *("production_50k-20261121T141448Z-afd3", "fast_dense-20261126T031722Z-5643"),
)
Check = Callable[[History, Limits], Verdict | None]
Edit = Callable[[list[Event]], Any]


@pytest.fixture(scope="module")
def records() -> dict[str, History]:
    return {name: History.read(OUTPUTS / name) for name in (RECENT, STAGED, RESUMED, DENSE)}


def select(events: list[Event], kind: str, first: float = -1.0, field: str = "") -> list[Event]:
    """Return the events of a kind, and with a field, after a fraction of the run."""
    end = max(event["step"] for event in events)
    return [e for e in events if e["kind"] == kind and e["step"] > first * end and (not field or field in e)]


def change(kind: str, get_values: Callable[[Event], Event], first: float = -1.0, field: str = "", every: int = 1) -> Edit:
    def edit(events: list[Event]) -> None:
        for event in select(events, kind, first, field)[::every]:
            event.update(get_values(event))

    return edit


def set_fields(kind: str, first: float = -1.0, **values: Any) -> Edit:
    return change(kind, lambda event: values, first)


def remove(kind: str, first: float, last: int | None = None, **values: Any) -> Edit:
    """Return an edit that removes events after a fraction of the run, and sets values of the one after them."""

    def edit(events: list[Event]) -> list[Event]:
        own = select(events, kind, first)
        if last is not None:
            own[last].update(values)
        gone = {id(event) for event in own[:last]}
        return [event for event in events if id(event) not in gone]

    return edit


def exchange(name: str, other: str, first: float = -1.0, every: int = 1) -> Edit:
    return change("step", lambda e: {name: e[other], other: e[name]}, first, name, every)


def map_layers(function: Callable[[list[float]], list[float]], first: float = -1.0, every: int = 1) -> Edit:
    """Return an edit of all statistics of the layers of a reading."""

    def get_values(event: Event) -> Event:
        return {name: function(value) for name, value in event.items() if isinstance(value, list) and name != "nonfinite"}

    return change("step", get_values, first, "grad_norm_layers", every)


def hold(name: str, first: float, noise: float) -> Edit:
    """Return an edit that holds a statistic of all layers from a fraction of the run on, but for some noise."""

    def edit(events: list[Event]) -> None:
        start, *others = select(events, "step", first, name)
        for number, event in enumerate(others):
            event[name] = [
                value * (1 + noise * math.sin(number * number + place)) for place, value in enumerate(start[name])
            ]

    return edit


def draw(name: str, scatter: float) -> Edit:
    """Return an edit that replaces a number by random ones of the same median."""

    def edit(events: list[Event]) -> None:
        rng, own = random.Random(0), select(events, "step", field=name)
        median = statistics.median(event[name] for event in own)
        for event in own:
            event[name] = median * math.exp(rng.gauss(0, scatter))

    return edit


def thin_out(every: int) -> Edit:
    """Return an edit that keeps one of `every` readings, so that heartbeats are more frequent than these."""

    def edit(events: list[Event]) -> list[Event]:
        gone = {id(event) for number, event in enumerate(select(events, "step")) if number % every}
        return [event for event in events if id(event) not in gone]

    return edit


def stretch(first: float, factor: float) -> Edit:
    """Return an edit by which the clock runs at `factor` times its speed after a fraction of the run."""

    def edit(events: list[Event]) -> None:
        end = max(event["step"] for event in events)
        late = [event for event in events if event["step"] > first * end]
        start = late[0]["t"]
        for event in late:
            event["t"] = start + factor * (event["t"] - start)

    return edit


def delay(first: float, seconds: float) -> Edit:
    """Return an edit by which a machine stands still once, after a fraction of the run, and nothing notices it."""

    def edit(events: list[Event]) -> None:
        end = max(event["step"] for event in events)
        for event in events:
            event["t"] += seconds * (event["step"] > first * end)

    return edit


def combine(*edits: Edit) -> Edit:
    def edit(events: list[Event]) -> list[Event]:
        for own in edits:
            events = own(events) or events
        return events

    return edit


def fade(name: str, factor: float) -> Edit:
    """Return an edit by which a number falls evenly to `factor` of itself."""

    def edit(events: list[Event]) -> None:
        end = max(event["step"] for event in events)
        for event in select(events, "step", field=name):
            event[name] *= factor ** (event["step"] / end)

    return edit


def grow(kind: str, name: str, first: float, growth: float, n_rises: float = 1.0) -> Edit:
    """Return an edit by which a size grows in `n_rises` events (up to 1: a fraction of them), and then stays."""

    def edit(events: list[Event]) -> None:
        own = select(events, kind, first)
        count = n_rises if n_rises > 1 else n_rises * len(own)
        start = own[0][name]
        for number, event in enumerate(own):
            event[name] = int(start * (1 + growth * min(1.0, number / count)))

    return edit


def saw(height: float, growth: float) -> Edit:
    """Return an edit by which host memory rises and falls twenty times, and its highest value grows evenly."""

    def edit(events: list[Event]) -> None:
        own = select(events, "heartbeat")
        start = own[0]["rss_bytes"]
        for number, event in enumerate(own):
            part = number / len(own)
            event["rss_bytes"] = int(start * (1 + height * (part * 20 % 1)) * (1 + growth * part))

    return edit


def add_signal(events: list[Event]) -> None:
    event = select(events, "step", 0.5)[0]
    fields = {"kind": "signal", "signal": "SIGTERM", "phase": "step", "action": "save and exit"}
    envelope = {name: event[name] for name in ("v", "t", "run", "attempt", "step", "tokens")}
    events.insert(events.index(event) + 1, envelope | fields)


def add_reference(events: list[Event]) -> None:
    event = select(events, "reference")[0]
    events.insert(events.index(event) + 1, event | {"bpb": event["bpb"] * 1.3})


def drop_ablation(name: str) -> Edit:
    def get_values(event: Event) -> Event:
        return {field: {k: v for k, v in event[field].items() if k != name} for field in ("answer_loss", "accuracy")}

    return change("reach", get_values, 0.5)


def set_reads(**reads: float) -> Edit:
    return change("start", lambda e: {"reads_per_token": e["reads_per_token"] | reads})


def set_packing(**values: Any) -> Edit:
    return change("start", lambda e: {"packing": [counts | values for counts in e["packing"]]})


def scale_optimizer(factor: float, first: float = -1.0) -> Edit:
    def get_values(event: Event) -> Event:
        return {"optimizer_bytes": {name: int(value * factor) for name, value in event["optimizer_bytes"].items()}}

    return change("step", get_values, first, "optimizer_bytes")


def equalize(event: Event) -> Event:
    return {"answer_loss": event["answer_loss"] | {"random": event["answer_loss"]["chosen"]}}


def freeze_step(events: list[Event]) -> None:
    own = select(events, "heartbeat", 0.5)
    for event in own:
        event.update(step=own[0]["step"], tokens=own[0]["tokens"])


def repeat(kind: str) -> Edit:
    """Record every event of a kind twice."""

    def edit(events: list[Event]) -> list[Event]:
        return [copy.deepcopy(event) for event in events for _ in range(1 + (event["kind"] == kind))]

    return edit


def scale_layers(event: Event) -> Event:
    layers = len(event["grad_norm_layers"])
    return {"grad_norm_layers": [event["grad_norm"] / layers * (1 + layer / 1000) for layer in range(layers)]}


CASES: list[tuple[str, Edit, Check, str]] = [
    (
        RECENT,
        change("step", lambda e: {"sel_distance": [40.0] * len(e["sel_distance"])}, 0.5, "sel_distance", every=1000),
        check_consistent,
        "farther away than the first block of the sequence",
    ),
    (RECENT, repeat("start"), check_clock, "attempt 1 starts twice"),
    (RESUMED, repeat("resume"), check_clock, "attempt 2 starts twice"),
    (RECENT, repeat("heartbeat"), check_clock, "attempt 1 has two heartbeats at the same time"),
    (RECENT, set_fields("start", ranks=0), check_finite, "ranks is 0"),
    (RECENT, set_fields("heartbeat", phase="save"), check_consistent, "heartbeats in the phase save of"),
    (RECENT, set_fields("heartbeat", 0.5, phase="eval"), check_consistent, "heartbeats in the phase eval of"),
    (
        RECENT,
        change("step", scale_layers, field="grad_norm_layers"),
        check_layers_differ,
        "the gradient norms of the layers differ by at most 0.003 of their mean",
    ),
    (RECENT, set_fields("heartbeat", step=0, tokens=0), check_consistent, "a heartbeat of step 0 between readings of"),
    (RESUMED, freeze_step, check_consistent, "between readings of steps"),
    (RECENT, set_fields("heartbeat", 0.3, tokens=5), check_consistent, "other numbers of tokens than their steps"),
    (RECENT, remove("heartbeat", 0.3, 9), check_consistent, "s of training of attempt 1, expected one every 10 s"),
    (RESUMED, remove("heartbeat", 0.5, 15, suspended_s=140.0), check_consistent, "no heartbeat in"),
    (RECENT, set_fields("heartbeat", 0.9, suspended_s=1e5), check_consistent, "a suspension of 100,000 s in the 20 s"),
    (RECENT, set_fields("heartbeat", gpu_util=0.0), check_consistent, "the GPU utilization is 0 at 10 heartbeats in a row"),
    (
        RECENT,
        set_fields("heartbeat", 0.5, gpu_util=0.0),
        check_consistent,
        "the GPU utilization is 0 at 10 heartbeats in a",
    ),
    (RECENT, combine(thin_out(40), remove("heartbeat", 0.3, 9)), check_consistent, "s of training of attempt 1, expected"),
    (RECENT, set_fields("eval", seconds=0.0), check_consistent, "or no time"),
    (STAGED, set_fields("preflight", seconds=1e6), check_consistent, "or a check takes longer than its attempt"),
    (RECENT, set_fields("eval", windows=64), check_consistent, "an evaluation of 64 windows with the losses of 128"),
    (RECENT, draw("selection_loss", 0.8), check_loss_course, "the selection loss is noise: it differs by a factor of"),
    (RECENT, fade("selection_loss", 1e-6), check_loss_course, "of its largest value from step"),
    (
        RECENT,
        change("step", lambda e: {"selection_loss": 0.05 * e["loss"]}),
        check_consistent,
        "selection_loss is proportional to loss",
    ),
    (
        RECENT,
        change("step", lambda e: {"first_loss": 1e3 * e["first_loss"]}, 0.5, "first_loss"),
        check_loss_course,
        "first_loss changes by a factor of at least",
    ),
    (
        STAGED,
        change("step", lambda e: {"first_loss": e["loss"] / 10}, 0.5, "first_loss"),
        check_loss_course,
        "first_loss changes by a factor of at least",
    ),
    *(
        (name, change("step", lambda e: {"first_loss": e["loss"] / 10}, field="first_loss"), check_consistent, text)
        for name, text in ((RECENT, "first_loss is proportional to"), (STAGED, "first_loss is proportional to loss"))
    ),
    *(
        (name, change("step", lambda e: {"grad_norm": e["grad_norm"] * 30}, 0.5, every=2), check_gradients, text)
        for name, text in ((RECENT, "rises and falls in turns, by a factor of at least 5, in"), (RESUMED, "in 5 readings"))
    ),
    (RECENT, exchange("norm_cmp", "norm_sel", every=2), check_layers_differ, "the branches exchange norm"),
    (STAGED, exchange("norm_sel", "norm_win", every=2), check_layers_differ, "the branches exchange norm"),
    (RECENT, exchange("gate_share_sel", "gate_share_win", 0.5), check_layers_differ, "the branches exchange gate_share"),
    (RESUMED, exchange("norm_cmp", "norm_win", 0.5), check_layers_differ, "the branches exchange norm at step 25,500"),
    (RECENT, map_layers(lambda v: v[1:] + v[:1], 0.5), check_layers_differ, "the layers exchange their statistics"),
    (RESUMED, map_layers(lambda v: v[1:] + v[:1], 0.5), check_layers_differ, "the layers exchange their statistics"),
    (
        RECENT,
        map_layers(lambda v: v[:1] * len(v), 0.5, every=30),
        check_layers_differ,
        "of layers 0 and 1 is equal at step",
    ),
    (STAGED, map_layers(lambda v: v[:1] * len(v), every=5), check_layers_differ, "of layers 0 and 1 is equal at step"),
    (
        RECENT,
        change("step", lambda e: {"norm_sel": [*e["norm_sel"][:3], e["norm_sel"][0]]}, field="norm_sel", every=2),
        check_layers_differ,
        "norm_sel of layers 0 and 3 is equal at step 200",
    ),
    (
        RECENT,
        change("step", lambda e: {"norm_win": [value + 1e-12 for value in e["norm_cmp"]]}, field="norm_cmp"),
        check_consistent,
        "norm_win is proportional to norm_cmp",
    ),
    (
        RECENT,
        change("step", lambda e: {"norm_cmp": [30 * value for value in e["norm_cmp"]]}, 0.5, "norm_cmp"),
        check_branch_outputs,
        "the compressed branch changes by a factor of",
    ),
    (
        RECENT,
        change("step", lambda e: {"sel_sink_share": [0.0] * 4}, field="sel_sink_share", every=7),
        check_sink_share,
        "the first block is always selected",
    ),
    (RECENT, hold("gate_update", 0.3, 0.0), check_gates_moved, "change of the gate weights bitwise equal"),
    (RECENT, hold("gate_update", -1.0, 0.2), check_gates_moved, "move as far at any learning rate: the log of their"),
    (RESUMED, hold("gate_update", 0.3, 0.01), check_gates_moved, "times as far as usual for their learning rate"),
    (RECENT, set_fields("step", mem_peak_bytes=3e11), check_consistent, "that of the preflight 6,200,821,760"),
    (RECENT, set_fields("step", mem_peak_bytes=3.5e8), check_consistent, "is below the 869,489,812 of weights and"),
    (RECENT, grow("step", "mem_peak_bytes", 0.9, 0.12), check_memory, "readings in a row of attempt 1, by 12%"),
    (RECENT, grow("step", "mem_peak_bytes", 0.6, 0.4, 2), check_memory, "rises by 40% in stage 1, after an evaluation"),
    (RESUMED, grow("step", "mem_peak_bytes", 0.6, 0.4, 1.5), check_memory, "rises by 40% in stage 1"),
    (RECENT, grow("heartbeat", "rss_bytes", -1.0, 0.6, 0.5), check_memory, "resident memory grows steadily"),
    (RECENT, saw(0.3, 0.4), check_memory, "the highest resident memory grows steadily in attempt 1"),
    (RECENT, scale_optimizer(1 / 3), check_consistent, "0.58 moments per weight, expected 1 to 2 (muon)"),
    (RECENT, scale_optimizer(0.9, 0.5), check_consistent, "the optimizer state has other sizes than at the start"),
    (
        RECENT,
        change("step", lambda e: {"weight_bytes": {"float16": e["weight_bytes"]["float32"] // 2}}, field="weight_bytes"),
        check_consistent,
        "the weights are float16, expected float32",
    ),
    (RECENT, set_fields("reference", bpb=9.0), check_consistent, "xz: 9.000 bits per byte, expected at most 8.0"),
    (RECENT, set_fields("reference", bytes=0), check_consistent, "the reference xz is of 0"),
    (RECENT, add_reference, check_consistent, "the reference xz is 2.335 and 3.035 bits per byte"),
    (STAGED, set_fields("compile", shapes=[[4, 8192], [7, 999]]), check_consistent, "the shape [7, 999] was compiled"),
    (RECENT, change("reach", equalize, 0.0), check_consistent, "the answers cost the same with chosen and with random"),
    (RECENT, drop_ablation("no_sel"), check_consistent, "the selection benefit has no no_sel"),
    (RECENT, remove("reach", 0.5), check_consistent, "an evaluation without the reach event of the others"),
    (RECENT, set_reads(sel=70.0), check_consistent, "70.0 keys of sel"),
    (RECENT, set_reads(win=600.0), check_consistent, "600.0 keys of win"),
    (STAGED, set_reads(cmp=2000.0), check_consistent, "2,000.0 keys of cmp"),
    (RECENT, set_reads(dense=100.0), check_consistent, "with 100.0 of dense attention"),
    (RECENT, change("start", lambda e: {"packing": e["packing"] * 2}), check_consistent, "packing of 2 stages, but 1"),
    (RECENT, set_packing(padded_tokens=81_403 * 1024, padded_share=0.5), check_consistent, "but data.packing is stream"),
    (RECENT, set_packing(cut_documents=44_228, cut_share=2.0), check_consistent, "44,228 of 22,114 documents are cut"),
    (RECENT, set_fields("step", teacher_kl=0.01), check_consistent, "teacher_kl is recorded, but config.yaml has none"),
    (DENSE, set_fields("step", sel_reuse=[0.7] * 6), check_consistent, "config.yaml has none: dense attention"),
    (RECENT, set_fields("start", threads=0), check_one_run, "threads of attempt 1 is 0"),
    (
        RECENT,
        change("start", lambda e: {"versions": e["versions"] | {"torch": "2.11.0+cpu"}}),
        check_one_run,
        "torch of attempt 1 is 2.11.0+cpu, which contradicts its device",
    ),
    (RECENT, add_signal, check_status_agrees, "to save and exit, but trained on to step 10,500"),
    (
        RESUMED,
        lambda events: [event.update(attempt=3) for event in events if event["attempt"] == 2] and None,
        check_attempts_agree,
        "attempt 2 is missing, but attempt 3 is recorded",
    ),
    (
        RECENT,
        lambda events: select(events, "eval")[0].update(loss=7.0, bpb=7.0 / math.log(2)),
        check_consistent,
        "the loss of the new model is 7.0000 nats per token, in the preflight 5.5467",
    ),
]


@pytest.mark.slow
def test_real_faults_fail(records: dict[str, History]) -> None:
    passed = []
    for record, edit, check, text in CASES:
        verdict = check(edit_history(records[record], edit), LIMITS)
        if verdict is None or verdict.ok is not False or text not in verdict.text:
            passed.append(f"{text}: {verdict}")
    assert not passed, "\n".join(passed)


@pytest.mark.slow
def test_records_have_none_of_these_faults(records: dict[str, History]) -> None:
    checks = {check for _, _, check, _ in CASES}
    for name, history in records.items():
        verdicts = [check(history, LIMITS) for check in checks]
        assert not [f"{name}: {verdict}" for verdict in verdicts if verdict and verdict.ok is False]


def test_a_gpu_that_waits_and_a_machine_that_stands_still_are_no_faults(records: dict[str, History]) -> None:
    for edit in (
        combine(set_fields("heartbeat", 0.5, gpu_util=0.0), stretch(0.5, 4.0)),
        delay(0.5, 300.0),
        combine(thin_out(40), delay(0.5, 300.0)),
    ):
        verdict = check_consistent(edit_history(records[RECENT], edit), LIMITS)
        assert verdict.ok, verdict


def test_a_suspension_may_be_reported_one_heartbeat_late(records: dict[str, History]) -> None:
    for place in range(3):

        def report(events: list[Event], place: int = place) -> None:
            select(events, "heartbeat", 0.5)[place]["suspended_s"] = 300.0

        verdict = check_consistent(edit_history(records[RECENT], combine(delay(0.5, 300.0), report)), LIMITS)
        assert verdict.ok is (place < 2) and (verdict.ok or "a suspension of 300 s in the 20 s" in verdict.text)


def test_memory_of_mapped_shards_is_no_leak(records: dict[str, History]) -> None:
    """It rises while a shard is read, and falls with the next one."""
    verdict = check_memory(edit_history(records[RECENT], saw(0.3, 0.0)), LIMITS)
    assert verdict is not None and verdict.ok, verdict


def test_text_that_repeats_itself(records: dict[str, History]) -> None:
    def edit(events: list[Event], bits: float) -> None:
        event = select(events, "reference")[0]
        event["bpb"] = bits
        events.insert(events.index(event) + 1, event | {"name": "order-1 entropy", "bpb": 3.5})

    log_lines, repeated = (edit_history(records[RECENT], lambda e, b=bits: edit(e, b)) for bits in (0.15, 0.01))
    assert check_consistent(log_lines, LIMITS).ok
    assert "it repeats itself" in check_consistent(repeated, LIMITS).text


def test_one_equal_ablation_and_one_late_heartbeat_are_chance(records: dict[str, History]) -> None:
    """A recorded run has two ablations of one measurement with the same loss."""

    def edit(events: list[Event]) -> None:
        event = select(events, "reach", 0.4)[0]
        event.update(equalize(event) | {"accuracy": event["accuracy"] | {"random": event["accuracy"]["chosen"]}})
        select(events, "heartbeat", 0.5)[0]["tokens"] -= 32_768

    assert check_consistent(edit_history(records[RECENT], edit), LIMITS).ok


def test_bounds_of_reads(records: dict[str, History]) -> None:
    """Bounds contain the reads of any mixture of document lengths, and are exact for sequences of one document."""
    config = records[RECENT].config
    nsa, longest = config.nsa, config.train.plan[0].seq_len

    def count(length: int) -> dict[str, float]:
        rows = [
            (
                max((t + 1 - nsa.l) // nsa.d + 1, 0) if t + 1 >= nsa.l else 0,
                min(t // nsa.l_sel, nsa.n_sel - 1) * nsa.l_sel + t % nsa.l_sel + 1,
                min(t + 1, nsa.w),
                t + 1,
            )
            for t in range(length)
        ]
        return dict(
            zip(("cmp", "sel", "win", "dense"), (sum(column) / length for column in zip(*rows, strict=True)), strict=True)
        )

    for lengths in ((longest,), (5, 300, longest), (70, 71, 72, 1000)):
        each, total = [count(length) for length in lengths], sum(lengths)
        means = {name: sum(n * own[name] for n, own in zip(lengths, each, strict=True)) / total for name in each[0]}
        for name, (low, high) in compute_read_bounds(config, means["dense"]).items():
            assert low * 0.99 - 0.01 <= means[name] <= high * 1.01 + 0.01, (lengths, name)
    whole = config.model_copy(update={"data": config.data.model_copy(update={"documents": "cross"})})
    for name, bounds in compute_read_bounds(whole, 0.0).items():
        assert bounds == pytest.approx((count(longest)[name],) * 2)


def test_contradictory_evaluations(tmp_path: Path) -> None:
    """Settings of another run, means that are not those of their parts, and constants; the evaluation itself passes."""
    folder = tmp_path / STAGED
    folder.mkdir()
    for name in ("config.yaml", "environment.json", "events.jsonl", "status.json", EVALUATION):
        shutil.copy(OUTPUTS / STAGED / name, folder / name)
    history, recorded = History.read(folder), json.loads((folder / EVALUATION).read_text())
    assert find_foreign_evaluation(history) is None

    def scale_losses(parts: list[Event], loss: float | None = None) -> None:
        for part in parts:
            part["loss"] = part["loss"] * 1.1 if loss is None else loss

    def forget_tokens(record: dict[str, Any]) -> None:
        cell = record["retrieval"][0]
        counts = {"right": cell["answers"], "right_at_depth": cell["sequences"], "tokens_right": cell["tokens"]}
        cell.update(counts, loss=6.0)

    edits: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
        (lambda r: r.update(data_identity="e" * 64), "the text is of eeee"),
        (lambda r: r.update(attention="dense"), "attention is dense, but the run has nsa"),
        (lambda r: r["recall"].update(value_length=3), "recall.value_length is 3"),
        (lambda r: r.update(seconds=-5.0), "it took -5.0 s"),
        (lambda r: r["retrieval"].append(r["retrieval"][0]), "was evaluated twice"),
        (lambda r: [cell.update(loss=0.7) for cell in r["retrieval"]], "losses of retrieval are 0.7"),
        (lambda r: scale_losses(r["positions"]["octaves"]), "is not the mean of its windows"),
        (lambda r: scale_losses(r["positions"]["octaves"], 0.0), "losses of positions are 0"),
        (lambda r: r["texts"]["long"].update(loss=math.nan), "a loss of the text long is nan"),
        (lambda r: r["retrieval"][0].update(loss=math.nan), "a loss of retrieval is nan"),
        (lambda r: r.update(text_tokens=7), "the text has 7 tokens, in the preflight"),
        (forget_tokens, "has a loss of 6 nats with all tokens right, expected at most 5."),
        (lambda r: r["texts"]["long"].update(loss=0.7), "the text long is not the mean of its rows"),
        (lambda r: r["documents"].update(difference=0.1), "the loss of packed documents differs by 0.00579"),
        (lambda r: r["documents"].update(alone=0.0), "a loss of documents is 0"),
        (lambda r: r["positions"]["octaves"][1].update(first=0), "starts at 0, the one before it ends at 256"),
        (lambda r: r["texts"]["long"]["octaves"][-1].__setitem__(1, 70_000), "end at 70,000 of 65,536 tokens"),
    ]
    for edit, text in edits:
        record = copy.deepcopy(recorded)
        edit(record)
        (folder / EVALUATION).write_text(json.dumps(record))
        assert text in (find_foreign_evaluation(history) or "")


def test_contradictory_ruler_results(tmp_path: Path) -> None:
    """An interval follows from the score and the number of questions, and prompts fill their length."""
    run_dir = write_run(tmp_path)
    history = History.read(run_dir)
    result = {"task": "vt", "length": 900, "questions": 20, "references": 1, "found": [1] * 20, "prompt_tokens": 880}
    result |= {"score": 100.0, "low": 83.89, "high": 100.0}
    names = {"v": 1, "run": run_dir.name, "step": 200, "seed": 0, "tokenizer": "byte", "data_identity": "d" * 64}
    names |= {"code": {}, "device": "cpu", "dtype": "float32", "attention": "nsa", "not_asked": []}
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({}, None),
        ({"found": [1] * 10 + [0] * 10, "score": 50.0, "low": 29.93, "high": 70.07}, None),
        ({"low": 95.0}, "vt at 900 tokens: low is 95, expected 83.89 with 20 questions"),
        ({"prompt_tokens": 901}, "vt has prompts of 901 tokens, expected at most 900"),
        ({"length": 4096, "prompt_tokens": 2048}, None),
        ({"length": 4096, "prompt_tokens": 40}, "vt at 4,096 tokens has prompts of 40 tokens, expected at least 2,048"),
        ({"task": "niah_banana"}, "'niah_banana' is no task of RULER, expected one of niah_single_1"),
    ]
    skipped = {"task": "vt", "length": 900, "why": "too long"}
    others: list[tuple[dict[str, Any], str | None]] = [
        ({"not_asked": [skipped | {"length": 800}]}, None),
        ({"not_asked": [skipped]}, "vt at 900 tokens was asked, but is also listed as not asked"),
        ({"tokenizer": "0" * 64}, "the tokenizer is 0000000000000000, but config.yaml has data.tokenizer = byte"),
    ]
    records = [(names | {"results": [result | changes]}, text) for changes, text in cases]
    records += [(names | {"results": [result]} | changes, text) for changes, text in others]
    for record, text in records:
        (run_dir / RULER).write_text(json.dumps(record))
        problem = find_foreign_evaluation(history) or find_ruler_problem(history)
        assert problem is None if text is None else text in (problem or ""), (record, problem)


def test_the_gradient_of_one_of_two_layers(tmp_path: Path) -> None:
    """The median of two layers depends on both."""

    def cut(events: list[Event], factor: float = 1.0) -> None:
        for event in events:
            event |= {name: value[:2] for name, value in event.items() if isinstance(value, list)}
            if "grad_norm_layers" in event and event["step"] > 100:
                event["grad_norm_layers"][0] *= factor

    config = make_config(model__n_layers=2)
    healthy = write_run(tmp_path, config, spoil=cut)
    assert not examine(healthy).failed
    faulty = write_run(tmp_path / "faulty", config, spoil=lambda events: cut(events, 0.01))
    verdict = check_gradients(History.read(faulty), LIMITS)
    assert verdict.ok is False and "the gradient of layer 0 changes by a factor of 100" in verdict.text, verdict
