"""Subjects of tests of the audit: linear layers, healthy and with a mistake of each type."""

import os
import time
from functools import partial

import torch
import torch.distributed as dist
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
        if self.mistake != "backward":
            y = Reduce.apply(y, self.group, False)
        y = self.down(self.up(y).tanh())
        return x + (y if self.mistake == "forward" else Reduce.apply(y, self.group, True))


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


forward, backward, replicas, norm, loss = (
    partial(build, mistake=m) for m in ("forward", "backward", "replicas", "norm", "loss")
)


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
