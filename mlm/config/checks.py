"""What must hold between the values of a run spec: faults with key, value, remedy and nearest valid setting.

The checks look at numbers, and at whether named files exist; what is inside the files is for the preflight
of each command. Layouts have their rules in layout_checks.py. A rule is skipped when one of its own numbers
is out of range, which is a fault already.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from mlm.data import files_present as present
from mlm.data.blend_checks import blend_faults
from mlm.finetune.task_checks import check_task
from mlm.errors import has_controls
from mlm.evaluate.config import ZeroShotConfig
from mlm.finetune.config import EvalTaskConfig, FinetuneConfig
from mlm.parallel.layout_checks import (
    FINETUNE_LAYOUT_RULES,
    RANK_RULES,
    TRAIN_RULES,
    Launch,
    LayoutRule,
    num_replicas,
)
from mlm.models.checks import bert_data_fault, model_fault, pretraining_fault
from mlm.parallel.nearest_layout import layout_faults
from mlm.config.ranges import out_of_range
from mlm.config.schema import ParallelConfig, PretrainConfig
from mlm.config.task_schema import EvalLossConfig, GenerateConfig, LmEvalConfig
from mlm.config.tree import HOISTED, MISSING_VALUE, flatten

Rule = Callable[[Any, Launch], str | None]
MOST_PADDING = 1 << 16  # rows that a saved model.vocab_multiple may add to the token table


def check_pretrain(config: PretrainConfig, *, world_size: int | None, local_devices: int | None) -> list[str]:
    """Faults of a pretraining run. `world_size` is None when started plainly, `local_devices` None on CPU."""
    faults = _faults(config, Launch(world_size, local_devices), TRAIN_RULES, PRETRAIN_RULES)
    return [*faults, *blend_faults(config.data)]


def check_eval_loss(
    config: EvalLossConfig, *, world_size: int | None, local_devices: int | None
) -> list[str]:
    """Faults of `mlm eval loss` that show without reading the checkpoint.

    sequence_parallel, pipeline, zero and recompute say how training saves memory and time. A layout that was
    trained with may name them here too; they have no effect.
    """
    return _faults(config, Launch(world_size, local_devices), RANK_RULES, EVAL_LOSS_RULES)


def check_zero_shot(
    config: ZeroShotConfig, *, world_size: int | None, local_devices: int | None
) -> list[str]:
    """Faults of `mlm eval wikitext103`, `lambada` and `all` that show without reading a file."""
    return _faults(config, Launch(world_size, local_devices), RANK_RULES, ZERO_SHOT_RULES)


def check_finetune(config: FinetuneConfig, *, world_size: int | None, local_devices: int | None) -> list[str]:
    """Faults of `mlm finetune` that show without reading the checkpoint or the rows."""
    faults = _faults(config, Launch(world_size, local_devices), FINETUNE_LAYOUT_RULES, FINETUNE_RULES)
    return [*faults, *check_task(config.task)]


def check_eval_task(
    config: EvalTaskConfig, *, world_size: int | None, local_devices: int | None
) -> list[str]:
    """Faults of `mlm eval TASK` that show without reading the checkpoint or the rows."""
    faults = _faults(config, Launch(world_size, local_devices), RANK_RULES, EVAL_TASK_RULES)
    return [*faults, *check_task(config.task)]


def check_generate(config: GenerateConfig, *, world_size: int | None, local_devices: int | None) -> list[str]:
    """Faults of `mlm generate` that show without reading the checkpoint. Its layout: as `check_eval_loss`."""
    return _faults(config, Launch(world_size, local_devices), RANK_RULES, GENERATE_RULES)


def check_lm_eval(config: LmEvalConfig, *, world_size: int | None, local_devices: int | None) -> list[str]:
    """Faults of lm-eval's model `mlm` that show without reading the checkpoint."""
    return _faults(config, Launch(world_size, local_devices), RANK_RULES, LM_EVAL_RULES)


def saved_faults(config: PretrainConfig) -> list[str]:
    """Faults of a configuration that a checkpoint holds, in itself: it was written by anyone."""
    values = {key.removeprefix(f"{HOISTED}."): value for key, value in flatten(asdict(config)).items()}
    faults, model = list(out_of_range(values).values()), config.model
    each = [
        one for value in values.values() for one in (value if isinstance(value, list | tuple) else [value])
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


def data_parallel_size(parallel: ParallelConfig, *, world_size: int | None, local_devices: int | None) -> int:
    """dp with its default filled in: what tp * pp leave of the world, of this host's GPUs, or 1 on CPU."""
    return num_replicas(parallel.tp, parallel.pp, parallel.dp, Launch(world_size, local_devices))


def _faults(
    config: Any, launch: Launch, layout_rules: Iterable[LayoutRule], rules: Iterable[tuple[str, Rule]]
) -> list[str]:
    values = {key.removeprefix(f"{HOISTED}."): value for key, value in flatten(asdict(config)).items()}
    faults = out_of_range(values)
    found = [rule(config, launch) for keys, rule in rules if not faults.keys() & set(keys.split())]
    return [
        *faults.values(),
        *layout_faults(values, launch, layout_rules, faults.keys()),
        *(fault for fault in found if fault),
    ]


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


def _lr_falls(config: PretrainConfig, _: Launch) -> str | None:
    low, peak = config.schedule.min_lr, config.optimizer.lr
    if config.schedule.decay == "constant" or low <= peak:
        return None
    return (
        f"schedule.min_lr={low:g} is more than optimizer.lr={peak:g}, the peak; "
        f"use schedule.min_lr={peak / 10:g}"
    )


def _loss_scale_can_fall(config: Any, _: Launch) -> str | None:
    precision = config.precision
    if precision.min_loss_scale <= precision.initial_loss_scale:
        return None
    return (
        f"precision.min_loss_scale={precision.min_loss_scale:g} is more than "
        f"precision.initial_loss_scale={precision.initial_loss_scale:g}; use precision.min_loss_scale=1"
    )


def _devices_are_there(config: Any, launch: Launch) -> str | None:
    device, backend = config.dist.device, config.dist.backend
    if device == "cuda" and launch.local_devices is None:
        return "dist.device=cuda, but this host has no GPU that torch can use; use dist.device=auto"
    if backend == "nccl" and launch.local_devices is None:
        return "dist.backend=nccl runs on GPUs, and this run is on CPU; use dist.backend=auto or gloo"
    return None


def _windows_overlap(config: Any, _: Launch) -> str | None:
    stride, length = getattr(config, "overlapping_eval", 1), config.seq_length
    if length is None or stride <= length:
        return None
    return (
        f"overlapping_eval={stride} is more than seq_length={length}, so tokens between windows would not be "
        f"scored; use overlapping_eval={length} or less"
    )


def _texts_are_there(config: Any, _: Launch) -> str | None:
    named = ((f"data.{key}", path) for key, path in asdict(config.data).items())
    return next((fault for key, path in named if (fault := present.file(key, path))), None)


def _one_source_of_prompts(config: GenerateConfig, _: Launch) -> str | None:
    if config.prompts is None or not config.prompt:
        return None
    return f"prompts={config.prompts} and prompt={config.prompt}: give one of the two"


def _least_below_most(config: GenerateConfig, _: Launch) -> str | None:
    least, most = config.min_new_tokens, config.max_new_tokens
    if least <= most:
        return None
    return f"min_new_tokens={least} is more than max_new_tokens={most}; use min_new_tokens={most} or fewer"


def _tests_are_named(config: FinetuneConfig, _: Launch) -> str | None:
    if not config.data.predict_tests or config.task.tests:
        return None
    return f"data.predict_tests=true: task {config.task.name} has no task.tests; use data.predict_tests=false"


PRETRAIN_RULES: list[tuple[str, Rule]] = [
    ("", _devices_are_there),
    ("schedule.warmup_steps schedule.decay_steps train.steps", _warmup_ends),
    ("schedule.min_lr optimizer.lr", _lr_falls),
    ("precision.min_loss_scale precision.initial_loss_scale", _loss_scale_can_fall),
    ("", lambda config, _: model_fault(config.model)),
    ("", lambda config, _: pretraining_fault(config)),
    ("data.seq_length", lambda config, _: bert_data_fault(config)),
    ("", lambda config, _: present.corpus(config.data)),
    ("", lambda config, _: present.corpus_extras(config.data)),
    ("", lambda config, _: present.checkpoint(config.ckpt)),
]
FINETUNE_RULES: list[tuple[str, Rule]] = [
    ("", _devices_are_there),
    ("", _tests_are_named),
    ("schedule.min_lr optimizer.lr", _lr_falls),
    ("precision.min_loss_scale precision.initial_loss_scale", _loss_scale_can_fall),
    ("", lambda config, _: present.folder("data.path", config.data.path)),
    ("", lambda config, _: present.tokenizer("data.tokenizer", config.data.tokenizer)),
]
EVAL_TASK_RULES = [rule for rule in FINETUNE_RULES if rule[1] not in (_tests_are_named, _lr_falls)]
EVAL_LOSS_RULES: list[tuple[str, Rule]] = [
    ("", _devices_are_there),
    ("precision.min_loss_scale precision.initial_loss_scale", _loss_scale_can_fall),
    ("", lambda config, _: present.model(config.ckpt)),
    ("", lambda config, _: present.indexed("path", config.path)),
    ("", lambda config, _: present.tokenizer("tokenizer", config.tokenizer)),
]
LM_EVAL_RULES: list[tuple[str, Rule]] = [
    ("", _devices_are_there),
    ("", lambda config, _: present.model(config.ckpt)),
    ("", lambda config, _: present.tokenizer("tokenizer", config.tokenizer)),
]
ZERO_SHOT_RULES: list[tuple[str, Rule]] = [
    ("", _devices_are_there),
    ("precision.min_loss_scale precision.initial_loss_scale", _loss_scale_can_fall),
    ("overlapping_eval seq_length", _windows_overlap),
    ("", lambda config, _: present.model(config.ckpt)),
    ("", lambda config, _: present.tokenizer("tokenizer", config.tokenizer)),
    ("", _texts_are_there),
]
GENERATE_RULES: list[tuple[str, Rule]] = [
    ("", _devices_are_there),
    ("precision.min_loss_scale precision.initial_loss_scale", _loss_scale_can_fall),
    ("", _one_source_of_prompts),
    ("", lambda config, _: present.file("prompts", config.prompts)),
    ("min_new_tokens max_new_tokens", _least_below_most),
    ("", lambda config, _: present.model(config.ckpt)),
    ("", lambda config, _: present.tokenizer("tokenizer", config.tokenizer)),
]
