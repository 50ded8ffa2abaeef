"""Run spec of `mlm plan calibrate`, and of the job that it starts on each rank."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from mlm.config.fields import POSITIVE, PROBABILITY, Also, Forbid, ResultFile
from mlm.launch.config import DistConfig
from mlm.parallel.config import ParallelConfig

Format = Literal["bf16", "fp16", "fp32", "fp64"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanCalibrateConfig:
    """The run spec of `mlm plan calibrate`: measure this machine, or the cluster that it is launched on."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    name: str | None = None
    """Name of the hardware in reports; null takes the processor's."""
    out: ResultFile | None = None
    """YAML to write, for hardware=FILE; null only keeps the result for hardware=this."""
    ranks: Annotated[int | None, POSITIVE, Also("nproc_per_node", "gpus")] = None
    """Ranks to start on this host; null: one for each GPU, or on a CPU for each core, at most 8. A launcher's
    ranks are taken as they are."""
    dtype: Annotated[Format | None, Also("precision")] = None
    """Format whose products are measured; null: bf16 on a GPU, fp32 on a CPU."""
    max_waiting: Annotated[float, PROBABILITY] = 0.1
    """Share of the time that a rank may wait for a processor which another program has. Above it the
    measurement is repeated once, and then rejected."""
    dist: DistConfig = field(default_factory=DistConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationJob:
    """Inputs of a calibration's rank: tp is the ranks of a host, dp the hosts."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    name: str | None = None
    out: ResultFile | None = None
    dtype: Format | None = None
    max_waiting: float = 0.1
    parallel: ParallelConfig
    dist: DistConfig = field(default_factory=DistConfig)
