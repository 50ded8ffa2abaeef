"""Run specs of the commands of `mlm plan`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from mlm.config.fields import NOT_NEGATIVE, POSITIVE, Forbid, ResultFile
from mlm.parallel.config import PipelineSize, VirtualSize


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanScheduleConfig:
    """The run spec of `mlm plan schedule`: simulate a pipeline schedule and draw it.

    Costs are durations in any one unit; the defaults are those of arXiv:2104.04473, figures 3 and 4.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    pp: PipelineSize = 4
    """Pipeline-parallel size, p: ranks in the pipeline."""
    vp: VirtualSize = 1
    """Virtual stages (chunks) per rank, v; more than 1 interleaves the schedule, with pipeline=1f1b."""
    micro_batches: Annotated[int, POSITIVE] = 8
    """Micro-batches of one step on each replica, m: global batch / (dp * micro-batch size)."""
    pipeline: Literal["1f1b", "gpipe", "zb_h1"] = "1f1b"
    """Schedule: 1f1b (arXiv:2104.04473), gpipe (all forward, then all backward), zb_h1 (arXiv:2401.10241)."""
    out: ResultFile | None = None
    """File to write beside the printed picture: .svg, .png, or .json for the whole plan; null writes none."""
    forward_cost: Annotated[float, POSITIVE] = 1.0
    """Duration of one micro-batch forward through one chunk: 1/vp of a rank's layers."""
    backward_cost: Annotated[float, POSITIVE] = 2.0
    """Duration of its backward, both gradients (1f1b, gpipe)."""
    input_gradient_cost: Annotated[float, POSITIVE] = 1.0
    """Duration of the gradient of its input alone (zb_h1)."""
    weight_gradient_cost: Annotated[float, POSITIVE] = 1.0
    """Duration of the gradient of its weights alone (zb_h1)."""
    transfer_cost: Annotated[float, NOT_NEGATIVE] = 0.0
    """Duration of one transfer between ranks; computation continues meanwhile."""
