"""nanotron's tensor-parallel layers on CPUs over gloo, as subjects of `mlm audit`.

    git clone https://github.com/huggingface/nanotron
    NANOTRON=nanotron/src mlm audit scripts/audit/nanotron_blocks.py:build --tp 2

Its models need flash-attn, and its sequence parallelism CUDA.
"""

import os
import sys
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from healthy import HIDDEN, VOCAB, average, samples
from torch import Tensor, nn

from mlm import AuditSubject

os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
sys.path.append(os.environ["NANOTRON"])

from nanotron.parallel.tensor_parallel.enum import TensorParallelLinearMode as Mode
from nanotron.parallel.tensor_parallel.functional import sharded_cross_entropy
from nanotron.parallel.tensor_parallel.nn import (
    TensorParallelColumnLinear,
    TensorParallelEmbedding,
    TensorParallelRowLinear,
)


class MLP(nn.Module):
    """[T, H] to [T, H]."""

    def __init__(self, group, mode: Mode) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = TensorParallelColumnLinear(HIDDEN, 4 * HIDDEN, group, mode, bias=True)
        self.down = TensorParallelRowLinear(4 * HIDDEN, HIDDEN, group, mode, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, group, mode: Mode) -> None:
        super().__init__()
        self.table = TensorParallelEmbedding(VOCAB, HIDDEN, group, mode)
        self.layers = nn.ModuleList(MLP(group, mode) for _ in range(2))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = TensorParallelColumnLinear(HIDDEN, VOCAB, group, mode, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build(mesh) -> AuditSubject:
    tp, dp = mesh["tp"].get_group(), mesh["dp"].get_group()
    torch.manual_seed(tp.rank())
    model = Model(tp, Mode.ALL_REDUCE)
    with torch.no_grad():  # norms and others that are copies
        for parameter in model.norm.parameters():
            dist.broadcast(parameter, dist.get_global_rank(tp, 0), group=tp)
        for parameter in model.parameters():
            dist.broadcast(parameter, dist.get_global_rank(dp, 0), group=dp)
    tokens, labels = (t.T.flatten() for t in samples(mesh))

    def loss(logits: Tensor) -> Tensor:
        return sharded_cross_entropy(logits, labels, tp, dtype=torch.float64).mean()

    optimizer, reduce = torch.optim.AdamW(model.parameters(), lr=1e-2), partial(average, model, dp)
    return AuditSubject(module=model, batch=tokens, loss=loss, reduce=reduce, optimizer=optimizer)
