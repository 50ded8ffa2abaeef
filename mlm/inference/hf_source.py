"""A model of `transformers` in the place of a checkpoint: found in a folder or on the Hub, read as it is.

No copy is written. Each rank reads its part of every tensor through `HFTensors`: JSON and safetensors only.
"""

import re
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from mlm.checkpoint.huggingface.folder import AGAIN, CONFIG, SMALL_FILES, HFModel, read_model, read_settings
from mlm.checkpoint.huggingface.tensors import HFTensors
from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.format import JSON, CheckpointError, Manifest, canonical
from mlm.checkpoint.native.slices import Region
from mlm.config.build import to_dict
from mlm.data.config import DataConfig
from mlm.data.files_present import hub_id
from mlm.errors import UserError
from mlm.files.atomic import digest_bytes
from mlm.hub import expect_hub
from mlm.parallel.init import init_shard
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.sharding import ParameterShard
from mlm.train.config import PretrainConfig
from mlm.train.run_folder import parameters, with_filled

EXTRA = "pip install 'mlm[hf]'"
COMMIT = re.compile(r"[0-9a-f]{40}")
NOT_CACHED = ("LocalEntryNotFoundError", "OfflineModeIsEnabled")
TENSOR_FILES = ("model.safetensors", "model-*-of-*.safetensors")
"""Patterns of the tensors we read on the Hub: no pickle, no code."""


def find_model(ckpt: str) -> Path | None:
    """The model folder that `ckpt=` names, fetched where it is an id of the Hub; None where it names none.

    Raises UserError when the Hub does not give it.
    """
    folder = Path(ckpt)
    if folder.is_dir():
        return folder if (folder / CONFIG).is_file() else None
    found = hub_id(ckpt)
    return None if found is None else fetch(found, None, "ckpt")


def fetch(repository: str, revision: str | None, setting: str) -> Path:
    """A model's settings, tokenizer and tensors in the Hub's cache; `setting` is the key for messages.

    Raises UserError in one line, whatever went wrong.
    """
    read_settings(download(repository, revision, SMALL_FILES, setting))  # before gigabytes that are not ours
    return download(repository, revision, (*SMALL_FILES, *TENSOR_FILES), setting)


def download(repository: str, revision: str | None, patterns: tuple[str, ...], setting: str) -> Path:
    """The Hub's files that match, in its cache. Raises UserError."""
    expect_hub()
    try:
        hub: Any = import_module("huggingface_hub")  # optional
    except ImportError as error:
        raise UserError(
            f"{setting}={repository}: no such folder; to ask the Hub for it, {EXTRA} (huggingface_hub)"
        ) from error
    try:
        found = hub.snapshot_download(repository, revision=revision, allow_patterns=list(patterns))
    except Exception as error:  # the library raises many kinds, those of its HTTP client too
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        if type(error).__name__ in NOT_CACHED:
            reason = "out of reach from here, and its cache does not hold it"
        at = "" if revision is None else f" revision={revision}"
        raise UserError(
            f"{setting}={repository}{at}: no such folder, and the Hub does not give it ({reason}). "
            f"Mend the id or the connection, or give a folder with config.json and model.safetensors"
        ) from error
    return Path(found)


def commit_of(folder: Path) -> str | None:
    """The commit that a folder of the Hub's cache is a snapshot of."""
    return folder.name if COMMIT.fullmatch(folder.name) else None


def model_name(folder: Path) -> str:
    """What a model folder is called: its last component, which names no machine, or its name on the Hub."""
    found = folder.resolve()
    if found.parent.name == "snapshots":  # models--OWNER--NAME/snapshots/COMMIT
        return found.parents[1].name.rpartition("--")[2]
    return found.name


def run_spec(model: HFModel) -> PretrainConfig:
    """What `mlm import hf` writes as the configuration of such a model."""
    name = model_name(model.folder)
    data = DataConfig(seq_length=model.config.max_positions)
    return PretrainConfig(name=name, out=f"runs/{name}", model=model.config, data=data)


def open_tensors(folder: Path) -> HFTensors:
    """The tensors of a model folder, their names, dtypes and shapes checked. Raises UserError."""
    tensors = HFTensors(read_model(folder))
    tensors.check({name: tensor.shape for name, tensor in parameters(tensors.model.config).items()})
    return tensors


@torch.no_grad()
def load_model_folder(
    shards: Iterable[ParameterShard], folder: Path, ctx: ParallelContext, *, fill: bool = True
) -> Manifest:
    """Fill a model's parameters from a model folder; what a checkpoint of it would say of itself.

    What the folder does not hold (`HFTensors.filled`, or a head that it never had) takes the initial values
    of the run spec's seed, or where `fill` is false stays as it is: those of the run that goes on from here.

    Collective over all ranks; raises on all of them what one finds wrong: UserError, CorruptFileError. The
    digest is that of the files' digests, each file read once more for it by rank 0.
    """
    ranks = Ranks(ctx.rank, ctx.world_size, ctx.host_group, ctx.watch)

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
        return CheckpointError(f"{folder}: could not be loaded ({type(error).__name__}: {error}). {AGAIN}")

    tensors = ranks.together(load, explain)
    mine = ranks.together(lambda: tensors.digests(lambda _: None) if ranks.is_main else {}, explain)
    files: dict[str, JSON] = ranks.broadcast(mine)
    spec = run_spec(tensors.model)
    source = {"kind": "huggingface", "name": spec.name, "revision": commit_of(folder), "files": files}
    state: dict[str, JSON] = {
        "step": 0,
        "weights_only": True,
        "config": to_dict(spec),
        "source": with_filled(source, tensors.filled),
    }
    return Manifest(0, "", {}, {}, state, digest=digest_bytes(canonical(files)))
