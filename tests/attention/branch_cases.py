"""Random sets of branches with random scorers, and a comparison of the operator with `brute_force`, including gradients.

Layouts are full, a chunk, or packed documents. `python tests/attention/branch_cases.py 300` checks 300 cases of each kind
and prints the worst error of each backend.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass, replace

import brute_force
import numpy as np
import torch
from attention_inputs import Inputs, to_brute_force_geometry, to_lists, use_variant
from layout_cases import CASE_BUILDERS, Case, compute_error, draw_sizes
from torch import Tensor

from nsa_lab.attention import Span, geometry, nsa_attention, score_and_select_blocks
from nsa_lab.attention.cached_attention import attend_and_select
from nsa_lab.attention.compression import compress
from nsa_lab.attention.layer_cache import LayerCache
from nsa_lab.config import NSAConfig

BRANCHES = ("cmp", "sel", "win")
MAX_TOKENS = 90


@dataclass(frozen=True)
class BranchCase:
    """A `Case` with some of the branches. `has_indexer`: blocks are selected by other queries and keys of width 3."""

    case: Case
    branches: tuple[str, ...]
    has_indexer: bool
    index_heads: int
    index_tokens: int

    @property
    def index_nsa(self) -> NSAConfig:
        return self.case.nsa.model_copy(update={"l": self.index_tokens, "d": self.index_tokens})

    def draw_inputs(self) -> tuple[Inputs, Tensor, Tensor]:
        """Return the inputs, None for branches that do not exist, and the queries and raw keys of an indexer."""
        x, n = self.case.inputs(), len(self.branches)
        absent = {f"{kind}_{branch}": None for branch in BRANCHES if branch not in self.branches for kind in "kv"}
        gates = x.gates[..., :n] if n > 1 else None
        generator = torch.Generator().manual_seed(self.case.seed + 7)
        heads = self.case.G * self.index_heads
        index_q, index_k = (
            2 * torch.randn(*x.k_sel.shape[:2], heads, 3, generator=generator, dtype=torch.float64)
            for heads in (heads, self.case.G)
        )
        return x._replace(**absent, gates=gates), index_q[:, -x.q.shape[1] :], index_k


def make_case(seed: int, kind: str) -> BranchCase:
    draw = random.Random(f"branches {kind} {seed}")
    if kind == "full":
        length = draw.choice([1, 2, draw.randint(3, MAX_TOKENS)])
        nsa = CASE_BUILDERS["chunk"](seed).nsa
        case = Case(nsa, Span.full(length), (0,), (length,), draw.randint(1, 2), **draw_sizes(draw), seed=seed)
    else:
        case = CASE_BUILDERS[kind](seed)
    sink, local = draw.choice([0, 1, 1, 2, 3]), draw.choice([1, 2, 2, 3])
    branches = tuple(branch for branch in BRANCHES if draw.random() < 0.6) or ("sel",)
    scorers = [name for name in ("compressed", "mean_key", "indexer") if name != "compressed" or "cmp" in branches]
    nsa = case.nsa.model_copy(
        update={
            "sink_blocks": sink,
            "local_blocks": local,
            "n_sel": sink + local + draw.randint(0, 3),
            "scores": draw.choice(scorers),
            "head_reduction": draw.choice(["sum", "max"]),
            "block_reduction": draw.choice(["sum", "max"]),
        }
    )
    tokens = draw.choice([n for n in range(1, nsa.l_sel + 1) if nsa.l_sel % n == 0])
    return BranchCase(replace(case, nsa=nsa), branches, nsa.scores == "indexer", draw.choice([1, 1, 2, 4]), tokens)


def compute_expected(
    form: BranchCase, x: Inputs, index_q: Tensor, index_k: Tensor, weight: Tensor
) -> tuple[np.ndarray, list, dict[str, np.ndarray]]:
    """Return the output, the blocks and the gradients of sum(out * weight)."""
    case, g = form.case, to_brute_force_geometry(form.case.nsa)
    # Without a branch that the splitting needs, some tensor of the same shape takes its place.
    whole = case.inputs()._replace(**{name: y for name, y in x._asdict().items() if y is not None})
    outs, blocks, gradients, row, key = [], [[] for _ in range(case.B)], {}, 0, 0
    for (first, part), (start, length) in zip(
        case.documents(whole), [pair for pair in zip(case.starts, case.lengths, strict=True) if pair[1]], strict=True
    ):
        T, rows, keys = part.q.shape[1], slice(row, row + part.q.shape[1]), slice(key, key + start + length)
        row, key = rows.stop, keys.stop
        n = {name: y.numpy() for name, y in part._asdict().items()}
        selected = None
        if "sel" in form.branches:
            if form.has_indexer:
                own = g._replace(l=form.index_tokens, d=form.index_tokens)
                scoring = index_q[:, rows].numpy(), brute_force.compress(index_k[:, keys].numpy(), own), own
            elif case.nsa.scores == "mean_key":
                scoring = n["q"], *brute_force.mean_keys(n["k_sel"], g)
            else:
                scoring = n["q"], n["k_cmp"], g
            selected = brute_force.select_blocks(*scoring, first)
            for b in range(case.B):
                blocks[b] += selected[b]
        reads = {
            "cmp": brute_force.compressed_reads(first + T, g),
            "sel": selected and brute_force.selected_reads(selected, first + T, g, first),
            "win": brute_force.window_reads(g),
        }
        w, out = weight[:, rows].numpy(), 0.0
        d_q, d_gates = np.zeros(n["q"].shape), np.zeros((*n["q"].shape[:3], len(form.branches)))
        for i, branch in enumerate(form.branches):
            k, v = n[f"k_{branch}"], n[f"v_{branch}"]
            attended, lse = brute_force.attention(n["q"], k, v, reads[branch], first)
            gate = n["gates"][..., i, None] if x.gates is not None else 1.0
            out, d_gates[..., i] = out + gate * attended, (attended * w).sum(-1)
            d_q_branch, d_k, d_v = brute_force.attention_gradients(
                n["q"], k, v, reads[branch], gate * w, np.zeros(lse.shape), first
            )
            d_q += d_q_branch
            gradients.setdefault(f"k_{branch}", []).append(d_k)
            gradients.setdefault(f"v_{branch}", []).append(d_v)
        outs.append(out)
        gradients.setdefault("q", []).append(d_q)
        if x.gates is not None:
            gradients.setdefault("gates", []).append(d_gates)
    return np.concatenate(outs, 1), blocks, {name: np.concatenate(parts, 1) for name, parts in gradients.items()}


def select(form: BranchCase, x: Inputs, index_q: Tensor, index_k: Tensor, backend: str) -> Tensor | None:
    """Return the blocks as a layer selects them; None without a selected branch."""
    if "sel" not in form.branches:
        return None
    nsa, span = form.case.nsa, form.case.span
    if form.has_indexer:
        keys = compress(index_k, form.index_nsa, span=span)
        return score_and_select_blocks(index_q, keys, form.index_nsa, backend=backend, span=span)
    scoring_nsa = geometry.get_scoring_geometry(nsa)
    keys = x.k_cmp if scoring_nsa is nsa else compress(x.k_sel, scoring_nsa, span=span)
    return score_and_select_blocks(x.q, keys, scoring_nsa, backend=backend, span=span)


def compute_worst_errors(form: BranchCase) -> dict[str, float]:
    """Return the worst error of the output and its gradients by backend. Raise AssertionError for other blocks."""
    x, index_q, index_k = form.draw_inputs()
    case, worst = form.case, {}
    shape = (*x.q.shape[:3], case.d_v)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(case.seed + 1), dtype=torch.float64)
    expected, blocks, gradients = compute_expected(form, x, index_q, index_k, weight)
    for variant in ("reference", case.variant):
        with use_variant(variant) as backend:
            selected = select(form, x, index_q, index_k, backend)
            assert selected is None or to_lists(selected) == blocks, f"{form}: {variant} selects other blocks"
            leaves = {name: y.clone().requires_grad_() for name, y in x._asdict().items() if y is not None}
            given = selected if form.has_indexer else None
            options = {"blocks": given, "backend": backend, "span": case.span}
            out = nsa_attention(*x._replace(**leaves), case.nsa, **options)
            grads = torch.autograd.grad((out * weight).sum(), list(leaves.values()))
        errors = [compute_error(out.detach(), expected)]
        for name, gradient in zip(leaves, grads, strict=True):
            n = gradients[name].shape[1]
            assert (gradient[:, n:] == 0).all(), f"{form}: {variant}: {name}: padding has a gradient"
            errors.append(compute_error(gradient[:, :n], gradients[name]))
        worst[backend] = max(errors)
    return worst


def compute_decoding_error(form: BranchCase) -> float:
    """Return the worst error of a decoding call on the queries of a chunk or a full sequence, in the last rows of a cache.

    Rows of the cache past the sequence are NaN.
    """
    x, index_q, index_k = form.draw_inputs()
    case, nsa = form.case, form.case.nsa
    expected, blocks, _ = compute_expected(form, x, index_q, index_k, torch.zeros(*x.q.shape[:3], case.d_v))

    def add_rows(y: Tensor | None) -> Tensor | None:
        return None if y is None else torch.cat([y, y.new_full((y.shape[0], 3, *y.shape[2:]), torch.nan)], 1)

    n_keys, S = case.span.n_keys, x.q.shape[1]
    slots = geometry.ring_slots(S, nsa)
    rings = []
    for y in (x.k_win, x.v_win):
        ring = None if y is None else y.new_full((y.shape[0], slots, *y.shape[2:]), torch.nan)
        if ring is not None:
            for position in range(n_keys):
                ring[:, position % slots] = y[:, position]
        rings.append(ring)
    scoring_q = scoring_nsa = keys = None
    if "sel" in form.branches and form.has_indexer:
        scoring_q, scoring_nsa, keys = index_q, form.index_nsa, compress(index_k, form.index_nsa)
    elif "sel" in form.branches and nsa.scores == "mean_key":
        scoring_nsa = geometry.get_scoring_geometry(nsa)
        scoring_q, keys = x.q, compress(x.k_sel, scoring_nsa)
    cache = LayerCache(*map(add_rows, (x.k_cmp, x.v_cmp, x.k_sel, x.v_sel)), *rings, add_rows(keys))
    lengths = torch.full((x.q.shape[0],), n_keys - S, dtype=torch.int32)
    out, selected = attend_and_select(x.q, x.gates, cache, lengths, nsa, index_q=scoring_q, selection_nsa=scoring_nsa)
    assert selected is None or to_lists(selected) == blocks, f"{form}: decoding selects other blocks"
    if selected is not None:
        other = select(form, x._replace(q=-x.q), -index_q, index_k, "reference")
        again, _ = attend_and_select(x.q, x.gates, cache._replace(k_index=None), lengths, nsa, blocks=other)
        given = nsa_attention(*x, nsa, blocks=other, backend="reference", span=case.span)
        torch.testing.assert_close(again, given, rtol=1e-11, atol=1e-12, msg=f"{form}: given blocks")
    return compute_error(out, expected)


def main(count: int) -> None:
    torch.set_num_threads(1)
    for kind in ("full", "chunk", "packed"):
        worst: dict[str, float] = {}
        for seed in range(count):
            form = make_case(seed, kind)
            errors = compute_worst_errors(form)
            if kind != "packed":
                errors["decoding"] = compute_decoding_error(form)
            worst = {name: max(worst.get(name, 0.0), x) for name, x in errors.items()}
        print(f"{kind}: {count} cases, worst error {worst}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 300)
