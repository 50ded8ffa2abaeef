"""Settings of `mlm doctor`."""

from dataclasses import dataclass, field
from typing import Annotated

from mlm.config.fields import SECONDS, ResultFile
from mlm.launch.config import DistConfig
from mlm.parallel.config import ParallelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorConfig:
    """The run spec of `mlm doctor`: the hosts, disks and network of a run, before it."""

    out: ResultFile | None = None
    """JSON file for the result. The disk that it is on is the one that is checked; null checks that of the
    working folder."""
    timeout_s: Annotated[float, SECONDS] = 60.0
    """Seconds in which all ranks must come to each check; those that do not are named."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    dist: DistConfig = field(default_factory=DistConfig)
