"""Run spec of `mlm parity`: that of a pretraining run, and the number of steps to compare."""

from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

from mlm.config.fields import POSITIVE, CheckpointPath, OutFolder
from mlm.parallel.config import ParallelConfig
from mlm.training.config import PretrainConfig

FIRST_LOSS_SCALE = 2.0**14
"""Initial loss scale of a comparison in float16: above it gradients may overflow."""

Spec = TypeVar("Spec", bound=PretrainConfig)


def comparable(config: Spec) -> Spec:
    """Return the run to compare.

    It reads a corpus if one is named, even where the run's data are synthetic; and float16 starts at a loss
    scale that skips none of the first steps.
    """
    data, precision = config.data, config.precision
    if data.path is not None or data.train is not None or data.blend:
        data = replace(data, kind="indexed")
    if precision.dtype == "fp16":
        scale = max(min(precision.initial_loss_scale, FIRST_LOSS_SCALE), precision.min_loss_scale)
        precision = replace(precision, initial_loss_scale=scale)
    return replace(config, data=data, precision=precision)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityConfig(PretrainConfig):
    """The run spec of `mlm parity`: the first steps of a pretraining run, on its layout and on one rank."""

    out: OutFolder
    """Folder for parity.json, which holds every number compared."""
    ckpt: CheckpointPath | None = None
    """Checkpoint or run directory to take weights from, instead of the initial ones."""
    steps: Annotated[int, POSITIVE] = 3
    """Optimizer steps compared. Two show the effect of a wrong update; more show nothing new."""

    def comparable(self) -> "ParityConfig":
        """The run to compare."""
        return comparable(self)

    def on_one_process(self) -> "ParityConfig":
        """The same run without any parallelism, recomputation or compilation."""
        return replace(self, parallel=ParallelConfig(dp=1), compile=False)
