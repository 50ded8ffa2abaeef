"""Muon under tensor parallelism by hand: a split matrix is put together, orthogonalised and split again. The model: one where every rank holds all key and value heads (fewer than queries'), a norm over all of q's
features (as OLMo 2), a gated MLP with biases, and a plain head on every rank."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mlm import AuditSubject

VOCAB, HIDDEN, HEADS, KV, FFN, LAYERS, LENGTH, BATCH = 40, 32, 8, 2, 64, 2, 9, 4
DIM = HIDDEN // HEADS


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class SumBoth(torch.autograd.Function):
    """A sum whose result each rank uses for its own part: summed again in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


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


def orthogonal(m, steps=5):
    """Newton-Schulz."""
    x = m / (m.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, matrices, others, group, lr):
        super().__init__([{"params": [p for p, _ in matrices]}, {"params": others}], {"lr": lr, "momentum": 0.9})
        self.dims, self.group = {p: dim for p, dim in matrices}, group

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                state = self.state[p]
                buffer = state.setdefault("momentum", torch.zeros_like(p)).mul_(g["momentum"]).add_(p.grad)
                if p not in self.dims:
                    p.add_(buffer, alpha=-g["lr"])
                    continue
                dim, world = self.dims[p], self.group.size()
                if dim is not None and world > 1:
                    parts = [torch.empty_like(buffer) for _ in range(world)]
                    dist.all_gather(parts, buffer.contiguous(), group=self.group)
                    update = orthogonal(torch.cat(parts, dim)).chunk(world, dim)[self.group.rank()]
                else:
                    update = orthogonal(buffer)
                p.add_(update, alpha=-0.2 * g["lr"])


def build(mesh):
    group = mesh["tp"].get_group()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, HIDDEN), *(Block(group) for _ in range(LAYERS)), nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB))
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))

    def loss(logits):
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    split = {"wq": 0, "wo": 1, "up": 0, "gate": 0, "down": 1, "wk": None, "wv": None}
    matrices = [(p, split[n.split(".")[-1]]) for n, p in model.named_parameters() if n.split(".")[-1] in split]
    taken = {p for p, _ in matrices}
    optimizer = Muon(matrices, [p for p in model.parameters() if p not in taken], group, lr=0.1)
    return AuditSubject(module=model, batch=tokens[:, :-1], loss=loss, optimizer=optimizer)
