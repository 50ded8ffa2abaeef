"""One finetuning run with one seed, from what its directory holds to its result."""

import math
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.save_load import CheckpointError, read_manifest, resolve
from mlm.checkpoint.native.tokenizer_digest import KEY as TOKENIZER
from mlm.config.build import config_digest
from mlm.data.config import DataConfig
from mlm.errors import writing_to
from mlm.files.atomic import write_atomic
from mlm.finetune.batches import Order
from mlm.finetune.best import DATA_PATH, STATE, Progress, best_folder, go_back_to
from mlm.finetune.config import FinetuneConfig
from mlm.finetune.loop import Loop
from mlm.finetune.material import Evaluation, Start, load_body
from mlm.finetune.objective import Finetuning
from mlm.finetune.outputs import dealing_of
from mlm.finetune.results import Result, composed_yaml, header, write_result
from mlm.finetune.scoring import score_split
from mlm.finetune.settings import Settings
from mlm.launch.stop import StopRequest
from mlm.optim.config import ScheduleConfig
from mlm.optim.precision import DTYPES
from mlm.parallel.mesh import ParallelContext
from mlm.report.curves import plot_losses
from mlm.report.metrics import Reporter
from mlm.report.peak import peak_flops
from mlm.report.throughput import Throughput
from mlm.train.config import CheckpointConfig, PretrainConfig, TrainConfig
from mlm.train.memory import out_of_memory_is_said
from mlm.train.resume import claim, resume
from mlm.train.run_tokenizer import digest_of
from mlm.train.saver import Saver
from mlm.train.state import load_weights
from mlm.train.trainer import Trainer

CONFIG = "config.yaml"


@dataclass(frozen=True, kw_only=True)
class Material:
    """What the runs of all seeds share."""

    start: Start
    train: Evaluation
    """What is trained on."""
    validations: Sequence[Evaluation]
    """One per split of task.validations."""
    tests: Sequence[Evaluation]
    """What is predicted at the end."""

    def notes(self) -> list[str]:
        """What to tell of the texts, a line each."""
        splits = (self.train, *self.validations, *self.tests)
        return list(filter(None, (each.examples.note(each.split) for each in splits)))


@dataclass(frozen=True, kw_only=True)
class Session:
    """A run under way on this rank."""

    config: FinetuneConfig
    settings: Settings
    material: Material
    order: Order
    trainer: Trainer
    objective: Finetuning
    begun: float
    """Seconds of a clock when this command began with the run."""

    @property
    def out(self) -> Path:
        """The run directory."""
        return Path(self.config.out)


def spec_of(config: FinetuneConfig, start: Start, steps: int) -> PretrainConfig:
    """The run as the trainer takes it, and as checkpoints save it."""
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
        dist=config.dist,
    )


def finetune(
    config: FinetuneConfig, settings: Settings, material: Material, ctx: ParallelContext
) -> tuple[Result | None, bool]:
    """(result, None before the end; whether a stop was asked for). Collective over all ranks."""
    begun = time.monotonic()
    order = Order(
        material.train.examples,
        batch_size=config.train.global_batch_size,
        sort_batches=config.train.sort_batches,
        seed=config.seed,
    )
    spec = spec_of(config, material.start, config.train.epochs * order.steps_per_epoch)
    objective = Finetuning(config.task.kind, ctx, DTYPES[config.precision.dtype])
    remedy = "set recompute=selective or full, or raise tp or pp"
    with out_of_memory_is_said(config.train.micro_batch_size, remedy), ExitStack() as stack:
        claim(spec, ctx, stack)
        session = Session(
            config=config,
            settings=settings,
            material=material,
            order=order,
            trainer=Trainer(spec, ctx, objective),
            objective=objective,
            begun=begun,
        )
        return train(session)


def prepare_directory(config: FinetuneConfig, start: Start) -> None:
    """Write the composed configuration, and the tokenizer where commands look for it. Raises UserError."""
    out = Path(config.out)
    with writing_to(config.out):
        for folder in (out, best_folder(out)):
            folder.mkdir(parents=True, exist_ok=True)
            start.tokenizer.save(folder / "tokenizer.json")
        write_atomic(out / CONFIG, composed_yaml(config).encode())


def train(session: Session) -> tuple[Result | None, bool]:
    """As `finetune`, from the beginning or from the newest checkpoint."""
    config, trainer, material, out = session.config, session.trainer, session.material, session.out
    found, progress = begin(session)
    if trainer.ctx.is_main:  # last, when all is checked and loaded: what is rejected stays as it was
        prepare_directory(config, material.start)
    notes = [f"resuming from {found} (step {trainer.step})"] if found else material.start.named.notes
    with StopRequest(announce=trainer.ctx.is_main) as stop:
        reporter = reporter_of(session, found)
        with reporter, Saver(trainer, out, reporter) as saver:
            stop.show = reporter.announce
            for note in (*notes, *material.notes()):
                reporter.note(note)
            loop = Loop(
                config=config,
                trainer=trainer,
                objective=session.objective,
                examples=material.train.examples,
                order=session.order,
                dealing=dealing_of(trainer.model, config.train.micro_batch_size, material.start.max_length),
                validations=material.validations,
                progress=progress,
                reporter=reporter,
                throughput=throughput_of(session),
                stop=stop,
                saver=saver,
                out=out,
            )
            if not loop.run():
                reporter.note(f"stopped by {stop.reason or 'another rank'} after step {trainer.step}, saved.")
                reporter.note("Type the same command again to go on.")
                return None, True
    return finish(session, progress), loop.is_stopping


def begin(session: Session) -> tuple[Path | None, Progress]:
    """Fill the model, from the run's newest checkpoint if there is one: its path, and the validations so far.

    Collective over all ranks. Raises UserError, CorruptFileError.
    """
    trainer, start, ctx = session.trainer, session.material.start, session.trainer.ctx
    trainer.extra_state[STATE] = {
        "depends_on": session.settings,
        "progress": Progress().saved(),
        DATA_PATH: None if session.config.data.path is None else os.path.abspath(session.config.data.path),
    }
    trainer.extra_state[TOKENIZER] = digest_of(start.tokenizer).encode()
    found = resume(trainer)
    if found is None:
        load_body(trainer.shards, start.named, ctx)
    progress = Progress() if found is None else Progress.read(read_manifest(found).state, found)
    ranks = Ranks(ctx.rank, ctx.world_size, ctx.host_group, ctx.watch)
    ranks.together(
        lambda: go_back_to(session.out, progress.best_step) if ctx.is_main else None,
        lambda error: CheckpointError(f"out={session.config.out}: {error}: mend it, or set another out=…"),
    )
    return found, progress


def throughput_of(session: Session) -> Throughput:
    """The stopwatch of a run."""
    config, ctx = session.config, session.trainer.ctx
    lengths = [len(text) for example in session.material.train.examples for text in example.texts]
    peak = peak_flops(ctx.device, config.precision.dtype, config.dist.peak_tflops)
    return Throughput(
        tokens_per_step=0,  # as many as the step's texts have: Loop.count says
        flops_per_token=session.trainer.config.model.flops_per_token(
            sum(lengths) // len(lengths), ctx.tp.size
        ),
        devices=ctx.world_size,
        peak=peak.flops if peak else None,
    )


def reporter_of(session: Session, found: Path | None) -> Reporter:
    """Where the run's numbers go."""
    config, trainer = session.config, session.trainer
    return Reporter(
        session.out,
        total_steps=trainer.config.train.steps,
        start_step=trainer.step,
        config=config.log,
        is_main=trainer.ctx.is_main,
        header=header(config, trainer, session.material.start, len(session.material.train.examples)),
        run={"config_digest": config_digest(config), "resumed_from": found and str(found)},
    )


def finish(session: Session, progress: Progress) -> Result:
    """Predict the tests with the best weights, and write the result. Collective; raises UserError."""
    config, trainer, material, out = session.config, session.trainer, session.material, session.out
    if material.tests:
        load_weights(trainer.shards, resolve(best_folder(out)), trainer.ctx)
    dealing = dealing_of(trainer.model, config.train.micro_batch_size, material.start.max_length)
    tests = [
        score_split(config.task, test, trainer.model, session.objective, dealing, out / "predictions")
        for test in material.tests
    ]
    result = Result.of(
        config,
        trainer,
        progress,
        settings=session.settings,
        steps_per_epoch=session.order.steps_per_epoch,
        tests=tests,
        seconds=time.monotonic() - session.begun,
    )
    if trainer.ctx.is_main:
        with writing_to(config.out):
            write_result(out, result)
            plot_losses(out / "metrics.jsonl", out / "loss.png", "per example")
    return result
