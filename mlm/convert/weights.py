"""Loading of a source into a live model: a checkpoint, a model folder, or adapters on a base."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.format import CheckpointError, Manifest
from mlm.checkpoint.native.save_load import load_checkpoint
from mlm.checkpoint.native.slices import Region, TensorShard
from mlm.checkpoint.parameters import model_shards
from mlm.convert.huggingface.families import layer_names
from mlm.convert.huggingface.folder import SAVE_AGAIN, commit_of
from mlm.convert.source import Checkpoint, ModelFolder, Source, digest_of_files
from mlm.models.lora import adapter_shards, merged_changes
from mlm.optim.precision import DTYPES
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.parallel.nf4 import NF4Weight, round_to_nf4
from mlm.parallel.random import init_shard
from mlm.parallel.sharding import ParameterShard
from mlm.runs.folder import imported_state
from mlm.util.errors import UserError

NOT_LOADED = (
    *("optimizer.", "model.mlm_head.", "model.sop_head.", "model.output."),
    *("model.classifier.", "model.pooler."),
)
"""Prefixes of a checkpoint's tensors that a model with another head, or without optimizer, ignores."""


@torch.no_grad()
def fill_parameters(
    shards: Sequence[ParameterShard], source: Source, ctx: ParallelContext, *, initialize: bool = True
) -> Manifest:
    """Fill parameters from a source, with adapters merged into its base; return its manifest.

    A head that the model does not have is ignored. Parameters that a model folder lacks take the initial
    values of its settings' seed; without `initialize` they stay as they are.

    Collective over all ranks. Raises UserError, also if the base of adapters has changed, and
    CorruptFileError; an error of one rank is raised on all.
    """
    # Weights in 4 bits are filled in full precision on the host, and quantised at the end.
    plain = {
        shard.name: replace(
            shard, parameter=nn.Parameter(torch.empty(weight.shape, dtype=weight.plain_dtype))
        )
        for shard in shards
        if isinstance(weight := shard.parameter, NF4Weight)
    }
    manifest = _fill([plain.get(shard.name, shard) for shard in shards], source, ctx, initialize=initialize)
    for shard in shards:
        if isinstance(weight := shard.parameter, NF4Weight):
            weight.quantize(plain.pop(shard.name).parameter)
    return manifest


def _fill(
    shards: Sequence[ParameterShard], source: Source, ctx: ParallelContext, *, initialize: bool
) -> Manifest:
    if isinstance(source, ModelFolder):
        return _fill_from_folder(shards, source, ctx, initialize=initialize)
    assert isinstance(source, Checkpoint), "other formats are converted first"
    load = partial(
        load_checkpoint,
        source.path,
        ranks=Ranks.of(ctx),
        allow_extra=lambda name: name.startswith(NOT_LOADED),
        cast=True,
    )
    stored = source.manifest.tensors
    if source.base is None:
        stored_shards = [s for s in shards if f"model.{s.name}" in stored or not s.name.startswith("pooler.")]
        return load(model_shards(stored_shards))
    by_name = {s.name: s for s in shards if f"model.{s.name}" not in stored}
    base_manifest = _fill([*by_name.values()], source.base, ctx, initialize=initialize)
    if base_manifest.digest != source.base_digest:
        raise UserError(
            f"{source.path}: its adapters are of the base {source.base_digest}, and {source.base_name} is "
            f"{base_manifest.digest}; bring that base back"
        )
    # Adapters and a task's head are loaded, then adapters are added to the weights of the base.
    model, lora, names = source.model, source.config.lora, layer_names(source.model)
    adapters = {
        shard.name: torch.zeros(shard.global_shape) for shard, _ in adapter_shards(model, lora, names)
    }
    adapter_targets = {f"model.{name}": TensorShard.full(x) for name, x in adapters.items()}
    manifest = load(adapter_targets | model_shards([s for s in shards if f"model.{s.name}" in stored]))
    for name in source.quantized:
        if (shard := by_name.get(name)) is not None:
            dtype = DTYPES[source.config.precision.dtype]
            shard.parameter.copy_(round_to_nf4(shard.parameter, dtype))
    for name, change_of in merged_changes(model, lora, names, adapters).items():
        if (shard := by_name.get(name)) is not None:
            change = change_of()
            target = shard.without_padding(shard.parameter.detach())
            region = tuple(slice(o, o + n) for o, n in zip(shard.offset, target.shape, strict=True))
            tp = ctx.tp if shard.tp_dim == 1 else Axis("tp")
            target.copy_(change.apply_to(target.to(change.change.device, torch.float32), region, tp))
    return manifest


def _fill_from_folder(
    shards: Sequence[ParameterShard], source: ModelFolder, ctx: ParallelContext, *, initialize: bool
) -> Manifest:
    """Fill parameters from a model folder; return the manifest that a checkpoint of it would have.

    Its digest derives from the files' digests, for which rank 0 reads each file once more.
    """
    ranks = Ranks.of(ctx)

    def fill() -> None:
        for shard in shards:
            if source.tensors.has_parameter(shard.name):
                target = shard.without_padding(shard.parameter.detach())
                shard.parameter.zero_()  # its padding
                target.copy_(source.read(shard.name, Region(shard.offset, tuple(target.shape))))
            elif initialize:
                init_shard(shard, source.config.seed)

    def explain(error: Exception) -> UserError:
        return CheckpointError(
            f"{source.path}: could not be loaded ({type(error).__name__}: {error}). {SAVE_AGAIN}"
        )

    ranks.together(fill, explain)
    digests = ranks.together(lambda: source.tensors.digests(lambda _: None) if ranks.is_main else {}, explain)
    files: dict[str, Any] = ranks.broadcast(digests)
    name, commit = source.config.name, commit_of(source.path)
    origin = {"kind": "huggingface", "name": name, "revision": commit, "files": files}
    state = imported_state(source.config, origin, source.filled)
    return Manifest(0, "", {}, {}, state, digest=digest_of_files(files))
