"""Description of code to audit: a module or a step, its batch, and the splits of its tensors."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

AXES = ("pp", "dp", "cp", "tp")
"""Axes of the mesh that a build function receives, outermost first; those not asked for have size 1."""
WRAPPERS = re.compile(r"(^|(?<=\.))(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(\.|$)")


@dataclass(frozen=True)
class Split:
    """A dimension that is split over an axis of the mesh, in the order of its ranks."""

    dim: int
    axis: str = "tp"
    blocks: int = 1
    """Parts of the dimension that are split each: 3 where a rank holds slices of q, k and v in turn."""
    is_zigzag: bool = False
    """True if each rank holds two pieces, as far from either end: of sequences split over cp."""


def plain_name(name: str) -> str:
    """A name without the prefixes of DDP, `torch.compile`, FSDP and activation checkpointing."""
    return WRAPPERS.sub("", name).rstrip(".")


@dataclass(kw_only=True)
class AuditSubject:
    """One rank's part of a training step; at a mesh of size 1 it is the reference.

    The audit runs `step`, or `module(batch)`, `loss` and backward; then `reduce`, `clip` and
    `optimizer.step()`, each where it is given.
    """

    module: nn.Module
    """This rank's module, wrapped as it trains; of several pipeline stages an `nn.ModuleList`."""
    batch: Any = None
    """This rank's samples: a tensor, a tuple of positional or a mapping of keyword arguments."""
    loss: Callable[[Any], Tensor] | None = None
    """Loss of the module's output; None where that is the loss itself."""
    step: Callable[[], Tensor | None] | None = None
    """Forward and backward; returns the loss, or None on ranks that have none. It may step `optimizer`."""
    reduce: Callable[[], object] | None = None
    """Reduction of gradients after backward, where no wrapper does it."""
    clip: Callable[[], Tensor | float] | None = None
    """Clips gradients; returns their norm."""
    optimizer: Optimizer | None = None
    placements: Mapping[str, Split | None] = field(default_factory=dict)
    """Splits of parameters by pattern ("*.qkv.weight"), None for copies. DTensor and Megatron's attributes
    say it themselves, and of others the shapes do, where they are split over tp in one block."""
    names: Callable[[str], str] = str
    """Name on one process of a module or parameter, from its name on this rank: for pipeline stages."""
