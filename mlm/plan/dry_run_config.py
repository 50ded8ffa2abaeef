"""Run spec of `mlm plan dry-run`."""

from dataclasses import dataclass
from typing import Annotated

from mlm.config.fields import NOT_NEGATIVE, ResultFile
from mlm.training.config import PretrainConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanDryRunConfig(PretrainConfig):
    """The run spec of `mlm plan dry-run`: a step of one rank of a pretraining run, without its devices."""

    rank: Annotated[int, NOT_NEGATIVE] = 0
    """The rank to run, of tp * pp * dp; ranks of a tensor-parallel group are neighbours."""
    out: ResultFile | None = None  # type: ignore[assignment]  # a run folder in what it derives from
    """File to write beside the printed tables: .json; null writes none."""
