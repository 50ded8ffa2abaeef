"""The manifest of a checkpoint: writing, reading, and validation of untrusted content.

The guide Checkpoints is the specification. Digests guard against accidents, not against an adversary (xxh3 is
not a cryptographic hash). A hostile checkpoint is harmless because nothing in it is executed, sizes are
bounded before anything is read, and file names cannot leave the directory.
"""

import json
import math
import re
import stat
import sys
import zlib
from base64 import b64decode, b64encode
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from mlm.checkpoint.native.columns import (
    Chunk,
    check_sizes,
    columns_of,
    decode_columns,
    encode_columns,
    first_tiling_problem,
)
from mlm.checkpoint.native.run_state import RESTORE as RESTORE
from mlm.checkpoint.native.run_state import Save
from mlm.checkpoint.native.slices import UNSPLIT, TensorSplit
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.files import DIGEST, digest_bytes, parse_json, read_bounded, whole_number, write_atomic

JSON: TypeAlias = Any
"""A JSON value: null, boolean, finite number, string, list, or object with string keys."""

FORMAT = "mlm-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 26  # 64 MiB
MAX_CHUNKS_BYTES = 1 << 28  # 256 MiB unpacked: 6.7 million chunks of two dims
DIGEST_BLOCK = 1 << 24
"""Bytes of a shard file that one of its block digests covers: 16 MiB."""
MAX_DIMS = 32
MAX_NAME = 500  # characters of a tensor's name

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
    """A global tensor and, once stored, the chunks that tile it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    split: TensorSplit = UNSPLIT
    """Split over layouts."""
    chunks: Collection[Chunk] = ()
    norm: float | None = field(default=None, compare=False)
    """L2 norm; None for integers, and where no training run saved the tensor."""
    norm_before: float | None = field(default=None, compare=False)
    """Norm in the previous checkpoint, or in the last one before weights jumped."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class FileEntry:
    """Size and content digests of a shard file."""

    bytes: int
    digest: str
    blocks: tuple[str, ...]
    """Digests of its consecutive blocks of DIGEST_BLOCK bytes."""


@dataclass(frozen=True)
class Manifest:
    """Description of a checkpoint. `tensors` is sorted by name."""

    step: int
    save_id: str
    """Random, the same in every shard of one save: distinguishes a shard of this save from one of another."""
    tensors: Mapping[str, TensorEntry]
    files: Mapping[str, FileEntry]
    state: Mapping[str, JSON]
    digest: str = ""
    """Digest of the manifest, and through the files' digests of the whole checkpoint."""

    @property
    def save(self) -> Save:
        return Save(self.step, self.save_id)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest of a directory that holds its shards.

    Raises ValueError or TypeError if `state` is not JSON, CorruptFileError if the manifest could not be read
    back, OSError.
    """
    names = sorted(manifest.tensors)
    entries = [manifest.tensors[name] for name in names]
    columns = columns_of(
        [entry.shape for entry in entries], [entry.chunks for entry in entries], sorted(manifest.files)
    )
    body = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "save_id": manifest.save_id,
        "files": {name: asdict(entry) for name, entry in manifest.files.items()},
        "tensors": {
            name: {
                "shape": list(entry.shape),
                "dtype": DTYPE_NAMES[entry.dtype],
                "split": asdict(entry.split),
                "norms": None
                if entry.norm is None
                else [x if x is None else float(f"{x:.6g}") for x in (entry.norm_before, entry.norm)],
            }
            for name, entry in zip(names, entries, strict=True)
        },
        "chunks": pack(encode_columns(columns)),
        # Through JSON once: keys that are numbers would be sorted otherwise when the digest is checked.
        "state": json.loads(json.dumps(manifest.state, allow_nan=False)),
    }
    body["digest"] = digest_bytes(canonical(body))
    encoded = canonical(body)
    if len(encoded) > MAX_MANIFEST_BYTES:
        raise ValueError(f"the manifest needs {len(encoded)} bytes, {MAX_MANIFEST_BYTES} is the limit")
    # A manifest that fails its own checks must not be published.
    decode_manifest(encoded, directory / MANIFEST)
    write_atomic(directory / MANIFEST, encoded)


def pack(content: bytes) -> str:
    """Encode bytes as a JSON string: deflated, in base64."""
    return b64encode(zlib.compress(content, 1)).decode()


def unpack(packed: JSON) -> bytes:
    """Invert `pack`. Raises ValueError, also for more than MAX_CHUNKS_BYTES."""
    inflate = zlib.decompressobj()
    try:
        content = inflate.decompress(b64decode(packed, validate=True), MAX_CHUNKS_BYTES + 1)
    except zlib.error as error:
        raise ValueError(f"its chunks are no deflated columns ({error})") from error
    if len(content) > MAX_CHUNKS_BYTES or not inflate.eof:
        raise ValueError(f"its chunks end early, or have more than {MAX_CHUNKS_BYTES} bytes")
    return content


def canonical(value: JSON) -> bytes:
    """Encode a JSON value for digests, in one spelling: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of a checkpoint directory; no shard is opened.

    Raises CorruptFileError if it is missing, altered, malformed, names a file outside the directory, or
    the chunks of a tensor leave a hole or overlap; UserError if the directory does not exist or the format is
    of a later version; OSError if it cannot be read.
    """
    return decode_manifest(_read_bytes(directory), directory / MANIFEST)


def read_manifest_head(directory: Path) -> Manifest:
    """Read the manifest without its chunks, whose checks take time. Raises as `read_manifest` does."""
    return decode_manifest(_read_bytes(directory), directory / MANIFEST, with_chunks=False)


def _read_bytes(directory: Path) -> bytes:
    if not directory.is_dir():
        raise UserError(f"{directory}: no such checkpoint. Set ckpt=… to a step-… or run directory")
    regular_size(directory / MANIFEST)  # raises for a link or a pipe
    return read_bounded(directory / MANIFEST, MAX_MANIFEST_BYTES, RESTORE)


def regular_size(path: Path) -> int:
    """Return the bytes of a regular file. Raises CorruptFileError if it is missing, a link or a pipe."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        raise CorruptFileError(f"{path}: missing, the checkpoint is not whole. {RESTORE}") from None
    if not stat.S_ISREG(status.st_mode):
        raise CorruptFileError(f"{path}: is a link or special file. {RESTORE}")
    return status.st_size


def decode_manifest(encoded: bytes, path: Path | str, *, with_chunks: bool = True) -> Manifest:
    """Parse and check the content of MANIFEST; `path` is for messages. Raises as `read_manifest` does."""
    try:
        body = parse_json(encoded)
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise ValueError(f'its "format" is not "{FORMAT}"')
        version, digest = whole_number(body.get("version")), body.pop("digest", None)
        if version > VERSION:
            raise UserError(f"{path}: format version {version}, known up to {VERSION}. Upgrade mlm")
        if digest != digest_bytes(canonical(body)):
            raise ValueError("its digest does not match its content: it was altered")
        step, save_id = whole_number(body["step"]), body["save_id"]
        if version != VERSION or step > 10**18 - 1:  # eighteen digits in a name
            raise ValueError(f"version {version} or step {step} is not in range")
        # A save id is shown in messages, and compared.
        if not isinstance(save_id, str) or not save_id.isprintable() or len(save_id) > 100:
            raise ValueError(f"save_id {str(save_id)[:40]!r} is not allowed")
        if not all(isinstance(body[name], dict) for name in ("files", "tensors", "state")):
            raise ValueError("files, tensors or state is not an object")
        files = {name: _build_file(name, entry) for name, entry in body["files"].items()}
        tensors = {name: _build_tensor(name, body["tensors"][name]) for name in sorted(body["tensors"])}
        if with_chunks:  # they tile the tensors and fit into the files
            entries, names = list(tensors.values()), sorted(files)
            columns = decode_columns(unpack(body["chunks"]), [entry.shape for entry in entries], len(files))
            chunks = columns.by_tensor(names)
            if problem := first_tiling_problem(tensors, columns.shapes, chunks):
                raise ValueError(problem)
            itemsizes = [entry.dtype.itemsize for entry in entries]
            check_sizes(columns, itemsizes, {name: files[name].bytes for name in names})
            pairs = zip(tensors.items(), chunks, strict=True)
            tensors = {name: replace(entry, chunks=tensor_chunks) for (name, entry), tensor_chunks in pairs}
        return Manifest(step, save_id, tensors, files, body["state"], digest)
    except UserError:
        raise
    except KeyError as e:
        raise CorruptFileError(f"{path}: damaged manifest, {e} is missing. {RESTORE}") from e
    except (ValueError, TypeError, AttributeError, RecursionError) as e:
        raise CorruptFileError(f"{path}: damaged manifest, {e}. {RESTORE}") from e


def _build_file(name: str, entry: JSON) -> FileEntry:
    size, blocks = whole_number(entry["bytes"]), entry["blocks"]
    if not FILE_NAME.fullmatch(name):
        raise ValueError(f"file name {name!r} is not allowed")
    if not isinstance(blocks, list) or len(blocks) != -(-size // DIGEST_BLOCK):
        raise ValueError(f"{name} does not have a digest for each of its blocks")
    return FileEntry(size, _digest(entry["digest"]), tuple(map(_digest, blocks)))


def _build_tensor(name: str, entry: JSON) -> TensorEntry:
    """Return the entry of a tensor without its chunks. Raises ValueError, TypeError, KeyError."""
    shape = entry["shape"]
    if not name.isprintable() or len(name) > MAX_NAME:  # names are printed, on terminals too
        raise ValueError(f"tensor name {name[:40]!r} is not allowed")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS:
        raise ValueError(f"{name} has a shape that is not a list of at most {MAX_DIMS} numbers")
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{name} has unknown dtype {entry['dtype']!r}")
    sizes = tuple(map(whole_number, shape))
    value = entry["split"]
    split = TensorSplit(value["tp_dim"], value["stage"], whole_number(value["multiple"]))
    dim = split.tp_dim
    if (dim is not None and whole_number(dim) >= len(shape)) or not split.multiple:
        raise ValueError(f"{name} cannot be split along dim {dim} by {split.multiple}")
    if split.stage not in ("first", "last"):
        whole_number(split.stage)
    norm_before, norm = (None, None) if entry["norms"] is None else entry["norms"]
    for value in (norm_before, norm):
        if value is not None and (type(value) not in (int, float) or not 0 <= value <= sys.float_info.max):
            raise ValueError(f"{str(value)[:40]} is not a norm")
    return TensorEntry(sizes, DTYPES[entry["dtype"]], split, (), norm, norm_before)


def _digest(value: JSON) -> str:
    if not isinstance(value, str) or not DIGEST.fullmatch(value):
        raise ValueError(f"{str(value)[:40]!r} is not a digest")
    return value
