"""Targets of `mlm convert`: any format, written one tensor at a time."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from mlm.checkpoint.native.format import JSON
from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.native.stream import WriteFile, write_anew
from mlm.convert.config import ConvertConfig
from mlm.convert.dcp.torchtitan import torchtitan_tensors
from mlm.convert.dcp.writer import write_dcp
from mlm.convert.huggingface.export import hf_config, hf_mapping, write_hf, write_json
from mlm.convert.huggingface.families import mapping_of
from mlm.convert.huggingface.folder import CONFIG
from mlm.convert.huggingface.mapping import declared_ids
from mlm.convert.megatron.distributed import LATEST
from mlm.convert.megatron.write import RELEASE, core_tensors, write_common
from mlm.convert.source import Source
from mlm.runs.folder import GB, imported_state, initial_values, run_config, write_run
from mlm.util.files import write_atomic
from mlm.util.terminal import Advance


def write_target(
    config: ConvertConfig,
    source: Source,
    folder: Path,
    origin: dict[str, JSON],
    advance: Advance,
    write_file: WriteFile,
) -> None:
    dtype: torch.dtype = getattr(torch, config.dtype)
    max_bytes = int(config.max_file_gb * GB)
    match config.to:
        case "native":
            write_native(source, folder, origin, advance, write_file)
        case "hf":
            write_hf(source, folder, dtype, config.max_file_gb, advance, write_file)
        case "torchtitan":
            tensors, load = torchtitan_tensors(source.model, source.read, dtype)
            write_dcp(folder, tensors, load, max_bytes, advance, write_file)
            # torchtitan records no model; config.json describes it.
            write_json(folder / CONFIG, hf_config(source, hf_mapping(source)))
        case "torch_dist":
            # Megatron-LM starts from release/ and the file that names it.
            tensors, load = core_tensors(source.model, source.read, dtype)
            write_dcp(folder / RELEASE, tensors, load, max_bytes, advance, write_file)
            mapping = mapping_of(source.model)
            declared = {} if mapping is None else hf_config(source, mapping)
            ids = declared_ids(declared, source.model.vocab_size)
            write_common(folder / RELEASE, source.model, ids)
            write_atomic(folder / LATEST, RELEASE.encode())


def write_native(
    source: Source,
    folder: Path,
    origin: Mapping[str, JSON],
    advance: Advance,
    write_file: WriteFile = write_anew,
) -> Path:
    """Write a run directory; return its checkpoint.

    `origin` describes the source of the weights, for `state["source"]`: "kind", "name", "files" and more.
    """
    model = source.model
    config = run_config(str(origin["name"]).rpartition("/")[2] or "imported", model)
    initial = initial_values(model, source.filled, config.seed)

    def load(name: str, region: Region) -> Tensor:
        name = name.removeprefix("model.")
        if name in initial:
            return initial[name][region.within(Region.full(initial[name].shape))]
        return source.read(name, region)

    return write_run(
        folder,
        {f"model.{name}": entry for name, entry in source.parameters.items()},
        load,
        state=imported_state(config, origin, source.filled),
        tokenizer=source.tokenizer,
        progress=advance,
        write_file=write_file,
    )
