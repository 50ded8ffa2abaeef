"""Time of a training step, from counts of the modules' work.

Times are in seconds. A home's pass is the sum of its matrix products (a roofline with an efficiency that is
smooth in each dimension), fused attention, other kernels (bytes over bandwidth) and the communication that
computation between its start and its wait does not hide. Times are linear in the micro-batch size: one sample
and two are counted. A pipeline is simulated (schedule.py) with the time of each stage.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import folds_tp
from mlm.parallel.pipeline.actions import Cost
from mlm.plan.dry_run_memory import EMBEDDING, VOCABULARY
from mlm.plan.dry_run_meter import BACKWARD, FORWARD
from mlm.plan.hardware import HardwareConfig
from mlm.plan.layer_counts import LayerCounts
from mlm.plan.layout import BOTH, FIRST, LAST, PlannedLayout, split_of_state
from mlm.plan.memory import homes_of
from mlm.plan.schedule import pipeline_time
from mlm.plan.trace import Attention, Message, Place, Product, Work

COMPUTED = ("matmul", "attention", "elementwise", "tp", "cp", "ep")
"""Parts of a pass: kernels, and exposed communication by axis."""
PARTS = (*COMPUTED[:3], "recompute", "vocabulary", *COMPUTED[3:], "pp", "dp", "bubble", "optimizer")
"""Parts of a step's time, in the order of tables."""
ENDS = {FIRST: (EMBEDDING,), LAST: (VOCABULARY,), BOTH: (EMBEDDING, VOCABULARY)}
"""Homes of work by homes of parameters at an end of the model."""
Times = tuple[float, ...]
"""Seconds by COMPUTED."""
ZERO_TIMES: Times = (0.0,) * len(COMPUTED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """Properties of a training program's code, none of them fitted. The defaults are mlm's."""

    compiled: bool = True
    """True if kernels between products are fused."""
    overlaps: bool = True
    """True if computation between the start and the wait of a message hides it."""
    overlaps_dp: bool = True
    """True if gradients are reduced while backward runs."""
    reduces_whole: bool = False
    """True if gradients of a sharded optimizer are all-reduced, not reduce-scattered."""
    gradient_bytes: int = 4
    """Bytes per element of gradients, in messages and in memory."""
    dp_messages: int = 1
    """Messages for the gradients or sharded weights of a layer."""
    backward_gathers: float = 1.0
    """Gathers of sharded weights in a backward pass; more if recomputation frees them again."""


RING_HOP_S, NETWORK_HOP_S, POSTS = 3.4e-6, 14e-6, 3
"""Seconds per hop of NCCL's rings over NVLink and over a network, and the host's posts to the network per hop
of a ring over several nodes (src/graph/tuning.cc, protocol Simple)."""
MESSAGE_SMS = 16
"""Multiprocessors that a message takes from concurrent kernels: NCCL's channels over eight links, one each
(github.com/NVIDIA/nccl, issues 1041 and 1656)."""
MLM, MLM_ON_CPU = Software(), Software(compiled=False, overlaps=False, overlaps_dp=False)
"""mlm on GPUs, and on CPUs."""


class HomeTime(NamedTuple):
    """Times of a layer, or of an end of the model, on one micro-batch."""

    forward: Times
    backward: Times


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step's time on an average pipeline rank."""

    total: float
    parts: dict[str, float]
    """Seconds by PARTS; they sum to `total`. The bubble is idle time."""


class CostModel:
    """Times of layouts of one run on a number of devices."""

    def __init__(
        self, counts: LayerCounts, hardware: HardwareConfig, gpus: int, software: Software | None = None
    ) -> None:
        self.counts, self.hardware, self.gpus = counts, hardware, gpus
        self.run, dtype = counts.run, counts.run.precision.dtype
        self.software = software or (MLM_ON_CPU if hardware.device == "cpu" else MLM)
        half, single = ("bf16" if dtype == "fp8" else dtype), ("tf32" if dtype == "tf32" else "fp32")
        names = {1: "fp8", 2: half if half in ("bf16", "fp16") else "bf16", 4: single, 8: "fp64"}
        peaks = {size: getattr(hardware.peak_tflops, name) for size, name in names.items()}
        self.peaks = {size: (peak or hardware.peak(half) / 1e12) * 1e12 for size, peak in peaks.items()}
        self.element = counts.element
        self.peak = hardware.peak(half)
        self.message_share = MESSAGE_SMS / (hardware.multiprocessors or math.inf)
        self.bandwidth = hardware.memory_gbps * 1e9 * hardware.efficiency.memory
        self.prices, self.home_times = cache(self._prices), cache(self._home_times)
        self.stage_times, self.updates = cache(self._stage_times), cache(self._update)
        self.elements = cache(self._elements)

    # -- kernels and messages

    def product(self, p: Product) -> float:
        """Seconds of products: the longer of arithmetic and memory traffic."""
        constants, c = self.hardware.efficiency, self.hardware.efficiency.matmul_half
        share = constants.matmul * p.m / (p.m + c) * p.k / (p.k + c) * p.n / (p.n + c)
        arithmetic = 2 * p.times * p.m * p.k * p.n / (self.peaks[p.operand] * share)
        return max(arithmetic, p.bytes / self.bandwidth)

    def traffic(self, work: Work, *, fused: bool) -> float:
        """Seconds of kernels other than products."""
        size = work.fused_bytes if fused else work.eager_bytes
        return size / self.bandwidth + work.kernels * self.hardware.kernel_us * 1e-6

    def nodes(self, ranks: int, stride: int) -> int:
        """Most nodes of a group of `ranks` ranks, `stride` apart."""
        node, span = self.hardware.devices_per_node, ranks * stride
        return 1 if self.gpus <= node or node % span == 0 else min(max(-(-span // node), 2), ranks)

    def link(self, ranks: int, stride: int) -> tuple[float, float]:
        """Return bytes/s of one rank and seconds of latency in a group of `ranks` ranks, `stride` apart.

        A group over several nodes shares the network of its devices in a node: on nodes of 8, that of one
        device outside tp = 8, of all for tp = 16, of two where a group of tp = 6 lies across two nodes.
        """
        hardware, share = self.hardware, self.hardware.efficiency.network * 1e9
        if self.nodes(ranks, stride) == 1:
            return hardware.node_gbps * share, hardware.node_latency_us * 1e-6
        of_node = max(1, math.gcd(ranks * stride, hardware.devices_per_node) // stride)
        across = min(hardware.network_gbps * of_node, hardware.node_gbps)
        return across * share, hardware.network_latency_us * 1e-6

    def gather(self, size: float, ranks: int, stride: int) -> float:
        """All-gather or reduce-scatter of `size` bytes: (k - 1)/k of them pass each rank.

        On GPUs over a ring of k - 1 hops. Over several nodes no hop is shorter than its posts.
        """
        hops, network_hops = ranks - 1, self.nodes(ranks, stride) - 1
        if hops < 2 or not size or self.hardware.device == "cpu":
            return self._transmit(size, ranks, stride)
        hop = max(RING_HOP_S, POSTS * self.hardware.network_post_us * 1e-6) if network_hops else RING_HOP_S
        return (
            self._transmit(size, ranks, stride) + (hops - network_hops) * hop + network_hops * NETWORK_HOP_S
        )

    def gather_shards(self, size: float, ranks: int, stride: int) -> float:
        """`gather` of sharded weights or gradients; subclasses for other programs override it."""
        return self.gather(size, ranks, stride)

    def all_to_all(self, size: float, ranks: int, stride: int) -> float:
        """Exchange of `size` bytes of each rank, 1/k of them with every rank at once (nccl-tests, issue 130).

        Bytes for other nodes take the device's link to the network, concurrently with those within the node.
        """
        if ranks == 1 or not size:
            return 0.0
        hardware, nodes = self.hardware, self.nodes(ranks, stride)
        local = -(-ranks // nodes)
        latency = hardware.node_latency_us if nodes == 1 else hardware.network_latency_us
        sent = max((local - 1) / hardware.node_gbps, (ranks - local) / hardware.network_gbps) / ranks * size
        return latency * 1e-6 + sent / (hardware.efficiency.network * 1e9)

    def all_reduce(self, size: float, ranks: int, stride: int) -> float:
        """All-reduce up and down a tree: as many bytes as a reduce-scatter and an all-gather."""
        return 2 * self._transmit(size, ranks, stride)

    def _transmit(self, size: float, ranks: int, stride: int) -> float:
        if ranks == 1 or not size:
            return 0.0
        rate, latency = self.link(ranks, stride)
        return latency * math.ceil(math.log2(ranks)) + (ranks - 1) / ranks * size / rate

    def exposed_time(self, length: float, window: float, pieces: float = math.inf) -> float:
        """The part of a communication of `length` that computation in `window` does not hide.

        At least the last of `pieces` messages is exposed. Hidden messages take multiprocessors from kernels.
        """
        if not window:
            return length
        last = length / max(pieces, 1)
        return max(length - window, last + self.message_share * (length - last))

    # -- passes of layers and ends

    def price(self, work: Work, split: ParallelConfig, *, fused: bool) -> Times:
        """Seconds of work by COMPUTED."""
        seconds, computed = dict.fromkeys(COMPUTED, 0.0), 0.0
        in_flight = dict[int, tuple[str, float, float]]()  # axis, length, start
        collectives = {"all-reduce": self.all_reduce, "all-to-all": self.all_to_all}
        strides = {"tp": 1, "cp": split.tp, "ep": 1 if folds_tp(split.tp, split.expert_tp) else split.tp}

        def end(number: int) -> None:
            axis, length, start = in_flight.pop(number)
            seconds[axis] += self.exposed_time(length, computed - start if self.software.overlaps else 0.0)

        for event in work.events:
            if isinstance(event, Product):
                seconds["matmul"] += (took := self.product(event))
                computed += took
            elif isinstance(event, Attention):
                took = event.flops / (self.peak * self.hardware.efficiency.attention)
                seconds["attention"] += (took := max(took, event.bytes / self.bandwidth))
                computed += took
            elif isinstance(event, Message):
                collective = collectives.get(event.operation, self.gather)
                length = collective(event.bytes, event.ranks, strides[event.axis])
                in_flight[event.number] = event.axis, length, computed
            elif event.number in in_flight:
                end(event.number)
        for number in list(in_flight):
            end(number)
        seconds["elementwise"] = self.traffic(work, fused=fused)
        return tuple(seconds.values())

    def _prices(self, split: ParallelConfig) -> list[dict[Place, Times]]:
        """Times by phase and home, of one sample and of two."""
        price, passes = partial(self.price, fused=self.software.compiled), self.counts.counts(split).passes
        return [{place: price(work, split) for place, work in count.work.items()} for count in passes]

    def _home_times(self, split: ParallelConfig, micro_batch: int) -> dict[str, HomeTime]:
        """Times of each home on a micro-batch; recomputation counts as backward."""
        layout, recompute, homes = split, split.recompute, dict[str, HomeTime]()
        if recompute in ("full", "budget") or (recompute == "selective" and self.counts.device == "gpu"):
            split = replace(split, recompute="none")  # `recompute_times` adds what is recomputed
        (single, double), more = self.prices(split), micro_batch - 1
        for home in self.counts.counts(split).passes[0].saved_bytes:
            places = (FORWARD, home), (BACKWARD, home)
            pairs = (
                zip(single.get(place, ZERO_TIMES), double.get(place, ZERO_TIMES), strict=True)
                for place in places
            )
            forward, backward = (tuple(max(x + more * (y - x), 0.0) for x, y in pair) for pair in pairs)
            if home.isdigit():
                backward = tuple(map(sum, zip(backward, self.recompute_times(forward, layout), strict=True)))
            homes[home] = HomeTime(forward, backward)
        return homes

    def recompute_times(self, forward: Times, layout: ParallelConfig) -> Times:
        """The part of a layer's forward pass that recomputation adds to its backward pass.

        An upper bound for a budget: the compiler recomputes what takes least time for its memory.
        """
        shares = {"full": 1.0, "budget": 1 - layout.recompute_budget}
        return tuple(shares.get(layout.recompute, 0.0) * seconds for seconds in forward)

    # -- a step

    def stage_costs(self, layout: PlannedLayout) -> list[Cost]:
        """Times of each stage (chunk) on one micro-batch."""
        return self.stage_times(layout.split, layout.micro_batch, layout.pp, layout.vp)

    def _stage_times(self, split: ParallelConfig, micro_batch: int, p: int, v: int) -> list[Cost]:
        times = self.home_times(split, micro_batch)
        counted = self.counts.counts(replace(split, recompute="none"))
        addition_s = self.traffic(counted.accumulation, fused=False) / max(counted.trained, 1)
        addition_s *= self.software.gradient_bytes / 4

        @cache
        def cost(home: str) -> tuple[float, float, float]:
            """Forward, backward with additions to gradients, and its part for weights."""
            parts = [times[part] for part in ENDS.get(home, (home,))]
            trained = (shard.size for shard in self.counts.state(split, home) if shard.is_trained)
            added = addition_s * sum(trained)
            forward, backward = (sum(map(sum, passes)) for passes in zip(*parts, strict=True))
            # Half of the products in backward are the weight gradients', which zero-bubble schedules defer.
            return forward, backward + added, sum(x.backward[0] / 2 for x in parts) + added

        costs = []
        for n in range(p * v):
            homes = self.stage_homes(p * v, 1, n)
            f, b, w = map(sum, zip(*([k * x for x in cost(home)] for home, k in homes.items()), strict=True))
            costs.append(Cost(f, b, b - w, w))
        return costs

    def stage_homes(self, pp: int, vp: int, stage_rank: int) -> Counter[str]:
        """Count the homes of a pipeline rank; subclasses for other programs override it."""
        return homes_of(self.counts.kinds, pp, vp, stage_rank)

    def step(self, layout: PlannedLayout) -> StepTime:
        times, m, p = self.stage_costs(layout), layout.micro_batches, layout.pp
        transfer = self.transfer(layout)
        busy = m * sum(cost.forward + cost.backward for cost in times) / p
        if p == 1:
            elapsed = m * (times[0].forward + times[0].backward)
        else:
            costs = [replace(cost, transfer=transfer) for cost in times]
            elapsed = pipeline_time(layout.pipeline, p, layout.vp, m, costs)
        reduction, optimizer, gathers = self.update_times(layout)
        # modules' computation and exposed communication on an average pipeline rank
        homes, parts = self.home_times(layout.split, layout.micro_batch), dict.fromkeys(PARTS, 0.0)
        for home, count in Counter(map(str, self.counts.kinds)).items():
            time, repeated = homes[home], self.recompute_times(homes[home].forward, layout)
            for name, f, b, r in zip(COMPUTED, time.forward, time.backward, repeated, strict=True):
                parts[name] += m / p * count * (f + b - r)
            parts["recompute"] += m / p * count * sum(repeated)
        for home in (EMBEDDING, VOCABULARY):
            for name, seconds in zip(COMPUTED, map(sum, zip(*homes[home], strict=True)), strict=True):
                parts[name if home == EMBEDDING or name in COMPUTED[3:] else "vocabulary"] += m / p * seconds
        parts["elementwise"] += busy - sum(parts.values())  # additions to gradients
        parts["pp"] = min(elapsed - busy, 2 * (p - 1) * transfer)  # through the warm-up and the cool-down
        parts["dp"], parts["optimizer"] = reduction + gathers, optimizer
        parts["bubble"] = max(elapsed - busy - parts["pp"], 0.0)
        return StepTime(elapsed + reduction + gathers + optimizer, parts)

    def bound(self, layout: PlannedLayout) -> float:
        """Lower bound of a step: the last rank's work, and the pipeline's warm-up and cool-down."""
        times, p = self.stage_costs(layout), layout.pp
        last = sum(cost.forward + cost.backward for cost in times[p - 1 :: p])
        ramps = sum(cost.forward + cost.backward for cost in times[: p - 1])
        if p > 1 and layout.pipeline == "zb_h1":  # weight gradients fill a part of the ramps
            weights = [cost.weight_gradient for cost in times[: p - 1]]
            ramps -= sum(weights) + len(weights) * max(weights)
        return layout.micro_batches * last + max(ramps, 0.0) + sum(self.update_times(layout))

    def transfer(self, layout: PlannedLayout) -> float:
        """Seconds that a boundary tensor takes to the next pipeline rank."""
        if layout.pp == 1:
            return 0.0
        tokens = self.run.data.seq_length // layout.cp * layout.micro_batch
        size = self.element * tokens * self.run.model.hidden_size
        rate, latency = self.link(layout.pp, layout.gpus // layout.pp)
        if self.gpus > self.hardware.devices_per_node:
            rate = self.hardware.network_gbps * 1e9 * self.hardware.efficiency.network
        return latency + size / (layout.tp if layout.sequence_parallel else 1) / rate

    def _elements(self, split: ParallelConfig, pp: int, vp: int) -> tuple[float, float, float]:
        """Elements of the first pipeline rank, which has the most: experts, other weights, a tied table."""
        experts = weights = 0
        for home, n in self.stage_homes(pp, vp, 0).items():
            for shard in self.counts.state(split, home):
                experts += n * shard.size * shard.is_expert
                weights += n * shard.size * (not shard.is_expert)
        return experts, weights, self.counts.tied(split) * (pp > 1)

    def update_times(self, layout: PlannedLayout) -> tuple[float, float, float]:
        """Exposed seconds of gradient reduction, of the optimizer, and of gathers of sharded weights."""
        software, t, replicas = self.software, layout.tp, layout.dp * layout.cp
        experts, weights, tied = self.elements(split_of_state(layout.split), layout.pp, layout.vp)
        layers = -(-self.run.model.num_layers // layout.pp)
        trained, optimizer, muon = self.updates(replace(layout.split, recompute="none"))
        folds = folds_tp(t, layout.expert_tp)
        copies = replicas * (t if folds else 1) // layout.ep
        messages = layers * software.dp_messages

        def over(
            collective: Callable[[float, int, int], float], size: float, weights: float = weights
        ) -> float:
            stride, part = layout.ep if folds else t * layout.ep, size / messages
            return messages * (
                collective(part * weights, replicas, t) + collective(part * experts, copies, stride)
            )

        stages, m = self.stage_costs(layout)[:: layout.pp], layout.micro_batches
        forward, backward = sum(cost.forward for cost in stages), sum(cost.backward for cost in stages)
        hides = software.overlaps_dp and layout.pipeline != "zb_h1"
        if layout.vp > 1 and layout.zero < 3 and layout.zero_reduce == "last":
            # Gathers and reductions of a chunk overlap with p micro-batches of each other chunk.
            forward, backward = layout.pp * forward, layout.pp * backward
        reduction = gathers = 0.0
        if layout.zero == 0:
            if replicas > 1:
                length = over(self.all_reduce, software.gradient_bytes * trained)
                reduction = self.exposed_time(length, backward if hides else 0.0, layers)
            optimizer *= weights + experts
        else:
            reduce = self.all_reduce if software.reduces_whole else self.gather_shards
            scatter = over(reduce, software.gradient_bytes * trained)
            gather = over(self.gather_shards, self.element)
            window_f, window_b = (forward, backward) if software.overlaps_dp else (0.0, 0.0)
            every = m if layout.zero_reduce == "every" else 1
            if layout.zero == 3:
                gathers = m * self.exposed_time(gather, window_f, layers)
                regather = software.backward_gathers * gather
                last = self.exposed_time(regather + scatter, window_b, layers)
                reduction = every * last + (m - every) * self.exposed_time(regather, window_b, layers)
            else:
                gathers = self.exposed_time(gather, window_f, layers)
                reduction = every * self.exposed_time(scatter, window_b if hides else 0.0, layers)
            optimizer *= weights / replicas + experts / copies
        if muon:
            matrices = weights - self.counts.elements(layout.split, FIRST if layout.pp > 1 else BOTH)
            optimizer += muon * (matrices / replicas + experts / copies)
            # In bf16: results to all replicas, or with ZeRO rows of gradients to owners and results back.
            optimizer += over(self.gather, 2.0 if layout.zero == 0 else 4.0 / replicas, matrices)
        if tied:
            rate, latency = self.link(2, layout.gpus // layout.pp * (layout.pp - 1))
            reduction += latency + software.gradient_bytes * tied / rate
        return reduction, optimizer, gathers

    def _update(self, split: ParallelConfig) -> tuple[float, float, float]:
        """Share of trained elements, the optimizer's seconds per element, and Muon's per element of a layer.

        Muon's are its products and its messages over tp.
        """
        counted = self.counts.counts(split)
        layers = sum(self.counts.elements(split, str(kind)) for kind in set(self.counts.kinds))
        total = layers + self.counts.elements(split, BOTH)
        products, _, elementwise, *messages = self.price(counted.per_step, split, fused=False)
        muon = (products + sum(messages)) / layers if products else 0.0
        return counted.trained / total, elementwise / total, muon
