"""Choice of the experts of each token, and balance of their loads.

Scores are computed in float32 (float64 for float64), ties go to the lower number. Sources: top-k gates
arXiv:1701.06538 and 2101.03961; sigmoid scores and groups of experts arXiv:2412.19437, section 2.1.2.

Balance; only the last depends on layout and micro-batches:

    bias          a number per expert, added for the choice alone, moves by a fixed step against the load of
                  each global batch (arXiv:2408.15664)
    sequence      a loss of each sequence's loads (arXiv:2412.19437, equations 17 to 20)
    global_batch  the same loss of the previous global batch's loads (arXiv:2501.11873), as the loads of a
                  batch are known only after its last micro-batch
    micro_batch   the same loss of a rank's rows of a micro-batch (arXiv:2101.03961, equation 4)

A layer cannot return a loss, so its gradient is injected: `_Inject` returns the weights, and its backward
pass starts the loss's. The choices are counted there, too: once a micro-batch, even if the forward pass is
recomputed, and never in evaluation.

Shapes: S sequence (this rank's rows of it), B micro-batch, H hidden, E experts, k experts per token.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlm.config.fields import exact
from mlm.parallel.collectives import all_gather, all_reduce
from mlm.parallel.config import RouterSettings
from mlm.parallel.context import rank_positions
from mlm.parallel.mesh import Axis


@dataclass(frozen=True, eq=False)
class Routing:
    experts: Tensor
    """[S, B, k] int64, the highest score first; E for a choice that is dropped."""
    weights: Tensor
    """[S, B, k] float32 or float64, of dropped choices too."""
    drops: bool
    """True if choices may be dropped."""


class Router(nn.Module):
    """Scores of all experts for each token, and the choice of k of them.

    `weight` and `logit_bias` are replicated over all axes. `bias` and `load` are state, not weights, [E]:
    they have no gradient, and `update` moves them.

    Args:
        hidden_size: H.
        settings: how experts are chosen and balanced.
        axes: axes that split a sequence: cp, and tp with sequence parallelism, else axes of one rank.
        init_std: standard deviation of the initial weights.
    """

    constant_sides: ClassVar[dict[str, str]] = {"weight": "out"}
    bias: nn.Parameter | None
    load: nn.Parameter | None

    def __init__(
        self, hidden_size: int, settings: RouterSettings, *, axes: tuple[Axis, Axis], init_std: float
    ) -> None:
        super().__init__()
        self.settings, self.axes, self.init_std = settings, axes, init_std
        self.scale: Tensor | None = None
        """0-d: loss scale / tokens of the global batch, a factor of losses; None outside of training."""
        self.totals: Tensor | None = None
        """[2, E] int64: tokens of the step that chose each expert, and dropped ones among them."""
        self.weight = nn.Parameter(torch.empty(settings.num_experts, hidden_size))
        state = partial(torch.zeros, settings.num_experts)
        self.logit_bias = nn.Parameter(state()) if settings.router_logit_bias else None
        self.bias = nn.Parameter(state(), requires_grad=False) if settings.has_router_bias else None
        keeps_load = settings.balance == "global_batch"
        self.load = nn.Parameter(state(), requires_grad=False) if keeps_load else None

    def forward(self, x: Tensor) -> Routing:
        """Route [S, B, H]: experts of each of the S B tokens."""
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        bias = None if self.logit_bias is None else self.logit_bias.to(dtype)
        return self.route(F.linear(x.to(dtype), self.weight.to(dtype), bias))

    def route(self, logits: Tensor) -> Routing:
        """Choose experts by their logits [S, B, E]."""
        scores = logits.softmax(-1) if self.settings.router_scores == "softmax" else logits.sigmoid()
        experts = self.choose(scores.detach())
        weights = scores.gather(-1, experts)
        if self.settings.router_normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if self.settings.router_scale != 1:
            weights = weights * self.settings.router_scale
        accepted, factor = experts, self.settings.capacity_factor
        if self.scale is not None and factor:
            accepted = drop_choices(experts, self.settings.num_experts, factor, *self.axes)
        if self.scale is not None and torch.is_grad_enabled():
            loss = self.auxiliary_loss(logits, scores, experts)
            only_accepted = None if accepted is experts else accepted
            weights = _Inject.apply(weights, loss, self.scale, experts, only_accepted, self.totals)  # type: ignore[no-untyped-call]
        return Routing(accepted, weights, accepted is not experts)

    def choose(self, scores: Tensor) -> Tensor:
        """Return the k experts of each token: [..., E] -> [..., k] int64."""
        settings = self.settings
        if self.bias is not None:
            scores = scores + self.bias.to(scores.dtype)
        if settings.router_top_groups < settings.router_groups:
            members = scores.unflatten(-1, (settings.router_groups, -1))  # [..., groups, E / groups]
            counted = min(settings.router_group_best, members.shape[-1])
            best = members.topk(counted, dim=-1).values.sum(-1)
            chosen = _highest(best, settings.router_top_groups)
            is_open = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, chosen, True)
            scores = members.masked_fill(~is_open.unsqueeze(-1), float("-inf")).flatten(-2)
        return _highest(scores, settings.experts_per_token)

    def auxiliary_loss(self, logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor | None:
        """Sum of the balance and z losses over this rank's tokens; None without any.

        With loads f_e = E / (k T) times the number of the T tokens that chose e, a token's loss is the mean
        of f_e weighted by its scores. Counts have no gradient.
        """
        settings, loss = self.settings, None
        if settings.balance in ("sequence", "global_batch", "micro_batch"):
            shares = scores if settings.router_scores == "softmax" else scores / scores.sum(-1, keepdim=True)
            if settings.balance == "sequence":
                counts = count_choices(experts.transpose(0, 1).flatten(1), settings.num_experts)  # [B, E]
                counts = counts.contiguous()  # for the all-reduce
                for axis in self.axes:  # this rank may hold a part of the sequence
                    all_reduce(counts, axis)
            elif settings.balance == "micro_batch":
                counts = count_choices(experts.view(1, -1), settings.num_experts)  # [1, E]
            else:
                assert self.load is not None
                counts = self.load.detach()  # [E], all 0 before the first global batch
            total = counts.sum(-1, keepdim=True).clamp(min=1)
            loads = counts.to(shares.dtype) * settings.num_experts / total
            loss = settings.balance_coefficient * (shares * loads).sum()
        if settings.z_loss:
            z = settings.z_loss * logits.logsumexp(-1).square().sum()
            loss = z if loss is None else loss + z
        return loss

    @torch.no_grad()
    def update(self, counts: Tensor, skip: Tensor) -> None:
        """Move bias and load by the counts of a global batch, [E] int64, unless `skip` (0-d) is 1."""
        if self.settings.balance == "bias":
            assert self.bias is not None
            missing = (counts.sum() - counts * len(counts)).sign()  # of mean - count, without rounding
            step = self.settings.balance_rate * (1 - skip.to(self.bias.dtype))
            self.bias.add_(missing.to(self.bias.dtype) * step)
        if self.load is not None:
            self.load.copy_(torch.where(skip == 1, self.load, counts.to(self.load.dtype)))


def _highest(scores: Tensor, count: int) -> Tensor:
    """Indices of the highest scores, ties by lower index, which `topk` does not guarantee.

    A CPU takes one after the other: 8 of 128 experts take a third of the time of a sort. A GPU sorts in one
    kernel, where each index would take three. Compiled code does not recompute the sort for backward, where
    rounding might change the choice.
    """
    if scores.is_cuda or torch.compiler.is_compiling():
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count].contiguous()
    highest = [scores.argmax(-1, keepdim=True)]
    while len(highest) < count:
        scores = scores.scatter(-1, highest[-1], float("-inf"))
        highest.append(scores.argmax(-1, keepdim=True))
    return torch.cat(highest, -1)


def count_choices(experts: Tensor, num_experts: int) -> Tensor:
    """Count the choices of each expert in each row, without dropped ones: [rows, n] -> [rows, E] int64."""
    counts = experts.new_zeros(experts.shape[0], num_experts + 1)
    return counts.scatter_add_(1, experts, torch.ones_like(experts))[:, :num_experts]


def drop_choices(experts: Tensor, num_experts: int, factor: float, cp: Axis, tp: Axis) -> Tensor:
    """Replace choices beyond capacity by E: [S, B, k] -> [S, B, k] int64. Collective over cp and tp.

    An expert takes the first tokens that choose it in a sequence, not in a rank's batch (arXiv:2101.03961,
    equation 3), so that training does not depend on the layout. Ranks with parts of a sequence gather the
    choices of all.
    """
    rows, batch, k = experts.shape
    length = rows * cp.size * tp.size
    positions = torch.arange(length, device=experts.device)  # in the order of ranks and their rows
    if cp.parts > 1:
        positions = torch.cat([rank_positions(n, length, cp.parts, experts.device) for n in range(cp.parts)])
    chosen = torch.zeros(length, batch, num_experts, dtype=torch.int32, device=experts.device)
    chosen[positions] = chosen.scatter(-1, all_gather(all_gather(experts, tp), cp).view(length, batch, k), 1)
    order = chosen.cumsum(0, dtype=torch.int32)[positions].view(-1, rows, batch, num_experts)
    local_order = order[cp.rank * tp.size + tp.rank]
    capacity = expert_capacity(factor, k * length, num_experts)
    return experts.masked_fill(local_order.gather(-1, experts) > capacity, num_experts)


def expert_capacity(factor: float, choices: int, num_experts: int) -> int:
    """Return the tokens of a sequence that an expert takes: ceil(factor * choices / E)."""
    return math.ceil(exact(factor) * choices / num_experts)


def _add_counts(totals: Tensor, experts: Tensor, accepted: Tensor | None) -> None:
    """Add the choices, and the dropped ones among them, to [2, E]."""
    flat = experts.flatten()
    if flat.is_cpu:
        totals[0].scatter_add_(0, flat, torch.ones_like(flat))
    else:  # one launch; on a CPU twice the time
        totals[0].scatter_(0, flat, 1, reduce="add")
    if accepted is not None:
        totals[1].scatter_add_(0, flat, (accepted != experts).flatten().long())


# An opaque operator, as a compiler would allocate new totals and copy them back.
_opaque_add_counts = torch.library.custom_op("mlm::add_counts", _add_counts, mutates_args=("totals",))


class _Inject(torch.autograd.Function):
    """Identity of the weights; backward passes the gradient `scale` to the loss, and counts choices."""

    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        loss: Tensor | None,
        scale: Tensor,
        experts: Tensor,
        accepted: Tensor | None,
        totals: Tensor,
    ) -> Tensor:
        ctx.scale = None if loss is None else scale.to(loss.dtype)
        ctx.save_for_backward(experts, accepted)
        ctx.totals = totals
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, d_weights: Tensor) -> tuple[Tensor | None, ...]:
        add_counts = _opaque_add_counts if torch.compiler.is_compiling() else _add_counts
        add_counts(ctx.totals, *ctx.saved_tensors)
        return d_weights, ctx.scale, None, None, None, None


def routers(model: nn.Module) -> list[Router]:
    return [module for module in model.modules() if isinstance(module, Router)]


class Balance:
    """The routers of a rank's layers, in a step: `start`, backward passes, `reduce`, `update`.

    Args:
        routers: of this rank's layers, by their numbers.
        axes: axes whose ranks route different tokens; counts are summed over them.
    """

    def __init__(self, routers: Mapping[int, Router], axes: Sequence[Axis]) -> None:
        self.layers, self.routers, self.axes = list(routers), list(routers.values()), axes
        self.totals: Tensor | None = None
        """[routers, 2, E] int64: tokens that chose each expert, and dropped ones, on this rank; after
        `reduce` on all ranks."""

    @property
    def counts(self) -> Tensor | None:
        """[routers, E] int64: tokens that chose each expert."""
        return None if self.totals is None else self.totals[:, 0]

    def start(self, scale: Tensor) -> None:
        """Count from 0; `scale` (0-d) is the loss scale over the tokens of the global batch."""
        if not self.routers:
            return
        experts = self.routers[0].settings.num_experts
        self.totals = torch.zeros(len(self.routers), 2, experts, dtype=torch.int64, device=scale.device)
        for router, counts in zip(self.routers, self.totals, strict=True):
            router.scale, router.totals = scale, counts

    def reduce(self) -> None:
        """Sum the counts over ranks after the backward passes, one message for all layers."""
        for router in self.routers:
            router.scale = router.totals = None
        if self.totals is not None:
            for axis in self.axes:
                all_reduce(self.totals, axis)

    def update(self, skip: Tensor) -> None:
        if self.counts is not None:
            for router, counts in zip(self.routers, self.counts, strict=True):
                router.update(counts, skip)
