"""The training loop."""

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlm.data.blend_checks import shares
from mlm.data.sampler import Dataset, Loader, MicroBatch, eval_batches
from mlm.launch.stop import StopRequest
from mlm.report.metrics import Rates, Reporter, StepMetrics, Throughput
from mlm.report.peak import memory_bytes
from mlm.report.records import Parts
from mlm.train.corpora import ValidationSet
from mlm.train.diagnose import refuse_exhausted
from mlm.train.saver import Saver
from mlm.train.trainer import StepOutcome, StopVote, Trainer

WARMUP = "schedule.warmup_steps"
"""The key that a run beyond help is told to raise."""


@dataclass
class Loop:
    """What one run of the loop works with."""

    trainer: Trainer
    samples: Dataset
    validation: Sequence[ValidationSet]
    reporter: Reporter
    throughput: Throughput
    stop: StopRequest
    saver: Saver
    last_validation: float | None = None
    """Mean validation loss of the last validation, nats per token."""
    last_loss: float | None = None
    """Training loss of the last logged step, nats per token."""

    def run(self) -> bool:
        """Train to train.steps, or to the step at which a stop was asked for: then False."""
        trainer, config = self.trainer, self.trainer.config
        with self.loader() as batches_of_steps:
            self.throughput.start()
            while trainer.step < config.train.steps:
                vote = StopVote(trainer.ctx, self.stop.requested)
                batches = next(batches_of_steps)
                outcome = trainer.train_step(batches)
                self.throughput.count()
                self.reporter.advance(trainer.step)
                self.saver.poll()
                last = trainer.step == config.train.steps
                stopping = vote.result()
                if last or stopping or trainer.step == 1 or is_due(trainer.step, config.log.every):
                    self.log(outcome, batches)
                if last or is_due(trainer.step, config.train.validate_every):
                    self.validate()
                if last or stopping or is_due(trainer.step, config.checkpoint.save_every):
                    self.save(batches, awaited=last or stopping)
                if stopping and not last:
                    return False
        return True

    def loader(self) -> Loader:
        """This rank's micro-batches, from the first sample not consumed yet."""
        config, ctx = self.trainer.config, self.trainer.ctx
        return Loader(
            self.samples,
            consumed_samples=self.trainer.consumed_samples,
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=config.train.micro_batch_size,
            rank=ctx.dp.rank,
            size=ctx.dp.size,
            pin_memory=ctx.device.type == "cuda",
        )

    def log(self, outcome: StepOutcome, batches: list[MicroBatch]) -> None:
        """Read the step's numbers from the device and report them; abort if they are not finite."""
        trainer = self.trainer
        means = trainer.mean_parts(outcome)  # waits for the device: the clock may be read now
        self.last_loss = math.fsum(means[: trainer.objective.losses])
        rates = self.throughput.lap()
        tokens = trainer.consumed_samples * trainer.config.data.seq_length
        parts = self.named(means)
        self.reporter.step(step_metrics(trainer, outcome, self.last_loss, rates, tokens, parts))
        refuse_exhausted(trainer, batches, WARMUP)

    def validate(self) -> None:
        """Mean loss over the validation windows, on the clock of nobody.

        That of a blend is the mean over its corpora by their weights.
        """
        if not self.validation or not self.trainer.config.train.validate_every:
            return
        self.throughput.pause()
        found = [self.trainer.validate(self.validation_batches(part)) for part in self.validation]
        losses = [math.fsum(means[: self.trainer.objective.losses]) for means in found]
        weights = shares([part.weight for part in self.validation])
        whole = [math.fsum(map(operator.mul, weights, part)) for part in zip(*found, strict=True)]
        self.last_validation = math.fsum(map(operator.mul, weights, losses))
        self.reporter.validation(
            self.trainer.step,
            self.last_validation,
            math.exp(min(whole[0], 700.0)),  # per token: of a BERT that of masked tokens
            {part.name: loss for part, loss in zip(self.validation, losses, strict=True) if part.name}
            | self.named(whole),
        )
        self.throughput.start()

    def named(self, means: Sequence[float]) -> dict[str, float]:
        """The parts of the objective by name; nothing where the loss is all there is."""
        parts = self.trainer.objective.parts
        return dict(zip(parts, means, strict=True)) if len(parts) > 1 else {}

    def validation_batches(self, part: ValidationSet) -> Iterator[MicroBatch]:
        """This rank's micro-batches of what a validation scores of one corpus."""
        train, ctx = self.trainer.config.train, self.trainer.ctx
        return eval_batches(
            part.windows,
            micro_batch_size=train.micro_batch_size,
            rank=ctx.dp.rank,
            size=ctx.dp.size,
            limit=train.validate_batches * train.global_batch_size,
        )

    def save(self, batches: list[MicroBatch], *, awaited: bool) -> None:
        """Begin a checkpoint, unless the numbers of this run are beyond help; the last one is awaited."""
        refuse_exhausted(self.trainer, batches, WARMUP)
        self.throughput.pause()
        self.saver.begin()
        if awaited:
            self.saver.finish()
        self.throughput.start()


def step_metrics(
    trainer: Trainer, outcome: StepOutcome, loss: float, rates: Rates, tokens: int, parts: Parts
) -> StepMetrics:
    """What is reported of a step whose loss was read from the device."""
    scaler = trainer.scaler
    return StepMetrics(
        step=trainer.step,
        loss=loss,
        lr=outcome.lr,
        grad_norm=float(outcome.grad_norm.item()),
        loss_scale=float(scaler.scale.item()) if scaler.dynamic else None,
        skipped_steps=int(scaler.skipped.item()),
        tokens=tokens,
        tokens_per_s=rates.tokens_per_s,
        step_time_s=rates.step_time_s,
        tflops=rates.tflops,
        mfu=rates.mfu,
        memory_bytes=memory_bytes(trainer.ctx.device),
        parts=parts,
    )


def is_due(step: int, every: int) -> bool:
    """Whether something done every so many steps (0: never) is due after `step`."""
    return every > 0 and step % every == 0
