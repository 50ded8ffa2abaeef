"""Layouts of PyTorch and mlm that are believed right, as subjects of `mlm audit`."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import mlm
from mlm import AuditSubject
from mlm.parallel.mesh import build_mesh

VOCAB, HIDDEN, HEADS, LENGTH, BATCH = 64, 32, 4, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            t.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for t in (self.q(y), self.k(y), self.v(y))
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def samples(mesh) -> tuple[Tensor, Tensor]:
    """This replica's tokens and labels, [B/d, S]."""
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    own = tokens.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    return own[:, :-1].contiguous(), own[:, 1:].contiguous()


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def average(model: nn.Module, group) -> None:
    """Average gradients over replicas."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= group.size()


def subject(mesh, model: nn.Module, **more) -> AuditSubject:
    tokens, labels = samples(mesh)
    return AuditSubject(
        module=model,
        batch=tokens,
        loss=lambda logits: loss_of(logits, labels),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        clip=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False),
        **more,
    )


def split_layers(model: Transformer, tp) -> None:
    for layer in model.layers:
        plan = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel()) | dict.fromkeys(
            ("out", "down"), RowwiseParallel()
        )
        parallelize_module(layer, tp, plan)


def torch_ddp(mesh) -> AuditSubject:
    return subject(mesh, DistributedDataParallel(Transformer(), process_group=mesh["dp"].get_group()))


def torch_fsdp2(mesh) -> AuditSubject:
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return subject(mesh, fully_shard(model, mesh=mesh["dp"]))


def torch_tp(mesh) -> AuditSubject:
    model = Transformer()
    split_layers(model, mesh["tp"])
    return norm_by_dtensor(mesh, model)


def torch_tp_sequence(mesh) -> AuditSubject:
    """Sequence parallelism by PyTorch's plans, its head split over the vocabulary."""
    model = Transformer()
    plan = {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
    plan |= dict.fromkeys(("out", "down"), RowwiseParallel(output_layouts=Shard(1)))
    plan |= dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel(input_layouts=Shard(1)))
    parallelize_module(
        model,
        mesh["tp"],
        {
            "table": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=True
            ),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    for layer in model.layers:
        parallelize_module(layer, mesh["tp"], dict(plan))
    return norm_by_dtensor(mesh, model)


def torch_fsdp2_tp(mesh) -> AuditSubject:
    model = Transformer()
    split_layers(model, mesh["tp"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    return norm_by_dtensor(mesh, fully_shard(model, mesh=mesh["dp"]))


def norm_by_dtensor(mesh, model: nn.Module) -> AuditSubject:
    """Without clipping, which rejects DTensors on several meshes beside plain tensors."""
    found = subject(mesh, model)
    found.clip = None
    found.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    return found


def mlm_gpt2(mesh) -> AuditSubject:
    """mlm's GPT-2 with its own reducer, norm and optimizer, as in scripts/examples/training_loop.py."""
    sizes = {axis: mesh[axis].size() for axis in mesh.mesh_dim_names}
    ctx = build_mesh(**sizes, device=torch.device("cpu"), timeout_s=60)
    config = mlm.ModelConfig(
        num_layers=4, hidden_size=HIDDEN, num_heads=HEADS, max_positions=LENGTH, vocab_size=256
    )
    model = mlm.GPT2(config, tp=ctx.tp, cp=ctx.cp, dtype=torch.float64)
    mlm.init_parameters(model, 1234, ctx.tp)
    shards = list(mlm.parameter_shards(model, ctx.tp))
    reducer = mlm.GradientReducer(model.parameters(), ctx.replicas)
    tokens, labels = samples(mesh)

    def step() -> Tensor:
        reducer.start_step()
        reducer.sync = True
        loss = model(tokens, labels) / ctx.dp.size
        loss.backward()
        reducer.finish()
        mlm.sum_replicated_gradients(shards, ctx.tp, sequence_parallel=False)
        return loss.detach()

    return AuditSubject(
        module=model,
        step=step,
        clip=lambda: mlm.gradient_norm(shards, ctx),
        optimizer=mlm.build_optimizer(shards, mlm.OptimizerConfig(lr=1e-3)),
    )
