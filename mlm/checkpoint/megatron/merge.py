"""Weights of a Megatron-LM run in our names and order, merged from the files of all ranks.

A rank file holds "model", or with virtual pipeline stages "model0", "model1", …: part v of pipeline rank p is
stage v * pp + p (arXiv:2104.04473, section 2.2). Layers are numbered from 0 in each. The order of the fused
qkv rows depends on checkpoint_version: NVIDIA/Megatron-LM, megatron/checkpointing.py,
fix_query_key_value_ordering.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlm.checkpoint.megatron.args import (
    MegatronArgs,
    check_recorded,
    describe_value,
    family_names,
    mappings,
    model_config,
    notes,
    shape_config,
    true_vocabulary,
    unsupported_arguments,
)
from mlm.checkpoint.megatron.files import RankFiles, printable, read_file
from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.native.stream import GlobalTensor
from mlm.checkpoint.parameters import parameters
from mlm.models.config import ModelConfig
from mlm.models.megatron import HEAD, MegatronMapping
from mlm.util.errors import ConfigError, CorruptFileError, UserError

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_DEPTH, _MAX_NODES = 8, 1 << 17  # of the dictionaries in a file; they may hold themselves
_VERSIONS = (0, 1.0, 2.0, 3.0)

Named = Mapping[str, Any]
"""Part of the model in a file: Megatron-LM's names -> values."""
Parts = dict[str, tuple[Tensor, ...]]
"""Our name -> the tensor of each tensor-parallel rank."""


@dataclass(frozen=True)
class MegatronModel:
    """A checkpoint, opened: tensors stay in their files until they are read."""

    files: RankFiles
    model: ModelConfig
    parts: Parts
    tp_dims: Mapping[str, int | None]
    """Our name -> the dim that tensor-parallel ranks share; None where each holds all of it."""
    version: float
    """Order of the qkv rows."""
    vp: int
    iteration: int | None
    table_rows: int
    filled: frozenset[str]
    """Parameters that the files lack: they take initial values."""
    notes: tuple[str, ...]
    """Remarks for the user, one line each."""

    def read(self, name: str, region: Region) -> Tensor:
        """Return those elements of a parameter, whole over tp, float32 on CPU.

        Raises CorruptFileError if some are not finite.
        """
        parts, dim = self.parts[name], self.tp_dims[name]
        if dim is None:
            whole = parts[0].to(torch.float32)
        else:
            whole = torch.empty(whole_shape(parts, dim))
            for part, target in zip(parts, whole.chunk(len(parts), dim), strict=True):
                target.copy_(self._ordered(name, part))
        wanted = whole[region.within(Region((0,) * whole.ndim, tuple(whole.shape)))]
        if not torch.isfinite(wanted).all():
            raise CorruptFileError(
                f"{self.files.path}: {name} is not finite everywhere: take another iteration"
            )
        return wanted.contiguous()

    def _ordered(self, name: str, part: Tensor) -> Tensor:
        """Return a rank's part with the rows of the fused qkv as [head][q, k, v][column].

        Version 0 has [q, k, v][head][column], 1.0 has [head][column][q, k, v], later ones are as ours.
        """
        if ".attention.qkv." not in name or self.version >= 2:
            return part
        heads = self.model.num_heads // self.files.tp
        if self.version == 0:
            rows = part.reshape(3, heads, -1, *part.shape[1:]).transpose(0, 1)
        else:
            rows = part.reshape(heads, -1, 3, *part.shape[1:]).transpose(1, 2)
        return rows.flatten(0, 2)


def open_checkpoint(
    files: RankFiles, *, vocab_size: int | None = None, known: int | None = None, num_heads: int | None = None
) -> MegatronModel:
    """Open and check every rank file: names, shapes, equal replicas and tied head, supported arguments.

    Args:
        files: Those of one iteration.
        vocab_size: Tokens without padding; None takes `known`, else a published size where it fits.
        known: Tokens of the tokenizer.
        num_heads: For a file that does not hold it.

    Raises:
        UserError: The model is not supported, or something has to be specified.
        CorruptFileError: A file is damaged, or they do not belong together.
    """
    contents = {rank: read_file(path) for rank, path in sorted(files.files.items())}
    chunks = {rank: _chunks(files.files[rank], content) for rank, content in contents.items()}
    args = MegatronArgs(contents[0, 0].get("args"), files.files[0, 0])
    kind = kind_of({files.files[rank]: parts for rank, parts in chunks.items()}, args)
    mapping = mappings()[kind]
    version = _check_one_save(files, contents, chunks)
    parts, num_layers = _merge(files, chunks, mapping)
    sizes = {"num_layers": num_layers}
    for field, (name, is_split) in mapping.sizes.items():
        _check_present(files, name, parts)
        sizes[field] = parts[name][0].shape[0] * (files.tp if is_split else 1)
    check_recorded(args, files.tp, files.pp, sizes)
    shape, table_rows = shape_config(args, kind, sizes), sizes["vocab_size"]
    wanted = parameters(replace(shape, vocab_multiple=1))
    filled, remarks = _complete(files, parts, wanted, mapping)
    tp_dims = _check_shapes(files, parts, wanted)
    vocabulary = true_vocabulary(args, mapping, table_rows, files.tp, vocab_size=vocab_size, known=known)
    model = model_config(args, shape, files.tp, num_heads=num_heads, vocab_size=vocabulary)
    _check_replicas(files, parts, tp_dims)
    iteration = contents[0, 0].get("iteration")
    return MegatronModel(
        files=files,
        model=model,
        parts={name: held for name, held in parts.items() if name != HEAD},
        tp_dims=tp_dims,
        version=version,
        vp=len(chunks[0, 0]),
        iteration=iteration if type(iteration) is int else None,
        table_rows=table_rows,
        filled=filled,
        notes=(*remarks, *notes(args, mapping)),
    )


def _chunks(path: Path, content: Mapping[str, Any]) -> list[Named]:
    """Return the parts of the model in a file: one, or its virtual stages."""
    if "model" in content:
        return [flatten_named(path, content["model"])]
    chunks: list[Named] = []
    while (key := f"model{len(chunks)}") in content:
        chunks.append(flatten_named(path, content[key]))
    if not chunks:
        keys = printable(", ".join(sorted(content)[:6]))
        raise CorruptFileError(f"{path}: holds no model (it has {keys or 'nothing'}): name another iteration")
    return chunks


def _check_one_save(
    files: RankFiles,
    contents: Mapping[tuple[int, int], dict[str, Any]],
    chunks: Mapping[tuple[int, int], list[Named]],
) -> float:
    """Return the version of all files. Raises CorruptFileError if they are not of one save."""
    first = contents[0, 0]
    for rank, content in contents.items():
        for key in ("iteration", "checkpoint_version"):
            value, expected = content.get(key), first.get(key)
            if type(value) not in (int, float, type(None)) or value != expected:
                raise CorruptFileError(
                    f"{files.files[rank]}: {key}={describe_value(value)}, but {describe_value(expected)} in "
                    f"{files.files[0, 0].parent.name}: files of different saves, copy them again"
                )
        if len(chunks[rank]) != len(chunks[0, 0]):
            raise CorruptFileError(
                f"{files.files[rank]}: has other model parts than the first: copy it again"
            )
    version = first.get("checkpoint_version") or 0
    if version not in _VERSIONS:
        raise UserError(
            f"{files.files[0, 0]}: checkpoint_version={describe_value(version)}: "
            "0, 1.0, 2.0 and 3.0 are known"
        )
    return float(version)


def _merge(
    files: RankFiles, chunks: Mapping[tuple[int, int], list[Named]], mapping: MegatronMapping
) -> tuple[Parts, int]:
    """Return what each tensor-parallel rank holds of each parameter, and the number of layers."""
    ranks, counts = zip(*(_stages_of(files, chunks, mapping, t) for t in range(files.tp)), strict=True)
    for rank in ranks:
        if differing := rank.keys() ^ ranks[0].keys():
            raise CorruptFileError(
                f"{files.path}: {min(differing)} is not in every rank that should hold it: copy all again"
            )
    return {name: tuple(rank[name] for rank in ranks) for name in ranks[0]}, counts[0]


def _stages_of(
    files: RankFiles, chunks: Mapping[tuple[int, int], list[Named]], mapping: MegatronMapping, t: int
) -> tuple[dict[str, Tensor], int]:
    """Return the tensors of a tensor-parallel rank, all stages, under our names; and how many layers."""
    named: dict[str, Tensor] = {}
    num_layers = 0
    for v in range(len(chunks[0, 0])):
        for p in range(files.pp):
            path, layers = files.files[t, p], set[int]()
            for theirs, value in chunks[t, p][v].items():
                ours = mapping.our_name(theirs, num_layers)
                if ours is None or ours in named:
                    raise no_part(path, theirs)
                named[ours] = _plain(path, theirs, value)
                if ours.startswith("layers."):
                    layers.add(int(ours.split(".")[1]) - num_layers)
            if layers != set(range(len(layers))):
                raise CorruptFileError(
                    f"{path}: its layers are {sorted(layers)[:8]}, not 0, 1, 2, …: copy it again"
                )
            num_layers += len(layers)
    return named, num_layers


def _check_present(files: RankFiles, name: str, parts: Parts) -> None:
    if name not in parts:
        raise CorruptFileError(f"{files.path}: {name} is missing: copy all files again")


def _complete(
    files: RankFiles, parts: Parts, wanted: Mapping[str, GlobalTensor], mapping: MegatronMapping
) -> tuple[frozenset[str], list[str]]:
    """Return the parameters to fill with initial values, and remarks; those that mean zeros are put in.

    Raises CorruptFileError if others are missing.
    """
    present = {name.rpartition(".")[0] for name in parts}
    absent = [module for module in mapping.initial_if_absent if module not in present]
    filled, remarks = set(), []
    for name, tensor in wanted.items():
        if name not in parts and name in mapping.zero_if_absent:
            parts[name] = (torch.zeros(tensor.shape),) * files.tp
            remarks.append(mapping.zero_if_absent[name])
        elif name.rpartition(".")[0] in absent:
            filled.add(name)
        else:
            _check_present(files, name, parts)
    remarks += [f"no {module} is there: it takes initial values, which training moves" for module in absent]
    return frozenset(filled), remarks


def _check_shapes(
    files: RankFiles, parts: Parts, wanted: Mapping[str, GlobalTensor]
) -> dict[str, int | None]:
    """Return the dim along which each parameter is split. Raises CorruptFileError for a wrong shape."""
    tp_dims: dict[str, int | None] = {}
    for name, held in parts.items():
        tensor = wanted["token.weight" if name == HEAD else name]
        dim = tp_dims[name] = tensor.split.tp_dim
        if len({part.shape for part in held}) > 1 or whole_shape(held, dim) != tensor.shape:
            shapes = " + ".join(str(list(part.shape)) for part in held[:4])
            raise CorruptFileError(
                f"{files.path}: {name} is {shapes} in its {files.tp} tensor-parallel ranks, "
                f"{list(tensor.shape)} is needed in all: some are missing or of another model"
            )
    return tp_dims


def flatten_named(path: Path, chunk: Any) -> dict[str, Any]:
    """Flatten a dictionary of dictionaries: dotted name -> value, in order. Raises CorruptFileError."""
    named: dict[str, Any] = {}
    open_nodes: list[tuple[str, int, Any]] = [("", 0, chunk)]
    visited = 0
    while open_nodes:
        prefix, depth, node = open_nodes.pop()
        visited += 1
        if prefix and not isinstance(node, dict):
            if not prefix.endswith("_extra_state."):  # Transformer Engine's, of FP8 training
                named[prefix.removesuffix(".")] = node
            continue
        too_many = depth > _MAX_DEPTH or visited > _MAX_NODES
        if too_many or not isinstance(node, dict) or not all(type(key) is str for key in node):
            raise CorruptFileError(
                f"{path}: {printable(prefix) or 'model'} is no dictionary of names: copy it again"
            )
        open_nodes += [(f"{prefix}{key}.", depth + 1, value) for key, value in reversed(node.items())]
    return named


def kind_of(parts: Mapping[Path, Iterable[Named]], args: MegatronArgs) -> str:
    """Return the kind of model whose family has all these names, and supports the run's arguments.

    Raises ConfigError for arguments that no family supports, UserError for a name that none has.
    """
    known = mappings()
    problems = {kind: unsupported_arguments(args, mapping) for kind, mapping in known.items()}
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
        f"{path}: {printable(theirs)} is no part of {names} as mlm has them: only these are imported"
    )


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
            f"{path}: {printable(name)} is not a plain tensor of floating-point numbers: copy it again"
        )
    return value.detach()


def whole_shape(held: tuple[Tensor, ...], dim: int | None) -> tuple[int, ...]:
    """Return the shape of the tensor of which these are the tensor-parallel parts."""
    shape = list(held[0].shape)
    if dim is not None and dim < len(shape):
        shape[dim] *= len(held)
    return tuple(shape)


def _check_replicas(files: RankFiles, parts: Parts, tp_dims: Mapping[str, int | None]) -> None:
    """Raise CorruptFileError unless copies in several ranks are equal.

    Raises UserError for an output layer that is not the token table.
    """
    for name, held in parts.items():
        if tp_dims[name] is None and not all(_same_bits(part, held[0]) for part in held):
            raise CorruptFileError(
                f"{files.path}: {name} differs between tensor-parallel ranks, which hold copies of it: "
                "they are of different saves, take another iteration"
            )
    if not all(map(_same_bits, parts.get(HEAD, ()), parts["token.weight"])):
        raise UserError(
            f"{files.path}: the output layer differs from the token table: mlm has tied embeddings only"
        )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True for copies, NaN included."""
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
