"""More layouts of PyTorch and accelerate that are believed right, as subjects of `mlm audit`.

Each uses a feature by which a wrapper changes names, hooks, gradients, calls or the update.
"""

import os
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from healthy import (
    HIDDEN,
    VOCAB,
    Transformer,
    average,
    loss_of,
    norm_by_dtensor,
    samples,
    split_layers,
    subject,
)
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from mlm import AuditSubject


class Recomputing(nn.Module):
    """A layer whose forward pass runs again in backward."""

    def __init__(self, layer: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.module, self.reentrant = layer, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.module, x, use_reentrant=self.reentrant)


def ddp(
    mesh, *, tied: bool = False, frozen: bool = False, recompute: str = "", compiler: str = "", **options
) -> AuditSubject:
    model = Transformer()
    if tied:
        model.head.weight = model.table.weight
    if frozen:
        for parameter in (*model.table.parameters(), *model.layers[0].parameters()):
            parameter.requires_grad_(False)
    if recompute == "wrapper":
        model.layers = nn.ModuleList(map(checkpoint_wrapper, model.layers))
    elif recompute:
        model.layers = nn.ModuleList(Recomputing(each, recompute == "reentrant") for each in model.layers)
    model = DistributedDataParallel(model, process_group=mesh["dp"].get_group(), **options)
    return subject(mesh, torch.compile(model, backend=compiler) if compiler else model)


ddp_static_graph = partial(ddp, static_graph=True, gradient_as_bucket_view=True)
ddp_recomputed = partial(ddp, recompute="non-reentrant")
ddp_reentrant = partial(ddp, recompute="reentrant", static_graph=True)
ddp_checkpoint_wrapper = partial(ddp, recompute="wrapper")
ddp_frozen = partial(ddp, frozen=True)
ddp_tied = partial(ddp, tied=True)
ddp_compiled = partial(ddp, compiler="aot_eager")


def ddp_accumulated(mesh) -> AuditSubject:
    """Two micro-batches a step, the first without a reduction."""
    model = DistributedDataParallel(Transformer(), process_group=mesh["dp"].get_group())
    found, (tokens, labels) = subject(mesh, model), samples(mesh)

    def step() -> Tensor:
        total = torch.zeros(())
        for number, (x, y) in enumerate(zip(tokens.chunk(2), labels.chunk(2), strict=True)):
            model.require_backward_grad_sync = number == 1
            loss = loss_of(model(x), y) / 2
            loss.backward()
            total += loss.detach()
        return total

    found.batch, found.loss, found.step = None, None, step
    return found


def ddp_zero_optimizer(mesh) -> AuditSubject:
    """Each replica updates some of the parameters and broadcasts these."""
    found = ddp(mesh)
    found.optimizer = ZeroRedundancyOptimizer(
        found.module.parameters(), torch.optim.AdamW, mesh["dp"].get_group(), lr=1e-2
    )
    return found


def fsdp2(mesh, *, recompute: bool = False, compiler: str = "", narrow=None, **options) -> AuditSubject:
    model, policy = Transformer(), MixedPrecisionPolicy()
    if recompute:
        model.layers = nn.ModuleList(map(checkpoint_wrapper, model.layers))
    if narrow is not None:
        policy = MixedPrecisionPolicy(narrow, torch.float32)
    for layer in model.layers:
        if compiler:
            layer.compile(backend=compiler)
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy, **options)
    return subject(mesh, fully_shard(model, mesh=mesh["dp"], mp_policy=policy, **options))


fsdp2_recomputed = partial(fsdp2, recompute=True)
fsdp2_gradients_sharded = partial(fsdp2, reshard_after_forward=False)
fsdp2_compiled = partial(fsdp2, compiler="aot_eager")
fsdp2_bf16 = partial(fsdp2, narrow=torch.bfloat16)


def fsdp2_hybrid(mesh) -> AuditSubject:
    """Shards on two ranks, and copies of these on two others."""
    size = mesh["dp"].size()
    inner = init_device_mesh("cpu", (max(size // 2, 1), min(size, 2)), mesh_dim_names=("copies", "shards"))
    model = Transformer()
    for layer in model.layers:
        fully_shard(layer, mesh=inner)
    return subject(mesh, fully_shard(model, mesh=inner))


def split_loss(mesh) -> AuditSubject:
    """PyTorch's loss over a split vocabulary, with its tensor parallelism."""
    model, (tokens, labels), tp = Transformer(), samples(mesh), mesh["tp"]
    split_layers(model, tp)
    plan = {
        "table": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(use_local_output=False),
        "norm": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate(), use_local_output=True
        ),
    }
    parallelize_module(model, tp, plan)

    def step() -> Tensor:
        with loss_parallel():
            loss = loss_of(model(tokens), labels)
            loss.backward()
        return loss.full_tensor().detach()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    return AuditSubject(module=model, step=step, optimizer=optimizer)


def tp_compiled(mesh) -> AuditSubject:
    model = Transformer()
    split_layers(model, mesh["tp"])
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    return norm_by_dtensor(mesh, model)


def accelerated(mesh, *, sharded: bool = False) -> AuditSubject:
    """accelerate's loop, with DDP or FSDP2: two micro-batches accumulated."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    os.environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    plugin = None
    if sharded and mesh.size() > 1:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block"]
        )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    model = Transformer()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    tokens, labels = samples(mesh)

    def step() -> Tensor:
        total = torch.zeros(())
        for x, y in zip(tokens.chunk(2), labels.chunk(2), strict=True):
            with accelerator.accumulate(model):
                loss = loss_of(model(x), y)
                accelerator.backward(loss)
                total += loss.detach() / 2
        return total

    return AuditSubject(module=model, step=step, optimizer=optimizer.optimizer)


accelerate_ddp = accelerated
accelerate_fsdp2 = partial(accelerated, sharded=True)


class Exchange(torch.autograd.Function):
    """All-to-all along two dimensions; its gradient goes the way back."""

    @staticmethod
    def forward(ctx, x: Tensor, group, split: int, join: int) -> Tensor:
        ctx.group, ctx.dims = group, (join, split)
        sent = [part.contiguous() for part in x.chunk(group.size(), split)]
        received = [torch.empty_like(part) for part in sent]
        works = [dist.all_to_all(received, sent, group=group)] if group.size() > 1 else []
        return torch.cat(received if works else sent, join)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return Exchange.apply(grad, ctx.group, *ctx.dims), None, None, None


class Ulysses(nn.Module):
    """Attention whose ranks have all heads of some tokens, and then all tokens of some heads."""

    def __init__(self, group) -> None:
        super().__init__()
        self.group, self.heads = group, 4
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        heads = (t.unflatten(-1, (self.heads, -1)) for t in self.qkv(self.norm(x)).chunk(3, -1))
        q, k, v = (Exchange.apply(t, self.group, 2, 1).transpose(1, 2) for t in heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return x + self.out(Exchange.apply(y, self.group, 1, 2).flatten(2))


def ulysses(mesh) -> AuditSubject:
    group = mesh["cp"].get_group()
    model = nn.Sequential(
        nn.Embedding(VOCAB, HIDDEN), *(Ulysses(group) for _ in range(2)), nn.Linear(HIDDEN, VOCAB)
    )
    tokens, labels = (t.chunk(group.size(), 1)[group.rank()].contiguous() for t in samples(mesh))

    return AuditSubject(
        module=model,
        batch=tokens,
        loss=lambda logits: loss_of(logits, labels),
        reduce=lambda: average(model, group),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )
