"""Weights of a Megatron-LM run in our names and order, merged from the files of all ranks.

A rank file holds "model", or with virtual pipeline stages "model0", "model1", …: part v of pipeline rank p is
stage v * pp + p (arXiv:2104.04473, section 2.2). Layers are numbered from 0 in each. The order of the fused
qkv rows depends on checkpoint_version: NVIDIA/Megatron-LM, megatron/checkpointing.py,
fix_query_key_value_ordering.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlm.checkpoint.native.slices import Region
from mlm.convert.dcp.unpickled import DAMAGES
from mlm.convert.megatron.files import RankFiles, TorchFile, printable
from mlm.convert.megatron.mapping import MegatronMapping
from mlm.convert.megatron.mappings import MAPPINGS
from mlm.convert.megatron.model import (
    MegatronArgs,
    MegatronModel,
    MegatronOverrides,
    MegatronTensors,
    assemble,
    describe_value,
    kind_of,
    unknown_name,
)
from mlm.util.errors import CorruptFileError, UserError

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_DEPTH, _MAX_NODES = 8, 1 << 17  # of the dictionaries in a file; they may contain themselves

Named = Mapping[str, Any]
"""Part of the model in a file: Megatron-LM's names -> values."""
Rank = tuple[int, int]
"""(tensor-parallel rank, pipeline rank)."""
Parts = dict[str, tuple[Tensor, ...]]
"""Our name -> the tensor of each tensor-parallel rank."""


class RankTensors(MegatronTensors):
    """The tensors of all rank files, mapped into memory."""

    files: RankFiles

    def __init__(self, files: RankFiles, parts: Parts, *, vp: int, version: float, heads: int | None) -> None:
        super().__init__(files.path, parts, tp=files.tp, pp=files.pp, vp=vp)
        self.files, self.parts, self.version, self.heads = files, parts, version, heads

    def shape(self, name: str, tp_dim: int | None) -> tuple[int, ...]:
        first, *others = self.parts[self.names[name]]
        if any(part.shape != first.shape for part in others):
            raise CorruptFileError(f"{self.path}: {name} differs in shape between tensor-parallel ranks")
        shape = list(first.shape)
        if tp_dim is not None and tp_dim < len(shape):
            shape[tp_dim] *= self.tp
        return tuple(shape)

    def check_copies(self) -> None:
        """Raise CorruptFileError too unless copies in several ranks are equal, NaN included."""
        for name, stored in self.names.items():
            first, *others = self.parts[stored]
            if self.tp_dims[name] is None and not all(
                part.dtype == first.dtype and torch.equal(part.view(torch.uint8), first.view(torch.uint8))
                for part in others
            ):
                raise CorruptFileError(
                    f"{self.path}: {name} differs between tensor-parallel ranks, which hold copies of it: "
                    "they are of different saves, take another iteration"
                )
        super().check_copies()

    def load(self, name: str, region: Region) -> Tensor:
        parts, dim = self.parts[self.names[name]], self.tp_dims[name]
        target = torch.empty(region.size)
        for t, part in enumerate(parts if dim is not None else parts[:1]):
            begin = [t * size if axis == dim else 0 for axis, size in enumerate(part.shape)]
            held = Region(tuple(begin), tuple(part.shape))
            if common := region.intersect(held):
                target[common.within(region)] = self._ordered(name, part)[common.within(held)]
        return target

    def _ordered(self, name: str, part: Tensor) -> Tensor:
        """Return a rank's part with the rows of the fused qkv as [head][q, k, v][column].

        Version 0 has [q, k, v][head][column], 1.0 has [head][column][q, k, v], later ones are as ours.
        """
        if ".attention.qkv." not in name or self.version >= 2:
            return part
        assert self.heads is not None, "checked when it was opened"
        heads = self.heads // self.tp
        if self.version == 0:
            rows = part.reshape(3, heads, -1, *part.shape[1:]).transpose(0, 1)
        else:
            rows = part.reshape(heads, -1, 3, *part.shape[1:]).transpose(1, 2)
        return rows.flatten(0, 2)


def open_checkpoint(files: RankFiles, overrides: MegatronOverrides) -> MegatronModel:
    """Open and check every rank file: names, shapes, equal replicas and tied head, supported arguments.

    Raises UserError for a model that is not supported, or if something has to be specified; CorruptFileError
    if a file is damaged, or they do not belong together.
    """
    opened = {rank: TorchFile(path) for rank, path in sorted(files.files.items())}
    contents = {rank: file.parts for rank, file in opened.items()}
    chunks = {rank: _chunks(files.files[rank], content) for rank, content in contents.items()}
    args = MegatronArgs(contents[0, 0].get("args"), files.files[0, 0])
    names = {files.files[rank]: [n for part in parts for n in part] for rank, parts in chunks.items()}
    kind = kind_of(names, args)
    tensors = RankTensors(
        files,
        _merge(files, opened, chunks, MAPPINGS[kind]),
        vp=len(chunks[0, 0]),
        version=_check_one_save(files, contents, chunks),
        heads=args.number("num_attention_heads") or overrides.num_heads,
    )
    return assemble(tensors, args, kind, iteration=contents[0, 0].get("iteration"), overrides=overrides)


def _chunks(path: Path, content: Mapping[str, Any]) -> list[Named]:
    """Return the parts of the model in a file: one, or its virtual stages."""
    if "model" in content:
        return [_flatten(path, content["model"])]
    chunks: list[Named] = []
    while (key := f"model{len(chunks)}") in content:
        chunks.append(_flatten(path, content[key]))
    if not chunks:
        keys = printable(", ".join(sorted(content)[:6]))
        raise CorruptFileError(f"{path}: holds no model (it has {keys or 'nothing'}): name another iteration")
    return chunks


def _flatten(path: Path, chunk: Any) -> dict[str, Any]:
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


def _check_one_save(
    files: RankFiles,
    contents: Mapping[Rank, dict[str, Any]],
    chunks: Mapping[Rank, list[Named]],
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
    if version not in (0, 1.0, 2.0, 3.0):
        raise UserError(
            f"{files.files[0, 0]}: checkpoint_version={describe_value(version)}: "
            "0, 1.0, 2.0 and 3.0 are known"
        )
    return float(version)


def _merge(
    files: RankFiles,
    opened: Mapping[Rank, TorchFile],
    chunks: Mapping[Rank, list[Named]],
    mapping: MegatronMapping,
) -> Parts:
    ranks: list[dict[str, Tensor]] = []
    for t in range(files.tp):
        named, first_layer = dict[str, Tensor](), 0
        for v in range(len(chunks[t, 0])):
            for p in range(files.pp):
                first_layer += _add_stage(named, opened[t, p], chunks[t, p][v], first_layer, mapping)
        ranks.append(named)
        if differing := named.keys() ^ ranks[0].keys():
            raise CorruptFileError(
                f"{files.path}: {min(differing)} is not in every rank that should hold it: copy all again"
            )
    return {name: tuple(rank[name] for rank in ranks) for name in ranks[0]}


def _add_stage(
    named: dict[str, Tensor], file: TorchFile, part: Named, first_layer: int, mapping: MegatronMapping
) -> int:
    """Add the tensors of a stage under our names; return its number of layers."""
    layers = set[int]()
    for theirs, value in part.items():
        ours = mapping.our_name(theirs, first_layer)
        if ours is None or ours in named:
            raise unknown_name(file.path, theirs)
        try:
            tensor = file.tensor(value)
        except DAMAGES:
            tensor = None
        if tensor is None or tensor.dtype not in _DTYPES or not 1 <= tensor.ndim <= 2 or not tensor.numel():
            raise CorruptFileError(
                f"{file.path}: {printable(theirs)} is not a plain tensor of floating-point numbers: copy it "
                "again"
            )
        named[ours] = tensor
        if ours.startswith("layers."):
            layers.add(int(ours.split(".")[1]) - first_layer)
    if layers != set(range(len(layers))):
        raise CorruptFileError(
            f"{file.path}: its layers are {sorted(layers)[:8]}, not 0, 1, 2, …: copy it again"
        )
    return len(layers)
