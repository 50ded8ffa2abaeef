"""The training state of one rank and one step of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mlm.config.schema import PretrainConfig
from mlm.data.sampler import Batch
from mlm.models.gpt2 import GPT2
from mlm.models.init import init_parameters
from mlm.optim.adamw import build_optimizer, ensure_state, set_lr
from mlm.optim.clip import clip_factor, gradient_norm, scale_gradients
from mlm.optim.precision import DTYPES, LossScaler, parameter_dtype
from mlm.optim.schedule import learning_rate
from mlm.parallel.collectives import all_reduce
from mlm.parallel.cross_entropy import IGNORE
from mlm.parallel.gradients import GradientReducer
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.random import DropoutStream
from mlm.parallel.sharding import ParameterShard, parameter_shards


@dataclass(frozen=True)
class StepOutcome:
    """What a step produced, still on the device."""

    loss: Tensor
    """0-d: this data-parallel rank's part of the mean loss per token of the global batch."""
    grad_norm: Tensor
    """0-d: global gradient norm before clipping."""
    lr: float
    """Learning rate used."""


def build_model(config: PretrainConfig, ctx: ParallelContext) -> GPT2:
    """The model with its initial weights, on this rank's device."""
    with torch.device(ctx.device):
        model = GPT2(
            config.model,
            tp=ctx.tp,
            dtype=DTYPES[config.precision.dtype],
            recompute=config.parallel.recompute,
        ).to(parameter_dtype(config.precision))
    init_parameters(model, config.seed, ctx.tp)
    if config.compile:
        for layer in model.layers:
            layer.compile()  # per layer: one graph serves all; whole-model compilation took minutes
    return model


class Trainer:
    """Model, optimizer, loss scale and counters of one rank, and the step that advances them.

    Attributes:
        step: optimizer steps done.
        consumed_samples: samples read so far by the whole job.
    """

    def __init__(self, config: PretrainConfig, ctx: ParallelContext) -> None:
        self.config, self.ctx = config, ctx
        self.model = build_model(config, ctx)
        self.shards: Sequence[ParameterShard] = tuple(parameter_shards(self.model, ctx.tp))
        self.optimizer = build_optimizer(self.shards, config.optimizer)
        ensure_state(self.optimizer, self.shards)
        self.reducer = GradientReducer([s.parameter for s in self.shards], ctx.dp)
        self.scaler = LossScaler(config.precision, ctx.device)
        self.step = 0
        self.consumed_samples = 0

    def train_step(self, batches: Sequence[Batch]) -> StepOutcome:
        """One optimizer step over this rank's micro-batches. Reads nothing back from the device."""
        loss = self.forward_backward(batches)
        norm = gradient_norm(self.shards, self.ctx) / self.scaler.scale
        overflow = (~norm.isfinite()).float()
        scale_gradients(
            self.shards, clip_factor(norm, self.config.optimizer.clip_grad_norm) / self.scaler.scale
        )
        lr = learning_rate(
            self.step + 1, self.config.optimizer, self.config.schedule, self.config.train.steps
        )
        set_lr(self.optimizer, lr)
        self.optimizer.found_inf = overflow  # type: ignore[attr-defined]  # the fused kernel skips if it is 1
        self.optimizer.step()
        self.scaler.update(overflow)
        self.step += 1
        self.consumed_samples += self.config.train.global_batch_size
        return StepOutcome(loss, norm, lr)

    def forward_backward(self, batches: Sequence[Batch]) -> Tensor:
        """Accumulate the gradients of the mean loss over the global batch, reduced over dp.

        Returns this rank's part of that mean loss, 0-d.
        """
        scale = self.scaler.scale / self.global_tokens(batches)
        self.reducer.start_step()
        total = torch.zeros_like(scale)
        for i, batch in enumerate(batches):
            self.reducer.sync = i == len(batches) - 1
            loss = self.micro_batch_loss(batch, scale)
            loss.backward()
            total += loss.detach()
        self.reducer.finish()
        return total / self.scaler.scale

    def micro_batch_loss(self, batch: Batch, scale: Tensor) -> Tensor:
        """scale * sum of token losses of a micro-batch, with dropout, differentiable."""
        device = self.ctx.device
        tokens = batch.tokens.to(device, non_blocking=True)
        labels = batch.labels.to(device, non_blocking=True)
        model, dropout = self.config.model, None
        if model.hidden_dropout > 0 or model.attention_dropout > 0:
            dropout = DropoutStream.of_micro_batch(self.config.seed, batch.first_sample, device)
        return self.model(tokens, labels, scale, dropout)

    def global_tokens(self, batches: Iterable[Batch]) -> Tensor:
        """Scored tokens of the global batch as a 0-d float tensor: what the loss is divided by."""
        count = sum(int((b.labels != IGNORE).sum()) for b in batches)  # on the host: labels are not moved yet
        dtype = parameter_dtype(self.config.precision)
        return all_reduce(torch.tensor(float(count), dtype=dtype).to(self.ctx.device), self.ctx.dp)

    def mean_loss(self, outcome: StepOutcome) -> float:
        """Mean loss per token over the global batch. Collective over dp; waits for the device."""
        return float(all_reduce(outcome.loss.clone(), self.ctx.dp).item())

    def validate(self, batches: Iterable[Batch]) -> float:
        """Mean loss per token over all ranks' batches, in nats; independent of layout and batch size."""
        return evaluate(self.model, batches, self.ctx)[0]


def evaluate(model: GPT2, batches: Iterable[Batch], ctx: ParallelContext) -> tuple[float, int]:
    """(mean loss per scored token in nats, scored tokens) over all data-parallel ranks' batches.

    Summed in float64, so that the score does not depend on how the samples were dealt.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=ctx.device)
    for batch in batches:
        tokens, labels = batch.tokens.to(ctx.device), batch.labels.to(ctx.device)
        sums[0] += model.losses(tokens, labels).sum(dtype=torch.float64)
        sums[1] += (labels != IGNORE).sum()
    loss, count = all_reduce(sums, ctx.dp).tolist()
    return loss / max(1, count), int(count)


class StopVote:
    """Whether any rank was asked to stop, agreed by all: begun before a step, read after it."""

    def __init__(self, ctx: ParallelContext, requested: bool) -> None:
        self.flag = torch.tensor([int(requested)])
        self.work = None
        if ctx.host_group is not None:  # the answer travels while the device computes
            self.work = dist.all_reduce(self.flag, op=dist.ReduceOp.MAX, group=ctx.host_group, async_op=True)

    def result(self) -> bool:
        """True on every rank if it was asked of one."""
        if self.work is not None:
            self.work.wait()
        return bool(self.flag.item())
