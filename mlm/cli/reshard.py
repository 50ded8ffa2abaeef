"""`mlm reshard`: rewrite a checkpoint for another layout, in one process and the memory of a tensor."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlm.cli.command import Command
from mlm.config.fields import CheckpointPath, OutFolder
from mlm.parallel.config import ParallelConfig, PipelineSize, TensorSize, VirtualSize
from mlm.util.errors import ConfigError, UserError, attempt

if TYPE_CHECKING:  # which need torch
    from mlm.checkpoint.native.reshard import ReshardPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class ReshardConfig:
    """The run spec of `mlm reshard`: write a checkpoint again as another layout would."""

    ckpt: CheckpointPath
    """Checkpoint (step-…) or run directory (its latest checkpoint; of a finetuned run the best) to read."""
    out: OutFolder
    """Run directory to write: out/checkpoints/step-… and the tokenizer."""
    tp: TensorSize = 1
    """Tensor-parallel size, t: every stage becomes t files."""
    pp: PipelineSize = 1
    """Pipeline-parallel size, p."""
    vp: VirtualSize = 1
    """Virtual stages (chunks) per pipeline rank, v."""
    weights_only: bool = False
    """Leave the optimizer's moments out: a third of the size, to start runs from or to give away."""


def preflight(config: ReshardConfig) -> list[str]:
    """Return what is wrong with the checkpoint, the layout or `out`; no tensor is read."""
    from mlm.runs.folder import out_problems

    problems = out_problems(config.out)
    attempt(problems, lambda: make_plan(config))
    return problems


def make_plan(config: ReshardConfig) -> tuple["ReshardPlan", bytes | None]:
    """Assign the checkpoint's tensors to the layout; return that and its tokenizer.json. Raises UserError."""
    from mlm.checkpoint.native.format import RESTORE
    from mlm.checkpoint.native.reshard import plan_reshard
    from mlm.checkpoint.native.run_state import TOKENIZER_FILE, check_run_tokenizer
    from mlm.checkpoint.native.save_load import check_finite
    from mlm.convert.source import open_checkpoint
    from mlm.data.tokenizer_settings import MAX_BYTES
    from mlm.models.stage import assign_stages
    from mlm.runs.checks import split_problems
    from mlm.util.errors import reading_from
    from mlm.util.files import read_bounded

    source = open_checkpoint(config.ckpt)
    path, manifest = source.path, source.manifest
    check_finite(path, manifest)
    if source.base is not None:
        raise UserError(f"ckpt={config.ckpt}: holds adapters alone, which any layout loads as they are")
    if problems := split_problems(source.model, ParallelConfig(tp=config.tp, pp=config.pp, vp=config.vp)):
        raise ConfigError(problems)
    with reading_from(path, RESTORE):
        check_run_tokenizer(path, manifest.state)
        file = source.folder / TOKENIZER_FILE
        tokenizer = read_bounded(file, MAX_BYTES, RESTORE) if file.exists() else None
    stage_ranks = assign_stages(source.model.num_layers, config.pp, config.vp)
    layout = {"tp": config.tp, "pp": config.pp, "vp": config.vp}
    plan = plan_reshard(path, manifest, stage_ranks, layout, weights_only=config.weights_only)
    return plan, tokenizer


def run(config: ReshardConfig) -> None:
    """Split, publish, and print a table. Raises UserError, and leaves nothing then."""
    from mlm.checkpoint.native.folders import CHECKPOINTS
    from mlm.checkpoint.native.reshard import write_checkpoint
    from mlm.checkpoint.native.run_state import TOKENIZER_FILE
    from mlm.runs.folder import new_folder
    from mlm.util.files import write_atomic
    from mlm.util.terminal import progress_bar

    plan, tokenizer = make_plan(config)
    begin = time.perf_counter()
    with (
        new_folder(Path(config.out), plan.num_bytes) as folder,
        progress_bar("resharding", plan.num_bytes, in_bytes=True) as advance,
    ):
        if tokenizer is not None:
            write_atomic(folder / TOKENIZER_FILE, tokenizer)
        name = write_checkpoint(plan, folder / CHECKPOINTS, config.tp, advance).name
    show(config, plan, Path(config.out) / CHECKPOINTS / name, time.perf_counter() - begin)


def show(config: ReshardConfig, plan: "ReshardPlan", path: Path, seconds: float) -> None:
    """Print the table and notes."""
    from mlm.checkpoint.native.folders import best_note
    from mlm.checkpoint.native.format import read_manifest_head
    from mlm.cli.result import show_table
    from mlm.util.terminal import format_bytes

    written = read_manifest_head(path)
    columns = {
        "step#": written.step,
        "layout": f"tp={config.tp} pp={config.pp} vp={config.vp}",
        "files before#": f"{len(plan.manifest.files):,}",
        "files#": f"{len(written.files):,}",
        "tensors#": f"{len(written.tensors):,}",
        "bytes#": format_bytes(sum(entry.bytes for entry in written.files.values())),
        "bytes/s#": format_bytes(int(plan.num_bytes / seconds)),
    }
    notes = filter(None, [best_note(config.ckpt, plan.source)])
    show_table(f"reshard · {plan.source}", columns, notes, f"written to {path} in {seconds:,.1f} s")


RESHARD = Command(
    words=("reshard",),
    spec=ReshardConfig,
    target="mlm.cli.reshard:run",
    preflight="mlm.cli.reshard:preflight",
    positional=("ckpt",),
    summary="rewrite a checkpoint for another layout, weights and optimizer state",
    about=(
        "Reshards a checkpoint for tp, pp and vp, in one process and a memory that its largest tensor "
        "bounds: each rank of that layout then reads one file. Training needs no such step: any layout "
        "loads any checkpoint. The source is verified on the way."
    ),
    examples=(
        (
            "Split a checkpoint for tp=4 pp=2",
            "mlm reshard --tp 4 --pp 2 ckpt=runs/shakespeare out=runs/resharded",
        ),
        (
            "Weights alone, in one file, to give away",
            "mlm reshard runs/shakespeare out=runs/weights --weights-only",
        ),
    ),
)
