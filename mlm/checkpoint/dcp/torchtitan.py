"""Llama 3 and Qwen 3 as torchtitan names and orders them in a DCP folder, read and written.

Such a folder records no sizes of heads and no settings: its model comes from a config.json.
Names: `TORCHTITAN` in mlm/models/llama/megatron.py.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mlm.checkpoint.dcp.metadata import COPY_AGAIN, read_metadata
from mlm.checkpoint.dcp.storage import DCPReader
from mlm.checkpoint.dcp.writer import DCPTensor
from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.parameters import parameters
from mlm.checkpoint.woven import reweave
from mlm.models.config import ModelConfig
from mlm.models.llama.megatron import TORCHTITAN, torchtitan_problem, torchtitan_weaves
from mlm.models.megatron import split_layer
from mlm.util.errors import CorruptFileError, UserError

TOKEN_TABLE = TORCHTITAN["token.weight"]
_OTHER = ("optimizer.", "lr_scheduler", "dataloader", "train_state", "freqs_cis")
Read = Callable[[str, Region], Tensor]


def stored_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of torchtitan's tensors by our names for them. Raises UserError if it has none."""
    if model.kind != "llama":
        raise UserError(f"model.kind={model.kind}: torchtitan's names are of Llama 3 and Qwen 3")
    if problem := torchtitan_problem(model):
        raise UserError(f"torchtitan has no such model: {problem}")
    weaves = torchtitan_weaves(model)
    ours = {name: one.shape for name, one in parameters(model).items()}
    kept = {name: shape for name, shape in ours.items() if split_layer(name)[1] not in weaves.ours}
    for layer in range(model.num_layers):
        for short, woven in weaves.theirs.items():
            kept[f"layers.{layer}.{short}"] = (woven.rows, model.hidden_size)
    return kept


def their_name(name: str) -> str:
    """Return torchtitan's name of a tensor."""
    layer, short = split_layer(name)
    return TORCHTITAN[short] if layer is None else f"layers.{layer}.{TORCHTITAN[short]}"


class TorchtitanReader:
    """Reads parameters of ours from a folder with torchtitan's names."""

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        """Compare names and shapes. Raises UserError and CorruptFileError."""
        self.model, self.shapes = model, stored_shapes(model)
        self.weaves = torchtitan_weaves(model)
        tensors = read_metadata(folder, lambda name: not name.startswith(_OTHER))
        prefix = "model." if f"model.{TOKEN_TABLE}" in tensors else ""
        self.names = {name: prefix + their_name(name) for name in self.shapes}
        for name, theirs in self.names.items():
            if theirs not in tensors or tensors[theirs].shape != self.shapes[name]:
                held = list(tensors[theirs].shape) if theirs in tensors else "missing"
                raise CorruptFileError(
                    f"{folder}: {theirs} is {held}, its model needs {list(self.shapes[name])}: name its own "
                    f"config, or {COPY_AGAIN}"
                )
        self.reader = DCPReader(folder, {theirs: tensors[theirs] for theirs in self.names.values()})

    def read(self, name: str, region: Region) -> Tensor:
        """Return those elements of a parameter, float32."""
        if split_layer(name)[1] not in self.weaves.ours:
            return self._load(name, region)
        value = reweave(
            name,
            self.weaves.theirs,
            self.weaves.ours,
            lambda one: self._load(one, Region.whole(self.shapes[one])),
        )
        return value[region.within(Region.whole(value.shape))]

    def _load(self, name: str, region: Region) -> Tensor:
        return self.reader.read(self.names[name], region, torch.float32)


def torchtitan_tensors(
    model: ModelConfig, read: Read, dtype: torch.dtype
) -> tuple[dict[str, DCPTensor], Callable[[str, Region], Tensor]]:
    """Return torchtitan's tensors for a DCP folder, and what makes them of ours. Raises UserError."""
    shapes, weaves = stored_shapes(model), torchtitan_weaves(model)
    ours = {name: one.shape for name, one in parameters(model).items()}
    names = {their_name(name): name for name in shapes}

    def make(theirs: str, region: Region) -> Tensor:
        name = names[theirs]
        if split_layer(name)[1] not in weaves.theirs:
            return read(name, region).to(dtype)
        value = reweave(name, weaves.ours, weaves.theirs, lambda one: read(one, Region.whole(ours[one])))
        return value.to(dtype)

    forms = {theirs: DCPTensor(shapes[n], dtype, (Region.whole(shapes[n]),)) for theirs, n in names.items()}
    return forms, make
