"""A checkpoint of a trainer at once."""

import uuid
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.folders import CHECKPOINTS
from mlm.checkpoint.native.run_state import Save
from mlm.checkpoint.native.save_load import save_checkpoint
from mlm.training.state import counters, owned_shards
from mlm.training.trainer import Trainer


def save(trainer: Trainer[Any], out: Path) -> Path:
    """Write `out/checkpoints/step-…` and return it. Collective; raises CheckpointError on all ranks."""
    ctx, save_id = trainer.ctx, uuid.uuid4().hex  # of rank 0
    path = save_checkpoint(
        out / CHECKPOINTS,
        trainer.step,
        owned_shards(trainer),
        state=counters(trainer),
        ranks=Ranks.of(ctx),
        keep_last=trainer.config.checkpoint.keep_last,
        keep_every=trainer.config.checkpoint.keep_every,
        save_id=save_id,
    )
    trainer.ancestry = trainer.ancestry.after(Save(trainer.step, save_id))
    return path
