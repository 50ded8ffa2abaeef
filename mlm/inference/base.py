"""Weights of a checkpoint wherever they are: in it, in a model folder, or in a base that adapters change.

A run with adapters saves these alone, with where its base is and the digest of it. The base may have one too.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.format import MANIFEST, canonical
from mlm.checkpoint.native.run_state import LORA
from mlm.checkpoint.native.save_load import Manifest, TensorShard, load_checkpoint, read_manifest
from mlm.config.build import from_dict
from mlm.convert.huggingface.families import layer_names
from mlm.convert.huggingface.folder import CONFIG
from mlm.data.files_present import hub_id
from mlm.inference.hf_source import find_model, load_model_folder, open_tensors
from mlm.models.lora import adapter_shards, merged_changes
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.parallel.sharding import ParameterShard
from mlm.runs.config import PretrainConfig
from mlm.training.state import model_shards
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.files import digest_bytes

NOT_LOADED = ("model.mlm_head.", "model.sop_head.", "model.output.", "model.classifier.", "model.pooler.")
"""Prefixes of tensors that a checkpoint may hold and a model with another head does not take from it."""


@dataclass(frozen=True)
class Base:
    """The model that adapters were trained beside."""

    name: str
    """Its checkpoint or model folder, or an id of the Hub."""
    digest: str
    """Digest of its manifest, or of the files of a model folder."""

    @classmethod
    def of(cls, manifest: Manifest, path: Path) -> "Base | None":
        """Return the base that a checkpoint of adapters names; None for one that holds a whole model."""
        entry = manifest.state.get(LORA)
        if entry is None:
            return None
        name, digest = (entry.get(key) if isinstance(entry, dict) else None for key in ("base", "digest"))
        if not isinstance(name, str) or not isinstance(digest, str):
            raise CorruptFileError(f"{path}: does not name the base of its adapters")
        return cls(name, digest)

    @property
    def path(self) -> Path:
        """Its step-… directory or model folder. Raises UserError."""
        path = Path(self.name)
        if (path / MANIFEST).exists() or (path / CONFIG).is_file():
            return path
        folder = find_model(self.name) if hub_id(self.name) else None
        if folder is None:
            raise UserError(f"{self.name}: the base of these adapters is not there; bring it back")
        return folder

    def encode(self) -> dict[str, Any]:
        """As JSON values, for a checkpoint's state."""
        return {"base": self.name, "digest": self.digest}


def base_name(ckpt: str, path: Path) -> str:
    """Return the name under which the model of `ckpt`, found at `path`, is found again."""
    return hub_id(ckpt) or os.path.abspath(path)


def base_digest(path: Path) -> str:
    """Return the digest of the weights of a checkpoint or a model folder. Raises UserError, OSError."""
    if (path / MANIFEST).exists():
        return read_manifest(path).digest
    files: dict[str, Any] = open_tensors(path).digests(lambda _: None)
    return digest_bytes(canonical(files))


def load_any_weights(
    shards: Sequence[ParameterShard], path: Path, ctx: ParallelContext, *, fill: bool = True
) -> Manifest:
    """Fill parameters from a checkpoint or a model folder, with what adapters add to its base.

    A head that another model has is left out. Collective over all ranks. Returns the manifest of `path`.
    Raises UserError, also for another base than that of the adapters, and CorruptFileError.
    """
    if not (path / MANIFEST).exists():
        return load_model_folder(shards, path, ctx, fill=fill)
    manifest = Ranks.of(ctx).together(
        lambda: read_manifest(path), lambda error: UserError(f"{path}: {error}")
    )
    base = Base.of(manifest, path)
    if base is None:
        held = [
            s for s in shards if f"model.{s.name}" in manifest.tensors or not s.name.startswith("pooler.")
        ]
        return load_checkpoint(
            path, model_shards(held), ranks=Ranks.of(ctx), allow_extra=_is_left_out, cast=True
        )
    rest = [s for s in shards if f"model.{s.name}" not in manifest.tensors]
    below = load_any_weights(rest, base.path, ctx, fill=fill)
    if below.digest != base.digest:
        raise UserError(
            f"{path}: its adapters are of the base {base.digest}, and {base.name} is {below.digest}; "
            "bring that base back"
        )
    head = [s for s in shards if f"model.{s.name}" in manifest.tensors]
    return _add_adapters(rest, head, path, manifest, ctx)


def _is_left_out(name: str) -> bool:
    return name.startswith(("optimizer.", *NOT_LOADED))


@torch.no_grad()
def _add_adapters(
    shards: Iterable[ParameterShard],
    head: Sequence[ParameterShard],
    path: Path,
    manifest: Manifest,
    ctx: ParallelContext,
) -> Manifest:
    config = from_dict(PretrainConfig, dict(manifest.state["config"]))
    names = layer_names(config.model)
    adapters = {
        shard.name: torch.zeros(shard.global_shape)
        for shard, _ in adapter_shards(config.model, config.lora, names)
    }
    wanted = {f"model.{name}": whole_shard(x) for name, x in adapters.items()}
    found = load_checkpoint(
        path, wanted | model_shards(head), ranks=Ranks.of(ctx), allow_extra=_is_left_out, cast=True
    )
    mine = {shard.name: shard for shard in shards}
    for name, change_of in merged_changes(config.model, config.lora, names, adapters).items():
        if (shard := mine.get(name)) is not None:
            change = change_of()
            target = shard.without_padding(shard.parameter.detach())
            region = tuple(slice(o, o + n) for o, n in zip(shard.offset, target.shape, strict=True))
            tp = ctx.tp if shard.tp_dim == 1 else Axis("tp")
            target.copy_(change.apply_to(target.to(change.change.device, torch.float32), region, tp))
    return found


def whole_shard(x: Tensor) -> TensorShard:
    """Return a tensor that one process holds whole, as checkpoints see it."""
    return TensorShard(x, tuple(x.shape), (0,) * x.dim())
