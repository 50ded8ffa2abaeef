"""What must hold between the values of a run spec: faults with key, value, remedy and nearest valid setting.

The checks look at numbers, and at whether named files exist; what is inside the files is for the preflight
of each command. A rule is skipped when one of its own numbers is out of range, which is a fault already.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from mlm.config import files_present as present
from mlm.config.ranges import out_of_range
from mlm.config.schema import ParallelConfig, PretrainConfig
from mlm.config.suggest import around, divisors, either, multiples_around
from mlm.config.task_schema import EvalLossConfig, GenerateConfig
from mlm.config.tree import HOISTED, flatten

MAX_CPU_RANKS = 64  # ranks one plain launch starts on a host without GPUs


@dataclass(frozen=True)
class Launch:
    """Where the run would start: on a launcher's `world_size` ranks, or this host's `local_devices` GPUs."""

    world_size: int | None
    local_devices: int | None


Rule = Callable[[Any, Launch], str | None]


def check_pretrain(config: PretrainConfig, *, world_size: int | None, local_devices: int | None) -> list[str]:
    """Faults of a pretraining run. `world_size` is None when started plainly, `local_devices` None on CPU."""
    return _faults(config, Launch(world_size, local_devices), PRETRAIN_RULES)


def check_eval_loss(
    config: EvalLossConfig, *, world_size: int | None, local_devices: int | None
) -> list[str]:
    """Faults of `mlm eval loss` that show without reading the checkpoint."""
    return _faults(config, Launch(world_size, local_devices), EVAL_LOSS_RULES)


def check_generate(config: GenerateConfig, *, world_size: int | None, local_devices: int | None) -> list[str]:
    """Faults of `mlm generate` that show without reading the checkpoint."""
    return _faults(config, Launch(world_size, local_devices), GENERATE_RULES)


def data_parallel_size(parallel: ParallelConfig, *, world_size: int | None, local_devices: int | None) -> int:
    """dp with its default filled in: what tp * pp leave of the world, of this host's GPUs, or 1 on CPU."""
    if parallel.dp is not None:
        return parallel.dp
    model_ranks = parallel.tp * parallel.pp
    available = world_size or local_devices or model_ranks
    return max(available // model_ranks, 1)


def _faults(config: Any, launch: Launch, rules: Iterable[tuple[str, Rule]]) -> list[str]:
    values = {key.removeprefix(f"{HOISTED}."): value for key, value in flatten(asdict(config)).items()}
    faults = out_of_range(values)
    found = [rule(config, launch) for keys, rule in rules if not faults.keys() & set(keys.split())]
    return [*faults.values(), *(fault for fault in found if fault)]


def _heads_divide_hidden(config: PretrainConfig, _: Launch) -> str | None:
    hidden, heads = config.model.hidden_size, config.model.num_heads
    if hidden % heads == 0:
        return None
    return (
        f"model.num_heads={heads} does not divide model.hidden_size={hidden}; "
        f"use {either('model.num_heads', around(heads, divisors(hidden)))}"
    )


def _tp_divides_heads(config: PretrainConfig, _: Launch) -> str | None:
    return _tp_divides(config.parallel.tp, "model.num_heads", config.model.num_heads)


def _tp_divides_ffn(config: PretrainConfig, _: Launch) -> str | None:
    if config.model.ffn_hidden_size is None:  # 4 * hidden_size: divided where the heads are
        return None
    return _tp_divides(config.parallel.tp, "model.ffn_hidden_size", config.model.ffn_hidden_size)


def _tp_divides(tp: int, key: str, size: int) -> str | None:
    if size % tp == 0:
        return None
    valid = divisors(size)
    listed = f" (its divisors: {', '.join(map(str, valid))})" if len(valid) <= 12 else ""
    return f"tp={tp} does not divide {key}={size}; use {either('tp', around(tp, valid))}{listed}"


def _stages_divide_layers(config: PretrainConfig, _: Launch) -> str | None:
    layers, pp, vp = config.model.num_layers, config.parallel.pp, config.parallel.vp
    if layers % (pp * vp) == 0:
        return None
    return (
        f"pp={pp} * vp={vp} = {pp * vp} stages do not divide model.num_layers={layers}; "
        f"use {either('model.num_layers', multiples_around(layers, pp * vp))}"
    )


def _pipeline_runs(config: Any, _: Launch) -> str | None:
    if config.parallel.pp > 1:
        return f"pp={config.parallel.pp}: this version runs pp=1 only; set pp=1 vp=1"
    if config.parallel.vp > 1:
        return f"vp={config.parallel.vp}: this version runs vp=1 only; set vp=1"
    return None


def _ranks_are_there(config: Any, launch: Launch) -> str | None:
    if launch.world_size is not None:
        return _ranks_fill_world(config.parallel, launch.world_size)
    tp, pp = config.parallel.tp, config.parallel.pp
    dp = data_parallel_size(config.parallel, world_size=None, local_devices=launch.local_devices)
    most = launch.local_devices or MAX_CPU_RANKS
    if tp * pp * dp <= most:
        return None
    here = f"this host has {most} GPUs" if launch.local_devices else f"a CPU host runs at most {most}"
    return (
        f"tp={tp} * pp={pp} * dp={dp} = {tp * pp * dp} ranks, but {here}; start them with torchrun or SLURM "
        f"(scripts/slurm/pretrain.sbatch), or set {_fitting(tp, pp, most)}"
    )


def _ranks_fill_world(parallel: ParallelConfig, world_size: int) -> str | None:
    tp, pp, dp = parallel.tp, parallel.pp, parallel.dp
    if world_size % (tp * pp):
        valid = around(tp, [d for d in divisors(world_size) if world_size % (d * pp) == 0])
        remedy = either("tp", valid) if valid else f"pp={around(pp, divisors(world_size))[0]} tp=1"
        return f"tp={tp} * pp={pp} = {tp * pp} does not divide the {world_size} ranks started; use {remedy}"
    if dp is not None and tp * pp * dp != world_size:
        return (
            f"tp={tp} * pp={pp} * dp={dp} = {tp * pp * dp} ranks, but the launcher started {world_size}; "
            f"set dp={world_size // (tp * pp)} (or dp=null), or start {tp * pp * dp} ranks"
        )
    return None


def _fitting(tp: int, pp: int, most: int) -> str:
    return f"dp={most // (tp * pp)}" if tp * pp <= most else f"tp={around(tp, divisors(most))[0]} pp=1 dp=1"


def _batches_divide(config: PretrainConfig, launch: Launch) -> str | None:
    size, micro = config.train.global_batch_size, config.train.micro_batch_size
    dp = data_parallel_size(config.parallel, world_size=launch.world_size, local_devices=launch.local_devices)
    if size % (dp * micro) == 0:
        return None
    valid = either("train.global_batch_size", multiples_around(size, dp * micro))
    return (
        f"train.global_batch_size={size} is not a multiple of dp={dp} * train.micro_batch_size={micro} "
        f"= {dp * micro}; use {valid}"
    )


def _sequence_fits(config: PretrainConfig, _: Launch) -> str | None:
    length, positions = config.data.seq_length, config.model.max_positions
    if length <= positions:
        return None
    return (
        f"data.seq_length={length} is more than model.max_positions={positions}; "
        f"use data.seq_length={positions}, or model.max_positions={length}"
    )


def _warmup_ends(config: PretrainConfig, _: Launch) -> str | None:
    schedule = config.schedule
    end, key = schedule.decay_steps, "schedule.decay_steps"
    if end is None:
        end, key = config.train.steps, "train.steps"
    if schedule.decay == "constant" or schedule.warmup_steps < end:
        return None
    return (
        f"schedule.warmup_steps={schedule.warmup_steps} must be below {key}={end}, where the decay ends; "
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


_LAYOUT = "tp pp vp dp"
_LAUNCH_RULES: list[tuple[str, Rule]] = [
    ("pp vp", _pipeline_runs),
    (_LAYOUT, _ranks_are_there),
    ("", _devices_are_there),
]
PRETRAIN_RULES: list[tuple[str, Rule]] = [
    ("model.hidden_size model.num_heads", _heads_divide_hidden),
    ("tp model.num_heads", _tp_divides_heads),
    ("tp model.ffn_hidden_size", _tp_divides_ffn),
    ("pp vp model.num_layers", _stages_divide_layers),
    *_LAUNCH_RULES,
    (f"{_LAYOUT} train.global_batch_size train.micro_batch_size", _batches_divide),
    ("data.seq_length model.max_positions", _sequence_fits),
    ("schedule.warmup_steps schedule.decay_steps train.steps", _warmup_ends),
    ("schedule.min_lr optimizer.lr", _lr_falls),
    ("precision.min_loss_scale precision.initial_loss_scale", _loss_scale_can_fall),
    ("", lambda config, _: present.corpus(config.data)),
    ("", lambda config, _: present.corpus_extras(config.data)),
    ("", lambda config, _: present.checkpoint(config.ckpt)),
]
EVAL_LOSS_RULES: list[tuple[str, Rule]] = [
    *_LAUNCH_RULES,
    ("precision.min_loss_scale precision.initial_loss_scale", _loss_scale_can_fall),
    ("", lambda config, _: present.checkpoint(config.ckpt)),
    ("", lambda config, _: present.indexed("path", config.path)),
    ("", lambda config, _: present.file("tokenizer", config.tokenizer)),
]
GENERATE_RULES: list[tuple[str, Rule]] = [
    *_LAUNCH_RULES,
    ("", lambda config, _: present.checkpoint(config.ckpt)),
    ("", lambda config, _: present.file("tokenizer", config.tokenizer)),
]
