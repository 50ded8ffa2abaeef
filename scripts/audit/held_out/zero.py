"""Data parallelism by hand: gradients in flat buckets, ZeRO-1 AdamW (each rank updates its parameters, then broadcasts them)."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Decoder
from torch import nn

from mlm import AuditSubject

VOCAB, HIDDEN, LAYERS, LENGTH, BATCH, ACCUM, BUCKET = 64, 32, 2, 10, 8, 2, 6000


class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class Mixer(nn.Module):
    """A gated causal average and a SwiGLU."""

    def __init__(self):
        super().__init__()
        self.n1, self.n2 = RMSNorm(HIDDEN), RMSNorm(HIDDEN)
        self.value, self.gate, self.out = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3))
        self.w1, self.w3, self.w2 = nn.Linear(HIDDEN, 64), nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN)

    def forward(self, x):
        y = self.n1(x)
        past = self.value(y).cumsum(1) / torch.arange(1, x.shape[1] + 1).view(1, -1, 1)
        x = x + self.out(past * self.gate(y).sigmoid())
        y = self.n2(x)
        return x + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Zero1(torch.optim.Optimizer):
    def __init__(self, params, group, **settings):
        params = list(params)
        super().__init__(params, {})
        self.group, self.all = group, params
        self.owner = {p: i * group.size() // len(params) for i, p in enumerate(params)}
        self.inner = torch.optim.AdamW([p for p in params if self.owner[p] == group.rank()], **settings)

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        for p in self.all:
            dist.broadcast(p.data, dist.get_global_rank(self.group, self.owner[p]), group=self.group)


class Buckets:
    """Mean of gradients over the replicas, some parameters at a time."""

    def __init__(self, params, group):
        self.group = group
        self.buckets, bucket, size = [], [], 0
        for p in reversed(list(params)):
            bucket.append(p)
            size += p.numel()
            if size >= BUCKET:
                self.buckets.append(bucket)
                bucket, size = [], 0
        if bucket:
            self.buckets.append(bucket)

    def reduce(self):
        for bucket in self.buckets:
            flat = torch.cat([p.grad.flatten() for p in bucket])
            dist.all_reduce(flat, group=self.group)
            flat /= self.group.size()
            for p, g in zip(bucket, flat.split([p.numel() for p in bucket])):
                p.grad.copy_(g.view_as(p))


def build(mesh):
    group = mesh["dp"].get_group()
    world, rank = group.size(), group.rank()
    torch.manual_seed(3)
    model = Decoder(VOCAB, HIDDEN, [Mixer() for _ in range(LAYERS)], RMSNorm)
    g = torch.Generator().manual_seed(4)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=g).view(-1, world, LENGTH + 1)[:, rank]
    buckets = Buckets(model.parameters(), group)
    optimizer = Zero1(model.parameters(), group, lr=3e-3, weight_decay=0.1)

    def step():
        total = 0.0
        for part in tokens.chunk(ACCUM):
            loss = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) / ACCUM
            loss.backward()
            total += loss.detach()
        return total

    return AuditSubject(module=model, step=step, reduce=buckets.reduce, optimizer=optimizer)
