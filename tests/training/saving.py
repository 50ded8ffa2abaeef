"""A checkpoint of a trainer at once."""

import uuid
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.lineage import Save
from mlm.training.state import counters, owned_shards, write_checkpoint
from mlm.training.trainer import Trainer


def save(trainer: Trainer[Any], out: Path) -> Path:
    """Write `out/checkpoints/step-…` and return it. Collective; raises CheckpointError on all ranks."""
    ctx, save_id = trainer.ctx, uuid.uuid4().hex  # of rank 0
    path = write_checkpoint(
        trainer,
        out,
        owned_shards(trainer),
        counters(trainer),
        save_id,
        group=ctx.host_group,
        watch=ctx.watch,
        staged=None,
        may_prune=lambda: True,
    )
    trainer.past = trainer.past.after(Save(trainer.step, save_id))
    return path
