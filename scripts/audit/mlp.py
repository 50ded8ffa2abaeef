"""A residual stack of tensor-parallel MLPs, which trains, and is wrong: mlm audit mlp.py:build --tp 2."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mlm import AuditSubject

HIDDEN, LAYERS = 16, 3
IS_FIXED = "FIXED" in os.environ


class SumOutput(torch.autograd.Function):
    """The sum over ranks; its gradient is that of each addend."""

    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class SumGradient(torch.autograd.Function):
    """The identity; its gradient is the sum over ranks."""

    @staticmethod
    def forward(ctx, x: Tensor, group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return SumOutput.apply(grad, ctx.group), None


class MLP(nn.Module):
    def __init__(self, group) -> None:
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 4 * HIDDEN // group.size(), bias=False)
        self.down = nn.Linear(4 * HIDDEN // group.size(), HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if IS_FIXED:
            y = SumGradient.apply(y, self.group)
        return x + SumOutput.apply(self.down(F.gelu(self.up(y))), self.group)


def build(mesh) -> AuditSubject:
    group = mesh["tp"].get_group()
    torch.manual_seed(0)
    model = nn.Sequential(*(MLP(group) for _ in range(LAYERS)))
    for name, parameter in model.named_parameters():
        if "norm" not in name:  # each rank's own part
            generator = torch.Generator().manual_seed(len(name) + 10 * group.rank() + ord(name[0]))
            nn.init.normal_(parameter, std=0.2, generator=generator)
    x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(1))
    return AuditSubject(module=model, batch=x, loss=lambda y: y.square().mean())
