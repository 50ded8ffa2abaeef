"""Grouped queries split over more ranks than key and value heads by hand, and FSDP2 beside such a split.

Subjects of `mlm audit`: each key and value head is held by the ranks of its queries, which sum its gradients.
"""

import math
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from healthy import HIDDEN, VOCAB, average, loss_of, samples
from mlp import SumGradient, SumOutput
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from mlm import AuditSubject

HEADS, KV_HEADS, HEAD = 8, 2, 4


class Attention(nn.Module):
    def __init__(self, group) -> None:
        super().__init__()
        self.group, size, rank = group, group.size(), group.rank()
        kv = max(KV_HEADS // size, 1)  # on a rank
        self.norm = nn.LayerNorm(HIDDEN)
        first = rank * KV_HEADS // size  # its first head of keys and values
        for name, heads, begin in (
            ("q", HEADS // size, rank * HEADS // size),
            ("k", kv, first),
            ("v", kv, first),
        ):
            whole = torch.randn((HEADS if name == "q" else KV_HEADS) * HEAD, HIDDEN) / math.sqrt(HIDDEN)
            own = nn.Linear(HIDDEN, heads * HEAD, bias=False)
            own.weight = nn.Parameter(whole[begin * HEAD : (begin + heads) * HEAD].clone())
            setattr(self, name, own)
        whole = torch.randn(HIDDEN, HEADS * HEAD) / math.sqrt(HIDDEN)
        self.out = nn.Linear(HEADS * HEAD // size, HIDDEN, bias=False)
        self.out.weight = nn.Parameter(whole.chunk(size, 1)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        y = SumGradient.apply(self.norm(x), self.group)
        q, k, v = (t.unflatten(-1, (-1, HEAD)).transpose(1, 2) for t in (self.q(y), self.k(y), self.v(y)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + SumOutput.apply(self.out(y.transpose(1, 2).flatten(2)), self.group)


def build(mesh, fsdp: bool = False, sums_heads: bool = True) -> AuditSubject:
    tp, dp = mesh["tp"].get_group(), mesh["dp"].get_group()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(VOCAB, HIDDEN), *(Attention(tp) for _ in range(2)), nn.Linear(HIDDEN, VOCAB)
    )
    tokens, labels = samples(mesh)
    if fsdp:
        for layer in model:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])

    def reduce() -> None:
        for name, parameter in model.named_parameters():
            if tp.size() > KV_HEADS and sums_heads and (".k." in name or ".v." in name):
                sum_heads(parameter.grad, tp)
        if not fsdp:
            average(model, dp)

    return AuditSubject(
        module=model,
        batch=tokens,
        loss=lambda logits: loss_of(logits, labels),
        reduce=reduce,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    )


def sum_heads(grad: Tensor, tp) -> None:
    """Sum a gradient over the ranks that hold the same heads of keys and values."""
    every = [torch.empty_like(grad) for _ in range(tp.size())]
    dist.all_gather(every, grad, group=tp)
    copies = tp.size() // KV_HEADS
    first = tp.rank() // copies * copies
    grad.copy_(torch.stack(every[first : first + copies]).sum(0))


fsdp2_beside_tp = partial(build, fsdp=True)
heads_not_summed = partial(build, sums_heads=False)
