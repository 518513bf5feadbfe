"""Decoding with a cache gives the logits of a full forward pass, at every offset of blocks and windows."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import triton
from looping import looped
from tiny_models import TINY_NSA, build_model, tiny_config
from torch import Tensor

from nsa_lab.attention.kernels.decoding import decoding_table, launch
from nsa_lab.config import ConfigError, ModelConfig, NSAConfig
from nsa_lab.inference import Decoder, cache, decode, decode_graph, kv_cache_size
from nsa_lab.inference.decode_graph import DecodeGraph
from nsa_lab.model import NSATransformer

# Around every boundary: d, l, l_sel, w, n_sel * l_sel.
PREFILLS = (1, 3, 4, 7, 8, 9, 11, 12, 13, 16, 31, 32, 33, 47)
LENGTH = 48
GEOMETRIES = [
    NSAConfig(l=6, d=3, l_sel=9, n_sel=3, w=1),
    NSAConfig(l=5, d=5, l_sel=5, n_sel=5, w=7),
    NSAConfig(l=4, d=4, l_sel=12, n_sel=3, w=31),
    NSAConfig(l=12, d=2, l_sel=4, n_sel=6, w=3),
    NSAConfig(l=1, d=1, l_sel=1, n_sel=3, w=2),
]
# Kernels run on the GPU, or in the interpreter without one.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INDEXED = {"d_k": 8, "selection_loss": 0.1, "indexer_block": 2}
NGRAMS = {"ngrams": 4, "ngram_rows": 100, "ngram_width": 5}
KERNEL_VARIANTS = [
    pytest.param({}, marks=pytest.mark.nightly),
    pytest.param({"selection_loss": 0.1, "indexer_block": 2}, marks=pytest.mark.nightly),
    {"selection_loss": 0.1, "indexer_block": 2, "matching_heads": 1, "rotary_share": 0.5, "mlp": "gated", "phi": "pool"},
    pytest.param(
        {
            "d_k": 32,
            "rotary_share": 0.5,
            "matching_heads": 1,
            "selection_loss": 0.1,
            "indexer_block": 1,
            "indexer_width": 16,
        },
        marks=pytest.mark.nightly,
    ),
    {"matching_heads": 2, "phi": "mlp", "gate": "softmax", "silent": ("win",)},
    pytest.param({"matching_heads": 1, "rotary_share": 0.5, "attention": "dense"}, marks=pytest.mark.nightly),
    pytest.param(NGRAMS, marks=pytest.mark.nightly),
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
    """Return padded rows and their lengths, as a decoder takes them."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), [len(row) for row in rows]


def decode_in_chunks(model: NSATransformer, texts: list[Tensor], chunks: list[int], poison: bool = False) -> list[Tensor]:
    """Return the logits of every text, decoded as one batch in chunks of `chunks[i]` tokens; the last size repeats."""
    decoder = Decoder(model, max(map(len, texts)), batch=len(texts))
    if poison:
        for tensor in decoder.cache.tensors():
            tensor.fill_(float("nan") if tensor.is_floating_point() else -(10**12))
    start, logits_by_row = 0, [[] for _ in texts]
    while start < max(map(len, texts)):
        size = chunks.pop(0) if len(chunks) > 1 else chunks[0]
        tokens, counts = pad_ragged([text[start : start + size] for text in texts])
        logits = decoder.append(tokens, counts)
        for row, count in enumerate(counts):
            logits_by_row[row].append(logits[row, :count])
        start += size
    return [torch.cat(parts) for parts in logits_by_row]


@pytest.fixture(params=[5, pytest.param(256, marks=pytest.mark.nightly)], ids="steps of {}".format)
def step(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_size, "MAX_STEP_TOKENS", request.param)


def run_without_graph(run: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """Replace `capture_graph`, which needs a GPU: run the step eagerly, with a warmup run on padding."""
    run()
    result = run()
    return lambda: result.copy_(run()), result


@pytest.mark.slow
@looped
@pytest.mark.parametrize("variant", [VARIANTS[0], *VARIANTS[7:11], *VARIANTS[-5::2]])
def test_graph_step_equals_full_forward(variant: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the captured function eagerly: at lengths that complete blocks, and over the padding of the warmup runs."""

    monkeypatch.setattr(decode, "can_capture", lambda cache: True)
    monkeypatch.setattr(decode_graph, "capture_graph", run_without_graph)
    graphs: list[DecodeGraph] = []
    monkeypatch.setattr(decode, "DecodeGraph", lambda *args: graphs.append(DecodeGraph(*args)) or graphs[-1])
    model = build_model(tiny_config(**variant))
    texts = [sample_tokens(length, seed=length) for length in (47, 23, 8)]
    for text, logits in zip(texts, decode_in_chunks(model, texts, [7, 1], poison=True), strict=True):
        torch.testing.assert_close(logits, model(text[None])[0], rtol=0, atol=1e-10)
    assert len(graphs) == 1


@pytest.mark.slow
def test_graph_step_with_padding_for_waiting_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiting sequence gets padding, which leaves no trace, in convolutions neither."""
    monkeypatch.setattr(decode, "can_capture", lambda cache: True)
    monkeypatch.setattr(decode_graph, "capture_graph", run_without_graph)
    model, texts = build_model(tiny_config(**INDEXED, matching_heads=1)), sample_tokens(2, 30)
    decoder = Decoder(model, 30, batch=2)
    decoder.append(texts[:, :11])
    for position in range(11, 30):
        for row in (0, 1):
            tokens = torch.full((2, 1), 36)
            tokens[row] = texts[row, position]
            logits = decoder.append(tokens, [1 - row, row])[row, 0]
            torch.testing.assert_close(logits, model(texts[row : row + 1, : position + 1])[0, -1], rtol=0, atol=1e-10)


def test_sequence_may_start_after_the_others() -> None:
    """Cache contents before its first token have no effect."""
    model, texts = (
        build_model(tiny_config(**INDEXED, **NGRAMS, matching_heads=1)),
        [sample_tokens(17, seed=1), sample_tokens(9, seed=2)],
    )
    decoder = Decoder(model, 20, batch=2)
    for tensor in decoder.cache.tensors():
        tensor.fill_(7)
    decoder.append(*pad_ragged([texts[0][:8], texts[1][:0]]))
    logits = decoder.append(*pad_ragged([texts[0][8:], texts[1]]))
    for row, text in enumerate(texts):
        expected = model(text[None])[0]
        torch.testing.assert_close(logits[row, :9], expected[-9:], rtol=0, atol=1e-10)


def test_cache_tensors_keep_their_addresses_until_the_cache_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "can_capture", lambda cache: True)
    monkeypatch.setattr(decode_graph, "capture_graph", run_without_graph)
    graphs: list[DecodeGraph] = []
    monkeypatch.setattr(decode, "DecodeGraph", lambda *args: graphs.append(DecodeGraph(*args)) or graphs[-1])
    model, tokens = build_model(tiny_config(rotary_share=0.5, matching_heads=1)), sample_tokens(1, 30)
    decoder = Decoder(model, 20)

    def get_addresses() -> list[int]:
        return [tensor.data_ptr() for tensor in (decoder.cache.lengths, *decoder.cache.tensors())]

    decoder.append(tokens[:, :17])
    decoder.last(tokens[:, 17:18])
    before = get_addresses()
    decoder.last(tokens[:, 18:19])
    decoder.last(tokens[:, 19:20])
    assert get_addresses() == before and len(graphs) == 1
    decoder.grow(40)
    decoder.last(tokens[:, 20:22])  # not a graph step
    before = get_addresses()
    decoder.last(tokens[:, 22:24])
    assert get_addresses() == before
    for position in range(24, 30):
        logits = decoder.last(tokens[:, position : position + 1])
    torch.testing.assert_close(logits, model(tokens)[:, -1], rtol=0, atol=1e-10)
    assert len(graphs) == 2


def test_repeated_steps_keep_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "can_capture", lambda cache: True)
    monkeypatch.setattr(decode_graph, "capture_graph", run_without_graph)
    decoder, tokens = Decoder(build_model(tiny_config()), 20), sample_tokens(1, 10)
    decoder.append(tokens)
    assert not decoder.repeat_step(1), "no step was captured"
    decoder.last(tokens[:, :1])
    assert decoder.repeat_step(5) and decoder.cache.lengths.tolist() == [11] == [*decoder.cache.starts]


@pytest.mark.slow
@looped
@pytest.mark.parametrize("variant", VARIANTS)
def test_token_by_token_equals_full_forward(variant: dict) -> None:
    model, tokens = build_model(tiny_config(**variant)), sample_tokens(2, LENGTH)
    full = model(tokens)
    for prefill in PREFILLS if not variant else (1, 33):
        logits = torch.stack(decode_in_chunks(model, [*tokens], [prefill, 1]))
        torch.testing.assert_close(logits, full, rtol=0, atol=1e-10)


@pytest.mark.slow
@looped
@pytest.mark.parametrize("variant", VARIANTS)
def test_ragged_sequences_in_chunks_equal_full_forward(variant: dict, step: None) -> None:
    """With NaN in the cache before."""
    model = build_model(tiny_config(**variant))
    texts = [sample_tokens(length, seed=length) for length in (49, 1, 33, 13, 13, 8)]
    full = [model(text[None])[0] for text in texts]
    for chunks in ([7], [1, 13, 30], [40]):
        torch.testing.assert_close(decode_in_chunks(model, texts, chunks, poison=True), full, rtol=0, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "variant", [{}, {"selection_loss": 0.1, "indexer_block": 2, "matching_heads": 1}, {"attention": "dense"}]
)
def test_graph_step_equals_torch(variant: dict) -> None:
    """Across block and ring boundaries, in float32; the sequences end at different steps."""
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


def test_prefill_is_limited_and_followed_by_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "MAX_PREFILL_TOKENS", 40)
    monkeypatch.setattr(kv_cache_size, "MAX_STEP_TOKENS", 5)
    model, texts = build_model(tiny_config()), [sample_tokens(60), sample_tokens(21)]
    tokens, counts = pad_ragged(texts)
    widths: list[int] = []
    model.blocks[0].attention_norm.register_forward_hook(lambda _, inputs, __: widths.append(inputs[0].shape[1]))
    last = Decoder(model, 60, batch=2).last(tokens, counts)
    assert widths == [20, *[5] * 8]
    for row, text in enumerate(texts):
        torch.testing.assert_close(last[row], model(text[None])[0, -1], rtol=0, atol=1e-10)


def test_sequence_does_not_depend_on_the_rest_of_the_batch() -> None:
    """Bitwise, for equal shapes; and NaN in another sequence has no effect."""
    model, text = build_model(tiny_config()), sample_tokens(50)
    first = decode_in_chunks(model, [text, sample_tokens(50, seed=2)], [9])[0]
    model.embedding.weight.data[36] = float("nan")
    text = text.clamp_max(35)
    first = decode_in_chunks(model, [text, sample_tokens(50, seed=2).clamp_max(35)], [9])[0]
    with_nan = decode_in_chunks(model, [text, torch.full((50,), 36)], [9])[0]
    assert torch.equal(first, with_nan) and first.isfinite().all()


@pytest.mark.parametrize("variant", [{}, INDEXED, {"attention": "dense"}])
def test_padding_beyond_a_full_cache(variant: dict) -> None:
    """Two sequences that are full, or nearly full, wait for a third."""
    model, texts = (
        build_model(tiny_config(**variant)),
        [sample_tokens(30), sample_tokens(29, seed=2), sample_tokens(30, seed=3)],
    )
    decoder = Decoder(model, 30, batch=3)
    decoder.append(*pad_ragged([texts[0], texts[1][:27], texts[2][:12]]))
    logits = decoder.append(*pad_ragged([texts[0][:0], texts[1][27:], texts[2][12:19]]))
    torch.testing.assert_close(logits[1, :2], model(texts[1][None])[0, 27:], rtol=0, atol=1e-10)
    logits = torch.cat([logits[2], *(decoder.append(texts[2][at].expand(3, 1), [0, 0, 1])[2] for at in range(19, 30))])
    torch.testing.assert_close(logits, model(texts[2][None])[0, 12:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("variant", [NGRAMS, INDEXED | {"matching_heads": 1}, {"attention": "dense", "matching_heads": 1}])
def test_sequence_that_waits_for_whole_steps(variant: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache_size, "MAX_STEP_TOKENS", 5)
    model, texts = build_model(tiny_config(**variant)), [sample_tokens(41), sample_tokens(60, seed=2)]
    decoder = Decoder(model, 60, batch=2)
    decoder.append(*pad_ragged([texts[0][:30], texts[1][:23]]))
    decoder.append(*pad_ragged([texts[0][:0], texts[1][23:49]]))
    logits = decoder.append(torch.stack([texts[0][30:], texts[1][49:]]))
    for row, text in enumerate(texts):
        torch.testing.assert_close(logits[row], model(text[None])[0, -11:], rtol=0, atol=1e-10)


def test_reorder(step: None) -> None:
    texts = [sample_tokens(30), sample_tokens(14, seed=2), sample_tokens(21, seed=3)]
    model = build_model(tiny_config(rotary_share=0.5, matching_heads=1, **NGRAMS))
    decoder = Decoder(model, 40, batch=3)
    decoder.append(*pad_ragged(texts))
    decoder.cache.reorder([2, 0, 2])
    continuation = sample_tokens(3, 6, seed=4)
    logits = decoder.append(continuation)
    for row, source in enumerate((2, 0, 2)):
        full = model(torch.cat([texts[source], continuation[row]])[None])[0, -6:]
        torch.testing.assert_close(logits[row], full, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", [{}, INDEXED | NGRAMS | {"matching_heads": 1}, {"attention": "dense", "matching_heads": 1}]
)
def test_removed_tokens_leave_no_trace(variant: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are appended and removed at random, padding included. What the rings cannot restore is refused."""
    monkeypatch.setattr(kv_cache_size, "MAX_STEP_TOKENS", 6)
    model, generator = build_model(tiny_config(**variant)), torch.Generator().manual_seed(0)
    texts, refusals = [sample_tokens(30), sample_tokens(24, seed=2)], 0
    decoder = Decoder(model, 400, batch=2)
    decoder.append(*pad_ragged(texts))
    for round_ in range(60):
        n_removed = int(torch.randint(0, 9, (), generator=generator))
        try:
            decoder.crop(n_removed)
            texts = [text[: len(text) - n_removed] for text in texts]
        except NotImplementedError as error:
            refusals += 1
            assert n_removed > 1 and re.search(r"crop: expected at most 6 tokens, .* got \d+, padding included", str(error))
        new = sample_tokens(2, 1 + round_ % 5, seed=round_)
        counts = [new.shape[1], max(new.shape[1] - round_ % 3, 0)]
        logits = decoder.append(new, counts)
        texts = [torch.cat([text, row[:count]]) for text, row, count in zip(texts, new, counts, strict=True)]
        for row, count, text in zip(logits, counts, texts, strict=True):
            torch.testing.assert_close(row[:count], model(text[None])[0, len(text) - count :], rtol=0, atol=1e-10)
    assert 5 < refusals < 40
    for n_tokens in (-1, min(decoder.cache.starts) + 1):
        with pytest.raises(ValueError, match=re.escape(f"crop: expected 0 to {list(decoder.cache.starts)} tokens")):
            decoder.crop(n_tokens)


@pytest.mark.parametrize("variant", [{}, INDEXED, {"attention": "dense"}])
def test_grow_keeps_the_contents(variant: dict) -> None:
    model, text = build_model(tiny_config(**variant)), sample_tokens(1, 40)
    decoder = Decoder(model, 13)
    parts = [decoder.append(text[:, :13])]
    for start, end in ((13, 14), (14, 40)):
        decoder.grow(end)
        parts.append(decoder.append(text[:, start:end]))
    torch.testing.assert_close(torch.cat(parts, dim=1), model(text), rtol=0, atol=1e-10)


@pytest.mark.slow
@looped
@pytest.mark.parametrize("chunk", [1, 7, pytest.param(64, marks=pytest.mark.nightly), 500])
@pytest.mark.parametrize("variant", [{}, {"rotary_share": 0.5, "matching_heads": 1, **INDEXED}, {"attention": "dense"}])
def test_most_likely_tokens_of_long_ragged_batches_equal_full_forward(variant: dict, chunk: int) -> None:
    """In float32, at every position; tokens tied within rounding may differ."""
    nsa = NSAConfig(l=16, d=8, l_sel=32, n_sel=6, w=40)
    model = NSATransformer(tiny_config(nsa=nsa, **variant), seed=3)
    lengths = {64: (3000, 1, 777, 64, 1500, 1500, 333, 2047), 500: (1203, 1, 333, 777)}.get(chunk, (1, 64, 231))
    texts = [sample_tokens(length, seed=length) for length in lengths]
    with torch.no_grad():
        for text, logits in zip(texts, decode_in_chunks(model, texts, [chunk]), strict=True):
            full = model(text[None])[0]
            selected_logits = full.gather(-1, logits.argmax(-1, keepdim=True)).squeeze(-1)
            assert (full.amax(-1) - selected_logits).max() < 2e-6
            assert (logits.argmax(-1) != full.argmax(-1)).sum() <= 1


@looped
@pytest.mark.parametrize(
    "variant",
    [
        {},
        {"attention": "dense", "matching_heads": 1} | NGRAMS,
        *(INDEXED | {"matching_heads": 2, "indexer_width": width} for width in (0, 4)),
    ],
)
@pytest.mark.parametrize("capacity", [1, 7, 8, 61])
def test_allocated_bytes_equal_the_formula(variant: dict, capacity: int) -> None:
    config = tiny_config(**variant)
    allocated = sum(tensor.nbytes for tensor in cache.Cache(build_model(config), capacity, 3).tensors())
    assert allocated == 3 * kv_cache_size.compute_sequence_bytes(config, capacity, 8)
    length = 10**5 * config.nsa.d
    difference = kv_cache_size.compute_sequence_bytes(config, 2 * length, 8) - kv_cache_size.compute_sequence_bytes(
        config, length, 8
    )
    assert difference == length * kv_cache_size.compute_token_bytes(config, 8)


@pytest.mark.parametrize(("attention", "megabytes"), [("nsa", (12.6, 34.6, 60)), ("dense", (50, 403, 805))])
def test_read_bytes_equal_the_formula(attention: str, megabytes: tuple[float, ...]) -> None:
    """N(S) + n_sel * l_sel + w keys and values, 2 groups of 64 channels, 12 layers, 2 bytes per element."""
    config = ModelConfig(attention=attention)
    measured = [kv_cache_size.compute_read_bytes(config, length, 2) / 1e6 for length in (8192, 65_536, 131_072)]
    assert measured == pytest.approx(megabytes, rel=0.01)


def test_phi_is_computed_once_per_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(tiny_config(n_layers=1, nsa=TINY_NSA.model_copy(update={"phi": "linear"})))
    blocks: list[int] = []
    model.blocks[0].attention.phi_k.register_forward_hook(lambda _, __, out: blocks.append(out.shape[1]))
    decode_in_chunks(model, [sample_tokens(LENGTH)], [5, 1])
    assert [n for n in blocks if n] == [1] * ((LENGTH - TINY_NSA.l) // TINY_NSA.d + 1)


@pytest.mark.slow
@looped
@pytest.mark.parametrize("variant", KERNEL_VARIANTS)
def test_decoding_with_triton_equals_torch(variant: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode a second chunk, then greedily: equal tokens, and logits within 1e-5."""
    monkeypatch.setattr(decoding_table, "DECODING_PROGRAMS", 8)  # the interpreter runs programs sequentially
    monkeypatch.setattr(decoding_table, "MAX_LINEAR_ROWS", 20)  # fewer than the rows of the chunk
    small_tile, tile = decoding_table.LinearTile(4, 64, 64, 4, 1), decoding_table.linear_tile
    monkeypatch.setattr(decoding_table, "linear_tile", lambda *args: small_tile if args[1] <= 4 else tile(*args))
    calls, merge_parts = [], launch.merge_parts
    monkeypatch.setattr(launch, "merge_parts", lambda *args: calls.append(args) or merge_parts(*args))
    nsa = NSAConfig(l=8, d=4, l_sel=16, n_sel=3, w=20, phi=variant.get("phi", "avg"), gate=variant.get("gate", "sigmoid"))
    variant = {name: value for name, value in variant.items() if name not in ("phi", "gate")}
    model = NSATransformer(
        tiny_config(**{"n_layers": 1, "d_k": 16, "d_v": 32, "nsa": nsa} | variant),
        dtype=torch.float32,
        device=DEVICE,
        seed=5,
    )
    texts = [sample_tokens(length, seed=length).to(DEVICE) for length in (57, 50, 53)]
    decoders = [Decoder(model, 90, len(texts), backend=backend) for backend in ("torch", "triton")]
    for decoder in decoders:
        decoder.append(*pad_ragged([text[:46] for text in texts]))
    tokens, counts = pad_ragged([text[46:] for text in texts])
    for _ in range(3):
        by_torch, by_kernels = (decoder.last(tokens, counts) for decoder in decoders)
        torch.testing.assert_close(by_kernels, by_torch, rtol=0, atol=1e-5)
        tokens, counts = by_torch.argmax(-1, keepdim=True), None
        assert torch.equal(by_kernels.argmax(-1, keepdim=True), tokens)
    # On a GPU the two single tokens used a graph: two warmup runs and the capture are three runs.
    assert len(calls) == (4 if DEVICE == "cuda" else 3) * len(model.blocks)


def test_triton_version_that_fails_on_the_kernels_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default the model then decodes with torch; triton by name is rejected before any compilation."""
    monkeypatch.setattr(triton, "__version__", "3.2.0")
    nsa = NSAConfig(l=8, d=4, l_sel=16, n_sel=3, w=20)
    for attention in ("nsa", "dense"):
        model = NSATransformer(
            tiny_config(attention=attention, d_k=16, d_v=16, nsa=nsa), dtype=torch.float32, device=DEVICE, seed=5
        )
        assert Decoder(model, 30).cache.backend == "torch"
        with pytest.raises(NotImplementedError, match=r"Triton 3.3 or newer.*compiler of 3.2.0"):
            Decoder(model, 30, backend="triton")


def test_unsupported_backend_is_rejected_at_construction() -> None:
    with pytest.raises(NotImplementedError, match="head widths in multiples of 16"):
        Decoder(NSATransformer(tiny_config(), device=DEVICE), 9, backend="triton")
    with pytest.raises(NotImplementedError, match=r"decoding, .*head widths in multiples of 16"):
        Decoder(NSATransformer(tiny_config(attention="dense"), device=DEVICE), 9, backend="triton")


@looped
@pytest.mark.parametrize(
    ("rows", "counts", "message"),
    [
        (torch.zeros(2, 5, dtype=torch.int64), None, "5 tokens do not fit in a decoder of capacity 4"),
        (torch.zeros(2, 3), None, "expected int64 [B, n], n >= 1, got torch.float32 (2, 3)"),
        (torch.zeros(2, 0, dtype=torch.int64), None, "n >= 1, got torch.int64 (2, 0)"),
        (
            torch.zeros(3, 1, dtype=torch.int64),
            None,
            "expected 2 rows and counts, one per sequence, got 3 rows and 3 counts",
        ),
        (
            torch.zeros(2, 2, dtype=torch.int64),
            [2],
            "expected 2 rows and counts, one per sequence, got 2 rows and 1 counts",
        ),
        (torch.full((2, 2), 37), None, "expected ids in 0..36, got 37..37"),
        (torch.full((2, 2), -1), None, "got -1..-1"),
        (torch.zeros(2, 2, dtype=torch.int64), [1, 3], "counts = [1, 3]: expected numbers from 0 to 2"),
        (torch.zeros(2, 2, dtype=torch.int64), [1, 1], "remove padding columns that no row needs"),
        (torch.zeros(2, 2, dtype=torch.int64), [0, 2], "expected at least 1 token per sequence"),
    ],
)
def test_invalid_tokens_are_rejected(rows: Tensor, counts: list[int] | None, message: str) -> None:
    decoder = Decoder(build_model(tiny_config(n_layers=1)), 4, batch=2)
    with pytest.raises(ValueError, match=re.escape(message)):
        decoder.last(rows, counts)


def test_cache_that_does_not_fit_reports_how_many_sequences_would(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(tiny_config())
    sequence_bytes = kv_cache_size.compute_sequence_bytes(model.config, 100, 8)
    monkeypatch.setattr(kv_cache_size, "get_free_bytes", lambda device: 3 * sequence_bytes + 1)
    Decoder(model, 100, batch=3)
    with pytest.raises(ConfigError, match=r"a cache of 4 sequences of 100 tokens needs .*; 3 would fit: use at most 3"):
        Decoder(model, 100, batch=4)
    monkeypatch.setattr(kv_cache_size, "get_free_bytes", lambda device: sequence_bytes - 1)
    with pytest.raises(ConfigError, match="0 would fit: use fewer tokens"):
        Decoder(model, 100)


def test_decoding_estimate_subtracts_weights_and_counts_the_indexer() -> None:
    config = ModelConfig()
    sequence_bytes = kv_cache_size.compute_sequence_bytes(config, 8192, 2)
    lines = kv_cache_size.format_decoding_estimate(config, sequence_bytes, 5 * sequence_bytes, [8192]).splitlines()
    (line,) = [line for line in lines if line.strip().startswith("8,192")]
    assert " 3 " in line, "the weights use the memory of two caches"
    with_indexer = kv_cache_size.compute_read_bytes(ModelConfig(selection_loss=0.1, indexer_block=16), 8192, 2)
    assert with_indexer - kv_cache_size.compute_read_bytes(config, 8192, 2) == 12 * (8192 // 16) * 2 * 64 * 2
