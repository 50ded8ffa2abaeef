"""Time of a training step, from counts of what the modules do.

Times are in seconds. A home's pass is the sum of its matrix products (a roofline with an efficiency that is
smooth in each dimension), fused attention, other kernels (bytes over bandwidth) and the communication that
what is computed between its start and its wait does not hide. All grow evenly with the micro-batch: one
sample and two are counted, and others follow. A pipeline is simulated (schedule.py) with the time of
each stage.
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
"""Parts of a pass: kernels, and communication by axis that no computation hides."""
PARTS = (*COMPUTED[:3], "recompute", "vocabulary", *COMPUTED[3:], "pp", "dp", "bubble", "optimizer")
"""Parts of a step's time, in the order they are shown."""
ENDS = {FIRST: (EMBEDDING,), LAST: (VOCABULARY,), BOTH: (EMBEDDING, VOCABULARY)}
"""Homes of the time of an end of the model."""
Times = tuple[float, ...]
"""Seconds by COMPUTED."""
NOTHING: Times = (0.0,) * len(COMPUTED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """Habits of a training program: facts of its code, no fitted numbers. The defaults are this toolkit's."""

    compiled: bool = True
    """True if kernels between products are fused."""
    overlaps: bool = True
    """True if computation between the start and the wait of a message hides it; False if all is waited
    for."""
    overlaps_dp: bool = True
    """True if gradients are reduced while backward runs."""
    reduces_whole: bool = False
    """True if a sharded optimizer gets all-reduced gradients, of which it takes its part."""
    gradient_bytes: int = 4
    """Bytes of a gradient on the wire and in memory."""
    dp_messages: int = 1
    """Messages in which gradients or sharded weights of a layer travel."""
    backward_gathers: float = 1.0
    """Gathers of sharded weights in a backward pass; more where recomputation frees them again."""


RING_HOP_S, NETWORK_HOP_S, POSTS = 3.4e-6, 14e-6, 3
"""Seconds of a hop of NCCL's rings over NVLink, and over a network, and times that a host posts to the
network in each hop of a ring over several nodes (src/graph/tuning.cc, protocol Simple)."""
MESSAGE_SMS = 16
"""Multiprocessors that a message takes from concurrent kernels: NCCL's channels over eight links, one each
(github.com/NVIDIA/nccl, issues 1041 and 1656)."""
MLM, MLM_ON_CPU = Software(), Software(compiled=False, overlaps=False, overlaps_dp=False)
"""This toolkit on GPUs, and on CPUs."""


class HomeTime(NamedTuple):
    """Times of a layer, or of an end of the model, on one micro-batch."""

    forward: Times
    backward: Times


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step's time by part: of an average pipeline rank, the bubble being what it waits."""

    total: float
    parts: dict[str, float]
    """Seconds by PARTS; they sum to `total`."""


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
        known = {size: getattr(hardware.peak_tflops, name) for size, name in names.items()}
        self.peaks = {size: (peak or hardware.peak(half) / 1e12) * 1e12 for size, peak in known.items()}
        self.element = counts.element
        self.peak = hardware.peak(half)
        self.message_share = MESSAGE_SMS / (hardware.multiprocessors or math.inf)
        self.bandwidth = hardware.memory_gbps * 1e9 * hardware.efficiency.memory
        self.prices, self.home_times = cache(self._prices), cache(self._home_times)
        self.stage_times, self.updates = cache(self._stage_times), cache(self._update)
        self.elements = cache(self._elements)

    # -- kernels and messages

    def product(self, p: Product) -> float:
        """Seconds of products: the slower of arithmetic and memory."""
        constants, c = self.hardware.efficiency, self.hardware.efficiency.matmul_half
        share = constants.matmul * p.m / (p.m + c) * p.k / (p.k + c) * p.n / (p.n + c)
        arithmetic = 2 * p.times * p.m * p.k * p.n / (self.peaks[p.operand] * share)
        return max(arithmetic, p.bytes / self.bandwidth)

    def traffic(self, work: Work, *, fused: bool) -> float:
        """Seconds of kernels other than products."""
        size = work.fused_bytes if fused else work.eager_bytes
        return size / self.bandwidth + work.kernels * self.hardware.kernel_us * 1e-6

    def nodes(self, ranks: int, stride: int) -> int:
        """Most nodes that an axis lies on whose neighbours are `stride` ranks apart."""
        node, span = self.hardware.devices_per_node, ranks * stride
        return 1 if self.gpus <= node or node % span == 0 else min(max(-(-span // node), 2), ranks)

    def link(self, ranks: int, stride: int) -> tuple[float, float]:
        """Bytes/s of one rank and seconds of latency on an axis whose neighbours are `stride` ranks apart.

        An axis that crosses nodes has the network of the node's devices that are on it: one of 8 where
        tp = 8 is inside, all for tp = 16, two for those groups of tp = 6 that lie across two nodes of 8.
        """
        hardware, share = self.hardware, self.hardware.efficiency.network * 1e9
        if self.nodes(ranks, stride) == 1:
            return hardware.node_gbps * share, hardware.node_latency_us * 1e-6
        of_node = max(1, math.gcd(ranks * stride, hardware.devices_per_node) // stride)
        across = min(hardware.network_gbps * of_node, hardware.node_gbps)
        return across * share, hardware.network_latency_us * 1e-6

    def gather(self, size: float, ranks: int, stride: int) -> float:
        """All-gather or reduce-scatter of `size` bytes: (k - 1)/k of them pass each rank.

        GPUs pass them round a ring, in k - 1 hops. Over several nodes no hop is shorter than its posts.
        """
        hops, apart = ranks - 1, self.nodes(ranks, stride) - 1
        if hops < 2 or not size or self.hardware.device == "cpu":
            return self._pass(size, ranks, stride)
        near = max(RING_HOP_S, POSTS * self.hardware.network_post_us * 1e-6) if apart else RING_HOP_S
        return self._pass(size, ranks, stride) + (hops - apart) * near + apart * NETWORK_HOP_S

    def gather_shards(self, size: float, ranks: int, stride: int) -> float:
        """`gather` of sharded weights or gradients, which other programs do otherwise."""
        return self.gather(size, ranks, stride)

    def all_to_all(self, size: float, ranks: int, stride: int) -> float:
        """Exchange of `size` bytes of each rank, 1/k of them with every rank at once (nccl-tests, issue 130).

        What other nodes get takes the device's own link to the network, while the rest stays in the node.
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
        return 2 * self._pass(size, ranks, stride)

    def _pass(self, size: float, ranks: int, stride: int) -> float:
        if ranks == 1 or not size:
            return 0.0
        rate, latency = self.link(ranks, stride)
        return latency * math.ceil(math.log2(ranks)) + (ranks - 1) / ranks * size / rate

    def exposed(self, length: float, window: float, pieces: float = math.inf) -> float:
        """The part of a communication that what is computed in `window` does not hide.

        That is at least the last of `pieces` messages. Others take multiprocessors from what hides them.
        """
        if not window:
            return length
        last = length / max(pieces, 1)
        return max(length - window, last + self.message_share * (length - last))

    # -- passes of layers and ends

    def price(self, work: Work, split: ParallelConfig, *, fused: bool) -> Times:
        """Seconds of work by COMPUTED."""
        seconds, computed = dict.fromkeys(COMPUTED, 0.0), 0.0
        under_way = dict[int, tuple[str, float, float]]()
        collectives = {"all-reduce": self.all_reduce, "all-to-all": self.all_to_all}
        strides = {"tp": 1, "cp": split.tp, "ep": 1 if folds_tp(split.tp, split.expert_tp) else split.tp}

        def end(number: int) -> None:
            axis, length, begun = under_way.pop(number)
            seconds[axis] += self.exposed(length, computed - begun if self.software.overlaps else 0.0)

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
                under_way[event.number] = event.axis, length, computed
            elif event.number in under_way:
                end(event.number)
        for number in list(under_way):
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
            split = replace(split, recompute="none")  # a layer's forward pass once more; nothing
        (one, two), more = self.prices(split), micro_batch - 1
        for home in self.counts.counts(split).passes[0].saved_bytes:
            places = (FORWARD, home), (BACKWARD, home)
            pairs = (zip(one.get(place, NOTHING), two.get(place, NOTHING), strict=True) for place in places)
            forward, backward = (tuple(max(x + more * (y - x), 0.0) for x, y in pair) for pair in pairs)
            if home.isdigit():
                backward = tuple(map(sum, zip(backward, self.repeated(forward, layout), strict=True)))
            homes[home] = HomeTime(forward, backward)
        return homes

    def repeated(self, forward: Times, layout: ParallelConfig) -> Times:
        """The part of a layer's forward pass that recomputation adds to its backward pass.

        Of a budget the most: the compiler recomputes what takes least time for its memory.
        """
        shares = {"full": 1.0, "budget": 1 - layout.recompute_budget}
        return tuple(shares.get(layout.recompute, 0.0) * seconds for seconds in forward)

    # -- a step

    def stages(self, layout: PlannedLayout) -> list[Cost]:
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
            # Of a layer's two equal products in backward, a zero-bubble schedule puts the weight's off.
            return forward, backward + added, sum(x.backward[0] / 2 for x in parts) + added

        costs = []
        for n in range(p * v):
            homes = self.stage_homes(p * v, 1, n)
            f, b, w = map(sum, zip(*([k * x for x in cost(home)] for home, k in homes.items()), strict=True))
            costs.append(Cost(f, b, b - w, w))
        return costs

    def stage_homes(self, pp: int, vp: int, stage_rank: int) -> Counter[str]:
        """Homes of a pipeline rank, and how many of each it has."""
        return homes_of(self.counts.kinds, pp, vp, stage_rank)

    def step(self, layout: PlannedLayout) -> StepTime:
        times, m, p = self.stages(layout), layout.micro_batches, layout.pp
        transfer = self.transfer(layout)
        busy = m * sum(cost.forward + cost.backward for cost in times) / p
        if p == 1:
            elapsed = m * (times[0].forward + times[0].backward)
        else:
            costs = [replace(cost, transfer=transfer) for cost in times]
            elapsed = pipeline_time(layout.pipeline, p, layout.vp, m, costs)
        reduction, optimizer, gathers = self.after(layout)
        # computation and exposed communication of the modules, of an average pipeline rank
        homes, parts = self.home_times(layout.split, layout.micro_batch), dict.fromkeys(PARTS, 0.0)
        for home, count in Counter(map(str, self.counts.kinds)).items():
            time, repeated = homes[home], self.repeated(homes[home].forward, layout)
            for name, f, b, r in zip(COMPUTED, time.forward, time.backward, repeated, strict=True):
                parts[name] += m / p * count * (f + b - r)
            parts["recompute"] += m / p * count * sum(repeated)
        for home in (EMBEDDING, VOCABULARY):
            for name, seconds in zip(COMPUTED, map(sum, zip(*homes[home], strict=True)), strict=True):
                parts[name if home == EMBEDDING or name in COMPUTED[3:] else "vocabulary"] += m / p * seconds
        parts["elementwise"] += busy - sum(parts.values())  # additions of gradients
        parts["pp"] = min(elapsed - busy, 2 * (p - 1) * transfer)  # there and back through the ramps
        parts["dp"], parts["optimizer"] = reduction + gathers, optimizer
        parts["bubble"] = max(elapsed - busy - parts["pp"], 0.0)
        return StepTime(elapsed + reduction + gathers + optimizer, parts)

    def bound(self, layout: PlannedLayout) -> float:
        """A time that no step of this layout is below: the last rank's work, and the pipeline's two ramps."""
        times, p = self.stages(layout), layout.pp
        last = sum(cost.forward + cost.backward for cost in times[p - 1 :: p])
        ramps = sum(cost.forward + cost.backward for cost in times[: p - 1])
        if p > 1 and layout.pipeline == "zb_h1":  # weight gradients fill a part of them
            weights = [cost.weight_gradient for cost in times[: p - 1]]
            ramps -= sum(weights) + len(weights) * max(weights)
        return layout.micro_batches * last + max(ramps, 0.0) + sum(self.after(layout))

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
        """Elements of the first pipeline rank, which has the most: experts, the rest, and a tied table."""
        experts = rest = 0
        for home, n in self.stage_homes(pp, vp, 0).items():
            for shard in self.counts.state(split, home):
                experts += n * shard.size * shard.is_expert
                rest += n * shard.size * (not shard.is_expert)
        return experts, rest, self.counts.tied(split) * (pp > 1)

    def after(self, layout: PlannedLayout) -> tuple[float, float, float]:
        """Seconds of gradient reduction, of the optimizer, and of gathering sharded weights, that show."""
        software, t, replicas = self.software, layout.tp, layout.dp * layout.cp
        experts, weights, tied = self.elements(split_of_state(layout.split), layout.pp, layout.vp)
        layers = -(-self.run.model.num_layers // layout.pp)
        trained, optimizer, muon = self.updates(replace(layout.split, recompute="none"))
        whole = folds_tp(t, layout.expert_tp)
        copies = replicas * (t if whole else 1) // layout.ep

        messages = layers * software.dp_messages

        def over(
            collective: Callable[[float, int, int], float], size: float, weights: float = weights
        ) -> float:
            apart, part = layout.ep if whole else t * layout.ep, size / messages
            return messages * (
                collective(part * weights, replicas, t) + collective(part * experts, copies, apart)
            )

        stages, m = self.stages(layout)[:: layout.pp], layout.micro_batches
        forward, backward = sum(cost.forward for cost in stages), sum(cost.backward for cost in stages)
        hides = software.overlaps_dp and layout.pipeline != "zb_h1"
        if layout.vp > 1 and layout.zero < 3 and layout.zero_reduce == "last":
            # p micro-batches of each chunk before it pass until a chunk's weights are used; as many backward.
            forward, backward = layout.pp * forward, layout.pp * backward
        reduction = gathers = 0.0
        if layout.zero == 0:
            if replicas > 1:
                whole_time = over(self.all_reduce, software.gradient_bytes * trained)
                reduction = self.exposed(whole_time, backward if hides else 0.0, layers)
            optimizer *= weights + experts
        else:
            reduce = self.all_reduce if software.reduces_whole else self.gather_shards
            scatter = over(reduce, software.gradient_bytes * trained)
            gather = over(self.gather_shards, self.element)
            window_f, window_b = (forward, backward) if software.overlaps_dp else (0.0, 0.0)
            every = m if layout.zero_reduce == "every" else 1
            if layout.zero == 3:
                gathers = m * self.exposed(gather, window_f, layers)
                again = software.backward_gathers * gather
                both = self.exposed(again + scatter, window_b, layers)
                reduction = every * both + (m - every) * self.exposed(again, window_b, layers)
            else:
                gathers = self.exposed(gather, window_f, layers)
                reduction = every * self.exposed(scatter, window_b if hides else 0.0, layers)
            optimizer *= weights / replicas + experts / copies
        if muon:
            matrices = weights - self.counts.elements(layout.split, FIRST if layout.pp > 1 else BOTH)
            optimizer += muon * (matrices / replicas + experts / copies)
            # In bf16, results to all replicas, or rows of gradients to owners and of results back.
            optimizer += over(self.gather, 2.0 if layout.zero == 0 else 4.0 / replicas, matrices)
        if tied:
            rate, latency = self.link(2, layout.gpus // layout.pp * (layout.pp - 1))
            reduction += latency + software.gradient_bytes * tied / rate
        return reduction, optimizer, gathers

    def _update(self, split: ParallelConfig) -> tuple[float, float, float]:
        """Share of elements that is trained, and seconds of the optimizer for each element.

        Then for Muon's products, and for its messages over tp, for each element of a layer.
        """
        counted = self.counts.counts(split)
        layers = sum(self.counts.elements(split, str(kind)) for kind in set(self.counts.kinds))
        total = layers + self.counts.elements(split, BOTH)
        products, _, elementwise, *messages = self.price(counted.per_step, split, fused=False)
        muon = (products + sum(messages)) / layers if products else 0.0
        return counted.trained / total, elementwise / total, muon
