"""Whole matrices of split parameters, each formed on one of the ranks that share it.

What needs a whole matrix gathers its parts on an owner and returns each rank its part of the result. Owners
are chosen so that all tp and dp ranks of a pipeline stage have about as much to do; parts travel over dp to
the owner's replica (nothing where each replica holds them), then over tp, and results the same way back. Of
experts each ep rank has its own matrices, and exchanges them with those that hold the same experts.

A weight may hold several matrices: a stack of them, and rows `[block][part][width]` of fused ones
(`fused_rows` of its module), as of queries, keys and values.
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
class Region:
    """Rows and columns of a matrix that a rank holds."""

    rows: range
    columns: range

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        return len(self.rows), len(self.columns)

    @property
    def size(self) -> int:
        """Number of elements."""
        return len(self.rows) * len(self.columns)

    def of(self, x: Tensor, whole: "Region") -> Tensor:
        """This region's view of a tensor that holds the region `whole`."""
        rows = slice(self.rows.start - whole.rows.start, self.rows.stop - whole.rows.start)
        columns = slice(self.columns.start - whole.columns.start, self.columns.stop - whole.columns.start)
        return x[rows, columns]


Extent = tuple[list[int], list[int]]
"""Offset and shape of a part of a parameter."""


def tp_part(shard: ParameterShard, rank: int) -> Extent:
    """The part of a parameter that a tp rank holds, of all dp ranks together."""
    shape = list(shard.part_shape)
    offset = [0] * len(shape)
    if shard.tp_dim is not None:
        offset[shard.tp_dim] = rank // shard.replicas * shape[shard.tp_dim]
    return offset, shape


def dp_part(shard: ParameterShard, rank: int, size: int) -> Extent:
    """The part that a dp rank holds of this tp rank's."""
    offset, shape = tp_part(shard, shard.tp.rank)
    if shard.dp_slice is not None:
        share = -(-shape[0] // size)
        first = min(rank * share, shape[0])
        offset[0] += first
        shape[0] = min(share, shape[0] - first)
    return offset, shape


@dataclass(frozen=True)
class Matrix:
    """A matrix in a weight: the one at `index` of a stack, and of the fused ones in it number `part`.

    Of a stack that is split over ep, this rank's part is numbered from 0.
    """

    shard: ParameterShard
    rows: FusedRows
    """How many parts its rows interleave."""
    index: tuple[int, ...]
    part: int

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the whole matrix."""
        *_, rows, columns = self.shard.global_shape
        return rows // self.rows.parts, columns

    @property
    def cost(self) -> int:
        """Operations of an iteration, in proportion."""
        few, many = sorted(self.shape)
        return few * few * (2 * many + few)

    def region(self, extent: Extent) -> Region:
        """Region of it in a part of its weight; an empty one if none is."""
        (*stack, row, column), (*depth, rows, columns) = extent
        held = all(first <= at < first + n for at, first, n in zip(self.index, stack, depth, strict=True))
        stop = row + rows if held else row
        return Region(range(self._row(row), self._row(stop)), range(column, column + columns))

    def _row(self, row: int) -> int:
        """The number in this matrix of its first row from `row` of the weight on."""
        block, within = divmod(row, self.rows.parts * self.rows.width)
        return block * self.rows.width + min(max(within - self.part * self.rows.width, 0), self.rows.width)

    def rows_in(self, extent: Extent, device: torch.device) -> Tensor | None:
        """Numbers of its rows in a part of its weight; None for all."""
        if self.rows.parts == 1:
            return None
        first, count = extent[0][-2], extent[1][-2]
        numbers = torch.arange(first, first + count)
        return ((numbers // self.rows.width) % self.rows.parts == self.part).nonzero()[:, 0].to(device)


def matrices_of(shard: ParameterShard, *, per_head: bool) -> list[Matrix]:
    """The matrices in a weight, maybe a stack; with `per_head` each head's by themselves."""
    (*stack, _, _), rows = shard.part_shape, shard.global_shape[-2]
    rows_of = getattr(shard.module, "fused_rows", None)
    if isinstance(rows_of, Mapping):
        rows_of = rows_of.get(shard.name.rpartition(".")[2])
    fused: FusedRows = rows_of or FusedRows(1, rows)
    if per_head and fused.are_heads:
        fused = FusedRows(rows // fused.width, fused.width)
    places = product(*map(range, stack))
    return [Matrix(shard, fused, index, part) for index, part in product(places, range(fused.parts))]


@dataclass(frozen=True)
class Piece:
    """A region of one matrix, that one rank sends to another."""

    matrix: int
    region: Region


class Exchange:
    """Messages between the ranks of an axis that form matrices on their owners, and bring results back.

    Args:
        axis: of the ranks.
        owners: owner of each matrix by its number, a rank of the axis.
        held: the region of each matrix that each rank of the axis holds; equal ones are copies.
        like: a tensor of the dtype and device of the messages.
    """

    def __init__(
        self,
        axis: Axis,
        owners: Mapping[int, int],
        held: Mapping[int, Sequence[Region]],
        like: Tensor,
    ) -> None:
        self.axis, self.held, self.like = axis, held, like
        me, ranks = axis.rank, range(axis.size)
        self.mine = [number for number, owner in owners.items() if owner == me]
        self.whole = {number: _union(held[number]) for number in self.mine}
        self.sent: list[list[Piece]] = [[] for _ in ranks]
        self.received: list[list[Piece]] = [[] for _ in ranks]
        self.returned: list[list[Piece]] = [[] for _ in ranks]
        """Results that each rank of the axis gets of this one's."""
        self.taken: list[list[Piece]] = [[] for _ in ranks]
        """Results that this rank gets of each other's."""
        self.gathers = self.scatters = False
        for number, owner in owners.items():
            senders: dict[Region, int] = {held[number][owner]: owner}
            for rank, region in enumerate(held[number]):
                if not region.size or rank == owner:
                    continue
                self.scatters = True
                piece = Piece(number, region)
                if senders.setdefault(region, rank) == rank:
                    self.gathers = True
                    self._add(self.sent, self.received, piece, rank, owner)
                self._add(self.returned, self.taken, piece, owner, rank)

    def _add(
        self, to: list[list[Piece]], of: list[list[Piece]], piece: Piece, source: int, target: int
    ) -> None:
        if source == self.axis.rank:
            to[target].append(piece)
        if target == self.axis.rank:
            of[source].append(piece)

    def gather(self, parts: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The matrices that this rank owns, of the regions that each rank holds."""
        if not self.gathers:
            return {number: parts[number] for number in self.mine}
        me, found = self.axis.rank, dict[int, Tensor]()
        for number in self.mine:
            held, whole = self.held[number][me], self.whole[number]
            found[number] = parts[number].new_empty(whole.shape)
            held.of(found[number], whole).copy_(parts[number])
        origins = {number: regions[me] for number, regions in self.held.items()}
        for piece, x in self._send(parts, origins, self.sent, self.received):
            piece.region.of(found[piece.matrix], self.whole[piece.matrix]).copy_(x)
        return found

    def scatter(self, results: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The regions that this rank holds, of the results of their owners; without empty ones."""
        me = self.axis.rank
        found = {n: self.held[n][me].of(results[n], self.whole[n]) for n in self.mine if n in results}
        if self.scatters:
            for piece, x in self._send(results, self.whole, self.returned, self.taken):
                found[piece.matrix] = x
        return found

    def _send(
        self,
        tensors: Mapping[int, Tensor],
        origins: Mapping[int, Region],
        to: Sequence[Sequence[Piece]],
        of: Sequence[Sequence[Piece]],
    ) -> Iterator[tuple[Piece, Tensor]]:
        """Exchange pieces of tensors, which hold the regions `origins`; yield those that arrive."""
        flat = [
            piece.region.of(tensors[piece.matrix], origins[piece.matrix]).reshape(-1)
            for pieces in to
            for piece in pieces
        ]
        sent = torch.cat([self.like.new_empty(0), *flat])
        sizes = [[sum(piece.region.size for piece in pieces) for pieces in each] for each in (to, of)]
        arrived = start_all_to_all(sent, self.axis, sizes[0], sizes[1]).wait()
        first = 0
        for piece in (piece for pieces in of for piece in pieces):
            yield piece, arrived[first : first + piece.region.size].view(piece.region.shape)
            first += piece.region.size


def _union(regions: Sequence[Region]) -> Region:
    some = [region for region in regions if region.size] or regions[:1]
    return Region(
        range(min(r.rows.start for r in some), max(r.rows.stop for r in some)),
        range(min(r.columns.start for r in some), max(r.columns.stop for r in some)),
    )


class Bucket:
    """Some weights, whose matrices are formed at once.

    Args:
        shards: the weights.
        dp: ranks that hold the same part of the model, or rows of it.
        dtype: of the matrices.
    """

    def __init__(
        self, shards: Sequence[ParameterShard], dp: Axis, dtype: torch.dtype, *, per_head: bool
    ) -> None:
        self.shards, tp = shards, shards[0].tp
        device = shards[0].parameter.device
        self.matrices = [m for shard in shards for m in matrices_of(shard, per_head=per_head)]
        owners = assign(self.matrices, dp.size, tp.size)
        like = torch.empty(0, dtype=dtype, device=device)
        self.over_dp = Exchange(
            dp,
            {n: owner[0] for n, owner in enumerate(owners)},
            {
                n: [m.region(dp_part(m.shard, rank, dp.size)) for rank in range(dp.size)]
                for n, m in enumerate(self.matrices)
            },
            like,
        )
        self.over_tp = Exchange(
            tp,
            {n: owners[n][1] for n in self.over_dp.mine},
            {
                n: [self.matrices[n].region(tp_part(self.matrices[n].shard, rank)) for rank in range(tp.size)]
                for n in self.over_dp.mine
            },
            like,
        )
        parts = [dp_part(m.shard, dp.rank, dp.size) for m in self.matrices]
        self.rows = [m.rows_in(part, device) for m, part in zip(self.matrices, parts, strict=True)]
        self.stacked = [_stacked(m, part) for m, part in zip(self.matrices, parts, strict=True)]

    def transform(
        self, tensors: Mapping[nn.Parameter, Tensor], function: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[Matrix, tuple[int, ...], Tensor | None, Tensor]]:
        """Apply a function to whole matrices of tensors that are laid out like the weights.

        Yield for each matrix that this rank holds some of: it, where in the stack and which rows of the
        weight it is (None for all), and this rank's region of the result. Collective.
        """
        parts = dict[int, Tensor]()
        for n, matrix in enumerate(self.matrices):
            x = tensors[matrix.shard.parameter]
            where, rows = self.stacked[n], self.rows[n]
            x = x.new_empty(self.over_dp.held[n][self.over_dp.axis.rank].shape) if where is None else x[where]
            parts[n] = x if rows is None or where is None else x[rows]
        gathered = self.over_tp.gather(self.over_dp.gather(parts))
        whole = dict(sorted(gathered.items(), key=lambda item: -item[1].numel()))  # so threads end together
        results = dict(zip(whole, _apply(function, list(whole.values())), strict=True))
        found = self.over_dp.scatter(self.over_tp.scatter(results))
        for n, matrix in enumerate(self.matrices):
            where = self.stacked[n]
            if where is not None and n in found:
                yield matrix, where, self.rows[n], found[n]


def _apply(function: Callable[[Tensor], Tensor], matrices: Sequence[Tensor]) -> list[Tensor]:
    """Apply a function to each matrix: on a CPU in several threads of one matrix each, with the same bits.

    The products of one matrix keep two threads less busy: at width 384 they take as long as on one.
    """
    threads = torch.get_num_threads()
    if threads == 1 or len(matrices) < threads or not matrices[0].is_cpu:
        return [function(x) for x in matrices]
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(function, matrices))
    finally:
        torch.set_num_threads(threads)  # the newest call's is what new threads begin with


def _stacked(matrix: Matrix, part: Extent) -> tuple[int, ...] | None:
    """The index of a matrix in a part of its stack, () in a weight of one; None if it is not there."""
    (*stack, _, _), (*depth, _, _) = part
    index = tuple(at - first for at, first in zip(matrix.index, stack, strict=True))
    return index if all(0 <= at < n for at, n in zip(index, depth, strict=True)) else None


def assign(matrices: Sequence[Matrix], dp: int, tp: int) -> list[tuple[int, int]]:
    """Owners (dp rank, tp rank) of matrices: the most expensive first, each to the rank with the least."""
    loads = [(0, rank) for rank in range(dp * tp)]
    owners = [(0, 0)] * len(matrices)
    for n in sorted(range(len(matrices)), key=lambda n: (-matrices[n].cost, n)):
        load, rank = loads[0]
        owners[n] = divmod(rank, tp)
        heapreplace(loads, (load + matrices[n].cost, rank))
    return owners


def buckets(
    shards: Sequence[ParameterShard], replicas: Axis, dtype: torch.dtype, *, per_head: bool
) -> list[Bucket]:
    """Weights in buckets of about BUCKET elements of a tp rank's part, the same on all ranks.

    Those of a bucket are exchanged between the same ranks: of experts, those of their own axes.
    """
    groups: list[list[ParameterShard]] = []
    by_axes = sorted(shards, key=lambda shard: shard.experts is not None)  # experts last, else as they are
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
