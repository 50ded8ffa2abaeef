"""Copies between the host and a device that nobody waits for."""

import torch
from torch import Tensor


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor on a device, by way of page-locked memory; others would make the host wait."""
    if device.type == "cuda" and x.device.type == "cpu" and not x.is_pinned():
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


class ToHost:
    """A copy of a device's tensor on its way to the host."""

    def __init__(self, x: Tensor) -> None:
        """Begin to copy what is computed so far."""
        self.arrived: torch.cuda.Event | None = None
        if x.device.type == "cuda":
            self.x = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self.x.copy_(x, non_blocking=True)
            self.arrived = torch.cuda.Event()
            self.arrived.record()
        else:
            self.x = x

    def read(self) -> list[float]:
        """Return its numbers; wait for them, but for nothing that the device was given later."""
        if self.arrived is not None:
            self.arrived.synchronize()
        values: list[float] = self.x.tolist()
        return values
