"""The manifest of a checkpoint: how it is written, and checks before any of it is believed.

README.md in this folder is the specification. A digest guards against accidents, not against an adversary
(xxh3 is no cryptographic hash): what keeps a hostile checkpoint harmless is that nothing in it is ever
executed, that sizes are bounded before anything is read, and that file names cannot leave the directory.
"""

import json
import math
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from mlm.checkpoint.native.columns import (
    Chunk,
    Chunks,
    check_sizes,
    columns_problem,
    decode_columns,
    encode_columns,
    row_bytes,
)
from mlm.checkpoint.native.slices import Region, Split, tiling_problem
from mlm.util.atomic import digest_bytes, parse_json, read_bounded, write_atomic
from mlm.util.errors import CorruptFileError, UserError

JSON: TypeAlias = Any
"""A JSON value: null, boolean, finite number, string, list, or object with string keys."""

FORMAT = "mlm-checkpoint"
VERSION = 2
"""The newest version. Version 1 lists the chunks in the manifest, version 2 in CHUNKS."""
MANIFEST = "manifest.json"
CHUNKS = "chunks.bin"
MOST_LISTED = 1 << 16
"""Chunks up to which version 1 is written, which older releases read too."""
MAX_MANIFEST_BYTES = 1 << 26  # 64 MiB
MAX_CHUNKS_BYTES = 1 << 30  # 1 GiB: 26 million chunks of two dims
DIGEST_BLOCK = 1 << 24
"""Bytes of a shard file that one of its block digests covers: 16 MiB."""
MAX_DIMS = 32
MAX_NAME = 500  # characters of a tensor's name
MAX_STEP = 10**18 - 1  # what a directory's name holds
MAX_SAVE_ID = 100  # characters
RESTORE = "Restore it from a copy, or load another checkpoint with ckpt=…"

DIGEST = re.compile(r"xxh3:[0-9a-f]{32}")
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}\.safetensors")  # no separator, no "..", not hidden

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' name of each dtype that can be stored."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckpointError(UserError):
    """A checkpoint could not be written or read: disk full, no permission, a rank that failed."""


class NotFiniteError(CheckpointError):
    """A state that holds NaN or infinity was not saved."""


@dataclass(frozen=True)
class TensorEntry:
    """A global tensor and the chunks that tile it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Sequence[Chunk]
    split: Split | None = None
    """Split over layouts, if the writer knew it."""
    norm: float | None = field(default=None, compare=False)
    """L2 norm, NaN if an element is not finite; None from older versions, or of a dtype without it."""
    norm_before: float | None = field(default=None, compare=False)
    """Norm in the checkpoint before, or in the last one before weights jumped."""

    def overlapping(self, wanted: Region) -> Iterable[Chunk]:
        """The chunks that hold an element of `wanted`, and perhaps others."""
        return self.chunks.overlapping(wanted) if isinstance(self.chunks, Chunks) else self.chunks


@dataclass(frozen=True)
class FileEntry:
    """Size and content digests of a shard file."""

    bytes: int
    digest: str
    blocks: tuple[str, ...] = ()
    """Digests of its consecutive blocks of DIGEST_BLOCK bytes; empty from older versions."""


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint. `tensors` is sorted by name."""

    step: int
    save_id: str
    """Random, the same in every shard of one save: distinguishes a shard of this save from one of another."""
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]
    state: Mapping[str, JSON]
    version: int = 1
    digest: str = ""
    """Digest of the manifest, and through the files' digests of the whole checkpoint."""


@dataclass(frozen=True)
class Summary:
    """A manifest without the chunks of CHUNKS. Reading it costs little, however many there are."""

    step: int
    save_id: str
    files: Mapping[str, FileEntry]
    state: Mapping[str, JSON]
    chunks: FileEntry | None
    """The file CHUNKS; None of version 1."""
    tensors: Mapping[str, TensorEntry] = field(default_factory=dict)
    """Without chunks in version 2: shapes and norms."""


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest of a directory that holds its shards, and CHUNKS where it has one.

    Raises ValueError or TypeError when `state` cannot be said in JSON, CorruptFileError when what was written
    could not be read, OSError.
    """
    path, content = directory / MANIFEST, _chunks_content(manifest)
    encoded = _encode(manifest, content)
    if content is not None:
        write_atomic(directory / CHUNKS, content)
    decode_manifest(encoded, path)  # what is published can be read
    write_atomic(path, encoded)


def encode_manifest(manifest: Manifest) -> bytes:
    """The content of MANIFEST. Raises as `write_manifest` does."""
    return _encode(manifest, _chunks_content(manifest))


def _chunks_content(manifest: Manifest) -> bytes | None:
    """The content of CHUNKS, None of a checkpoint that needs none. Raises ValueError."""
    entries = [manifest.tensors[name] for name in sorted(manifest.tensors)]
    shapes, count = [entry.shape for entry in entries], sum(len(entry.chunks) for entry in entries)
    if count <= MOST_LISTED:
        return None
    if (size := count * row_bytes(shapes)) > MAX_CHUNKS_BYTES:
        raise ValueError(f"{count} chunks need {size} bytes, {MAX_CHUNKS_BYTES} is the limit")
    return encode_columns(shapes, [entry.chunks for entry in entries], sorted(manifest.files))


def _encode(manifest: Manifest, content: bytes | None) -> bytes:
    tensors = {
        name: {
            "shape": list(entry.shape),
            "dtype": DTYPE_NAMES[entry.dtype],
            **({"chunks": _encode_chunks(entry.chunks)} if content is None else {}),
            **({"split": asdict(entry.split)} if entry.split else {}),
            **(
                {}
                if entry.norm is None
                else {"norms": [_encode_norm(entry.norm_before), _encode_norm(entry.norm)]}
            ),
        }
        for name, entry in manifest.tensors.items()
    }
    columns = {} if content is None else {"chunks": {"bytes": len(content), "digest": digest_bytes(content)}}
    body = {
        "format": FORMAT,
        "version": 1 if content is None else 2,
        **columns,
        "step": manifest.step,
        "save_id": manifest.save_id,
        "files": {name: _encode_file(entry) for name, entry in manifest.files.items()},
        "tensors": tensors,
        # Through JSON once: keys that are numbers would be sorted otherwise when the digest is checked.
        "state": json.loads(json.dumps(manifest.state, allow_nan=False)),
    }
    body["digest"] = digest_bytes(canonical(body))
    encoded = canonical(body)
    if len(encoded) > MAX_MANIFEST_BYTES:
        raise ValueError(f"the manifest needs {len(encoded)} bytes, {MAX_MANIFEST_BYTES} is the limit")
    return encoded


def _encode_norm(norm: float | None) -> float | str | None:
    """Six digits of a norm; JSON has no NaN."""
    return norm if norm is None else "not finite" if math.isnan(norm) else float(f"{norm:.6g}")


def _encode_chunks(chunks: Sequence[Chunk]) -> list[JSON]:
    return [[c.file, list(c.region.offset), list(c.region.size)] for c in chunks]


def _encode_file(entry: FileEntry) -> dict[str, JSON]:
    blocks = {"blocks": list(entry.blocks)} if entry.blocks else {}
    return {"bytes": entry.bytes, "digest": entry.digest, **blocks}


def canonical(value: JSON) -> bytes:
    """The one spelling of a JSON value that digests are taken of: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint directory with its chunks, checked alone: no shard is opened.

    Raises CorruptFileError when it is missing, altered, malformed, names a file outside the directory, or
    when the chunks of a tensor leave a hole or overlap; UserError when there is no such directory or the
    format is of a later version; OSError when it cannot be read.
    """
    return decode_manifest(_read(directory), directory / MANIFEST)


def read_summary(directory: Path) -> Summary:
    """The manifest of a checkpoint directory without its tensors; CHUNKS is not opened.

    Raises as `read_manifest` does.
    """
    body, digest = _parse(_read(directory), path := directory / MANIFEST)
    with _damage_named(path):
        manifest, chunks = _build(body, digest)
    return Summary(manifest.step, manifest.save_id, manifest.files, manifest.state, chunks, manifest.tensors)


def read_chunks(path: Path, entry: FileEntry) -> bytes:
    """The content of a file CHUNKS, which is `entry`. Raises CorruptFileError where it is not, OSError."""
    if (size := regular_size(path)) != entry.bytes:
        raise CorruptFileError(f"{path}: {size} bytes, the manifest says {entry.bytes}. {RESTORE}")
    content = read_bounded(path, entry.bytes, RESTORE)
    if (digest := digest_bytes(content)) != entry.digest:
        raise CorruptFileError(f"{path}: damaged, digest {digest}, not {entry.digest}. {RESTORE}")
    return content


def _read(directory: Path) -> bytes:
    """The content of MANIFEST."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such checkpoint. Set ckpt=… to a step-… or run directory")
    path = directory / MANIFEST
    size = regular_size(path)
    if size > MAX_MANIFEST_BYTES:
        raise CorruptFileError(f"{path}: {size} bytes, {MAX_MANIFEST_BYTES} is the limit. {RESTORE}")
    return read_bounded(path, MAX_MANIFEST_BYTES, RESTORE)


def regular_size(path: Path) -> int:
    """Bytes of a file that must be there and be a file: no link that leads elsewhere, no pipe that blocks.

    Raises CorruptFileError.
    """
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise CorruptFileError(f"{path}: missing, the checkpoint is not whole. {RESTORE}") from None
    if not stat.S_ISREG(found.st_mode):
        raise CorruptFileError(f"{path}: is a link or special file. {RESTORE}")
    return found.st_size


def decode_manifest(encoded: bytes, path: Path) -> Manifest:
    """The inverse of `encode_manifest`: `path` is its present or future location, beside its CHUNKS.

    Raises as `read_manifest` does.
    """
    body, digest = _parse(encoded, path)
    with _damage_named(path):
        manifest, chunks = _build(body, digest)
    return manifest if chunks is None else _with_chunks(manifest, chunks, path.with_name(CHUNKS))


def _with_chunks(manifest: Manifest, entry: FileEntry, path: Path) -> Manifest:
    """The manifest, its chunks read from `path`. Raises CorruptFileError, OSError."""
    content, names = read_chunks(path, entry), list(manifest.tensors)
    entries, files = list(manifest.tensors.values()), sorted(manifest.files)
    shapes = [tensor.shape for tensor in entries]
    try:
        columns = decode_columns(content, shapes, entry.bytes // row_bytes(shapes), len(files))
        if problem := columns_problem(columns, names):
            raise ValueError(problem)
        itemsizes = [tensor.dtype.itemsize for tensor in entries]
        check_sizes(columns, itemsizes, {name: manifest.files[name].bytes for name in files})
    except ValueError as error:
        raise CorruptFileError(f"{path}: damaged chunks, {error}. {RESTORE}") from error
    chunks = columns.by_tensor(files)
    tensors = {n: replace(t, chunks=c) for n, t, c in zip(names, entries, chunks, strict=True)}
    return replace(manifest, tensors=tensors)


def _parse(encoded: bytes, path: Path) -> tuple[dict[str, JSON], str]:
    """The JSON object of a manifest without its digest, which holds, and the digest."""
    with _damage_named(path):
        body = parse_json(encoded)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise ValueError(f'its "format" is not "{FORMAT}"')
        if type(body.get("version")) is int and body["version"] > VERSION:
            raise UserError(f"{path}: format version {body['version']}, known up to {VERSION}. Upgrade mlm")
        digest = body.pop("digest", None)
        if digest != digest_bytes(canonical(body)):
            raise ValueError("its digest does not match its content: it was altered")
        return body, digest


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Turn what a malformed manifest raises into a CorruptFileError that names it."""
    try:
        yield
    except UserError:
        raise
    except KeyError as e:
        raise CorruptFileError(f"{path}: damaged manifest, {e} is missing. {RESTORE}") from e
    except (ValueError, TypeError, AttributeError, RecursionError) as e:
        raise CorruptFileError(f"{path}: damaged manifest, {e}. {RESTORE}") from e


def _build(body: dict[str, JSON], digest: str) -> tuple[Manifest, FileEntry | None]:
    """The manifest, and the file CHUNKS where it has one: the tensors have no chunks then."""
    version = body["version"]
    if type(version) is not int or version not in (1, 2):
        raise ValueError(f"version {str(version)[:40]!r}")
    if not all(isinstance(body[name], dict) for name in ("files", "tensors", "state")):
        raise ValueError("files, tensors or state is not an object")
    files: dict[str, FileEntry] = {}
    for name, entry in body["files"].items():
        if not FILE_NAME.fullmatch(name):
            raise ValueError(f"file name {name!r} is not allowed")
        size = _whole_number(entry["bytes"])
        blocks = _build_blocks(name, entry.get("blocks"), size)
        files[name] = FileEntry(size, _digest(entry["digest"]), blocks)
    names, listed = sorted(body["tensors"]), version == 1
    tensors = {name: _build_tensor(name, body["tensors"][name], files if listed else None) for name in names}
    if listed:
        _check_sizes(tensors, files)
    chunks = None if listed else _build_chunks(body["chunks"], [entry.shape for entry in tensors.values()])
    state, step, save_id = body["state"], _whole_number(body["step"]), body["save_id"]
    if step > MAX_STEP:
        raise ValueError(f"step {step} is not in range")
    if not isinstance(save_id, str) or not save_id.isprintable() or len(save_id) > MAX_SAVE_ID:
        raise ValueError(f"save_id {str(save_id)[:40]!r} is not allowed")
    return Manifest(step, save_id, tensors, files, state, version, digest), chunks


def _build_chunks(said: JSON, shapes: Sequence[tuple[int, ...]]) -> FileEntry:
    size = _whole_number(said["bytes"])
    if size > MAX_CHUNKS_BYTES or size % row_bytes(shapes):
        raise ValueError(f"{CHUNKS} cannot have {size} bytes")
    return FileEntry(size, _digest(said["digest"]))


def _check_sizes(tensors: Mapping[str, TensorEntry], files: Mapping[str, FileEntry]) -> None:
    """Raise ValueError where a file is too small for its chunks: memory is taken for what tensors say."""
    needed = dict.fromkeys(files, 0)
    for entry in tensors.values():
        for chunk in entry.chunks:
            needed[chunk.file] += chunk.region.volume * entry.dtype.itemsize
    for name, count in needed.items():
        if count > files[name].bytes:
            raise ValueError(f"{name} of {files[name].bytes} bytes cannot hold {count} bytes of tensors")


def _build_blocks(name: str, said: JSON, size: int) -> tuple[str, ...]:
    if said is None:
        return ()
    if not isinstance(said, list) or len(said) != -(-size // DIGEST_BLOCK):
        raise ValueError(f"{name} does not have a digest for each of its blocks")
    return tuple(_digest(digest) for digest in said)


def _build_tensor(name: str, entry: JSON, files: Mapping[str, FileEntry] | None) -> TensorEntry:
    """A tensor; without `files` its chunks are not listed with it."""
    if not name.isprintable() or len(name) > MAX_NAME:  # names are printed, on terminals too
        raise ValueError(f"tensor name {name[:40]!r} is not allowed")
    shape = _numbers(entry["shape"])
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{name} has unknown dtype {entry['dtype']!r}")
    chunks = () if files is None else _build_listed(name, entry["chunks"], shape, files)
    split = build_split(name, entry["split"], shape) if "split" in entry else None
    before, norm = map(_build_norm, entry.get("norms", (None, None)))
    return TensorEntry(shape, DTYPES[entry["dtype"]], chunks, split, norm, before)


def _build_norm(said: JSON) -> float | None:
    if said is None or said == "not finite":
        return said and math.nan
    if type(said) not in (int, float) or not 0 <= said <= sys.float_info.max:
        raise ValueError(f"{str(said)[:40]} is no norm")
    return float(said)


def _build_listed(
    name: str, said: JSON, shape: tuple[int, ...], files: Mapping[str, FileEntry]
) -> tuple[Chunk, ...]:
    chunks = []
    for file, offset, size in said:
        if file not in files:
            raise ValueError(f"{name} is in {file!r}, which is not listed")
        chunks.append(Chunk(file, Region(_numbers(offset), _numbers(size))))
    if len({chunk.file for chunk in chunks}) < len(chunks):
        raise ValueError(f"{name} has two chunks in one file")
    if problem := tiling_problem(shape, [chunk.region for chunk in chunks]):
        raise ValueError(f"{name}: {problem}")
    return tuple(chunks)


def build_split(name: str, said: JSON, shape: tuple[int, ...]) -> Split:
    """A Split from its JSON. Raises ValueError, KeyError or TypeError when it is none for this shape."""
    split = Split(said["tp_dim"], said["stage"], _whole_number(said["multiple"]))
    dim, stage = split.tp_dim, split.stage
    if (dim is not None and _whole_number(dim) >= len(shape)) or not split.multiple:
        raise ValueError(f"{name} cannot be split along dim {dim} by {split.multiple}")
    if stage not in ("first", "last"):
        _whole_number(stage)
    return split


def _numbers(value: JSON) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMS:
        raise ValueError(f"{str(value)[:40]} is not a list of at most {MAX_DIMS} numbers")
    return tuple(map(_whole_number, value))


def _whole_number(value: JSON) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{str(value)[:40]} is not a whole number in range")
    return value


def _digest(value: JSON) -> str:
    if not isinstance(value, str) or not DIGEST.fullmatch(value):
        raise ValueError(f"{str(value)[:40]!r} is not a digest")
    return value
