"""Megatron Core's distributed checkpoints (torch_dist): names, shapes and reading of their tensors.

    latest_checkpointed_iteration.txt      an iteration, or "release"
    iter_0001000/ or release/
      common.pt                  args, iteration and other plain values, a file of torch.save
      .metadata, __*_*.distcp    tensors, full over all ranks (mlm/convert/dcp)

The layers of a usual model are one tensor, decoder.layers.mlp.linear_fc1.weight, with the layer as its first
dim; with other settings each has a number. The rows of a fused gate and input are [gate, up], whatever the
tensor-parallel size. Source: NVIDIA/Megatron-LM, core/dist_checkpointing, training/checkpointing.py,
core/transformer/transformer_block.py, mlp.py.
"""

import re
from pathlib import Path

import torch
from torch import Tensor

from mlm.checkpoint.native.slices import Region
from mlm.convert.dcp.metadata import COPY_AGAIN, METADATA, read_metadata
from mlm.convert.dcp.storage import DCPReader
from mlm.convert.locations import ForeignModel
from mlm.convert.megatron.classic import RANK_FOLDER, is_classic
from mlm.convert.megatron.model import MegatronArgs, MegatronTensors, assemble, read_saved
from mlm.util.errors import CorruptFileError, UserError, reading_from
from mlm.util.terminal import one_line

LATEST = "latest_checkpointed_iteration.txt"
COMMON = "common.pt"
STEP_FOLDER = re.compile(r"iter_(\d{7,})|release")
_OTHER = re.compile(
    r"(optimizer|chained_\d+|rng_state|rerun_state|opt_param_scheduler)[._/].*|.*_extra_state.*"
)
"""Tensors outside of the model."""
_STACKED = re.compile(r"((?:decoder|encoder)\.layers)\.(?!\d)(.+)")
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MOST_STACKED = 1 << 17
"""Limit on the layers in a tensor."""


def open_distributed(folder: Path, vocab_size: int | None, tokenizer_size: int | None) -> ForeignModel:
    """Open a distributed checkpoint: names, shapes, supported arguments. Its files stay open.

    `vocab_size` is the number of tokens without padding, `tokenizer_size` a tokenizer's; None where
    unknown. Raises UserError and CorruptFileError.
    """
    common = read_saved(folder / COMMON).value
    args = MegatronArgs(common.get("args"), folder / COMMON)
    tensors = read_metadata(folder, lambda name: not _OTHER.fullmatch(name))
    for name, tensor in tensors.items():
        if tensor.dtype not in _FLOATS:
            raise CorruptFileError(
                f"{folder}: {name} is of {tensor.dtype}: only floating-point numbers are read"
            )
    reader, layers = DCPReader(folder, tensors), dict[str, tuple[str, tuple[int, ...]]]()
    # Name of each layer's tensor -> the stored tensor, and the layer's index if it holds all layers.
    for name, tensor in tensors.items():
        if not _STACKED.fullmatch(name):
            layers[name] = name, ()
            continue
        if not tensor.shape or tensor.shape[0] > MOST_STACKED:
            raise CorruptFileError(f"{name} is {list(tensor.shape)}; {MOST_STACKED} layers are supported")
        for layer in range(tensor.shape[0]):
            layers[_STACKED.sub(rf"\g<1>.{layer}.\g<2>", name)] = name, (layer,)

    def load(name: str, region: Region) -> Tensor:
        stored, index = layers[name]
        part = Region((*index, *region.offset), (*(1 for _ in index), *region.size))
        return reader.read(stored, part, torch.float32).reshape(region.size)

    shapes = {name: tensors[stored].shape[len(index) :] for name, (stored, index) in layers.items()}
    megatron_tensors = MegatronTensors(folder, "torch_dist", reader, shapes, load)
    sizes = vocab_size, tokenizer_size
    return assemble(megatron_tensors, args, iteration=common.get("iteration"), vocabulary=sizes)


def find_step(source: str | Path) -> Path:
    """Return the folder of an iteration in a checkpoint folder.

    Raises UserError if the iteration is ambiguous, or the format is another.
    """
    source = Path(source)
    if RANK_FOLDER.fullmatch(source.name):
        raise UserError(f"{source}: one rank of a checkpoint: name its parent, {source.resolve().parent}")
    if (source / METADATA).exists() or is_classic(source):
        return source
    latest, iteration = source / LATEST, ""
    with reading_from(source, COPY_AGAIN):
        steps = sorted(path.name for path in source.iterdir() if STEP_FOLDER.fullmatch(path.name))
        if latest.is_file():
            with open(latest, "rb") as f:
                iteration = f.read(64).strip().decode("ascii", "replace")
    if latest.is_file():
        name = f"iter_{int(iteration):07d}" if iteration.isdecimal() else iteration
        if name not in steps:
            raise CorruptFileError(
                f"{latest}: names {one_line(iteration)!r}, which is not there: copy it too, or name another "
                f"folder in {source}"
            )
        steps = [name]
    if len(steps) > 1:
        listed = ", ".join(steps[:8])
        raise UserError(f"{source}: no {LATEST} selects one of {listed}: name one, {source / steps[-1]}")
    step = source / steps[0] if steps else source
    if not ((step / METADATA).exists() or is_classic(step)):
        raise UserError(
            f"{step}: holds no .metadata of torch_dist and no mp_rank_… of ranks; save one of another "
            "format again in Megatron-LM with --ckpt-convert-format torch_dist"
        )
    return step
