"""That contenders compute the same thing: loss and gradients on one batch, before anything is timed."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mlm.util.errors import UserError

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2}
"""Largest ‖g - r‖ / ‖r‖ of any parameter's gradient g against the reference's r. float32: the order of sums.
bfloat16 keeps 8 bits, and each contender rounds at other places."""
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-3}
"""Largest relative difference of the mean loss."""


@dataclass(frozen=True)
class Reference:
    """Mean loss and whole gradients, in mlm's names, of the first batch and the initial weights."""

    loss: float
    gradients: Mapping[str, Tensor]
    dtype: str = "fp32"
    """Of activations."""

    def save(self, path: Path) -> None:
        from safetensors.torch import save_file  # not needed where all is compared in one process

        tensors = {name: g.contiguous() for name, g in self.gradients.items()}
        tensors["loss"] = torch.tensor(self.loss, dtype=torch.float64)
        save_file(tensors, path, {"dtype": self.dtype})

    @classmethod
    def load(cls, path: Path) -> "Reference":
        from safetensors import safe_open

        with safe_open(path, "pt") as f:
            tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118  (not a mapping)
            dtype = f.metadata()["dtype"]
        return cls(float(tensors.pop("loss")), tensors, dtype)


@dataclass(frozen=True)
class Agreement:
    """Difference of a contender from the reference; 0.0 for the reference itself."""

    loss_error: float
    gradient_error: float
    worst: str
    """The parameter with the largest error."""


@torch.no_grad()
def agreement(name: str, found: Reference, reference: Reference) -> Agreement:
    """Compare with the reference, to the tolerance of the wider rounding of the two.

    Raises UserError if loss or a gradient differs more.
    """
    loss, gradients = found.loss, found.gradients
    dtype = "bf16" if "bf16" in (found.dtype, reference.dtype) else "fp32"
    if missing := set(reference.gradients) ^ set(gradients):
        raise UserError(f"{name} and the reference differ in parameters: {', '.join(sorted(missing)[:5])}")
    loss_error = abs(loss - reference.loss) / abs(reference.loss)
    errors = {
        key: float((g.double() - reference.gradients[key].double()).norm())
        / max(float(reference.gradients[key].double().norm()), 1e-30)
        for key, g in gradients.items()
    }
    worst = max(errors, key=lambda key: errors[key])
    if not (loss_error <= LOSS_TOLERANCE[dtype] and errors[worst] <= TOLERANCE[dtype]):
        raise UserError(
            f"{name} does not compute the same: loss {loss:.7g} against {reference.loss:.7g}, and the "
            f"gradient of {worst} differs by {errors[worst]:.1e} (allowed in {dtype}: "
            f"{TOLERANCE[dtype]:.0e}). Not timed"
        )
    return Agreement(loss_error, errors[worst], worst)
