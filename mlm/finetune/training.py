"""One finetuning run with one seed: its training loop, from its start or last checkpoint to its result."""

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch

import mlm
from mlm.checkpoint.native.run_state import TOKENIZER
from mlm.config.build import config_digest
from mlm.data.config import DataConfig
from mlm.data.files_present import hub_id
from mlm.finetune.batches import Batcher, Order, TaskBatch, batcher_of
from mlm.finetune.best import BASE, DATA_PATH, Progress, Scores, best_folder, read_best, save_best
from mlm.finetune.config import FinetuneConfig
from mlm.finetune.examples import Example
from mlm.finetune.inputs import Settings, Start, load_body
from mlm.finetune.results import RESULT, Result, header
from mlm.finetune.scoring import Objective, evaluate, objective_of, score_split
from mlm.finetune.splits import TokenizedSplit
from mlm.finetune.task_type import task_type
from mlm.launch.doctor.quick import check_start
from mlm.optim.config import ScheduleConfig
from mlm.optim.precision import DTYPES
from mlm.parallel.mesh import ParallelContext
from mlm.tracking.metrics import Parts, Rates
from mlm.tracking.peak import peak_flops
from mlm.training.config import CheckpointConfig, PretrainConfig, TrainConfig
from mlm.training.kernels import missing_kernel_as_user_error
from mlm.training.loop import CONFIG, Loop, composed_yaml, is_step_due, training_session
from mlm.training.memory import out_of_memory_as_user_error, trim_memory
from mlm.training.resume import claim, resume
from mlm.training.run_tokenizer import digests_of_tokenizer
from mlm.training.state import FINETUNING, load_weights
from mlm.training.trainer import Trainer
from mlm.util.errors import writing_to
from mlm.util.files import dump_json, write_atomic

TRIM_EVERY = 20
"""Steps between returns of freed memory to the system: sequences of other lengths need other blocks."""
STEP_BITS = 32
"""Bits below the step in a micro-batch's number, which hold its position in the step: all numbers differ."""


@dataclass
class FinetuneLoop(Loop):
    """Train on epochs of batches, validate by the task's metrics, and keep the best checkpoint."""

    warmup_key = "schedule.warmup"

    config: FinetuneConfig
    examples: Sequence[Example]
    """All training examples."""
    order: Order
    batcher: Batcher
    validations: Sequence[TokenizedSplit]
    """One per split of task.validations."""
    progress: Progress
    rows: int = field(default=0, init=False)
    """Examples trained on since the last logged step."""

    @property
    def out(self) -> Path:
        """The run directory."""
        return Path(self.config.out)

    @property
    def validate_every(self) -> int:
        """Steps between validations."""
        return self.config.train.validate_every or self.order.steps_per_epoch

    def is_done(self) -> bool:
        """True after the last step, or if patience is exhausted."""
        return super().is_done() or 0 < self.config.train.patience <= self.progress.without_gain

    def is_save_due(self, validated: bool) -> bool:
        """True if a checkpoint to resume from is due."""
        every = self.config.checkpoint.save_every
        return is_step_due(self.trainer.step, every) if every else validated

    @contextmanager
    def batches(self) -> Iterator[Iterator[list[TaskBatch]]]:
        """Batches of each step, from the next step on."""
        yield map(self.micro_batches, count(self.trainer.step))

    def micro_batches(self, step: int) -> list[TaskBatch]:
        """This rank's micro-batches of a step."""
        return self.batcher.micro_batches(self.examples, self.order.batch(step).tolist(), step << STEP_BITS)

    def count(self) -> None:
        """Count the step that was just taken."""
        numbers = self.order.batch(self.trainer.step - 1)
        tokens = sum(len(text) for n in numbers for text in self.examples[n].texts)
        self.rows += len(numbers)
        self.progress.tokens += tokens
        self.throughput.count(tokens)
        if self.trainer.ctx.device.type == "cpu" and is_step_due(self.trainer.step, TRIM_EVERY):
            trim_memory()

    def tokens(self) -> int:
        """Tokens trained on so far."""
        return self.progress.tokens

    def parts(self, means: Sequence[float], rates: Rates) -> Parts:
        """Epochs, and examples per second since the last logged step."""
        rows, self.rows = self.rows, 0
        return {
            "epoch": self.trainer.step / self.order.steps_per_epoch,
            "examples_per_s": rows / rates.steps / rates.step_time_s,
        }

    def score(self) -> None:
        """Score every validation split, and keep the weights if they are the best."""
        trainer, task, kind = self.trainer, self.config.task, task_type(self.config.task.kind)
        objective = cast(Objective, trainer.objective)
        shown = trainer.ctx.is_main and self.config.log.live == "off"  # a live panel has the terminal
        scores, warnings = Scores(), list[str]()
        for each in self.validations:
            metrics, predictions = evaluate(trainer.model, objective, task, each, self.batcher, shown=shown)
            scores[each.split.name] = metrics
            warnings += kind.warnings(task, each.split.name, each.split.rows, predictions)
        is_best = self.progress.add(trainer.step, scores, kind.errors)
        if is_best:
            self.progress.warnings = warnings
            self.record_progress()
            save_best(trainer, self.out)
        for name, metrics in scores.items():
            self.reporter.scores(trainer.step, name, metrics, is_best=is_best)

    def save(self, *, awaited: bool) -> None:
        """Save, with the validations so far."""
        self.record_progress()
        super().save(awaited=awaited)

    def record_progress(self) -> None:
        """Record the progress of validation in checkpoints."""
        state = self.trainer.extra_state
        # a new dictionary: a save under way may still be writing the one before
        state[FINETUNING] = {**state[FINETUNING], "progress": asdict(self.progress)}


@dataclass(frozen=True, kw_only=True)
class Material:
    """Model and examples, shared by the runs of all seeds."""

    start: Start
    train: TokenizedSplit
    validations: Sequence[TokenizedSplit]
    """One per split of task.validations."""
    tests: Sequence[TokenizedSplit]
    """Predicted at the end."""

    def notes(self) -> list[str]:
        """Return lines on the template and the choice of rows, and for each split with truncated rows."""
        template, splits = self.start.tokenizer.chat_template, (self.train, *self.validations, *self.tests)
        notes = [template.note] if template is not None and template.note else []
        return [*notes, *(note for each in splits for note in each.notes())]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run of one seed on this rank."""

    config: FinetuneConfig
    settings: Settings
    material: Material
    order: Order
    trainer: Trainer
    objective: Objective
    begun: float
    """Monotonic clock at the start of this run in this command."""

    @property
    def out(self) -> Path:
        """The run directory."""
        return Path(self.config.out)


def spec_of(config: FinetuneConfig, start: Start, steps: int) -> PretrainConfig:
    """Return the run as the trainer takes it, and as checkpoints save it."""
    warmup = min(math.ceil(config.schedule.warmup * steps), steps - 1)
    return PretrainConfig(
        name=config.name,
        out=config.out,
        seed=config.seed,
        compile=config.compile,
        model=start.model,
        parallel=config.parallel,
        optimizer=config.optimizer,
        schedule=ScheduleConfig(
            decay=config.schedule.decay, warmup_steps=warmup, min_lr=config.schedule.min_lr
        ),
        precision=config.precision,
        data=DataConfig(seq_length=start.max_length),
        train=TrainConfig(
            steps=steps,
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=config.train.micro_batch_size,
        ),
        checkpoint=CheckpointConfig(keep_last=config.checkpoint.keep_last, resume=config.checkpoint.resume),
        log=config.log,
        incident=config.incident,
        check=config.check,
        profile=config.profile,
        dist=config.dist,
    )


def finetune(
    config: FinetuneConfig, settings: Settings, material: Material, ctx: ParallelContext
) -> tuple[Result | None, int | None]:
    """Train; return (result, or None if stopped before the end; exit code if a stop was requested).

    Collective over all ranks.
    """
    begun, kind = time.monotonic(), task_type(config.task.kind)
    order = Order(
        material.train.examples,
        batch_size=config.train.global_batch_size,
        sort_batches=1 if kind.is_chat else config.train.sort_batches,  # packed, not sorted
        seed=config.seed,
    )
    spec = spec_of(config, material.start, config.train.epochs * order.steps_per_epoch)
    objective = objective_of(kind, ctx, DTYPES[config.precision.dtype])
    size, length = config.train.micro_batch_size, "task.max_length"
    with out_of_memory_as_user_error(size, config.parallel, length), ExitStack() as stack:
        stack.enter_context(missing_kernel_as_user_error(spec))
        claim(spec, ctx, stack)
        check_start(config.out, ctx)
        run = Run(
            config=config,
            settings=settings,
            material=material,
            order=order,
            trainer=Trainer(spec, ctx, cast(Any, objective)),
            objective=objective,
            begun=begun,
        )
        return train(run)


def prepare_directory(config: FinetuneConfig, start: Start) -> None:
    """Write the composed configuration, and the tokenizer where commands look for it. Raises UserError."""
    out = Path(config.out)
    with writing_to(config.out):
        for folder in (out, best_folder(out)):
            folder.mkdir(parents=True, exist_ok=True)
            start.tokenizer.save(folder / "tokenizer.json")
            if start.tokenizer.chat_template is not None:
                start.tokenizer.chat_template.save(folder)
        write_atomic(out / CONFIG, composed_yaml(config, "finetune").encode())


def train(run: Run) -> tuple[Result | None, int | None]:
    """Train from the beginning or from the newest checkpoint. Returns what `finetune` does."""
    config, trainer, material, ctx = run.config, run.trainer, run.material, run.trainer.ctx
    resumed_from, progress = begin(run)
    if ctx.is_main:  # last, when all is checked and loaded: what is rejected stays as it was
        prepare_directory(config, material.start)
    notes = [f"resuming from {resumed_from} (step {trainer.step})"] if resumed_from else material.start.notes
    lengths = [len(text) for example in material.train.examples for text in example.texts]
    with training_session(
        trainer,
        run.out,
        header=header(config, trainer, material.start, len(material.train.examples)),
        record={"config_digest": config_digest(config), "resumed_from": resumed_from and str(resumed_from)},
        notes=[*notes, *material.notes()],
        peak=peak_flops(ctx.device, config.precision.dtype, config.dist.peak_tflops),
        tokens_per_step=0,  # differs from step to step: the loop counts
        seq_length=sum(lengths) // len(lengths),
        loss_unit=task_type(config.task.kind).loss_unit,
    ) as session:
        loop = FinetuneLoop(
            *session,
            config=config,
            examples=material.train.examples,
            order=run.order,
            batcher=run_batcher(run),
            validations=material.validations,
            progress=progress,
        )
        if not loop.run():
            return None, session.note_stopped("\nRun the same command again to continue.")
    return finish(run), session.stop.exit_code if loop.is_stopping else None


def run_batcher(run: Run) -> Batcher:
    """Return the batcher of this rank."""
    kind, length = task_type(run.config.task.kind), run.material.start.max_length
    return batcher_of(run.trainer.model, run.config.train.micro_batch_size, length, kind.batcher)


def begin(run: Run) -> tuple[Path | None, Progress]:
    """Load the run's newest checkpoint, if any, else `ckpt`; return its path and the validations so far.

    Collective over all ranks. Raises UserError, CorruptFileError.
    """
    trainer, start, ctx = run.trainer, run.material.start, run.trainer.ctx
    trainer.extra_state[FINETUNING] = {
        "depends_on": run.settings,
        "progress": asdict(Progress()),
        BASE: hub_id(run.config.ckpt) or start.named.config.name,
        DATA_PATH: None if run.config.data.path is None else os.path.abspath(run.config.data.path),
    }
    trainer.extra_state[TOKENIZER] = digests_of_tokenizer(start.tokenizer).encode()
    checkpoint = resume(trainer)
    if checkpoint is None:
        load_body(trainer.shards, start.named, ctx)
    return checkpoint, Progress() if checkpoint is None else Progress.read(checkpoint)


def finish(run: Run) -> Result:
    """Predict the tests with the best weights, and write the result. Collective; raises UserError."""
    config, trainer, material, out = run.config, run.trainer, run.material, run.out
    best, progress = read_best(out)
    scores = progress.scores
    for split, values in scores.items():  # in the order of the task, which a manifest does not keep
        scores[split] = {name: values[name] for name in config.task.metrics if name in values} | values
    scores = {split: scores[split] for split in config.task.validations}
    if material.tests:
        load_weights(trainer.shards, best, trainer.ctx)
    batcher = run_batcher(run)
    tests = [
        score_split(config.task, test, trainer.model, run.objective, batcher, out / "predictions")
        for test in material.tests
    ]
    assert progress.best_step is not None
    result = Result(
        task=config.task.name,
        seed=config.seed,
        scores=scores,
        tests={test.tokenized.split.name: test.metrics for test in tests if test.metrics},
        predictions=tuple(file for test in tests for file in test.files),
        best_step=progress.best_step,
        steps=trainer.step,
        steps_per_epoch=run.order.steps_per_epoch,
        checkpoint=str(best_folder(out)),
        seconds=round(time.monotonic() - run.begun, 1),
        precision=config.precision.dtype,
        layout={**asdict(config.parallel), "dp": trainer.ctx.dp.size},
        depends_on=run.settings,
        config_digest=config_digest(config),
        versions={"mlm": mlm.__version__, "torch": torch.__version__},
        warnings=tuple(progress.warnings),
    )
    if trainer.ctx.is_main:
        with writing_to(config.out):
            write_atomic(out / RESULT, dump_json(asdict(result)))
            from mlm.tracking.curves import plot_losses  # loads matplotlib: 0.4 s in each rank's start

            plot_losses(out / "metrics.jsonl", out / "loss.png", task_type(config.task.kind).loss_unit)
    return result
