"""Input checks of the public attention functions: shapes, dtypes, devices and sequence layouts, once per call.

Each check raises a ValueError that names the tensor, its axes, the expected and the actual value and the fix.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nsa_lab.attention import geometry
from nsa_lab.attention.layout import Span
from nsa_lab.config import NSAConfig

SUPPORTED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
AXIS_NAMES = {
    "q": "[B, T, H, D]: batch, time, query heads, head width",
    "k": "[B, T, G, D]: batch, time, key/value groups, head width",
    "k_cmp": "[B, N, G, D]: batch, compressed blocks, key/value groups, head width",
    "lse": "[B, T, H]: batch, time, query heads",
    "blocks": "[B, T, G, n_sel]: batch, time, key/value groups, blocks",
    "gates": "[B, T, H, branches]: batch, time, query heads, branches that exist (cmp, sel, win)",
}


def can_read_values(x: Tensor) -> bool:
    """Return True if a check may read values of `x`: on other devices this would synchronize with the host, and code that
    torch.compile or torch.func transforms, or that make_fx traces (as torch.func.linearize does), has no values.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:  # pyright: ignore
        return False
    return torch._C._functorch.maybe_current_level() is None  # pyright: ignore


def check_tensors(**tensors: object) -> None:
    """Raise ValueError for an argument that is not a dense tensor, by its name."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ValueError(
                f"{name}: expected a tensor, got a {type(x).__name__}; pass a tensor, as torch.as_tensor makes"
            )
        if x.layout is not torch.strided:
            raise ValueError(f"{name}: expected a dense tensor, got the layout {x.layout}; use a padded or packed tensor")


def check_keys(name: str, x: Tensor, span: Span | None) -> None:
    """Raise ValueError unless x [B, T, G, D] is a valid key or value tensor that covers all keys of `span`."""
    check_tensors(**{name: x})
    if x.ndim != 4:
        raise ValueError(f"{name}: expected {AXIS_NAMES['k']}; got {x.ndim} dimensions, {tuple(x.shape)}")
    _check_dtype_and_device(name, x)
    if 0 in x.shape:
        raise ValueError(f"{name}: expected {AXIS_NAMES['k']}, each at least 1; got {tuple(x.shape)}")
    if span is None:
        return
    _check_batch(name, x, span)
    if x.shape[1] != span.n_keys:
        hint = f"; {name} looks like [B, G, T, D]: use transpose(1, 2)" if x.shape[2] == span.n_keys else ""
        raise ValueError(f"{name}: {span} has {span.n_keys} keys, and {name} {tuple(x.shape)} has {x.shape[1]}{hint}")


def check_config(nsa: NSAConfig) -> None:
    """Raise TypeError if `nsa` is not an NSAConfig."""
    if not isinstance(nsa, NSAConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"nsa: expected an NSAConfig, got {type(nsa).__name__}; NSAConfig() is the paper's")


def check_compressed(q: Tensor, k_cmp: Tensor, v_cmp: Tensor, nsa: NSAConfig, span: Span | None) -> None:
    """Raise ValueError unless q [B, T, H, D], k_cmp [B, N, G, D] and v_cmp [B, N, G, Dv] are consistent.

    Raise TypeError if `nsa` is not an NSAConfig.
    """
    check_config(nsa)

    def count_keys(n_queries: int) -> int:
        return geometry.num_compressed(n_queries, nsa) if span is None else span.num_compressed(nsa)

    _check_heads(q, k_cmp, v_cmp, count_keys, ("k_cmp", "v_cmp"), AXIS_NAMES["k_cmp"], span)


def check_raw(q: Tensor, k: Tensor, v: Tensor, span: Span | None, suffix: str = "") -> None:
    """Raise ValueError unless q [B, T, H, D], k [B, T, G, D] and v [B, T, G, Dv] are consistent.

    Messages call the tensors q, k and v, with `suffix` appended to k and v.
    """

    def count_keys(n_queries: int) -> int:
        return n_queries if span is None else span.n_keys

    _check_heads(q, k, v, count_keys, (f"k{suffix}", f"v{suffix}"), AXIS_NAMES["k"], span)


def check_lse(q: Tensor, lse: Tensor) -> None:
    """Raise ValueError unless lse is [B, T, H] in float32 or float64, on q's device."""
    check_tensors(lse=lse)
    _check_shape("lse", lse, q.shape[:3], AXIS_NAMES["lse"])
    if lse.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"lse: expected float32, or float64 for float64 inputs, got {lse.dtype}; use lse.float()")
    _check_same_device("lse", lse, q)


def check_blocks(q: Tensor, k: Tensor | None, blocks: Tensor, nsa: NSAConfig, span: Span | None = None) -> None:
    """Raise ValueError unless blocks is int32 [B, T, G, n_sel] on q's device, and there is a branch (k) that reads them.

    On the CPU, also check the values: each is -1 or the index of an existing block (packed: of the longest document), and
    no block occurs twice for one query.
    """
    if k is None:
        raise ValueError("blocks: expected None without a selected branch (k_sel is None), got a tensor; remove blocks=")
    check_tensors(blocks=blocks)
    _check_shape("blocks", blocks, (q.shape[0], q.shape[1], k.shape[2], nsa.n_sel), AXIS_NAMES["blocks"])
    if blocks.dtype != torch.int32:
        raise ValueError(f"blocks: expected int32, got {blocks.dtype}; use blocks.int()")
    _check_same_device("blocks", blocks, q)
    if not can_read_values(blocks):
        return
    last_block = geometry.num_selection(k.shape[1] if span is None else span.longest_document, nsa) - 1
    sorted_blocks = blocks.sort(-1).values
    is_repeated = (sorted_blocks[..., 1:] == sorted_blocks[..., :-1]) & (sorted_blocks[..., 1:] != -1)
    if is_repeated.any() or blocks.min() < -1 or blocks.max() > last_block:
        raise ValueError(
            f"blocks: expected indices from 0 to {last_block}, each once in a row [n_sel], or -1 for none; got "
            f"{int(blocks.min())} to {int(blocks.max())}{', some twice' if is_repeated.any() else ''}; remove duplicates"
        )


def check_gates(q: Tensor, gates: Tensor | None, n_branches: int) -> None:
    """Raise ValueError unless gates is [B, T, H, n_branches] in q's dtype, on q's device; None for a single branch."""
    check_gate_columns(q, gates, n_branches)
    if gates is None:
        return
    if gates.dtype != q.dtype:
        raise ValueError(f"gates: expected {q.dtype}, the dtype of q, got {gates.dtype}; use gates.to(q.dtype)")
    _check_same_device("gates", gates, q)


def check_gate_columns(q: Tensor, gates: Tensor | None, n_branches: int) -> None:
    """Raise ValueError unless gates is [B, T, H, n_branches], or None for a single branch."""
    if gates is not None:
        check_tensors(gates=gates)
    if gates is None or n_branches == 1:
        if gates is not None or n_branches > 1:
            found = "None" if gates is None else f"a tensor {tuple(gates.shape)}"
            expected = (
                "None: a single branch has no gate" if n_branches == 1 else f"one column for each of {n_branches} branches"
            )
            raise ValueError(f"gates: expected {expected}, got {found}")
        return
    _check_shape("gates", gates, (*q.shape[:3], n_branches), AXIS_NAMES["gates"])


def check_branch_inputs(
    q: Tensor,
    k_cmp: Tensor | None,
    v_cmp: Tensor | None,
    k_sel: Tensor | None,
    v_sel: Tensor | None,
    k_win: Tensor | None,
    v_win: Tensor | None,
    gates: Tensor | None,
    nsa: NSAConfig,
    span: Span | None,
) -> None:
    """Raise ValueError unless the inputs of `nsa_attention` are consistent, and TypeError if `nsa` is not an NSAConfig.

    A branch that does not exist has neither keys nor values.
    """
    check_config(nsa)
    branches = {"cmp": (k_cmp, v_cmp), "sel": (k_sel, v_sel), "win": (k_win, v_win)}
    present: dict[str, tuple[Tensor, Tensor]] = {}
    for name, (k, v) in branches.items():
        if k is not None and v is not None:
            present[name] = k, v
        elif k is not None or v is not None:
            missing, given = (f"v_{name}", f"k_{name}") if v is None else (f"k_{name}", f"v_{name}")
            raise ValueError(f"{missing}: expected a tensor, as for {given}, got None; pass both, or None for both")
    if not present:
        raise ValueError("nsa_attention: expected keys and values of at least one branch, got None for all three")
    for name, (k, v) in present.items():
        if name == "cmp":
            check_compressed(q, k, v, nsa, span)
        else:
            check_raw(q, k, v, span, f"_{name}")
    groups, widths = [k.shape[2] for k, _ in present.values()], [v.shape[3] for _, v in present.values()]
    if len(set(groups)) > 1:
        names = ", ".join(f"k_{name}" for name in present)
        raise ValueError(f"the branches differ in key/value groups: {names} have G = {groups}; use one G")
    if len(set(widths)) > 1:
        names = ", ".join(f"v_{name}" for name in present)
        raise ValueError(f"the branches differ in value width: {names} have Dv = {widths}; use one Dv")
    check_gates(q, gates, len(present))


def check_scores(k_cmp: Tensor | None, nsa: NSAConfig) -> None:
    """Raise ValueError unless `nsa_attention` can select blocks as `nsa.scores` says."""
    if nsa.scores == "indexer":
        raise ValueError(
            "blocks: nsa.scores = indexer: expected the blocks that an indexer selected, got None; pass blocks="
        )
    if nsa.scores != "mean_key" and k_cmp is None:
        raise ValueError(
            "blocks: nsa.scores = compressed (the default) needs keys of the compressed branch, and k_cmp is None; set "
            "nsa.scores to mean_key, or pass blocks="
        )


def _check_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    count_keys: Callable[[int], int],
    names: tuple[str, str],
    axes: str,
    span: Span | None,
) -> None:
    """Check q against keys and values; `count_keys` returns the required number of keys for a number of queries."""
    check_tensors(q=q, **{names[0]: k, names[1]: v})
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(
            f"expected q [B, T, H, D] and keys, values [B, S, G, D], got {q.ndim}, {k.ndim} and {v.ndim} dimensions"
        )
    _check_common_dtype_and_device(q, k, v)
    if 0 in q.shape:
        raise ValueError(f"q: expected {AXIS_NAMES['q']}, each at least 1; got {tuple(q.shape)}")
    if span is not None:
        _check_batch("q", q, span)
    problem = _find_shape_problem(q, k, v, count_keys, names, axes, span)
    if problem:
        raise ValueError(problem + _suggest_transpose(q, k, count_keys, names[0], span))


def _find_shape_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    count_keys: Callable[[int], int],
    names: tuple[str, str],
    axes: str,
    span: Span | None,
) -> str | None:
    B, T, H, D = q.shape
    G = k.shape[2]
    if span is not None and span.n_queries != T:
        return f"q: {span} has {span.n_queries} queries, and q {tuple(q.shape)} has {T}"
    if G == 0 or H % G:
        return f"{H} query heads do not divide into {G} key/value groups"
    if k.shape != (B, count_keys(T), G, D):
        return f"{names[0]}: expected shape {(B, count_keys(T), G, D)}, got {tuple(k.shape)}; axes are {axes}"
    if v.shape[:3] != k.shape[:3] or v.shape[3] == 0:
        return f"{names[1]}: expected shape {(*k.shape[:3], 'Dv')}, got {tuple(v.shape)}; axes are {axes}"
    return None


def _check_common_dtype_and_device(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, keys and values differ in dtype: {q.dtype}, {k.dtype}, {v.dtype}; cast them to one")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, keys and values are on {q.device}, {k.device} and {v.device}; move them to one device")
    _check_dtype_and_device("q, keys and values", q)


def _check_dtype_and_device(name: str, x: Tensor) -> None:
    if x.dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"{name}: expected float64, float32, bfloat16 or float16, got {x.dtype}; cast to one of them")
    if x.device.type == "meta":
        raise ValueError(f"{name}: on the meta device, which has no data; move the tensors to cpu or cuda")


def _check_batch(name: str, x: Tensor, span: Span) -> None:
    if span.kind == "packed" and x.shape[0] != 1:
        raise ValueError(f"{name}: {span} is one row of documents, B = 1; got B = {x.shape[0]} in {tuple(x.shape)}")


def _check_shape(name: str, x: Tensor, shape: tuple[int, ...], axes: str) -> None:
    if x.shape != torch.Size(shape):
        raise ValueError(f"{name}: expected shape {tuple(shape)}, got {tuple(x.shape)}; axes are {axes}")


def _check_same_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name}: on {x.device}, but q is on {q.device}; move them to one device")


def _suggest_transpose(q: Tensor, k: Tensor, count_keys: Callable[[int], int], name: str, span: Span | None) -> str:
    """Return a hint if the shapes would fit with axes 1 and 2 of q, of k or of both swapped; otherwise an empty string."""

    def fits(n_queries: int, n_heads: int, n_keys: int, n_groups: int) -> bool:
        expected = n_queries if span is None else span.n_queries
        return n_queries == expected and n_keys == count_keys(n_queries) and n_groups > 0 and n_heads % n_groups == 0

    (_, T, H, _), (_, S, G, _) = q.shape, k.shape
    if fits(H, T, G, S):
        return f"; q and {name} look like [B, H, T, D]: use transpose(1, 2)"
    if fits(H, T, S, G):
        return "; q looks like [B, H, T, D]: use transpose(1, 2)"
    if fits(T, H, G, S):
        return f"; {name} looks like [B, G, T, D]: use transpose(1, 2)"
    return ""
