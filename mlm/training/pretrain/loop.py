"""The training loop of pretraining: samples by number, validation by loss."""

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mlm.data.blend_checks import shares
from mlm.data.sampler import Dataset, Loader, MicroBatch, eval_batches
from mlm.tracking.metrics import Parts, Rates
from mlm.training.corpora import ValidationSet
from mlm.training.loop import Loop
from mlm.training.pretrain.samples import PromptSampler


@dataclass
class PretrainLoop(Loop):
    """Train on the samples of a dataset in order, from the first one not consumed yet."""

    warmup_key = "schedule.warmup_steps"

    samples: Dataset
    validation: Sequence[ValidationSet]
    sampler: PromptSampler | None = None
    """Continues `train.sample_prompts` at each validation."""
    last_validation: float | None = field(default=None, init=False)
    """Mean validation loss of the last validation, nats per token."""

    @property
    def validate_every(self) -> int:
        """Steps between validations."""
        return self.trainer.config.train.validate_every if self.validation else 0

    def batches(self) -> Loader:
        """Batches of each step, from the next step on."""
        config, ctx = self.trainer.config, self.trainer.ctx
        return Loader(
            self.samples,
            consumed_samples=self.trainer.consumed_samples,
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=config.train.micro_batch_size,
            rank=ctx.dp.rank,
            size=ctx.dp.size,
            pin_memory=ctx.device.type == "cuda",
            left_out=self.trainer.left_out,
        )

    def tokens(self) -> int:
        """Tokens trained on so far."""
        consumed = self.trainer.consumed_samples
        unread = sum(count for first, count in self.trainer.left_out if first < consumed)
        return (consumed - unread) * self.trainer.config.data.seq_length

    def parts(self, means: Sequence[float], rates: Rates | None = None) -> Parts:
        """The parts of the objective by name; nothing where the loss is all there is."""
        names = self.trainer.objective.parts
        return dict(zip(names, means, strict=True)) if len(names) > 1 else {}

    def score(self) -> None:
        """Mean loss over the validation windows; of a blend, the mean over its corpora by weight."""
        found = [self.trainer.validate(self.validation_batches(part)) for part in self.validation]
        losses = [math.fsum(means[: self.trainer.objective.losses]) for means in found]
        weights = shares([part.weight for part in self.validation])
        whole = [math.fsum(map(operator.mul, weights, part)) for part in zip(*found, strict=True)]
        self.last_validation = math.fsum(map(operator.mul, weights, losses))
        by_corpus = {part.name: loss for part, loss in zip(self.validation, losses, strict=True) if part.name}
        perplexity = math.exp(min(whole[0], 700.0))  # per token; of a BERT per masked token
        self.reporter.validation(
            self.trainer.step, self.last_validation, perplexity, {**by_corpus, **self.parts(whole)}
        )
        if self.sampler is not None:
            self.sampler.report()

    def validation_batches(self, part: ValidationSet) -> Iterator[MicroBatch]:
        """This rank's micro-batches of one corpus in a validation."""
        train, ctx = self.trainer.config.train, self.trainer.ctx
        return eval_batches(
            part.windows,
            micro_batch_size=train.micro_batch_size,
            rank=ctx.dp.rank,
            size=ctx.dp.size,
            limit=train.validate_batches * train.global_batch_size,
        )
