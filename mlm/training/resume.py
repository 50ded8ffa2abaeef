"""The start of a run: its newest whole checkpoint, the one that `ckpt` names, or initial weights."""

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.folders import (
    CHECKPOINTS,
    candidates,
    checkpoint_problem,
    step_directory_name,
)
from mlm.checkpoint.native.retention import checkpoint_doubt
from mlm.checkpoint.native.run_state import is_weights_only
from mlm.checkpoint.native.save_load import CheckpointError, latest_checkpoint, read_manifest, resolve
from mlm.config.build import protected_from, to_dict
from mlm.convert.source import ModelFolder, model_folder
from mlm.data.blend_history import changed_corpus_problem, continue_history, decode, describe_change, encode
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import PretrainConfig
from mlm.runs.corpora import sources
from mlm.runs.tokenizer import tokenizer_errors
from mlm.training.identity import function_errors
from mlm.training.state import check_identity, load
from mlm.training.trainer import Trainer
from mlm.training.upcycle import dense_config
from mlm.util.errors import CorruptFileError, UserError, attempt, format_value
from mlm.util.lock import WAIT_S, single_writer
from mlm.util.ownership import MARKER, claim_folder, owner_of, user_name

log = logging.getLogger(__name__)


def checkpoints_folder(config: PretrainConfig) -> Path:
    return Path(config.out, CHECKPOINTS)


def start_candidates(config: PretrainConfig) -> list[Path]:
    """Return the checkpoints to resume from, the best first; empty for a fresh run.

    The run's own come before what `ckpt` names, a step-… directory or a run, whose damaged checkpoints are
    replaced by their nearest ancestor. Raises UserError when resuming is off, CorruptFileError when there are
    checkpoints and none is whole.
    """
    own = latest_checkpoint(checkpoints_folder(config))
    if own is not None and not config.checkpoint.resume:
        raise UserError(
            f"out={config.out} already holds {own.name}: set checkpoint.resume=true to resume from it, "
            "or another out=…"
        )
    if own is not None:
        return _with_ancestors(own)
    if config.ckpt is None or config.lora.rank or model_folder(config.ckpt) is not None:
        return []  # with adapters ckpt is the base, which is not saved with them
    checkpoint = resolve(config.ckpt)
    return [checkpoint] if checkpoint == Path(config.ckpt) else _with_ancestors(checkpoint)


def _with_ancestors(best: Path) -> list[Path]:
    branch = list(candidates(best.parent))
    return branch[branch.index(best) :] if best in branch else [best]


def start_problems(config: PretrainConfig, *, compares: bool = True) -> list[str]:
    """Return the problems of what the run would continue or take its weights from. Raises UserError.

    Without `compares` the caller compares the run with its checkpoint.
    """
    checkpoints, problems = start_candidates(config), list[str]()
    folder = None if config.ckpt is None else model_folder(config.ckpt)
    if config.lora.rank and config.ckpt is not None and folder is None:
        base = resolve(config.ckpt)
        problems += function_errors(config, dict(read_manifest(base).state.get("config", {})), str(base))
    if not checkpoints:
        if problems or folder is None:
            return problems
        source = ModelFolder(folder)
        assert source.tensors, "checks their names and shapes"
        saved = to_dict(source.config)
        return function_errors(dense_config(config, saved) or config, saved, str(folder))
    start, manifest = checkpoints[0], read_manifest(checkpoints[0])
    if compares:
        attempt(problems, lambda: check_identity(config, start, manifest))
    if compares and not is_weights_only(manifest.state):
        problems += tokenizer_errors(config.data, start, manifest)
    return problems


def claim(config: PretrainConfig, ctx: ParallelContext, stack: ExitStack) -> None:
    """Take the folder of checkpoints for this run, until `stack` ends. Collective; raises UserError."""
    wait_s = min(WAIT_S, config.dist.timeout_s / 2)  # the other ranks wait for this one

    def take() -> None:
        if not ctx.is_main:
            return
        claim_folder(config.out, "run", inputs=protected_from(config))
        stack.enter_context(single_writer(checkpoints_folder(config), wait_s=wait_s))
        marker = Path(config.out, MARKER)  # of the one who began
        if marker.stat().st_uid != os.geteuid():
            owner, writer = owner_of(marker), user_name(os.geteuid())
            log.warning(
                "out=%s: holds files of %s, and this process writes as %s: checkpoints that it may not "
                "delete stay whole. Continue as %s, or share the folder with a group "
                "(chmod g+rws, umask 002)",
                *(Path(config.out), owner, writer, owner),
            )

    Ranks.of(ctx).together(take, lambda error: UserError(f"out={config.out}: {error}: set another out=…"))


def resume(trainer: Trainer) -> Path | None:
    """Load the newest whole checkpoint and return its path, None for a fresh run; warn of damaged ones.

    Collective. Raises CorruptFileError when none is whole, UserError when the checkpoint is of another model.
    """
    config, ctx, ranks = trainer.config, trainer.ctx, Ranks.of(trainer.ctx)

    def look() -> list[str]:
        return list(map(str, start_candidates(config))) if ctx.is_main else []

    # one rank looks: two might see different things on a shared disk
    paths = ranks.together(look, lambda error: CheckpointError(f"out={config.out}: {error}"))
    path = load_first_whole(trainer, ranks.broadcast(paths))
    if path is not None and ctx.is_main and (doubt := checkpoint_doubt(path)):
        log.warning("%s is doubtful: %s; mlm ckpt rollback goes back to the newest good one", path, doubt)
    return path


def rewind(trainer: Trainer, before: int | None = None) -> Path | None:
    """Load the run's newest good checkpoint into a trainer that has taken steps since, and return its path.

    None without one of a step below `before`. Collective. Raises as `resume`.
    """
    ranks = Ranks.of(trainer.ctx)
    paths = rewind_candidates(trainer.config, before) if ranks.is_main else []
    return load_first_whole(trainer, ranks.broadcast(list(map(str, paths))))


def rewind_candidates(config: PretrainConfig, before: int | None) -> list[Path]:
    """Return the run's checkpoints of steps below `before` (None: all), the best first; good ones if any."""
    paths = [
        path
        for path in candidates(checkpoints_folder(config))
        if before is None or int(step_directory_name(path).removeprefix("step-")) < before
    ]
    return [
        path for path in paths if checkpoint_problem(path) is None and checkpoint_doubt(path) is None
    ] or paths


def load_first_whole(trainer: Trainer, paths: Sequence[str]) -> Path | None:
    """Load the first checkpoint that is whole; see `resume`."""
    problems: list[str] = []
    for path in paths:
        try:
            load(trainer, Path(path))
        except (CorruptFileError, CheckpointError) as error:
            problems.append(str(error))
            continue
        if problems and trainer.ctx.is_main:
            log.warning("%s; continuing from the one before, %s", problems[0], path)
        return Path(path)
    if len(problems) == 1:
        raise CorruptFileError(problems[0])
    if problems:
        folder = checkpoints_folder(trainer.config)
        raise CorruptFileError(f"{folder}: none of {len(problems)} checkpoints is whole. {problems[0]}")
    return None


def continue_data(trainer: Trainer) -> str | None:
    """Continue reading each corpus of the spec where the run stopped; return a line on changed data.

    Collective over all ranks. Raises UserError when a corpus is no longer the one that was trained on.
    """
    config, consumed, ranks = trainer.config, trainer.consumed_samples, Ranks.of(trainer.ctx)
    if config.data.kind != "indexed":
        return None

    def look() -> list[dict[str, object]] | None:
        if not trainer.ctx.is_main:  # one rank reads the indices
            return None
        now = sources(config.data)
        if problem := changed_corpus_problem(trainer.history, now):
            raise UserError(problem)
        then = continue_history(trainer.history, now, consumed)
        if (changed := describe_change(then, consumed)) and not config.data.change:
            key = next(key for key in ("blend", "train", "path") if getattr(config.data, key))
            raise UserError(
                f"data.{key}={format_value(getattr(config.data, key))}: {changed}; set data.change=true to "
                "continue so, or name the data as it was"
            )
        return encode(then)

    history = ranks.together(look, lambda error: UserError(f"data: {error}"))
    trainer.history = decode(ranks.broadcast(history), consumed)
    return describe_change(trainer.history, consumed)
