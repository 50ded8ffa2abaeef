"""Tensor parallelism with sequence parallelism in the manner of Megatron-LM: norms, dropout and residuals on a part of the
sequence; the head works on the whole sequence of every rank."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mlm import AuditSubject

VOCAB, HIDDEN, HEADS, LAYERS, LENGTH, BATCH, DROPOUT = 48, 32, 4, 2, 8, 4, 0.0


def gather(x, group):
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, 1)


def scatter_sum(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x.chunk(group.size(), 1)[group.rank()].contiguous()


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, to_model_parallel):
        ctx.group, ctx.to_model_parallel = group, to_model_parallel
        return gather(x, group)

    @staticmethod
    def backward(ctx, grad):
        if ctx.to_model_parallel:
            return scatter_sum(grad, ctx.group), None, None
        return grad.chunk(ctx.group.size(), 1)[ctx.group.rank()].contiguous(), None, None


class ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return scatter_sum(x, group)

    @staticmethod
    def backward(ctx, grad):
        return gather(grad, ctx.group), None


class ColumnParallelLinear(nn.Module):
    def __init__(self, n_in, n_out, group):
        super().__init__()
        self.group = group
        weight = torch.randn(n_out, n_in) * n_in**-0.5
        self.weight = nn.Parameter(weight.chunk(group.size())[group.rank()].clone())
        self.bias = nn.Parameter(torch.zeros(n_out // group.size()))

    def forward(self, x):
        return F.linear(GatherSequence.apply(x, self.group, True), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    def __init__(self, n_in, n_out, group):
        super().__init__()
        self.group = group
        weight = torch.randn(n_out, n_in) * n_in**-0.5
        self.weight = nn.Parameter(weight.chunk(group.size(), 1)[group.rank()].clone())
        self.bias = nn.Parameter(torch.zeros(n_out))
        self.bias.sequence_parallel = True

    def forward(self, x):
        return ReduceScatterSequence.apply(F.linear(x, self.weight), self.group) + self.bias


class LayerNorm(nn.LayerNorm):
    def __init__(self):
        super().__init__(HIDDEN)
        self.weight.sequence_parallel = self.bias.sequence_parallel = True


class Layer(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.norm_1, self.norm_2 = LayerNorm(), LayerNorm()
        self.q, self.k, self.v = (ColumnParallelLinear(HIDDEN, HIDDEN, group) for _ in range(3))
        self.proj = RowParallelLinear(HIDDEN, HIDDEN, group)
        self.up, self.down = ColumnParallelLinear(HIDDEN, 64, group), RowParallelLinear(64, HIDDEN, group)

    def forward(self, x):
        y = self.norm_1(x)
        q, k, v = (z(y).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for z in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.proj(y), DROPOUT, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), DROPOUT, self.training)


class Model(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.embed, self.position = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.layers = nn.ModuleList(Layer(group) for _ in range(LAYERS))
        self.norm_f, self.head = LayerNorm(), nn.Linear(HIDDEN, VOCAB, bias=False)
        for p in (self.embed.weight, self.position.weight):
            p.sequence_parallel = True

    def forward(self, tokens):
        world, rank = self.group.size(), self.group.rank()
        tokens, where = tokens.chunk(world, 1)[rank], torch.arange(LENGTH).chunk(world)[rank]
        x = self.embed(tokens) + self.position(where)
        for layer in self.layers:
            x = layer(x)
        return self.head(GatherSequence.apply(self.norm_f(x), self.group, False))


def build(mesh):
    group = mesh["tp"].get_group()
    torch.manual_seed(0)
    model = Model(group)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss(logits):
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def reduce():
        for p in model.parameters():
            if getattr(p, "sequence_parallel", False):
                dist.all_reduce(p.grad, group=group)

    return AuditSubject(module=model, batch=tokens[:, :-1].contiguous(), loss=loss, reduce=reduce, optimizer=optimizer)
