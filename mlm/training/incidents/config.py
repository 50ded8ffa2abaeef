"""Settings of `mlm replay`, and of its ranks."""

from dataclasses import dataclass, field
from typing import Annotated

from mlm.config.fields import InputPath
from mlm.launch.config import DistConfig
from mlm.optim.config import PrecisionConfig
from mlm.runs.config import PretrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayConfig:
    """The run spec of `mlm replay`: the step of an incident once more, on one process."""

    incident: InputPath
    """Folder of an incident: out/incidents/step-…"""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """A second precision to compute the step in, if the run has another."""
    dist: DistConfig = field(default_factory=DistConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRun(PretrainConfig):
    """A replay on its ranks: the settings of the run, and what to look at."""

    folder: Annotated[str, "of the incident"] = ""
    """Folder of the incident."""
    second_precision: PrecisionConfig = field(default_factory=PrecisionConfig)
