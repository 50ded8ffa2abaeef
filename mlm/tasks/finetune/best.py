"""What a finetuning run remembers of its validations, and the checkpoint of the best of them."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlm.checkpoint.save_load import latest_checkpoint, save_checkpoint
from mlm.config.errors import CorruptFileError
from mlm.train.state import CHECKPOINTS, counters, is_stored, model_shards
from mlm.train.trainer import Trainer

BEST = "best"
"""Folder of a run directory with the best weights; its own checkpoints and tokenizer lie in it."""
STATE = "finetuning"
"""Key of what a checkpoint's state says of the task."""

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
    last_step: int = 0
    """Step of the last validation."""
    tokens: int = 0
    """Tokens trained on, padding left out."""

    def add(self, step: int, scores: Scores) -> bool:
        """Note a validation; returns whether it is the best. The first metric of the first split decides."""
        self.last_step = step
        if self.best_step is None or first_metric(scores) > first_metric(self.scores):
            self.best_step, self.scores, self.without_gain = step, scores, 0
            return True
        self.without_gain += 1
        return False

    @classmethod
    def read(cls, state: Any, path: Path) -> "Progress":
        """What a checkpoint's state holds. Raises CorruptFileError."""
        try:
            return cls(**state[STATE]["progress"])
        except (KeyError, TypeError) as error:
            raise CorruptFileError(
                f"{path}: its state is not that of a finetuning run ({error!r})"
            ) from error


def first_metric(scores: Scores) -> float:
    """What decides which checkpoint is the best."""
    return next(iter(next(iter(scores.values())).values()))


def save_best(trainer: Trainer, out: Path) -> Path:
    """Write out/best/checkpoints/step-…, weights alone, in place of the one before.

    Collective over all ranks; raises CheckpointError on all of them.
    """
    ctx = trainer.ctx
    owned = [shard for shard in trainer.shards if is_stored(shard, ctx)]
    return save_checkpoint(
        best_folder(out) / CHECKPOINTS,
        trainer.step,
        model_shards(owned, trainer.config.model.vocab_multiple),
        state={**counters(trainer), "weights_only": True},
        rank=ctx.rank,
        world_size=ctx.world_size,
        group=ctx.host_group,
        watch=ctx.watch,
        keep_last=1,
        keep_every=0,
    )


def best_folder(out: Path) -> Path:
    """Where a run keeps its best checkpoint."""
    return out / BEST


def best_of(ckpt: str) -> str:
    """The folder of the best checkpoint of a finetuning run directory; what else is named stays as it is."""
    best = best_folder(Path(ckpt))
    found = best.is_dir() and latest_checkpoint(best / CHECKPOINTS) is not None
    return str(best) if found else ckpt


def saved_progress(progress: Progress) -> dict[str, Any]:
    """As JSON values."""
    return asdict(progress)
