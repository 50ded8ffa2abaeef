"""torch.distributed.pipelining: tied embeddings on the first and the last stage, layers of which every second has no positions
(as SmolLM 3), one norm for all stages."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import rotate
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from mlm import AuditSubject

VOCAB, HIDDEN, HEADS, LAYERS, LENGTH, BATCH, MICRO = 48, 32, 4, 4, 8, 8, 4


class Block(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.positions = index % 4 in (0, 1, 3)
        self.n1, self.n2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN)

    def forward(self, x):
        q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in self.qkv(self.n1(x)).chunk(3, -1))
        if self.positions:
            q, k = rotate(q), rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Stage(nn.Module):
    def __init__(self, world, rank):
        super().__init__()
        self.first, self.last = rank == 0, rank == world - 1
        table = nn.Embedding(VOCAB, HIDDEN)
        nn.init.normal_(table.weight, std=0.2)
        seeds = torch.randint(1 << 30, (LAYERS,))
        per = LAYERS // world
        self.layers = nn.ModuleDict()
        for local in range(per):
            index = rank * per + local
            torch.manual_seed(seeds[index].item())
            self.layers[str(index)] = Block(index)
        if self.first or self.last:
            self.embed = table
        if self.last:
            self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x):
        x = self.embed(x) if self.first else x
        for layer in self.layers.values():
            x = layer(x)
        return F.linear(self.norm(x), self.embed.weight) if self.last else x


def build(mesh):
    group = mesh["pp"].get_group()
    world, rank = group.size(), group.rank()
    torch.manual_seed(0)
    model = Stage(world, rank)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss_of(logits, labels):
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / MICRO

    if world > 1:
        stage = PipelineStage(model, rank, world, torch.device("cpu"), group=group)
        schedule = Schedule1F1B(stage, n_microbatches=MICRO, loss_fn=loss_of, scale_grads=False)

    def step():
        losses = []
        if world == 1:
            for a, b in zip(x.chunk(MICRO), y.chunk(MICRO)):
                losses.append(loss_of(model(a), b))
                losses[-1].backward()
        elif model.last:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step(x)
        return torch.stack(losses).sum().detach() if losses else None

    def reduce():
        if world > 1 and (model.first or model.last):
            dist.all_reduce(model.embed.weight.grad, group=group)

    def clip(limit=2.0):
        square = torch.zeros(())
        for name, p in model.named_parameters():
            if not (model.last and not model.first and name == "embed.weight"):
                square += p.grad.square().sum()
        dist.all_reduce(square, group=group)
        norm = square.sqrt()
        for p in model.parameters():
            p.grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
        return norm

    return AuditSubject(module=model, step=step, reduce=reduce, clip=clip, optimizer=optimizer)
