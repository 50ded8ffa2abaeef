"""A trainer of a Llama-like model in plain PyTorch, tensor-, context- and data-parallel, with bugs to plant.

It has grouped keys and values, a gated MLP, a split loss with smoothing and z-loss, and clipping by hand.
`mlm audit gqa_trainer.py:norm_skips_kv --tp 2`; `build` and names with `healthy` are right.
"""

import math
import zlib
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mlm import AuditSubject

VOCAB, HIDDEN, HEADS, GROUPS, DIM, INNER, LAYERS, LENGTH, BATCH = 32, 16, 4, 2, 4, 24, 2, 8, 4
SMOOTHING, Z_LOSS, DECAY, LIMIT = 0.1, 1e-2, 0.1, 0.2

BUGS = {
    "gradients_in_bf16": "gradients are rounded to bfloat16 to be summed over dp",
    "decay_twice_beside_bf16_norms": "norms compute in bfloat16; on a layout weights decay twice a step",
    "norm_skips_kv": "the norm to clip by lacks keys' and values' weights; norms compute in float32",
    "z_loss_of_own_vocabulary": "the z-loss takes the sum of exponentials of a rank's vocabulary",
    "smoothing_over_own_vocabulary": "label smoothing divides by the size of a rank's vocabulary",
    "mask_of_own_rows": "the causal mask counts queries from 0 on each cp rank",
    "loss_times_own_count": "each replica's loss is its sum, and divided by its own tokens",
    "kv_gradients_of_own_queries": "gradients of keys and values lack those of other cp ranks' queries",
    "norm_of_roots": "roots of squares are summed over tp",
    "labels_shifted_in_chunks": "labels are shifted after the sequence is split: a chunk's last has none",
    "positions_begin_again": "positions count from 0 on each cp rank",
    "same_samples": "each replica reads the first one's samples",
    "keys_of_own_tokens": "queries see the keys and values of their cp rank alone",
    "gate_and_up_in_one_block": "fused rows are all of gate, then all of up, and are cut contiguously",
    "no_decay_on_a_rank": "weights of rank 1 do not decay",
    "rate_times_replicas": "the learning rate is multiplied by the replicas",
    "norm_without_table": "the norm to clip by lacks the table of the vocabulary",
    "head_summed_twice": "the gradient of the head is summed over dp and not divided",
    "stale_half": "a replica does not receive the half of its weights that the other updates",
    "row_products_in_bf16": "products of rows are rounded to bfloat16 to be summed over tp",
    "input_gradient_averaged": "the gradient of a block's input is averaged over tp",
    "cp_not_reduced": "gradients are not summed over cp",
    "clip_by_own_norm": "gradients are clipped by the norm of a rank's shards, another is reported",
    "scale_of_own_width": "scores are divided by the root of a rank's width",
    "update_before_reduction": "the table's gradient is reduced over dp after the update",
    "kv_repeated_by_rank": "each tp rank's queries read the first rank's keys and values",
    "norms_not_reduced_over_cp": "gradients of norms are not summed over cp",
}


class Sum(torch.autograd.Function):
    """Sum over a group in forward or in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, group, forward: float, backward: float, dtype=None) -> Tensor:
        ctx.group, ctx.backward_scale = group, backward
        return total(x, group, dtype) * forward if forward else x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return (total(grad, ctx.group) * ctx.backward_scale if ctx.backward_scale else grad, *[None] * 4)


class GatherTokens(torch.autograd.Function):
    """[B, S/c, …] to [B, S, …]; backward sums over ranks and takes this one's rows."""

    @staticmethod
    def forward(ctx, x: Tensor, group, is_summed: bool) -> Tensor:
        ctx.group, ctx.is_summed = group, is_summed
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad = total(grad, ctx.group) if ctx.is_summed else grad
        return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()], None, None


def total(x: Tensor, group, dtype=None) -> Tensor:
    y = x.to(dtype or x.dtype, copy=True).contiguous()
    if group.size() > 1:
        dist.all_reduce(y, group=group)
    return y.to(x.dtype)


class Shared:
    def __init__(self, mesh, bug: str, narrow) -> None:
        self.tp, self.dp, self.cp = (mesh[axis].get_group() for axis in ("tp", "dp", "cp"))
        self.bug = bug if mesh.size() > 1 else ""
        self.norm_dtype = narrow

    def draw(self, name: str, *shape: int, dim: int | None = None) -> nn.Parameter:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
        return nn.Parameter(
            whole if dim is None else whole.chunk(self.tp.size(), dim)[self.tp.rank()].clone()
        )


class Norm(nn.Module):
    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.weight, self.dtype = nn.Parameter(torch.ones(HIDDEN)), shared.norm_dtype

    def forward(self, x: Tensor) -> Tensor:
        y, weight = x.to(self.dtype), self.weight.to(self.dtype)
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * weight).to(x.dtype)


class Linear(nn.Module):
    def __init__(self, shared: Shared, name: str, inputs: int, outputs: int, dim: int) -> None:
        super().__init__()
        self.weight = shared.draw(name, outputs, inputs, dim=dim)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class Attention(nn.Module):
    def __init__(self, shared: Shared, name: str) -> None:
        super().__init__()
        self.shared = shared
        self.q = Linear(shared, f"{name}.q", HIDDEN, HEADS * DIM, 0)
        self.k, self.v = (Linear(shared, f"{name}.{x}", HIDDEN, GROUPS * DIM, 0) for x in "kv")
        self.out = Linear(shared, f"{name}.out", HEADS * DIM, HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        cp, bug = self.shared.cp, self.shared.bug
        q, k, v = (
            each(x).unflatten(-1, (-1, DIM)) for each in (self.q, self.k, self.v)
        )  # [B, S/c, heads, D]
        if bug == "kv_repeated_by_rank":
            for each in (k, v):
                dist.broadcast(each.data, dist.get_global_rank(self.shared.tp, 0), group=self.shared.tp)
        if bug != "keys_of_own_tokens":
            k, v = (GatherTokens.apply(t, cp, bug != "kv_gradients_of_own_queries") for t in (k, v))
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
        width = q.shape[2] * DIM if bug == "scale_of_own_width" else HEADS * DIM
        scores = torch.einsum("bsnd,btnd->bnst", q, k) / math.sqrt(width / HEADS)
        first = 0 if bug in ("mask_of_own_rows", "keys_of_own_tokens") else cp.rank() * q.shape[1]
        rows, columns = torch.arange(q.shape[1]) + first, torch.arange(k.shape[1])
        weights = scores.masked_fill(columns > rows[:, None], -1e9).softmax(-1)
        return self.out(torch.einsum("bnst,btnd->bsnd", weights, v).flatten(2))


class MLP(nn.Module):
    def __init__(self, shared: Shared, name: str) -> None:
        super().__init__()
        self.is_bad = shared.bug == "gate_and_up_in_one_block"
        self.up = Linear(shared, f"{name}.up", HIDDEN, 2 * INNER, 0)
        self.down = Linear(shared, f"{name}.down", INNER, HIDDEN, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.is_bad:
            gate, up = y.chunk(2, -1)
        else:
            gate, up = y.unflatten(-1, (-1, 2)).unbind(-1)  # a row of gate and one of up in turn
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, shared: Shared, name: str) -> None:
        super().__init__()
        self.shared = shared
        self.norm1, self.norm2 = Norm(shared), Norm(shared)
        self.attention, self.mlp = Attention(shared, f"{name}.attention"), MLP(shared, f"{name}.mlp")

    def forward(self, x: Tensor) -> Tensor:
        tp, bug = self.shared.tp, self.shared.bug
        scale = 1 / tp.size() if bug == "input_gradient_averaged" else 1.0
        dtype = torch.bfloat16 if bug == "row_products_in_bf16" else None
        x = x + Sum.apply(self.attention(Sum.apply(self.norm1(x), tp, 0.0, scale)), tp, 1.0, 0.0, dtype)
        return x + Sum.apply(self.mlp(Sum.apply(self.norm2(x), tp, 0.0, scale)), tp, 1.0, 0.0, dtype)


class Table(nn.Module):
    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared, self.weight = shared, shared.draw("table", VOCAB, HIDDEN, dim=0)

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens - self.shared.tp.rank() * len(self.weight)
        is_own = (own >= 0) & (own < len(self.weight))
        x = self.weight[own.clamp(0, len(self.weight) - 1)] * is_own[..., None]
        return Sum.apply(x, self.shared.tp, 1.0, 0.0)


class Positions(nn.Module):
    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared, self.weight = shared, shared.draw("positions", LENGTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        first = 0 if self.shared.bug == "positions_begin_again" else self.shared.cp.rank() * x.shape[1]
        return x + self.weight[first : first + x.shape[1]]


class Model(nn.Module):
    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared, self.table, self.positions = shared, Table(shared), Positions(shared)
        self.layers = nn.ModuleList(Block(shared, f"layers.{n}") for n in range(LAYERS))
        self.norm, self.head = Norm(shared), Linear(shared, "head", HIDDEN, VOCAB, 0)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.positions(self.table(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(Sum.apply(self.norm(x), self.shared.tp, 0.0, 1.0))


class Trainer:
    def __init__(self, mesh, bug: str = "", narrow=torch.float64) -> None:
        self.shared = Shared(mesh, bug, narrow)
        self.bug, shared = self.shared.bug, self.shared
        self.model = Model(shared)
        tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(5))
        keep = torch.arange(LENGTH) < torch.tensor([8, 7, 5, 8])[:, None]
        row = 0 if self.bug == "same_samples" else shared.dp.rank()
        self.tokens, self.labels, self.keep = (
            t.chunk(shared.dp.size())[row].chunk(shared.cp.size(), 1)[shared.cp.rank()].contiguous()
            for t in (tokens[:, :-1], tokens[:, 1:], keep)
        )
        if self.bug == "labels_shifted_in_chunks":
            self.labels, self.keep = self.tokens.roll(-1, 1), self.keep.clone()
            self.keep[:, -1] = False
        decay = 0.0 if self.bug == "no_decay_on_a_rank" and dist.get_rank() == 1 else DECAY
        rate = 0.01 * (shared.dp.size() if self.bug == "rate_times_replicas" else 1)
        kind = (
            torch.optim.SGD
            if self.bug == "clip_by_own_norm" or bug == "clip_by_own_norm"
            else torch.optim.AdamW
        )
        self.optimizer = kind(self.model.parameters(), lr=rate, weight_decay=decay)

    def loss(self, logits: Tensor) -> Tensor:
        """Mean over the global batch's tokens, times the replicas, which `reduce` divides by."""
        shared, bug, tp = self.shared, self.bug, self.shared.tp
        size = logits.shape[-1]
        largest = logits.detach().amax(-1)
        if tp.size() > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=tp)
        own_sum = (logits - largest[..., None]).exp().sum(-1)
        log_sum = Sum.apply(own_sum, tp, 1.0, 0.0).log() + largest
        own = self.labels - tp.rank() * size
        is_own = (own >= 0) & (own < size)
        label = Sum.apply(logits.gather(-1, own.clamp(0, size - 1)[..., None])[..., 0] * is_own, tp, 1.0, 0.0)
        vocabulary = size if bug == "smoothing_over_own_vocabulary" else VOCAB
        mean = Sum.apply(logits.sum(-1) / vocabulary, tp, 1.0, 0.0)
        z = own_sum.log() + largest if bug == "z_loss_of_own_vocabulary" else log_sum
        losses = log_sum - (1 - SMOOTHING) * label - SMOOTHING * mean + Z_LOSS * z.square()
        count = self.keep.sum().double()
        if bug != "loss_times_own_count":
            count = total(total(count, shared.dp), shared.cp) / shared.dp.size()
        return (losses * self.keep).sum() / count

    def step(self) -> Tensor:
        loss = self.loss(self.model(self.tokens))
        loss.backward()
        return total(loss.detach(), self.shared.cp)

    def reduce(self) -> None:
        shared, bug = self.shared, self.bug
        for name, parameter in self.model.named_parameters():
            grad = parameter.grad
            if not (bug == "cp_not_reduced" or (bug == "norms_not_reduced_over_cp" and "norm" in name)):
                grad.copy_(total(grad, shared.cp))
            if bug == "update_before_reduction" and "table" in name:
                continue
            grad.copy_(total(grad, shared.dp, torch.bfloat16 if bug == "gradients_in_bf16" else None))
            if not (bug == "head_summed_twice" and "head" in name):
                grad /= shared.dp.size()

    def clip(self) -> Tensor:
        shared, bug = self.shared, self.bug
        square, own = torch.zeros(()), torch.zeros(())
        for name, parameter in self.model.named_parameters():
            if bug == "norm_skips_kv" and (".k." in name or ".v." in name):
                continue
            if bug == "norm_without_table" and "table" in name:
                continue
            is_split = not ("norm" in name or "positions" in name)
            own += parameter.grad.square().sum()
            square += parameter.grad.square().sum() / (1 if is_split else shared.tp.size())
        norm = total(own.sqrt(), shared.tp) if bug == "norm_of_roots" else total(square, shared.tp).sqrt()
        by = own.sqrt() if bug == "clip_by_own_norm" else norm
        for parameter in self.model.parameters():
            parameter.grad *= (LIMIT / by).clamp(max=1.0)
        return norm


class Twice(torch.optim.AdamW):
    """Decays weights once more."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
        return super().step(closure)


class Halves(torch.optim.AdamW):
    """Leaves the second half of each matrix as it was."""

    def step(self, closure=None):
        before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        super().step(closure)
        with torch.no_grad():
            for old, new in zip(before, (p for g in self.param_groups for p in g["params"]), strict=True):
                new[len(new) // 2 :] = old[len(old) // 2 :]


def build(mesh, bug: str = "", narrow=torch.float64) -> AuditSubject:
    trainer = Trainer(mesh, bug, narrow)
    is_last = mesh.size() > 1 and dist.get_rank() == 1
    if bug == "decay_twice_beside_bf16_norms" and mesh.size() > 1:
        trainer.optimizer = Twice(trainer.model.parameters(), lr=0.01, weight_decay=DECAY)
    if bug == "stale_half" and is_last:
        trainer.optimizer = Halves(trainer.model.parameters(), lr=0.01, weight_decay=DECAY)
    return AuditSubject(
        module=trainer.model,
        step=trainer.step,
        reduce=trainer.reduce,
        clip=trainer.clip,
        optimizer=trainer.optimizer,
    )


healthy_float32_norms = partial(build, narrow=torch.float32)
healthy_bf16_norms = partial(build, narrow=torch.bfloat16)
NARROW = {"decay_twice_beside_bf16_norms": torch.bfloat16, "norm_skips_kv": torch.float32}
globals().update({bug: partial(build, bug=bug, narrow=NARROW.get(bug, torch.float64)) for bug in BUGS})
