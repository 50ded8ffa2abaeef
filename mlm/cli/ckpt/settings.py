"""Settings of `mlm ckpt …`."""

from dataclasses import dataclass
from typing import Annotated

from mlm.config.fields import NOT_NEGATIVE, POSITIVE, CheckpointPath, InputPath, ResultFile, StoredCheckpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class CkptInspectConfig:
    """The run spec of `mlm ckpt inspect`: what is in a checkpoint, from its manifest alone."""

    ckpt: CheckpointPath
    """Checkpoint (step-…) or run directory (its latest checkpoint; of a finetuned run the best)."""
    tensors: bool = False
    """List every tensor with its shape, dtype and pieces, optimizer state too."""
    out: ResultFile | None = None
    """JSON file for all of it; null writes none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CkptVerifyConfig:
    """The run spec of `mlm ckpt verify`: whether checkpoints are whole, every byte read."""

    ckpt: CheckpointPath
    """Checkpoint (step-…), or run directory: then every checkpoint in it."""
    out: ResultFile | None = None
    """JSON file for the result; null writes none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CkptDiffConfig:
    """The run spec of `mlm ckpt diff`: how two checkpoints differ, whatever their layouts."""

    first: InputPath
    """Checkpoint (step-…) or run directory (its latest checkpoint; of a finetuned run the best)."""
    second: InputPath
    """The one to compare it with."""
    out: ResultFile | None = None
    """JSON file for every tensor's difference; null writes none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CkptPruneConfig:
    """The run spec of `mlm ckpt prune`: delete old checkpoints of a run."""

    ckpt: CheckpointPath
    """Run directory, or folder of checkpoints."""
    keep_last: Annotated[int, POSITIVE] = 2
    """Newest whole checkpoints kept; the one to continue from always is."""
    keep_every: Annotated[int, NOT_NEGATIVE] = 0
    """Checkpoints at multiples of this step are kept too; 0 keeps none for that."""
    dry_run: bool = False
    """Only list what would be deleted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CkptRollbackConfig:
    """The run spec of `mlm ckpt rollback`: continue a run from an earlier checkpoint."""

    ckpt: StoredCheckpoint
    """Run directory, folder of checkpoints, or s3://BUCKET/PREFIX of a run's mirror (`@STEP` names one)."""
    step: Annotated[int, NOT_NEGATIVE] | None = None
    """Step of the checkpoint to continue from; null takes the newest good one."""
