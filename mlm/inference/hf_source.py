"""A model of `transformers` used like a checkpoint: found in a folder or on the Hub, read as it is.

No copy is written. Each rank reads its shard of every tensor through `HFTensors`: JSON and safetensors only.
"""

import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.format import JSON, CheckpointError, Manifest, canonical
from mlm.checkpoint.native.slices import Region
from mlm.convert.huggingface.folder import (
    CONFIG,
    EXPORTED_AGAIN,
    SAVE_AGAIN,
    SMALL_FILES,
    HFModel,
    read_model,
    read_settings,
)
from mlm.convert.huggingface.tensors import HFTensors
from mlm.data.files_present import hub_id
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.random import init_shard
from mlm.parallel.sharding import ParameterShard
from mlm.runs.config import PretrainConfig
from mlm.runs.folder import imported_state, run_config
from mlm.util.errors import UserError
from mlm.util.extras import go_offline_without_hub
from mlm.util.files import digest_bytes

EXTRA = "pip install 'mlm[hf]'"
COMMIT = re.compile(r"[0-9a-f]{40}")
NOT_CACHED = ("LocalEntryNotFoundError", "OfflineModeIsEnabled")
TENSOR_FILES = ("model.safetensors", "model-*-of-*.safetensors")
"""Patterns of the tensors to fetch from the Hub: no pickle, no code."""


def find_model(ckpt: str) -> Path | None:
    """Return the model folder that `ckpt=` names, fetched if it is an id of the Hub; None if it names none.

    Raises UserError if the Hub does not have it.
    """
    folder = Path(ckpt)
    if folder.is_dir():
        return folder if (folder / CONFIG).is_file() else None
    repository = hub_id(ckpt)
    return None if repository is None else fetch(repository, None, "ckpt")


def fetch(repository: str, revision: str | None, setting: str) -> Path:
    """Download a model's settings, tokenizer and tensors; `setting` is the key for messages.

    Raises UserError in one line for any failure.
    """
    read_settings(
        download(repository, revision, SMALL_FILES, setting)
    )  # before gigabytes that are not supported
    return download(repository, revision, (*SMALL_FILES, *TENSOR_FILES, *EXPORTED_AGAIN), setting)


def download(repository: str, revision: str | None, patterns: tuple[str, ...], setting: str) -> Path:
    """Download the files that match, and return their folder in the Hub's cache. Raises UserError."""
    go_offline_without_hub()
    try:
        hub: Any = import_module("huggingface_hub")  # optional
    except ImportError as error:
        raise UserError(
            f"{setting}={repository}: no such folder; to ask the Hub for it, {EXTRA} (huggingface_hub)"
        ) from error
    try:
        folder = hub.snapshot_download(repository, revision=revision, allow_patterns=list(patterns))
    except Exception as error:  # the library raises many kinds, those of its HTTP client too
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        if type(error).__name__ in NOT_CACHED:
            reason = "out of reach from here, and its cache does not hold it"
        at = "" if revision is None else f" revision={revision}"
        raise UserError(
            f"{setting}={repository}{at}: no such folder, and the Hub does not give it ({reason}). "
            f"Fix the id or the connection, or give a folder with config.json and model.safetensors"
        ) from error
    return Path(folder)


def commit_of(folder: Path) -> str | None:
    """Return the commit that a folder of the Hub's cache is a snapshot of."""
    return folder.name if COMMIT.fullmatch(folder.name) else None


def model_name(folder: Path) -> str:
    """Return the name of a model folder: its last component, or its name on the Hub."""
    resolved = folder.resolve()
    if resolved.parent.name == "snapshots":  # models--OWNER--NAME/snapshots/COMMIT
        return resolved.parents[1].name.rpartition("--")[2]
    return resolved.name


def run_spec(model: HFModel) -> PretrainConfig:
    """Return the configuration that `mlm import hf` writes for such a model."""
    return run_config(model_name(model.folder), model.config)


def describe_source(name: str, revision: str | None, files: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return the origin of a checkpoint: an id, or a folder's last component; the digests of its files."""
    return {"kind": "huggingface", "name": name, "revision": revision, "files": dict(files)}


def open_tensors(folder: Path) -> HFTensors:
    """Open the tensors of a model folder; check names, dtypes and shapes. Raises UserError."""
    tensors = HFTensors(read_model(folder))
    tensors.check()
    return tensors


@torch.no_grad()
def load_model_folder(
    shards: Iterable[ParameterShard], folder: Path, ctx: ParallelContext, *, fill: bool = True
) -> Manifest:
    """Fill a model's parameters from a model folder; return the manifest that a checkpoint of it would have.

    Parameters that the folder lacks (`HFTensors.filled`, or a head that it never had) take the initial values
    of the run spec's seed; with `fill` false they stay as they are, those of the run that starts from here.

    Collective over all ranks; raises UserError or CorruptFileError of one rank on all of them. The digest is
    that of the files' digests, for which rank 0 reads each file once more.
    """
    ranks = Ranks.of(ctx)

    def load() -> HFTensors:
        tensors = open_tensors(folder)
        seed = run_spec(tensors.model).seed
        for shard in shards:
            if not tensors.holds(shard.name):
                if fill:
                    init_shard(shard, seed)
                continue
            target = shard.without_padding(shard.parameter.detach())
            shard.parameter.zero_()  # its padding
            target.copy_(tensors.read(shard.name, Region(shard.offset, tuple(target.shape))))
        return tensors

    def explain(error: Exception) -> UserError:
        return CheckpointError(
            f"{folder}: could not be loaded ({type(error).__name__}: {error}). {SAVE_AGAIN}"
        )

    tensors = ranks.together(load, explain)
    mine = ranks.together(lambda: tensors.digests(lambda _: None) if ranks.is_main else {}, explain)
    files: dict[str, JSON] = ranks.broadcast(mine)
    spec = run_spec(tensors.model)
    source = describe_source(spec.name, commit_of(folder), files)
    state = imported_state(spec, source, tensors.filled)
    return Manifest(0, "", {}, {}, state, digest=digest_bytes(canonical(files)))
