"""Targets of `mlm convert`: any format, from parameters of ours, a file at a time."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mlm
from mlm.checkpoint.commands.conversion_sources import Source
from mlm.checkpoint.commands.export_hf import (
    Exported,
    ExportSource,
    into_files,
    token_ids,
    write_json,
    write_settings,
    write_weights,
)
from mlm.checkpoint.commands.reshard import stage_ranks_of
from mlm.checkpoint.dcp.torchtitan import torchtitan_tensors
from mlm.checkpoint.dcp.writer import DCPTensor, plan_files, write_items, write_metadata
from mlm.checkpoint.huggingface.folder import CONFIG
from mlm.checkpoint.megatron.files import LATEST
from mlm.checkpoint.megatron.write import (
    RELEASE,
    MegatronWriter,
    core_tensors,
    rank_files,
    write_common,
    write_rank_file,
)
from mlm.checkpoint.native.format import JSON, FileEntry, Manifest
from mlm.checkpoint.native.run_state import TOKENIZER
from mlm.checkpoint.native.shard_file import Form
from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.native.stream import GlobalTensor, derived_id, write_streamed
from mlm.checkpoint.parameters import parameters
from mlm.models.family import family_of
from mlm.training.run_folder import GB, imported_state, imported_tensors, run_config
from mlm.training.run_tokenizer import digests_of_tokenizer
from mlm.training.state import CHECKPOINTS
from mlm.util.errors import UserError
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
    source: Source, folder: Path, origin: Mapping[str, JSON], tp: int, pp: int, advance: Advance
) -> None:
    """Write a run directory as tp * pp ranks would have saved it."""
    model = source.model
    config = run_config(str(origin["name"]) or "imported", model)
    state: dict[str, JSON] = {
        **imported_state(config, origin, source.filled),
        **({"applied_steps": source.applied_steps} if source.moments else {}),
        "versions": {"mlm": mlm.__version__, "torch": torch.__version__},
    }
    if source.tokenizer is not None:
        state[TOKENIZER] = digests_of_tokenizer(source.tokenizer).encode()
        source.tokenizer.save(folder / "tokenizer.json")
    tensors, read = imported_tensors(
        model, source.read, filled=source.filled, moments=source.moments, seed=config.seed
    )
    progress, root = Progress(folder, advance), folder / CHECKPOINTS
    write_streamed(
        root,
        0,
        tensors,
        read,
        save_id=derived_id({"state": state, "tp": tp, "pp": pp}),
        state=state,
        tp=tp,
        stage_rank=stage_ranks_of(model, pp, 1).__getitem__,
        progress=advance,
        done=lambda name, write: progress.shard(root / "step-00000000", name, write),
    )


def write_hf(source: Source, folder: Path, dtype: torch.dtype, file_gb: float, advance: Advance) -> None:
    """Write a folder that `transformers` loads."""
    described = describe_for_hf(source)
    shapes = {name: one.shape for name, one in parameters(source.model).items()}
    tensors = [
        Exported(name, location, part, described.mapping.stored_name(theirs, source.model.head), form)
        for name, location in described.mapping.locations(source.model)
        for form in [Form(dtype, location.shape(shapes[name]))]
        for part, theirs in enumerate(location.names)
    ]
    progress = Progress(folder, advance)

    def load(name: str, rows: slice | None) -> Tensor:
        first, *others = shapes[name]
        start, stop = (0, first) if rows is None else (rows.start, rows.stop)
        return source.read(name, Region((start, *(0 for _ in others)), (stop - start, *others)))

    write_weights(
        described,
        into_files(tensors, int(file_gb * GB)),
        folder,
        advance,
        load,
        lambda name, write: progress.shard(folder, name, write),
    )
    write_settings(described, folder)
    if dtype != torch.float32:
        config = parse_json((folder / CONFIG).read_bytes())
        write_json(folder / CONFIG, config | {"dtype": str(dtype).removeprefix("torch.")})


def describe_for_hf(source: Source) -> ExportSource:
    """Return the source as an export reads it. Raises UserError if `transformers` has no such model."""
    mapping = family_of(source.model.kind).huggingface
    if mapping is None:
        raise UserError(f"model.kind={source.model.kind} has no counterpart in transformers")
    if problem := mapping.problem(source.model):
        raise UserError(f"{source.path}: {problem}")
    manifest = Manifest(0, "", {}, {}, {"source": {"name": source.path.name, **source.origin}})
    return ExportSource(source.path, manifest, source.model, mapping, source.tokenizer)


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


def write_megatron_dcp(writer: MegatronWriter, folder: Path, file_gb: float, advance: Advance) -> None:
    """Write a DCP folder with Megatron's names, a tensor for each of a layer, and common.pt."""
    tensors, read = core_tensors(writer, stacked=False)
    write_dcp(folder, tensors, read, file_gb, Progress(folder, advance), advance)
    (folder / "common.pt").unlink(missing_ok=True)
    write_common(folder, writer)


def write_torch_dist(writer: MegatronWriter, folder: Path, file_gb: float, advance: Advance) -> None:
    """Write a checkpoint that Megatron-LM starts from: release/ and the file that names it."""
    tensors, read = core_tensors(writer, stacked=True)
    write_dcp(folder / RELEASE, tensors, read, file_gb, Progress(folder, advance), advance)
    (folder / RELEASE / "common.pt").unlink(missing_ok=True)
    write_common(folder / RELEASE, writer)
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
    described = describe_for_hf(source)
    write_json(folder / CONFIG, described.mapping.write(source.model, token_ids(described)))


def tensor_bytes(source: Source, dtype: torch.dtype) -> int:
    """Return the bytes of the parameters in `dtype`."""
    tensors: Mapping[str, GlobalTensor] = parameters(source.model)
    return sum(one.num_bytes // 4 * dtype.itemsize for one in tensors.values())
