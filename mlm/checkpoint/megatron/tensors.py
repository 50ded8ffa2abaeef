"""The tensors in the files of a Megatron-LM run: names, types, and copies that must agree."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlm.checkpoint.megatron.args import Settings, family_names, mappings, unsupported
from mlm.checkpoint.megatron.files import RankFiles, shown
from mlm.models.megatron import HEAD, MegatronMapping
from mlm.util.errors import ConfigError, CorruptFileError, UserError

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_DEPTH, _MAX_NODES = 8, 1 << 17  # of the dictionaries in a file; they may hold themselves

Named = Mapping[str, Any]
"""Part of the model in a file: Megatron-LM's names -> values."""


def named_values(path: Path, chunk: Any) -> dict[str, Any]:
    """Flatten a dictionary of dictionaries: dotted name -> value, in order. Raises CorruptFileError."""
    if not isinstance(chunk, dict):
        raise CorruptFileError(f"{path}: its model is no dictionary: copy it again")
    found: dict[str, Any] = {}
    open_nodes: list[tuple[str, int, Any]] = [("", 0, chunk)]
    visited = 0
    while open_nodes:
        prefix, depth, node = open_nodes.pop()
        visited += 1
        if not isinstance(node, dict):
            if not prefix.endswith("_extra_state."):  # Transformer Engine's, of FP8 training
                found[prefix.removesuffix(".")] = node
            continue
        too_many = depth > _MAX_DEPTH or visited > _MAX_NODES
        if too_many or not all(type(key) is str for key in node):
            raise CorruptFileError(
                f"{path}: {shown(prefix) or 'model'} is no dictionary of names: copy it again"
            )
        open_nodes += [(f"{prefix}{key}.", depth + 1, value) for key, value in reversed(node.items())]
    return found


def kind_of(parts: Mapping[Path, Iterable[Named]], settings: Settings) -> str:
    """Return the kind of model whose family has all these names, and supports the run's arguments.

    Raises ConfigError for arguments that no family supports, UserError for a name that none has.
    """
    known = mappings()
    problems = {kind: unsupported(settings, mapping) for kind, mapping in known.items()}
    if all(problems.values()):
        raise ConfigError(next(iter(problems.values())))
    fitting = list(known)
    for path, chunks in parts.items():
        for theirs in (name for chunk in chunks for name in chunk):
            fitting = [kind for kind in fitting if known[kind].our_name(theirs) is not None]
            if not fitting:
                raise no_part(path, theirs)
    best = min(fitting, key=lambda kind: bool(problems[kind]))  # the first that supports the arguments
    if problems[best]:
        raise ConfigError(problems[best])
    return best


def no_part(path: Path, theirs: str) -> UserError:
    """Return the error of a name that no family has."""
    names = family_names().replace(" and ", " or ")
    return UserError(
        f"{path}: {shown(theirs)} is no part of {names} as mlm has them: only these are imported"
    )


def our_names(
    path: Path, chunk: Named, mapping: MegatronMapping, first_layer: int
) -> tuple[dict[str, Tensor], int]:
    """Return the tensors of one part of the model under our names, and its number of layers."""
    named: dict[str, Tensor] = {}
    layers: set[int] = set()
    for theirs, value in chunk.items():
        ours = mapping.our_name(theirs, first_layer)
        if ours is None or ours in named:
            raise no_part(path, theirs)
        named[ours] = _plain(path, theirs, value)
        if ours.startswith("layers."):
            layers.add(int(ours.split(".")[1]) - first_layer)
    if layers != set(range(len(layers))):
        raise CorruptFileError(f"{path}: its layers are {sorted(layers)[:8]}, not 0, 1, 2, …: copy it again")
    return named, len(layers)


def _plain(path: Path, name: str, value: Any) -> Tensor:
    """Return a tensor whose elements are all in the file: strides could make a few bytes one of any size."""
    if (
        not isinstance(value, Tensor)
        or type(value) not in (Tensor, torch.nn.Parameter)
        or value.layout is not torch.strided
        or value.device.type != "cpu"
        or value.dtype not in _DTYPES
        or not value.is_contiguous()
        or not 1 <= value.ndim <= 2
        or not value.numel()
    ):
        raise CorruptFileError(
            f"{path}: {shown(name)} is not a plain tensor of floating-point numbers: copy it again"
        )
    return value.detach()


def whole_shape(held: tuple[Tensor, ...], dim: int | None) -> tuple[int, ...]:
    """Return the shape of the tensor of which these are the tensor-parallel parts."""
    shape = list(held[0].shape)
    if dim is not None and dim < len(shape):
        shape[dim] *= len(held)
    return tuple(shape)


def check_replicas(
    files: RankFiles, parts: Mapping[str, tuple[Tensor, ...]], tp_dims: Mapping[str, int | None]
) -> None:
    """Raise CorruptFileError unless copies in several ranks are equal.

    Raises UserError for an output layer that is not the token table.
    """
    for name, held in parts.items():
        if tp_dims[name] is None:
            for t, part in enumerate(held):
                if not _same_bits(part, held[0]):
                    raise CorruptFileError(
                        f"{files.path}: {name} differs between tensor-parallel ranks 0 and {t}, which hold "
                        f"copies of it: they are of different saves, take another iteration"
                    )
    for t, head in enumerate(parts.get(HEAD, ())):
        if not _same_bits(head, parts["token.weight"][t]):
            raise UserError(
                f"{files.path}: the output layer differs from the token table in tensor-parallel rank {t}: "
                f"mlm has tied embeddings only"
            )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True for copies, NaN included."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
