"""What `mlm parity` is told: all that a pretraining run is told, and how much of it to compare."""

from dataclasses import dataclass, replace
from typing import Annotated, TypeVar

from mlm.config.fields import POSITIVE, CheckpointPath, OutFolder
from mlm.parallel.config import ParallelConfig
from mlm.train.config import PretrainConfig

FIRST_LOSS_SCALE = 2.0**14
"""Where a comparison in float16 begins: above it gradients may overflow."""

Spec = TypeVar("Spec", bound=PretrainConfig)


def comparable(config: Spec) -> Spec:
    """The run to compare: a corpus is read where one is named, since random tokens are only what there is
    without; and float16 begins at a loss scale that does not make it skip its first steps."""
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
