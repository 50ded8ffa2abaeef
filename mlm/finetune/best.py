"""The best checkpoint of a finetuning run, and its checkpoints' record of the validations so far.

A run directory has two folders of checkpoints: `checkpoints`, to resume from, and `best/checkpoints`, weights
alone. A best one is deleted only when no checkpoint to resume from, on disk or being written, names it: a
run that is killed at any time finds the best one it knew of when it resumes.
"""

from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.folders import (
    BEST,
    checkpoints,
    discard,
    latest_checkpoint,
    named_latest,
    point_latest,
    step_name,
)
from mlm.checkpoint.native.lineage import LINEAGE
from mlm.checkpoint.native.save_load import read_manifest, save_checkpoint
from mlm.config.build import from_dict
from mlm.training.state import CHECKPOINTS, FINETUNING, counters, is_stored, model_shards
from mlm.training.trainer import Trainer
from mlm.util.errors import CorruptFileError, UserError, writing_to

DATA_PATH = "data.path"
"""Key in the state of the absolute path of the rows; null if they are the Hub's."""
BASE = "base"
"""Key in the state of the name of the model that finetuning began with: an id of the Hub, or a run's name."""
ALL = 1 << 30

Scores = dict[str, dict[str, float]]
"""Metrics by split."""


@dataclass
class Progress:
    """The validations of a run so far."""

    best_step: int | None = None
    """Step of the best score; None before the first validation."""
    scores: Scores = field(default_factory=dict)
    """Metrics of that step."""
    without_gain: int = 0
    """Validations since then."""
    tokens: int = 0
    """Tokens trained on, padding left out."""
    warnings: list[str] = field(default_factory=list)
    """Lines on the predictions of that step."""

    def add(self, step: int, scores: Scores, errors: Collection[str] = ()) -> bool:
        """Add a validation; return True if it is the best by the first metric of the first split.

        Of equals the earlier is the best; of a metric in `errors` less is better.
        """
        if self.best_step is None or merit(scores, errors) > merit(self.scores, errors):
            self.best_step, self.scores, self.without_gain = step, scores, 0
            return True
        self.without_gain += 1
        return False

    def saved(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)

    @classmethod
    def read(cls, state: Any, path: Path) -> "Progress":
        """Read the state of a checkpoint. Raises CorruptFileError."""
        try:
            return from_dict(cls, state[FINETUNING]["progress"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFileError(
                f"{path}: its state is not that of a finetuning run ({error!r})"
            ) from error


def merit(scores: Scores, errors: Collection[str] = ()) -> float:
    """Return the number that the best checkpoint has most of: the first metric, or less of an error."""
    name, value = next(iter(next(iter(scores.values())).items()))
    return -value if name in errors else value


def save_best(trainer: Trainer, out: Path) -> None:
    """Write out/best/checkpoints/step-…, weights alone; those before stay until `keep_bests`.

    Collective over all ranks; raises CheckpointError on all of them.
    """
    ctx = trainer.ctx
    facts = {key: value for key, value in counters(trainer).items() if key != LINEAGE}  # of the other folder
    owned = [shard for shard in trainer.shards if is_stored(shard, ctx)]
    save_checkpoint(
        best_checkpoints(out),
        trainer.step,
        model_shards(owned, trainer.config.model.vocab_multiple),
        state={**facts, "weights_only": True},
        rank=ctx.rank,
        world_size=ctx.world_size,
        group=ctx.host_group,
        watch=ctx.watch,
        keep_last=ALL,
        keep_every=0,
    )


def keep_bests(out: Path, steps: Collection[int | None]) -> None:
    """Delete the best checkpoints but those of `steps` and those that a checkpoint to resume from names.

    For one rank. Never raises: a leftover does no harm.
    """
    try:
        named = {best_step_of(path) for path in checkpoints(out / CHECKPOINTS).values()}
        for step, path in checkpoints(best_checkpoints(out)).items():
            if step not in {*steps, *named}:
                discard(path)
    except UserError:
        pass  # a folder that cannot be read now: the next validation tidies up


def best_step_of(path: Path) -> int | None:
    """Return the best step that a checkpoint names; None if it names none, or is damaged."""
    try:
        return Progress.read(read_manifest(path).state, path).best_step
    except (UserError, OSError):
        return None


def go_back_to(out: Path, step: int | None) -> None:
    """Make the best checkpoint that of a step again, as a resumed run knows it. For one rank.

    A better one after it is found again, since the same steps are taken again. Raises UserError,
    CorruptFileError.
    """
    root = best_checkpoints(out)
    found = checkpoints(root)
    if step is not None and step not in found:
        raise CorruptFileError(
            f"{root}: {step_name(step)} is gone, which the newest of {out / CHECKPOINTS} names as the best: "
            "restore it, or set another out=…"
        )
    with writing_to(str(out)):
        if step is not None and named_latest(root) != step_name(step):
            point_latest(root, step)
        for other, path in found.items():
            if other != step:
                discard(path)


def best_folder(out: Path) -> Path:
    """Return the folder of a run's best checkpoint."""
    return out / BEST


def best_checkpoints(out: Path) -> Path:
    """Return the folder of step-… in it."""
    return best_folder(out) / CHECKPOINTS


def best_of(ckpt: str) -> str:
    """Return the folder of a finetuning run's best checkpoint; any other path as it is."""
    found = latest_checkpoint(best_checkpoints(Path(ckpt)))
    return ckpt if found is None else str(best_folder(Path(ckpt)))
