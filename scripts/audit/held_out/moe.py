"""Expert parallelism over the replicas by hand: tokens go to their expert's rank by all-to-all; a load-balancing loss of the
global batch, and a router z-loss."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Decoder
from torch import nn

from mlm import AuditSubject

VOCAB, HIDDEN, FFN, EXPERTS, LAYERS, LENGTH, BATCH = 48, 32, 48, 4, 2, 8, 8
BALANCE, ROUTER_Z = 0.05, 1e-3


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, send, receive, group):
        ctx.send, ctx.receive, ctx.group = send, receive, group
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(sum(ctx.send), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.receive, group=ctx.group)
        return out, None, None, None


class Experts(nn.Module):
    def __init__(self, group):
        super().__init__()
        up, down = torch.randn(EXPERTS, HIDDEN, FFN) * 0.2, torch.randn(EXPERTS, FFN, HIDDEN) * 0.2
        self.up = nn.Parameter(up.chunk(group.size())[group.rank()].clone())
        self.down = nn.Parameter(down.chunk(group.size())[group.rank()].clone())

    def forward(self, x, which):
        y = torch.zeros_like(x)
        for e in range(self.up.shape[0]):
            rows = (which == e).nonzero()[:, 0]
            y = y.index_add(0, rows, F.silu(x[rows] @ self.up[e]) @ self.down[e])
        return y


class MoE(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = Experts(group)
        self.aux = None

    def forward(self, x):
        shape, x, world = x.shape, x.flatten(0, 1), self.group.size()
        logits = self.router(x)
        weights, expert = logits.softmax(-1).max(-1)
        counts = torch.bincount(expert, minlength=EXPERTS)
        fraction = counts.to(x.dtype)
        dist.all_reduce(fraction, group=self.group)
        fraction = fraction / (len(x) * world)
        self.aux = BALANCE * EXPERTS * (fraction * logits.softmax(-1).mean(0)).sum() + ROUTER_Z * logits.logsumexp(-1).square().mean()
        order = expert.argsort(stable=True)
        send = counts.view(world, -1).sum(1)
        receive = torch.empty_like(send)
        dist.all_to_all_single(receive, send, group=self.group)
        send, receive = send.tolist(), receive.tolist()
        which = torch.empty(sum(receive), dtype=expert.dtype)
        dist.all_to_all_single(which, expert[order], receive, send, group=self.group)
        first = self.group.rank() * (EXPERTS // world)
        y = self.experts(AllToAll.apply(x[order], send, receive, self.group), which - first)
        y = AllToAll.apply(y, receive, send, self.group)
        back = torch.empty_like(y).index_copy(0, order, y)
        return (back * weights[:, None]).view(shape)


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.mix, self.moe = nn.Linear(HIDDEN, HIDDEN), MoE(group)

    def forward(self, x):
        x = x + self.mix(self.n1(x)).cumsum(1) / LENGTH
        return x + self.moe(self.n2(x))


def build(mesh):
    group = mesh["dp"].get_group()
    world, rank = group.size(), group.rank()
    torch.manual_seed(0)
    model = Decoder(VOCAB, HIDDEN, [Block(group) for _ in range(LAYERS)], bias=True)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1)).chunk(world)[rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)

    def step():
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        (loss + sum(block.moe.aux for block in model.blocks)).backward()
        return loss.detach()

    def reduce():
        for name, p in model.named_parameters():
            if ".experts." not in name:
                dist.all_reduce(p.grad, group=group)
            p.grad /= world

    return AuditSubject(module=model, step=step, reduce=reduce, optimizer=optimizer)
