"""What several of these trainers have: a decoder, Megatron-LM's operators f and g, rotary positions."""
import torch
import torch.distributed as dist
from torch import nn


class Decoder(nn.Module):
    """An embedding, blocks, a norm and a head."""

    def __init__(self, vocab, hidden, blocks, norm=nn.LayerNorm, bias=False):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(vocab, hidden), nn.ModuleList(blocks)
        self.norm, self.head = norm(hidden), nn.Linear(hidden, vocab, bias=bias)

    def forward(self, x, *where):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, *where)
        return self.head(self.norm(x))


def summed(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x


class Copy(torch.autograd.Function):
    """f: the identity, whose gradient is summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return summed(g, ctx.group), None


class Sum(torch.autograd.Function):
    """g: a sum, whose gradient is that of each addend."""

    @staticmethod
    def forward(ctx, x, group):
        return summed(x, group)

    @staticmethod
    def backward(ctx, g):
        return g, None


def rotate(x, where=None, base=50.0):
    """Rotary positions of [..., S, D], which are `where` or count from 0."""
    where, half = torch.arange(x.shape[-2]) if where is None else where, x.shape[-1] // 2
    angle = where.to(x.dtype)[:, None] * base ** (-torch.arange(half).to(x.dtype) / half)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)
