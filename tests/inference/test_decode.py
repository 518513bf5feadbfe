"""Decoding with a cache gives the logits of a full forward pass, wherever blocks and windows begin and end."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import triton
from tiny_models import TINY_NSA, build_model, tiny_config
from torch import Tensor

from nsa_lab.attention.kernels import launch_table
from nsa_lab.attention.kernels.decoding import launch
from nsa_lab.config import ConfigError, ModelConfig, NSAConfig
from nsa_lab.inference import Decoder, cache, decode, decode_graph, kv_cache_size
from nsa_lab.inference.decode_graph import DecodeGraph
from nsa_lab.model import NSATransformer

# Around every length that something begins or ends at: d, l, l_sel, w, n_sel * l_sel.
PREFILLS = (1, 3, 4, 7, 8, 9, 11, 12, 13, 16, 31, 32, 33, 47)
LENGTH = 48
GEOMETRIES = [
    NSAConfig(l=6, d=3, l_sel=9, n_sel=3, w=1),
    NSAConfig(l=5, d=5, l_sel=5, n_sel=5, w=7),
    NSAConfig(l=4, d=4, l_sel=12, n_sel=3, w=31),
    NSAConfig(l=12, d=2, l_sel=4, n_sel=6, w=3),
    NSAConfig(l=1, d=1, l_sel=1, n_sel=3, w=2),
]
# Where kernels run: under the interpreter, on a machine without a GPU.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INDEXED = {"d_k": 8, "selection_loss": 0.1, "indexer_block": 2}
NGRAMS = {"ngrams": 4, "ngram_rows": 100, "ngram_width": 5}
KERNEL_VARIANTS = [
    # Others below have these, and more.
    pytest.param({}, marks=pytest.mark.soak),
    pytest.param({"selection_loss": 0.1, "indexer_block": 2}, marks=pytest.mark.soak),
    {"selection_loss": 0.1, "indexer_block": 2, "matching_heads": 1, "rotary_share": 0.5, "mlp": "gated", "phi": "pool"},
    {"d_k": 32, "rotary_share": 0.5, "matching_heads": 1, "selection_loss": 0.1, "indexer_block": 1, "indexer_width": 16},
    {"matching_heads": 2, "phi": "mlp", "gate": "softmax", "silent": ("win",)},
    {"matching_heads": 1, "rotary_share": 0.5, "attention": "dense"},
    NGRAMS,
]
VARIANTS = [
    {},
    *({"nsa": TINY_NSA.model_copy(update={"phi": phi, "gate": "softmax"})} for phi in ("linear", "mlp", "pool")),
    {"attention": "dense"},
    {"n_kv_groups": 1},
    {"n_kv_groups": 4},
    {"rotary_share": 0.5, "matching_heads": 1},
    {"d_k": 8, "rotary_share": 0.5, "matching_heads": 1, "selection_loss": 0.1, "indexer_block": 1},
    INDEXED | {"nsa": TINY_NSA.model_copy(update={"phi": "mlp"})},
    INDEXED | {"rotary_share": 0.5, "matching_heads": 1, "indexer_width": 4},
    {"rotary_share": 0.5, "matching_heads": 2, "attention": "dense", "embedding_norm": True},
    {"embedding_norm": True, "rope_theta": 100.0, "silent": ("win",)},
    {"embedding_norm": True} | NGRAMS,
    *({"nsa": nsa} for nsa in GEOMETRIES),
]


def sample_tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 37, shape, generator=torch.Generator().manual_seed(seed))


def pad_ragged(rows: list[Tensor]) -> tuple[Tensor, list[int]]:
    """Rows of any lengths as a decoder takes them, and those lengths."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), [len(row) for row in rows]


def decode_in_chunks(model: NSATransformer, texts: list[Tensor], chunks: list[int], poison: bool = False) -> list[Tensor]:
    """Logits of every text, read `chunks[i]` tokens at a time, in turn; texts of one batch run out at their own times."""
    decoder = Decoder(model, max(map(len, texts)), batch=len(texts))
    if poison:
        for kept in decoder.cache.tensors():
            kept.fill_(float("nan") if kept.is_floating_point() else -(10**12))
    at, found = 0, [[] for _ in texts]
    while at < max(map(len, texts)):
        size = chunks.pop(0) if len(chunks) > 1 else chunks[0]
        tokens, counts = pad_ragged([text[at : at + size] for text in texts])
        logits = decoder.append(tokens, counts)
        for row, count in enumerate(counts):
            found[row].append(logits[row, :count])
        at += size
    return [torch.cat(parts) for parts in found]


@pytest.fixture(params=[5, pytest.param(256, marks=pytest.mark.slow)], ids="steps of {}".format)
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_size, "STEP", request.param)


def run_without_graph(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """In place of a recording, which needs a GPU; its rehearsals leave padding."""
    run()
    result = run()
    return lambda: result.copy_(run()), result


@pytest.mark.parametrize("variant", [VARIANTS[0], *VARIANTS[7:11], *VARIANTS[-5::2]])
def test_a_step_that_knows_no_lengths_equals_full_forward(variant: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a CUDA graph would record, run anew each time: the same at lengths that end and complete blocks, and where the
    rehearsals left their padding."""

    monkeypatch.setattr(decode, "can_capture", lambda cache: True)
    monkeypatch.setattr(decode_graph, "record", run_without_graph)
    steps: list[DecodeGraph] = []
    monkeypatch.setattr(decode, "DecodeGraph", lambda *given: steps.append(DecodeGraph(*given)) or steps[-1])
    model = build_model(tiny_config(**variant))
    texts = [sample_tokens(length, seed=length) for length in (47, 23, 8)]
    for text, found in zip(texts, decode_in_chunks(model, texts, [7, 1], poison=True), strict=True):
        torch.testing.assert_close(found, model(text[None])[0], rtol=0, atol=1e-10)
    assert len(steps) == 1


def test_sequences_take_turns_in_a_recorded_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits takes in padding, of which nothing stays, in convolutions neither."""
    monkeypatch.setattr(decode, "can_capture", lambda cache: True)
    monkeypatch.setattr(decode_graph, "record", run_without_graph)
    model, texts = build_model(tiny_config(**INDEXED, matching_heads=1)), sample_tokens(2, 30)
    decoder = Decoder(model, 30, batch=2)
    decoder.append(texts[:, :11])
    for at in range(11, 30):
        for row in (0, 1):
            tokens = torch.full((2, 1), 36)
            tokens[row] = texts[row, at]
            found = decoder.append(tokens, [1 - row, row])[row, 0]
            torch.testing.assert_close(found, model(texts[row : row + 1, : at + 1])[0, -1], rtol=0, atol=1e-10)


def test_a_sequence_may_begin_after_its_neighbours() -> None:
    """Before its first token is nothing, whatever the cache holds there."""
    model, texts = (
        build_model(tiny_config(**INDEXED, **NGRAMS, matching_heads=1)),
        [sample_tokens(17, seed=1), sample_tokens(9, seed=2)],
    )
    decoder = Decoder(model, 20, batch=2)
    for kept in decoder.cache.tensors():
        kept.fill_(7)
    decoder.append(*pad_ragged([texts[0][:8], texts[1][:0]]))
    found = decoder.append(*pad_ragged([texts[0][8:], texts[1]]))
    for row, text in enumerate(texts):
        expected = model(text[None])[0]
        torch.testing.assert_close(found[row, :9], expected[-9:], rtol=0, atol=1e-10)


def test_what_a_recording_reads_stays_where_it_is_until_the_cache_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "can_capture", lambda cache: True)
    monkeypatch.setattr(decode_graph, "record", run_without_graph)
    steps: list[DecodeGraph] = []
    monkeypatch.setattr(decode, "DecodeGraph", lambda *given: steps.append(DecodeGraph(*given)) or steps[-1])
    model, tokens = build_model(tiny_config(rotary_share=0.5, matching_heads=1)), sample_tokens(1, 30)
    decoder = Decoder(model, 20)

    def places() -> list[int]:
        return [tensor.data_ptr() for tensor in (decoder.cache.lengths, *decoder.cache.tensors())]

    decoder.append(tokens[:, :17])
    decoder.last(tokens[:, 17:18])
    before = places()
    decoder.last(tokens[:, 18:19])
    decoder.last(tokens[:, 19:20])
    assert places() == before and len(steps) == 1
    decoder.grow(40)
    decoder.last(tokens[:, 20:22])  # not recorded
    before = places()
    decoder.last(tokens[:, 22:24])
    assert places() == before
    for at in range(24, 30):
        last = decoder.last(tokens[:, at : at + 1])
    torch.testing.assert_close(last, model(tokens)[:, -1], rtol=0, atol=1e-10)
    assert len(steps) == 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_token_by_token_equals_full_forward(variant: dict) -> None:
    model, tokens = build_model(tiny_config(**variant)), sample_tokens(2, LENGTH)
    full = model(tokens)
    for prefill in PREFILLS if not variant else (1, 9, 33):
        found = torch.stack(decode_in_chunks(model, [*tokens], [prefill, 1]))
        torch.testing.assert_close(found, full, rtol=0, atol=1e-10)


@pytest.mark.parametrize("variant", VARIANTS)
def test_sequences_of_any_lengths_in_chunks_of_any_sizes_equal_full_forward(variant: dict, step: None) -> None:
    """Whatever lay in the cache before."""
    model = build_model(tiny_config(**variant))
    texts = [sample_tokens(length, seed=length) for length in (70, 1, 33, 13, 13, 64, 8)]
    full = [model(text[None])[0] for text in texts]
    for chunks in ([7], [1, 13, 30], [40, 2, 3, 17], [100]):
        torch.testing.assert_close(decode_in_chunks(model, texts, chunks, poison=True), full, rtol=0, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "variant", [{}, {"selection_loss": 0.1, "indexer_block": 2, "matching_heads": 1}, {"attention": "dense"}]
)
def test_a_recorded_step_gives_what_torch_gives(variant: dict) -> None:
    """Through ends of blocks and of a ring, in float32, one sequence after another coming to its end."""
    nsa = NSAConfig(l=8, d=4, l_sel=16, n_sel=3, w=20)
    model = NSATransformer(tiny_config(d_k=16, d_v=32, nsa=nsa, **variant), dtype=torch.float32, device="cuda", seed=5)
    texts = [sample_tokens(length, seed=length).cuda() for length in (150, 75, 131)]
    decoders = [Decoder(model, 150, len(texts), backend=backend) for backend in ("torch", None)]
    assert decoders[1].cache.backend == "triton"
    for decoder in decoders:
        decoder.append(*pad_ragged([text[:70] for text in texts]))
    for at in range(70, 150):
        tokens, counts = pad_ragged([text[at : at + 1] for text in texts])
        by_torch, by_kernels = (decoder.append(tokens, counts) for decoder in decoders)
        inside = torch.tensor(counts, dtype=torch.bool)
        torch.testing.assert_close(by_kernels[inside], by_torch[inside], rtol=0, atol=1e-5)


def test_what_is_read_first_is_bounded_and_the_rest_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "FIRST", 40)
    monkeypatch.setattr(kv_cache_size, "STEP", 5)
    model, texts = build_model(tiny_config()), [sample_tokens(60), sample_tokens(21)]
    tokens, counts = pad_ragged(texts)
    widths: list[int] = []
    model.blocks[0].attention_norm.register_forward_hook(lambda _, inputs, __: widths.append(inputs[0].shape[1]))
    last = Decoder(model, 60, batch=2).last(tokens, counts)
    assert widths == [20, *[5] * 8]
    for row, text in enumerate(texts):
        torch.testing.assert_close(last[row], model(text[None])[0, -1], rtol=0, atol=1e-10)


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    """To the bit, at one shape; and a neighbour's NaN is its own."""
    model, text = build_model(tiny_config()), sample_tokens(50)
    by_itself = decode_in_chunks(model, [text, sample_tokens(50, seed=2)], [9])[0]
    model.embedding.weight.data[36] = float("nan")
    text = text.clamp_max(35)
    by_itself = decode_in_chunks(model, [text, sample_tokens(50, seed=2).clamp_max(35)], [9])[0]
    beside = decode_in_chunks(model, [text, torch.full((50,), 36)], [9])[0]
    assert torch.equal(by_itself, beside) and by_itself.isfinite().all()


@pytest.mark.parametrize("variant", [{}, INDEXED, {"attention": "dense"}])
def test_padding_may_stand_past_the_end_of_a_full_cache(variant: dict) -> None:
    """Two sequences that are full, or nearly, wait for a third."""
    model, texts = (
        build_model(tiny_config(**variant)),
        [sample_tokens(30), sample_tokens(29, seed=2), sample_tokens(30, seed=3)],
    )
    decoder = Decoder(model, 30, batch=3)
    decoder.append(*pad_ragged([texts[0], texts[1][:27], texts[2][:12]]))
    found = decoder.append(*pad_ragged([texts[0][:0], texts[1][27:], texts[2][12:19]]))
    torch.testing.assert_close(found[1, :2], model(texts[1][None])[0, 27:], rtol=0, atol=1e-10)
    found = torch.cat([found[2], *(decoder.append(texts[2][at].expand(3, 1), [0, 0, 1])[2] for at in range(19, 30))])
    torch.testing.assert_close(found, model(texts[2][None])[0, 12:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("variant", [NGRAMS, INDEXED | {"matching_heads": 1}, {"attention": "dense", "matching_heads": 1}])
def test_who_waits_for_whole_steps_of_others_loses_nothing(variant: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_size, "STEP", 5)
    model, texts = build_model(tiny_config(**variant)), [sample_tokens(41), sample_tokens(60, seed=2)]
    decoder = Decoder(model, 60, batch=2)
    decoder.append(*pad_ragged([texts[0][:30], texts[1][:23]]))
    decoder.append(*pad_ragged([texts[0][:0], texts[1][23:49]]))
    found = decoder.append(torch.stack([texts[0][30:], texts[1][49:]]))
    for row, text in enumerate(texts):
        torch.testing.assert_close(found[row], model(text[None])[0, -11:], rtol=0, atol=1e-10)


def test_sequences_change_places(step: None) -> None:
    texts = [sample_tokens(30), sample_tokens(14, seed=2), sample_tokens(21, seed=3)]
    model = build_model(tiny_config(rotary_share=0.5, matching_heads=1, **NGRAMS))
    decoder = Decoder(model, 40, batch=3)
    decoder.append(*pad_ragged(texts))
    decoder.cache.reorder([2, 0, 2])
    goes_on = sample_tokens(3, 6, seed=4)
    found = decoder.append(goes_on)
    for row, was in enumerate((2, 0, 2)):
        full = model(torch.cat([texts[was], goes_on[row]])[None])[0, -6:]
        torch.testing.assert_close(found[row], full, rtol=0, atol=1e-10)


@pytest.mark.parametrize("variant", [{}, INDEXED, {"attention": "dense"}])
def test_a_cache_that_grows_keeps_what_it_has(variant: dict) -> None:
    model, text = build_model(tiny_config(**variant)), sample_tokens(1, 40)
    decoder = Decoder(model, 13)
    parts = [decoder.append(text[:, :13])]
    for begin, end in ((13, 14), (14, 40)):
        decoder.grow(end)
        parts.append(decoder.append(text[:, begin:end]))
    torch.testing.assert_close(torch.cat(parts, dim=1), model(text), rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 7, pytest.param(64, marks=pytest.mark.soak), 500])
@pytest.mark.parametrize("variant", [{}, {"rotary_share": 0.5, "matching_heads": 1, **INDEXED}, {"attention": "dense"}])
def test_the_likeliest_tokens_of_long_ragged_batches_are_those_of_full_passes(variant: dict, chunk: int) -> None:
    """In float32, at every position; of two that are equal but for rounding, either."""
    nsa = NSAConfig(l=16, d=8, l_sel=32, n_sel=6, w=40)
    model = NSATransformer(tiny_config(nsa=nsa, **variant), seed=3)
    lengths = (3000, 1, 777, 64, 1500, 1500, 333, 2047) if chunk > 7 else (1, 300, 64, 301)
    texts = [sample_tokens(length, seed=length) for length in lengths]
    with torch.no_grad():
        for text, found in zip(texts, decode_in_chunks(model, texts, [chunk]), strict=True):
            full = model(text[None])[0]
            likeliest = full.gather(-1, found.argmax(-1, keepdim=True)).squeeze(-1)
            assert (full.amax(-1) - likeliest).max() < 2e-6
            assert (found.argmax(-1) != full.argmax(-1)).sum() <= 1


@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"attention": "dense", "matching_heads": 1} | NGRAMS,
        *(INDEXED | {"matching_heads": 2, "indexer_width": width} for width in (0, 4)),
    ],
)
@pytest.mark.parametrize("capacity", [1, 7, 8, 61])
def test_the_memory_of_a_cache_is_what_is_planned(variant: dict, capacity: int) -> None:
    config = tiny_config(**variant)
    held = sum(kept.nbytes for kept in cache.Cache(build_model(config), capacity, 3).tensors())
    assert held == 3 * kv_cache_size.compute_sequence_bytes(config, capacity, 8)
    far = 10**5 * config.nsa.d
    more = kv_cache_size.compute_sequence_bytes(config, 2 * far, 8) - kv_cache_size.compute_sequence_bytes(config, far, 8)
    assert more == far * kv_cache_size.compute_token_bytes(config, 8)


@pytest.mark.parametrize(("attention", "megabytes"), [("nsa", (12.6, 34.6, 60)), ("dense", (50, 403, 805))])
def test_reads_are_those_of_the_formula(attention: str, megabytes: tuple[float, ...]) -> None:
    """N(S) + n_sel * l_sel + w keys and values of two groups of 64 channels, in twelve layers, two bytes each."""
    config = ModelConfig(attention=attention)
    found = [kv_cache_size.compute_read_bytes(config, length, 2) / 1e6 for length in (8192, 65_536, 131_072)]
    assert found == pytest.approx(megabytes, rel=0.01)


def test_phi_is_computed_once_for_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(tiny_config(n_layers=1, nsa=TINY_NSA.model_copy(update={"phi": "linear"})))
    blocks: list[int] = []
    model.blocks[0].attention.phi_k.register_forward_hook(lambda _, __, out: blocks.append(out.shape[1]))
    decode_in_chunks(model, [sample_tokens(LENGTH)], [5, 1])
    assert [n for n in blocks if n] == [1] * ((LENGTH - TINY_NSA.l) // TINY_NSA.d + 1)


@pytest.mark.slow
@pytest.mark.parametrize("variant", KERNEL_VARIANTS)
def test_a_model_decodes_through_the_kernels(variant: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk behind the first one, then greedily: the tokens, and nearly the logits, that torch gives."""
    monkeypatch.setattr(launch_table, "DECODING_PROGRAMS", 8)  # interpreted one after another
    monkeypatch.setattr(launch_table, "MAX_LINEAR_ROWS", 20)  # the chunk's rows are more
    few, tile = launch_table.LinearTile(4, 64, 64, 4, 1), launch_table.linear_tile
    monkeypatch.setattr(launch_table, "linear_tile", lambda *given: few if given[1] <= 4 else tile(*given))
    calls, choose = [], launch.select_topk
    monkeypatch.setattr(launch, "choose", lambda *given: calls.append(given) or choose(*given))
    nsa = NSAConfig(l=8, d=4, l_sel=16, n_sel=3, w=20, phi=variant.get("phi", "avg"), gate=variant.get("gate", "sigmoid"))
    variant = {name: value for name, value in variant.items() if name not in ("phi", "gate")}
    model = NSATransformer(
        tiny_config(**{"d_k": 16, "d_v": 32, "nsa": nsa} | variant), dtype=torch.float32, device=DEVICE, seed=5
    )
    texts = [sample_tokens(length, seed=length).to(DEVICE) for length in (81, 74, 77)]
    decoders = [Decoder(model, 90, len(texts), backend=backend) for backend in ("torch", "triton")]
    for decoder in decoders:
        decoder.append(*pad_ragged([text[:70] for text in texts]))
    tokens, counts = pad_ragged([text[70:] for text in texts])
    for _ in range(4):
        by_torch, by_kernels = (decoder.last(tokens, counts) for decoder in decoders)
        torch.testing.assert_close(by_kernels, by_torch, rtol=0, atol=1e-5)
        tokens, counts = by_torch.argmax(-1, keepdim=True), None
        assert torch.equal(by_kernels.argmax(-1, keepdim=True), tokens)
    # On a GPU the single tokens were recorded: two rehearsals and the recording, three runs for three tokens.
    assert len(calls) == (4 * len(model.blocks) if model.config.attention == "nsa" else 0)


def test_a_compiler_that_aborts_over_the_kernels_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself a model decodes in torch then; asked for, the kernels are refused, before anything is compiled."""
    monkeypatch.setattr(triton, "__version__", "3.2.0")
    nsa = NSAConfig(l=8, d=4, l_sel=16, n_sel=3, w=20)
    for kind in ("nsa", "dense"):
        model = NSATransformer(
            tiny_config(attention=kind, d_k=16, d_v=16, nsa=nsa), dtype=torch.float32, device=DEVICE, seed=5
        )
        assert Decoder(model, 30).cache.backend == "torch"
        with pytest.raises(NotImplementedError, match=r"Triton 3.3 or newer.*compiler of 3.2.0"):
            Decoder(model, 30, backend="triton")


def test_a_backend_that_cannot_decode_a_model_is_refused_at_once() -> None:
    with pytest.raises(NotImplementedError, match="head widths in multiples of 16"):
        Decoder(NSATransformer(tiny_config(), device=DEVICE), 9, backend="triton")
    with pytest.raises(NotImplementedError, match=r"decoding, .*head widths in multiples of 16"):
        Decoder(NSATransformer(tiny_config(attention="dense"), device=DEVICE), 9, backend="triton")


@pytest.mark.parametrize(
    ("rows", "counts", "message"),
    [
        (torch.zeros(2, 5, dtype=torch.int64), None, "5 tokens do not fit into a decoder of capacity 4"),
        (torch.zeros(2, 3), None, "expected int64 [B, n], n >= 1, got torch.float32 (2, 3)"),
        (torch.zeros(2, 0, dtype=torch.int64), None, "n >= 1, got torch.int64 (2, 0)"),
        (torch.zeros(3, 1, dtype=torch.int64), None, "3 rows, 3 counts for a decoder of 2 sequences"),
        (torch.zeros(2, 2, dtype=torch.int64), [2], "2 rows, 1 counts for a decoder of 2 sequences"),
        (torch.full((2, 2), 37), None, "ids lie in 37..37, and the model has 0..36"),
        (torch.full((2, 2), -1), None, "ids lie in -1..-1"),
        (torch.zeros(2, 2, dtype=torch.int64), [1, 3], "counts = [1, 3]: expected numbers from 0 to 2"),
        (torch.zeros(2, 2, dtype=torch.int64), [1, 1], "cut padding that no row needs"),
        (torch.zeros(2, 2, dtype=torch.int64), [0, 2], "expected at least 1 token of each sequence"),
    ],
)
def test_what_a_decoder_cannot_read_is_explained(rows: Tensor, counts: list[int] | None, message: str) -> None:
    decoder = Decoder(build_model(tiny_config(n_layers=1)), 4, batch=2)
    with pytest.raises(ValueError, match=re.escape(message)):
        decoder.last(rows, counts)


def test_a_batch_that_does_not_fit_says_how_many_would(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(tiny_config())
    each = kv_cache_size.compute_sequence_bytes(model.config, 100, 8)
    monkeypatch.setattr(kv_cache_size, "get_free_bytes", lambda device: 3 * each + 1)
    Decoder(model, 100, batch=3)
    with pytest.raises(ConfigError, match=r"a cache of 4 sequences of 100 tokens takes .*; 3 would fit: give 3 sequences"):
        Decoder(model, 100, batch=4)
    monkeypatch.setattr(kv_cache_size, "get_free_bytes", lambda device: each - 1)
    with pytest.raises(ConfigError, match="0 would fit: give fewer tokens"):
        Decoder(model, 100)


def test_what_fits_is_what_the_weights_leave_and_an_indexer_is_read() -> None:
    config = ModelConfig()
    each = kv_cache_size.compute_sequence_bytes(config, 8192, 2)
    said = kv_cache_size.format_decoding_estimate(config, each, 5 * each, [8192]).splitlines()
    (line,) = [line for line in said if line.strip().startswith("8,192")]
    assert " 3 " in line, "two caches' worth are weights, of 2 bytes each"
    more = kv_cache_size.compute_read_bytes(ModelConfig(selection_loss=0.1, indexer_block=16), 8192, 2)
    assert more - kv_cache_size.compute_read_bytes(config, 8192, 2) == 12 * (8192 // 16) * 2 * 64 * 2
