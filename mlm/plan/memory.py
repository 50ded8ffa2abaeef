"""Peak memory of one device by part, from counts of the modules.

State belongs to the parameters of a stage's layers and ends. Activations are the bytes that a micro-batch
saves in each of them, times the pairs of chunk and micro-batch in flight, plus the largest workspace of a
layer's backward pass. Weights that ZeRO gathers and tensors that a pipeline sends have separate rules.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache

from mlm.models.stage import split_layers
from mlm.parallel.config import ParallelConfig
from mlm.parallel.pipeline.actions import SENDS_KEPT
from mlm.plan.dry_run_memory import EMBEDDING, VOCABULARY
from mlm.plan.layer_counts import LayerCounts
from mlm.plan.layout import BOTH, FIRST, LAST, PlannedLayout, split_of_state

TRANSIENT = ("activations", "vocabulary", "communication", "cast weights")
PARTS = ("weights", "gradients", "optimizer", "cast weights", *TRANSIENT[:3], "allocator")
"""Parts of a device's memory, in the order of tables."""
ALLOCATOR = 0.04
"""Share of transient memory that the allocator loses to rounding and fragments."""


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device at its peak."""

    parts: dict[str, float]
    """Bytes by PARTS."""
    moment: str
    """Time of the peak: backward, as it begins, or optimizer, as it steps."""
    parameters: int
    """Elements on the device."""

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class StageState:
    """Parameters of one device and their state, in bytes unless stated."""

    parameters: int
    """Elements; of sharded parameters this rank's rows."""
    weights: int
    optimizer: int
    gradients: int
    """Of this rank's rows."""
    full_gradients: int
    """Before sharding."""
    cast: int
    """Copies of the unsharded weights in the compute dtype."""
    gathered: int
    """Elements of all parameters that ZeRO gathers."""
    layer: int
    """Elements of the largest layer."""
    ends: int
    """Elements outside the layers."""


class MemoryModel:
    """Memory of layouts of one run, on one type of device."""

    def __init__(self, counts: LayerCounts, reserved: float = 0.0) -> None:
        self.counts, self.run, self.reserved = counts, counts.run, reserved
        self.element, self.master = counts.element, max(4, counts.element)
        self._states = cache(self._state)

    def peak(self, layout: PlannedLayout, stage_rank: int = 0, dp_rank: int = 0) -> DeviceMemory:
        """Return the peak of a device on pipeline rank `stage_rank` and data-parallel rank `dp_rank`."""
        state = self.state(layout, stage_rank, dp_rank)
        moments = {
            "backward": self.backward_begins(layout, stage_rank, state),
            "optimizer": self.optimizer_steps(layout, stage_rank, state),
        }
        moment = max(moments, key=lambda name: sum(moments[name].values()))
        parts = dict.fromkeys(PARTS, 0.0) | moments[moment]
        parts["allocator"] = self.reserved + ALLOCATOR * sum(parts[name] for name in TRANSIENT)
        if self.counts.device == "cpu":
            # the heap keeps blocks that other phases freed, about the gradients': few of them fit activations
            parts["allocator"] += state.gradients
        return DeviceMemory({name: float(parts[name]) for name in PARTS}, moment, state.parameters)

    def worst(self, layout: PlannedLayout) -> DeviceMemory:
        """Return the peak of the fullest pipeline rank: the first, the one after it, or the last."""
        ranks = {0, layout.pp - 1, min(1, layout.pp - 1)}
        return max((self.peak(layout, rank) for rank in sorted(ranks)), key=lambda peak: peak.total)

    def bound(self, layout: PlannedLayout) -> float:
        """Lower bound of `worst` in bytes: the first rank without the head, which takes long to count."""
        state = self.state(layout, 0)
        begins = self.backward_begins(layout, 0, state, with_head=False)
        return self.reserved + max(
            sum(parts.values()) for parts in (begins, self.optimizer_steps(layout, 0, state))
        )

    # -- state

    def state(self, layout: PlannedLayout, stage_rank: int, dp_rank: int = 0) -> StageState:
        """Return the parameters of one device and their state."""
        split, ranks = split_of_state(layout.split), layout.dp * layout.cp
        return self._states(split, layout.pp, layout.vp, ranks if layout.zero else 1, stage_rank, dp_rank)

    def _state(
        self, split: ParallelConfig, pp: int, vp: int, ranks: int, stage_rank: int, rank: int
    ) -> StageState:
        homes = homes_of(self.counts.kinds, pp, vp, stage_rank)
        folds = split.tp if split.expert_tp == 1 else 1  # ranks of tp that hold whole experts
        parameters = weights = optimizer = gradients = full_gradients = cast = gathered = 0
        for home, n in homes.items():
            for shard in self.counts.state(split, home):
                if shard.is_whole or ranks == 1:
                    size = n * shard.size
                elif shard.is_expert:
                    size = n * shard.share(rank * folds // split.ep, ranks * folds // split.ep)
                else:
                    size = n * shard.share(rank, ranks)
                parameters += size * (not shard.is_state)
                weights += shard.held_bytes(size)
                optimizer += shard.state_bytes * size
                cast += shard.cast_bytes * shard.size * n
                gathered += shard.size * n * (not shard.is_whole)
                if shard.is_trained:
                    gradients += shard.held_bytes(size)
                    full_gradients += shard.held_bytes(shard.size * n)
        sizes = {home: self.counts.elements(split, home) for home in homes}
        layer = max((size for home, size in sizes.items() if home.isdigit()), default=0)
        ends = sum(size for home, size in sizes.items() if not home.isdigit())
        return StageState(
            parameters, weights, optimizer, gradients, full_gradients, cast, gathered, layer, ends
        )

    # -- transient memory

    def backward_begins(
        self, layout: PlannedLayout, stage_rank: int, state: StageState, *, with_head: bool = True
    ) -> dict[str, float]:
        """Bytes by part when most micro-batches are in flight."""
        unit = max(state.layer, state.ends) * (self.element + self.master) if layout.zero else 0
        saved, workspace = self._activations(layout, stage_rank)
        gradients = self._gradients_before(layout, state)
        if layout.zero == 0:
            cast = state.cast  # once a step
        else:
            units = state.gathered if layout.zero == 2 else min(state.gathered, state.ends + 2 * state.layer)
            cast = self.element * units
        head = communication = 0.0
        if with_head and stage_rank == layout.pp - 1:
            head = self._head(layout, workspace + unit, is_first=not gradients)
        if layout.pp > 1:  # boundary tensors in flight
            ranks = layout.cp * (layout.tp if layout.sequence_parallel else 1)
            tokens = self.run.data.seq_length * layout.micro_batch / ranks
            boundary = self.element * tokens * self.run.model.hidden_size
            communication = boundary * (min(SENDS_KEPT, layout.micro_batches) + 2)
        return {
            "weights": state.weights,
            "optimizer": state.optimizer,
            "gradients": gradients,
            "cast weights": cast,
            "activations": saved + workspace,
            "vocabulary": head,
            "communication": communication + unit,
        }

    def optimizer_steps(self, layout: PlannedLayout, stage_rank: int, state: StageState) -> dict[str, float]:
        """Bytes by part when the gradients are complete and the activations freed."""
        is_end = layout.pp > 1 and stage_rank in (0, layout.pp - 1)
        tied = self.counts.tied(layout.split) if is_end else 0
        return {
            "weights": state.weights,
            "optimizer": state.optimizer,
            "gradients": state.gradients,
            "cast weights": state.cast if layout.zero == 0 else 0,
            "communication": tied * self.master,
        }

    def _gradients_before(self, layout: PlannedLayout, state: StageState) -> float:
        """Bytes of gradients that exist when the backward pass with most activations begins."""
        is_single = layout.micro_batches == 1
        if layout.zero == 0:
            return 0 if is_single and layout.dp * layout.cp == 1 else state.full_gradients  # or flat buffers
        if is_single:
            return 0
        return state.gradients if layout.zero_reduce == "every" else state.full_gradients

    def _activations(self, layout: PlannedLayout, stage_rank: int) -> tuple[float, float]:
        """Bytes saved by layers and embedding in flight, and the workspace of the layer in backward."""
        single, double = self.counts.counts(layout.split).passes
        pairs, more = in_flight(layout, stage_rank) / layout.vp, layout.micro_batch - 1
        homes = homes_of(self.counts.kinds, layout.pp, layout.vp, stage_rank)
        layers = {home: n for home, n in homes.items() if home.isdigit()}
        saved = workspace = 0.0
        for home, n in (layers | ({EMBEDDING: 1} if stage_rank == 0 else {})).items():
            a, b = single.saved_bytes[home], double.saved_bytes[home]
            saved += pairs * n * (a + more * (b - a))
            if home in layers:
                a, b = single.peak_workspace_bytes[home], double.peak_workspace_bytes[home]
                workspace = max(workspace, a + more * (b - a))
        return saved, workspace

    def _head(self, layout: PlannedLayout, later: float, *, is_first: bool) -> float:
        """Bytes of the head in flight beyond `later`, the bytes that backward needs after it.

        `is_first` if there are no gradients yet.
        """
        counts = self.counts.ends(replace(layout.split, recompute="none"), layout.micro_batch)
        first, usual = (
            count.peak_workspace_bytes[VOCABULARY] + count.saved_bytes[VOCABULARY]
            for count in (counts.first, counts.passes[0])
        )
        queue = layout.micro_batches - 1 if layout.pipeline == "gpipe" else 0  # without the newest
        waiting = queue * counts.passes[0].saved_bytes[VOCABULARY]
        if queue and layout.zero == 0 and layout.dp * layout.cp > 1:
            # losses add to the head's gradient outside the flat buffer until the first backward pass
            last = self.counts.state(layout.split, LAST)
            waiting += sum(shard.held_bytes(shard.size) for shard in last if shard.is_trained)
        return waiting + max(usual - later, 0.0) + (max(first - usual, 0.0) if is_first else 0.0)


@cache
def homes_of(kinds: tuple[int, ...], pp: int, vp: int, stage_rank: int) -> Counter[str]:
    """Count the homes of a pipeline rank."""
    stages = split_layers(len(kinds), pp * vp)[stage_rank::pp]
    homes = Counter(str(kinds[n]) for stage in stages for n in stage.layers)
    if pp == 1:
        homes[BOTH] = 1
    elif stage_rank in (0, pp - 1):
        homes[FIRST if stage_rank == 0 else LAST] = 1
    return homes


def in_flight(layout: PlannedLayout, stage_rank: int) -> int:
    """Most pairs of chunk and micro-batch in flight on a pipeline rank (pipeline/schedules.py)."""
    p, v, m = layout.pp, layout.vp, layout.micro_batches
    if layout.pipeline == "gpipe":
        return v * m
    if layout.pipeline == "zb_h1":
        return min(p, m)
    if v == 1:
        return min(p - stage_rank, m)
    return min((v + 1) * p - 2 * stage_rank - 1, v * m)
