"""Every tensor-parallel layer against one process: outputs, input, weight and bias gradients, in float64."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mlm.parallel.collectives import Pending, all_reduce, copy_to_tp
from mlm.parallel.compute_state import ComputeState, DeferredWeightGrads
from mlm.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from mlm.parallel.linear import linear, row_parallel_linear
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.parallel.sharding import load_full, shard_of
from tests.ranks import on_ranks, run_on_ranks

Linear = ColumnParallelLinear | RowParallelLinear
LAYOUTS = [(1, False, 1), (4, False, 1), (2, True, 1), (4, False, 3), (2, True, 3), (4, True, 2)]
"""(tp, sequence_parallel, parts). Of 8 rows, or those of a rank; 3 divides neither."""


@pytest.mark.parametrize("later", [False, True], ids=["at once", "deferred"])
@pytest.mark.parametrize(("tp", "sequence", "parts"), LAYOUTS)
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@on_ranks()
def test_split_linear_layers_match_one_process(
    ctx: ParallelContext, kind: type[Linear], sequence: bool, parts: int, later: bool, tp: int
) -> None:
    """y, dx, dW and db equal those of an unsplit nn.Linear with the same weights."""
    tp, by_column = ctx.tp, kind is ColumnParallelLinear
    rows = partial(shard_of, axis=tp, dim=0) if sequence else torch.clone
    features = partial(shard_of, axis=tp, dim=-1)
    split_x, split_y = (rows, features) if by_column else (features, rows)
    dense, x, dy = dense_layer(8, 12)
    y_dense = dense(x)
    y_dense.backward(dy)
    layer = kind(8, 12, tp=tp, sequence_parallel=sequence).double()
    layer.compute.overlap_chunks = parts
    load_full(layer, {"weight": dense.weight.detach(), "bias": dense.bias.detach()}, tp)
    x_tp = split_x(x.detach()).requires_grad_()
    y = run_layer(layer, x_tp, split_y(dy), later)

    torch.testing.assert_close(y, split_y(y_dense))  # by row needs g's sum, and the bias once
    torch.testing.assert_close(x_tp.grad, split_x(x.grad))  # by column needs the sum over tp
    torch.testing.assert_close(layer.weight.grad, shard_of(dense.weight.grad, tp, 0 if by_column else 1))
    if by_column:
        torch.testing.assert_close(layer.bias.grad, shard_of(dense.bias.grad, tp, 0))
    else:
        bias = all_reduce(layer.bias.grad, tp) if sequence else layer.bias.grad  # each has seen its rows
        torch.testing.assert_close(bias, dense.bias.grad)


def run_layer(layer: Linear, x: Tensor, dy: Tensor, later: bool) -> Tensor:
    """Forward and backward; `later` puts the weight's gradient off and runs it at the end."""
    if later:
        layer.compute.deferred = DeferredWeightGrads()
        layer.compute.deferred.open = True
    y = layer(x)
    y.backward(dy)
    if layer.compute.deferred is not None:
        assert layer.weight.grad is None
        (job,) = layer.compute.deferred.take()
        job()
        assert layer.compute.deferred.take() == []
    return y


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_size_that_tp_does_not_divide_is_named(kind: type[Linear]) -> None:
    with pytest.raises(ValueError, match="features=6 must be divisible by tp=4"):
        kind(6, 6, tp=Axis("tp", 0, 4))


class Casts(TorchDispatchMode):
    """Shapes of the tensors that are cast to another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten._to_copy.default:
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_a_master_weight_is_cast_once_for_all_parts_of_a_backward_pass() -> None:
    x = torch.randn(8, 2, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = nn.Parameter(torch.randn(6, 4))
    y = row_parallel_linear(
        x, weight, Axis("tp"), sequence_parallel=True, compute=ComputeState(overlap_chunks=4)
    )
    casts = Casts()
    with casts, torch.autograd.set_multithreading_enabled(False):
        y.backward(torch.randn_like(y))
    assert casts.shapes.count((6, 4)) == 2  # the weight, and its gradient


def dense_layer(in_features: int, out_features: int) -> tuple[nn.Linear, Tensor, Tensor]:
    """The same dense layer, input and random output gradient on every rank (so swapped shards show)."""
    torch.manual_seed(0)
    dense = nn.Linear(in_features, out_features).double()
    x = torch.randn(8, 2, in_features, dtype=torch.float64, requires_grad=True)  # [S, B, I]
    return dense, x, torch.randn(8, 2, out_features, dtype=torch.float64)


@pytest.mark.parametrize(("tp", "sequence"), [(1, False), (4, False), (2, True)])
@on_ranks()
def test_vocab_parallel_embedding_matches_one_process(ctx: ParallelContext, sequence: bool, tp: int) -> None:
    """Outputs and the table's gradient equal nn.Embedding's; padding rows get none."""
    tp = ctx.tp
    rows = partial(shard_of, axis=tp, dim=0) if sequence else torch.clone
    torch.manual_seed(0)
    dense = nn.Embedding(10, 3).double()
    tokens = torch.randint(0, 10, (8, 2))
    dy = torch.randn(8, 2, 3, dtype=torch.float64)
    y_dense = dense(tokens)
    y_dense.backward(dy)
    layer = VocabParallelEmbedding(10, 12, 3, tp=tp, sequence_parallel=sequence).double()
    load_full(layer, {"weight": dense.weight.detach()}, tp)
    y = layer(tokens)
    y.backward(rows(dy))

    torch.testing.assert_close(y, rows(y_dense))
    padded = torch.cat([dense.weight.grad, torch.zeros(2, 3, dtype=torch.float64)])
    torch.testing.assert_close(layer.weight.grad, shard_of(padded, tp, 0))


@pytest.mark.parametrize("rows", [4097, 64 * 2049], ids=str)
def test_gradient_of_a_bias_is_added_up_in_its_own_dtype(rows: int) -> None:
    """Ones, whose sum neither half format holds; whole runs of bfloat16 are added by themselves."""
    for dtype in (torch.bfloat16, torch.float16):
        weight, bias = torch.zeros(2, 3), torch.zeros(2, requires_grad=True)
        linear(torch.zeros(rows, 3, dtype=dtype), weight, bias).backward(torch.ones(rows, 2, dtype=dtype))
        assert bias.grad.tolist() == [rows, rows]


def test_gradient_of_a_bias_is_no_more_than_a_rounding_off_in_bfloat16() -> None:
    """Of random rows, whose runs are rounded one by one: 2^-9, as the weight's gradient is."""
    torch.manual_seed(0)
    dy, bias = torch.randn(2048, 256, dtype=torch.bfloat16), torch.zeros(256, requires_grad=True)
    linear(torch.zeros(2048, 3, dtype=torch.bfloat16), torch.zeros(256, 3), bias).backward(dy)
    exact = dy.double().sum(0)
    assert (bias.grad - exact).norm() <= 2**-9 * exact.norm()


@pytest.mark.parametrize("sequence", [False, True])
def test_the_sum_over_tp_is_under_way_while_gradients_of_parameters_are_computed(
    monkeypatch: pytest.MonkeyPatch, sequence: bool
) -> None:
    events: list[str] = []

    class Begun(Pending):
        def wait(self) -> Tensor:
            events.append("wait")
            return super().wait()

    def begin(x: Tensor, axis: Axis) -> Pending:
        events.append("begin")
        out = x[: x.shape[0] // axis.size].clone() if sequence else x
        return Begun("sum", axis, out, None)

    def product(dy: Tensor, x: Tensor, _: torch.dtype) -> Tensor:
        events.append("weight gradient")
        return dy.t() @ x

    def bias_sum(dy: Tensor, _: torch.dtype) -> Tensor:
        events.append("bias gradient")
        return dy.sum(0)

    monkeypatch.setattr("mlm.parallel.linear.start_all_reduce", begin)
    monkeypatch.setattr("mlm.parallel.linear.start_reduce_scatter", begin)
    monkeypatch.setattr("mlm.parallel.linear.weight_gradient", product)
    monkeypatch.setattr("mlm.parallel.linear.bias_gradient", bias_sum)
    layer = ColumnParallelLinear(6, 8, tp=Axis("tp", 0, 2), sequence_parallel=sequence)
    layer(torch.randn(4, 2, 6, requires_grad=True)).sum().backward()
    assert events == ["begin", "weight gradient", "bias gradient", "wait"]


def test_the_backward_sum_of_f_leaves_gradients_of_others_alone() -> None:
    """Autograd hands one tensor to both users of x: reduced in place, the other's would be summed too."""
    assert run_on_ranks(gradient_of_both_users, tp=2) == [[3.0, 3.0], [3.0, 3.0]]


def gradient_of_both_users(ctx: ParallelContext) -> list[float]:
    x = torch.ones(2, requires_grad=True)
    (copy_to_tp(x, ctx.tp) + x).backward(torch.ones(2))
    return x.grad.tolist()


@on_ranks(tp=2)
def test_lone_layers_hold_initial_weights_that_are_equal_at_every_tp(ctx: ParallelContext) -> None:
    """N(0, init_std²) of one seed, cut over tp; biases zero; padding rows of the table zero."""
    tp, one = ctx.tp, Axis("tp")
    for build, dim in (
        (lambda axis: ColumnParallelLinear(64, 96, tp=axis, init_std=0.5), 0),
        (lambda axis: RowParallelLinear(64, 96, tp=axis, init_std=0.5), 1),
        (lambda axis: VocabParallelEmbedding(90, 96, 64, tp=axis, init_std=0.5), 0),
    ):
        whole, mine = build(one), build(tp)
        assert torch.equal(mine.weight, shard_of(whole.weight, tp, dim))
        drawn = whole.weight[:90]
        assert drawn.std().item() == pytest.approx(0.5, rel=0.05)  # of 5,760 numbers: 1 % is one deviation
    assert torch.equal(whole.weight[90:], torch.zeros(6, 64))
