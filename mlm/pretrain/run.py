"""`mlm pretrain`: train a model from its initial weights, or go on where a run stopped."""

import logging
import shlex
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

from omegaconf import OmegaConf

from mlm.checkpoint.native.tokenizer_digest import KEY as TOKENIZER
from mlm.config.build import config_digest, to_dict
from mlm.data.blend_history import trained_on
from mlm.data.sampler import MicroBatch
from mlm.errors import writing_to
from mlm.files.atomic import write_atomic
from mlm.launch.stop import StopRequest
from mlm.optim.schedule import warmup_warning
from mlm.parallel.mesh import ParallelContext
from mlm.report.curves import plot_losses
from mlm.report.metrics import Reporter, Throughput
from mlm.report.peak import Peak, peak_flops
from mlm.report.summary import write_summary
from mlm.report.trackers import missing_extras
from mlm.train.config import PretrainConfig
from mlm.train.corpora import (
    corpus_faults,
    train_dataset,
    validation_prefixes,
    validation_sets,
)
from mlm.train.identity import told
from mlm.train.loop import Loop
from mlm.train.memory import out_of_memory_is_said, reuse_large_blocks
from mlm.train.resume import claim, go_on_with_data, resume, start_faults
from mlm.train.run_tokenizer import corpus_tokenizer_errors, tokenizer_now, tokenizer_of
from mlm.train.saver import Saver
from mlm.train.trainer import Trainer

CONFIG, SUMMARY = "config.yaml", "README.md"

log = logging.getLogger(__name__)


def preflight(config: PretrainConfig) -> list[str]:
    """Faults that reading the named files shows, a line each; called before any rank starts."""
    faults = [*missing_extras(config.log), *corpus_faults(config)]
    return faults or corpus_tokenizer_errors(config.data) or start_faults(config)


def run(config: PretrainConfig, ctx: ParallelContext) -> None:
    """Train; every rank calls this. Raises UserError for what the user can mend."""
    if ctx.device.type == "cpu":
        reuse_large_blocks()
    out = Path(config.out)
    remedy = "set recompute=selective or full, sequence_parallel=true or zero=2, or raise tp or pp"
    with out_of_memory_is_said(config.train.micro_batch_size, remedy), ExitStack() as stack:
        claim(config, ctx, stack)
        trainer: Trainer[MicroBatch] = Trainer(config, ctx)
        train(trainer, out, resume(trainer))


def train(trainer: Trainer, out: Path, start: Path | None) -> None:
    """Run the loop from the trainer's state and finish the run directory."""
    config, ctx = trainer.config, trainer.ctx
    changed = go_on_with_data(trainer)
    left = config.train.steps - trainer.step
    num_samples = trainer.consumed_samples + max(0, left) * config.train.global_batch_size
    samples = train_dataset(config, num_samples, trainer.history)
    peak = peak_flops(ctx.device, config.precision.dtype, config.dist.peak_tflops)
    throughput = Throughput(
        tokens_per_step=config.train.global_batch_size * config.data.seq_length,
        flops_per_token=config.model.flops_per_token(config.data.seq_length, ctx.tp.size),
        devices=ctx.world_size,
        peak=peak.flops if peak else None,
    )
    rows = header(trainer, out, peak)
    if ctx.is_main:
        note_tokenizer(trainer)
        if left > 0:  # last, when all is checked and loaded: what is rejected, or has nothing to do, stays
            prepare_directory(config, out)
    reporter = Reporter(
        out,
        total_steps=config.train.steps,
        start_step=trainer.step,
        config=config.log,
        is_main=ctx.is_main,
        header=rows,
        run={
            "config_digest": config_digest(config),
            "layout": {**asdict(config.parallel), "dp": ctx.dp.size},
            "resumed_from": start and str(start),
            "corpora": trained_on(trainer.history),
        },
    )
    with StopRequest(announce=ctx.is_main) as stop, reporter, Saver(trainer, out, reporter) as saver:
        stop.show = reporter.announce
        if start is not None:
            begins = "resuming from" if trainer.step else "weights from"
            reporter.note(f"{begins} {start} (step {trainer.step})")
        since = tuple(c for c in trainer.past.changes if c["step"] == trainer.step)
        if since and left > 0:
            reporter.note(f"{told(since)}; for a new run instead, set another out=…")
        if changed is not None:
            reporter.note(changed)
        if left <= 0:
            reporter.note(
                f"step {trainer.step} of train.steps={config.train.steps} is done: raise train.steps to "
                "continue, or set another out=… for a new run"
            )
        if warning := warmup_warning(config.optimizer, config.schedule, config.train.steps):
            reporter.note(warning)
        validation = validation_sets(config, trainer.history)
        loop = Loop(trainer, samples, validation, reporter, throughput, stop, saver)
        finished = loop.run()
        if not finished:
            reporter.note(
                f"stopped by {stop.reason or 'another rank'} after step {trainer.step}, saved. Resume with:"
            )
            reporter.note(f"  {shlex.join(resume_command(out))}")
    if ctx.is_main and (left > 0 or not (out / SUMMARY).exists()):
        finish_directory(config, ctx, out, rows)


def prepare_directory(config: PretrainConfig, out: Path) -> None:
    """Write the composed configuration and the tokenizer beside what will come. Raises UserError."""
    with writing_to(config.out):
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / CONFIG, composed_yaml(config).encode())
        tokenizer = tokenizer_of(config.data)
        if tokenizer is not None:
            tokenizer.save(out / "tokenizer.json")


def note_tokenizer(trainer: Trainer) -> None:
    """Let checkpoints say which tokenizer the run is trained with. For one rank; raises UserError."""
    found = tokenizer_now(trainer.config.data)
    if found is not None:
        trainer.extra_state[TOKENIZER] = found.encode()


def composed_yaml(config: PretrainConfig) -> str:
    """The configuration as `resume={out}` reads it back (mlm/cli/saved.py)."""
    plain = to_dict(replace(config, data=replace(config.data, change=False)))  # allowed once
    plain.update(plain.pop("parallel"))
    return OmegaConf.to_yaml({"defaults": ["hydra_quiet", "pretrain_defaults", "_self_"], **plain})


def resume_command(out: Path) -> list[str]:
    """The words to type to go on with a run."""
    return ["mlm", "pretrain", f"resume={out}"]


def layout(trainer: Trainer, *, even_batches: bool = True) -> str:
    """The parallel layout in a line: sizes, then what else was chosen. The bubble is that of even batches."""
    config, ctx, p = trainer.config, trainer.ctx, trainer.config.parallel
    schedule: str = p.pipeline
    if ctx.pp.size > 1 and even_batches:
        micro_batches = config.train.global_batch_size // (ctx.dp.size * config.train.micro_batch_size)
        schedule += f", bubble {trainer.model.bubble(micro_batches):.1%}"
    sizes = f"tp={ctx.tp.size} × pp={ctx.pp.size} × dp={ctx.dp.size}"
    ranks = f"{ctx.world_size} {ctx.device.type} rank{'s' * (ctx.world_size > 1)}"
    chosen = [
        f"vp={p.vp}" if p.vp > 1 else "",
        "sequence parallel" if p.sequence_parallel and ctx.tp.size > 1 else "",
        f"zero={p.zero}" if p.zero and ctx.dp.size > 1 else "",
        "reduced every micro-batch" if p.zero and ctx.dp.size > 1 and p.zero_reduce == "every" else "",
        f"recompute={p.recompute}" if p.recompute != "none" else "",
        schedule if ctx.pp.size > 1 else "",
    ]
    return ", ".join([f"{sizes} on {ranks}", *filter(None, chosen)])


def blend_line(trainer: Trainer) -> str:
    """Name and share of each corpus of a blend."""
    return ", ".join(f"{source.name} {source.weight:.2%}" for source in trainer.history[-1].sources)


def header(trainer: Trainer, out: Path, peak: Peak | None) -> list[tuple[str, str]]:
    """Rows shown above the numbers."""
    config, model, batch = trainer.config, trainer.config.model, trainer.config.train
    shape = f"{model.num_layers} layers × {model.hidden_size} × {model.num_heads} heads"
    return [
        ("run", config.name),
        ("model", f"{model.kind} {model.num_parameters() / 1e6:,.1f}M ({shape})"),
        ("layout", layout(trainer)),
        (
            "batch",
            f"{batch.global_batch_size} × {config.data.seq_length} tokens in micro-batches of "
            f"{batch.micro_batch_size}",
        ),
        *([("data", blend_line(trainer))] if config.data.blend else []),
        ("precision", config.precision.dtype),
        ("peak", f"{peak.label}" if peak else "unknown: set dist.peak_tflops for MFU"),
        ("out", str(out)),
    ]


def finish_directory(
    config: PretrainConfig, ctx: ParallelContext, out: Path, rows: list[tuple[str, str]]
) -> None:
    """Plot the losses and write the run's summary. A full disk then is no failed training."""
    prompt = "The" if (out / "tokenizer.json").exists() else None
    try:
        plot_losses(out / "metrics.jsonl", out / "loss.png", config.model.family.loss_unit)
        write_summary(
            out,
            command=resume_command(out),
            header=rows,
            total_steps=config.train.steps,
            prompt=prompt,
            validation=[str(prefix) for prefix in validation_prefixes(config.data).values()],
        )
    except OSError as error:
        log.warning("%s: %s: the run is saved, its summary is not", error.filename or out, error.strerror)
