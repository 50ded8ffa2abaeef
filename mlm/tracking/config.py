"""Settings of what a run reports."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from mlm.config.fields import NOT_NEGATIVE, POSITIVE, Also, Forbid


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """Reports during training. metrics.jsonl is always written."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    every: Annotated[int, POSITIVE, Also("log_interval", "logging_steps", "verbose")] = 10
    """Steps between logged lines; numbers leave the device only then."""
    live: Literal["auto", "on", "off"] = "auto"
    """Live panel: auto shows it on a terminal, plain lines elsewhere."""
    timeline_every: Annotated[int, NOT_NEGATIVE] = 0
    """Steps between records of what each pipeline stage computes when, which `mlm report` draws beside the
    planned schedule; 0 for none. A step that is measured waits for all ranks first."""
    tensorboard: bool = False
    """Write TensorBoard events below out/tensorboard (needs the extra `mlm[tensorboard]`)."""
    wandb_project: Annotated[str | None, Also("wandb", "wandb_log")] = None
    """Weights & Biases project to log to (needs the extra `mlm[wandb]`)."""
