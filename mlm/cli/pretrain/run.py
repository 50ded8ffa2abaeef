"""`mlm pretrain`: train a model from its initial weights, or resume a run."""

import logging
import math
import operator
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.text import Text

from mlm.checkpoint.native.folders import BEST, CHECKPOINTS, latest_checkpoint, step_of
from mlm.checkpoint.native.run_state import BEST_VALIDATION, INCIDENTS, LORA, TOKENIZER, VALIDATION_DUE
from mlm.cli.pretrain.samples import PromptSampler
from mlm.config.build import config_digest
from mlm.config.fields import Role, expand_home, path_problem
from mlm.config.plain_yaml import parse, read_text
from mlm.convert.source import open_checkpoint, open_source
from mlm.convert.weights import fill_parameters
from mlm.data import files_present as present
from mlm.data.blend import BlendedDataset
from mlm.data.blend_checks import normalize_weights
from mlm.data.blend_history import trained_on
from mlm.data.sampler import Dataset, Loader, MicroBatch, eval_batches, first_of_step
from mlm.launch.doctor.folder import check_start
from mlm.models.family import family_of
from mlm.optim.config import STABLE_DECAYS
from mlm.optim.schedule import learning_rate, warmup_warning
from mlm.parallel.mesh import ParallelContext
from mlm.plan import forecast
from mlm.runs.checks import has_saved
from mlm.runs.config import PretrainConfig
from mlm.runs.corpora import (
    ValidationSet,
    train_dataset,
    validation_prefixes,
    validation_sets,
)
from mlm.runs.tokenizer import tokenizer_now, tokenizer_of
from mlm.tracking.history import FILE_NAME
from mlm.tracking.metrics import Parts, Rates
from mlm.tracking.peak import DevicePeak, peak_flops
from mlm.tracking.reporter import training_console
from mlm.training.identity import changes_line
from mlm.training.incidents.numbers import spare_samples
from mlm.training.kernels import fp8_line, kernels_line
from mlm.training.loop import (
    Loop,
    composed_yaml,
    layout_row,
    model_row,
    resume_command,
    run_row,
    training_session,
)
from mlm.training.memory import reuse_large_blocks, torch_errors_as_user_errors
from mlm.training.mirror import mirroring
from mlm.training.observer import Observer
from mlm.training.resume import claim, continue_data, continued_candidates, resume
from mlm.training.trainer import Trainer
from mlm.training.upcycle import dense_config, start_from_dense
from mlm.util.errors import UserError, writing_to
from mlm.util.files import write_atomic
from mlm.util.ownership import RUN_SETTINGS

MOST_EPOCHS, GOOD_EPOCHS = 20, 4  # above the first a run is warned, and the second is advised

log = logging.getLogger(__name__)


def run(config: PretrainConfig, ctx: ParallelContext) -> int:
    """Train; every rank calls this. Return the command's exit code. Raises UserError."""
    if ctx.device.type == "cpu":
        reuse_large_blocks()
    out = Path(config.out)
    with torch_errors_as_user_errors(config, "data.seq_length"), ExitStack() as stack:
        claim(config, ctx, stack)
        check_start(config.out, ctx)
        mirror = stack.enter_context(mirroring(config, ctx))
        if ctx.is_main:  # before memory is taken
            for line in forecast.forecast_lines(config, ctx.world_size):
                print(f"mlm pretrain: {line}", file=sys.stderr)
        trainer: Trainer[MicroBatch] = Trainer(config, ctx)
        if config.lora.rank:
            # The frozen weights that adapters are added to.
            assert trainer.config.ckpt is not None, "checked with the settings"
            source = open_source(trainer.config.ckpt)
            frozen = [shard for shard in trainer.shards if not shard.is_trained]
            manifest = fill_parameters(frozen, source, trainer.ctx, initialize=False)
            trainer.extra_state[LORA] = {"base": source.name, "digest": manifest.digest}
        start = resume(trainer)
        if start is None and config.ckpt is not None and not config.lora.rank:
            start = start_from_source(trainer, config.ckpt)
        return train(trainer, out, start, mirror)


def start_from_source(trainer: Trainer, ckpt: str) -> Path:
    """Fill a trainer's parameters from `ckpt`: a dense model's may become experts.

    Return the path of the model. Collective.
    """
    config, source = trainer.config, open_source(ckpt)
    fill = partial(fill_parameters, source=source, ctx=trainer.ctx, initialize=False)
    if dense_config(config, {"model": asdict(source.model)}) is None:
        fill(trainer.shards)
    else:
        start_from_dense(config.model, trainer.shards, fill)
    return source.path


def train(trainer: Trainer, out: Path, start: Path | None, mirror: Callable[[Path], None]) -> int:
    """Run the loop from the trainer's state. Return the exit code."""
    config, ctx = trainer.config, trainer.ctx
    if (changed := continue_data(trainer)) and (memory := trainer.extra_state.get(INCIDENTS)):
        memory["recent"] = []  # losses on the new data may differ
    steps_left = config.train.steps - trainer.step
    batch_size, ramp = config.train.global_batch_size, config.train.ramp_batch
    num_samples = first_of_step(trainer.consumed_samples, max(0, steps_left), batch_size, (), ramp)
    samples = train_dataset(config, num_samples + spare_samples(trainer), trainer.history)
    peak = peak_flops(ctx.device, config.precision.dtype, config.dist.peak_tflops)
    rows = header(trainer, out, peak, samples)
    warnings = [
        family_of(config.model.kind).warning(config.model),
        warmup_warning(config.optimizer, config.schedule, config.train.steps),
        epochs_warning(samples, config.train.steps) if steps_left > 0 else None,
    ]
    if ctx.is_main:
        if (tokenizer := tokenizer_now(config.data)) is not None:
            trainer.extra_state[TOKENIZER] = tokenizer.encode()
        # Last, after all checks and loads: a rejected run, or one without steps left, changes no file.
        if steps_left > 0:
            prepare_directory(config, out)
    record = {
        "config_digest": config_digest(config),
        "layout": {**asdict(config.parallel), "dp": ctx.dp.size},
        "resumed_from": start and str(start),
        "corpora": trained_on(trainer.history),
    }
    with training_session(
        trainer,
        out,
        header=rows,
        record=record,
        notes=notes(trainer, start, changed),
        warnings=[warning for warning in warnings if warning is not None],
        peak=peak,
        tokens_per_step=batch_size * config.data.seq_length,
        seq_length=config.data.seq_length,
        loss_unit=family_of(config.model.kind).loss_unit,
        mirror=mirror,
    ) as session:
        validation = validation_sets(config, trainer.history)
        if not PretrainLoop(*session, samples, validation).run():
            words = shlex.join(resume_command("pretrain", out, config))
            return session.note_stopped(f" Resume with:\n  {words}")
    if ctx.is_main:
        print_next_commands(trainer, out)
    return 0


def notes(trainer: Trainer, start: Path | None, changed: str | None) -> list[str]:
    config, lines = trainer.config, list[str]()
    steps_left = config.train.steps - trainer.step
    if start is not None:
        origin = "resuming from" if trainer.step else "weights from"
        lines.append(f"{origin} {start} (step {trainer.step})")
    changes = trainer.ancestry.changed_at(trainer.step)
    if changes and steps_left > 0:
        lines.append(f"{changes_line(changes)}; for a new run instead, set ckpt=… and another out=…")
        if line := lifted_rate(trainer, {c["key"]: c["from"] for c in changes}):
            lines.append(line)
    if changed is not None:
        lines.append(changed)
    best, patience = trainer.extra_state.get(BEST_VALIDATION, {}), config.train.patience
    if steps_left > 0 and 0 < patience <= best.get("without_gain", 0):
        reason = f"train.patience={patience} ended this run at step {trainer.step}"
        lines.append(f"{reason}: its best validation is of step {best['step']}; raise it to continue")
    if steps_left <= 0 and VALIDATION_DUE not in trainer.extra_state:
        done = f"step {trainer.step} of train.steps={config.train.steps} is done"
        lines.append(f"{done}: raise train.steps to continue, or set another out=… for a new run")
    if config.train.validate_every and config.data.kind == "indexed" and not validation_prefixes(config.data):
        key = next(key for key in ("blend", "train", "path") if getattr(config.data, key))
        lines.append(f"no validation: data.{key} names no validation part; set data.validation=PREFIX")
    lines += filter(None, (kernels_line(config, trainer.settled, trainer.ctx.device), fp8_line(config)))
    return lines


def lifted_rate(trainer: Trainer, changes: Mapping[str, Any]) -> str | None:
    """Return a line where more train.steps raise the learning rate again that has fallen; else None.

    `changes`: the changed settings by key, with their old values.
    """
    config, step, old_steps = trainer.config, trainer.step, changes.get("train.steps")
    if type(old_steps) is not int or any(key.startswith(("schedule.", "optimizer.lr")) for key in changes):
        return None
    old, new = (
        learning_rate(n, config.optimizer, config.schedule, steps)
        for n, steps in ((step, old_steps), (step + 1, config.train.steps))
    )
    if new < 1.5 * old:
        return None
    stays = f"schedule.decay_steps={old_steps} stays at {old:.2g}, and "
    stays = "" if config.schedule.decay in STABLE_DECAYS else stays
    return (
        f"warning: train.steps={config.train.steps} stretches a schedule that had fallen by step {step}: the "
        f"learning rate rises from {old:.2g} to {new:.2g}; {stays}a run with schedule=wsd is extended from a "
        "checkpoint before its cooldown (resume=RUN/checkpoints/step-… out=…)"
    )


def prepare_directory(config: PretrainConfig, out: Path) -> None:
    """Write the composed configuration and the tokenizer into the run's folder. Raises UserError."""
    checkpoint = replace(config.checkpoint, from_mirror=False, from_step=None)
    data = replace(config.data, change=False)
    saved = replace(config, data=data, checkpoint=checkpoint)  # these hold for one start
    with writing_to(config.out):
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / RUN_SETTINGS, composed_yaml(saved, "pretrain").encode())
        tokenizer = tokenizer_of(config.data)
        if tokenizer is not None:
            if config.ckpt is None:
                tokenizer.declared = tokenizer.declared.of_another_model()
            for folder in (out, out / BEST)[: 1 + config.train.keep_best]:
                folder.mkdir(exist_ok=True)
                tokenizer.save(folder)


def epochs_of(samples: Dataset) -> list[float | None]:
    """Passes over each corpus of a blend, or the only one; None for other data."""
    parts = samples.datasets if isinstance(samples, BlendedDataset) else [samples]
    return [getattr(part, "epochs", None) for part in parts]  # samples of a corpus have it


def epochs_warning(samples: Dataset, steps: int) -> str | None:
    """Return a warning if a run reads a corpus so often that the model learns it by heart, else None."""
    epochs = max((epochs for epochs in epochs_of(samples) if epochs is not None), default=0.0)
    if epochs <= MOST_EPOCHS:
        return None
    fewer = max(1, int(steps * GOOD_EPOCHS / epochs))
    return (
        f"warning: train.steps={steps} reads the corpus {epochs:,.0f} times, so that the model learns it by "
        f"heart; use about train.steps={fewer} for {GOOD_EPOCHS} epochs, or a smaller train.global_batch_size"
    )


def header(trainer: Trainer, out: Path, peak: DevicePeak | None, samples: Dataset) -> list[tuple[str, str]]:
    config, batch = trainer.config, trainer.config.train
    ramp = ""
    if batch.ramp_batch is not None:
        start, _, num_ramp_samples = batch.ramp_batch
        ramp = f", from {start} samples on until {num_ramp_samples:,} are read"
    sources = trainer.history[-1].sources if trainer.history else ()
    corpora = [
        source.name
        + (f" {source.weight:.2%}" if sources[1:] else "")
        + ("" if epochs is None else f" ({epochs:,.1f} epochs)")
        for source, epochs in (zip(sources, epochs_of(samples), strict=True) if sources else ())
    ]
    return [
        run_row(config.name, out),
        model_row(trainer),
        layout_row(trainer),
        (
            "batch",
            f"{batch.global_batch_size} × {config.data.seq_length} tokens in micro-batches of "
            f"{batch.micro_batch_size}{ramp}",
        ),
        *([("data", ", ".join(corpora))] if corpora else []),
        ("precision", config.precision.dtype),
        ("peak", f"{peak.label} TFLOP/s" if peak else "unknown: set dist.peak_tflops for MFU"),
        ("out", str(out)),
    ]


@dataclass
class PretrainLoop(Loop):
    """Train on the samples of a dataset in order, from the first one not consumed yet."""

    warmup_key = "schedule.warmup_steps"

    samples: Dataset
    validation: Sequence[ValidationSet]
    last_validation: float | None = field(default=None, init=False)
    """Mean validation loss of the last validation, nats per token; of the average with ema.validate."""

    def further_observers(self) -> list[Observer]:
        config = self.trainer.config
        tokenizer = tokenizer_of(config.data) if config.train.sample_prompts else None
        return [] if tokenizer is None else [PromptSampler(self.trainer, self.reporter, tokenizer)]

    @property
    def validate_every(self) -> int:
        return self.trainer.config.train.validate_every if self.validation else 0

    def is_done(self) -> bool:
        best = self.trainer.extra_state.get(BEST_VALIDATION, {})
        return super().is_done() or 0 < self.trainer.config.train.patience <= best.get("without_gain", 0)

    def batches(self) -> Loader:
        return self.trainer.batches(self.samples)

    def count(self) -> None:
        """Count the step that was just taken, of fewer tokens in a ramp of the batch."""
        self.throughput.count(len(self.trainer.newest_samples) * self.trainer.config.data.seq_length)

    def tokens(self) -> int:
        consumed = self.trainer.consumed_samples
        unread = sum(count for first, count in self.trainer.excluded_samples if first < consumed)
        return (consumed - unread) * self.trainer.config.data.seq_length

    def parts(self, means: Sequence[float], rates: Rates | None = None) -> Parts:
        """The parts of the objective by name; empty if the loss is its only part."""
        names = self.trainer.objective.metrics
        return dict(zip(names, means, strict=True)) if len(names) > 1 else {}

    def score(self) -> None:
        """Report the mean loss over the validation windows, weighted over the corpora of a blend."""
        trainer = self.trainer
        losses, means = self.validation_losses()
        weights = normalize_weights([part.weight for part in self.validation])
        self.last_validation = loss = math.fsum(map(operator.mul, weights, losses))
        by_corpus = {part.name: loss for part, loss in zip(self.validation, losses, strict=True) if part.name}
        perplexity = math.exp(min(means[0], 700.0))  # per token, or masked token of a BERT
        named = {**by_corpus, **self.parts(means)}
        if trainer.average is not None and trainer.config.ema.validate:
            trainer.swap_average()
            try:
                losses, _ = self.validation_losses()
                self.last_validation = named["ema_loss"] = math.fsum(map(operator.mul, weights, losses))
                self.keep_best(self.last_validation)
            finally:  # also if a stop interrupts the batches
                trainer.swap_average()
        else:
            self.keep_best(loss)
        self.reporter.validation(trainer.step, loss, perplexity, named)

    def keep_best(self, loss: float) -> None:
        """Remember the lowest validation loss, and save its weights with train.keep_best. Collective.

        If saving fails, the previous best stays, so that the next lower loss is saved.
        """
        trainer, state, train = self.trainer, self.trainer.extra_state, self.trainer.config.train
        best = state.get(BEST_VALIDATION, {"loss": math.inf, "step": 0, "without_gain": 0})
        if loss < best["loss"]:
            state[BEST_VALIDATION] = {"loss": loss, "step": trainer.step, "without_gain": 0}
            if train.keep_best and not self.save_best():
                state[BEST_VALIDATION] = {**best, "without_gain": 0}
                if not math.isfinite(best["loss"]):
                    del state[BEST_VALIDATION]
        elif math.isfinite(best["loss"]):
            # a new dictionary: a save under way may still be writing the one before
            state[BEST_VALIDATION] = {**best, "without_gain": best["without_gain"] + 1}
            if best["without_gain"] + 1 == train.patience:
                best_loss = f"the best validation loss is {best['loss']:.4f}, of step {best['step']}"
                why = f"stopped by train.patience={train.patience} after step {trainer.step}"
                self.reporter.note(f"{why}: {best_loss}; a higher patience continues")

    def validation_losses(self) -> tuple[list[float], list[float]]:
        """Losses of the validation sets, and the means over all by weight of the objective's metrics."""
        parts = [self.trainer.validate(self.validation_batches(part)) for part in self.validation]
        losses = [math.fsum(part[: self.trainer.objective.num_losses]) for part in parts]
        weights = normalize_weights([part.weight for part in self.validation])
        return losses, [math.fsum(map(operator.mul, weights, part)) for part in zip(*parts, strict=True)]

    def validation_batches(self, part: ValidationSet) -> Iterator[MicroBatch]:
        train, ctx = self.trainer.config.train, self.trainer.ctx
        return eval_batches(
            part.windows,
            micro_batch_size=train.micro_batch_size,
            rank=ctx.dp.rank,
            size=ctx.dp.size,
            limit=train.validate_batches * train.global_batch_size,
        )


def print_next_commands(trainer: Trainer, out: Path) -> None:
    """Print the commands that continue the run and draw its curves. A closed stdout ends no run."""
    config, scaler = trainer.config, trainer.scaler
    if scaler.dynamic and 0 < trainer.step == scaler.skipped.item():
        why = "precision.initial_loss_scale=%g: all %d steps overflowed, no weight has changed; set it to %g"
        log.warning(why, config.precision.initial_loss_scale, trainer.step, scaler.scale.item())
    steps, schedule = config.train.steps, config.schedule
    resume = [*resume_command("pretrain", out, config), f"train.steps={2 * steps}"]
    if schedule.decay not in STABLE_DECAYS and schedule.decay_steps is None:
        resume.append(f"schedule.decay_steps={steps}")  # the learning rate stays where it ended
    line = Text(f"train on: {shlex.join(resume)}\ncurves: mlm report {shlex.quote(str(out))}")
    training_console(out / FILE_NAME).print(line, soft_wrap=True)


def model_of_ckpt(ckpt: Any, out: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the setting that names the model of a run that begins with `ckpt`, and its `model.*`.

    If `ckpt` is gone, the model of a run saved in `out`. None for an invalid path, which later checks report.
    Raises UserError, CorruptFileError.
    """
    if not isinstance(ckpt, str) or path_problem("ckpt", path := expand_home(ckpt), Role.INPUT):
        return None
    try:
        if problem := present.checkpoint(path):
            raise UserError(problem)
        return f"ckpt={ckpt}", asdict(open_source(path).model)
    except UserError:
        if not (isinstance(out, str) and has_saved(expand_home(out))):
            raise
        with suppress(UserError):
            return f"out={out}", asdict(open_checkpoint(expand_home(out)).model)
        raise


def settle_cooldown(values: dict[str, Any], typed: Collection[str]) -> str | None:
    """Set train.steps of composed settings to the end of the cooldown; return a line to print.

    None if the user typed train.steps. A cooldown under way keeps its end. Raises UserError for a run without
    a checkpoint to continue, CorruptFileError if all are damaged.
    """
    cooldown, origin = values["schedule"].get("cooldown"), values["checkpoint"].get("from_run")
    if not isinstance(cooldown, int) or cooldown <= 0 or "train.steps" in typed:
        return None
    out = Path(str(values["out"]))
    latest = latest_checkpoint(out / CHECKPOINTS)
    if values["checkpoint"].get("from_mirror"):
        raise UserError(
            f"schedule.cooldown={cooldown}: its steps from a mirror are not known; set train.steps too"
        )
    if latest is None and not isinstance(origin, str):
        return None
    start = step_of(latest or continued_candidates(str(origin))[0])
    steps = start + cooldown
    settings = out / RUN_SETTINGS
    saved: Mapping[str, Any] = parse(read_text(settings), settings) if latest and settings.is_file() else {}
    schedule, train = saved.get("schedule"), saved.get("train")
    if isinstance(schedule, dict) and isinstance(train, dict) and schedule.get("cooldown") == cooldown:
        end_step = train.get("steps")  # a cooldown under way
        if type(end_step) is int and end_step - cooldown <= start <= end_step:
            steps = end_step
    values["train"]["steps"] = steps
    return f"schedule.cooldown={cooldown}: steps {steps - cooldown + 1:,} to {steps:,} of train.steps={steps}"
