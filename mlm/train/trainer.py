"""The training state of one rank and one step of it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from mlm.config.schema import PretrainConfig
from mlm.data.blend_history import History
from mlm.data.sampler import Batch
from mlm.models.gpt2 import GPT2
from mlm.models.init import init_parameters
from mlm.optim.adamw import build_optimizer, ensure_state, set_lr
from mlm.optim.clip import clip_factor, gradient_norm, scale_gradients
from mlm.optim.precision import LossScaler, parameter_dtype
from mlm.optim.schedule import learning_rate
from mlm.parallel.collectives import all_reduce, start_all_reduce
from mlm.parallel.gradients import Reducer, sum_replicated_gradients, sum_tied_gradients
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.random import SHARED, DropoutStream
from mlm.parallel.sharded import build_reducer
from mlm.parallel.sharding import ParameterShard, parameter_shards
from mlm.train.documents import with_eod
from mlm.train.pipelined import PipelinedModel, evaluate


@dataclass(frozen=True)
class StepOutcome:
    """What a step produced, still on the device."""

    loss: Tensor
    """0-d: this rank's part of the mean loss per token of the global batch."""
    grad_norm: Tensor
    """0-d: global gradient norm before clipping."""
    lr: float
    """Learning rate used."""


def build_model(config: PretrainConfig, ctx: ParallelContext) -> PipelinedModel:
    """This rank's part of the model with its initial weights, on its device."""
    model = PipelinedModel(config.model, config.parallel, config.precision, ctx, config.data)
    for chunk in model.chunks:
        init_parameters(chunk, config.seed, ctx.tp)
        if config.compile:
            for layer in chunk.layers.values():
                layer.compile()  # per layer: one graph serves all; whole-model compilation took minutes
    return model


class Trainer:
    """Model, optimizer, loss scale and counters of one rank, and the step that advances them.

    Attributes:
        step: optimizer steps done.
        consumed_samples: samples read so far by the whole job.
        history: of which corpora; empty for synthetic data.
        before_change: called before weights and moments change: a checkpoint may still be copying them.
        dropout_parts: whose dropout masks this process draws (`DropoutStream.of_micro_batch`).
    """

    def __init__(self, config: PretrainConfig, ctx: ParallelContext) -> None:
        self.config = config = replace(config, data=with_eod(config.data))
        self.ctx = ctx
        self.model = build_model(config, ctx)
        self.reducers: Sequence[Reducer] = [
            build_reducer(
                chunk,
                ctx.dp,
                zero=config.parallel.zero,
                compute_dtype=self.model.dtype,
                units=chunk.layers.values(),
                methods=["losses"],
            )
            for chunk in self.model.chunks
        ]
        self.shards: Sequence[ParameterShard] = tuple(
            shard for chunk in self.model.chunks for shard in parameter_shards(chunk, ctx.tp)
        )
        self.optimizer = build_optimizer(self.shards, config.optimizer)
        ensure_state(self.optimizer, self.shards)
        self.scaler = LossScaler(config.precision, ctx.device)
        own = (ctx.tp.rank,)
        self.dropout_parts: dict[str, tuple[int, ...]] = {
            "split_parts": own,
            "hidden_parts": own if config.parallel.sequence_parallel and ctx.tp.size > 1 else SHARED,
        }
        self.step = 0
        self.consumed_samples = 0
        self.history: History = ()
        self.before_change: Callable[[], None] = lambda: None

    def train_step(self, batches: Sequence[Batch]) -> StepOutcome:
        """One optimizer step over this rank's micro-batches. Reads nothing back from the device."""
        return self.update(self.forward_backward(batches))

    def update(self, loss: Tensor) -> StepOutcome:
        """Clip and apply the gradients that `forward_backward` left, which returned `loss`."""
        norm = gradient_norm(self.shards, self.ctx) / self.scaler.scale
        overflow = (~norm.isfinite()).float()
        scale_gradients(
            self.shards, clip_factor(norm, self.config.optimizer.clip_grad_norm) / self.scaler.scale
        )
        lr = learning_rate(
            self.step + 1, self.config.optimizer, self.config.schedule, self.config.train.steps
        )
        set_lr(self.optimizer, lr)
        self.before_change()
        self.optimizer.found_inf = overflow  # type: ignore[attr-defined]  # the fused kernel skips if it is 1
        self.optimizer.step()
        self.scaler.update(overflow)
        self.step += 1
        self.consumed_samples += self.config.train.global_batch_size
        return StepOutcome(loss, norm, lr)

    def forward_backward(self, batches: Sequence[Batch]) -> Tensor:
        """Accumulate the gradients of the mean loss over the global batch, reduced over all axes.

        Returns this rank's part of that mean loss, 0-d; 0 where the last pipeline stage is elsewhere.
        """
        self.ctx.watch.step = self.step + 1
        scale = self.scaler.scale / self.global_tokens(batches)
        for reducer in self.reducers:
            reducer.start_step()

        def forward(chunk: GPT2, batch: Batch, x: Tensor | None) -> Tensor:
            return self.micro_batch_output(chunk, batch, scale, x)

        def before_backward(chunk: int, last: bool) -> None:
            # weight gradients that come later would miss a reduction begun now: `finish` does it all then
            self.reducers[chunk].sync = last and not self.model.puts_off

        def after_weights(chunk: int) -> None:
            self.reducers[chunk].settle()

        losses = self.model.train(batches, forward, before_backward, after_weights)
        for reducer in self.reducers:
            reducer.finish()
        if self.model.chunks[0].sequence_parallel:
            sum_replicated_gradients(self.shards, self.ctx.tp)
        sum_tied_gradients(self.shards, self.ctx.tied)
        total = torch.stack(losses).sum() if losses else torch.zeros_like(scale)
        return total / self.scaler.scale

    def micro_batch_output(self, chunk: GPT2, batch: Batch, scale: Tensor, x: Tensor | None) -> Tensor:
        """What a chunk makes of a micro-batch, with dropout, differentiable: hidden states, or in the last
        stage scale * sum of token losses."""
        device = self.ctx.device
        tokens, labels, documents = self.model.inputs(batch)
        model, stream = self.config.model, None
        if model.hidden_dropout > 0 or model.attention_dropout > 0:
            stream = DropoutStream.of_micro_batch(
                self.config.seed, batch.first_sample, device, **self.dropout_parts
            )
        output: Tensor = chunk(tokens, labels, scale, stream, x, documents)
        return output

    def global_tokens(self, batches: Iterable[Batch]) -> Tensor:
        """Scored tokens of the global batch as a 0-d float tensor: what the loss is divided by."""
        count = sum(map(self.model.num_scored, batches))  # on the host: labels are not moved yet
        dtype = parameter_dtype(self.config.precision)
        total = all_reduce(torch.tensor(float(count), dtype=dtype).to(self.ctx.device), self.ctx.dp)
        return total.clamp_(min=1)  # nothing to score: a loss of 0, not of 0/0

    def mean_loss(self, outcome: StepOutcome) -> float:
        """Mean loss per token over the global batch. Collective over dp and pp; waits for the device."""
        return float(all_reduce(all_reduce(outcome.loss.clone(), self.ctx.dp), self.ctx.pp).item())

    def validate(self, batches: Iterable[Batch]) -> float:
        """Mean loss per token over all ranks' batches, in nats; independent of layout and batch size."""
        return evaluate(self.model, batches)[0]


class StopVote:
    """Whether any rank was asked to stop, agreed by all: begun before a step, read after it."""

    def __init__(self, ctx: ParallelContext, requested: bool) -> None:
        # the answer travels while the device computes
        self.flag = start_all_reduce(torch.tensor([int(requested)]), ctx.world, dist.ReduceOp.MAX)

    def result(self) -> bool:
        """True on every rank if it was asked of one."""
        return bool(self.flag.wait().item())
