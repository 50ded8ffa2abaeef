"""Megatron Core's distributed checkpoints (torch_dist), and plain DCP folders with its names.

    metadata.json    {"sharded_backend": "torch_dist", …}
    common.pt        args, iteration and other plain values, a file of torch.save
    .metadata, __*_*.distcp    tensors, full over all ranks (mlm/convert/dcp)

Names are those with Transformer Engine. The layers of a usual model are one tensor with the layer as its
first dim, decoder.layers.mlp.linear_fc1.weight; with other settings, and in fsdp_dtensor, each has a
number. The rows of a fused gate and input are [gate, up], whatever the tensor-parallel size; fsdp_dtensor
has them as two tensors, …weight_w and …weight_v, and args and iteration in place of common.pt as items of
.metadata. Source: NVIDIA/Megatron-LM, core/dist_checkpointing, core/transformer/transformer_block.py, mlp.py,
core/transformer/fsdp_dtensor_checkpoint.py, training/checkpointing.py.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlm.checkpoint.native.slices import Region
from mlm.convert.dcp.metadata import METADATA, MOMENTS, StoredTensor, read_metadata, read_objects
from mlm.convert.dcp.storage import DCPReader
from mlm.convert.megatron.files import TorchFile
from mlm.convert.megatron.mapping import HEAD
from mlm.convert.megatron.mappings import MAPPINGS
from mlm.convert.megatron.model import (
    MegatronArgs,
    MegatronModel,
    MegatronOverrides,
    MegatronTensors,
    assemble,
    kind_of,
    unknown_name,
)
from mlm.models.shape import is_tied
from mlm.util.errors import CorruptFileError

COMMON = "common.pt"
BACKEND = "metadata.json"
_OTHER = re.compile(
    r"(optimizer|chained_\d+|rng_state|rerun_state|opt_param_scheduler)[._/].*|.*_extra_state.*"
)
"""Tensors that are not of the model."""
_WRAPPERS = re.compile(r"(?:(?:model\d*|module)\.)+")
"""What wrappers of modules put before a name."""
_STACKED = re.compile(r"((?:decoder|encoder)\.layers)\.(?!\d)(.+)")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HALF = re.compile(r"(.+\.linear_fc1\.(?:weight|bias)\d*)_([wv])")
_MOMENT = re.compile(r"optimizer\.state\.(?:(exp_avg(?:_sq)?)\.(.+)|(.+)\.(exp_avg(?:_sq)?))")
MOST_STACKED = 1 << 17
"""Layers of a tensor."""
Location = tuple[str, tuple[int, ...]]
"""A stored tensor, and an index into its first dims."""


class CoreTensors(MegatronTensors):
    """The tensors of a distributed checkpoint."""

    files: DCPReader

    def __init__(self, files: DCPReader, locations: dict[str, Location]) -> None:
        super().__init__(files.folder, locations)
        self.files, self.locations = files, locations

    def shape(self, name: str, tp_dim: int | None = None) -> tuple[int, ...]:
        stored, index = self.locations[self.names[name]]
        return self.files.tensors[stored].shape[len(index) :]

    def load(self, name: str, region: Region) -> Tensor:
        stored, index = self.locations[self.names[name]]
        part = Region((*index, *region.offset), (*(1 for _ in index), *region.size))
        return self.files.read(stored, part, torch.float32).reshape(region.size)


def open_distributed(folder: Path, overrides: MegatronOverrides) -> MegatronModel:
    """Open a distributed checkpoint: names, shapes, supported arguments. Its files stay open.

    Raises UserError and CorruptFileError.
    """
    common: Mapping[str, Any]
    if (folder / COMMON).is_file():
        common = TorchFile(folder / COMMON).parts
    else:
        items = read_objects(folder, ("args", "iteration"))
        common = {name: TorchFile(folder / METADATA, content).value for name, content in items.items()}
    args = MegatronArgs(common.get("args"), folder / COMMON)
    tensors = _join_halves(read_metadata(folder, lambda name: not _OTHER.fullmatch(name)))
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise CorruptFileError(
                f"{folder}: {name} is of {tensor.dtype}: only floating-point numbers are read"
            )
    stored = _core_names(tensors)
    kind = kind_of({folder: stored}, args) if overrides.config is None else overrides.config.kind
    locations: dict[str, Location] = {}
    for name, location in stored.items():
        ours = MAPPINGS[kind].our_name(name)
        if ours is None or ours in locations:
            raise unknown_name(folder, name)
        locations[ours] = location
    held = CoreTensors(DCPReader(folder, tensors), locations)
    return assemble(held, args, kind, iteration=common.get("iteration"), overrides=overrides)


def open_moments(opened: MegatronModel) -> dict[str, MegatronModel]:
    """Return Adam's moments by name, read as the parameters are; empty if some are missing or in parts.

    Whole ones are stored under the names of the parameters: optimizer.state.exp_avg.decoder.…, in
    fsdp_dtensor optimizer.state.module.decoder.….exp_avg. Raises as `open_distributed`.
    """
    folder, mapping = opened.tensors.path, MAPPINGS[opened.model.kind]
    if not isinstance(opened.tensors, CoreTensors) or not opened.iteration:
        return {}
    by_moment: dict[str, dict[str, StoredTensor]] = {moment: {} for moment in MOMENTS}
    for stored, tensor in read_metadata(folder, lambda name: bool(_MOMENT.fullmatch(name))).items():
        before, name_after, name_before, after = _MOMENT.fullmatch(stored).groups()  # type: ignore[union-attr]
        by_moment[before or after][name_after or name_before] = tensor
    wanted, models = {*opened.shapes} - opened.zeros, {}
    for moment in MOMENTS:
        tensors = _join_halves(by_moment[moment])
        locations = {mapping.our_name(name): location for name, location in _core_names(tensors).items()}
        if HEAD in locations and not is_tied(opened.model):
            locations["output.weight"] = locations.pop(HEAD)
        if not wanted <= locations.keys():
            return {}
        held = CoreTensors(DCPReader(folder, tensors), {name: locations[name] for name in wanted})
        if any(held.shape(name) != opened.shapes[name] for name in wanted):
            return {}
        models[moment] = replace(opened, tensors=held)
    return models


def _join_halves(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors with each …weight_w and …weight_v as one, w's rows first."""
    joined = dict(tensors)
    for name, tensor in tensors.items():
        half = _HALF.fullmatch(name)
        other = tensors.get(f"{half[1]}_v") if half and half[2] == "w" else None
        if half is None or other is None or (other.shape, other.dtype) != (tensor.shape, tensor.dtype):
            continue
        rows, *rest = tensor.shape
        pieces = list(tensor.pieces)
        for piece in other.pieces:
            first, *offset = piece.region.offset
            pieces.append(replace(piece, region=piece.region._replace(offset=(rows + first, *offset))))
        del joined[name], joined[f"{half[1]}_v"]
        joined[half[1]] = StoredTensor((2 * rows, *rest), tensor.dtype, tuple(pieces))
    return joined


def _core_names(tensors: Mapping[str, StoredTensor]) -> dict[str, Location]:
    """Return Megatron Core's name of each layer's tensors -> where it is stored."""
    names: dict[str, Location] = {}
    for stored, tensor in tensors.items():
        plain = _WRAPPERS.sub("", stored, count=1) if _WRAPPERS.match(stored) else stored
        if not _STACKED.fullmatch(plain):
            names[plain] = stored, ()
            continue
        if not tensor.shape or tensor.shape[0] > MOST_STACKED:
            raise CorruptFileError(f"{stored} is {list(tensor.shape)}; {MOST_STACKED} layers are supported")
        for layer in range(tensor.shape[0]):
            names[_STACKED.sub(rf"\g<1>.{layer}.\g<2>", plain)] = stored, (layer,)
    return names
