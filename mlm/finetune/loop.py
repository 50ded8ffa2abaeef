"""The loop of finetuning: epochs of batches, validation by the task's metrics, the best checkpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlm.finetune.batches import Dealing, Order, TaskBatch
from mlm.finetune.best import STATE, Progress, Scores, keep_bests, save_best
from mlm.finetune.config import FinetuneConfig
from mlm.finetune.examples import Example
from mlm.finetune.material import Evaluation
from mlm.finetune.objective import Finetuning
from mlm.finetune.outputs import evaluate
from mlm.launch.stop import StopRequest
from mlm.report.metrics import Reporter
from mlm.report.throughput import Throughput
from mlm.train.diagnose import refuse_exhausted
from mlm.train.loop import is_due, step_metrics
from mlm.train.memory import give_back
from mlm.train.saver import Saver
from mlm.train.trainer import StepOutcome, StopVote, Trainer

GIVE_BACK_EVERY = 20
"""Steps between times that freed memory goes back to the system: texts of other lengths need other blocks."""
WARMUP = "schedule.warmup"
"""Its key here."""
STEP_BITS = 32
"""A micro-batch's number in the run is that of its step and its place in it, so that no two have one."""


@dataclass
class Loop:
    """What one run of the loop works with."""

    config: FinetuneConfig
    trainer: Trainer
    objective: Finetuning
    examples: Sequence[Example]
    """All that is trained on."""
    order: Order
    dealing: Dealing
    validations: Sequence[Evaluation]
    """One per split of task.validations."""
    progress: Progress
    reporter: Reporter
    throughput: Throughput
    stop: StopRequest
    saver: Saver
    out: Path
    rows: int = 0
    """Examples trained on since the last logged step."""
    is_stopping: bool = False
    """Whether a stop was asked for, as all ranks agree."""
    saved_best: int | None = None
    """The best step that the last checkpoint to resume from names; it may still be on its way to the disk."""

    def run(self) -> bool:
        """Train to the last step, or until patience is at its end; False where a stop came before."""
        trainer, train = self.trainer, self.config.train
        every = train.validate_every or self.order.steps_per_epoch
        self.saved_best = self.progress.best_step
        self.throughput.start()
        while trainer.step < trainer.config.train.steps and not self.is_out_of_patience:
            vote = StopVote(trainer.ctx, self.stop.requested)
            batches = self.batches()
            outcome = trainer.train_step(batches)
            self.count()
            self.saver.poll()
            last = trainer.step == trainer.config.train.steps
            self.is_stopping = vote.result()
            if last or self.is_stopping or trainer.step == 1 or is_due(trainer.step, self.config.log.every):
                self.log(outcome, batches)
            validated = last or is_due(trainer.step, every)
            if validated:
                self.validate(batches)
            last = last or self.is_out_of_patience
            if last or self.is_stopping or self.is_save_due(validated):
                self.save(batches, awaited=last or self.is_stopping)
            if self.is_stopping and not last:
                return False
        return True

    @property
    def is_out_of_patience(self) -> bool:
        """Whether enough validations brought nothing."""
        return 0 < self.config.train.patience <= self.progress.without_gain

    def is_save_due(self, validated: bool) -> bool:
        """Whether a checkpoint to resume from is due."""
        every = self.config.checkpoint.save_every
        return is_due(self.trainer.step, every) if every else validated

    def batches(self) -> list[TaskBatch]:
        """This rank's micro-batches of the next step."""
        step = self.trainer.step
        first = step << STEP_BITS
        return self.dealing.micro_batches(self.examples, self.order.batch(step).tolist(), first)

    def count(self) -> None:
        """Count the step that was just taken."""
        numbers = self.order.batch(self.trainer.step - 1)
        tokens = sum(len(text) for n in numbers for text in self.examples[n].texts)
        self.rows += len(numbers)
        self.progress.tokens += tokens
        self.throughput.count(tokens)
        if self.trainer.ctx.device.type == "cpu" and is_due(self.trainer.step, GIVE_BACK_EVERY):
            give_back()
        self.reporter.advance(self.trainer.step)

    def log(self, outcome: StepOutcome, batches: list[TaskBatch]) -> None:
        """Read the step's numbers from the device and report them; abort if they are not finite."""
        trainer = self.trainer
        loss = trainer.mean_loss(outcome)  # waits for the device: the clock may be read now
        steps, rates = self.throughput.steps, self.throughput.lap()
        epoch = trainer.step / self.order.steps_per_epoch
        examples_per_s = self.rows / steps / rates.step_time_s
        self.rows = 0
        parts = {"epoch": epoch, "examples_per_s": examples_per_s}
        self.reporter.step(step_metrics(trainer, outcome, loss, rates, self.progress.tokens, parts))
        refuse_exhausted(trainer, batches, WARMUP)

    def validate(self, batches: list[TaskBatch]) -> None:
        """Score every split, on the clock of nobody, and keep the weights if they are the best."""
        refuse_exhausted(self.trainer, batches, WARMUP)
        self.throughput.pause()
        trainer, task = self.trainer, self.config.task
        shown = trainer.ctx.is_main and self.config.log.live == "off"  # a live panel has the terminal
        scores: Scores = {}
        for each in self.validations:
            metrics, _ = evaluate(trainer.model, self.objective, task, each, self.dealing, shown=shown)
            scores[each.split.name] = metrics
        is_best = self.progress.add(trainer.step, scores)
        if is_best:
            self.remember()
            save_best(trainer, self.out)
            self.tidy()
        for name, metrics in scores.items():
            self.reporter.scores(trainer.step, name, metrics, is_best=is_best)
        self.throughput.start()

    def tidy(self) -> None:
        """Delete the best checkpoints that nothing names any more."""
        if self.trainer.ctx.is_main:
            keep_bests(self.out, {self.progress.best_step, self.saved_best})

    def remember(self) -> None:
        """Let checkpoints say how far validation is."""
        state = self.trainer.extra_state
        # a new dictionary: a save under way may still be writing the one before
        state[STATE] = {**state[STATE], "progress": self.progress.saved()}

    def save(self, batches: list[TaskBatch], *, awaited: bool) -> None:
        """Begin a checkpoint to resume from; the last one is awaited."""
        refuse_exhausted(self.trainer, batches, WARMUP)
        self.throughput.pause()
        self.remember()
        self.saver.begin()
        self.saved_best = self.progress.best_step
        if awaited:
            self.saver.finish()
            self.tidy()
        self.throughput.start()
