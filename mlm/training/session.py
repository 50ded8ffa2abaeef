"""Services around the training loop: reporting, signals, saving, and rows and files of both types of run."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from mlm.config.build import to_dict
from mlm.config.imports import is_path
from mlm.config.tree import leaves, values_of
from mlm.launch.stop import StopRequest
from mlm.launch.typed import origin
from mlm.tracking.metrics import Throughput
from mlm.tracking.peak import Peak
from mlm.tracking.reporter import Reporter
from mlm.training.saver import Saver
from mlm.training.trainer import Trainer
from mlm.util.errors import show

CONFIG = "config.yaml"
"""File of a run directory with its composed configuration."""


class Session(NamedTuple):
    """The first arguments of `Loop`."""

    trainer: Trainer
    reporter: Reporter
    throughput: Throughput
    stop: StopRequest
    saver: Saver

    def note_stopped(self, how_to_resume: str) -> int:
        """Report that a run was stopped and saved; return the exit code of its command."""
        reason, step = self.stop.reason or "another rank", self.trainer.step
        self.reporter.note(f"stopped by {reason} after step {step}, saved.{how_to_resume}")
        return self.stop.exit_code


@contextmanager
def training_session(
    trainer: Trainer,
    out: Path,
    *,
    header: Sequence[tuple[str, str]],
    record: Mapping[str, object],
    notes: Sequence[str],
    warnings: Sequence[str] = (),
    peak: Peak | None,
    tokens_per_step: int,
    seq_length: int,
    loss_unit: str,
) -> Iterator[Session]:
    """Report, listen to signals and save until the block ends.

    Args:
        trainer: its state is reported and saved.
        out: the run directory.
        header: rows shown above the numbers.
        record: JSON values of the record of kind "run" in metrics.jsonl.
        notes: lines shown before training begins.
        warnings: problems shown with them.
        peak: peak of the device that MFU is stated against.
        tokens_per_step: tokens of the global batch; 0 if the loop counts them.
        seq_length: tokens of a sequence, or their mean, for FLOP/s.
        loss_unit: unit of the loss, in words.
    """
    config, ctx = trainer.config, trainer.ctx
    throughput = Throughput(
        tokens_per_step=tokens_per_step,
        flops_per_token=config.model.flops_per_token(seq_length, ctx.tp.size),
        devices=ctx.world_size,
        peak=peak.flops if peak else None,
    )
    reporter = Reporter(
        out,
        total_steps=config.train.steps,
        start_step=trainer.step,
        config=config.log,
        is_main=ctx.is_main,
        header=header,
        run={**record, **origin(), "loss_unit": loss_unit},
    )
    with StopRequest(announce=ctx.is_main) as stop, reporter, Saver(trainer, out, reporter) as saver:
        stop.show, trainer.on_micro_batch = reporter.announce, reporter.micro_batch
        for note in notes:
            reporter.note(note)
        for warning in warnings:
            reporter.problem(warning)
        yield Session(trainer, reporter, throughput, stop, saver)


def composed_yaml(config: Any, command: str) -> str:
    """The configuration of a run of `command`, as `resume={out}` reads it back (mlm/config/cli/saved.py)."""
    values = to_dict(config)
    values.update(values.pop("parallel"))
    return OmegaConf.to_yaml({"defaults": ["hydra_quiet", f"{command}_defaults", "_self_"], **values})


def resume_command(command: str, out: Path, config: Any) -> list[str]:
    """The words to type to resume a run, started as this one was."""
    return ["mlm", command, f"resume={out}", *own_code(config)]


def own_code(config: Any) -> list[str]:
    """The settings that name the user's own code: a saved import path is followed only if typed again."""
    spec: type = type(config)
    values = values_of(config)
    found = {key: values[key] for key, leaf in leaves(spec).items() if leaf.shipped}
    return [f"{key}={show(value)}" for key, value in found.items() if is_path(value)]


def resume_with(command: str, out: Path, config: Any) -> str:
    """Return how to resume a stopped run, in two lines."""
    return f" Resume with:\n  {shlex.join(resume_command(command, out, config))}"


def run_row(name: str, out: Path) -> tuple[str, str]:
    """Name of the run, and its folder if that is another than runs/{name}: jobs of a sweep share the name."""
    return "run", name if out == Path("runs", name) else f"{name} in {out}"


def model_row(trainer: Trainer, origin: str = "") -> tuple[str, str]:
    """Family, size and shape of the model."""
    model = trainer.config.model
    shape = f"{model.num_layers} layers × {model.hidden_size} × {model.num_heads} heads"
    return "model", f"{model.kind} {model.num_parameters() / 1e6:,.1f}M ({shape}){origin}"


def layout_row(trainer: Trainer, *, even_batches: bool = True) -> tuple[str, str]:
    """Sizes and options of the parallel layout. The bubble is stated only if all batches are alike."""
    config, ctx, p = trainer.config, trainer.ctx, trainer.config.parallel
    schedule: str = p.pipeline
    if ctx.pp.size > 1 and even_batches:
        micro_batches = config.train.global_batch_size // (ctx.dp.size * config.train.micro_batch_size)
        schedule += f", bubble {trainer.model.bubble(micro_batches):.1%}"
    over_context = f"cp={ctx.cp.size} × " if ctx.cp.size > 1 else ""
    sizes = f"tp={ctx.tp.size} × {over_context}pp={ctx.pp.size} × dp={ctx.dp.size}"
    ranks = f"{ctx.world_size} {ctx.device.type} rank{'s' * (ctx.world_size > 1)}"
    options = [
        f"vp={p.vp}" if p.vp > 1 else "",
        "sequence parallel" if p.sequence_parallel and ctx.tp.size > 1 else "",
        f"tp_overlap={p.tp_overlap}" if p.tp_overlap > 1 and ctx.tp.size > 1 else "",
        f"zero={p.zero}" if p.zero and ctx.replicas.size > 1 else "",
        "reduced every micro-batch" if p.zero and ctx.replicas.size > 1 and p.zero_reduce == "every" else "",
        f"recompute={p.recompute}" if p.recompute != "none" else "",
        schedule if ctx.pp.size > 1 else "",
    ]
    return "layout", ", ".join([f"{sizes} on {ranks}", *filter(None, options)])
