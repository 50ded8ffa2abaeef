"""Run one rank of a layout: its trainer on the meta device, with fake process groups that answer at once.

The meta device has shapes, dtypes and strides, and no numbers. The trainer takes a GPU's path there: products
in half precision with wide sums, fused attention, weights cast once a step, the fused optimizer. Streams,
events and generators, which need a CUDA driver, are left out.

Of many micro-batches only a few run: each computes and sends the same, so that counts are linear in their
number, and memory grows only until the pipeline is full.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from mlm.data.sampler import MicroBatch, collate
from mlm.models.shape import architecture_of
from mlm.optim.adamw import moments
from mlm.parallel.expert.router import Router
from mlm.parallel.matmul import prepare_products
from mlm.parallel.mesh import ParallelContext, build_mesh
from mlm.parallel.nf4 import storage_tensors
from mlm.parallel.pipeline.actions import SENDS_KEPT
from mlm.parallel.sharding import ParameterShard
from mlm.plan.dry_run_memory import CASTS, GRADIENTS, STATE, TABLES, WEIGHTS, Log
from mlm.plan.dry_run_meter import BACKWARD, OPTIMIZER, Meter, StepCounts
from mlm.runs.config import AttentionKernel, PretrainConfig
from mlm.runs.corpora import train_dataset
from mlm.training.observer import Observer, Observers
from mlm.training.trainer import StopVote, Trainer

META = torch.device("meta")


@dataclass(frozen=True)
class DryRun:
    ctx: ParallelContext
    parameters: int
    """Of this rank, without its routers' running loads and biases."""
    layers: list[list[int]]
    """Numbers of its layers, a list for each of its chunks."""
    counts: StepCounts
    """Of the full step."""
    log: Log
    """Of `micro_batches_run` micro-batches. The last stage keeps a loss of 4 bytes for each further one."""
    micro_batches: int
    micro_batches_run: int
    """Micro-batches that ran; counts are extrapolated to all."""


def dry_run(
    config: PretrainConfig, rank: int, *, device: torch.device = META, in_full: bool = False
) -> DryRun:
    """Run one step of a rank; `in_full` runs all micro-batches. For a process without a process group.

    On other devices than meta operators compute, and collectives leave their buffers as they are.
    """
    p = config.parallel
    dp = p.dp or 1
    config = replace(make_countable(config), parallel=replace(p, dp=dp))
    prepare_products(device)
    # Groups that answer at once, without processes, threads or sockets.
    dist.init_process_group("fake", rank=rank, world_size=p.replica * dp, store=FakeStore())
    sizes = {"tp": p.tp, "cp": p.cp, "pp": p.pp, "dp": dp, "ep": p.ep, "expert_tp": p.expert_tp}
    try:
        ctx = build_mesh(**sizes, device=device, timeout_s=60, host_backend="fake")  # type: ignore[arg-type]
        meter, widths = Meter(device.type), architecture_of(config.model)
        meter.padding = 1 - widths.values_dim / widths.head_dim
        axes = (ctx.tp, ctx.cp, ctx.pp, ctx.dp, ctx.replicas, ctx.tied, ctx.world, ctx.experts.ep)
        for axis in (*axes, ctx.experts.replicas):
            if axis is not None and axis.group is not None:
                meter.axes[axis.group.group_name] = (axis.name, axis.size)
        with contextlib.ExitStack() as stack:
            if device == META:
                stack.enter_context(MetaAttention(config.attention))
                stack.enter_context(sharding_on_meta())
            with meter:
                trainer: Trainer[MicroBatch] = Trainer(config, ctx)
            return run_steps(trainer, meter, in_full=in_full)
    finally:
        dist.destroy_process_group()


def make_countable(run: PretrainConfig) -> PretrainConfig:
    """Return the run on random tokens, in eager kernels."""
    data = replace(run.data, kind="synthetic", path=None, train=None, blend=(), eod_id=run.data.eod_id or 0)
    return replace(run, compile=False, deterministic=False, cuda_graphs=False, data=data)


def run_steps(trainer: Trainer[MicroBatch], meter: Meter, *, in_full: bool) -> DryRun:
    """Count a step of the trainer, from as many micro-batches as needed."""
    config, ctx, size = trainer.config, trainer.ctx, trainer.config.train.micro_batch_size
    total = config.train.global_batch_size // (ctx.dp.size * size)
    steady, warmup = (total, total) if in_full else numbers_to_run(config, ctx, total)
    tag_state(trainer, meter)
    trainer.observers = Observers([LateWork(meter)])
    # Copies of one micro-batch: BERT's differ in their number of masked tokens.
    batches = batches_of(config, [size]) * warmup
    log, counts = meter.log, StepCounts()
    with meter.watching(trainer.model.chunks):
        meter.counts = counts
        step(trainer, meter, batches)
        if steady < warmup:
            meter.log, meter.counts = Log(), StepCounts()  # the log returned is the first step's
            step(trainer, meter, batches[:steady])
            # exact, as each further micro-batch computes and sends the same
            pairs: tuple[tuple[Counter[Any], Counter[Any]], ...] = (
                (meter.counts.flops, counts.flops),
                (meter.counts.messages, counts.messages),
            )
            for fewer, more in pairs:
                for key, n in more.items():
                    increment, remainder = divmod(n - fewer[key], warmup - steady)
                    assert not remainder, "each micro-batch computes and sends the same"
                    more[key] = n + increment * (total - warmup)
    return DryRun(
        ctx,
        sum(shard.parameter.numel() for shard in trainer.shards if not is_router_state(shard)),
        [list(chunk.stage.layers) for chunk in trainer.model.chunks],
        counts,
        log,
        total,
        warmup,
    )


def step(trainer: Trainer[MicroBatch], meter: Meter, batches: Sequence[MicroBatch]) -> None:
    """Run the two halves of `Trainer.train_step`, and between them the ranks' vote on stopping."""
    parts = trainer.forward_backward(batches)
    trainer.reduce_gradients()
    meter.tag(trainer.model.casts.copies, CASTS)
    meter.tag([s.parameter.grad for s in trainer.shards if s.parameter.grad is not None], GRADIENTS)
    vote = StopVote(trainer, lambda: 0)
    vote.before_update()
    with meter.phase(OPTIMIZER):
        trainer.clip_and_update(parts)
    vote.result()


def numbers_to_run(config: PretrainConfig, ctx: ParallelContext, total: int) -> tuple[int, int]:
    """Return two numbers of micro-batches: counts are linear from the first on, memory peaks by the second.

    Interleaved schedules have rounds of p micro-batches. GPipe has all micro-batches in flight, so all run.
    """
    p, s, pipeline = ctx.pp.size, ctx.pp.rank, config.parallel.pipeline
    if pipeline == "gpipe" and p > 1:
        return total, total
    if config.parallel.vp > 1:
        steady, warmup = p, 3 * p
    elif p > 1:
        in_flight = 2 * p if pipeline == "zb_h1" else p - s  # arXiv:2104.04473, section 2.2.1
        steady, warmup = 1, in_flight + SENDS_KEPT + 2
    else:
        steady, warmup = 1, 3
    return (total, total) if warmup >= total else (steady, warmup)


def batches_of(config: PretrainConfig, sizes: Sequence[int]) -> list[MicroBatch]:
    """Return micro-batches of random tokens with these numbers of samples."""
    samples = train_dataset(config, sum(sizes))
    ends = accumulate(sizes)
    return [collate(samples.gather(list(range(e - n, e))), e - n) for e, n in zip(ends, sizes, strict=True)]


def is_router_state(shard: ParameterShard) -> bool:
    """True for a router's running loads and biases, which are not weights of the model."""
    module = shard.module
    return isinstance(module, Router) and any(shard.parameter is x for x in (module.bias, module.load))


def tag_state(trainer: Trainer[MicroBatch], meter: Meter) -> None:
    """Tag the memory that lives from step to step."""
    state = [
        trainer.optimizer.state[shard.parameter].get(name)
        for shard in trainer.shards
        for name in (*moments(trainer.optimizer, shard), "step")
    ]
    if trainer.average is not None:
        state += [*trainer.average.values.values(), trainer.average.count]
    meter.tag([x for x in state if isinstance(x, Tensor)], STATE)
    for chunk in trainer.model.chunks:
        meter.tag(chunk.buffers(), TABLES)
    weights = [storage_tensors(shard.parameter) for shard in trainer.shards]
    meter.tag(chain.from_iterable(weights), WEIGHTS)
    for reducer in trainer.reducers:
        meter.tag([bucket.flat for bucket in getattr(reducer, "buckets", ())], GRADIENTS)


class LateWork(Observer):
    """Counts deferred weight gradients and reductions as parts of backward."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if name not in ("weight", "reduce"):
            yield
            return
        with self.meter.phase(BACKWARD):
            yield
        self.meter.log.tag_remaining(BACKWARD, GRADIENTS)


class _NoStreams:
    """Stub of a device's module; its streams and events are the stub itself."""

    def current_device(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self

    def __enter__(self) -> "_NoStreams":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def sharding_on_meta() -> Iterator[None]:
    """Let FSDP2 run on the meta device, which it has no option for.

    It needs streams and events of `torch.meta`, which PyTorch can register only permanently, and rejects meta
    parameters, as a checkpoint may not have been loaded.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    validate = FSDPParamGroup._validate_no_meta_params
    torch.meta = _NoStreams()  # type: ignore[attr-defined]
    FSDPParamGroup._validate_no_meta_params = lambda group: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        FSDPParamGroup._validate_no_meta_params = validate  # type: ignore[method-assign]
        del torch.meta  # type: ignore[attr-defined]


class MetaAttention(TorchFunctionMode):
    """Calls a GPU's attention kernel on the meta device, where PyTorch would compute by the formula.

    `is_unfused` computes by the formula if probabilities are dropped, as on a CPU; `recomputes` does so in
    backward too.
    """

    def __init__(
        self, choice: AttentionKernel, *, is_unfused: bool = False, recomputes: bool = False
    ) -> None:
        super().__init__()
        self.choice, self.is_unfused, self.recomputes = choice, is_unfused, recomputes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        if self.is_unfused and (p := kwargs.get("dropout_p")):
            q, k, v = args

            def core() -> Tensor:
                """Attention as `unfused_attention` computes it on a CPU."""
                keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
                scores = torch.matmul(q, keys.mT).softmax(-1)
                return torch.matmul(F.dropout(scores, p), values)

            return checkpoint(core, use_reentrant=False) if self.recomputes else core()
        return self.attend(*args, **kwargs)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        enable_gqa: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """Return attention by the GPU's kernel: [B, N/t, S, D], keys and values possibly with fewer heads."""
        aten, half = torch.ops.aten, q.dtype in (torch.bfloat16, torch.float16)
        y: Tensor
        if half and attn_mask is None and self.choice in ("auto", "flash"):
            y = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]
            return y
        if enable_gqa:  # other kernels need as many heads of keys as of queries
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        if self.choice == "cudnn" and half:
            kernel = aten._scaled_dot_product_cudnn_attention
        elif q.dtype == torch.float64 or self.choice == "math":
            with torch._C.DisableTorchFunction():
                return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal)
        else:
            kernel = aten._scaled_dot_product_efficient_attention
            attn_mask = None if attn_mask is None else attn_mask.expand(*q.shape[:3], k.shape[2])
        y = kernel(q, k, v, attn_mask, True, dropout_p, is_causal)[0]
        return y
