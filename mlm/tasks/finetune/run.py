"""`mlm finetune TASK`: train a head, and the model below it, on a task; keep what scores best.

See README.md beside the package `mlm.tasks`.
"""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mlm.checkpoint.save_load import read_manifest, resolve
from mlm.config.build import config_digest, to_dict
from mlm.config.errors import ConfigError, UserError, writing_to
from mlm.config.finetune_schema import FinetuneConfig
from mlm.config.schema import CheckpointConfig, DataConfig, PretrainConfig, ScheduleConfig, TrainConfig
from mlm.files import write_atomic
from mlm.parallel.mesh import ParallelContext
from mlm.tasks.finetune.batches import Dealing, Order
from mlm.tasks.finetune.best import STATE, Progress, best_folder, saved_progress
from mlm.tasks.finetune.evaluate import write_split
from mlm.tasks.finetune.examples import Example
from mlm.tasks.finetune.loop import Loop
from mlm.tasks.finetune.material import (
    Start,
    dealing_of,
    evaluation_of,
    load_body,
    splits_of,
    start_of,
    tokenizer_beside,
    training_examples,
)
from mlm.tasks.finetune.metrics import check_installed
from mlm.tasks.finetune.objective import Finetuning
from mlm.tasks.finetune.outputs import Evaluation
from mlm.tasks.finetune.results import Result, composed_yaml, header, is_done, report, write_result
from mlm.tasks.trained import checkpoint_faults, named_checkpoint
from mlm.train.curves import plot_losses
from mlm.train.memory import reuse_large_blocks
from mlm.train.metrics import Reporter
from mlm.train.peak import peak_flops
from mlm.train.resume import claim, resume, start_faults
from mlm.train.saver import Saver
from mlm.train.state import load_weights
from mlm.train.stop import StopRequest
from mlm.train.throughput import Throughput
from mlm.train.trackers import missing_extras
from mlm.train.trainer import Trainer

CONFIG = "config.yaml"


@dataclass(frozen=True, kw_only=True)
class Material:
    """What all seeds of a run share."""

    start: Start
    examples: Sequence[Example]
    evaluations: Sequence[Evaluation]
    digests: dict[str, str]
    """Of the rows of each split."""
    notes: tuple[str, ...]


def preflight(config: FinetuneConfig) -> list[str]:
    """Faults that reading the named files shows, a line each; called before any rank starts."""
    faults = [*missing_extras(config.log), *checkpoint_faults(config.ckpt, config.parallel)]
    if faults:
        return faults
    try:
        check_installed(config.task)
        start = start_of(config, named_checkpoint(config.ckpt))
        splits_of(config)
    except ConfigError as error:
        return list(error.faults)
    except UserError as error:
        return str(error).splitlines()
    return [fault for one in by_seed(config) for fault in start_faults(spec_of(one, start, 1))]


def run(config: FinetuneConfig, ctx: ParallelContext) -> None:
    """Finetune, with each seed; every rank calls this. Raises UserError for what the user can mend."""
    if ctx.device.type == "cpu":
        reuse_large_blocks()
    material = prepare(config, ctx)
    results: list[Result] = []
    for one in by_seed(config):
        result = is_done(one) if len(by_seed(config)) > 1 else None
        result = result or finetune(one, material, ctx)
        if result is None:
            return  # stopped
        results.append(result)
    if ctx.is_main:
        report(config, results)


def by_seed(config: FinetuneConfig) -> list[FinetuneConfig]:
    """The runs of a command: one, or one per seed in a folder of its own."""
    if config.seeds == 1:
        return [config]
    seeds = range(config.seed, config.seed + config.seeds)
    return [replace(config, seed=s, seeds=1, out=str(Path(config.out, f"seed-{s}"))) for s in seeds]


def prepare(config: FinetuneConfig, ctx: ParallelContext) -> Material:
    """Read and tokenise the rows. Raises UserError."""
    start = start_of(config, named_checkpoint(config.ckpt))
    train, validations = splits_of(config)
    made, examples = training_examples(config, train, start)
    dealing = dealing_for(config, start, ctx)
    evaluations = [evaluation_of(config.task, split, start, dealing) for split in validations]
    notes = [made.note(train), *(e.examples.note(e.split) for e in evaluations)]
    return Material(
        start=start,
        examples=examples,
        evaluations=evaluations,
        digests={split.name: split.digest for split in (train, *validations)},
        notes=tuple(filter(None, notes)),
    )


def dealing_for(config: FinetuneConfig, start: Start, ctx: ParallelContext) -> Dealing:
    """How batches are cut for this rank."""
    cut = config.parallel.sequence_parallel and ctx.tp.size > 1
    return dealing_of(config.train.micro_batch_size, start, ctx, sequence_parallel=cut)


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


def finetune(config: FinetuneConfig, material: Material, ctx: ParallelContext) -> Result | None:
    """One run of one seed; None when it was stopped. Collective over all ranks."""
    out, task, start = Path(config.out), config.task, material.start
    order = Order(
        material.examples,
        batch_size=config.train.global_batch_size,
        sort_batches=config.train.sort_batches,
        seed=config.seed,
    )
    spec = spec_of(config, start, config.train.epochs * order.steps_per_epoch)
    begun = time.monotonic()
    try:
        with ExitStack() as stack:
            claim(spec, ctx, stack)
            if ctx.is_main:
                with writing_to(config.out):
                    for folder in (out, best_folder(out)):
                        tokenizer_beside(start.tokenizer, folder)
                    write_atomic(out / CONFIG, composed_yaml(config).encode())
            objective = Finetuning(task.kind, ctx, torch.float32)
            trainer = Trainer(spec, ctx, objective)
            objective.dtype = trainer.model.dtype
            source = load_body(trainer.shards, start.named, ctx)
            trainer.extra_state[STATE] = {
                "task": to_dict(task),
                "max_length": start.max_length,
                "started_from": {"checkpoint": str(start.named.path.name), "digest": source.digest},
                "rows": material.digests,
                "progress": saved_progress(Progress()),
            }
            found = resume(trainer)
            return train(config, trainer, objective, order, material, found, begun)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"train.micro_batch_size={config.train.micro_batch_size} is too much for the GPU's memory: lower "
            f"it, set recompute=selective or full, or raise tp or pp ({str(error).splitlines()[0]})"
        ) from error


def train(
    config: FinetuneConfig,
    trainer: Trainer,
    objective: Finetuning,
    order: Order,
    material: Material,
    found: Path | None,
    begun: float,
) -> Result | None:
    """Run the loop from the trainer's state and finish the run directory; None when it was stopped."""
    ctx, out, spec = trainer.ctx, Path(config.out), trainer.config
    progress = resumed_progress(found, material.digests)
    texts = [len(text) for example in material.examples for text in example.texts]
    peak = peak_flops(ctx.device, config.precision.dtype, config.dist.peak_tflops)
    throughput = Throughput(
        tokens_per_step=0,
        flops_per_token=spec.model.flops_per_token(sum(texts) // len(texts), ctx.tp.size),
        devices=ctx.world_size,
        peak=peak.flops if peak else None,
    )
    rows = header(config, trainer, order, material.start, len(material.examples))
    about = {"config_digest": config_digest(config), "resumed_from": found and str(found)}
    reporter = Reporter(
        out,
        total_steps=spec.train.steps,
        start_step=trainer.step,
        config=config.log,
        is_main=ctx.is_main,
        header=rows,
        run=about,
    )
    with StopRequest(announce=ctx.is_main) as stop, reporter, Saver(trainer, out, reporter) as saver:
        for note in [*([f"resuming from {found} (step {trainer.step})"] if found else []), *material.notes]:
            reporter.note(note)
        loop = Loop(
            config=config,
            trainer=trainer,
            objective=objective,
            examples=material.examples,
            order=order,
            dealing=dealing_for(config, material.start, ctx),
            evaluations=material.evaluations,
            progress=progress,
            reporter=reporter,
            throughput=throughput,
            stop=stop,
            saver=saver,
            out=out,
        )
        if not loop.run():
            reporter.note(f"stopped by {stop.reason or 'another rank'} after step {trainer.step}, saved.")
            reporter.note("Type the same command again to go on.")
            return None
    result = Result.of(config, trainer, order, progress, material.digests, time.monotonic() - begun)
    if ctx.is_main:
        with writing_to(config.out):
            write_result(out, result)
            plot_losses(out / "metrics.jsonl", out / "loss.png")
    if config.data.predict_tests:
        write_tests(config, trainer, objective, material.start)
    return result


def resumed_progress(found: Path | None, digests: dict[str, str]) -> Progress:
    """The validations of the run before it stopped. Raises UserError when its rows were others."""
    if found is None:
        return Progress()
    state = read_manifest(found).state
    progress = Progress.read(state, found)
    for name, digest in digests.items():
        if state[STATE].get("rows", {}).get(name) != digest:
            raise UserError(
                f"{found}: was trained with other rows of split {name} than there are now; bring them back, "
                "or set another out=…"
            )
    return progress


def write_tests(config: FinetuneConfig, trainer: Trainer, objective: Finetuning, start: Start) -> None:
    """Predictions of the test splits with the best weights. Collective; raises UserError."""
    ctx, out = trainer.ctx, Path(config.out)
    load_weights(trainer.shards, resolve(best_folder(out)), ctx)
    for name in config.task.tests:
        write_split(config, name, trainer.model, objective, start, ctx, out / "predictions")
