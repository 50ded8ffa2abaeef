"""A trainer's state as a checkpoint, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import mlm
from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.folders import BEST, CHECKPOINTS, descendants_set_aside, step_name
from mlm.checkpoint.native.run_state import (
    BEST_VALIDATION,
    EMA,
    INCIDENTS,
    LINEAGE,
    LORA,
    MAX_COUNT,
    TOKENIZER,
    VALIDATION_DUE,
    Lineage,
    check_run_state,
    is_weights_only,
)
from mlm.checkpoint.native.save_load import (
    CheckpointError,
    Manifest,
    TensorShard,
    load_checkpoint,
    read_manifest,
    resolve,
    save_checkpoint,
)
from mlm.checkpoint.parameters import as_shard, model_shards
from mlm.config.build import to_dict
from mlm.convert.source import is_native
from mlm.data.blend_history import BlendSegments, decode, encode
from mlm.optim.adamw import applied_steps, ensure_state, moment, moments
from mlm.optim.average import NAME
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.sharding import ParameterShard
from mlm.runs.config import PretrainConfig
from mlm.training.identity import (
    MAX_CHANGES,
    RunAncestry,
    changes_since,
    function_errors,
    identity_errors,
    recorded_changes,
)
from mlm.training.trainer import Trainer
from mlm.util.errors import ConfigError, CorruptFileError, UserError
from mlm.util.files import whole_number


def training_shards(
    trainer: Trainer, shards: Sequence[ParameterShard], *, averages: bool = True
) -> dict[str, TensorShard]:
    """Parameters, moments and averages by their checkpoint names: views of the live tensors."""
    multiple = trainer.config.model.vocab_multiple
    shards = stored_shards(trainer, shards)
    out = model_shards(shards, multiple)
    for s in (s for s in shards if s.is_trained):
        for name in moments(trainer.optimizer, s):
            out[f"optimizer.{name}.{s.name}"] = as_shard(s, moment(trainer.optimizer, s, name), multiple)
        if averages and trainer.average is not None:
            out[f"optimizer.{NAME}.{s.name}"] = as_shard(s, trainer.average.values[s.parameter], multiple)
    return out


def stored_shards(trainer: Trainer, shards: Sequence[ParameterShard]) -> list[ParameterShard]:
    """Return the shards that checkpoints of the run hold: with adapters, only the trained ones."""
    return [s for s in shards if s.is_trained or not trainer.config.lora.rank]


def owned_shards(trainer: Trainer) -> dict[str, TensorShard]:
    """Return the parameters and moments that this rank writes, as the first of equal replicas: live views."""
    replicas = trainer.ctx.replicas
    return training_shards(trainer, [shard for shard in trainer.shards if shard.is_stored(replicas)])


def counters(trainer: Trainer) -> dict[str, Any]:
    """Return the state of a checkpoint other than tensors. Reads the loss scale back from the device."""
    return {
        "step": trainer.step,
        "consumed_samples": trainer.consumed_samples,
        "applied_steps": applied_steps(trainer.optimizer),
        "scaler": trainer.scaler.state(),
        "config": to_dict(replace(trainer.config, data=replace(trainer.config.data, change=False))),
        "versions": {"mlm": mlm.__version__, "torch": torch.__version__},
        **({"data": {"segments": encode(trainer.history)}} if trainer.history else {}),
        **({} if trainer.average is None else {EMA: int(trainer.average.count.item())}),
        LINEAGE: trainer.ancestry.encode(),
        **trainer.extra_state,
    }


def save_best(trainer: Trainer, out: Path) -> None:
    """Write out/best/checkpoints/step-…, weights alone, in place of the one before.

    Collective over all ranks; raises CheckpointError on all of them.
    """
    # the main checkpoints hold lineage and averages
    state = {key: value for key, value in counters(trainer).items() if key not in (EMA, LINEAGE)}
    owned = [s for s in stored_shards(trainer, trainer.shards) if s.is_stored(trainer.ctx.replicas)]
    save_checkpoint(
        out / BEST / CHECKPOINTS,
        trainer.step,
        model_shards(owned, trainer.config.model.vocab_multiple),
        state={**state, "weights_only": True},
        ranks=Ranks.of(trainer.ctx),
        keep_last=1,
        keep_every=0,
    )


def load(trainer: Trainer, path: Path) -> Manifest:
    """Continue from a checkpoint directory: weights, moments, loss scale and counters.

    A checkpoint of weights alone starts the run at step 0. Collective. Raises ConfigError with a line for
    each setting of the run's identity that differs (of the model's function for weights alone), UserError if
    the tensors do not fit, CorruptFileError for a damaged checkpoint.
    """
    ctx, ranks, config = trainer.ctx, Ranks.of(trainer.ctx), to_dict(trainer.config)

    def check() -> tuple[bool, bool, dict[str, Any] | None]:
        if not ranks.is_main:
            return False, False, None
        manifest = read_manifest(path)
        check_identity(trainer.config, path, manifest)
        if LORA in trainer.extra_state:
            check_base(trainer.config, path, manifest, trainer.extra_state[LORA])
        best = best_validation(trainer.config, manifest.state)
        return is_weights_only(manifest.state), EMA in manifest.state, best

    checked = ranks.together(check, lambda error: CheckpointError(f"{path}: {error}"))
    is_start, has_average, best = ranks.broadcast(checked)
    if is_start:
        return load_weights(trainer.shards, path, ctx, config=config)
    shards = training_shards(trainer, trainer.shards, averages=has_average)
    manifest = load_checkpoint(
        path,
        shards,
        ranks=ranks,
        allow_extra=lambda name: trainer.average is None and name.startswith(f"optimizer.{NAME}."),
        config=config,
    )
    restore_state(trainer, path, manifest, best)
    return manifest


def restore_state(trainer: Trainer, path: Path, manifest: Manifest, best: dict[str, Any] | None) -> None:
    """Restore a checkpoint's state other than tensors. Raises CorruptFileError, UserError."""
    state = manifest.state
    check_run_state(state, manifest.step, path)
    try:
        updates = whole_number(state.get(EMA, 0), MAX_COUNT)
        trainer.step = int(state["step"])
        trainer.consumed_samples = int(state["consumed_samples"])
        trainer.history = read_history(state)
        trainer.scaler.load_state(state["scaler"])
        ensure_state(trainer.optimizer, float(state["applied_steps"]))
        trainer.ancestry = RunAncestry()
        if trainer.ctx.is_main:  # saves, and allowed changes since the checkpoint
            out, step = trainer.config.out, manifest.step
            new_changes = changes_since(trainer.config, state["config"], step)
            if later := descendants_set_aside(path.parent, path):
                new_changes += ({"step": step, "key": "rollback", "from": max(later), "to": step},)
            if path.parent.resolve() != Path(out, CHECKPOINTS).resolve():
                new_changes += ({"step": step, "key": "out", "from": str(path.parent.parent), "to": out},)
            changes = (*recorded_changes(state), *new_changes)[-MAX_CHANGES:]
            trainer.ancestry = RunAncestry(Lineage.of(state), changes).after(manifest.save)
        if TOKENIZER in state:
            trainer.extra_state.setdefault(TOKENIZER, state[TOKENIZER])
        if trainer.average is not None:
            trainer.average.count.fill_(updates)
        for key in (INCIDENTS, VALIDATION_DUE, BEST_VALIDATION):
            trainer.extra_state.pop(key, None)
        trainer.extra_state |= {key: state[key] for key in (INCIDENTS, VALIDATION_DUE) if key in state}
        trainer.extra_state |= {} if best is None else {BEST_VALIDATION: best}
    except UserError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(
            f"{path}: its state is not that of a training run of this version ({error!r}). Take another "
            "checkpoint, or the version of mlm that saved it"
        ) from error


def best_validation(config: PretrainConfig, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the lowest validation loss in a checkpoint: its loss, step, and validations since.

    None if train.keep_best finds other weights in out/best: of another run, or of steps that were rolled
    back.
    """
    best = state.get(BEST_VALIDATION)
    names = {"loss": float, "step": int, "without_gain": int}
    if not isinstance(best, dict) or any(type(best.get(name)) is not kind for name, kind in names.items()):
        return None
    path = Path(config.out, BEST, CHECKPOINTS, step_name(best["step"]))
    return None if config.train.keep_best and not path.exists() else best


def read_history(state: Mapping[str, Any]) -> BlendSegments:
    """Return the corpora that a run has read, and the samples of each; empty for synthetic data.

    Raises ValueError, KeyError or TypeError for a state that is not of a training run.
    """
    if "data" not in state:
        return ()
    if not state["data"]["segments"]:
        raise ValueError("its segments are empty")
    return decode(state["data"]["segments"], int(state["consumed_samples"]))


def check_identity(config: PretrainConfig, path: Path, manifest: Manifest) -> None:
    """Raise ConfigError if a run with this identity cannot continue from a checkpoint or its weights."""
    saved = manifest.state.get("config")
    if not isinstance(saved, Mapping):
        return  # loading reports the problem
    if is_weights_only(manifest.state):
        errors = function_errors(config, saved, str(path))
    else:
        errors = identity_errors(config, saved, str(path.parent.parent))
    if errors:
        raise ConfigError(errors)


def check_base(
    config: PretrainConfig, path: Path, manifest: Manifest, base: Mapping[str, Any] | None = None
) -> None:
    """Raise UserError if a run's adapters would continue on another base; None means `ckpt`, if native."""
    saved = manifest.state.get(LORA)
    if base is None and config.ckpt is not None and is_native(config.ckpt):
        base = {"base": config.ckpt, "digest": read_manifest(resolve(config.ckpt)).digest}
    if base is not None and isinstance(saved, dict) and base["digest"] != saved.get("digest"):
        raise UserError(
            f"ckpt={config.ckpt or base['base']}: {path} holds adapters of another base "
            f"({saved.get('digest')}); set ckpt={saved.get('base')}, or another out=…"
        )


def load_weights(
    shards: Sequence[ParameterShard],
    path: Path,
    ctx: ParallelContext,
    config: dict[str, Any] | None = None,
) -> Manifest:
    """Fill a model's parameters from a checkpoint, for evaluation and sampling. Collective."""
    return load_checkpoint(
        path,
        model_shards(shards),
        ranks=Ranks.of(ctx),
        allow_extra=lambda name: name.startswith("optimizer."),
        cast=True,
        config=config,
    )
