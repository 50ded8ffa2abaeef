"""Rules of a layout: conditions between ranks (tp, cp, pp, vp, dp), schedule, ZeRO, batches and model.

A rule reads settings by their keys as typed (`tp`, `model.num_heads`) and returns a violation, if any;
nearest.py finds the nearest value that fixes it. Letters: p = pp, v = vp, d = dp, m micro-batches per
replica.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlm.config.suggest import divisors
from mlm.util.errors import format_value
from mlm.util.system import host_memory

MAX_CPU_RANKS = 64  # ranks one plain launch starts on a host without GPUs
RANKS_PER_NODE = 8  # of scripts/slurm/pretrain.sbatch


@dataclass(frozen=True)
class Launch:
    """Ranks that are available: a launcher's `world_size`, or this host's `local_devices` GPUs."""

    world_size: int | None
    local_devices: int | None
    elsewhere: bool = True
    """False for a command whose ranks must all be on this host."""
    is_planned: bool = False
    """True for a plan, which starts nothing: `world_size` is its GPUs."""

    @property
    def world(self) -> str:
        """The ranks that a layout must fill."""
        return f"gpus={self.world_size}" if self.is_planned else f"the {self.world_size} ranks started"

    @property
    def most_ranks(self) -> int:
        """Most ranks that this launch can run."""
        return self.world_size or self.local_devices or MAX_CPU_RANKS


class LayoutValues(dict[str, Any]):
    """Key → value, and the names under which the user typed the keys, where those differ."""

    def __init__(self, values: Mapping[str, Any], names: Mapping[str, str] | None = None) -> None:
        super().__init__(values)
        self.names = names or {}

    def name(self, key: str) -> str:
        """The key as typed: `seq_length` for data.seq_length."""
        return self.names.get(key, key)

    def typed(self, *keys: str) -> str:
        """Settings as typed: `tp=2 * pp=4`."""
        return " * ".join(f"{self.name(key)}={format_value(self[key])}" for key in keys)

    def changed(self, change: Mapping[str, Any]) -> "LayoutValues":
        return LayoutValues({**self, **change}, self.names)


@dataclass(frozen=True)
class Violation:
    why: str
    """The settings and their conflict."""
    note: str = ""
    """Another way to fix it, or help to choose."""
    start: str = ""
    """A launch at which these settings are valid as they are."""
    can_start_here: bool = True
    """False if no layout fits on this host."""

    def fix(self, change: str) -> str:
        """The fix by a change of settings, or by another launch."""
        if self.start and not self.can_start_here:
            return self.start
        return f"{f'{self.start}, or here ' if self.start else ''}{change}{self.note}"


@dataclass(frozen=True)
class LayoutRule:
    """A condition between the settings of a layout."""

    inputs: tuple[str, ...]
    """Keys it depends on; skipped when one of them is out of range."""
    adjustable: tuple[str, ...]
    """Keys that a fix changes, the likeliest first."""
    violation: Callable[[LayoutValues, Launch], Violation | None]
    local_only: bool = False
    """True if another launch fixes it too: fixes of other problems may leave it broken."""


RuleResult = Violation | str | None
"""Result of a rule: None, the reason of a violation, or a Violation with further fields."""


def rule(
    inputs: str, adjustable: str, *, local_only: bool = False
) -> Callable[[Callable[[LayoutValues, Launch], RuleResult]], LayoutRule]:
    """Make a rule of a function that checks a layout; keys are separated by spaces."""

    def make(check: Callable[[LayoutValues, Launch], RuleResult]) -> LayoutRule:
        def violation(values: LayoutValues, launch: Launch) -> Violation | None:
            broken = check(values, launch)
            return Violation(broken) if isinstance(broken, str) else broken

        return LayoutRule(tuple(inputs.split()), tuple(adjustable.split()), violation, local_only)

    return make


def num_replicas(replica: int, dp: int | None, launch: Launch) -> int:
    """Return dp with its default filled in: the rest of the world or of this host's GPUs, or 1 on CPU.

    `replica`: ranks of one replica.
    """
    if dp is not None:
        return dp
    available = launch.world_size or launch.local_devices or replica
    return max(available // replica, 1)


def replica_size(values: LayoutValues) -> int:
    return int(values["tp"] * values["cp"] * values["pp"])


def _replica_keys(values: LayoutValues) -> tuple[str, ...]:
    """Keys whose product `replica_size` is; cp only where it counts."""
    return ("tp", "cp", "pp") if values["cp"] > 1 else ("tp", "pp")


def sequence_quantum(values: LayoutValues) -> int:
    """Required divisor of data.seq_length: cp splits sequences, sequence_parallel their pieces."""
    cp = values["cp"]
    return math.lcm(2 * cp if cp > 1 else 1, cp * values["tp"] if values["sequence_parallel"] else 1)


def batch_quantum(values: LayoutValues, launch: Launch) -> int:
    """Required divisor of train.global_batch_size, in samples.

    Interleaved 1F1B takes micro-batches in groups of p (arXiv:2104.04473, section 2.2.2).
    """
    replicas = num_replicas(replica_size(values), values["dp"], launch)
    interleaved = values["vp"] > 1 and values["pipeline"] == "1f1b"
    return int(replicas * values["train.micro_batch_size"] * (values["pp"] if interleaved else 1))


@rule("model.num_heads model.hidden_size model.options", "model.num_heads")
def _heads_divide_hidden(values: LayoutValues, _: Launch) -> RuleResult:
    has_width = bool((values.get("model.options") or {}).get("head_dim"))
    if has_width or values["model.hidden_size"] % values["model.num_heads"] == 0:
        return None
    return f"{values.typed('model.num_heads')} does not divide {values.typed('model.hidden_size')}"


@rule("tp model.num_heads model.options", "tp")
def _tp_fits_kv_heads(values: LayoutValues, _: Launch) -> RuleResult:
    heads, tp = (values.get("model.options") or {}).get("num_kv_heads"), values["tp"]
    if type(heads) is not int or heads <= 0 or values["model.num_heads"] % tp:  # num_heads has its own rule
        return None
    if heads % tp == 0 or tp % heads == 0:
        return None
    return f"of {values.typed('tp')} and model.options.num_kv_heads={heads} neither divides the other"


def _tp_divides(key: str, values: LayoutValues, _: Launch) -> RuleResult:
    # ffn_hidden_size=null is 4 * hidden_size: divided where the heads are
    if values[key] is None or values[key] % values["tp"] == 0:
        return None
    valid = divisors(values[key])
    listed = f" (its divisors: {', '.join(map(str, valid))})" if len(valid) <= 12 else ""
    return Violation(f"{values.typed('tp')} does not divide {values.typed(key)}", note=listed)


@rule("data.seq_length model.max_positions", "data.seq_length")
def _sequence_fits(values: LayoutValues, _: Launch) -> RuleResult:
    length, positions = values["data.seq_length"], values["model.max_positions"]
    if length <= positions:
        return None
    return Violation(
        f"{values.typed('data.seq_length')} is more than {values.typed('model.max_positions')}",
        note=f", or model.max_positions={length}",
    )


@rule("data.seq_length model.max_positions cp tp sequence_parallel", "data.seq_length sequence_parallel")
def _tp_divides_sequence(values: LayoutValues, _: Launch) -> RuleResult:
    tokens = values["data.seq_length"] // values["cp"]  # of one cp rank
    if not values["sequence_parallel"] or tokens % values["tp"] == 0:
        return None
    ranks = values.typed(*(("cp", "tp") if values["cp"] > 1 else ("tp",)))
    return (
        f"{values.typed('sequence_parallel')} splits sequences, but {ranks} does not divide "
        f"{values.typed('data.seq_length')}"
    )


def overlapped_tokens(values: LayoutValues) -> int:
    """Tokens of a sequence that a rank communicates, which tp_overlap splits into parts."""
    tokens = values["data.seq_length"] // values["cp"]
    return int(tokens // values["tp"] if values["sequence_parallel"] else tokens)


@rule("data.seq_length cp tp sequence_parallel tp_overlap", "tp_overlap")
def _parts_divide_sequence(values: LayoutValues, _: Launch) -> RuleResult:
    tokens, parts = overlapped_tokens(values), values["tp_overlap"] or 1
    if values["tp"] == 1 or tokens % parts == 0:
        return None
    return f"{values.typed('tp_overlap')} does not divide a rank's {tokens} tokens of a sequence"


@rule("data.seq_length model.max_positions cp tp sequence_parallel", "data.seq_length cp")
def _cp_divides_sequence(values: LayoutValues, _: Launch) -> RuleResult:
    cp = values["cp"]
    if cp == 1 or values["data.seq_length"] % (2 * cp) == 0:
        return None
    return (
        f"{values.typed('cp')} splits sequences into {2 * cp} pieces, but {2 * cp} does not divide "
        f"{values.typed('data.seq_length')}"
    )


@rule("cp", "cp")
def _sequences_are_whole(values: LayoutValues, _: Launch) -> RuleResult:
    if values["cp"] == 1:
        return None
    return f"{values.typed('cp')} splits the sequences of pretraining and `mlm eval loss` alone"


def num_experts(values: LayoutValues) -> int:
    """Experts of a layer; 0 for a dense model, or a setting that is not a number."""
    experts = (values.get("model.options") or {}).get("num_experts", 0)
    return experts if type(experts) is int and experts > 0 else 0


@rule("ep model.options", "ep")
def _ep_divides_experts(values: LayoutValues, _: Launch) -> RuleResult:
    experts, ep = num_experts(values), values.get("ep", 1)
    if ep == 1 or (experts and experts % ep == 0):
        return None
    return f"{values.typed('ep')} cannot split model.options.num_experts={experts} evenly"


@rule("tp cp pp dp ep expert_tp", "ep")
def _ep_divides_replicas(values: LayoutValues, launch: Launch) -> RuleResult:
    keys = ("tp", "cp", "dp") if values.get("expert_tp") == 1 else ("cp", "dp")
    folded = values.changed({"dp": num_replicas(replica_size(values), values["dp"], launch)})
    ranks = math.prod(folded[key] for key in keys)
    if ranks % values.get("ep", 1) == 0:
        return None
    typed = f"{folded.typed(*keys)} = {ranks} ranks"
    return f"{values.typed('ep')} does not divide {typed}, which it is folded of"


@rule("tp expert_tp sequence_parallel model.options", "expert_tp sequence_parallel")
def _experts_fit_tp(values: LayoutValues, _: Launch) -> RuleResult:
    tp, expert_tp = values["tp"], values.get("expert_tp")
    if expert_tp not in (None, 1, tp):
        return f"{values.typed('expert_tp')} is neither 1 nor {values.typed('tp')}"
    if num_experts(values) and expert_tp == 1 < tp and not values.get("sequence_parallel", False):
        return (
            f"{values.typed('expert_tp')} lets each of {values.typed('tp')} ranks send its own tokens, which "
            "sequence_parallel=false leaves them none of"
        )
    return None


@rule("tp expert_tp model.options model.hidden_size", "tp")
def _tp_divides_experts(values: LayoutValues, _: Launch) -> RuleResult:
    options, tp = values.get("model.options") or {}, values["tp"]
    width = options.get("expert_ffn_size", 0)
    shared = options.get("shared_experts", 0)
    if not num_experts(values) or type(width) is not int or width <= 0 or type(shared) is not int:
        return None
    if values.get("expert_tp") != 1 and width % tp:
        return f"{values.typed('tp')} does not divide model.options.expert_ffn_size={width}"
    if options.get("bias") and values.get("expert_tp") != 1 and values["model.hidden_size"] % tp:
        return f"{values.typed('tp')} does not divide {values.typed('model.hidden_size')}, as biases need"
    if shared * width % tp:
        return f"{values.typed('tp')} does not divide the {shared * width} of the shared experts"
    return None


@rule("pp vp model.num_layers", "vp pp")
def _layers_fill_stages(values: LayoutValues, _: Launch) -> RuleResult:
    layers, pp, vp = values["model.num_layers"], values["pp"], values["vp"]
    stages = f"{values.typed('pp', 'vp')} = {pp * vp} stages" if vp > 1 else f"{values.typed('pp')} stages"
    if pp * vp > layers:
        return f"{stages} are more than {values.typed('model.num_layers')}"
    if vp > 1 and layers % (pp * vp):
        return f"{stages} do not divide {values.typed('model.num_layers')}, as vp > 1 needs"
    return None


@rule("pp vp", "vp pp")
def _chunks_interleave(values: LayoutValues, _: Launch) -> RuleResult:
    if values["vp"] == 1 or values["pp"] > 1:
        return None
    return f"{values.typed('vp')} interleaves the stages of a pipeline, but {values.typed('pp')} makes none"


@rule("vp pipeline", "pipeline vp")
def _schedule_interleaves(values: LayoutValues, _: Launch) -> RuleResult:
    if values["vp"] == 1 or values["pipeline"] != "zb_h1":
        return None
    return f"{values.typed('pipeline')} has one stage per rank, but {values.typed('vp')}"


@rule("pp zero", "zero")
def _weights_stay_gathered(values: LayoutValues, _: Launch) -> RuleResult:
    if values["zero"] != 3 or values["pp"] == 1:
        return None
    return (
        f"{values.typed('zero')} would gather the weights again for each micro-batch of a pipeline "
        f"({values.typed('pp')})"
    )


@rule("tp cp pp", "tp cp pp")
def _replicas_fill_world(values: LayoutValues, launch: Launch) -> RuleResult:
    replica, world_size = replica_size(values), launch.world_size
    if world_size is None or world_size % replica == 0:
        return None
    return Violation(
        f"{values.typed(*_replica_keys(values))} = {replica} does not divide {launch.world}",
        note=f", or start a multiple of {replica} ranks",
    )


@rule("tp cp pp dp", "dp")
def _dp_fills_world(values: LayoutValues, launch: Launch) -> RuleResult:
    replica, dp, world_size = replica_size(values), values["dp"], launch.world_size
    if world_size is None or dp is None or world_size % replica or replica * dp == world_size:
        return None
    ranks, typed = replica * dp, values.typed(*_replica_keys(values), "dp")
    return Violation(
        f"{typed} = {ranks} ranks, not {launch.world}",
        note=f", or start {ranks} ranks",
    )


@rule("tp cp pp dp", "dp cp tp pp", local_only=True)
def _host_has_ranks(values: LayoutValues, launch: Launch) -> RuleResult:
    replica, most = replica_size(values), launch.most_ranks
    dp = num_replicas(replica, values["dp"], launch)
    if launch.world_size is not None or replica * dp <= most:
        return None
    capacity = f"this host has {most} GPUs" if launch.local_devices else f"a CPU host runs at most {most}"
    ranks, typed = replica * dp, values.changed({"dp": dp}).typed(*_replica_keys(values), "dp")
    start = f"start {ranks} ranks with torchrun or SLURM (scripts/slurm/pretrain.sbatch)"
    # Without memory for weights, gradients and moments, no layout fits on this host.
    layers, hidden = (values.get(f"model.{key}") for key in ("num_layers", "hidden_size"))
    fits = True
    if launch.local_devices is None and isinstance(layers, int) and isinstance(hidden, int):
        # 12 h^2 parameters a layer, each with its gradient and two moments in float32
        fits = 16 * 12 * layers * hidden**2 <= host_memory()
    why = f"{typed} = {ranks} ranks, but {capacity}"
    return Violation(why, start=start if launch.elsewhere else "", can_start_here=fits)


@rule("tp cp pp dp vp pipeline train.global_batch_size train.micro_batch_size", "train.global_batch_size")
def _batches_divide(values: LayoutValues, launch: Launch) -> RuleResult:
    size, micro = values["train.global_batch_size"], values["train.micro_batch_size"]
    quantum, dp = batch_quantum(values, launch), num_replicas(replica_size(values), values["dp"], launch)
    if size % quantum == 0:
        return None
    groups = ("pp",) if quantum > dp * micro else ()  # interleaving takes micro-batches in groups of pp
    typed = values.changed({"dp": dp}).typed("dp", "train.micro_batch_size", *groups)
    return f"{values.typed('train.global_batch_size')} is not a multiple of {typed} = {quantum}"


SPLIT_RULES = (
    rule("tp model.num_heads", "tp")(partial(_tp_divides, "model.num_heads")),
    rule("tp model.ffn_hidden_size", "tp")(partial(_tp_divides, "model.ffn_hidden_size")),
    _tp_fits_kv_heads,
    _layers_fill_stages,
    _tp_divides_experts,
    _ep_divides_experts,
    _experts_fit_tp,
)
"""Conditions of a model's shape."""
RANK_RULES = (
    _chunks_interleave,
    _replicas_fill_world,
    _dp_fills_world,
    _ep_divides_replicas,
    _host_has_ranks,
)
"""Conditions of the ranks, for commands that read the model's shape from a checkpoint later."""
CONTEXT_FITS = _cp_divides_sequence
"""Condition of sequences that ranks split."""
READER_RULES = (*RANK_RULES, _sequences_are_whole)
"""Conditions of commands other than pretraining and the evaluation of its loss."""
SCHEDULE_RULES = (_schedule_interleaves, _weights_stay_gathered)
"""Conditions of a training step."""
FINETUNE_LAYOUT_RULES = (*READER_RULES, *SCHEDULE_RULES)
TRAIN_RULES = (
    _heads_divide_hidden,
    *SPLIT_RULES,
    *RANK_RULES,
    *SCHEDULE_RULES,
    _sequence_fits,
    CONTEXT_FITS,
    _tp_divides_sequence,
    _parts_divide_sequence,
    _batches_divide,
)
"""All conditions of a training run."""
