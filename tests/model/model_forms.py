"""Random forms of the attention layer, and their comparison with the brute force, also in decoding and for documents.

python tests/model/model_forms.py 300    compare 300 forms
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("", "attention", "model")]

import brute_force
from model_inputs import make_tokens

from nsa_lab.attention import Span, geometry
from nsa_lab.attention.key_storage import decode_keys
from nsa_lab.config import ModelConfig, NSAConfig
from nsa_lab.inference import Decoder, kv_cache_size
from nsa_lab.inference.cache import Cache
from nsa_lab.inference.cache.attention_cache import NSACache
from nsa_lab.model import NSATransformer

BRANCHES = ("cmp", "sel", "win")
NOISE_SHARE = 1e-4  # of the largest gradient of a model; float32 rounds to 6e-8
INDEX_ORDERS = [
    order for steps in (("rotate", "pool"), ("rotate", "pool", "norm")) for order in itertools.permutations(steps)
]


def to_brute_force_model(model: NSATransformer) -> brute_force.Model:
    c, n = model.config, model.config.nsa
    rule = n.sink_blocks, n.local_blocks, n.head_reduction, n.block_reduction
    return brute_force.Model(
        c.n_heads,
        c.n_kv_groups,
        c.d_k,
        c.d_v,
        c.rope_theta,
        c.norm_eps,
        brute_force.Geometry(n.l, n.d, n.l_sel, n.n_sel, n.w, *rule),
        n.gate,
        n.phi,
        c.mlp == "gated",
        {name: x.numpy() for name, x in model.state_dict().items()},
        c.rotary_width,
        embedding_norm=c.embedding_norm,
        indexer=c.indexer_block,
        indexer_width=c.index_width,
        ngrams=(c.ngrams, c.ngram_rows),
        branches=c.branches,
        shared_kv=c.shared_kv,
        mean_keys=c.scores == "mean_key",
        index_heads=c.indexer_heads,
        index_groups=c.index_groups,
        index_order=c.indexer_order,
        indexer_every=c.indexer_every,
        index_format=c.indexer_dtype,
    )


def make_form(seed: int, **fixed: Any) -> ModelConfig:
    """Return a random configuration of three layers. `fixed`: keys of the model that are given."""
    draw = random.Random(f"form {seed}")
    branches = tuple(name for name in BRANCHES if draw.random() < 0.6) or ("sel",)
    d, l_sel = draw.choice([(1, 3), (2, 4), (2, 8), (3, 6), (4, 8)])
    sink, local = draw.choice([0, 1, 1, 2]), draw.choice([1, 2, 3])
    scores = None
    if "sel" in branches:
        scores = draw.choice(["mean_key", "indexer", "indexer", *["compressed"] * ("cmp" in branches)])
    groups, heads, rotary_share = draw.choice([1, 2]), draw.choice([1, 2, 3]), draw.choice([1.0, 0.5])
    d_k = draw.choice([4, 8, 12, 16])
    model: dict[str, Any] = {
        "dim": 20,
        "n_layers": 3,
        "n_heads": groups * heads,
        "n_kv_groups": groups,
        "d_k": d_k,
        "d_v": draw.choice([3, 4, 5]),
        "vocab_size": 40,
        "branches": branches,
        "shared_kv": draw.random() < 0.4,
        "matching_heads": draw.choice([0, 0, 1]),
        "rotary_share": rotary_share,
        "nsa": NSAConfig(
            l=d * draw.choice([1, 2, 3]),
            d=d,
            l_sel=l_sel,
            n_sel=sink + local + draw.choice([0, 1, 2]),
            w=draw.choice([1, 4, 7]),
            phi=draw.choice(["avg", "linear", "mlp"]),
            gate=draw.choice(["sigmoid", "softmax"]),
            sink_blocks=sink,
            local_blocks=local,
            scores=scores,
            head_reduction=draw.choice(["sum", "max"]),
            block_reduction=draw.choice(["sum", "max"]),
        ),
    }
    if scores == "indexer":
        rotary = int(d_k * rotary_share)
        widths = [n for n in range(2, d_k + 1, 2) if d_k % n == 0 and rotary * n % (2 * d_k) == 0]
        model |= {
            "selection_loss": 0.05,
            "indexer_block": draw.choice([n for n in range(1, l_sel + 1) if l_sel % n == 0]),
            "indexer_width": draw.choice(widths),
            "indexer_heads": draw.choice([1, 2, 4]),
            "indexer_keys": draw.choice(["group", "shared"]),
            "indexer_order": draw.choice(INDEX_ORDERS),
            "indexer_every": draw.choice([1, 2, 3]),
            "indexer_dtype": draw.choice(["bf16", "fp8", "mxfp4"]),
        }
    return ModelConfig(**(model | fixed))


def make_kernel_form(seed: int) -> ModelConfig:
    """Return a random configuration of a shape that the Triton kernels support."""
    config = make_form(seed)
    nsa: dict[str, Any] = {"l": 8, "d": random.Random(seed).choice([4, 8]), "l_sel": 16}
    model: dict[str, Any] = {"d_k": 32, "d_v": 16, "rotary_share": 1.0}
    if config.scores == "compressed" and nsa["d"] == 4:
        nsa["block_reduction"] = "sum"
    if config.has_indexer:
        block = random.Random(seed).choice([1, 2, 4, 16])
        model |= {"indexer_block": block, "indexer_width": 32 if config.index_width == config.d_k else 16}
    values = config.model_dump(exclude_unset=True) | model
    return ModelConfig.model_validate(values | {"nsa": NSAConfig(**(config.nsa.model_dump() | nsa))})


@contextmanager
def use_float64_rotary() -> Iterator[None]:
    """Compute RoPE tables in float64: with float32 tables, index keys can be rounded to other values."""

    def compute(positions: Tensor, width: int, theta: float, scaling: None = None) -> tuple[Tensor, Tensor]:
        angle = positions.double()[..., None] * theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        return angle.cos(), angle.sin()

    with mock.patch("nsa_lab.model.layers.compute_rotary", compute):
        yield


def build_model(config: ModelConfig, backend: str = "torch", seed: int = 0) -> NSATransformer:
    """Return a model in float64 without symmetries of the initial weights."""
    model = NSATransformer(config, backend=backend, dtype=torch.float64, seed=seed).double()
    with torch.no_grad():
        for i, x in enumerate(model.parameters()):
            x.add_(0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(i), dtype=x.dtype))
    return model


def compute_error(a: Tensor | np.ndarray, b: Tensor | np.ndarray, least: float = 0.0) -> float:
    """Return the largest difference, relative to the largest value of b, or to `least` if that is larger. NaN stays NaN."""
    a, b = np.asarray(a), np.asarray(b)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), least))


def compute_errors(config: ModelConfig, length: int = 31) -> dict[str, float]:
    """Return the errors of logits by backend, of decoding, of packed documents and of a directional derivative."""
    tokens, errors, draw = make_tokens(config, length), {}, random.Random(length)
    with use_float64_rotary():
        model = build_model(config)
        plain = to_brute_force_model(model)
        expected = brute_force.logits(tokens.numpy(), plain, config.n_layers)
        with torch.no_grad():
            for backend in ("reference", "torch"):
                errors[backend] = compute_error(build_model(config, backend)(tokens), expected)
            errors["decoding"] = compute_error(decode(model, tokens, draw), expected)
            lengths = [0, *sorted(draw.choices(range(length), k=3)), length]
            span = Span.packed(torch.tensor(lengths, dtype=torch.int32), draw.choice([None, 6]))
            documents = [tokens[:1, a:b].numpy() for a, b in itertools.pairwise(lengths) if b > a]
            parts = [brute_force.logits(document, plain, config.n_layers) for document in documents]
            for backend in ("reference", "torch"):
                out = build_model(config, backend)(tokens[:1], span)
                errors[f"packed, {backend}"] = compute_error(out, np.concatenate(parts, 1))
        errors["gradients"] = compute_gradient_error(model, tokens[:1])
    return errors


def decode(model: NSATransformer, tokens: Tensor, draw: random.Random, backend: str | None = None) -> Tensor:
    """Return the logits of tokens [B, T] that are appended in random chunks to a cache without defined contents.

    Chunks have other lengths in every sequence, and the cache grows.
    """
    B, T = tokens.shape
    decoder, logits = Decoder(model, T // 2, batch=B, backend=backend), [list[Tensor]() for _ in range(B)]
    poison(decoder.cache)
    starts = [0] * B
    while min(starts) < T:
        width = draw.choice([1, 2, 3, 10])
        counts = [min(draw.randint(width // 2 + 1, width), T - start) for start in starts]
        chunk = torch.zeros(B, max(counts), dtype=torch.int64)
        for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
            chunk[row, :count] = tokens[row, start : start + count]
        if max(starts) + chunk.shape[1] > decoder.cache.capacity:
            decoder.grow(T + 10)
        out = decoder.append(chunk, counts)
        for row, count in enumerate(counts):
            logits[row].append(out[row, :count])
            starts[row] += count
    n_bytes = sum(tensor.nbytes for tensor in decoder.cache.tensors())
    planned = B * kv_cache_size.compute_sequence_bytes(model.config, decoder.cache.capacity, decoder.cache.like.itemsize)
    assert n_bytes == planned, f"allocated {n_bytes} bytes, planned {planned}"
    return torch.stack([torch.cat(parts) for parts in logits])


def compute_kernel_errors(config: ModelConfig, length: int = 52, n_steps: int = 2) -> dict[str, float]:
    """Return the errors of the Triton kernels against torch in float32: logits, gradients and decoding of tokens.

    On a GPU if there is one, otherwise under Triton's interpreter.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens, results, errors = make_tokens(config, length, batch=1).to(device), {}, {}
    models = {backend: NSATransformer(config, backend=backend, device=device, seed=0) for backend in ("torch", "triton")}
    for backend, model in models.items():
        logits = model.train()(tokens)
        weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
        loss = (logits * weight.to(device)).mean() + model.auxiliary_loss()
        gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        results[backend] = logits.detach().cpu(), [x.cpu() for x in gradients if x is not None]
    (expected, expected_gradients), (logits, gradients) = results["torch"], results["triton"]
    errors["forward"] = compute_error(logits, expected)
    # Some gradients are 0 in exact arithmetic: the same shift of all compressed keys changes no softmax, so that of
    # `phi_k.position` with phi = linear is rounding noise. Compare it with the gradients of the model, not with itself.
    least = NOISE_SHARE * max(float(x.abs().max()) for x in expected_gradients)
    own = [compute_error(a, b, least) for a, b in zip(gradients, expected_gradients, strict=True)]
    errors["gradients"] = float(np.max(own))  # unlike max, it keeps NaN
    decoders = {backend: Decoder(model.eval(), length, backend=backend) for backend, model in models.items()}
    for decoder in decoders.values():
        poison(decoder.cache)
        decoder.append(tokens[:, : length - n_steps])
        steps = [decoder.append(tokens[:, t : t + 1]) for t in range(length - n_steps, length)]
    errors["decoding"] = compute_error(torch.cat(steps, 1).cpu(), expected[:, length - n_steps :])
    # The keys of the latest blocks select nothing, because these blocks are always selected: compare them directly.
    for layers in zip(*(decoder.cache.layers for decoder in decoders.values()), strict=True):
        rows = [layer.scorer.get_rows() for layer in layers if isinstance(layer, NSACache) and layer.scorer]
        if config.has_indexer and rows:
            n = geometry.num_compressed(length, config.selection_nsa)
            keys = [decode_keys(x[:, :n], config.index_width, torch.float32) for x in rows]
            own = compute_error(keys[1].cpu(), keys[0].cpu())
            errors["index keys"] = float(np.maximum(errors.get("index keys", 0.0), own))
    return errors


def poison(cache: Cache) -> None:
    """Fill a cache with NaN; a byte of 255 is NaN in fp8, and as a scale of MXFP4."""
    for tensor in cache.tensors():
        is_byte = tensor.dtype.itemsize == 1
        (tensor.view(torch.uint8) if is_byte else tensor).fill_(255 if is_byte else torch.nan)


def compute_gradient_error(model: NSATransformer, tokens: Tensor, step: float = 3e-8) -> float:
    """Return the error of the derivative of a sum of logits in a random direction of all weights but the indexers'.

    The gradient of the indexers' weights must be 0. Only values of the brute force are used: central differences.
    """
    generator = torch.Generator().manual_seed(0)
    logits = model(tokens)
    weight = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad((logits * weight).sum(), parameters, allow_unused=True)
    plain, derivative, shifts = to_brute_force_model(model), 0.0, {}
    for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
        if ".indexer." in name:
            assert gradient is None or not gradient.any(), f"{name} has a gradient of the logits"
            continue
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        shifts[name] = step * direction.numpy()
        derivative += float((gradient * direction).sum())
    sums, selections = [], []
    for sign in (1, -1):
        weights = {name: x + sign * shifts[name] if name in shifts else x for name, x in plain.weights.items()}
        selected: list[Any] = []
        shifted = brute_force.logits(tokens.numpy(), plain._replace(weights=weights), model.config.n_layers, selected)
        sums.append((shifted * weight.numpy()).sum())
        selections.append(selected)
    if selections[0] != selections[1]:
        return 0.0  # a selection changes here, so there is no derivative
    expected = (sums[0] - sums[1]) / (2 * step)
    return float(abs(derivative - expected) / (abs(expected) + abs(derivative) + 1.0))


def main(count: int) -> None:
    torch.set_num_threads(1)
    worst: dict[str, float] = {}
    for seed in range(count):
        config = make_form(seed)
        errors = compute_errors(config)
        assert not any(np.isnan(x) or x > LIMITS[name] for name, x in errors.items()), f"seed {seed}: {errors}: {config}"
        worst = {name: max(worst.get(name, 0.0), x) for name, x in errors.items()}
    print(f"{count} forms, worst error {worst}")


LIMITS = dict.fromkeys(("reference", "torch", "decoding", "packed, reference", "packed, torch"), 1e-9) | {"gradients": 1e-5}

if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
