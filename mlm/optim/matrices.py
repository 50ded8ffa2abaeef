"""Full matrices of split parameters, each formed on one of the ranks that share it.

An owner gathers the parts of a matrix and returns to each rank its part of the result. Owners are chosen so
that all tp and dp ranks of a pipeline stage have about equal work. Parts travel over dp to the owner's
replica (no message where each replica holds them), then over tp, and results travel back. Each ep rank has
matrices of its experts, and exchanges them with the ranks that hold the same experts.

A weight may hold several matrices: a stack of them, and fused ones such as queries, keys and values, whose
rows are ordered `[block][part][width]` (`fused_rows` of its module).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from heapq import heapreplace
from itertools import product

import torch
from torch import Tensor, nn

from mlm.parallel.collectives import start_all_to_all
from mlm.parallel.layers import FusedRows
from mlm.parallel.mesh import Axis
from mlm.parallel.sharding import ParameterShard

BUCKET = 1 << 27
"""Elements of a rank's parts that are exchanged at once, for the memory of their copies."""


@dataclass(frozen=True)
class MatrixRegion:
    """Rows and columns of a matrix that a rank holds."""

    rows: range
    columns: range

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), len(self.columns)

    @property
    def size(self) -> int:
        return len(self.rows) * len(self.columns)

    def of(self, x: Tensor, base: "MatrixRegion") -> Tensor:
        """This region's view of a tensor that holds the region `base`."""
        rows = slice(self.rows.start - base.rows.start, self.rows.stop - base.rows.start)
        columns = slice(self.columns.start - base.columns.start, self.columns.stop - base.columns.start)
        return x[rows, columns]


Extent = tuple[list[int], list[int]]
"""Offset and shape of a part of a parameter."""
Piece = tuple[int, MatrixRegion]
"""A matrix by its number, and a region of it, that one rank sends to another."""


def tp_part(shard: ParameterShard, rank: int) -> Extent:
    """Part of a parameter on a tp rank, before dp shards it."""
    shape = list(shard.part_shape)
    offset = [0] * len(shape)
    if shard.tp_dim is not None:
        offset[shard.tp_dim] = rank // shard.replicas * shape[shard.tp_dim]
    return offset, shape


def dp_part(shard: ParameterShard, rank: int, size: int) -> Extent:
    """Part of a parameter on a dp rank, within this tp rank's part."""
    offset, shape = tp_part(shard, shard.tp.rank)
    if shard.dp_slice is not None:
        share = -(-shape[0] // size)
        first = min(rank * share, shape[0])
        offset[0] += first
        shape[0] = min(share, shape[0] - first)
    return offset, shape


@dataclass(frozen=True)
class Matrix:
    """Fused matrix number `part` of the element at `index` of a stack, () for a weight of one element.

    Indices of a stack that ep splits count from this rank's first element.
    """

    shard: ParameterShard
    rows: FusedRows
    """Interleaving of the weight's rows."""
    index: tuple[int, ...]
    part: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the full matrix."""
        *_, rows, columns = self.shard.global_shape
        return rows // self.rows.parts, columns

    @property
    def cost(self) -> int:
        """Relative number of operations of an iteration."""
        few, many = sorted(self.shape)
        return few * few * (2 * many + few)

    def index_in(self, extent: Extent) -> tuple[int, ...] | None:
        """Index in a part of the stack, () in a weight of one matrix; None if the part lacks it."""
        (*stack, _, _), (*depth, _, _) = extent
        index = tuple(at - first for at, first in zip(self.index, stack, strict=True))
        return index if all(0 <= at < n for at, n in zip(index, depth, strict=True)) else None

    def region(self, extent: Extent) -> MatrixRegion:
        """Region of this matrix in a part of its weight; may be empty."""
        (*_, row, column), (*_, rows, columns) = extent

        def row_of(row: int) -> int:
            block, within = divmod(row, self.rows.parts * self.rows.width)
            inside = min(max(within - self.part * self.rows.width, 0), self.rows.width)
            return block * self.rows.width + inside

        stop = row if self.index_in(extent) is None else row + rows
        return MatrixRegion(range(row_of(row), row_of(stop)), range(column, column + columns))

    def rows_in(self, extent: Extent, device: torch.device) -> Tensor | None:
        """Rows of this matrix in a part of its weight; None for all."""
        if self.rows.parts == 1:
            return None
        first, count = extent[0][-2], extent[1][-2]
        numbers = torch.arange(first, first + count)
        return ((numbers // self.rows.width) % self.rows.parts == self.part).nonzero()[:, 0].to(device)


def matrices_of(shard: ParameterShard, *, per_head: bool) -> list[Matrix]:
    """Matrices of a weight or a stack of weights; with `per_head` one for each head."""
    (*stack, _, _), rows = shard.part_shape, shard.global_shape[-2]
    rows_of = getattr(shard.module, "fused_rows", None)
    if isinstance(rows_of, Mapping):
        rows_of = rows_of.get(shard.name.rpartition(".")[2])
    fused: FusedRows = rows_of or FusedRows(1, rows)
    if per_head and fused.are_heads:
        fused = FusedRows(rows // fused.width, fused.width)
    indices = product(*map(range, stack))
    return [Matrix(shard, fused, index, part) for index, part in product(indices, range(fused.parts))]


class MatrixExchange:
    """Messages along an axis that gather matrices on their owners and scatter the results.

    Args:
        axis: the axis.
        owners: rank of the owner of each matrix, by number.
        regions: regions of each matrix on all ranks of the axis; equal ones are copies.
        like: a tensor of the dtype and device of the messages.
    """

    def __init__(
        self,
        axis: Axis,
        owners: Mapping[int, int],
        regions: Mapping[int, Sequence[MatrixRegion]],
        like: Tensor,
    ) -> None:
        self.axis, self.regions, self.like = axis, regions, like
        me, ranks = axis.rank, range(axis.size)
        self.owned = [number for number, owner in owners.items() if owner == me]
        self.full = dict[int, MatrixRegion]()
        for number in self.owned:
            filled = [region for region in regions[number] if region.size] or regions[number][:1]
            self.full[number] = MatrixRegion(
                range(min(r.rows.start for r in filled), max(r.rows.stop for r in filled)),
                range(min(r.columns.start for r in filled), max(r.columns.stop for r in filled)),
            )
        # pieces by peer: parts on the way to owners, results on the way back
        self.parts_out: list[list[Piece]] = [[] for _ in ranks]
        self.parts_in: list[list[Piece]] = [[] for _ in ranks]
        self.results_out: list[list[Piece]] = [[] for _ in ranks]
        self.results_in: list[list[Piece]] = [[] for _ in ranks]
        self.gathers = self.scatters = False
        for number, owner in owners.items():
            senders: dict[MatrixRegion, int] = {regions[number][owner]: owner}
            for rank, region in enumerate(regions[number]):
                if not region.size or rank == owner:
                    continue
                self.scatters = True
                sends = senders.setdefault(region, rank) == rank  # the first rank with a copy
                self.gathers |= sends
                if rank == me:
                    self.results_in[owner].append((number, region))
                    self.parts_out[owner] += [(number, region)] if sends else []
                if owner == me:
                    self.results_out[rank].append((number, region))
                    self.parts_in[rank] += [(number, region)] if sends else []

    def gather(self, parts: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Gather the matrices that this rank owns from the ranks' regions."""
        if not self.gathers:
            return {number: parts[number] for number in self.owned}
        me, matrices = self.axis.rank, dict[int, Tensor]()
        for number in self.owned:
            region, full = self.regions[number][me], self.full[number]
            matrices[number] = parts[number].new_empty(full.shape)
            region.of(matrices[number], full).copy_(parts[number])
        origins = {number: by_rank[me] for number, by_rank in self.regions.items()}
        for number, region, x in self._send(parts, origins, self.parts_out, self.parts_in):
            region.of(matrices[number], self.full[number]).copy_(x)
        return matrices

    def scatter(self, results: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return this rank's regions of the owners' results, without empty ones."""
        me = self.axis.rank
        regions = {n: self.regions[n][me].of(results[n], self.full[n]) for n in self.owned if n in results}
        if self.scatters:
            for number, _, x in self._send(results, self.full, self.results_out, self.results_in):
                regions[number] = x
        return regions

    def _send(
        self,
        tensors: Mapping[int, Tensor],
        origins: Mapping[int, MatrixRegion],
        out: Sequence[Sequence[Piece]],
        into: Sequence[Sequence[Piece]],
    ) -> Iterator[tuple[int, MatrixRegion, Tensor]]:
        """Exchange pieces of tensors that hold the regions `origins`; yield the received ones."""
        flat = [region.of(tensors[n], origins[n]).reshape(-1) for pieces in out for n, region in pieces]
        sent = torch.cat([self.like.new_empty(0), *flat])
        sizes = ([sum(r.size for _, r in pieces) for pieces in ranks] for ranks in (out, into))
        received = start_all_to_all(sent, self.axis, *sizes).wait()
        first = 0
        for number, region in (piece for pieces in into for piece in pieces):
            yield number, region, received[first : first + region.size].view(region.shape)
            first += region.size


class Bucket:
    """Weights whose matrices are exchanged together, in `dtype`.

    `dp` are ranks that hold the same part of the model, or rows of it.
    """

    def __init__(
        self, shards: Sequence[ParameterShard], dp: Axis, dtype: torch.dtype, *, per_head: bool
    ) -> None:
        self.shards, tp = shards, shards[0].tp
        device = shards[0].parameter.device
        like = torch.empty(0, dtype=dtype, device=device)
        self.matrices = [m for shard in shards for m in matrices_of(shard, per_head=per_head)]
        # owners (dp rank, tp rank): the most expensive matrices first, each to the rank with the lowest load
        loads, owners = [(0, rank) for rank in range(dp.size * tp.size)], dict[int, tuple[int, int]]()
        costs = [matrix.cost for matrix in self.matrices]
        for n in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
            load, rank = loads[0]
            owners[n] = divmod(rank, tp.size)
            heapreplace(loads, (load + costs[n], rank))
        owners = dict(sorted(owners.items()))  # all ranks exchange in the order of the matrices
        over_dp, over_tp = dict[int, list[MatrixRegion]](), dict[int, list[MatrixRegion]]()
        for n, m in enumerate(self.matrices):
            over_dp[n] = [m.region(dp_part(m.shard, rank, dp.size)) for rank in range(dp.size)]
            if owners[n][0] == dp.rank:
                over_tp[n] = [m.region(tp_part(m.shard, rank)) for rank in range(tp.size)]
        self.over_dp = MatrixExchange(dp, {n: owner for n, (owner, _) in owners.items()}, over_dp, like)
        self.over_tp = MatrixExchange(tp, {n: owners[n][1] for n in over_tp}, over_tp, like)
        parts = [dp_part(m.shard, dp.rank, dp.size) for m in self.matrices]
        self.rows = [m.rows_in(part, device) for m, part in zip(self.matrices, parts, strict=True)]
        self.indices = [m.index_in(part) for m, part in zip(self.matrices, parts, strict=True)]

    def transform(
        self, tensors: Mapping[nn.Parameter, Tensor], function: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[Matrix, tuple[int, ...], Tensor | None, Tensor]]:
        """Apply a function of [..., rows, columns] to the full matrices of tensors laid out like the weights.

        Yield each matrix with a part on this rank, its index in the stack, its rows of the weight (None for
        all), and this rank's region of the result. Collective.
        """
        parts = dict[int, Tensor]()
        for n, matrix in enumerate(self.matrices):
            x = tensors[matrix.shard.parameter]
            index, rows = self.indices[n], self.rows[n]
            if index is None:
                parts[n] = x.new_empty(self.over_dp.regions[n][self.over_dp.axis.rank].shape)
            else:
                parts[n] = x[index] if rows is None else x[index][rows]
        gathered = self.over_tp.gather(self.over_dp.gather(parts))
        full = dict(sorted(gathered.items(), key=lambda item: -item[1].numel()))  # threads end together
        results = dict(zip(full, map_matrices(function, list(full.values())), strict=True))
        regions = self.over_dp.scatter(self.over_tp.scatter(results))
        for n, matrix in enumerate(self.matrices):
            index = self.indices[n]
            if index is not None and n in regions:
                yield matrix, index, self.rows[n], regions[n]


def map_matrices(function: Callable[[Tensor], Tensor], matrices: Sequence[Tensor]) -> list[Tensor]:
    """Apply a function to each matrix: on a GPU to all of one shape at once, on a CPU in several threads.

    The products of one matrix fill a GPU's multiprocessors in part, and keep two threads less busy: at width
    384 they take as long as on one. On a CPU a thread has one matrix at a time, with the same bits.
    """
    threads = torch.get_num_threads()
    if matrices and matrices[0].is_cuda:
        return map_stacks(function, matrices)
    if threads == 1 or len(matrices) < threads or not matrices[0].is_cpu:
        return [function(x) for x in matrices]
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(function, matrices))
    finally:
        torch.set_num_threads(threads)  # the newest call's is what new threads begin with


def map_stacks(function: Callable[[Tensor], Tensor], matrices: Sequence[Tensor]) -> list[Tensor]:
    """Apply a function to the stack [n, rows, columns] of all matrices of each shape."""
    by_shape, results = dict[torch.Size, list[int]](), dict[int, Tensor]()
    for number, x in enumerate(matrices):
        by_shape.setdefault(x.shape, []).append(number)
    for numbers in by_shape.values():
        stack = function(torch.stack([matrices[number] for number in numbers]))
        results.update(zip(numbers, stack.unbind(), strict=True))
    return [results[number] for number in range(len(matrices))]


def build_buckets(
    shards: Sequence[ParameterShard], replicas: Axis, dtype: torch.dtype, *, per_head: bool
) -> list[Bucket]:
    """Group weights into buckets of about BUCKET elements of a tp rank's part, the same on all ranks.

    A bucket has one set of axes: experts are apart.
    """
    groups: list[list[ParameterShard]] = []
    by_axes = sorted(shards, key=lambda shard: shard.experts is not None)  # experts last; stable
    size = BUCKET
    for shard in by_axes:
        elements = math.prod(shard.part_shape)
        if size + elements > BUCKET or groups[-1][-1].experts != shard.experts:
            groups.append([])
            size = 0
        groups[-1].append(shard)
        size += elements
    axes = [group[0].replica_axis(replicas) for group in groups]
    return [Bucket(group, dp, dtype, per_head=per_head) for group, dp in zip(groups, axes, strict=True)]
