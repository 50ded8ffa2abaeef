"""Targets of `mlm convert`: any format, written from our parameters, one file at a time."""

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
from mlm.convert.config import ConvertConfig
from mlm.convert.dcp.torchtitan import torchtitan_tensors
from mlm.convert.dcp.writer import write_dcp
from mlm.convert.huggingface.export import hf_mapping, token_ids, write_hf, write_json
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
"""Complete files of a folder that is being written."""
MAX_DONE_BYTES = 1 << 26


class Progress:
    """Files of a folder that an earlier, interrupted conversion wrote: kept if their digests match."""

    def __init__(self, folder: Path, advance: Advance) -> None:
        self.folder, self.advance, self.entries = folder, advance, dict[str, dict[str, Any]]()
        if (folder / DONE).is_file():
            self.entries = parse_json(read_bounded(folder / DONE, MAX_DONE_BYTES, "delete it"))

    def file(self, path: Path, write: Callable[[], Any]) -> Any:
        """Return what `write`, which writes `path`, returned, now or before: a JSON value."""
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

        def entry() -> list[JSON]:
            written = write()
            return [written.bytes, written.digest, list(written.blocks)]

        size, digest, blocks = self.file(root / name, entry)
        return FileEntry(size, digest, tuple(blocks))


def write_target(
    config: ConvertConfig, source: Source, folder: Path, origin: dict[str, JSON], advance: Advance
) -> None:
    """Write the files of the format `config.to` into `folder`."""
    progress = Progress(folder, advance)
    dtype: torch.dtype = getattr(torch, config.dtype)
    most = int(config.max_file_gb * GB)
    match config.to:
        case "native":
            write_native(source, folder, origin, advance, tp=config.tp, pp=config.pp, progress=progress)
        case "hf":
            write_hf(source, folder, dtype, config.max_file_gb, advance, partial(progress.shard, folder))
        case "torchtitan":
            tensors, read = torchtitan_tensors(source.model, source.read, dtype)
            write_dcp(folder, tensors, read, most, progress.file, advance)
            # torchtitan records no model: this describes it.
            write_json(folder / CONFIG, hf_mapping(source).write(source.model, token_ids(source)))
        case "torch_dist" | "megatron_dcp":
            # Megatron-LM starts from torch_dist: release/ and the file that names it, layers in one tensor.
            is_stacked = config.to == "torch_dist"
            step = folder / RELEASE if is_stacked else folder
            writer = megatron_writer(config, source)
            tensors, read = core_tensors(writer, stacked=is_stacked)
            write_dcp(step, tensors, read, most, progress.file, advance)
            write_common(step, writer)
            if is_stacked:
                write_atomic(folder / LATEST, RELEASE.encode())
        case "torch":
            writer = megatron_writer(config, source)
            for file in rank_files(writer):
                path = folder / RELEASE / file.path
                progress.file(path, partial(write_rank_file, path, file, writer, advance))
            write_atomic(folder / LATEST, RELEASE.encode())


def megatron_writer(config: ConvertConfig, source: Source) -> MegatronWriter:
    return MegatronWriter(source.model, source.read, getattr(torch, config.dtype), config.tp, config.pp)


def write_native(
    source: Source,
    folder: Path,
    origin: Mapping[str, JSON],
    advance: Advance,
    *,
    tp: int = 1,
    pp: int = 1,
    progress: Progress | None = None,
) -> Path:
    """Write a run directory as tp * pp ranks would have saved it; return its checkpoint.

    `origin` is where the weights are from, for `state["source"]`: "kind", "name", "files" and more.
    `progress` keeps complete files of an interrupted conversion.
    """
    model = source.model
    config = run_config(str(origin["name"]).rpartition("/")[2] or "imported", model)
    initial = initial_values(model, source.filled, config.seed)

    def read(name: str, region: Region) -> Tensor:
        kind, _, name = name.removeprefix("optimizer.").partition(".")
        if name in initial:
            return initial[name][region.within(Region.whole(initial[name].shape))]
        return (source.read if kind == "model" else source.moments[kind])(name, region)

    step = folder / CHECKPOINTS / "step-00000000"
    kinds = ("model", *(f"optimizer.{moment}" for moment in source.moments))
    steps = {"applied_steps": origin["iteration"]} if source.moments else {}
    return write_run(
        folder,
        {f"{kind}.{name}": entry for kind in kinds for name, entry in source.parameters.items()},
        read,
        state={**imported_state(config, origin, source.filled), **steps},
        tokenizer=source.tokenizer,
        progress=advance,
        tp=tp,
        stage_ranks=assign_stages(model.num_layers, pp, 1),
        done=lambda name, write: write() if progress is None else progress.shard(step, name, write),
    )
