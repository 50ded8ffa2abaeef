"""Low-rank adapters of frozen linear layers: y = W x + s B A x (arXiv:2106.09685, section 4.1).

Ranks exchange activations of width r. For a layer split by column, A is replicated and B split like the
layer; for one split by row, A is split and B replicated. With sequence parallelism the replicated one sees
this rank's rows of the sequence, and its gradient is summed over tp.

A fused weight has an adapter for each part, so that queries and values may have one and keys none.

A trained magnitude is the difference between the norms of a row of W + s B A and of W (arXiv:2402.09353,
equation 5); both norms are constants in backward (section 4.3).

Shapes: S sequence, B micro-batch, I in, O out, r rank, P fused parts of which p have adapters, t =
tensor-parallel size; of experts as in expert/experts.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from mlm.parallel.collectives import all_reduce, copy_to_tp, gather_sequence
from mlm.parallel.compute_state import skip_compile
from mlm.parallel.context import local_positions
from mlm.parallel.dropout import DropoutStream, site_keys
from mlm.parallel.expert.experts import Experts, grouped_linear
from mlm.parallel.layers import ColumnParallelLinear, FusedRows, RowParallelLinear
from mlm.parallel.linear import linear
from mlm.parallel.matmul import GroupedRows
from mlm.parallel.mesh import Axis
from mlm.parallel.sharding import shard_of


@dataclass(frozen=True)
class WeightChange:
    """Sum that adapters add to a full weight, [O, I] or of experts, and the new norms of its rows."""

    change: Tensor
    magnitude: Tensor | None = None

    def apply_to(self, weight: Tensor, region: tuple[slice, ...], tp: Axis) -> Tensor:
        """Return a changed region of the weight; ranks of `tp` have different columns. Collective."""
        changed = weight + self.change[region]
        if self.magnitude is None:
            return changed
        # in float64, so that the sums over ranks round alike at every tp
        factors = row_factors(weight.double(), changed.double(), self.magnitude[region[0]], tp)
        return (changed * factors[:, None]).to(changed.dtype)


@dataclass(frozen=True)
class AdaptedRows:
    """Rows of a weight that fuses P parts, `[block][part][size]`, and the parts that have adapters."""

    parts: int = 1
    adapted: tuple[int, ...] = (0,)

    def place(self, adapted: Sequence[Tensor]) -> Tensor:
        """Order values of adapted parts [..., block, size] as the weight, 0 for other parts: [..., O]."""
        values, zeros = dict(zip(self.adapted, adapted, strict=True)), torch.zeros_like(adapted[0])
        return torch.stack([values.get(part, zeros) for part in range(self.parts)], -2).flatten(-3)


class LowRankAdapter(nn.Module):
    """Adds s B A x, of this rank's output features, to the output of a linear layer; initially 0, like B.

    Args:
        layer: the layer that it adapts.
        rank: r.
        scale: s.
        rows: order of the layer's output features.
        dropout: probability of dropping elements of x on this path.
        dora: train magnitudes too.
        site: global number of the transformer layer and a name in it, for the dropout masks.
        cp: axis that splits sequences.
    """

    constant_sides: ClassVar[dict[str, str]] = {"a": "out", "b": "in"}
    dropout_keys: Tensor

    def __init__(
        self,
        layer: ColumnParallelLinear | RowParallelLinear,
        *,
        rank: int,
        scale: float,
        rows: AdaptedRows,
        dropout: float = 0.0,
        dora: bool = False,
        site: tuple[int, str] = (0, ""),
        cp: Axis | None = None,
    ) -> None:
        super().__init__()
        self.tp, self.cp = layer.tp, cp or Axis("cp")
        self.scale, self.rows, self.dropout = scale, rows, dropout
        self.by_column = isinstance(layer, ColumnParallelLinear)
        self.sequence_parallel, self.replicas = layer.sequence_parallel, layer.replicas
        self.reduce_output = layer.reduce_output
        out, in_size = layer.weight.shape
        self.size, self.columns = out, in_size
        if rows.parts > 1:
            assert layer.fused_rows is not None
            self.size = layer.fused_rows.width
        count = len(rows.adapted)
        self.tp_dims = {"b": 0, "magnitude": 0} if self.by_column else {"a": 1}
        # the variance of peft's uniform A
        full = in_size if self.by_column else in_size * self.tp.size
        self.init_stds = {"a": (3 * full) ** -0.5, "b": 0.0, "magnitude": 0.0}
        self.fused_rows = {"a": FusedRows(count, rank), "b": FusedRows(count, self.size)}
        self.a = nn.Parameter(torch.empty(count * rank, in_size))  # [p r, I], by row [r, I/t]
        self.b = nn.Parameter(torch.zeros(out // rows.parts * count, rank))  # [p O / (P t), r], by row [O, r]
        self.magnitude = nn.Parameter(torch.zeros(len(self.b))) if dora else None  # norm of a row less W's
        self.register_buffer("dropout_keys", site_keys([site]), persistent=False)
        self.stream: DropoutStream | None = None

    def forward(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the layer's output `y` for this input, weight and bias, with the adapter's output added."""
        if self.dropout and self.stream is not None:
            x = self.drop(x, self.stream)
        count = len(self.rows.adapted)
        z = linear(x, self.a) * self.scale  # [S, B, p r]
        if not self.by_column:
            change = linear(self.reduce_output(z), self.b)
        else:
            z = gather_sequence(z, self.tp) if self.sequence_parallel else copy_to_tp(z, self.tp)
            if self.rows.parts == 1:
                change = linear(z, self.b)
            else:
                blocks = self.b.unflatten(0, (-1, count, self.size))  # [blocks/t, p, size, r]
                products = [
                    linear(part, b.flatten(0, 1)).unflatten(-1, (-1, self.size))
                    for part, b in zip(z.chunk(count, -1), blocks.unbind(1), strict=True)
                ]
                change = self.rows.place(products)
        if self.magnitude is None:
            return y + change
        weight = weight.to(self.a.dtype)
        changed = weight + weight_change(self.a.detach(), self.b.detach(), self.scale, self.rows, self.size)
        norms = self.in_order(self.magnitude)
        factors = row_factors(weight, changed, norms, Axis("tp") if self.by_column else self.tp).to(y.dtype)
        offset = 0.0 if bias is None else bias.to(y.dtype)
        return factors * (y - offset + change) + offset

    def in_order(self, magnitude: Tensor) -> Tensor:
        """Order magnitudes of B's rows as the weight's rows: [O/t], 0 for parts without adapters."""
        parts = magnitude.unflatten(0, (-1, len(self.rows.adapted), self.size))
        return self.rows.place(parts.unbind(1))

    @skip_compile  # masks of another micro-batch are another graph
    def drop(self, x: Tensor, stream: DropoutStream) -> Tensor:
        is_split = self.sequence_parallel and self.by_column
        length = x.shape[0] * self.cp.size * (self.tp.size if is_split else 1)
        rows = local_positions(length, self.cp, x.device)
        first = 0 if self.by_column else self.tp.rank * self.columns
        return stream.features(
            x,
            self.dropout,
            self.dropout_keys[0],
            rows=shard_of(rows, self.tp, 0) if is_split else rows,
            columns=range(first, first + self.columns),
            width=self.columns if self.by_column else self.columns * self.tp.size,
        )


class ExpertAdapter(nn.Module):
    """Low-rank adapters of both weights of each of the e experts of a layer, without dropout.

    Each rank of an expert's tp has a term of y, so gradients of replicated matrices, A of W1 and B of W2, are
    summed over tp.
    """

    tp_dims: ClassVar[dict[str, int]] = {"up_b": 2, "down_a": 2}
    constant_sides: ClassVar[dict[str, str]] = {"up_a": "out", "up_b": "in", "down_a": "out", "down_b": "in"}
    is_partial = True

    def __init__(self, experts: Experts, *, rank: int, scale: float) -> None:
        super().__init__()
        self.scale, self.expert_axes = scale, experts.expert_axes
        count, hidden, width = experts.down.shape
        self.init_stds = {
            "up_a": (3 * hidden) ** -0.5,
            "down_a": (3 * width * experts.expert_axes.tp.size) ** -0.5,
            **dict.fromkeys(("up_b", "down_b"), 0.0),
        }
        self.up_a = nn.Parameter(torch.empty(count, rank, hidden))  # [e, r, H]
        self.up_b = nn.Parameter(torch.zeros(count, 2, width, rank))  # [e, 2, F/t, r]
        self.down_a = nn.Parameter(torch.empty(count, rank, width))  # [e, r, F/t]
        self.down_b = nn.Parameter(torch.zeros(count, hidden, rank))  # [e, H, r]

    def term(self, x: Tensor, runs: GroupedRows, weight: str) -> Tensor:
        """Return the adapter's term of a weight, up or down, times x: [R, I] -> [R, O]."""
        a, b = (getattr(self, f"{weight}_{part}") for part in "ab")
        return grouped_linear(grouped_linear(x, a, runs) * self.scale, b, runs)


def weight_change(a: Tensor, b: Tensor, scale: float, rows: AdaptedRows, size: int) -> Tensor:
    """Return s B A in the order of the layer's weight, [O, I], from full A and B or a rank's parts."""
    count = len(rows.adapted)
    products = b.unflatten(0, (-1, count, size)) @ a.unflatten(0, (count, -1))  # [block, p, size, I]
    return rows.place((scale * products).movedim(-1, 0).unbind(-2)).t()


def row_factors(weight: Tensor, changed: Tensor, magnitude: Tensor, tp: Axis) -> Tensor:
    """Return factors that scale changed rows to the norms of W plus `magnitude`: [O]. Collective.

    Ranks of `tp` have different columns of both weights.
    """
    with torch.no_grad():
        squares = torch.stack([weight.square().sum(1), changed.square().sum(1)])
        before, after = all_reduce(squares, tp).sqrt().unbind()
    return (before + magnitude) / after.clamp(min=torch.finfo(after.dtype).tiny)
