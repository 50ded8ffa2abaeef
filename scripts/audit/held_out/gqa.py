"""Tensor parallelism by hand where every rank holds all key and value heads (fewer than queries'), a norm over all of q's
features (as OLMo 2), a gated MLP with biases, and a plain head on every rank."""
import torch
import torch.nn.functional as F
from common import Copy, Sum, summed
from torch import nn

from mlm import AuditSubject

VOCAB, HIDDEN, HEADS, KV, FFN, LAYERS, LENGTH, BATCH = 40, 32, 8, 2, 64, 2, 9, 4
DIM = HIDDEN // HEADS


class SumBoth(torch.autograd.Function):
    """A sum whose result each rank uses for its own part: summed again in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return summed(x, group)

    @staticmethod
    def backward(ctx, g):
        return summed(g, ctx.group), None


class QNorm(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.ones(HIDDEN // group.size()))

    def forward(self, q):
        square = SumBoth.apply(q.square().sum(-1, keepdim=True), self.group) / HIDDEN
        return q * torch.rsqrt(square + 1e-6) * self.weight


class Attention(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        world, rank = group.size(), group.rank()
        self.heads = HEADS // world
        full = [torch.randn(n, HIDDEN) * HIDDEN**-0.5 for n in (HIDDEN, KV * DIM, KV * DIM, HIDDEN)]
        self.wq = nn.Parameter(full[0].chunk(world)[rank].clone())
        self.wk, self.wv = nn.Parameter(full[1]), nn.Parameter(full[2])
        self.wo = nn.Parameter(full[3].chunk(world, 1)[rank].clone())
        self.q_norm = QNorm(group)

    def forward(self, x):
        b, t, _ = x.shape
        x = Copy.apply(x, self.group)
        wk, wv = Copy.apply(self.wk, self.group), Copy.apply(self.wv, self.group)
        q = self.q_norm(F.linear(x, self.wq)).view(b, t, self.heads, DIM).transpose(1, 2)
        k, v = (F.linear(x, w).view(b, t, KV, DIM).transpose(1, 2) for w in (wk, wv))
        first = self.group.rank() * self.heads
        mine = torch.arange(first, first + self.heads) // (HEADS // KV)
        y = F.scaled_dot_product_attention(q, k[:, mine], v[:, mine], is_causal=True)
        return Sum.apply(F.linear(y.transpose(1, 2).reshape(b, t, -1), self.wo), self.group)


class MLP(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        world, rank = group.size(), group.rank()
        up, gate, down = torch.randn(FFN, HIDDEN) * 0.2, torch.randn(FFN, HIDDEN) * 0.2, torch.randn(HIDDEN, FFN) * 0.15
        self.up, self.gate = (nn.Parameter(w.chunk(world)[rank].clone()) for w in (up, gate))
        self.down = nn.Parameter(down.chunk(world, 1)[rank].clone())
        self.bias = nn.Parameter(torch.randn(HIDDEN) * 0.1)

    def forward(self, x):
        x = Copy.apply(x, self.group)
        return Sum.apply(F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down), self.group) + self.bias


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attn, self.mlp = Attention(group), MLP(group)

    def forward(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


def build(mesh):
    group = mesh["tp"].get_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, HIDDEN), *(Block(group) for _ in range(LAYERS)), nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB))
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))

    def loss(logits):
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return AuditSubject(module=model, batch=tokens[:, :-1], loss=loss, optimizer=optimizer)
