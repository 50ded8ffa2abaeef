"""The start of a run: its newest whole checkpoint, another run's, the weights of `ckpt`, or initial ones."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.folders import (
    CHECKPOINTS,
    candidates,
    checkpoint_problem,
    locate,
    step_directory_name,
    step_of,
)
from mlm.checkpoint.native.retention import checkpoint_doubt
from mlm.checkpoint.native.run_state import TokenizerDigest, is_weights_only
from mlm.checkpoint.native.save_load import CheckpointError, latest_checkpoint, read_manifest
from mlm.config.build import protected_from, to_dict
from mlm.convert.source import ModelFolder, open_source
from mlm.data.blend_history import (
    BlendSegments,
    changed_corpus_problem,
    continue_history,
    decode,
    describe_change,
    encode,
)
from mlm.launch.environment import read_rank_position
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import PretrainConfig
from mlm.runs.corpora import sources
from mlm.runs.tokenizer import tokenizer_errors
from mlm.training.identity import flat_settings, function_errors
from mlm.training.state import check_base, check_identity, load, read_history
from mlm.training.trainer import Trainer
from mlm.training.upcycle import dense_config
from mlm.util.errors import CorruptFileError, UserError, attempt, format_value, writing_to
from mlm.util.lock import WAIT_S, single_writer
from mlm.util.ownership import MARKER, claim_folder, owner_of, user_name

log = logging.getLogger(__name__)


def checkpoints_folder(config: PretrainConfig) -> Path:
    return Path(config.out, CHECKPOINTS)


def resume_candidates(config: PretrainConfig) -> list[Path]:
    """Return the checkpoints to continue from, the best first; empty for a new run.

    Checkpoints of `out` come before those of checkpoint.from_run. Raises UserError if resuming is off, or
    from_run holds none; CorruptFileError if there are checkpoints and all are incomplete.
    """
    latest = latest_checkpoint(checkpoints_folder(config))
    if latest is not None and not config.checkpoint.resume:
        raise UserError(
            f"out={config.out} already holds {latest.name}: set checkpoint.resume=true to resume from it, "
            "or another out=…"
        )
    if latest is not None:
        return _with_ancestors(latest)
    return [] if config.checkpoint.from_run is None else continued_candidates(config.checkpoint.from_run)


def continued_candidates(name: str) -> list[Path]:
    """Return the checkpoints of another run to continue from, the best first; only `name` if it is a step-….

    Raises UserError without training state.
    """
    folder, is_step = locate(name, "resume")
    latest = folder if is_step else latest_checkpoint(folder)
    assert latest is not None, "located"
    if is_weights_only(read_manifest(latest).state):
        raise UserError(
            f"resume={name}: holds weights alone, and no state of a run to continue; begin a new run with "
            f"them: ckpt={name} out=…"
        )
    return [latest] if is_step else _with_ancestors(latest)


def _with_ancestors(best: Path) -> list[Path]:
    branch = list(candidates(best.parent))
    return branch[branch.index(best) :] if best in branch else [best]


def start_problems(config: PretrainConfig, *, compares: bool = True) -> list[str]:
    """Return the problems of the checkpoint or weights that the run starts from. Raises UserError.

    Without `compares` the caller compares the run with its checkpoint.
    """
    ckpt, problems = config.ckpt, list[str]()
    # a mirror's checkpoint takes precedence over `ckpt`, and is compared after its download
    is_mirrored = config.checkpoint.from_mirror and latest_checkpoint(checkpoints_folder(config)) is None
    path = None if is_mirrored else next(iter(resume_candidates(config)), None)
    is_new = path is None and not is_mirrored
    if ckpt is not None and (is_new or config.lora.rank):
        problems += attempt(problems, lambda: weights_problems(config, ckpt, is_new=is_new)) or []
    if path is None or not compares:
        return problems
    manifest = read_manifest(path)
    problems += origin_errors(config, dict(manifest.state.get("config") or {}), path)
    attempt(problems, lambda: check_identity(config, path, manifest))
    if not is_weights_only(manifest.state) and not problems:
        attempt(problems, lambda: check_base(config, path, manifest))
        saved, fix = TokenizerDigest.of(manifest.state), "use corpora of that tokenizer, or begin another run"
        problems += tokenizer_errors(config.data, saved, f"the run in {path.parent.parent}", fix)
        # under a launcher rank 0 compares the data later
        if config.data.kind == "indexed" and read_rank_position(os.environ) is None and not problems:
            history, consumed = read_history(manifest.state), int(manifest.state["consumed_samples"])
            attempt(problems, lambda: continued_history(config, history, consumed))
    return problems


def weights_problems(config: PretrainConfig, ckpt: str, *, is_new: bool) -> list[str]:
    """Return the problems of the weights in `ckpt`: of another model, or trained on other tokens.

    Tokens are compared for a new run, `is_new`; a resumed run compares its checkpoint's. Raises UserError.
    """
    source = open_source(ckpt)
    if isinstance(source, ModelFolder):
        assert source.tensors, "reading them checks names and shapes"
    saved = to_dict(source.config)
    dense = None if config.lora.rank else dense_config(config, saved)
    problems = function_errors(dense or config, saved, str(source.path))
    if is_new and not config.data.change and not problems:
        fix = "build the corpus with it, or set data.change=true to train on other tokens all the same"
        problems += tokenizer_errors(config.data, source.tokenizer_digest, f"ckpt={ckpt}", fix)
    return problems


def origin_errors(config: PretrainConfig, saved: Mapping[str, Any], path: Path) -> list[str]:
    """Return the problems of a run whose ckpt or resume differs from its saved origin."""
    run, stored, problems = path.parent.parent, flat_settings(saved), list[str]()
    ckpt = None if config.lora.rank else config.ckpt  # a base may be moved: its digest identifies it
    from_run = config.checkpoint.from_run if run == Path(config.out) else None
    for key, name, origin in (
        ("ckpt", ckpt, stored.get("ckpt")),
        ("resume", from_run, stored.get("checkpoint.from_run")),
    ):
        if name is not None and (origin is None or os.path.realpath(name) != os.path.realpath(str(origin))):
            clause = f"without {key}=" if origin is None else f"with {key}={origin}"
            problem = f"{key}={name}: the run in {run} has begun {clause}, and is at step {step_of(path)}"
            problems.append(f"{problem}; continue it by resume={run}, or set another out=…")
    return problems


def claim(config: PretrainConfig, ctx: ParallelContext, stack: ExitStack) -> None:
    """Lock the folder of checkpoints for this run until `stack` ends. Collective; raises UserError."""
    wait_s = min(WAIT_S, config.dist.timeout_s / 2)  # the other ranks wait for this one

    def lock() -> None:
        if not ctx.is_main:
            return
        with writing_to(config.out):
            claim_folder(config.out, "run", inputs=protected_from(config))
        stack.enter_context(single_writer(checkpoints_folder(config), wait_s=wait_s))
        marker = Path(config.out, MARKER)  # owned by the first user
        if marker.stat().st_uid != os.geteuid():
            owner, writer = owner_of(marker), user_name(os.geteuid())
            log.warning(
                "out=%s: holds files of %s, and this process writes as %s: checkpoints that it may not "
                "delete stay whole. Continue as %s, or share the folder with a group "
                "(chmod g+rws, umask 002)",
                *(Path(config.out), owner, writer, owner),
            )

    Ranks.of(ctx).together(lock, lambda error: UserError(f"out={config.out}: {error}: set another out=…"))


def resume(trainer: Trainer) -> Path | None:
    """Load the newest complete checkpoint and return its path, None for a new run; warn of damaged ones.

    Collective. Raises CorruptFileError if all are damaged, UserError if the checkpoint is of another model.
    """
    paths = _list_on_main_rank(trainer, lambda: resume_candidates(trainer.config))
    path = load_first_whole(trainer, paths)
    if path is not None and trainer.ctx.is_main and (doubt := checkpoint_doubt(path)):
        log.warning("%s is doubtful: %s; mlm ckpt rollback goes back to the newest good one", path, doubt)
    return path


def rewind(trainer: Trainer, before: int | None = None) -> Path | None:
    """Load the run's newest good checkpoint of a step below `before`, if any, and return its path.

    Collective. Raises as `resume`.
    """
    return load_first_whole(trainer, rewind_candidates(trainer, before))


def rewind_candidates(trainer: Trainer, before: int | None) -> list[str]:
    """Return the run's checkpoints of steps below `before` (None: all), the best first; good ones if any.

    Collective. Raises CheckpointError on all ranks if rank 0 cannot read the folder.
    """

    def find() -> list[Path]:
        paths = [
            path
            for path in candidates(checkpoints_folder(trainer.config))
            if before is None or int(step_directory_name(path).removeprefix("step-")) < before
        ]
        good = [path for path in paths if checkpoint_problem(path) is None and checkpoint_doubt(path) is None]
        return good or paths

    return _list_on_main_rank(trainer, find)


def _list_on_main_rank(trainer: Trainer, find: Callable[[], list[Path]]) -> list[str]:
    """Return the paths that rank 0 finds, as views of a shared disk may differ. Collective."""
    ranks = Ranks.of(trainer.ctx)
    paths = ranks.together(
        lambda: list(map(str, find())) if ranks.is_main else [],
        lambda error: CheckpointError(f"out={trainer.config.out}: {error}"),
    )
    return ranks.broadcast(paths)


def load_first_whole(trainer: Trainer, paths: Sequence[str]) -> Path | None:
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
    """Continue each corpus of the spec where the run stopped; return a line on changed data.

    Collective over all ranks. Raises UserError if a corpus differs from the one that was trained on.
    """
    config, consumed, ranks = trainer.config, trainer.consumed_samples, Ranks.of(trainer.ctx)
    if config.data.kind != "indexed":
        return None

    def compare() -> list[dict[str, object]] | None:
        if not trainer.ctx.is_main:  # one rank reads the indices
            return None
        return encode(continued_history(config, trainer.history, consumed))

    history = ranks.together(compare, lambda error: UserError(f"data: {error}"))
    trainer.history = decode(ranks.broadcast(history), consumed)
    return describe_change(trainer.history, consumed)


def continued_history(config: PretrainConfig, history: BlendSegments, consumed: int) -> BlendSegments:
    """Return the history of a run that continues with the corpora of its spec; reads their indices in full.

    Raises UserError for a corpus that differs from its earlier content, or a change without data.change.
    """
    current = sources(config.data)
    if problem := changed_corpus_problem(history, current):
        raise UserError(problem)
    continued = continue_history(history, current, consumed)
    if (changed := describe_change(continued, consumed)) and not config.data.change:
        key = next(key for key in ("blend", "train", "path") if getattr(config.data, key))
        raise UserError(
            f"data.{key}={format_value(getattr(config.data, key))}: {changed}; set data.change=true to "
            "continue so, or name the data as it was"
        )
    return continued
