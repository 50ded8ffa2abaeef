"""How a run may be split over ranks: the rules of tp, pp, vp, dp, schedule, ZeRO and batches.

A rule reads values by their keys as typed (`tp`, `model.num_heads`) and says what is wrong; nearest_layout.py
finds the nearest setting that mends it. Letters: p = pp, v = vp, d = dp, m micro-batches per replica.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mlm.config.suggest import divisors

MAX_CPU_RANKS = 64  # ranks one plain launch starts on a host without GPUs
RANKS_PER_NODE = 8  # of scripts/slurm/pretrain.sbatch
LAUNCHERS = "start them with torchrun or SLURM (scripts/slurm/pretrain.sbatch)"

Values = Mapping[str, Any]
"""Key as typed → value."""


@dataclass(frozen=True)
class Launch:
    """Where the run would start: on a launcher's `world_size` ranks, or this host's `local_devices` GPUs."""

    world_size: int | None
    local_devices: int | None
    elsewhere: bool = True
    """False for a command whose ranks must all be on this host."""

    @property
    def most_ranks(self) -> int:
        """Ranks that can run here."""
        return self.world_size or self.local_devices or MAX_CPU_RANKS


@dataclass(frozen=True)
class Breach:
    """What is wrong with a layout, in words."""

    why: str
    """The setting, its value, and what it conflicts with."""
    note: str = ""
    """What else would mend it, or helps to choose."""
    start: str = ""
    """The launch that these settings are meant for, where no setting needs to change."""

    def line(self, remedy: str, *, alone: bool, others: bool = False) -> str:
        """The fault, with the settings that mend it. `alone` if these suffice whatever mends other faults.

        `others`: other faults may change the number of ranks, so that no launch can be spelled out.
        """
        start = LAUNCHERS if self.start and others else self.start
        return f"{self.why}; {f'{start}, or here ' if start else ''}use {remedy}{self.note if alone else ''}"


@dataclass(frozen=True)
class LayoutRule:
    """A condition between the settings of a layout."""

    reads: tuple[str, ...]
    """Keys it depends on; skipped when one of them is out of range."""
    moves: tuple[str, ...]
    """Keys that a remedy changes, the likeliest first."""
    breach: Callable[[Values, Launch], Breach | None]
    only_here: bool = False
    """Whether another place to start in mends it too: other remedies need not keep it when it is broken."""


def num_replicas(tp: int, pp: int, dp: int | None, launch: Launch) -> int:
    """d with its default filled in: what tp * pp leave of the world, of this host's GPUs, or 1 on CPU."""
    if dp is not None:
        return dp
    available = launch.world_size or launch.local_devices or tp * pp
    return max(available // (tp * pp), 1)


def batch_quantum(values: Values, launch: Launch) -> int:
    """What train.global_batch_size must be a multiple of, in samples.

    Interleaved 1F1B takes micro-batches in groups of p (arXiv:2104.04473, section 2.2.2).
    """
    replicas = num_replicas(values["tp"], values["pp"], values["dp"], launch)
    interleaved = values["vp"] > 1 and values["pipeline"] == "1f1b"
    return int(replicas * values["train.micro_batch_size"] * (values["pp"] if interleaved else 1))


def _heads_divide_hidden(values: Values, _: Launch) -> Breach | None:
    heads, hidden = values["model.num_heads"], values["model.hidden_size"]
    return (
        Breach(f"model.num_heads={heads} does not divide model.hidden_size={hidden}")
        if hidden % heads
        else None
    )


def _tp_divides_heads(values: Values, _: Launch) -> Breach | None:
    return _tp_divides(values["tp"], "model.num_heads", values["model.num_heads"])


def _tp_divides_ffn(values: Values, _: Launch) -> Breach | None:
    size = values["model.ffn_hidden_size"]
    # null is 4 * hidden_size: divided where the heads are
    return None if size is None else _tp_divides(values["tp"], "model.ffn_hidden_size", size)


def _tp_divides(tp: int, key: str, size: int) -> Breach | None:
    if size % tp == 0:
        return None
    valid = divisors(size)
    listed = f" (its divisors: {', '.join(map(str, valid))})" if len(valid) <= 12 else ""
    return Breach(f"tp={tp} does not divide {key}={size}", note=listed)


def _sequence_fits(values: Values, _: Launch) -> Breach | None:
    length, positions = values["data.seq_length"], values["model.max_positions"]
    if length <= positions:
        return None
    return Breach(
        f"data.seq_length={length} is more than model.max_positions={positions}",
        note=f", or model.max_positions={length}",
    )


def _tp_divides_sequence(values: Values, _: Launch) -> Breach | None:
    tp, length = values["tp"], values["data.seq_length"]
    if not values["sequence_parallel"] or length % tp == 0:
        return None
    return Breach(
        f"sequence_parallel=true cuts sequences, but tp={tp} does not divide data.seq_length={length}"
    )


def _layers_fill_stages(values: Values, _: Launch) -> Breach | None:
    layers, pp, vp = values["model.num_layers"], values["pp"], values["vp"]
    stages = f"pp={pp} * vp={vp} = {pp * vp} stages" if vp > 1 else f"pp={pp} stages"
    if pp * vp > layers:
        return Breach(f"{stages} are more than model.num_layers={layers}")
    if vp > 1 and layers % (pp * vp):
        return Breach(f"{stages} do not divide model.num_layers={layers}, as interleaving (vp > 1) needs")
    return None


def _chunks_interleave(values: Values, _: Launch) -> Breach | None:
    if values["vp"] == 1 or values["pp"] > 1:
        return None
    return Breach(f"vp={values['vp']} interleaves the stages of a pipeline, but pp=1 makes none")


def _schedule_interleaves(values: Values, _: Launch) -> Breach | None:
    vp, pipeline = values["vp"], values["pipeline"]
    if vp == 1 or pipeline != "zb_h1":
        return None
    return Breach(f"pipeline={pipeline} has one stage per rank, but vp={vp}")


def _weights_stay_gathered(values: Values, _: Launch) -> Breach | None:
    if values["zero"] != 3 or values["pp"] == 1:
        return None
    return Breach(
        f"zero=3 would gather the weights again for each micro-batch of a pipeline (pp={values['pp']})"
    )


def _replicas_fill_world(values: Values, launch: Launch) -> Breach | None:
    tp, pp, world_size = values["tp"], values["pp"], launch.world_size
    if world_size is None or world_size % (tp * pp) == 0:
        return None
    return Breach(
        f"tp={tp} * pp={pp} = {tp * pp} does not divide the {world_size} ranks started",
        note=f", or start a multiple of {tp * pp} ranks",
    )


def _dp_fills_world(values: Values, launch: Launch) -> Breach | None:
    tp, pp, dp, world_size = values["tp"], values["pp"], values["dp"], launch.world_size
    if world_size is None or dp is None or world_size % (tp * pp) or tp * pp * dp == world_size:
        return None
    ranks = tp * pp * dp
    return Breach(
        f"tp={tp} * pp={pp} * dp={dp} = {ranks} ranks, but the launcher started {world_size}",
        note=f", or start {ranks} ranks",
    )


def _host_has_ranks(values: Values, launch: Launch) -> Breach | None:
    tp, pp, most = values["tp"], values["pp"], launch.most_ranks
    dp = num_replicas(tp, pp, values["dp"], launch)
    if launch.world_size is not None or tp * pp * dp <= most:
        return None
    here = f"this host has {most} GPUs" if launch.local_devices else f"a CPU host runs at most {most}"
    ranks = tp * pp * dp
    return Breach(
        f"tp={tp} * pp={pp} * dp={dp} = {ranks} ranks, but {here}",
        start=_start_of(ranks, launch.local_devices or RANKS_PER_NODE) if launch.elsewhere else "",
    )


def _start_of(ranks: int, most_per_node: int) -> str:
    """The launchers' own options for so many ranks."""
    each = max(size for size in divisors(ranks) if size <= most_per_node)
    nodes, slurm = ranks // each, "" if each == RANKS_PER_NODE else f" --ntasks-per-node={each}"
    return (
        f"start {ranks} ranks with torchrun (--nnodes={nodes} --nproc-per-node={each} …) or SLURM "
        f"(sbatch --nodes={nodes}{slurm} scripts/slurm/pretrain.sbatch …)"
    )


def _batches_divide(values: Values, launch: Launch) -> Breach | None:
    size, micro = values["train.global_batch_size"], values["train.micro_batch_size"]
    dp = num_replicas(values["tp"], values["pp"], values["dp"], launch)
    if size % (dp * micro):
        return Breach(
            f"train.global_batch_size={size} is not a multiple of dp={dp} * train.micro_batch_size={micro} "
            f"= {dp * micro}"
        )
    if size % batch_quantum(values, launch):
        return Breach(
            f"train.global_batch_size={size} gives each replica {size // (dp * micro)} micro-batches, but "
            f"vp={values['vp']} takes them in groups of pp={values['pp']}"
        )
    return None


_RANKS = ("tp", "pp", "dp")
_SEQUENCE = ("data.seq_length", "model.max_positions")
SPLIT_RULES = (
    LayoutRule(("tp", "model.num_heads"), ("tp",), _tp_divides_heads),
    LayoutRule(("tp", "model.ffn_hidden_size"), ("tp",), _tp_divides_ffn),
    LayoutRule(("pp", "vp", "model.num_layers"), ("vp", "pp"), _layers_fill_stages),
)
"""What a model's shape asks of a layout."""
RANK_RULES = (
    LayoutRule(("pp", "vp"), ("vp", "pp"), _chunks_interleave),
    LayoutRule(("tp", "pp"), ("tp", "pp"), _replicas_fill_world),
    LayoutRule(_RANKS, ("dp",), _dp_fills_world),
    LayoutRule(_RANKS, ("dp", "tp", "pp"), _host_has_ranks, only_here=True),
)
"""What the ranks ask of a layout: for commands that learn the model's shape later, from a checkpoint."""
SCHEDULE_RULES = (
    LayoutRule(("vp", "pipeline"), ("pipeline", "vp"), _schedule_interleaves),
    LayoutRule(("pp", "zero"), ("zero",), _weights_stay_gathered),
)
"""What a training step asks of a layout."""
FINETUNE_LAYOUT_RULES = (*RANK_RULES, *SCHEDULE_RULES)
TRAIN_RULES = (
    LayoutRule(("model.num_heads", "model.hidden_size"), ("model.num_heads",), _heads_divide_hidden),
    *SPLIT_RULES,
    *RANK_RULES,
    *SCHEDULE_RULES,
    LayoutRule(_SEQUENCE, ("data.seq_length",), _sequence_fits),
    LayoutRule(
        (*_SEQUENCE, "tp", "sequence_parallel"),
        ("data.seq_length", "sequence_parallel"),
        _tp_divides_sequence,
    ),
    LayoutRule(
        (*_RANKS, "vp", "pipeline", "train.global_batch_size", "train.micro_batch_size"),
        ("train.global_batch_size",),
        _batches_divide,
    ),
)
"""All that a training run asks of a layout."""
