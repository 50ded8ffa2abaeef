"""Settings of `mlm replay`, and of its ranks."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from mlm.config.fields import InputPath
from mlm.launch.config import DistConfig
from mlm.optim.config import PrecisionConfig
from mlm.runs.config import PretrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayConfig:
    """The run spec of `mlm replay`: the step of an incident once more, from its checkpoint."""

    incident: InputPath
    """Folder of an incident: out/incidents/step-…"""
    tp: int | None = None
    """Tensor-parallel size; null as in the run, and so are the next ones."""
    cp: int | None = None
    """Context-parallel size."""
    ep: int | None = None
    """Expert-parallel size."""
    expert_tp: int | None = None
    """Ranks that split each expert."""
    pp: int | None = None
    """Pipeline-parallel size."""
    vp: int | None = None
    """Virtual stages per pipeline rank."""
    dp: int | None = None
    """Data-parallel size."""
    zero: Literal[0, 2, 3] | None = None
    """State sharded over dp replicas."""
    sequence_parallel: bool | None = None
    """Split activations along the sequence."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """A second precision to compute the step in, if the run has another."""
    dist: DistConfig = field(default_factory=DistConfig)

    def layout(self) -> dict[str, Any]:
        """Return the settings of the layout that were chosen."""
        keys = ("tp", "cp", "ep", "expert_tp", "pp", "vp", "dp", "zero", "sequence_parallel")
        return {key: value for key in keys if (value := getattr(self, key)) is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRun(PretrainConfig):
    """A replay on its ranks: the settings of the run, and what to look at."""

    folder: Annotated[str, "of the incident"] = ""
    """Folder of the incident."""
    second_precision: PrecisionConfig = field(default_factory=PrecisionConfig)
