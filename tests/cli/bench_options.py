"""Options of the benchmarks. They are also compared as a whole in tests/bench/test_bench_commands.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from option_cases import case, stop

BENCH: dict[str, tuple[str, list[tuple[str, str, Callable[..., bool]]]]] = {
    "attention": (
        "attention_speed.run_attention_bench",
        [
            ("json_file", "--json {folder}/r.json", lambda shapes, file, **_: file.name == "r.json"),
            ("shape", "--shape 64x2", lambda shapes, file, **_: shapes[0].T == 64),
            ("picture", "--picture {folder}/p.png", lambda *_, picture, **__: picture.name == "p.png"),
            ("backend", "--backend torch", lambda *_, backend, **__: backend == "torch"),
            ("parts", "--parts", lambda *_, parts, **__: parts),
            ("preset", "--preset {params}", lambda *_, model, **__: model is not None),
            ("device", "", lambda *_, device, **__: device == "cpu"),
        ],
    ),
    "tune": (
        "tune_tiles.run_tune",
        [
            ("json_file", "--json {folder}/r.json", lambda shapes, file, **_: file.name == "r.json"),
            ("shape", "--shape 64x2", lambda shapes, file, **_: shapes[0].T == 64),
            ("kernel", "--kernel 'band_dq, window'", lambda *_, kernels, **__: kernels == ("band_dq, window",)),
            ("most", "--most 7", lambda *_, max_tiles, **__: max_tiles == 7),
            ("device", "", lambda *_, device, **__: device == "cpu"),
        ],
    ),
    "decode": (
        "decode_speed.run_decode_bench",
        [
            ("json_file", "--json {folder}/r.json", lambda lengths, file, **_: file.name == "r.json"),
            ("length", "--length 600", lambda lengths, file, **_: lengths == [600]),
            ("batch", "--batch 3", lambda *_, batches, **__: batches == [3]),
            ("layers", "--layers 5", lambda *_, layers, **__: layers == 5),
            ("backend", "--backend torch", lambda *_, backend, **__: backend == "torch"),
            ("picture", "--picture {folder}/p.png", lambda *_, picture, **__: picture.name == "p.png"),
            (
                "preset",
                "--preset {params} --preset long_64k_dense",
                lambda *_, model, baseline, **__: model.attention == "nsa" and baseline.attention == "dense",
            ),
            ("device", "", lambda *_, device, **__: device == "cpu"),
        ],
    ),
    "train": (
        "training_speed.run_train_bench",
        [
            ("json_file", "--json {folder}/r.json", lambda shapes, file, **_: file.name == "r.json"),
            ("shape", "--shape 64x2", lambda shapes, file, **_: shapes == ((64, 2),)),
            ("picture", "--picture {folder}/p.png", lambda *_, picture, **__: picture.name == "p.png"),
            ("preset", "--preset {params}", lambda *_, model, **__: model is not None),
            ("device", "", lambda *_, device, **__: device == "cpu"),
        ],
    ),
    "trainer": (
        "trainer_overhead.run_trainer_bench",
        [
            ("json_file", "--json {folder}/r.json", lambda file, **_: file.name == "r.json"),
            ("ranks", "--ranks 3", lambda file, ranks, **_: ranks == 3),
            ("parallel", "--parallel fsdp", lambda file, parallel, **_: parallel == "fsdp"),
            ("steps", "--steps 9", lambda file, steps, **_: steps == 9),
            ("device", "", lambda file, device, **_: device == "cpu"),
        ],
    ),
    "ranks": (
        "context_parallel.run_ranks_bench",
        [
            ("json_file", "--json {folder}/r.json", lambda lengths, file, **_: file.name == "r.json"),
            ("ranks", "--ranks 3", lambda *_, ranks, **__: ranks == 3),
            ("length", "--length 600", lambda lengths, file, **_: lengths == (600,)),
            ("part", "--part step", lambda *_, parts, **__: parts == ("step",)),
            ("preset", "--preset {params}", lambda *_, model, **__: model is not None),
            ("shared_only", "--shared-only", lambda *_, alone, **__: not alone),
            (
                "gradient_checkpointing",
                "--gradient-checkpointing",
                lambda *_, gradient_checkpointing, **__: gradient_checkpointing,
            ),
            ("device", "", lambda *_, device, **__: device == "cpu"),
        ],
    ),
    "curves": (
        "loss_curves.run_curves",
        [
            ("json_file", "--json {folder}/r.json", lambda steps, file, picture, log: file.name == "r.json"),
            ("picture", "--picture {folder}/p.png", lambda steps, file, picture, log: picture.name == "p.png"),
            ("steps", "--steps 19", lambda steps, file, picture, log: steps == 19),
        ],
    ),
}
for command, (function, options) in BENCH.items():
    device = " --device cpu" if "device" in [name for name, _, _ in options] else ""
    for name, words, check in options:
        case(f"bench {command}", name, f"bench {command}{device} {words}", f"nsa_lab.bench.{function}", check, stop)
case(
    "bench attention",
    "packed",
    "bench attention --device cpu --packed",
    "nsa_lab.bench.packed_attention.run_packed_bench",
    lambda *_, **__: True,
)
DOCUMENTS = "nsa_lab.bench.document_masking.run_documents_bench"
case("bench train", "documents", "bench train --device cpu --documents", DOCUMENTS, lambda *_, **__: True)
case(
    "bench train",
    "text",
    "bench train --device cpu --documents --text a.txt",
    DOCUMENTS,
    lambda *_, text, **__: text == Path("a.txt"),
)
RATES = "nsa_lab.bench.roofline.read_rows"
for name, words, check in (
    ("record", "", lambda record, flops, bandwidth: record["when"] == "2026"),
    ("flops", "--flops 5", lambda record, flops, bandwidth: flops == 5),
    ("bandwidth", "--bandwidth 6", lambda record, flops, bandwidth: bandwidth == 6),
):
    case("bench limits", name, f"bench limits {{folder}}/record.json {words}", RATES, check, stop)
case(
    "bench limits",
    "picture",
    "bench limits {folder}/record.json --picture {folder}/p.png",
    "nsa_lab.bench.roofline.plot_roofline",
    lambda rows, rates, title, picture: picture.name == "p.png",
)

# Options that go to a second function: in another mode of the command, or to a check before it starts.
PACKED = "nsa_lab.bench.packed_attention.run_packed_bench"
for name, options, check in (
    ("json_file", "--json {folder}/r.json", lambda file, **_: file.name == "r.json"),
    ("backend", "--backend torch", lambda file, backend, **_: backend == "torch"),
    ("device", "", lambda file, device, **_: device == "cpu"),
):
    case("bench attention", f"{name}: packed", f"bench attention --device cpu --packed {options}", PACKED, check)
for name, options, check in (
    ("json_file", "--json {folder}/r.json", lambda shapes, file, **_: file.name == "r.json"),
    ("shape", "--shape 64x2", lambda shapes, file, **_: shapes == ((64, 2),)),
    ("device", "", lambda shapes, file, device, **_: device == "cpu"),
):
    case("bench train", f"{name}: documents", f"bench train --device cpu --documents {options}", DOCUMENTS, check)
for name, check in (
    ("flops", lambda _, flops, bandwidth: flops == 5),
    ("bandwidth", lambda _, flops, bandwidth: bandwidth == 6),
):
    line = "bench limits {folder}/record.json --flops 5 --bandwidth 6"
    case("bench limits", f"{name}: checked", line, "nsa_lab.bench.attention_rows.parse_record", check, stop)
