"""Tensor parallelism of DTensor inside FSDP2 on a mesh of two axes (tp=2 dp=2), norms on parts of the sequence, loss per token."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Decoder
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module

from mlm import AuditSubject

VOCAB, HIDDEN, LAYERS, LENGTH, BATCH = 64, 32, 2, 8, 4


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(HIDDEN, 64, bias=False), nn.Linear(HIDDEN, 64, bias=False), nn.Linear(64, HIDDEN, bias=False)

    def forward(self, x):
        past = self.w3(x).cumsum(1) / LENGTH
        return self.w2(F.silu(self.w1(x)) * past)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(HIDDEN), MLP()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def build(mesh):
    torch.manual_seed(0)
    model = Decoder(VOCAB, HIDDEN, [Block() for _ in range(LAYERS)])
    tp, dp = mesh["tp"], mesh["dp"]
    if mesh.size() > 1:
        parallelize_module(model, tp, {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        })
        for layer in model.blocks:
            parallelize_module(layer, tp, {
                "norm": SequenceParallel(),
                "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "mlp.w1": ColwiseParallel(), "mlp.w3": ColwiseParallel(), "mlp.w2": RowwiseParallel(output_layouts=Shard(1)),
            })
            fully_shard(layer, mesh=dp)
        fully_shard(model, mesh=dp)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1)).chunk(dp.size())[dp.get_local_rank()]

    def step():
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    def clip():
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    return AuditSubject(module=model, step=step, clip=clip, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False))
