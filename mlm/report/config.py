"""Settings of what a run reports."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from mlm.config.fields import POSITIVE, Also, Forbid


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """Reports during training. metrics.jsonl is always written."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    every: Annotated[int, POSITIVE, Also("log_interval", "logging_steps", "verbose")] = 10
    """Steps between logged lines; numbers leave the device only then."""
    live: Literal["auto", "on", "off"] = "auto"
    """Live panel: auto shows it on a terminal, plain lines elsewhere."""
    tensorboard: bool = False
    """Write TensorBoard events below out/tensorboard (needs the extra `mlm[tensorboard]`)."""
    wandb_project: Annotated[str | None, Also("wandb", "wandb_log")] = None
    """Weights & Biases project to log to (needs the extra `mlm[wandb]`)."""
