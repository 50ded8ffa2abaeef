"""Sources of `mlm convert`: any format as parameters of ours, one at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from torch import Tensor

from mlm.checkpoint.commands.import_hf import ids_as_json, ids_to_keep, read_tokenizer
from mlm.checkpoint.commands.import_megatron import (
    digest_dcp,
    digest_files,
    find_checkpoint,
)
from mlm.checkpoint.dcp.metadata import COPY_AGAIN, MAX_METADATA_BYTES, METADATA, MOMENTS
from mlm.checkpoint.dcp.torchtitan import TOKEN_TABLE, TorchtitanReader
from mlm.checkpoint.huggingface.folder import CONFIG, read_model, read_settings
from mlm.checkpoint.huggingface.tensors import HFTensors
from mlm.checkpoint.megatron.distributed import CoreTensors, open_distributed, open_moments
from mlm.checkpoint.megatron.merge import open_checkpoint
from mlm.checkpoint.megatron.model import MegatronModel
from mlm.checkpoint.native.folders import locate
from mlm.checkpoint.native.format import JSON, read_manifest
from mlm.checkpoint.native.reader import Reader
from mlm.checkpoint.native.save_load import resolve
from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.native.verify import check_whole
from mlm.data.tokenizer import Tokenizer
from mlm.inference.base import Base
from mlm.inference.trained import check_stored_parameters, run_directory, trained_config
from mlm.models.config import ModelConfig
from mlm.training.state import is_weights_only
from mlm.util.errors import UserError
from mlm.util.files import read_bounded
from mlm.util.terminal import progress_bar

Read = Callable[[str, Region], Tensor]
Format = Literal["native", "hf", "torch_dist", "torch", "torchtitan", "megatron_dcp"]


@dataclass(frozen=True)
class Source:
    """A checkpoint of any format, opened."""

    format: str
    path: Path
    model: ModelConfig
    read: Read
    """Elements of a parameter of ours, by its name in `parameters(model)`, float32 on the CPU."""
    digests: Callable[[], dict[str, str]]
    """Compare every file with the checksums that it has; return the digest of each."""
    filled: frozenset[str] = frozenset()
    """Parameters that it lacks."""
    tokenizer: Tokenizer | None = None
    origin: dict[str, JSON] = field(default_factory=dict)
    """Ids and labels to keep."""
    notes: tuple[str, ...] = ()
    moments: Mapping[str, Read] = field(default_factory=dict)
    """As `read`, of each of Adam's moments; empty where they are not there whole."""
    applied_steps: int | None = None
    """Steps that they were made in."""


@dataclass(frozen=True)
class SourceSettings:
    """Settings that a source may not record."""

    config: str | None = None
    """Folder with the config.json of its model, or a run."""
    vocab_size: int | None = None
    num_heads: int | None = None
    tokenizer: str | None = None


def open_source(path: str, settings: SourceSettings) -> Source:
    """Find the format of a checkpoint and open it. Raises UserError and CorruptFileError."""
    folder = Path(path)
    tokenizer = None if settings.tokenizer is None else Tokenizer.load(settings.tokenizer)
    if _is_native(path):
        return _native(path, tokenizer)
    if not folder.is_dir():
        raise UserError(f"source={path}: no such folder; name a run, a model folder or a checkpoint folder")
    if (folder / CONFIG).is_file() and not (folder / METADATA).exists():
        return _huggingface(folder, tokenizer)
    found = find_checkpoint(path)
    config = _config(folder, settings.config)
    if isinstance(found, Path) and _has_torchtitan_names(found):
        return _torchtitan(found, config, tokenizer)
    known = tokenizer.vocab_size if tokenizer else None
    sizes = {"vocab_size": settings.vocab_size, "known": known, "num_heads": settings.num_heads}
    if isinstance(found, Path):
        return _megatron(found, open_distributed(found, config=config, **sizes), tokenizer)
    return _megatron(found.path, open_checkpoint(found, **sizes), tokenizer)


def _is_native(path: str) -> bool:
    try:
        locate(path)
    except UserError:
        return False
    return True


def _has_torchtitan_names(folder: Path) -> bool:
    """Return True if `.metadata` holds torchtitan's name of the token table; it is parsed later."""
    return TOKEN_TABLE.encode() in read_bounded(folder / METADATA, MAX_METADATA_BYTES, COPY_AGAIN)


def _config(folder: Path, named: str | None) -> ModelConfig | None:
    """Return the model that `config=` names, or a config.json in the folder describes; None without."""
    if named is not None and _is_native(named):
        path = resolve(named)
        return trained_config(read_manifest(path), path).model
    if named is None and not (folder / CONFIG).is_file():
        return None
    return read_settings(Path(named or folder))[2]


def _native(path: str, tokenizer: Tokenizer | None) -> Source:
    step = resolve(path)
    manifest = read_manifest(step)
    model = trained_config(manifest, step).model
    if Base.of(manifest, step) is not None:
        raise UserError(f"source={path}: holds adapters alone; convert what mlm export hf merge=true writes")
    check_stored_parameters(manifest, model, step)
    saved = run_directory(step) / "tokenizer.json"
    if tokenizer is None and saved.is_file():
        tokenizer = Tokenizer.load(saved)
    reader = Reader(step, manifest)

    def digests() -> dict[str, str]:
        size = sum(entry.bytes for entry in manifest.files.values())
        with progress_bar("verifying", size, in_bytes=True) as advance:
            check_whole(step, advance)
        return {name: entry.digest for name, entry in manifest.files.items()}

    def read(kind: str) -> Read:
        return lambda name, region: reader.read(f"{kind}.{name}", region).float()

    origin, steps = manifest.state.get("source"), manifest.state.get("applied_steps")
    kept = origin if isinstance(origin, dict) else {}
    has_moments = is_weights_only(manifest) and type(steps) is int
    return Source(
        "native",
        step,
        model,
        read("model"),
        digests,
        tokenizer=tokenizer,
        origin={key: kept[key] for key in ("pad_token_id", "labels") if key in kept},
        moments={name: read(f"optimizer.{name}") for name in MOMENTS} if has_moments else {},
        applied_steps=steps if type(steps) is int else None,
    )


def _huggingface(folder: Path, tokenizer: Tokenizer | None) -> Source:
    model = read_model(folder)
    tensors = HFTensors(model)
    tensors.check()
    own, notes = (tokenizer, []) if tokenizer is not None else read_tokenizer(model)
    ids, padding = ids_to_keep(model, own)

    def digests() -> dict[str, str]:
        with progress_bar("reading", tensors.num_bytes, in_bytes=True) as advance:
            return tensors.digests(advance)

    return Source(
        "hf",
        folder,
        model.config,
        tensors.read,
        digests,
        tensors.filled,
        own,
        ids_as_json(ids),
        (*map(str, model.notes), *notes, *padding),
    )


def _torchtitan(folder: Path, config: ModelConfig | None, tokenizer: Tokenizer | None) -> Source:
    if config is None:
        raise UserError(
            f"{folder}: torchtitan's names, and no config.json: give config=…, a folder with the config.json "
            "of the model (that of its transformers version) or a run of mlm"
        )
    tensors = TorchtitanReader(folder, config)
    moments, steps = tensors.open_moments()
    readers = dict.fromkeys([tensors.reader, *(each.reader for each in moments.values())])
    return Source(
        "torchtitan",
        folder,
        config,
        tensors.read,
        lambda: digest_dcp(*readers),
        tokenizer=tokenizer,
        moments={name: each.read for name, each in moments.items()},
        applied_steps=steps,
    )


def _megatron(path: Path, opened: MegatronModel, tokenizer: Tokenizer | None) -> Source:
    moments = open_moments(opened)
    return Source(
        "torch_dist" if isinstance(opened.held, CoreTensors) else "torch",
        path,
        opened.model,
        opened.read,
        lambda: digest_files(opened, *moments.values()),
        opened.filled,
        tokenizer,
        notes=opened.notes,
        moments={name: each.read for name, each in moments.items()},
        applied_steps=opened.iteration,
    )
