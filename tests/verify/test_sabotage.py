"""Each mechanism of a layout, broken on purpose: the comparison with one process must notice, and say where.

A rank replaces a function by a broken one while it compares. Those that act along an axis do nothing on the
one process they are compared with; the others are written so as to leave it alone.
"""

from copy import copy
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.data.sampler import Batch, RankSampler
from mlm.models.gpt2.model import NextToken
from mlm.models.llama.model import Llama
from mlm.models.rotary import Rotary
from mlm.optim.clip import gradient_norm
from mlm.optim.precision import parameter_dtype
from mlm.parallel.collectives import Pending, reduce_scatter
from mlm.parallel.dropout import DropoutStream
from mlm.parallel.expert.experts import Experts, grouped_linear
from mlm.parallel.expert.router import drop_choices
from mlm.parallel.layers import RowParallelLinear
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.parallel.sharding import ParameterShard, parameters_by_axis
from mlm.training.observer import StepOutcome
from mlm.training.trainer import Trainer
from mlm.verify.verdict import Verdict
from tests.ranks import run_on_ranks
from tests.slow import thinned
from tests.verify.parity_layouts import Layout, verdict_of


def not_summed(x: Tensor, axis: Axis, *_: Any) -> Pending:
    """Instead of a sum over the axis, this rank's own."""
    return Pending("nothing", axis, x, None)


def not_summed_but_cut(x: Tensor, axis: Axis) -> Pending:
    return Pending("nothing", axis, x.chunk(axis.size)[axis.rank].contiguous(), None)


def own_rows_only(x: Tensor, axis: Axis, out: Tensor) -> Pending:
    """Instead of the sum of a reduce-scatter, this rank's part of its own."""
    return Pending("nothing", axis, out.copy_(x.chunk(axis.size)[axis.rank]), None)


def same(x: Tensor, *_: Any) -> Tensor:
    """Instead of a sum in place, or of f: its gradient is not summed."""
    return x


def forgotten(*_: Any, **__: Any) -> None:
    """Instead of a sum of gradients."""


def qkv_before_heads(qkv: Tensor, head_dim: int, p: float, bias: Tensor | None, causal: bool) -> Tensor:
    """Attention that takes rows in the order [q, k, v][head][head_dim]: a cut over tp mixes them up."""
    s, b, _ = qkv.shape
    q, k, v = qkv.view(s, b, 3, -1, head_dim).permute(2, 1, 3, 0, 4).unbind(0)
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=causal)
    return y.permute(2, 0, 1, 3).reshape(s, b, -1)


def counted_by_every_rank(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    """The gradient of the gathered outputs summed over tp, where every rank has the whole of it."""
    return reduce_scatter(dy.contiguous(), ctx.tp), None


TRUE_OUTPUT, TRUE_UPDATE = NextToken.output, Trainer.clip_and_update
TRUE_PLAN, TRUE_ROW = RankSampler.step, RowParallelLinear.forward
TRUE_ROTARY = Llama.rotary
TRUE_MASKS = DropoutStream.probabilities


def mean_of_micro_batch(objective: NextToken, chunk: Any, batch: Batch, scale: Tensor, *rest: Any) -> Tensor:
    """Each micro-batch's loss divided by its own tokens, as if the step had no other."""
    if objective.ctx.world_size > 1:
        scale = torch.ones_like(scale) / batch.labels.numel()
    return TRUE_OUTPUT(objective, chunk, batch, scale, *rest)


def tokens_of_replica(trainer: Trainer, batches: list[Batch]) -> Tensor:
    """The divisor of the loss, not summed over dp."""
    count = sum(batch.labels.numel() for batch in batches)
    return torch.tensor([float(count)], dtype=parameter_dtype(trainer.config.precision))


def decay_on_first_rank_only(trainer: Trainer, loss: Tensor) -> StepOutcome:
    """Weight decay that other ranks forget."""
    if trainer.ctx.rank > 0:
        for group in trainer.optimizer.param_groups:
            group["weight_decay"] = 0.0
    return TRUE_UPDATE(trainer, loss)


def samples_of_first_replica(plan: RankSampler, number: int) -> list[Batch] | None:
    first = copy(plan)  # replace() would start the thread of another loader, which comes here too, and so on
    first.rank = 0
    return TRUE_PLAN(first, number)


def bias_before_sum(layer: RowParallelLinear, x: Tensor) -> Tensor:
    """The bias of a row-parallel layer added on each rank, before the sum over tp: t times."""
    return TRUE_ROW(layer, x) + (layer.tp.size - 1) * layer.bias


def masks_of_first_heads(*args: Any, first_head: int, **kwargs: Any) -> Tensor:
    """The same dropout masks on every tp rank's heads."""
    return TRUE_MASKS(*args, first_head=0, **kwargs)


def positions_of_own_rows(model: Llama, x: Tensor, positions: Tensor | None) -> Rotary:
    """Rotary positions that begin again at each tp rank's rows of the sequence."""
    if model.sequence_parallel:
        positions = torch.arange(x.shape[0]).repeat(model.tp.size)[None]
    return TRUE_ROTARY(model, x, positions)


def rows_of_own_tokens(length: int, cp: Axis, device: torch.device) -> Tensor:
    """Places in the sequence that begin again at each cp rank's tokens."""
    return torch.arange(length // cp.size, device=device)


def first_part(x: Tensor, axis: Axis) -> Tensor:
    """Instead of the sum of a reduce-scatter, this rank's part of its own."""
    return x.chunk(axis.size)[axis.rank]


def sum_of_own_tokens(y: Tensor, log_sum: Tensor, other: Tensor, other_sum: Tensor) -> None:
    """The results of other ranks' keys added as if their scores had the same sum."""
    y.add_(other).mul_(0.5)


TRUE_NORM, TRUE_BY_AXIS = gradient_norm, parameters_by_axis


def gradients_of_experts_twice(experts: Experts, x: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Experts whose weights have the gradient of every ep rank."""
    n = experts.expert_axes.ep.size
    up, down = (n * w - (n - 1) * w.detach() for w in (experts.up, experts.down))
    return grouped_linear(experts.inner(grouped_linear(x, up, counts)), down, counts)


def norm_without_experts(shards: list[ParameterShard], ctx: ParallelContext) -> Tensor:
    if ctx.world_size > 1:
        shards = [shard for shard in shards if shard.experts is None]
    return TRUE_NORM(shards, ctx)


def experts_as_the_rest(model: Any, replicas: Axis) -> Any:
    """Gradients of different experts that are summed."""
    return {replicas: [p for some in TRUE_BY_AXIS(model, replicas).values() for p in some]}


def drop_among_own_tokens(experts: Tensor, num_experts: int, factor: float, *axes: Axis) -> Tensor:
    """Each rank fills the experts anew with its rows of the sequence."""
    return drop_choices(experts, num_experts, factor, Axis("cp"), Axis("tp"))


@dataclass(frozen=True)
class Sabotage:
    """A replaced function of mlm, its replacement, the layout, and the expected verdict."""

    target: str
    broken: Any
    layout: Layout
    place: str = "loss (step 1"
    suspect: str = "forward pass"
    """In the hint."""

    def __str__(self) -> str:
        return f"{self.target} {getattr(self.broken, '__name__', self.broken)} {self.layout}"


TP, SP = Layout(tp=2), Layout(tp=2, sequence_parallel=True)
PP, DP, CP = Layout(pp=2), Layout(dp=2), Layout(cp=2)
GROUPED = Layout(tp=4, llama="llama")
EP = Layout(dp=2, ep=2, moe="softmax")
CASES = (
    Sabotage("parallel.linear.start_all_reduce", not_summed, TP, "layers.3.mlp_norm.bias", "operator f"),
    Sabotage(
        "parallel.linear.start_reduce_scatter",
        not_summed_but_cut,
        SP,
        "layers.3.mlp_norm.bias",
        "backward pass",
    ),
    Sabotage("parallel.cross_entropy.copy_to_tp", same, TP, "final_norm.bias (reduced", "operator f"),
    Sabotage(
        "training.trainer.sum_tied_gradients",
        forgotten,
        PP,
        "token.weight (reduced",
        "tied weights not summed",
    ),
    Sabotage(
        "training.trainer.sum_replicated_gradients", forgotten, SP, "position.weight", "gradients not summed"
    ),
    Sabotage(
        "models.heads.GatherOutputs.backward",
        counted_by_every_rank,
        Layout(tp=2, sequence_parallel=True, bert="post"),
        "sop_head.bias (reduced",
        "it is 2 times",
    ),
    Sabotage("models.attention.fused_attention", qkv_before_heads, TP),
    Sabotage(
        "parallel.layers.RowParallelLinear.forward",
        bias_before_sum,
        TP,
        "mlp.down.bias",
        "before a bias is added",
    ),
    Sabotage(
        "models.gpt2.model.NextToken.output",
        mean_of_micro_batch,
        PP,
        "loss (step 1",
        "all gradients are 2 times",
    ),
    Sabotage(
        "training.trainer.Trainer.global_counts",
        tokens_of_replica,
        DP,
        "loss (step 1",
        "all gradients are 2 times",
    ),
    Sabotage("parallel.gradients.start_all_reduce", not_summed, DP, "all parameters", "gradients not summed"),
    Sabotage(
        "parallel.sharded.start_reduce_scatter",
        own_rows_only,
        Layout(dp=2, zero=2),
        "final_norm.bias (reduced",
        "over dp",
    ),
    Sabotage("data.sampler.RankSampler.step", samples_of_first_replica, DP),
    Sabotage("parallel.dropout.DropoutStream.probabilities", masks_of_first_heads, Layout(tp=2, dropout=0.1)),
    Sabotage(
        "parallel.gradients._sum_over_neighbours",
        forgotten,
        GROUPED,
        "attention.kv.weight",
        "gradients not summed",
    ),
    Sabotage(
        "models.llama.attention.HeadNorm.is_partial",
        False,
        Layout(tp=2, llama="qwen"),
        "attention.key_norm.weight",
        "gradients not summed",
    ),
    Sabotage(
        "models.llama.model.Llama.rotary",
        positions_of_own_rows,
        Layout(tp=2, sequence_parallel=True, llama="llama"),
    ),
    Sabotage("models.backbone.local_positions", rows_of_own_tokens, CP),
    Sabotage("parallel.context._merge", sum_of_own_tokens, CP),
    Sabotage(
        "parallel.context.reduce_scatter",
        first_part,
        CP,
        "layers.3.attention.qkv.bias (reduced",
        "backward pass",
    ),
    Sabotage("optim.clip.all_reduce", same, TP, "norm (step 1", "norm misses parameters"),
    Sabotage(
        "parallel.expert.experts.Experts.forward",
        gradients_of_experts_twice,
        EP,
        "mlp.experts.down",
        "it is 2 times",
    ),
    Sabotage(
        "parallel.gradients.parameters_by_axis",
        experts_as_the_rest,
        EP,
        "layers.3.mlp.experts.down (reduced",
        "backward pass",
    ),
    Sabotage(
        "training.trainer.gradient_norm", norm_without_experts, EP, "norm (step 1", "norm misses parameters"
    ),
    Sabotage("parallel.expert.dispatch.Order.inverse", same, EP),
    Sabotage(
        "parallel.expert.router.all_reduce",
        same,
        replace(EP, moe="sigmoid"),
        "router.bias",
        "copies on dp ranks differ",
    ),
    Sabotage(
        "parallel.expert.router.drop_choices", drop_among_own_tokens, Layout(cp=2, ep=2, moe="capacity")
    ),
    Sabotage(
        "training.trainer.Trainer.clip_and_update",
        decay_on_first_rank_only,
        PP,
        "(updated weight, step 1",
        "update depends on the layout",
    ),
)


def compare_sabotaged(ctx: ParallelContext, case: Sabotage) -> Verdict:
    with patch(f"mlm.{case.target}", case.broken):
        return verdict_of(ctx, case.layout)[0]


@pytest.mark.parametrize("case", thinned(CASES, 8), ids=str)
def test_sabotage_is_noticed_and_placed(case: Sabotage) -> None:
    for verdict in run_on_ranks(compare_sabotaged, case, **case.layout.sizes):  # every rank says the same
        assert not verdict.equal
        assert case.place in verdict.sentence
        assert case.suspect in verdict.hint
