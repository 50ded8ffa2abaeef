"""`mlm reshard`: rewrite a checkpoint for another layout, in one process and the memory of a tensor."""

import time
from pathlib import Path

from mlm.checkpoint.native.folders import CHECKPOINTS, best_note, locate
from mlm.checkpoint.native.format import RESTORE, read_manifest_head
from mlm.checkpoint.native.reshard import ReshardPlan, plan_reshard, write_checkpoint
from mlm.checkpoint.native.run_state import TOKENIZER_FILE, check_run_tokenizer
from mlm.cli.convert.settings import ReshardConfig
from mlm.cli.result import show_table
from mlm.convert.source import open_checkpoint
from mlm.data.tokenizer_settings import MAX_BYTES
from mlm.models.stage import assign_stages
from mlm.parallel.config import ParallelConfig
from mlm.runs.checks import split_problems
from mlm.runs.folder import new_folder, out_problems
from mlm.util.errors import ConfigError, UserError, attempt, reading_from
from mlm.util.files import read_bounded, write_atomic
from mlm.util.terminal import format_bytes, progress_bar


def preflight(config: ReshardConfig) -> list[str]:
    """Return problems of the checkpoint, the layout or `out`; reads no tensor."""
    problems = out_problems(config.out)
    attempt(problems, lambda: make_plan(config))
    return problems


def make_plan(config: ReshardConfig) -> tuple[ReshardPlan, bytes | None]:
    """Assign the checkpoint's tensors to the layout; return that and its tokenizer.json. Raises UserError."""
    # A run's best checkpoint has no moving average.
    source = open_checkpoint(str(locate(config.ckpt)[0]) if config.ema else config.ckpt)
    path, manifest = source.path, source.manifest
    if source.base is not None:
        raise UserError(f"ckpt={config.ckpt}: holds adapters alone, which any layout loads as they are")
    layout = {"tp": config.tp, "pp": config.pp, "vp": config.vp}
    if problems := split_problems(source.model, ParallelConfig(tp=config.tp, pp=config.pp, vp=config.vp)):
        raise ConfigError(problems)
    with reading_from(path, RESTORE):
        check_run_tokenizer(path, manifest.state)
        file = source.folder / TOKENIZER_FILE
        tokenizer = read_bounded(file, MAX_BYTES, RESTORE) if file.exists() else None
    stage_ranks = assign_stages(source.model.num_layers, config.pp, config.vp)
    plan = plan_reshard(
        path, manifest, stage_ranks, layout, weights_only=config.weights_only, average=config.ema
    )
    return plan, tokenizer


def run(config: ReshardConfig) -> None:
    """Split, publish, and print a table. Raises UserError, and leaves nothing then."""
    plan, tokenizer = make_plan(config)
    start = time.perf_counter()
    with (
        new_folder(Path(config.out), plan.num_bytes) as folder,
        progress_bar("resharding", plan.num_bytes, in_bytes=True) as advance,
    ):
        if tokenizer is not None:
            write_atomic(folder / TOKENIZER_FILE, tokenizer)
        name = write_checkpoint(plan, folder / CHECKPOINTS, config.tp, advance).name
    path, seconds = Path(config.out) / CHECKPOINTS / name, time.perf_counter() - start
    target = read_manifest_head(path)
    columns = {
        "step#": target.step,
        "layout": f"tp={config.tp} pp={config.pp} vp={config.vp}",
        "files before#": f"{len(plan.manifest.files):,}",
        "files#": f"{len(target.files):,}",
        "tensors#": f"{len(target.tensors):,}",
        "bytes#": format_bytes(sum(entry.bytes for entry in target.files.values())),
        "bytes/s#": format_bytes(int(plan.num_bytes / seconds)),
    }
    notes = filter(None, [best_note(config.ckpt, plan.source)])
    show_table(f"reshard · {plan.source}", columns, notes, f"written to {path} in {seconds:,.1f} s")
