"""Context parallelism by hand: each rank has two chunks of the sequence, one from each end; keys and values are gathered."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Decoder, rotate
from torch import nn

from mlm import AuditSubject

VOCAB, HIDDEN, HEADS, LAYERS, LENGTH, BATCH, IGNORE = 48, 32, 4, 2, 16, 2, -100


class Gather(torch.autograd.Function):
    """All ranks' parts along dim; the gradient of a part is summed over the ranks that used it."""

    @staticmethod
    def forward(ctx, x, group, dim):
        ctx.group, ctx.dim = group, dim
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), ctx.dim)[ctx.group.rank()].contiguous(), None, None


def own_positions(length, world, rank):
    """Positions of the two chunks of a rank."""
    chunks = torch.arange(length).chunk(2 * world)
    return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]])


class Attention(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x, where):
        q, k, v = (w(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (self.q, self.k, self.v))
        q, k = rotate(q, where), rotate(k, where)
        k, v = Gather.apply(k, self.group, 2), Gather.apply(v, self.group, 2)
        world = self.group.size()
        keys = torch.cat([own_positions(LENGTH, world, r) for r in range(world)])
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=where[:, None] >= keys[None])
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.n1, self.n2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.attention = Attention(group)
        self.up, self.down = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN)

    def forward(self, x, where):
        x = x + self.attention(self.n1(x), where)
        return x + self.down(F.silu(self.up(self.n2(x))))


def build(mesh):
    group = mesh["cp"].get_group()
    world, rank = group.size(), group.rank()
    torch.manual_seed(0)
    model = Decoder(VOCAB, HIDDEN, [Block(group) for _ in range(LAYERS)], nn.RMSNorm, bias=True)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = F.pad(tokens[:, 1:], (0, 1), value=IGNORE)
    where = own_positions(LENGTH, world, rank)
    mine, labels = tokens[:, where], labels[:, where]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)

    def step():
        count = (labels != IGNORE).sum()
        dist.all_reduce(count, group=group)
        logits = model(mine, where)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum") / count
        loss.backward()
        return loss.detach()

    def reduce():
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)

    return AuditSubject(module=model, step=step, reduce=reduce, optimizer=optimizer)
