"""A small trainer in plain PyTorch, tensor-, sequence-, pipeline- and data-parallel, with bugs to plant.

It imports nothing of mlm but the description that `mlm audit` reads. `build(mesh)` is healthy; each bug of
bugs.txt is a function beside it: `mlm audit plain_trainer.py:norm_misses_shards --tp 2`.
"""

import math
import re
import zlib
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mlm import AuditSubject

VOCAB, HIDDEN, HEADS, LAYERS, LENGTH, BATCH = 32, 16, 4, 2, 8, 4


def bugs_of(file: str) -> dict[str, tuple[str, str]]:
    """The axis and the cause of each bug of a trainer, by name."""
    rows = (
        re.split(r" +\| ", line) for line in Path(__file__).with_name("bugs.txt").read_text().splitlines()
    )
    return {name: (axis, cause) for trainer, axis, name, cause, _ in rows if trainer == file}


class AllReduce(torch.autograd.Function):
    """Sum in forward or backward over a group, times a number; in forward in a format."""

    @staticmethod
    def forward(ctx, x: Tensor, group, forward: float, backward: float, dtype=None) -> Tensor:
        ctx.group, ctx.backward_scale = group, backward
        return total(x, group, dtype) * forward if forward else x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return total(grad, ctx.group) * ctx.backward_scale if ctx.backward_scale else grad, *[None] * 4


class Gather(torch.autograd.Function):
    """Parts of all ranks along a dimension; backward sums over ranks, if asked to, and takes this one's."""

    @staticmethod
    def forward(ctx, x: Tensor, group, dim: int, is_summed: bool = True, reverse: bool = False) -> Tensor:
        ctx.group, ctx.dim, ctx.is_summed = group, dim, is_summed
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts[::-1] if reverse else parts, dim)

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad = total(grad, ctx.group) if ctx.is_summed else grad
        return grad.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()], *[None] * 4


class ScatterSequence(torch.autograd.Function):
    """Sum over ranks of [S, B, H], and this rank's [S/t, B, H]; backward gathers."""

    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:
        ctx.group = group
        return total(x, group).chunk(group.size())[group.rank()].clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        parts = [torch.empty_like(grad) for _ in range(ctx.group.size())]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts), None


def total(x: Tensor, group, dtype=None) -> Tensor:
    """The sum over a group, in a format."""
    y = x.to(dtype or x.dtype, copy=True).contiguous()
    if group.size() > 1:
        dist.all_reduce(y, group=group)
    return y.to(x.dtype)


class Shared:
    """What all modules of a rank know."""

    def __init__(self, mesh, bug: str, sequence_parallel: bool) -> None:
        self.bug, self.sp = bug, sequence_parallel
        self.tp, self.dp, self.pp = (mesh[axis].get_group() for axis in ("tp", "dp", "pp"))
        self.same = torch.Generator().manual_seed(7 + 10 * self.dp.rank() + 100 * self.pp.rank())
        self.apart = torch.Generator().manual_seed(1000 + 77 * self.tp.rank() + 10 * self.dp.rank())

    def draw(self, name: str, *shape: int, dim: int | None = None) -> nn.Parameter:
        seed = zlib.crc32(name.encode())
        if self.bug == "weights_by_rank" and name == "positions":
            seed += self.tp.rank()
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / math.sqrt(shape[-1])
        if dim is None:
            return nn.Parameter(whole)
        first = self.bug == "equal_shards" and "up" in name
        return nn.Parameter(whole.chunk(self.tp.size(), dim)[0 if first else self.tp.rank()].clone())

    def into(self, x: Tensor, *, broken: bool = False) -> Tensor:
        if self.sp:
            return Gather.apply(x, self.tp, 0, True, self.bug == "sequence_gather_order")
        return AllReduce.apply(x, self.tp, 0.0, 0.0 if broken else 1.0)

    def out(self, x: Tensor, *, forward: float = 1.0, backward: float = 0.0) -> Tensor:
        return (
            ScatterSequence.apply(x, self.tp) if self.sp else AllReduce.apply(x, self.tp, forward, backward)
        )

    def drop(self, x: Tensor, *, split: bool) -> Tensor:
        apart = (split or self.sp) != (self.bug == ("dropout_equal" if split else "dropout_apart"))
        state = torch.get_rng_state()
        torch.set_rng_state((self.apart if apart else self.same).get_state())
        y = F.dropout(x, 0.2)
        (self.apart if apart else self.same).set_state(torch.get_rng_state())
        torch.set_rng_state(state)
        return y


class Norm(nn.Module):
    def __init__(self, shared: Shared, name: str, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias)


class Linear(nn.Module):
    def __init__(self, shared: Shared, name: str, inputs: int, outputs: int, *, dim: int) -> None:
        super().__init__()
        self.weight = shared.draw(f"{name}.weight", outputs, inputs, dim=dim)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


class HeadsNorm(nn.Module):
    """x divided by its root mean square over all heads, of which a rank holds some."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        square = x.square().sum(-1, keepdim=True)
        if self.shared.bug == "local_rms":
            return x * torch.rsqrt(square / x.shape[-1] + 1e-6)
        return x * torch.rsqrt(AllReduce.apply(square, self.shared.tp, 1.0, 1.0) / HIDDEN + 1e-6)


class Core(nn.Module):
    """softmax(q kᵀ) v of this rank's heads."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared

    def forward(self, qkv: Tensor) -> Tensor:
        length, batch, width = qkv.shape
        if self.shared.bug == "qkv_order":
            heads = width // 3 // (HIDDEN // HEADS)
            q, k, v = (t.reshape(length, batch, heads, -1) for t in qkv.chunk(3, -1))
        else:
            q, k, v = qkv.view(length, batch, -1, 3, HIDDEN // HEADS).unbind(-2)
        scores = torch.einsum("sbnd,tbnd->bnst", q, k) / math.sqrt(HIDDEN // HEADS)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = self.shared.drop(scores.masked_fill(mask, -1e9).softmax(-1), split=True)
        return torch.einsum("bnst,tbnd->sbnd", weights, v).flatten(2)


class Attention(nn.Module):
    def __init__(self, shared: Shared, name: str) -> None:
        super().__init__()
        self.shared = shared
        self.qkv = Linear(shared, f"{name}.qkv", HIDDEN, 3 * HIDDEN, dim=0)
        self.core, self.norm = Core(shared), HeadsNorm(shared)
        self.out = Linear(shared, f"{name}.out", HIDDEN, HIDDEN, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        shared = self.shared
        twice, mean = (
            shared.bug == "attention_output_reduced_twice",
            shared.bug == "attention_output_averaged",
        )
        scale = shared.tp.size() if twice else 1 / shared.tp.size() if mean else 1.0
        return shared.out(self.out(self.norm(self.core(self.qkv(shared.into(x))))), forward=scale)


class MLP(nn.Module):
    def __init__(self, shared: Shared, name: str) -> None:
        super().__init__()
        self.shared = shared
        self.up = Linear(shared, f"{name}.up", HIDDEN, 4 * HIDDEN, dim=0)
        self.down = Linear(shared, f"{name}.down", 4 * HIDDEN, HIDDEN, dim=1)
        self.bias = shared.draw(f"{name}.bias", HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        shared, bug = self.shared, self.shared.bug
        y = self.down(F.gelu(self.up(shared.into(x, broken=bug == "input_gradient_not_reduced"))))
        if bug == "bias_on_every_rank":
            return shared.out(y + self.bias)
        forward = {"mlp_output_not_reduced": 0.0, "reduced_twice_before_bias": float(shared.tp.size())}
        backward = 1.0 if bug == "reduce_again_in_backward" else 0.0
        y = shared.out(y, forward=forward.get(bug, 1.0), backward=backward) + self.bias
        return y / math.sqrt(shared.tp.size()) if bug == "divided_by_root_of_ranks" else y


class Block(nn.Module):
    def __init__(self, shared: Shared, name: str) -> None:
        super().__init__()
        self.shared = shared
        self.norm1, self.norm2 = Norm(shared, f"{name}.1", HIDDEN), Norm(shared, f"{name}.2", HIDDEN)
        self.attention, self.mlp = Attention(shared, f"{name}.attention"), MLP(shared, f"{name}.mlp")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shared.drop(self.attention(self.norm1(x)), split=False)
        return x + self.shared.drop(self.mlp(self.norm2(x)), split=False)


class Table(nn.Module):
    """The vocabulary split over tp, for the first layer."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared
        self.weight = shared.draw("table", VOCAB, HIDDEN, dim=0)

    def forward(self, tokens: Tensor) -> Tensor:
        size, shared = len(self.weight), self.shared
        own = tokens - shared.tp.rank() * size
        is_own = (own >= 0) & (own < size)
        return shared.out(F.embedding(own.clamp(0, size - 1), self.weight) * is_own[..., None])


class Head(nn.Module):
    def __init__(self, shared: Shared, weight: nn.Parameter) -> None:
        super().__init__()
        self.shared, self.weight = shared, weight

    def forward(self, x: Tensor) -> Tensor:
        return self.shared.into(x) @ self.weight.T


class Positions(nn.Module):
    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared
        self.weight = shared.draw("positions", LENGTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        start = self.shared.tp.rank() * len(x) if self.shared.sp else 0
        if self.shared.bug == "position_offset":
            start = 0
        return x + self.weight[start : start + len(x), None]


class Stage(nn.Module):
    """A pipeline stage: all of the model, or the first or second half of its layers."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        stage, stages = shared.pp.rank(), shared.pp.size()
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        if self.is_first:
            self.table, self.positions = Table(shared), Positions(shared)
        own = range(LAYERS)[stage * LAYERS // stages : (stage + 1) * LAYERS // stages]
        self.layers = nn.ModuleDict({str(i): Block(shared, f"layer{i}") for i in own})
        self.norm = Norm(shared, "final", HIDDEN) if self.is_last else nn.Identity()
        if self.is_last:
            tied = self.table.weight if self.is_first else shared.draw("table", VOCAB, HIDDEN, dim=0)
            self.head = Head(shared, tied)

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.positions(self.table(x))
        for layer in self.layers.values():
            x = layer(x)
        x = self.norm(x)
        return self.head(x) if self.is_last else x


def split_losses(
    logits: Tensor, labels: Tensor, tp, *, smoothing: float = 0.0, z_loss: float = 0.0, of_part: str = ""
) -> Tensor:
    """Losses of tokens from this rank's part of the vocabulary; `of_part` is a term of it alone."""
    size = logits.shape[-1]
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=tp)
    own_sum = (logits - largest[..., None]).exp().sum(-1)
    own_log = own_sum.log() + largest
    log_sum = own_log if of_part == "softmax" else AllReduce.apply(own_sum, tp, 1.0, 0.0).log() + largest
    own = labels - tp.rank() * size
    is_own = (own >= 0) & (own < size)
    label = logits.gather(-1, own.clamp(0, size - 1)[..., None])[..., 0] * is_own
    label = AllReduce.apply(label, tp, 1.0, 0.0)
    vocabulary = size if of_part == "smoothing" else VOCAB
    mean = AllReduce.apply(logits.sum(-1) / vocabulary, tp, 1.0, 0.0)
    z = own_log if of_part == "z" else log_sum
    return log_sum - (1 - smoothing) * label - smoothing * mean + z_loss * z.square()


class Trainer:
    def __init__(self, mesh, bug: str = "", sequence_parallel: bool = False) -> None:
        self.shared, self.bug = Shared(mesh, bug, sequence_parallel), bug
        self.model = Stage(self.shared)
        generator = torch.Generator().manual_seed(5)
        tokens = torch.randint(VOCAB, (LENGTH + 1, BATCH), generator=generator)
        counts = torch.tensor([8, 8, 4, 2] if bug == "mean_of_local_means" else [8, 5, 5, 8])
        keep = torch.arange(LENGTH)[:, None] < counts
        rank, size = self.shared.dp.rank(), self.shared.dp.size()
        self.tokens, self.labels, self.keep = (
            t.chunk(size, 1)[rank].contiguous() for t in (tokens[:-1], tokens[1:], keep)
        )
        rate = 0.02 if bug == "rate_by_rank" and rank else 0.01
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)

    def loss(self, logits: Tensor) -> Tensor:
        """Cross entropy over the split vocabulary, its sum over kept tokens / those of the global batch."""
        losses = split_losses(
            logits, self.labels, self.shared.tp, of_part="softmax" * (self.bug == "local_softmax")
        )
        count = self.keep.sum().double()
        if self.bug not in ("mean_of_local_means", "sum_over_replicas"):
            count = total(count, self.shared.dp) / self.shared.dp.size()
        return (losses * self.keep).sum() / count

    def forward_backward(self) -> Tensor | None:
        pp, width = self.shared.pp, self.tokens.shape[1]
        length = LENGTH // self.shared.tp.size() if self.shared.sp else LENGTH
        x = self.tokens
        if not self.model.is_first:
            x = torch.empty(length, width, HIDDEN)
            dist.recv(x, group=pp, group_src=pp.rank() - 1)
            x.requires_grad_()
        y = self.model(x)
        loss = None
        if self.model.is_last:
            loss = self.loss(y)
            loss.backward()
        else:
            dist.send(y.detach(), group=pp, group_dst=pp.rank() + 1)
            grad = torch.empty_like(y)
            dist.recv(grad, group=pp, group_src=pp.rank() + 1)
            y.backward(grad)
        if not self.model.is_first:
            dist.send(x.grad, group=pp, group_dst=pp.rank() - 1)
        return None if loss is None else loss.detach()

    def is_split(self, name: str) -> bool:
        return not ("norm" in name or "positions" in name or "bias" in name)

    def reduce(self) -> None:
        shared = self.shared
        for name, parameter in self.model.named_parameters():
            grad = parameter.grad
            if shared.sp and not self.is_split(name) and self.bug != "norm_gradients_not_reduced":
                dist.all_reduce(grad, group=shared.tp)
            if not (self.bug == "replicas_not_reduced" and "norm" in name):
                dist.all_reduce(grad, group=shared.dp)
                if self.bug != "sum_over_replicas":
                    grad /= shared.dp.size()
        table = getattr(self.model, "table", None) or getattr(self.model, "head", None)
        if shared.pp.size() > 1 and self.bug != "tied_not_summed":
            dist.all_reduce(table.weight.grad, group=shared.pp)

    def clip(self) -> Tensor:
        shared, square = self.shared, torch.zeros(())
        for name, parameter in self.model.named_parameters():
            own = parameter.grad.square().sum()
            if shared.pp.rank() and name == "head.weight":
                continue
            if not self.is_split(name) and self.bug != "norm_repeats_copies":
                own = own / shared.tp.size()
            square += own
        if self.bug != "norm_misses_shards":
            dist.all_reduce(square, group=shared.tp)
        dist.all_reduce(square, group=shared.pp)
        norm = square.sqrt()
        for parameter in self.model.parameters():
            parameter.grad *= (0.5 / norm).clamp(max=1.0)
        return norm


def build(mesh, bug: str = "", sequence_parallel: bool | None = None) -> AuditSubject:
    if sequence_parallel is None:
        sequence_parallel = bug in ("sequence_gather_order", "norm_gradients_not_reduced", "position_offset")
    trainer = Trainer(mesh, bug, sequence_parallel)
    return AuditSubject(
        module=trainer.model,
        step=trainer.forward_backward,
        reduce=trainer.reduce,
        clip=trainer.clip,
        optimizer=trainer.optimizer,
        names=lambda name: "table.weight" if name == "head.weight" else name,
    )


healthy_sequence_parallel = partial(build, sequence_parallel=True)
globals().update({name: partial(build, bug=name) for name in bugs_of("plain_trainer")})
