"""The best checkpoint of a finetuning run, and the record of the validations so far.

A run directory has two folders of checkpoints: `checkpoints`, to resume from, and `best/checkpoints`, weights
alone with the validations up to them. A run that is resumed takes the same steps again, and with them the
same best ones; its result is that of the checkpoint in `best`.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.folders import BEST, CHECKPOINTS, latest_checkpoint
from mlm.checkpoint.native.run_state import FINETUNING, LINEAGE
from mlm.checkpoint.native.save_load import read_manifest, save_checkpoint
from mlm.checkpoint.parameters import model_shards
from mlm.config.build import from_dict
from mlm.training.state import counters, is_stored, stored_shards
from mlm.training.trainer import Trainer
from mlm.util.errors import CorruptFileError

DATA_PATH = "data.path"
"""Key in the state of the absolute path of the rows; null if they are the Hub's."""
DATA_COLUMNS = "data.columns"
"""Key in the state of the names of columns in these rows, by ours."""
BASE = "base"
"""Key in the state of the name of the model that finetuning began with: an id of the Hub, or a run's name."""

Scores = dict[str, dict[str, float]]
"""Metrics by split."""


@dataclass
class Progress:
    """The validations of a run so far."""

    best_step: int | None = None
    """Step of the best score; None before the first validation."""
    scores: Scores = field(default_factory=dict)
    """Metrics of that step."""
    merit: float = 0.0
    """That of these scores."""
    without_gain: int = 0
    """Validations since then."""
    tokens: int = 0
    """Tokens trained on, padding left out."""

    def add(self, step: int, scores: Scores, errors: Collection[str] = ()) -> bool:
        """Add a validation; return True if it is the best by the first metric of the first split.

        Of equals the earlier is the best; of a metric in `errors` less is better.
        """
        value = merit(scores, errors)
        if self.best_step is None or value > self.merit:
            self.best_step, self.scores, self.merit, self.without_gain = step, scores, value, 0
            return True
        self.without_gain += 1
        return False

    @classmethod
    def read(cls, checkpoint: Path) -> "Progress":
        """Read the validations up to a checkpoint. Raises CorruptFileError."""
        state: Any = read_manifest(checkpoint).state
        try:
            return from_dict(cls, state[FINETUNING]["progress"])
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFileError(
                f"{checkpoint}: its state is not that of a finetuning run ({error!r})"
            ) from error


def merit(scores: Scores, errors: Collection[str] = ()) -> float:
    """Return the number that the best checkpoint has most of: the first metric, or less of an error."""
    name, value = next(iter(next(iter(scores.values())).items()))
    return -value if name in errors else value


def save_best(trainer: Trainer, out: Path) -> None:
    """Write out/best/checkpoints/step-…, weights alone, in place of the one before.

    Collective over all ranks; raises CheckpointError on all of them.
    """
    ctx = trainer.ctx
    facts = {key: value for key, value in counters(trainer).items() if key != LINEAGE}  # of the other folder
    owned = [s for s in stored_shards(trainer, trainer.shards) if is_stored(s, ctx)]
    save_checkpoint(
        best_folder(out) / CHECKPOINTS,
        trainer.step,
        model_shards(owned, trainer.config.model.vocab_multiple),
        state={**facts, "weights_only": True},
        ranks=Ranks.of(trainer.ctx),
        keep_last=1,
        keep_every=0,
    )


def best_folder(out: Path) -> Path:
    """Return the folder of a run's best checkpoint."""
    return out / BEST


def resolve_best(ckpt: str) -> str:
    """Return the folder of a finetuning run's best checkpoint; any other path as it is."""
    best = latest_checkpoint(best_folder(Path(ckpt)) / CHECKPOINTS)
    return ckpt if best is None else str(best_folder(Path(ckpt)))
