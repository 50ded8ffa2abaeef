"""Which part of each parameter this rank holds.

A module whose parameters are split says so in a class-level map `tp_dims` (parameter name -> split dim);
every other parameter is replicated over tp. A vocabulary-sized parameter may also have padding rows at its
global end: `true_rows` of the module tells where the real ones stop.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mlm.parallel.mesh import Axis


@dataclass(frozen=True)
class ParameterShard:
    """A parameter as one tp rank holds it."""

    name: str
    """Name in the whole model, for instance layers.3.mlp.up.weight."""
    parameter: nn.Parameter
    """This rank's part."""
    module: nn.Module
    """The module it belongs to."""
    tp_dim: int | None
    """Dim split over tp; None when every tp rank holds all of it."""
    tp: Axis
    true_size: int | None = None
    """Global size of tp_dim without padding; None when there is none."""

    @property
    def is_owner(self) -> bool:
        """Whether this rank counts and stores this part: every element has one owner among tp ranks."""
        return self.tp_dim is not None or self.tp.rank == 0

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter without padding."""
        shape = list(self.parameter.shape)
        if self.tp_dim is not None:
            shape[self.tp_dim] *= self.tp.size
            if self.true_size is not None:
                shape[self.tp_dim] = self.true_size
        return tuple(shape)

    @property
    def offset(self) -> tuple[int, ...]:
        """Where this part begins in the whole parameter."""
        first = [0] * self.parameter.dim()
        if self.tp_dim is not None:
            first[self.tp_dim] = self.tp.rank * self.parameter.shape[self.tp_dim]
        if self.true_size is not None and self.tp_dim is not None:
            first[self.tp_dim] = min(first[self.tp_dim], self.true_size)
        return tuple(first)

    def without_padding(self, x: Tensor) -> Tensor:
        """The true elements of a tensor laid out like this part (the parameter, its gradient, a moment)."""
        if self.tp_dim is None or self.true_size is None:
            return x
        size = x.shape[self.tp_dim]
        true = min(max(self.true_size - self.tp.rank * size, 0), size)
        return x.narrow(self.tp_dim, 0, true)


def parameter_shards(model: nn.Module, tp: Axis) -> Iterator[ParameterShard]:
    """Every parameter of the model once (tied ones under their first name), in definition order."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        tp_dims: dict[str, int] = getattr(module, "tp_dims", {})
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            dim = tp_dims.get(key)
            true_size = getattr(module, "true_rows", None) if dim == 0 else None
            yield ParameterShard(f"{prefix}.{key}" if prefix else key, parameter, module, dim, tp, true_size)


def shard_of(full: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's slice of a tensor cut evenly along `dim`; a contiguous copy."""
    if full.shape[dim] % axis.size:
        raise ValueError(
            f"dim {dim} of shape {tuple(full.shape)} must be divisible by {axis.name}={axis.size}"
        )
    return full.chunk(axis.size, dim)[axis.rank].contiguous()


@torch.no_grad()
def load_whole(model: nn.Module, whole: Mapping[str, Tensor], tp: Axis) -> None:
    """Fill the model's parameters with their slices of whole tensors; padding rows become zero.

    Raises KeyError for a missing name and ValueError for a shape that differs.
    """
    for shard in parameter_shards(model, tp):
        full = whole[shard.name]
        if tuple(full.shape) != shard.global_shape:
            raise ValueError(
                f"{shard.name} has shape {tuple(full.shape)}, the model needs {shard.global_shape}"
            )
        target = shard.without_padding(shard.parameter)
        shard.parameter.zero_()
        if shard.tp_dim is not None:
            full = full.narrow(shard.tp_dim, shard.offset[shard.tp_dim], target.shape[shard.tp_dim])
        target.copy_(full)
