"""A trainer's state as a checkpoint, and back."""

from pathlib import Path
from typing import Any

import torch

import mlm
from mlm.checkpoint.save_load import Manifest, Shard, load_checkpoint, save_checkpoint
from mlm.config.build import to_dict
from mlm.config.errors import CorruptFileError, UserError
from mlm.optim.adamw import MOMENTS, applied_steps, ensure_state, moment
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.sharding import ParameterShard
from mlm.train.trainer import Trainer

CHECKPOINTS = "checkpoints"
"""Folder of a run directory that holds its checkpoints."""

SAMPLING_KEYS = (("seed",), ("data", "seq_length"), ("data", "kind"))
"""Settings the sample order is a function of: they may not change within a run."""


def model_shards(shards: tuple[ParameterShard, ...]) -> dict[str, Shard]:
    """Parameters under their checkpoint names; views of the live tensors, padding left out."""
    return {
        f"model.{s.name}": Shard(s.without_padding(s.parameter.detach()), s.global_shape, s.offset)
        for s in shards
    }


def training_shards(trainer: Trainer) -> dict[str, Shard]:
    """Parameters and Adam's moments under their checkpoint names."""
    out = model_shards(tuple(trainer.shards))
    for s in trainer.shards:
        for name in MOMENTS:
            x = s.without_padding(moment(trainer.optimizer, s, name))
            out[f"optimizer.{name}.{s.name}"] = Shard(x, s.global_shape, s.offset)
    return out


def save(trainer: Trainer, out: Path) -> Path:
    """Write `out/checkpoints/step-…`. Collective over all ranks; raises CheckpointError on all."""
    ctx, config = trainer.ctx, trainer.config
    stored = {s.name for s in trainer.shards if is_stored(s, ctx)}
    owned = {k: v for k, v in training_shards(trainer).items() if parameter_name(k) in stored}
    state: dict[str, Any] = {
        "step": trainer.step,
        "consumed_samples": trainer.consumed_samples,
        "applied_steps": applied_steps(trainer.optimizer),
        "scaler": trainer.scaler.state(),
        "config": to_dict(config),
        "versions": {"mlm": mlm.__version__, "torch": torch.__version__},
    }
    return save_checkpoint(
        out / CHECKPOINTS,
        trainer.step,
        owned,
        state=state,
        rank=ctx.rank,
        world_size=ctx.world_size,
        group=ctx.host_group,
        watch=ctx.watch,
        keep_last=config.checkpoint.keep_last,
        keep_every=config.checkpoint.keep_every,
    )


def is_stored(shard: ParameterShard, ctx: ParallelContext) -> bool:
    """Whether this rank writes this part. Data-parallel replicas are equal: the first one writes."""
    return shard.is_owner and (shard.dp_slice is not None or ctx.dp.rank == 0)


def parameter_name(key: str) -> str:
    """The parameter a checkpoint tensor belongs to: model.X and optimizer.exp_avg.X -> X."""
    kind, rest = key.split(".", 1)
    return rest if kind == "model" else rest.split(".", 1)[1]


def load(trainer: Trainer, path: Path) -> Manifest:
    """Continue from a checkpoint directory: weights, moments, loss scale and counters.

    Collective over all ranks. Raises UserError when the checkpoint is of another model or sample order,
    CorruptFileError when it is damaged.
    """
    ctx = trainer.ctx
    manifest = load_checkpoint(
        path,
        training_shards(trainer),
        rank=ctx.rank,
        world_size=ctx.world_size,
        group=ctx.host_group,
        watch=ctx.watch,
        config=to_dict(trainer.config),
    )
    try:
        check_sampling(path, manifest, to_dict(trainer.config))
        state = manifest.state
        trainer.step = int(state["step"])
        trainer.consumed_samples = int(state["consumed_samples"])
        trainer.scaler.load_state(state["scaler"])
        ensure_state(trainer.optimizer, trainer.shards, float(state["applied_steps"]))
    except UserError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(
            f"{path}: its state is not that of a training run ({error!r}). Take another checkpoint"
        ) from error
    return manifest


def check_sampling(path: Path, manifest: Manifest, config: dict[str, Any]) -> None:
    """Refuse to continue where the order of samples would change under way."""
    for keys in SAMPLING_KEYS:
        now, then = config, manifest.state["config"]
        for key in keys:
            now, then = now[key], then[key]
        if now != then:
            name = ".".join(keys)
            raise UserError(
                f"{name}={now}: {path} was trained with {name}={then}; another value would repeat or skip "
                f"samples. Use {name}={then}, or a new out=… without ckpt=…"
            )


def load_weights(shards: tuple[ParameterShard, ...], path: Path, ctx: ParallelContext) -> Manifest:
    """Fill a model's parameters from a checkpoint, for evaluation and sampling. Collective."""
    return load_checkpoint(
        path,
        model_shards(shards),
        rank=ctx.rank,
        world_size=ctx.world_size,
        group=ctx.host_group,
        watch=ctx.watch,
        allow_extra=lambda name: name.startswith("optimizer."),
        cast=True,
    )
