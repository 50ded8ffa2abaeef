"""Time of a training step by formulas; the guide Planning has each term as an equation.

Times are in seconds. A layer's forward and backward pass are sums of matrix products (a roofline with an
efficiency that is smooth in each dimension), attention, elementwise kernels (bytes over bandwidth), and
exposed tensor-parallel communication. A pipeline is simulated (pipeline_time.py) with the time of each stage.
No torch, no measurement: constants are `EfficiencyConfig` and `Software`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from mlm.models.stage import split_layers
from mlm.parallel.pipeline.actions import Cost
from mlm.plan.hardware import HardwareConfig
from mlm.plan.pipeline_time import pipeline_time
from mlm.plan.shape import PlannedLayout, Shape

ELEMENT_BYTES = {"bf16": 2, "fp16": 2, "fp8": 2, "fp32": 4, "tf32": 4, "fp64": 8}
"""Bytes of an activation."""
BACKWARD_TRAFFIC = 1.5
"""Bytes that backward moves over forward, of elementwise kernels: two operands are read rather than one."""
FLASH_BACKWARD = 2.5
"""Products of fused attention's backward over its forward: five instead of two (arXiv:2205.14135)."""
UNFUSED_BACKWARD = 2.0
"""The same of attention with dropout on CPUs: four products instead of two."""
LOGIT_BYTES = 36
"""Bytes moved per logit by cross-entropy and its gradient, besides the products' own."""

PARTS = (
    "matmul",
    "attention",
    "elementwise",
    "recompute",
    "vocabulary",
    "tp",
    "ep",
    "pp",
    "dp",
    "bubble",
    "optimizer",
)
"""Parts of a step's time, in the order they are shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """The habits of a training program that change a step's time: of this one facts of its code.

    Of others partly guesses, made with published errors in view.

    The defaults are this toolkit. Passes count reads and writes of a tensor of activations in forward.
    """

    fused_attention: bool = True
    """True if scores never leave the chip."""
    score_passes: float = 5.0
    """Of scores: softmax, dropout. Unfused attention only."""
    branch_passes: float = 7.5
    """Of a residual branch's output: bias, dropout with its mask, addition."""
    norm_passes: float = 2.0
    """Of a norm's input and output."""
    activation_passes: float = 2.0
    """Of the MLP's activation."""
    dropout_passes: float = 0.0
    """Of a residual branch's output where it is dropped out, beyond `branch_passes`."""
    weight_bytes: float = 12.0
    """Bytes moved per weight and micro-batch besides the products: casts, addition to the gradient."""
    gathered_weight_bytes: float = 14.0
    """The same where sharded weights are gathered: they arrive cast."""
    table_bytes: float = 0.0
    """Bytes moved per element of the token table and micro-batch, to make and add its gradient."""
    optimizer_bytes: float = 46.0
    """Bytes moved per parameter and step: zeroing, norm, Adam, and the cast for the next step."""
    gradient_bytes: float = 4.0
    """Bytes of a gradient on the wire."""
    tied_bytes: float = 4.0
    """Bytes of a gradient of the token table between the pipeline's ends."""
    overlaps_tp: bool = True
    """True if the sum of an input's gradient hides behind the weight's gradient."""
    hidden_tp: float = 0.0
    """Share of all tensor-parallel communication hidden by splitting it beside its product (async TP)."""
    overlaps_dp: bool = True
    """True if gradients are reduced while backward runs."""
    splits_transfers: bool = False
    """True if tensor-parallel ranks send 1/t of a boundary each (arXiv:2104.04473, section 4.1)."""
    loss_in_forward: bool = True
    """True if the vocabulary projection's gradients are computed in forward."""
    selective_products: float | None = None
    """Share of forward's products that recompute=selective repeats, with all elementwise kernels; None for
    one that repeats attention alone, where it is not fused."""
    kernel_dtype: str | None = None
    """Dtype of the layers' products; None for that of activations."""


MLM = Software()
"""This toolkit on GPUs."""
MLM_ON_CPU = Software(
    branch_passes=3,  # an addition
    activation_passes=6,  # tanh is arithmetic
    dropout_passes=12,  # masks are hashes of their places, in integer kernels
    weight_bytes=12,
    table_bytes=16,
    overlaps_tp=False,
    overlaps_dp=False,
)
"""This toolkit on CPUs: the ratios of its kernels; `EfficiencyConfig.elementwise` has their speed."""


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One layer on one micro-batch."""

    matmul: float
    """Products of forward; backward has twice that."""
    attention: float
    attention_backward: float
    elementwise: float
    elementwise_backward: float
    weights: float
    """Casts of weights and addition of gradients, forward and backward together."""
    tp: float
    """Exposed in forward."""
    tp_backward: float
    ep: float
    """All-to-all of tokens in a pass."""
    recompute: float
    """Computation and communication repeated in backward."""

    @property
    def forward(self) -> float:
        """Forward pass."""
        return self.matmul + self.attention + self.elementwise + self.tp + self.ep + self.weights / 5

    @property
    def backward(self) -> float:
        """Backward pass, recomputation included."""
        computed = 2 * self.matmul + self.attention_backward + self.elementwise_backward
        return computed + self.tp_backward + self.ep + self.recompute + self.weights * 4 / 5

    @property
    def products(self) -> float:
        """Matrix products and attention of both passes."""
        return 3 * self.matmul + self.attention + self.attention_backward

    @property
    def weight_gradient(self) -> float:
        """Part of backward that a zero-bubble schedule puts off."""
        return self.matmul + self.weights * 3 / 5


@dataclass(frozen=True, slots=True)
class StepTime:
    """A step's time by part: of an average pipeline rank, the bubble being what it waits."""

    total: float
    parts: dict[str, float]
    """Seconds by PARTS; they sum to `total`."""
    bubble: float
    """Idle over ideal time."""


class CostModel:
    """Times of layouts of one model on one hardware."""

    def __init__(
        self,
        shape: Shape,
        hardware: HardwareConfig,
        dtype: str = "bf16",
        software: Software | None = None,
    ) -> None:
        on_cpu = hardware.device == "cpu"
        software = software or (MLM_ON_CPU if on_cpu else MLM)
        self.shape, self.hardware, self.software = shape, hardware, software
        self.model = shape.model
        self.peak = hardware.peak("bf16" if dtype == "fp8" else dtype)
        self.kernel_peak = hardware.peak(software.kernel_dtype or dtype)
        self.unfused = on_cpu and shape.model.attention_dropout > 0
        self.element = ELEMENT_BYTES[dtype]
        self.bandwidth = hardware.memory_gbps * 1e9 * hardware.efficiency.memory
        self.overlaps = hardware.device == "gpu"
        self._heads: dict[tuple[object, ...], tuple[float, float]] = {}
        self._layers: dict[tuple[object, ...], LayerTime] = {}

    # -- kernels

    def product(self, m: float, k: int, n: int, *, count: float = 1, peak: float | None = None) -> float:
        """`count` products [m, k] x [k, n]: the slower of arithmetic and memory."""
        constants, half = self.hardware.efficiency, self.hardware.efficiency.matmul_half
        share = constants.matmul * m / (m + half) * k / (k + half) * n / (n + half)
        arithmetic = 2 * m * k * n / ((peak or self.peak) * share)
        return count * max(arithmetic, self.element * (m * k + k * n + m * n) / self.bandwidth)

    def traffic(self, size: float) -> float:
        """Copies and additions that move `size` bytes."""
        return size / self.bandwidth

    def elementwise(self, size: float) -> float:
        """Norms, activation functions and the loss, which move `size` bytes."""
        return size / (self.bandwidth * self.hardware.efficiency.elementwise)

    def optimizer(self, parameters: float) -> float:
        """The optimizer's step over `parameters`, the gradients' norm included."""
        size = self.software.optimizer_bytes * parameters
        return size / (self.bandwidth * self.hardware.efficiency.optimizer)

    # -- communication

    def link(self, layout: PlannedLayout, ranks: int, stride: int) -> tuple[float, float]:
        """Bytes/s of one rank and seconds of latency on an axis whose neighbours are `stride` ranks apart.

        An axis that crosses nodes has the network of those of a node's devices that are on it: one of 8 where
        tp = 8 is inside, all for tp = 16, two for those groups of tp = 6 that lie across two nodes of 8.
        """
        hardware, share = self.hardware, self.hardware.efficiency.network * 1e9
        node, span = hardware.devices_per_node, ranks * stride
        if layout.gpus <= node or node % span == 0:
            return hardware.node_gbps * share, hardware.node_latency_us * 1e-6
        across = hardware.network_gbps * max(1, math.gcd(span, node) // stride)
        return min(across, hardware.node_gbps) * share, hardware.network_latency_us * 1e-6

    def gather(self, layout: PlannedLayout, size: float, ranks: int, stride: int) -> float:
        """All-gather or reduce-scatter of `size` bytes (the whole): (k - 1)/k of them pass each rank."""
        if ranks == 1 or not size:
            return 0.0
        rate, latency = self.link(layout, ranks, stride)
        return latency * math.ceil(math.log2(ranks)) + (ranks - 1) / ranks * size / rate

    def all_reduce(self, layout: PlannedLayout, size: float, ranks: int, stride: int) -> float:
        """All-reduce: a reduce-scatter and an all-gather."""
        return 2 * self.gather(layout, size, ranks, stride)

    # -- a layer

    def layer(self, layout: PlannedLayout) -> LayerTime:
        """One layer of a layout on one micro-batch."""
        sharded = layout.zero > 0
        key = (
            *(layout.tp, layout.ep, layout.sequence_parallel, layout.micro_batch, layout.recompute, sharded),
            layout.gpus <= self.hardware.devices_per_node,
        )
        if key not in self._layers:
            self._layers[key] = self._layer(layout)
        return self._layers[key]

    def _layer(self, layout: PlannedLayout) -> LayerTime:
        shape, sizes, software, t = self.shape, self.shape.sizes, self.software, layout.tp
        rows, h = shape.seq * layout.micro_batch, self.model.hidden_size
        queries, mlps = shape.query_size // t, self._mlps(layout)
        qkv = queries + 2 * sizes.kv_size(t)
        peak = self.kernel_peak
        ups = 2 if sizes.gated else 1
        qkv_time = self.product(rows, h, qkv, peak=peak)
        up_time = sum(self.product(m, h, ups * width, count=n, peak=peak) for m, width, n in mlps)
        down_time = sum(self.product(m, width, h, count=n, peak=peak) for m, width, n in mlps)
        rest = self.product(rows, queries, h, peak=peak) + down_time
        moved = self.element * rows * sizes.experts_per_token * shape.imbalance * h
        exchange = 2 * self.gather(layout, moved, layout.ep, t)  # there and back
        attention, attention_backward = self._attention(layout)
        split = t if layout.sequence_parallel else 1
        branch = software.branch_passes + (software.dropout_passes if self.model.hidden_dropout else 0)
        passes = 2 * (software.norm_passes + branch) * h / split
        inner = self.element * sum(m * width * n for m, width, n in mlps)
        passed = self.element * rows * passes + (software.activation_passes + ups - 1) * inner
        elementwise = self.elementwise(passed + 4 * moved)  # tokens are sorted, and added up
        size = self.element * rows * h
        each = self.all_reduce(layout, size, t, 1) * (1 - software.hidden_tp)
        forward_tp = 2 * each
        backward_tp = 2 * each
        if software.overlaps_tp and self.overlaps:
            backward_tp = max(each - qkv_time, 0) + max(each - up_time, 0)
        if layout.sequence_parallel:  # the input is gathered again
            again = self.gather(layout, size, t, 1) * (1 - software.hidden_tp)
            hidden = (qkv_time, up_time) if software.overlaps_tp and self.overlaps else (0, 0)
            backward_tp += sum(max(again - by, 0) for by in hidden)
        recompute = 0.0
        if layout.recompute == "full":
            recompute = qkv_time + up_time + rest + attention + elementwise + forward_tp + exchange
        elif layout.recompute == "selective" and software.selective_products is not None:
            recompute = software.selective_products * (qkv_time + up_time + rest) + elementwise
        elif layout.recompute == "selective" and (self.unfused or not software.fused_attention):
            recompute = attention
        weight_bytes = software.gathered_weight_bytes if layout.zero else software.weight_bytes
        return LayerTime(
            matmul=qkv_time + up_time + rest,
            attention=attention,
            attention_backward=attention_backward,
            elementwise=elementwise,
            elementwise_backward=BACKWARD_TRAFFIC * elementwise,
            weights=self.traffic(weight_bytes * sum(shape.held_weights(layout.ep)) / t)
            / self.hardware.efficiency.weights,
            tp=forward_tp,
            tp_backward=backward_tp,
            ep=exchange,
            recompute=recompute,
        )

    def _mlps(self, layout: PlannedLayout) -> list[tuple[float, int, int]]:
        """(rows, width, number) of a layer's MLPs on a rank, alike ones together."""
        sizes, rows = self.shape.sizes, self.shape.seq * layout.micro_batch
        if not sizes.experts:
            return [(rows, self.model.ffn_size // layout.tp, 1)]
        here = sizes.experts // layout.ep
        each = rows * sizes.experts_per_token * self.shape.imbalance / here
        shared = [(rows, sizes.shared_size // layout.tp, 1)] if sizes.shared_size else []
        return [(each, sizes.expert_size // layout.tp, here), *shared]

    def _attention(self, layout: PlannedLayout) -> tuple[float, float]:
        """Forward and backward of scores, softmax and values on one micro-batch."""
        batch = layout.micro_batch * self.model.num_heads // layout.tp
        s, d = self.shape.seq, self.shape.sizes.head_dim
        if self.unfused:
            constants = self.hardware.efficiency
            rate = self.peak * (constants.unfused_attention or constants.attention)
            forward = 4 * batch * s * s * d / rate
            return forward, UNFUSED_BACKWARD * forward
        if self.software.fused_attention:
            constants = self.hardware.efficiency
            attended = self.shape.sizes.attended(s)
            work = 4 * batch * s * attended * d / (2 if self.model.family.causal else 1)
            tile = s / (s + constants.matmul_half)
            forward = work / (self.peak * constants.attention * tile)
            forward = max(forward, self.traffic(4 * self.element * batch * s * d))
            return forward, FLASH_BACKWARD * forward
        products = self.product(s, d, s, count=batch) + self.product(s, s, d, count=batch)
        passes = self.elementwise(self.element * self.software.score_passes * batch * s * s)
        return products + passes, 2 * products + BACKWARD_TRAFFIC * passes

    def head(self, layout: PlannedLayout) -> tuple[float, float]:
        """Forward and backward of the vocabulary projection and the loss, on the last stage."""
        key = (layout.tp, layout.micro_batch, layout.gpus <= self.hardware.devices_per_node)
        if key not in self._heads:
            self._heads[key] = self._head(layout)
        return self._heads[key]

    def _head(self, layout: PlannedLayout) -> tuple[float, float]:
        shape, t = self.shape, layout.tp
        rows = max(1, round(shape.seq * layout.micro_batch * self.model.family.scored))
        product = self.product(rows, self.model.hidden_size, max(shape.vocab // t, 1))
        passes = self.elementwise(LOGIT_BYTES * rows * shape.vocab / t)
        size = self.element * shape.seq * layout.micro_batch * self.model.hidden_size
        communication = self.all_reduce(layout, size, t, 1) if t > 1 else 0.0
        if self.software.loss_in_forward:
            return 3 * product + passes, communication
        return product + passes / 2, 2 * product + passes / 2 + communication

    # -- a step

    def step(self, layout: PlannedLayout) -> StepTime:
        """The time of a step, its pipeline simulated."""
        times = self._stages(layout)
        m, p = layout.micro_batches, layout.pp
        transfer = self._transfer(layout)
        busy = m * sum(cost.forward + cost.backward for cost in times) / p
        if p == 1:
            elapsed = m * (times[0].forward + times[0].backward)
        else:
            costs = [replace(cost, transfer=transfer) for cost in times]
            elapsed = pipeline_time(layout.pipeline, p, layout.vp, m, costs)
        reduction, optimizer, gathers = self._after(layout)
        parts = self._parts(layout)
        parts |= {
            "pp": min(elapsed - busy, 2 * (p - 1) * transfer),  # there and back through the ramps
            "dp": reduction + gathers,
            "optimizer": optimizer,
        }
        parts["bubble"] = max(elapsed - busy - parts["pp"], 0.0)
        total = elapsed + reduction + gathers + optimizer
        ordered = {name: parts[name] for name in PARTS}
        return StepTime(total=total, parts=ordered, bubble=elapsed / busy - 1)

    def bound(self, layout: PlannedLayout) -> float:
        """A time that no step of this layout is below: the last rank's work, and the pipeline's two ramps."""
        layer, p, stages = self.layer(layout), layout.pp, layout.pp * layout.vp
        counts = layer_counts(self.model.num_layers, stages)
        head, ramp = sum(self.head(layout)), sum(counts[: p - 1])
        ramps = ramp * (layer.forward + layer.backward)
        if layout.pipeline == "zb_h1":  # weight gradients fill a part of them
            ramps -= ramp * layer.weight_gradient + (p - 1) * counts[0] * layer.weight_gradient
        last = sum(counts[p - 1 :: p]) * (layer.forward + layer.backward) + head
        rest = sum(self._after(layout))
        return layout.micro_batches * last + max(ramps, 0.0) + rest

    def _stages(self, layout: PlannedLayout) -> list[Cost]:
        """Cost of each stage (chunk) on one micro-batch."""
        layer = self.layer(layout)
        head, head_backward = self.head(layout)
        boundary = self.element * self.shape.seq * layout.micro_batch * self.model.hidden_size
        embedding = self.traffic(4 * boundary) + self.all_reduce(layout, boundary, layout.tp, 1)
        table = self.traffic(self.software.table_bytes * self.shape.table / layout.tp)
        counts = layer_counts(self.model.num_layers, layout.pp * layout.vp)
        forward, backward, weight = layer.forward, layer.backward, layer.weight_gradient
        last = len(counts) - 1
        stages = []
        for number, count in enumerate(counts):
            first_part = embedding if number == 0 else 0.0
            f = count * forward + first_part + (head if number == last else 0.0)
            b = count * backward + first_part + (head_backward if number == last else 0.0)
            b += table * ((number == 0) + (number == last))
            w = count * weight
            stages.append(Cost(f, b, b - w, w))
        return stages

    def _transfer(self, layout: PlannedLayout) -> float:
        """Seconds that a boundary tensor takes to the next pipeline rank."""
        if layout.pp == 1:
            return 0.0
        size = self.element * self.shape.seq * layout.micro_batch * self.model.hidden_size
        divided = layout.sequence_parallel or self.software.splits_transfers
        rate, latency = self.link(layout, layout.pp, layout.tp * layout.dp)
        node = self.hardware.devices_per_node
        rate = (
            self.hardware.network_gbps * 1e9 * self.hardware.efficiency.network
            if layout.gpus > node
            else rate
        )
        return latency + size / (layout.tp if divided else 1) / rate

    def _after(self, layout: PlannedLayout) -> tuple[float, float, float]:
        """Seconds of gradient reduction, of the optimizer, and of gathering sharded weights, that show.

        Of the pipeline rank that holds the token table: it has the most parameters and ends last.
        """
        shape, software, t, d = self.shape, self.software, layout.tp, layout.dp
        layers = -(-self.model.num_layers // layout.pp)
        experts, rest = (layers * size / t for size in shape.held_weights(layout.ep))
        weights = rest + shape.table / t
        weights += shape.table / t if layout.pp == 1 and not shape.sizes.tied else 0

        def over(collective: Callable[..., float], size: float) -> float:
            whole: float = collective(layout, size * weights, d, t)
            return whole + collective(layout, size * experts, d // layout.ep, t * layout.ep)

        hides = software.overlaps_dp and self.overlaps and layout.pipeline != "zb_h1"
        m, layer = layout.micro_batches, self.layer(layout)
        backward, forward = layers * layer.backward, layers * layer.forward
        reduction = gathers = 0.0
        if layout.zero == 0:
            if d > 1:
                whole = over(self.all_reduce, software.gradient_bytes)
                reduction = exposed(whole, backward if hides else 0.0, layers)
            optimizer = self.optimizer(weights + experts)
        else:
            scatter = over(self.gather, software.gradient_bytes)
            gather = over(self.gather, self.element)
            window_f, window_b = (forward, backward) if self.overlaps else (0.0, 0.0)
            every = m if layout.zero_reduce == "every" else 1
            if layout.zero == 3:
                gathers = m * exposed(gather, window_f, layers)
                both = exposed(gather + scatter, window_b, layers)
                reduction = every * both + (m - every) * exposed(gather, window_b, layers)
            else:
                gathers = exposed(gather, window_f, layers)
                reduction = every * exposed(scatter, window_b if hides else 0.0, layers)
            optimizer = self.optimizer(weights / d + experts * layout.ep / d)
        if layout.pp > 1 and shape.sizes.tied:
            rate, latency = self.link(layout, 2, t * d * (layout.pp - 1))
            reduction += latency + software.tied_bytes * shape.table / t / rate
        return reduction, optimizer, gathers

    def _parts(self, layout: PlannedLayout) -> dict[str, float]:
        """Computation and exposed tensor-parallel communication of an average pipeline rank."""
        layer, m, p = self.layer(layout), layout.micro_batches, layout.pp
        each = m * self.model.num_layers / p
        head, head_backward = self.head(layout)
        stages = self._stages(layout)
        whole = m * sum(cost.forward + cost.backward for cost in stages) / p
        parts = {
            "matmul": each * 3 * layer.matmul,
            "attention": each * (layer.attention + layer.attention_backward),
            "elementwise": each * (layer.elementwise + layer.elementwise_backward + layer.weights),
            "recompute": each * layer.recompute,
            "vocabulary": m * (head + head_backward) / p,
            "tp": each * (layer.tp + layer.tp_backward),
            "ep": each * 2 * layer.ep,
        }
        parts["elementwise"] += whole - sum(parts.values())  # the embedding
        return parts


def exposed(whole: float, window: float, pieces: int) -> float:
    """The part of a communication that computation does not hide: at least its last of `pieces` messages."""
    return max(whole - window, whole / max(pieces, 1)) if window else whole


@cache
def layer_counts(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage."""
    return tuple(len(stage.layers) for stage in split_layers(layers, stages))
