"""FSDP2: a loss by the target tokens of all replicas, the learned scale of the logits outside FSDP, clipping."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Decoder
from torch import nn
from torch.distributed.fsdp import fully_shard

from mlm import AuditSubject

VOCAB, HIDDEN, LAYERS, LENGTH, BATCH, IGNORE = 64, 32, 2, 10, 8, -100


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN)
        self.mix, self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN)

    def forward(self, x):
        y = self.norm(x)
        y = y + self.mix(y).cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.down(F.gelu(self.up(y)))


class Model(Decoder):
    def __init__(self):
        super().__init__(VOCAB, HIDDEN, [Block() for _ in range(LAYERS)], nn.RMSNorm)
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return super().forward(x) * self.log_scale.exp()


def build(mesh):
    group = mesh["dp"].get_group()
    world, rank = group.size(), group.rank()
    torch.manual_seed(0)
    model = Model()
    if world > 1:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"], ignored_params={model.log_scale})
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=g)
    labels = tokens[:, 1:].clone()
    prompt = torch.tensor([8, 7, 8, 3, 1, 0, 2, 1])
    labels[torch.arange(LENGTH) < prompt[:, None]] = IGNORE
    inputs, labels = tokens[:, :-1].chunk(world)[rank], labels.chunk(world)[rank]

    def step():
        count = (labels != IGNORE).sum()
        dist.all_reduce(count, group=group)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="sum") / count
        (loss * world).backward()
        return loss.detach()

    def reduce():
        grad = model.log_scale.grad
        dist.all_reduce(grad, group=group)
        grad /= world

    def clip():
        local, whole = torch.zeros(()), torch.zeros(())
        for p in model.parameters():
            if p is model.log_scale:
                whole += p.grad.square()
            else:
                local += getattr(p.grad, "_local_tensor", p.grad).square().sum()
        dist.all_reduce(local, group=group)
        norm = (local + whole).sqrt()
        for p in model.parameters():
            p.grad.mul_(min(1.0, 0.7 / (norm.item() + 1e-6)))
        return norm

    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, foreach=False)
    return AuditSubject(module=model, step=step, reduce=reduce, clip=clip, optimizer=optimizer)
