"""Targets of `mlm convert`: any format, from parameters of ours, a file at a time."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlm.checkpoint.native.folders import CHECKPOINTS
from mlm.checkpoint.native.format import JSON, FileEntry
from mlm.checkpoint.native.slices import Region
from mlm.convert.dcp.metadata import DCPTensor
from mlm.convert.dcp.torchtitan import torchtitan_tensors
from mlm.convert.dcp.writer import plan_files, write_items, write_metadata
from mlm.convert.huggingface.export import hf_mapping, token_ids, write_json
from mlm.convert.huggingface.folder import CONFIG
from mlm.convert.megatron.files import LATEST
from mlm.convert.megatron.write import (
    RELEASE,
    MegatronWriter,
    core_tensors,
    rank_files,
    write_common,
    write_rank_file,
)
from mlm.convert.source import Source
from mlm.models.stage import assign_stages
from mlm.runs.folder import GB, imported_state, initial_values, run_config, write_run
from mlm.util.files import digest_file, parse_json, read_bounded, write_atomic
from mlm.util.terminal import Advance

DONE = ".converted.json"
"""Files that are whole, in a folder that is being written."""
MAX_DONE_BYTES = 1 << 26


class Progress:
    """Files of a folder that an earlier, interrupted conversion wrote: read again, and kept if whole."""

    def __init__(self, folder: Path, advance: Advance) -> None:
        self.folder, self.advance, self.entries = folder, advance, dict[str, dict[str, Any]]()
        if (folder / DONE).is_file():
            self.entries = parse_json(read_bounded(folder / DONE, MAX_DONE_BYTES, "delete it"))

    def file(self, path: Path, write: Callable[[], Any]) -> Any:
        """Return what `write`, which writes `path`, returned: now, or before. It must be JSON."""
        name = path.relative_to(self.folder).as_posix()
        entry = self.entries.get(name)
        if entry is not None and path.is_file() and digest_file(path) == entry["digest"]:
            self.advance(path.stat().st_size)
            return entry["value"]
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        value = write()
        self.entries[name] = {"digest": digest_file(path), "value": value}
        write_atomic(self.folder / DONE, json.dumps(self.entries).encode())
        return value

    def shard(self, root: Path, name: str, write: Callable[[], FileEntry]) -> FileEntry:
        """Return the entry of a safetensors file."""

        def entry() -> list[JSON]:
            made = write()
            return [made.bytes, made.digest, list(made.blocks)]

        size, digest, blocks = self.file(root / name, entry)
        return FileEntry(size, digest, tuple(blocks))


def write_native(
    source: Source,
    folder: Path,
    origin: Mapping[str, JSON],
    advance: Advance,
    *,
    tp: int = 1,
    pp: int = 1,
    resumes: bool = False,
) -> Path:
    """Write a run directory as tp * pp ranks would have saved it; return its checkpoint.

    `origin` is where the weights are from, for `state["source"]`: "kind", "name", "files" and more. `resumes`
    keeps whole files of an interrupted conversion.
    """
    model = source.model
    config = run_config(str(origin["name"]).rpartition("/")[2] or "imported", model)
    initial = initial_values(model, source.filled, config.seed)

    def read(name: str, region: Region) -> Tensor:
        kind, _, name = name.removeprefix("optimizer.").partition(".")
        if name in initial:
            return initial[name][region.within(Region.whole(initial[name].shape))]
        return (source.read if kind == "model" else source.moments[kind])(name, region)

    kinds = ("model", *(f"optimizer.{moment}" for moment in source.moments))
    progress, step = Progress(folder, advance), folder / CHECKPOINTS / "step-00000000"
    return write_run(
        folder,
        {f"{kind}.{name}": one for kind in kinds for name, one in source.parameters.items()},
        read,
        state={
            **imported_state(config, origin, source.filled),
            **({"applied_steps": origin["iteration"]} if source.moments else {}),
        },
        tokenizer=source.tokenizer,
        progress=advance,
        tp=tp,
        stage_ranks=assign_stages(model.num_layers, pp, 1),
        done=lambda name, write: progress.shard(step, name, write) if resumes else write(),
    )


def write_dcp(
    folder: Path,
    tensors: Mapping[str, DCPTensor],
    read: Callable[[str, Region], Tensor],
    file_gb: float,
    progress: Progress,
    advance: Advance,
) -> None:
    """Write the files of a DCP folder and their `.metadata`."""
    folder.mkdir(exist_ok=True)
    files = plan_files(tensors, int(file_gb * GB))
    lengths = {
        name: progress.file(folder / name, partial(write_items, folder / name, items, tensors, read, advance))
        for name, items in files.items()
    }
    write_metadata(folder, tensors, files, lengths)


def write_torchtitan(
    source: Source, folder: Path, dtype: torch.dtype, file_gb: float, advance: Advance
) -> None:
    """Write a DCP folder with torchtitan's names, and the config.json that describes its model."""
    tensors, read = torchtitan_tensors(source.model, source.read, dtype)
    write_dcp(folder, tensors, read, file_gb, Progress(folder, advance), advance)
    write_config(source, folder)


def write_core(
    writer: MegatronWriter, folder: Path, file_gb: float, advance: Advance, *, stacked: bool
) -> None:
    """Write a DCP folder with Megatron's names, and common.pt.

    `stacked` is what Megatron-LM starts from: release/ and the file that names it, layers in one tensor.
    """
    tensors, read = core_tensors(writer, stacked=stacked)
    inner = folder / RELEASE if stacked else folder
    write_dcp(inner, tensors, read, file_gb, Progress(folder, advance), advance)
    (inner / "common.pt").unlink(missing_ok=True)
    write_common(inner, writer)
    if stacked:
        write_atomic(folder / LATEST, RELEASE.encode())


def write_torch(writer: MegatronWriter, folder: Path, advance: Advance) -> None:
    """Write the classic rank files, release/mp_rank_…, and the file that names them."""
    progress = Progress(folder, advance)
    for file in rank_files(writer):
        path = folder / RELEASE / file.path
        progress.file(path, partial(write_rank_file, path, file, writer, advance))
    write_atomic(folder / LATEST, RELEASE.encode())


def write_config(source: Source, folder: Path) -> None:
    """Write the config.json of `transformers`, from which such a folder's model is known again."""
    write_json(folder / CONFIG, hf_mapping(source).write(source.model, token_ids(source)))
