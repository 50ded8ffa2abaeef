"""Tensor-parallel layers: linear layers split by column or by row, and the split token table.

Source: Shoeybi et al. 2019 (arXiv:1909.08053), section 3. With sequence parallelism (arXiv:2205.05198,
section 4.2.2) tensors replicated over tp below are split along S: [S/t, B, …] in place of [S, B, …].

A layer's `state_dict` holds this rank's shard: save one file per tp rank and load it at the same tp. For
loading at any tp, `save_checkpoint` of mlm/checkpoint/native/save_load.py saves the shards of
`parameter_shards` (mlm/parallel/sharding.py).

Shapes: S sequence, B micro-batch, I in, O out, H hidden, V padded vocabulary, t = tensor-parallel size.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlm.parallel.collectives import reduce_from_tp, scatter_sequence
from mlm.parallel.compute_state import ComputesInHalf, choose_copy
from mlm.parallel.linear import column_parallel_linear, linear, row_parallel_linear
from mlm.parallel.mesh import Axis
from mlm.parallel.nf4 import linear_weight
from mlm.parallel.random import init_parameters
from mlm.util.errors import type_of


def split(size: int, name: str, tp: Axis) -> int:
    """One rank's share of `size`. Raises ValueError, naming `name`, when tp does not divide it."""
    if size % tp.size:
        raise ValueError(f"{name}={size} must be divisible by tp={tp.size}")
    return size // tp.size


class FusedRows(NamedTuple):
    """Several matrices in the rows of one weight, ordered `[block][part][width]`."""

    parts: int
    width: int
    are_heads: bool = False
    """True if each block of `width` rows belongs to one attention head."""


class TensorParallelLayer(ComputesInHalf):
    """A layer split over tp.

    Args:
        sequence_parallel: split replicated activations along S.
        init_std: standard deviation of the initial weights; biases are zero.
        init_seed: seed of the initial weights, which are equal at every tp. Layers of one seed and shape
            start equal: use different seeds. None leaves weights unset (for `init_parameters`, a checkpoint).
    """

    weight: nn.Parameter
    replicas: int = 1
    """Neighbouring tp ranks with the same part, over which its gradient is summed."""
    fused_rows: FusedRows | None = None
    """Matrices that the rows of the weight interleave; None for one matrix."""

    def __init__(self, *, tp: Axis, sequence_parallel: bool, init_std: float) -> None:
        super().__init__()
        if not isinstance(tp, Axis):
            raise TypeError(f"tp: {type_of(tp)}, not an Axis; pass mlm.build_mesh(tp=…).tp")
        self.tp, self.sequence_parallel, self.init_std = tp, sequence_parallel and tp.size > 1, init_std
        self.lora: nn.Module | None = None

    def add_adapter_output(self, y: Tensor, x: Tensor) -> Tensor:
        """Add the adapter's output (low_rank.py), if any, to the layer's output `y`."""
        return y if self.lora is None else self.lora(x, y, self.weight, self.bias)

    def initialise(self, seed: int | None) -> None:
        if seed is not None:
            init_parameters(self, seed, self.tp)

    def cached_half_params(self, dtype: torch.dtype) -> dict[str, bool]:
        """Weight and bias, whose gradients the product returns."""
        return {"weight": False, "bias": False}

    def weight_in(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in a dtype, without autograd."""
        return choose_copy(self.compute.weight_copy, self.weight, dtype).to(dtype)

    def reduce_output(self, x: Tensor) -> Tensor:
        """g: sum the partial results `x` over tp."""
        g = scatter_sequence if self.sequence_parallel else reduce_from_tp
        return g(x, self.tp)


class ColumnParallelLinear(TensorParallelLayer):
    """Linear layer split over its output features: y_i = x A_i + b_i, after the paper's f.

    With `replicas` r, r neighbouring ranks hold each part, so that t/r must divide O; weight gradients are
    then summed over these ranks (`sum_replicated_gradients`).

    Shapes:
        x  [S, B, I]      replicated over tp
        y  [S, B, O r/t]  this rank's output features
    """

    tp_dims: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: Axis,
        sequence_parallel: bool = False,
        init_std: float = 0.02,
        init_seed: int | None = 0,
        bias: bool = True,
        replicas: int = 1,
    ) -> None:
        super().__init__(tp=tp, sequence_parallel=sequence_parallel, init_std=init_std)
        self.replicas = replicas
        shard_size = split(out_features * replicas, "out_features", self.tp)
        self.weight = linear_weight(shard_size, in_features)  # [O r/t, I]
        self.bias = nn.Parameter(torch.zeros(shard_size)) if bias else None  # [O r/t]
        self.initialise(init_seed)

    def extra_repr(self) -> str:
        out = self.weight.shape[0] * self.tp.size // self.replicas
        return f"in={self.weight.shape[1]}, out={out}, tp={self.tp.size}"

    def forward(self, x: Tensor) -> Tensor:
        y = column_parallel_linear(
            x, self.weight, self.bias, self.tp, sequence_parallel=self.sequence_parallel, compute=self.compute
        )
        return self.add_adapter_output(y, x)


class RowParallelLinear(TensorParallelLayer):
    """Linear layer split over its input features: y = sum_i x_i A_i + b, with the paper's g for the sum.

    Shapes:
        x  [S, B, I/t]  this rank's input features
        y  [S, B, O]    replicated over tp
    """

    tp_dims: ClassVar[dict[str, int]] = {"weight": 1}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tp: Axis,
        sequence_parallel: bool = False,
        init_std: float = 0.02,
        init_seed: int | None = 0,
        bias: bool = True,
    ) -> None:
        super().__init__(tp=tp, sequence_parallel=sequence_parallel, init_std=init_std)
        shard_size = split(in_features, "in_features", self.tp)
        self.weight = linear_weight(out_features, shard_size)  # [O, I/t]
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None  # [O], replicated
        self.initialise(init_seed)

    def extra_repr(self) -> str:
        return f"in={self.weight.shape[1] * self.tp.size}, out={self.weight.shape[0]}, tp={self.tp.size}"

    def cached_half_params(self, dtype: torch.dtype) -> dict[str, bool]:
        """Weight and bias; the bias is added outside the product if that is summed over tp."""
        return {"weight": False, "bias": self.tp.size > 1}

    def forward(self, x: Tensor) -> Tensor:
        if self.tp.size == 1:
            return self.add_adapter_output(linear(x, self.weight, self.bias, self.compute), x)
        rows = x.shape[0] // self.tp.size if self.sequence_parallel else x.shape[0]
        # add the bias after the sum, or it would be added t times
        if self.compute.overlap_chunks > 1 and rows % self.compute.overlap_chunks == 0:
            y = row_parallel_linear(
                x, self.weight, self.tp, sequence_parallel=self.sequence_parallel, compute=self.compute
            )
        else:
            y = self.reduce_output(linear(x, self.weight, None, self.compute))
        return self.add_adapter_output(y if self.bias is None else y + self.in_dtype("bias", x.dtype), x)


class VocabParallelEmbedding(TensorParallelLayer):
    """Token table split over its rows. Tokens of other ranks' rows give zeros, and g sums over ranks.

    Rows from `true_rows` on pad the vocabulary to a multiple of tp (arXiv:1909.08053, section 3): no token
    reads them and the loss masks them. `is_tied_copy` marks the last pipeline stage's copy for the output
    layer; the first stage's table counts and is stored.

    Shapes:
        tokens  [S, B]     int64, replicated over tp
        y       [S, B, H]  replicated over tp
    """

    tp_dims: ClassVar[dict[str, int]] = {"weight": 0}
    compiled: bool = False
    """True if the loss may be computed by compiled passes (logits.py)."""
    softcap: float = 0.0
    """Bound of logits, softcap * tanh(logits / softcap); 0 for none."""
    exact_loss: Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]] | None = None
    """Loss and hits of hidden states, labels, scale and bias in one order at every layout (exact_loss.py)."""
    add_lookup: Callable[[Tensor], None] | None = None
    """Receives the gradient of each lookup with exact=N (exact_gradients.py)."""
    device_type: str | None = None
    """Device type whose chunk sizes the loss uses; None for the type of its tensors."""
    fuses_grad: bool = False
    """True if a forward pass of the loss adds the weight's gradient for a seed of 1 to `weight.grad`, so that
    nothing of the table's size is saved for backward (`fuse_embedding_grad`). On a CPU the backward pass of a
    lookup adds its rows there, too."""

    def __init__(
        self,
        vocab_size: int,
        padded_vocab_size: int,
        hidden_size: int,
        *,
        tp: Axis,
        is_tied_copy: bool = False,
        sequence_parallel: bool = False,
        init_std: float = 0.02,
        init_seed: int | None = 0,
    ) -> None:
        super().__init__(tp=tp, sequence_parallel=sequence_parallel, init_std=init_std)
        self.true_rows, self.is_tied_copy = vocab_size, is_tied_copy
        shard_size = split(padded_vocab_size, "padded_vocab_size", self.tp)
        self.first = self.tp.rank * shard_size
        self.weight = nn.Parameter(torch.empty(shard_size, hidden_size))  # [V/t, H]
        self.initialise(init_seed)

    def extra_repr(self) -> str:
        padded = self.weight.shape[0] * self.tp.size
        return f"vocab={self.true_rows}, padded={padded}, hidden={self.weight.shape[1]}, tp={self.tp.size}"

    @property
    def true_local_rows(self) -> int:
        return min(max(self.true_rows - self.first, 0), self.weight.shape[0])

    @property
    def fuses_now(self) -> bool:
        """True if this pass adds to the gradient itself; needs gradients enabled."""
        return self.fuses_grad and self.weight.requires_grad and torch.is_grad_enabled()

    def forward(self, tokens: Tensor) -> Tensor:
        foreign: Tensor | None = None
        if self.tp.size > 1:
            tokens = tokens - self.first
            foreign = (tokens < 0) | (tokens >= self.weight.shape[0])
            tokens = tokens.masked_fill(foreign, 0)
        if self.fuses_now and self.weight.is_cpu:
            y: Tensor = _Lookup.apply(tokens, self.weight, True)  # type: ignore[no-untyped-call]
        else:
            y = embedding_lookup(tokens, self.weight)
        return y if foreign is None else self.reduce_output(y.masked_fill(foreign.unsqueeze(-1), 0.0))


def embedding_lookup(rows: Tensor, weight: Tensor) -> Tensor:
    """Return rows of a table, differentiable: [...] int64, [N, H] -> [..., H].

    The gradient of a half-precision table (gathered by zero=2|3) is summed in float32: in bfloat16 the sum of
    the CPU's kernel stops growing, 87 % off for two rows read 8,192 times.
    """
    if weight.is_cpu and weight.dtype in (torch.bfloat16, torch.float16):
        return _Lookup.apply(rows, weight, False)  # type: ignore[no-untyped-call, no-any-return]
    return F.embedding(rows, weight)


class _Lookup(torch.autograd.Function):
    """As `embedding_lookup`; with `into_grad` backward adds the gradients of the rows to `weight.grad`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, into_grad: bool) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.size, ctx.dtype, ctx.weight = len(weight), weight.dtype, weight if into_grad else None
        return F.embedding(rows, weight)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None]:
        (rows,), weight = ctx.saved_tensors, ctx.weight
        sums_of = torch.ops.aten.embedding_dense_backward
        if weight is None:
            return None, sums_of(dy.float(), rows, ctx.size, -1, False).to(ctx.dtype), None
        dy = dy.flatten(0, -2).to(torch.promote_types(dy.dtype, torch.float32))
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        # each row's sum first, in the order of its tokens, as in autograd
        if ctx.size <= rows.numel():  # a small table: finding the rows takes longer than adding all
            weight.grad += sums_of(dy, rows.flatten(), ctx.size, -1, False)
        else:
            distinct, index = rows.flatten().unique(return_inverse=True)
            sums = sums_of(dy, index, distinct.shape[0], -1, False)
            weight.grad.index_copy_(0, distinct, weight.grad.index_select(0, distinct).add_(sums))
        return None, None, None
