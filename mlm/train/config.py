"""Settings of a training run: every section that a rank needs."""

from dataclasses import dataclass, field
from typing import ClassVar

from mlm.config.fields import Forbid, InputPath, OutFolder
from mlm.data.config import DataConfig
from mlm.launch.config import DistConfig
from mlm.models.config import ModelConfig
from mlm.optim.config import OptimizerConfig, PrecisionConfig, ScheduleConfig
from mlm.parallel.config import ParallelConfig
from mlm.report.config import LogConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How long and in what batches."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    steps: int = 300_000
    """Optimizer steps."""
    global_batch_size: int = 512
    """Samples per step over all data-parallel ranks. A multiple of dp * micro_batch_size."""
    micro_batch_size: int = 8
    """Samples one rank runs through the model at once, B; the rest are accumulated."""
    validate_every: int = 1000
    """Steps between validations; 0 turns them off. The last step is validated too."""
    validate_batches: int = 10
    """Global batches of validation samples per validation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When to save and what to keep."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    save_every: int = 1000
    """Steps between checkpoints; 0 saves only the last."""
    keep_last: int = 2
    """Newest checkpoints kept."""
    keep_every: int = 0
    """Checkpoints at multiples of this step are never deleted; 0 keeps none for ever."""
    resume: bool = True
    """Continue from the newest whole checkpoint in `out`; false refuses an `out` that already holds one."""
    asynchronous: bool = True
    """Copy the state to host memory and write it while training goes on; false waits for the disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig:
    """The run spec of `mlm pretrain`: everything a rank needs to know."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    name: str
    """Name of the run; the default of `out` is runs/{name}."""
    out: OutFolder
    """Run directory: config, checkpoints, metrics.jsonl, curves."""
    seed: int = 1234
    """Weights, dropout and sample order are functions of it."""
    ckpt: InputPath | None = None
    """Checkpoint or run directory to take initial weights and optimizer state from."""
    compile: bool = False
    """torch.compile each transformer layer."""
    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    dist: DistConfig = field(default_factory=DistConfig)
