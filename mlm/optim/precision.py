"""Dynamic loss scaling for float16 (arXiv:1909.08053, section 4.2), kept on the device.

Start high; an overflow halves the scale and skips the step; `window` clean steps double it. All ranks have
the same global gradient norm, so they agree without another message.
"""

from typing import Any

import torch
from torch import Tensor

from mlm.optim.config import PrecisionConfig

DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
    "fp64": torch.float64,
}
"""Compute dtypes by their configuration names."""


def parameter_dtype(precision: PrecisionConfig) -> torch.dtype:
    return torch.float64 if precision.dtype == "fp64" else torch.float32


class LossScaler:
    """Factor of the loss before backward: 1 except in float16.

    Attributes:
        scale: 0-d float32 tensor on the device.
        skipped: 0-d int64 tensor: steps skipped for non-finite gradients.
    """

    def __init__(self, config: PrecisionConfig, device: torch.device) -> None:
        self.config = config
        self.dynamic = config.dtype == "fp16"
        self.scale = torch.tensor(config.initial_loss_scale if self.dynamic else 1.0, device=device)
        self.clean_steps = torch.zeros((), dtype=torch.int32, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)

    @torch.no_grad()
    def update(self, overflow: Tensor) -> None:
        """Adapt the scale to a step: `overflow` (0-d) is 1.0 if its gradients were not finite. No sync."""
        self.skipped += overflow.to(torch.int64)
        if not self.dynamic:
            return
        torch._amp_update_scale_(
            self.scale, self.clean_steps, overflow, 2.0, 0.5, self.config.loss_scale_window
        )
        self.scale.clamp_(min=self.config.min_loss_scale)

    def state(self) -> dict[str, Any]:
        return {
            "scale": self.scale.item(),
            "clean_steps": self.clean_steps.item(),
            "skipped": self.skipped.item(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; a changed precision keeps its own initial scale."""
        if self.dynamic and state["scale"] != 1.0:
            self.scale.fill_(state["scale"])
        self.clean_steps.fill_(state["clean_steps"])
        self.skipped.fill_(state["skipped"])
