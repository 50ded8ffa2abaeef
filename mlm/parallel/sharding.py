"""Parts of parameters that a rank holds.

A module with split parameters has a class-level map `tp_dims` (parameter name -> split dim); all other
parameters are replicated over tp. With `replicas` r of the module, r neighbouring tp ranks hold the same part
of split parameters, and sum its gradient; `is_partial` marks replicated parameters whose gradient is a rank's
term of a sum.

Experts are also split over ep along dim 0, and have separate replicas: their module has `expert_axes`, whose
tp (the ranks that split each expert) replaces the model's.

A vocabulary-sized parameter may have padding rows at its global end after `true_rows` of the module.
`is_tied_copy` marks a module that duplicates another rank's parameters. With sharded data parallelism
(sharded.py) a rank holds only a slice of the rows of its tensor-parallel part: `DP_SLICES`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from mlm.parallel.mesh import Axis, ExpertAxes

DP_SLICES = "dp_slices"
"""Attribute of a module whose parameters are sharded over dp: parameter name -> DataParallelSlice."""


@dataclass(frozen=True)
class DataParallelSlice:
    """The rows of a tensor-parallel part that one data-parallel rank holds."""

    parameter: nn.Parameter
    """The rows, a plain tensor; possibly empty."""
    part_shape: tuple[int, ...]
    """Shape of the full tensor-parallel part."""
    first_row: int
    """Offset of the rows in that part."""
    dp: Axis


@dataclass(frozen=True)
class ParameterShard:
    """This rank's region of a parameter, for optimizer and checkpoints."""

    name: str
    """Name in the full model, for instance layers.3.mlp.up.weight."""
    parameter: nn.Parameter
    """This rank's part, a plain tensor; its `grad` is laid out alike."""
    module: nn.Module
    """The module it belongs to."""
    tp_dim: int | None
    """Dim split over tp; None for a replicated parameter."""
    tp: Axis
    true_size: int | None = None
    """Global size of tp_dim without padding; None without padding."""
    replicas: int = 1
    """Neighbouring tp ranks that hold this part of a split parameter: fewer key-value heads than tp."""
    dp_slice: DataParallelSlice | None = None
    """Slice of dim 0 over the replicas; None if each replica holds the full tp part."""
    experts: ExpertAxes | None = None
    """Axes of experts, whose dim 0 is split over their ep; None for every other parameter."""

    @property
    def is_trained(self) -> bool:
        """False for state that no gradient moves, such as the biases of routers."""
        return self.parameter.requires_grad

    @property
    def constant_side(self) -> str | None:
        """Side of the weight, in or out, that a wider model keeps: `constant_sides` of its module."""
        sides: Mapping[str, str] = getattr(self.module, "constant_sides", {})
        return sides.get(self.name.rpartition(".")[2])

    @cached_property
    def is_owner(self) -> bool:
        """True if this rank counts this part: every element has one owner among the ranks that split it.

        These are the tp ranks, and the dp ranks too if `dp_slice` is set; otherwise each replica has an
        owner. A tied copy has none.
        """
        if getattr(self.module, "is_tied_copy", False):
            return False
        return self.tp.rank % (self.tp.size if self.tp_dim is None else self.replicas) == 0

    def replica_axis(self, replicas: Axis) -> Axis:
        """Ranks with the same part, tp aside: `replicas` of the model, or of experts."""
        return replica_axis(self.module, replicas)

    def is_stored(self, replicas: Axis) -> bool:
        """True on the one rank that writes this part: the first of equal `replicas` of the model."""
        return self.is_owner and (self.dp_slice is not None or self.replica_axis(replicas).rank == 0)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the tp rank's shard, before sharding over dp."""
        return tuple(self.parameter.shape) if self.dp_slice is None else self.dp_slice.part_shape

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the full parameter without padding."""
        shape = list(self.part_shape)
        if self.tp_dim is not None:
            shape[self.tp_dim] *= self.tp.size // self.replicas
            if self.true_size is not None:
                shape[self.tp_dim] = self.true_size
        if self.experts is not None:
            shape[0] *= self.experts.ep.size
        return tuple(shape)

    @property
    def offset(self) -> tuple[int, ...]:
        """Offset of this part in the full parameter; the end for a part of padding only."""
        first = [0] * self.parameter.dim()
        if self.tp_dim is not None:
            first[self.tp_dim] = self.tp.rank // self.replicas * self.part_shape[self.tp_dim]
        if self.experts is not None:
            first[0] += self.experts.ep.rank * self.part_shape[0]
        if self.dp_slice is not None:
            first[0] += self.dp_slice.first_row
        if self.tp_dim is not None and self.true_size is not None:
            first[self.tp_dim] = min(first[self.tp_dim], self.true_size)
        return tuple(first)

    def without_padding(self, x: Tensor) -> Tensor:
        """Remove padding from a tensor laid out like this part (parameter, gradient, moment)."""
        if self.tp_dim is None or self.true_size is None:
            return x
        true = min(self.true_size - self.offset[self.tp_dim], x.shape[self.tp_dim])
        return x.narrow(self.tp_dim, 0, true)


def replica_axis(module: nn.Module, replicas: Axis) -> Axis:
    """Ranks with the same parameters of a module: `replicas` of the model, or of experts."""
    axes: ExpertAxes | None = getattr(module, "expert_axes", None)
    return replicas if axes is None or axes.replicas is None else axes.replicas


def parameter_shards(model: nn.Module, tp: Axis) -> Iterator[ParameterShard]:
    """Yield each parameter of the model once (tied ones by their first name), in definition order."""
    visited: set[int] = set()
    for prefix, module in model.named_modules():
        tp_dims: dict[str, int] = getattr(module, "tp_dims", {})
        slices: dict[str, DataParallelSlice] = getattr(module, DP_SLICES, {})
        for key, parameter in module.named_parameters(recurse=False):
            dp_slice = slices.get(key)
            local = parameter if dp_slice is None else dp_slice.parameter
            if id(local) in visited:
                continue
            visited.add(id(local))
            dim = tp_dims.get(key)
            true_size = getattr(module, "true_rows", None) if dim == 0 else None
            name = f"{prefix}.{key}" if prefix else key
            replicas = 1 if dim is None else getattr(module, "replicas", 1)
            experts: ExpertAxes | None = getattr(module, "expert_axes", None)
            ranks = tp if experts is None else experts.tp
            yield ParameterShard(name, local, module, dim, ranks, true_size, replicas, dp_slice, experts)


def parameters_by_axis(model: nn.Module, replicas: Axis) -> dict[Axis, list[nn.Parameter]]:
    """Group the parameters of a model with these replicas by the axis that replicates each."""
    by_axis: dict[Axis, list[nn.Parameter]] = {replicas: []}
    visited: set[nn.Parameter] = set()
    for module in model.modules():
        axis = replica_axis(module, replicas)
        for parameter in module.parameters(recurse=False):
            if parameter not in visited:
                by_axis.setdefault(axis, []).append(parameter)
                visited.add(parameter)
    return by_axis


def shard_of(full: Tensor, axis: Axis, dim: int) -> Tensor:
    """This rank's slice of a tensor split evenly along `dim`; a contiguous copy."""
    if full.shape[dim] % axis.size:
        raise ValueError(
            f"dim {dim} of shape {tuple(full.shape)} must be divisible by {axis.name}={axis.size}"
        )
    return full.chunk(axis.size, dim)[axis.rank].contiguous()


@torch.no_grad()
def load_full(model: nn.Module, tensors: Mapping[str, Tensor], tp: Axis) -> None:
    """Fill the model's parameters with their slices of full tensors; padding rows become zero.

    Raises KeyError for a missing name and ValueError for a shape that differs.
    """
    for shard in parameter_shards(model, tp):
        full = tensors[shard.name]
        if tuple(full.shape) != shard.global_shape:
            raise ValueError(
                f"{shard.name} has shape {tuple(full.shape)}, the model needs {shard.global_shape}"
            )
        target = shard.without_padding(shard.parameter)
        shard.parameter.zero_()
        region = (slice(o, o + n) for o, n in zip(shard.offset, target.shape, strict=True))
        target.copy_(full[tuple(region)])
