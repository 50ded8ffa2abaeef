"""Subjects of tests of the audit: linear layers, healthy and with a mistake of each type."""

import os
import time
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mlm.verify.audit.record import AuditSubject, Split

HIDDEN = 8


class Reduce(torch.autograd.Function):
    """Sums in forward, or in backward."""

    @staticmethod
    def forward(ctx, x: Tensor, group, forward: bool) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.group, ctx.is_forward = group, forward
        x = x.clone()
        if forward:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        grad = grad.clone()
        if not ctx.is_forward:
            dist.all_reduce(grad, group=ctx.group)
        return grad, None, None


class OwnSlice(torch.autograd.Function):
    """Parts of all ranks along the last dimension; backward takes this rank's, and should sum before."""

    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.group, parts = group, [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        return grad.chunk(ctx.group.size(), -1)[ctx.group.rank()], None


class Layer(nn.Module):
    """norm, column-parallel, row-parallel."""

    def __init__(self, group, mistake: str) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.group, self.mistake = group, mistake
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN // group.size(), bias=False)
        self.down = nn.Linear(2 * HIDDEN // group.size(), HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.mistake not in ("backward", "mixed"):
            y = Reduce.apply(y, self.group, False)
        shared = y
        width = self.up.weight.shape[0] if self.mistake == "width" else 2 * HIDDEN
        y = self.up(y) / width
        if self.mistake == "statistics":
            y = (y - y.mean(-1, keepdim=True)) / y.var(-1, keepdim=True).sqrt()
        if self.mistake == "slice":  # each rank needs a column of the other
            y = OwnSlice.apply(y, self.group).roll(1, -1).chunk(self.group.size(), -1)[self.group.rank()]
        if self.mistake == "mixed":
            y = y * self.up(shared)
        y = self.down(y.tanh())
        y = x + (y if self.mistake == "forward" else Reduce.apply(y, self.group, True))
        # a replicated branch, which should read what no operator f has copied, or f is missing
        return y + shared.square() if self.mistake in ("mixed", "doubled") else y


def build(mesh, mistake: str = "") -> AuditSubject:  # type: ignore[no-untyped-def]
    tp, dp = mesh["tp"].get_group(), mesh["dp"].get_group()
    model = nn.Sequential(*(Layer(tp, mistake) for _ in range(2)))
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if "norm" not in name:
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(10 * number + tp.rank()))
    x = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(9)).chunk(dp.size())[dp.rank()]

    def reduce() -> None:
        for parameter in model.parameters():
            if mistake != "replicas" and parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=dp)
                parameter.grad /= dp.size()

    def clip() -> Tensor:
        square = torch.zeros(())
        for parameter in model.parameters():
            assert parameter.grad is not None
            copies = tp.size() if parameter.ndim == 1 else 1
            square += parameter.grad.square().sum() / copies
        if mistake != "norm":
            dist.all_reduce(square, group=tp)
        return square.sqrt()

    def loss(y: Tensor) -> Tensor:
        own = y.square().mean()
        if mistake != "loss":
            return own
        dist.all_reduce(total := own.detach().clone(), group=dp)  # as reported: not divided by the replicas
        return own + (total - own.detach())

    return AuditSubject(
        module=model,
        batch=x,
        loss=loss,
        reduce=reduce,
        clip=clip,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        placements={"*.up.weight": Split(0), "*.down.weight": Split(1)},
    )


MISTAKES = (
    "forward",
    "backward",
    "replicas",
    "norm",
    "loss",
    "width",
    "statistics",
    "slice",
    "mixed",
    "doubled",
)
forward, backward, replicas, norm, loss, width, statistics, slice_, mixed, doubled = (
    partial(build, mistake=m) for m in MISTAKES
)


def two_micro_batches(mesh, mistake: str) -> AuditSubject:  # type: ignore[no-untyped-def]
    subject = build(mesh, mistake)

    def step() -> Tensor:
        losses = [subject.module(x).square().mean() / 2 for x in subject.batch.chunk(2)]
        for each in losses:
            each.backward()
        return torch.stack(losses).sum().detach()

    subject.step = step
    return subject


def crossed_micro_batches(mesh) -> AuditSubject:  # type: ignore[no-untyped-def]
    """Of replicas, whose backward gives each of two micro-batches the gradient of the other."""
    subject, is_wrong = build(mesh), mesh["dp"].size() > 1

    def step() -> Tensor:
        outputs = [subject.module(x) for x in subject.batch.chunk(2)]
        grads = [y.detach() / y.numel() for y in outputs]  # of the mean of squares, over two
        torch.autograd.backward(outputs, grads[::-1] if is_wrong else grads)
        return torch.stack([y.detach().square().mean() / 2 for y in outputs]).sum()

    subject.step = step
    return subject


slice_of_micro_batches = partial(two_micro_batches, mistake="slice")


def other_heads(mesh) -> AuditSubject:  # type: ignore[no-untyped-def]
    """Of two key heads on four ranks, rank r holds r % 2."""
    tp, weight = mesh["tp"].get_group(), torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(1))
    module = nn.Linear(HIDDEN, 4 if tp.size() == 1 else 2, bias=False)
    module.weight.data = weight if tp.size() == 1 else weight.chunk(2)[tp.rank() % 2].clone()
    return AuditSubject(module=module, batch=torch.ones(2, HIDDEN), loss=lambda y: y.square().mean())


class PairedHeads(nn.Module):
    """Four heads of queries and two of keys, which `repeat` pairs in another order than on each rank."""

    def __init__(self, group) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.group = group
        self.query = nn.Linear(HIDDEN, 8 // group.size(), bias=False)
        self.key = nn.Linear(HIDDEN, 4 // group.size(), bias=False)
        self.out = nn.Linear(8 // group.size(), HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [S, H]
        x = Reduce.apply(x, self.group, False)
        query = self.query(x).unflatten(-1, (-1, 2))
        key = self.key(x).unflatten(-1, (-1, 2)).repeat(1, 2, 1)
        scores = torch.einsum("snd,tnd->nst", query, key).softmax(-1)
        return Reduce.apply(self.out(torch.einsum("nst,tnd->snd", scores, key).flatten(1)), self.group, True)


def paired_heads(mesh) -> AuditSubject:  # type: ignore[no-untyped-def]
    batch = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(mesh["tp"].get_local_rank())
    module = PairedHeads(mesh["tp"].get_group())
    return AuditSubject(module=module, batch=batch, loss=lambda y: y.square().mean())


class NoElements(nn.Module):
    """Like an expert without tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x[:0]), x])


def no_elements(mesh) -> AuditSubject:  # type: ignore[no-untyped-def]
    subject = build(mesh)
    subject.module.append(NoElements())
    return subject


class StochasticDepth(nn.Module):
    """Skips whole samples: a dropout of ones, which are alike for all samples."""

    def forward(self, x: Tensor) -> Tensor:
        return x * F.dropout(x.new_ones(len(x), 1), 0.5)


def stochastic_depth(mesh) -> AuditSubject:  # type: ignore[no-untyped-def]
    subject = build(mesh)
    subject.module.append(StochasticDepth())
    torch.manual_seed(mesh["dp"].get_local_rank())
    return subject


def needs_cuda(mesh) -> AuditSubject:  # type: ignore[no-untyped-def]
    return AuditSubject(module=nn.Linear(2, 2, device="cuda"))


def random(mesh) -> AuditSubject:  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(time.time_ns() % 2**40)
    x = torch.randn(4, HIDDEN, generator=generator)
    return AuditSubject(module=nn.Linear(HIDDEN, HIDDEN), batch=x, loss=lambda y: y.square().mean())


class InPlace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x.numpy()[:] *= 2.0  # which no version of the tensor counts
        return super().forward(x)


def changes_batch(mesh) -> AuditSubject:  # type: ignore[no-untyped-def]
    return AuditSubject(
        module=InPlace(HIDDEN, HIDDEN), batch=torch.ones(4, HIDDEN), loss=lambda y: y.square().mean()
    )


def crashes(mesh) -> AuditSubject:  # type: ignore[no-untyped-def]
    subject = build(mesh)
    if mesh["tp"].get_local_rank() == 1:
        subject.loss = lambda y: y[:, HIDDEN + 1].sum()
    return subject


def deadlocks(mesh) -> AuditSubject:  # type: ignore[no-untyped-def]
    subject = build(mesh)
    if mesh["tp"].get_local_rank() == 1:
        subject.loss = lambda y: time.sleep(600) or y.sum()  # type: ignore[func-returns-value]
    return subject


def dies(mesh) -> AuditSubject:  # type: ignore[no-untyped-def]
    if mesh["tp"].get_local_rank() == 1:
        os._exit(7)
    return build(mesh)


def dies_after_a_wrong_step(mesh) -> AuditSubject:  # type: ignore[no-untyped-def]
    subject, losses = forward(mesh), list[Tensor]()

    def loss(y: Tensor) -> Tensor:
        losses.append(y.square().mean())
        if len(losses) > 1 and mesh["tp"].get_local_rank() == 1:
            os._exit(7)
        return losses[-1]

    return replace(subject, loss=loss)


class OwnState:
    """A trainer with its own counts, moments and random numbers; replicas count their own micro-batches."""

    def __init__(self, mesh) -> None:  # type: ignore[no-untyped-def]
        self.module, self.group = nn.Linear(4, 4), mesh["dp"].get_group()
        self.moments, self.steps, self.micros = [torch.zeros(4)], 0, 0
        self.random, self.x = torch.Generator().manual_seed(1), torch.arange(32.0).view(8, 4).sin()
        self.scales, self.draws, self.sums = Random(2), np.random.default_rng(3), np.zeros(1)

    def step(self) -> Tensor:
        self.steps += 1
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        loss = self.module(self.x.chunk(size)[rank]).square().sum()
        loss.backward()
        self.micros += 8 // size
        return loss.detach()

    def reduce(self) -> None:
        for p in self.module.parameters():
            dist.all_reduce(p.grad, group=self.group)


class OwnOptimizer(torch.optim.Optimizer):
    def __init__(self, trainer: OwnState) -> None:
        super().__init__(trainer.module.parameters(), {})
        self.trainer = trainer

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override,no-untyped-def]
        bias, t = self.trainer.module.bias, self.trainer
        t.moments[0] = 0.9 * t.moments[0] + bias.grad
        t.sums += t.draws.random() + t.scales.random()
        rates = t.steps * float(t.sums[0]) * torch.rand(4, generator=t.random)
        bias -= 0.1 * rates * torch.tanh(t.moments[0] / (1 - 0.9**t.micros))


def counts_micro_batches(mesh) -> AuditSubject:  # type: ignore[no-untyped-def]
    t = OwnState(mesh)
    return AuditSubject(module=t.module, step=t.step, reduce=t.reduce, optimizer=OwnOptimizer(t))


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


def not_finite(mesh) -> AuditSubject:  # type: ignore[no-untyped-def]
    """Roots of negative numbers, in every run."""
    model = nn.Sequential(nn.Linear(4, 4), Root(), nn.Tanh())
    return AuditSubject(module=model, batch=-torch.ones(3, 4), loss=lambda y: y.square().mean())


def no_loss(mesh) -> AuditSubject:  # type: ignore[no-untyped-def]
    return AuditSubject(module=nn.Linear(4, 4), batch=torch.ones(3, 4))


class Grouped(nn.Linear):
    """Experts as in mixtures of transformers: their product has no float64."""

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([len(x)], dtype=torch.int32)
        return torch.nn.functional.grouped_mm(x, self.weight.T[None], offs=ends)


def always_float64(mesh) -> AuditSubject:  # type: ignore[no-untyped-def]
    module, x = Grouped(16, 16).double(), torch.ones(16, 16, dtype=torch.float64)
    return AuditSubject(module=module, batch=x, loss=lambda y: y.square().mean())


def grouped(mesh, mistake: str = "") -> AuditSubject:  # type: ignore[no-untyped-def]
    subject = build(mesh, mistake)
    subject.clip = None
    torch.manual_seed(0)
    subject.module.append(Grouped(HIDDEN, HIDDEN, bias=False))
    return subject


grouped_forward = partial(grouped, mistake="forward")


def uneven(mesh) -> AuditSubject:  # type: ignore[no-untyped-def]
    """Ranks hold 3 of 8 columns each."""
    tp = mesh["tp"].get_group()
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8 if tp.size() == 1 else 3, 4))
    return AuditSubject(module=module, batch=torch.ones(2, module[0].in_features), loss=lambda y: y.sum())
