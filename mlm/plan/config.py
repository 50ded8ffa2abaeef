"""Run specs of the commands of `mlm plan`, and of the job that calibration starts on each rank."""

from dataclasses import dataclass, field
from typing import Annotated

from mlm.config.fields import NOT_NEGATIVE, POSITIVE, Aliases, Bound, OnlyIf, ResultFile
from mlm.launch.config import DistConfig
from mlm.launch.rules.layout import MAX_CPU_RANKS
from mlm.parallel.config import (
    ContextSize,
    ExpertSize,
    ParallelConfig,
    PipelineSize,
    Recompute,
    Schedule,
    TensorSize,
    VirtualSize,
    Zero,
    ZeroReduce,
)
from mlm.plan.hardware import HardwareConfig
from mlm.runs.config import MicroBatchSize, PretrainConfig, TrainConfig

HOST_RANKS = Bound(lambda x: x > 0, "greater than 0", most=MAX_CPU_RANKS)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanScheduleConfig:
    """The run spec of `mlm plan schedule`: simulate a pipeline schedule and draw it.

    Passes take as long as in arXiv:2104.04473, figures 3 and 4: a forward one 1, a backward one 2.
    """

    pp: PipelineSize = 4
    """Pipeline-parallel size, p: ranks in the pipeline."""
    vp: VirtualSize = 1
    """Virtual stages (chunks) per rank, v; more than 1 interleaves the schedule, with pipeline=1f1b."""
    micro_batches: Annotated[int, POSITIVE] = 8
    """Micro-batches of one step on each replica, m: global batch / (dp * micro-batch size)."""
    pipeline: Schedule = "1f1b"
    """Schedule: 1f1b (arXiv:2104.04473), gpipe (all forward, then all backward), zb_h1 (arXiv:2401.10241)."""
    out: ResultFile | None = None
    """File to write besides the printed picture: .svg or .png draw it (mlm[reproduce]), .json lists it; null
    writes none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchedBatchConfig(TrainConfig):
    """The batch of a search, and a run's other settings."""

    micro_batch_size: MicroBatchSize | None = None  # type: ignore[assignment]
    """Samples one rank runs through the model at once, B; null searches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchedLayoutConfig(ParallelConfig):
    """A layout; nulls are searched: cp up to 8; expert_tp and tp_overlap are not."""

    # Each may be null, unlike in a run.
    tp: TensorSize | None = None  # type: ignore[assignment]
    cp: ContextSize | None = None  # type: ignore[assignment]
    ep: ExpertSize | None = None  # type: ignore[assignment]
    pp: PipelineSize | None = None  # type: ignore[assignment]
    vp: VirtualSize | None = None  # type: ignore[assignment]
    sequence_parallel: bool | None = None  # type: ignore[assignment]
    pipeline: Schedule | None = None  # type: ignore[assignment]
    zero: Zero | None = None  # type: ignore[assignment]
    zero_reduce: ZeroReduce | None = None  # type: ignore[assignment]
    recompute: Annotated[Recompute | None, Aliases("recompute_granularity")] = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRunConfig(PretrainConfig):
    """A pretraining run that a command plans without its devices."""

    out: ResultFile | None = None  # type: ignore[assignment]  # a run folder in what it derives from
    """File to write besides the printed tables, .json or where rows are printed .csv; null writes none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanLayoutsConfig(PlannedRunConfig):
    """The run spec of `mlm plan layouts`: search the layouts of a model on a number of GPUs."""

    hardware: HardwareConfig
    gpus: Annotated[int, POSITIVE, Aliases("world_size", "num_gpus", "n_gpus")] = 8
    """GPUs to use, all of them."""
    tokens: Annotated[float | None, POSITIVE, Aliases("train_tokens", "max_tokens")] = None
    """Tokens to train on, such as 300e9: adds days and, with a price, cost."""
    price_per_gpu_hour: Annotated[float | None, POSITIVE, OnlyIf("tokens")] = None
    """Price of one GPU for an hour, in any currency; needs tokens."""
    show: Annotated[int, POSITIVE] = 10
    """Layouts to show."""
    parallel: SearchedLayoutConfig = field(default_factory=SearchedLayoutConfig)
    train: SearchedBatchConfig = field(default_factory=SearchedBatchConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCompareConfig(PlannedRunConfig):
    """The run spec of `mlm plan compare`: two layouts of a model, part by part."""

    hardware: HardwareConfig
    a: str
    """A layout as `mlm plan layouts` names it, such as "tp8 pp4 dp16 sp mb2": its words are its settings."""
    b: str
    """The layout that it is compared with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanDryRunConfig(PlannedRunConfig):
    """The run spec of `mlm plan dry-run`: a step of one rank of a pretraining run, without its devices."""

    rank: Annotated[int, NOT_NEGATIVE] = 0
    """A rank of tp * cp * pp * dp; ranks of a tensor-parallel group are neighbours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanMemoryConfig(PlanDryRunConfig):
    """The run spec of `mlm plan memory`: the memory of a rank, and of both ends of the pipeline."""

    hardware: HardwareConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCalibrateConfig:
    """The run spec of `mlm plan calibrate`: measure this machine, or the cluster that it is launched on."""

    out: ResultFile | None = None
    """YAML to write, for hardware=FILE; null only keeps the result for hardware=this."""
    ranks: Annotated[int | None, HOST_RANKS, Aliases("nproc_per_node", "gpus")] = None
    """Ranks to start on this host; null: one for each GPU, or on a CPU for each core, at most 8. A launcher's
    ranks are taken as they are."""
    dist: DistConfig = field(default_factory=DistConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationJob(PlanCalibrateConfig):
    parallel: ParallelConfig
    """tp is the ranks of a host, dp the hosts."""
