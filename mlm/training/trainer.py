"""The training state of one rank and one step of it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mlm.data.blend_history import BlendSegments
from mlm.data.sampler import Dataset, Loader, MicroBatch, Ranges, batch_at, first_of_step
from mlm.models.backbone import Transformer
from mlm.models.config import KINDS
from mlm.models.exact import exact_axes, make_exact
from mlm.models.family import Objective, family_of
from mlm.models.shape import architecture_of, is_tied
from mlm.models.stage import PipelineStage
from mlm.optim.adamw import apply, build_optimizer, set_lr
from mlm.optim.average import WeightAverage
from mlm.optim.clip import clip_factor, gradient_norm
from mlm.optim.precision import LossScaler, parameter_dtype
from mlm.optim.schedule import learning_rate
from mlm.parallel.collectives import Pending, all_reduce, start_all_reduce, to_device
from mlm.parallel.context import local_positions
from mlm.parallel.dropout import DropoutStream
from mlm.parallel.exact import sum_over_ranks, tree_sum
from mlm.parallel.exact_gradients import TreeReducer, leaf_order
from mlm.parallel.expert.router import Balance, routers
from mlm.parallel.gradients import (
    build_reducer,
    fuse_embedding_grad,
    sum_replicated_gradients,
    sum_tied_gradients,
)
from mlm.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from mlm.parallel.mesh import CPU, ParallelContext
from mlm.parallel.pipeline.engine import ChunkGradients, Reducer
from mlm.parallel.random import init_parameters
from mlm.parallel.sharding import DP_SLICES, ParameterShard, parameter_shards, shard_of
from mlm.runs.checks import exact_parts
from mlm.runs.config import PretrainConfig
from mlm.runs.corpora import fill_eod_id
from mlm.training.graphs import ReplayedLayers
from mlm.training.identity import RunAncestry
from mlm.training.kernels import choose_kernels, compile_layers, settle_kernels, should_compile
from mlm.training.observer import Observer, Observers, StepOutcome
from mlm.training.pipelined import PipelinedModel, evaluate

B = TypeVar("B", bound=MicroBatch)
T = TypeVar("T")


def build_model(
    config: PretrainConfig,
    ctx: ParallelContext,
    stages: Sequence[PipelineStage] | None,
    device: torch.device,
    *,
    one_shape: bool,
) -> PipelinedModel:
    """Build this rank's part of the model with its initial weights.

    `one_shape` is True if all micro-batches have one shape; other arguments are as in `Trainer`.
    """
    choose_kernels(config, device, one_shape=one_shape)
    parallel = config.parallel
    model = PipelinedModel(config.model, parallel, config.precision, ctx, config.lora, stages)
    # the compiler traces no weights in 4 bits
    choice = config.compile if config.lora.quantize == "none" else False
    is_compiled = should_compile(choice, device)
    for chunk in model.chunks:
        if config.exact:
            make_exact(chunk)
        init_parameters(chunk, config.seed, ctx.tp)
        compile_layers(
            chunk.layers.values(),
            choice,
            device,
            graphs=config.cuda_graphs is True,
            budget=parallel.recompute_budget if parallel.recompute == "budget" else 1.0,
        )
        if is_compiled:
            model.casts.exclude(chunk.layers.values())
        if config.cuda_graphs == "stack" and device.type == "cuda":
            chunk.run_layers = ReplayedLayers(chunk)
            # casts of a step are nodes outside of the graph, where gradients cannot go
            captured = chunk.layers, getattr(chunk, "final_norm", None)
            model.casts.exclude(module for module in captured if module is not None)
        for module in chunk.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.compiled, module.device_type = is_compiled, device.type
    model.replays = model.casts.persistent = config.cuda_graphs is True
    return model


def fused_grad_embeddings(model: PipelinedModel) -> list[VocabParallelEmbedding]:
    """Token tables whose gradient the loss may add to the sum in its forward pass.

    Excluded: tables sharded by FSDP2, which keeps their gradients elsewhere, and user families, whose losses
    may be scaled or recomputed. On a CPU one micro-batch sums as autograd does, bit for bit; over several, a
    table that also embeds tokens in this chunk adds its terms in another order.
    """
    return [
        module
        for chunk in model.chunks
        if not chunk.tp.exact_parts and chunk.stage.is_last and chunk.config.kind in KINDS
        for module in chunk.modules()
        if isinstance(module, VocabParallelEmbedding) and not hasattr(module, DP_SLICES)
    ]


class Trainer(Generic[B]):
    """Model, optimizer, loss scale and counters of one rank, and the step that advances them.

    Args:
        config: settings of the run.
        ctx: this rank among all; the model is built on its device.
        objective: training objective; None for pretraining of the family.
        stages: this rank's pipeline stages, one for each chunk; None splits the layers evenly.
        device: device to choose kernels for; None for the device of `ctx`. A plan builds on meta.

    Attributes:
        settled: `config` with what it leaves to the device decided (`settle_kernels`).
        step: optimizer steps done.
        consumed_samples: samples read so far by the whole job.
        newest_samples: samples of the newest step.
        history: corpora that the samples were read from; empty for synthetic data.
        excluded_samples: sample numbers that incidents exclude from the run.
        is_finite: False if the newest step was not finite: its state is not saved.
        wrong_since: first suspect step of the newest ones; None if the newest is sound. Good checkpoints from
            before it are kept.
        observers: called at each point of a step.
        split_parts: tp ranks whose attention dropout this process draws in fused kernels (`DropoutStream`).
        balances_experts: True if loads of experts are counted and balanced: not in finetuning, where padding
            (which differs by layout) would count, and not with adapters, which freeze routers.
        average: moving average of the weights; None without ema.decay.
        ancestry: saves that the run descends from and changes of its settings; known to rank 0.
        extra_state: further state of checkpoints, as JSON values.
    """

    def __init__(
        self,
        config: PretrainConfig,
        ctx: ParallelContext,
        objective: Objective[Transformer, B] | None = None,
        *,
        stages: Sequence[PipelineStage] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.config = config = replace(config, data=fill_eod_id(config.data))
        self.ctx = ctx = exact_axes(ctx, exact_parts(config), config.exact) if config.exact else ctx
        one_shape = objective is None  # sequences of finetuning differ in length
        kernel_device = device or ctx.device
        self.settled = settle_kernels(config, kernel_device, replicas=ctx.dp.size, one_shape=one_shape)
        self.model = build_model(self.settled, ctx, stages, kernel_device, one_shape=one_shape)
        self.objective: Objective[Transformer, B] = objective or family_of(config.model.kind).objective(
            config.data, ctx, self.model.dtype
        )
        has_experts = architecture_of(config.model).experts > 0
        self.balances_experts = has_experts and objective is None and not config.lora.rank
        self.ancestry = RunAncestry()
        self.extra_state: dict[str, Any] = {}
        self.reducers = self._build_reducers()
        fused = (ColumnParallelLinear, RowParallelLinear) if self.settled.fuse_accumulation else ()
        self.gradients = [
            ChunkGradients(reducer, [m for m in chunk.modules() if isinstance(m, fused)], deferred)
            for chunk, reducer, deferred in zip(
                self.model.chunks, self.reducers, self.model.deferred, strict=True
            )
        ]
        self.balance = Balance(
            {
                int(layer): router
                for chunk in self.model.chunks
                for layer, block in chunk.layers.items()
                for router in routers(block)
                if self.balances_experts
            },
            (ctx.replicas, ctx.tp) if config.parallel.sequence_parallel else (ctx.replicas,),
        )
        self.fused_grad_embeddings = fused_grad_embeddings(self.model)
        self.shards: Sequence[ParameterShard] = tuple(
            shard for chunk in self.model.chunks for shard in parameter_shards(chunk, ctx.tp)
        )
        self.optimizer = build_optimizer(
            self.shards, config.optimizer, ctx.replicas, config.model.width_factor
        )
        decay = config.ema.decay
        self.average = WeightAverage(self.shards, decay, ctx.device) if decay else None
        self.scaler = LossScaler(config.precision, ctx.device)
        self.master_dtype = parameter_dtype(config.precision)
        self.split_parts: tuple[int, ...] = (ctx.tp.rank,)
        self.step = 0
        self.consumed_samples = 0
        self.newest_samples = range(0)
        self.history: BlendSegments = ()
        self.excluded_samples: Ranges = ()
        self.is_finite = True
        self.wrong_since: int | None = None
        self.observers = Observers()

    def _build_reducers(self) -> Sequence[Reducer]:
        """Each chunk's sum of gradients over dp; parameters that it shards are replaced."""
        config, trains_few = self.settled, bool(self.config.lora.rank)
        build = (
            partial(TreeReducer, ctx=self.ctx)
            if config.exact
            else partial(build_reducer, dp=self.ctx.replicas)
        )
        return [
            build(
                chunk,
                zero=config.parallel.zero,
                compute_dtype=self.model.dtype,
                units=chunk.layers.values(),
                methods=self.objective.methods,
                reduce=config.parallel.zero_reduce,
                late_weights=self.model.defers_weight_grads,
                keep_buffers=bool(config.cuda_graphs),
                fuse_accumulation=bool(config.fuse_accumulation),
                replicated=[p for p in chunk.parameters() if p.requires_grad] if trains_few else (),
            )
            for chunk in self.model.chunks
        ]

    def train_step(self, batches: Sequence[B]) -> StepOutcome:
        """One optimizer step over this rank's micro-batches. Reads nothing back from the device."""
        parts = self.forward_backward(batches)
        self.reduce_gradients()
        return self.clip_and_update(parts)

    def forward_backward(
        self, batches: Sequence[B], objective: Objective[Transformer, B] | None = None
    ) -> Tensor:
        """Accumulate the gradients of the mean loss over the global batch, times the loss scale.

        Their reduction over dp begins in the last backward pass. Returns this rank's share of each part of
        the objective, [k]; 0 where the last pipeline stage is elsewhere.
        """
        self.ctx.watch.step = self.step + 1
        scale = self.scaler.scale / self.global_counts(batches)
        if self.balances_experts:
            tokens = sum(batch.tokens.numel() for batch in batches)  # padding included
            global_tokens = self._sum_over_dp(torch.tensor(tokens, dtype=torch.float64))
            self.balance.start(self.scaler.scale / global_tokens)
        leaf = 0
        if self.config.exact:
            order, leaf = leaf_order(len(batches), self.ctx.dp)
            batches = [batches[i] for i in order]
            for reducer in self.reducers:
                assert isinstance(reducer, TreeReducer)
                reducer.leaf = leaf
        for reducer in self.reducers:
            reducer.start_step()
        with fuse_embedding_grad(self.fused_grad_embeddings):
            outputs = self.model.train(
                batches, objective or self.objective, scale, self.dropout, self.gradients, self.observers
            )
        total = torch.zeros_like(scale)
        if outputs:
            total = tree_sum(outputs, leaf) if leaf else torch.stack(outputs).sum(0)
        return total / self.scaler.scale

    def reduce_gradients(self) -> None:
        """Finish the sum of gradients over dp, and over tp and the tied tables' stages where they need it."""
        with self.observers.phase("reduce"):
            for gradients in self.gradients:
                gradients.finish()
            self.balance.reduce()
            if not self.config.exact:  # exact sums over tp are part of each backward pass
                sequence_parallel = self.model.chunks[0].sequence_parallel
                sum_replicated_gradients(self.shards, self.ctx.tp, sequence_parallel=sequence_parallel)
            if self.ctx.tied.size > 1 and is_tied(self.config.model):
                sum_tied_gradients(self.shards, self.ctx.tied)

    def clip_and_update(self, parts: Tensor) -> StepOutcome:
        """Clip the global gradient norm and update the weights, unless it overflows or an observer skips.

        `parts` is the result of `forward_backward`.
        """
        norm = self.gradient_norm()
        check = self.observers.before_update(parts, norm)
        lr = learning_rate(
            self.step + 1, self.config.optimizer, self.config.schedule, self.config.train.steps
        )
        set_lr(self.optimizer, lr)
        self.observers.before_weights_change()
        with self.observers.phase("optimizer"):
            overflow = self.apply(norm, None if check is None else check.hold)
        if check is not None and check.decide():
            overflow = self.apply(norm)
        self.scaler.update(overflow)
        self.step += 1
        self.newest_samples = self.next_samples
        self.consumed_samples = self.newest_samples.stop
        return StepOutcome(parts, norm, lr)

    def gradient_norm(self) -> Tensor:
        """Global norm of the summed gradients, without the loss scale: 0-d. Collective."""
        return gradient_norm(self.shards, self.ctx) / self.scaler.scale

    def apply(self, norm: Tensor, hold: Tensor | None = None) -> Tensor:
        """Step the optimizer with clipped gradients, unless they overflow or `hold` is 1.0.

        Returns 1.0 if `norm` is not finite, else 0.0: 0-d.
        """
        factor = clip_factor(norm, self.config.optimizer.clip_grad_norm) / self.scaler.scale
        overflow = (~norm.isfinite()).float()
        skip = overflow if hold is None else torch.maximum(overflow, hold.to(overflow.dtype))
        apply(self.optimizer, self.shards, factor, skip)
        if self.average is not None:
            self.average.update(skip)
        self.balance.update(skip)
        return overflow

    def compute_gradients(
        self, batches: Sequence[B], objective: Objective[Transformer, B] | None = None
    ) -> Tensor:
        """Run `forward_backward` and `reduce_gradients` without an update and without observers."""
        observers, self.observers = self.observers, Observers()
        try:
            parts = self.forward_backward(batches, objective)
            self.reduce_gradients()
        finally:
            self.observers = observers
        return parts

    def batches(self, samples: Dataset) -> Loader:
        """This rank's micro-batches of each step, from the next step on; to be closed."""
        train, ctx = self.config.train, self.ctx
        return Loader(
            samples,
            consumed_samples=self.consumed_samples,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            rank=ctx.dp.rank,
            size=ctx.dp.size,
            pin_memory=ctx.device.type == "cuda",
            excluded_samples=self.excluded_samples,
            ramp=train.ramp_batch,
        )

    @property
    def next_samples(self) -> range:
        size, ramp = self.config.train.global_batch_size, self.config.train.ramp_batch
        first = first_of_step(self.consumed_samples, 0, size, self.excluded_samples, ramp)
        return range(first, first + batch_at(first, size, ramp)[0])

    def dropout(self, batch: B) -> DropoutStream | None:
        """The dropout masks of a micro-batch; None where the model has no dropout."""
        model = self.config.model
        if not (model.hidden_dropout or model.attention_dropout or self.config.lora.dropout):
            return None
        sequence_parallel, ctx = self.config.parallel.sequence_parallel, self.ctx
        positions = None
        if ctx.cp.parts > 1:
            positions = local_positions(batch.tokens.shape[1], ctx.cp, CPU)
            positions = shard_of(positions, ctx.tp, 0) if sequence_parallel else positions
        return DropoutStream.of_micro_batch(
            self.config.seed,
            batch.first_sample,
            len(batch.tokens),
            self.ctx.device,
            split_parts=self.split_parts,
            sequence_rank=ctx.tp.rank if sequence_parallel else 0,
            positions=positions,
        )

    def global_counts(self, batches: Iterable[B]) -> Tensor:
        """Divisors of the objective's metrics over the global batch, such as scored tokens: [k] float."""
        # on the host, before labels move to the device
        counts = torch.tensor([self.objective.counts(batch) for batch in batches], dtype=torch.float64).sum(0)
        return self._sum_over_dp(counts).clamp_(min=1)  # nothing to score: a loss of 0, not of 0/0

    def _sum_over_dp(self, x: Tensor) -> Tensor:
        return all_reduce(to_device(x.to(self.master_dtype), self.ctx.device), self.ctx.dp)

    def mean_parts(self, outcome: StepOutcome) -> list[float]:
        """Means of the objective's metrics over the global batch. Collective; waits for the device."""
        parts = outcome.parts.clone()
        if self.config.exact:
            parts = sum_over_ranks(parts, self.ctx.dp, nearest_first=False)
        else:
            all_reduce(parts, self.ctx.replicas)
        parts = all_reduce(parts, self.ctx.pp)
        return list(parts.tolist())

    def mean_loss(self, outcome: StepOutcome) -> float:
        """The minimised loss, mean over the global batch, in nats. Collective as `mean_parts`."""
        return sum(self.mean_parts(outcome)[: self.objective.num_losses])

    def swap_average(self) -> None:
        assert self.average is not None, "of ema.decay"
        self.observers.before_weights_change()
        self.average.swap()
        for reducer in self.reducers:
            reducer.drop_gathered()

    def validate(self, batches: Iterable[B]) -> list[float]:
        """Means of the objective's metrics over all ranks' batches, equal at every layout and batch size."""
        return evaluate(self.model, self.objective, batches)[0]


class StopAgreed(Exception):  # noqa: N818, as it is not an error
    """Raised on all ranks between batches of a validation after a stop was requested on one."""


class StopVote(Observer):
    """Agreement of all ranks to stop if one received a signal; starts before the update, is read after it.

    A single process obeys requests until the vote is read; several obey requests made before it started.
    `ballot` returns 0, or the number of a signal; ranks agree on the largest.
    """

    def __init__(self, trainer: Trainer[Any], ballot: Callable[[], int]) -> None:
        self.trainer, self.ballot = trainer, ballot
        self.is_open = trainer.ctx.world.size == 1
        self.flag: Pending | None = None
        self.step = 0
        """Step of the newest vote."""

    def before_update(self, parts: object = None, grad_norm: object = None) -> None:
        """Begin the vote; its result travels while the device computes."""
        self.step = self.trainer.step + 1
        self.begin()

    def begin(self) -> None:
        ballot = torch.tensor([self.ballot()])
        self.flag = start_all_reduce(ballot, self.trainer.ctx.world, dist.ReduceOp.MAX)

    def result(self) -> int:
        """The largest ballot, the same on every rank. May be read again."""
        if self.is_open:
            return self.ballot()
        return 0 if self.flag is None else int(self.flag.wait().item())

    def polled(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches, equally many on all ranks, with a vote during each. Raises StopAgreed."""
        for batch in batches:
            if self.result():
                raise StopAgreed
            self.begin()
            yield batch
