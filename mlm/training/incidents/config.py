"""Settings of `mlm replay`."""

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from mlm.config.fields import Forbid, InputPath
from mlm.launch.config import DistConfig
from mlm.optim.config import PrecisionConfig
from mlm.training.config import PretrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayConfig:
    """The run spec of `mlm replay`: the step of an incident once more, from its checkpoint."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    incident: InputPath
    """Folder of an incident: out/incidents/step-…"""
    tp: int | None = None
    """Tensor-parallel size; null as in the run, and so are the next ones."""
    cp: int | None = None
    """Context-parallel size."""
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
    """Computes the step too, beside the run's own precision if that is another."""
    bisect: bool = True
    """Search for the sample that causes it, by computing halves of the batch."""
    dist: DistConfig = field(default_factory=DistConfig)

    def layout(self) -> dict[str, Any]:
        """Return the settings of the layout that were chosen."""
        names = ("tp", "cp", "pp", "vp", "dp", "zero", "sequence_parallel")
        return {key: value for key, value in asdict(self).items() if key in names and value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRun(PretrainConfig):
    """A replay on its ranks: the settings of the run, and what to look at."""

    folder: Annotated[str, "of the incident"] = ""
    """Folder of the incident."""
    beside: PrecisionConfig = field(default_factory=PrecisionConfig)
    """Second precision."""
    bisect: bool = True
    """Search for the sample."""
