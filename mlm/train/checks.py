"""Checks of the settings of a training run."""

from collections.abc import Callable
from dataclasses import asdict

from mlm.config.imports import KEYS, OwnCodeError, imported, is_path
from mlm.config.ranges import out_of_range
from mlm.config.tree import HOISTED, MISSING_VALUE, flatten
from mlm.data import files_present as present
from mlm.data.blend_checks import blend_faults
from mlm.errors import has_controls
from mlm.launch.checks import (
    Rule,
    devices_are_there,
    errors_of,
    loss_scale_can_fall,
    lr_falls,
)
from mlm.models.checks import data_fault, model_fault, pretraining_fault
from mlm.optim.schedule import DECAYS
from mlm.parallel.layout_checks import TRAIN_RULES, Launch
from mlm.train.config import PretrainConfig

MOST_PADDING = 1 << 16  # rows that a saved model.vocab_multiple may add to the token table


def check_pretrain(
    config: PretrainConfig, *, world_size: int | None, local_devices: int | None, elsewhere: bool = True
) -> list[str]:
    """Faults of a pretraining run. `world_size` is None when started plainly, `local_devices` None on CPU.

    `elsewhere`: False for runs whose ranks must all be on this host.
    """
    faults = errors_of(config, Launch(world_size, local_devices, elsewhere), TRAIN_RULES, PRETRAIN_RULES)
    return [*faults, *blend_faults(config.data)]


def saved_faults(config: PretrainConfig) -> list[str]:
    """Faults of a configuration that a checkpoint holds, in itself: it was written by anyone."""
    values = {key.removeprefix(f"{HOISTED}."): value for key, value in flatten(asdict(config)).items()}
    faults, model = list(out_of_range(values).values()), config.model
    each = [
        one
        for value in values.values()
        for one in (value if isinstance(value, list | tuple | dict) else [value])
    ]
    faults += [
        f"{key}={values[key][:40]!r} is neither shipped nor an import path"
        for key, shipped in KEYS.items()
        if values[key] not in shipped and not is_path(values[key])
    ]
    faults += [f"{text[:40]!r} is no value" for text in each if isinstance(text, str) and _is_no_value(text)]
    if model.vocab_multiple > MOST_PADDING:
        faults.append(f"model.vocab_multiple={model.vocab_multiple} must be {MOST_PADDING} at most")
    if not faults and model.hidden_size % model.num_heads:
        faults.append(
            f"model.num_heads={model.num_heads} does not divide model.hidden_size={model.hidden_size}"
        )
    return [*faults, *filter(None, [model_fault(model)])]


def _is_no_value(text: str) -> bool:
    return "${" in text or text == MISSING_VALUE or has_controls(text)


def own_code_problem(config: PretrainConfig) -> str | None:
    """Return the problem of a custom optimizer, schedule or dataset that cannot be found."""
    try:
        imported("optimizer.kind", config.optimizer.kind, ("adamw",), Callable)
        imported("schedule.decay", config.schedule.decay, DECAYS, Callable)
        imported("data.kind", config.data.kind, ("indexed", "synthetic"), Callable)
    except OwnCodeError as error:
        return str(error)
    return None


def _warmup_ends(config: PretrainConfig, _: Launch) -> str | None:
    schedule = config.schedule
    end, key = schedule.decay_steps, "schedule.decay_steps"
    if end is None:
        end, key = config.train.steps, "train.steps"
    warmup = schedule.warmup(config.train.steps)
    if schedule.decay == "constant" or warmup < end:
        return None
    return (
        f"schedule.warmup_steps={warmup} must be below {key}={end}, where the decay ends; "
        f"use schedule.warmup_steps={end - 1} or fewer"
    )


PRETRAIN_RULES: list[tuple[str, Rule]] = [
    ("", devices_are_there),
    ("schedule.warmup_steps schedule.decay_steps train.steps", _warmup_ends),
    ("schedule.min_lr optimizer.lr", lr_falls),
    ("precision.min_loss_scale precision.initial_loss_scale", loss_scale_can_fall),
    ("", lambda config, _: model_fault(config.model)),
    ("", lambda config, _: own_code_problem(config)),
    ("", lambda config, _: pretraining_fault(config)),
    ("data.seq_length", lambda config, _: data_fault(config)),
    ("", lambda config, _: present.corpus(config.data)),
    ("", lambda config, _: present.corpus_extras(config.data)),
    ("", lambda config, _: present.checkpoint(config.ckpt)),
]
