"""Log-likelihoods of pairs by the model before preference training, computed once and kept in the run."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.format import canonical
from mlm.finetune.batches import Batcher
from mlm.finetune.config import FinetuneConfig
from mlm.finetune.examples import Example
from mlm.finetune.inputs import Settings
from mlm.finetune.packing import Packer, PairLoss, set_reference
from mlm.finetune.splits import TokenizedSplit
from mlm.parallel.mesh import ParallelContext
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError, writing_to
from mlm.util.files import digest_bytes, write_atomic

DEPENDS_ON = ("ckpt", "task.max_length", "precision.dtype")
"""Settings that it is a function of, with those of data.*."""


class Reference:
    """Log-likelihoods of the answers of splits, in out/reference-….npy; the name digests their inputs."""

    def __init__(self, config: FinetuneConfig, settings: Settings, splits: Sequence[TokenizedSplit]) -> None:
        used = {key: settings[key] for key in settings if key in DEPENDS_ON or key.startswith("data.")}
        digest = digest_bytes(canonical(cast(Any, used))).rpartition(":")[2]
        self.out, self.file = config.out, Path(config.out, f"reference-{digest[:16]}.npy")
        self.splits = splits

    @property
    def examples(self) -> list[Example]:
        """All pairs."""
        return [example for split in self.splits for example in split.examples]

    def read(self, ctx: ParallelContext) -> bool:
        """Give the pairs what is kept; return False if there is nothing. Collective."""

        def look() -> list[Any]:
            if not ctx.is_main:
                return []
            try:
                kept = np.load(self.file, allow_pickle=False)
            except (OSError, ValueError, EOFError):  # none, or damaged: it is asked again
                return []
            is_whole = kept.dtype == np.float64 and kept.shape == (len(self.examples), 2)
            return kept.tolist() if is_whole and np.isfinite(kept).all() else []

        ranks = Ranks.of(ctx)
        kept = ranks.broadcast(ranks.together(look, lambda error: UserError(f"{self.file}: {error}")))
        for example, (chosen, rejected) in zip(self.examples, kept, strict=False):
            example.label.reference = chosen, rejected
        return bool(kept)

    def ask(self, trainer: Trainer[Any], batcher: Batcher) -> None:
        """Compute them by the weights that the trainer holds. Collective."""
        objective = cast(PairLoss, trainer.objective)
        for split in self.splits:
            set_reference(trainer.model, objective, split.examples, cast(Packer, batcher))

    def write(self) -> None:
        """Keep them. Raises UserError."""
        content = io.BytesIO()
        np.save(content, np.array([example.label.reference for example in self.examples]))
        with writing_to(self.out):
            write_atomic(self.file, content.getvalue())
