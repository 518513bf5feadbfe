"""Gather each sharded matrix on one rank, compute there, and return to every rank its rows of the result.

Muon needs whole matrices, which no rank of FSDP has. Each matrix has an owner among the ranks that share the weights. One
all-to-all moves the rows of all matrices to their owners, and a second one moves the results back. Every rank computes for
its own matrices only, and temporarily holds about as many numbers as its shard of the matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

Function = Callable[[list[int], list[Tensor]], list[Tensor]]
"""Maps the numbers and values of this rank's own matrices to results of the same shapes."""


def exchange_matrices(matrices: Sequence[DTensor], shards: Sequence[Tensor], function: Function) -> list[Tensor]:
    """Return this rank's rows of `function` of full matrices. Collective.

    `matrices`: sharded by rows over the mesh axis `shard`; only their layout is used. `shards`: this rank's rows of the
    values to exchange, of the same shapes. Ranks that hold copies of a shard compute the same.
    """
    if not matrices:
        return []
    return _Exchange(matrices).apply(shards, function)


class _Exchange:
    """The owner of each matrix, and the counts of what the ranks send to each other."""

    def __init__(self, matrices: Sequence[DTensor]) -> None:
        mesh = matrices[0].device_mesh
        self._group, self._rank = mesh.get_group("shard"), mesh.get_local_rank("shard")
        self._n_ranks = self._group.size()
        self._shapes = [matrix.shape for matrix in matrices]
        owners = assign_owners(self._shapes, self._n_ranks)
        self._owned = [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(self._n_ranks)]
        self._order = [i for owned in self._owned for i in owned]

    def apply(self, shards: Sequence[Tensor], function: Function) -> list[Tensor]:
        ranks, own = range(self._n_ranks), self._owned[self._rank]
        to_owners = [self._count(self._rank, owner) for owner in ranks]
        from_holders = [self._count(holder, self._rank) for holder in ranks]
        received = self._exchange([shards[i] for i in self._order], to_owners, from_holders, shards[0])
        # Received are the rows of rank 0 of every own matrix, then the rows of rank 1, and so on.
        pieces = iter(received.split([self._numel(holder, i) for holder in ranks for i in own]))
        by_holder = [[next(pieces) for _ in own] for _ in ranks]
        matrices = [
            torch.cat(parts).view(self._shapes[i]) for i, parts in zip(own, zip(*by_holder, strict=True), strict=True)
        ]
        results = function(own, matrices)
        rows = [result[self._get_rows(holder, i)] for holder in ranks for i, result in zip(own, results, strict=True)]
        returned = self._exchange(rows, from_holders, to_owners, shards[0])
        values = returned.split([self._numel(self._rank, i) for i in self._order])
        by_number = dict(zip(self._order, values, strict=True))
        return [by_number[i].view_as(shard) for i, shard in enumerate(shards)]

    def _exchange(self, parts: list[Tensor], send_counts: list[int], receive_counts: list[int], like: Tensor) -> Tensor:
        sent = torch.cat([part.flatten() for part in parts]) if parts else like.new_empty(0)
        received = like.new_empty(sum(receive_counts))
        distributed.all_to_all_single(received, sent, receive_counts, send_counts, group=self._group)
        return received

    def _get_rows(self, rank: int, i: int) -> slice:
        """Return the rows of matrix `i` that `rank` holds, as `Shard(0)` divides them."""
        n_rows = self._shapes[i][0]
        count = -(-n_rows // self._n_ranks)
        return slice(min(rank * count, n_rows), min((rank + 1) * count, n_rows))

    def _numel(self, rank: int, i: int) -> int:
        rows = self._get_rows(rank, i)
        return (rows.stop - rows.start) * self._shapes[i][1]

    def _count(self, holder: int, owner: int) -> int:
        """Return how many numbers of the matrices of `owner` the rank `holder` has."""
        return sum(self._numel(holder, i) for i in self._owned[owner])


def assign_owners(shapes: Sequence[torch.Size], n_ranks: int) -> list[int]:
    """Return the owner of each matrix: the most expensive first, each to the rank with the least work."""
    # A Newton-Schulz step takes time in proportion to this.
    costs = [rows * columns * min(rows, columns) for rows, columns in shapes]
    owners, loads = [0] * len(shapes), [0] * n_ranks
    for i in sorted(range(len(shapes)), key=lambda i: (-costs[i], i)):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += costs[i]
    return owners
