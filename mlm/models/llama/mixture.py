"""A layer's mixture of experts: router, experts, and shared experts that every token goes through.

Sources: arXiv:2101.03961 (Switch), arXiv:2401.04088 (Mixtral), arXiv:2401.06066 (shared experts).

Shapes: S sequence, B micro-batch, H hidden, k experts per token, t = tensor-parallel size.
"""

import math
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from mlm.models.config import ModelConfig
from mlm.models.heads import PlainLinear
from mlm.models.llama.gated import GatedMLP, gate
from mlm.models.llama.settings import LlamaSettings
from mlm.parallel.collectives import copy_to_tp, gather_sequence, reduce_from_tp, scatter_sequence
from mlm.parallel.compute_state import skip_compile
from mlm.parallel.expert.dispatch import Exchange, Order, combine, permute, sort_by_expert
from mlm.parallel.expert.experts import Experts
from mlm.parallel.expert.router import Router, Routing
from mlm.parallel.mesh import Axis, ExpertAxes


class MixtureOfExperts(nn.Module):
    """y = sum over a token's k experts of weight * MLP_e(x), and the shared experts' MLP(x).

    Inside an expert split over tp each rank has a term of the sum: x and the weights enter by f, y leaves by
    g, as around a dense MLP. With sequence parallelism each rank routes its rows; experts that tp does not
    split (expert_tp=1) take these rows.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        tp: Axis,
        sequence_parallel: bool = False,
        cp: Axis | None = None,
        axes: ExpertAxes | None = None,
    ) -> None:
        super().__init__()
        settings = LlamaSettings.of(config)
        self.enter = gather_sequence if sequence_parallel else copy_to_tp  # [S, B, …] of [S/t, B, …]
        self.leave = scatter_sequence if sequence_parallel else reduce_from_tp
        self.axes = axes = axes or ExpertAxes(tp=tp)
        width, h = settings.expert_ffn_size, config.hidden_size
        self.router = Router(
            h,
            settings,
            axes=(cp or Axis("cp"), tp if sequence_parallel else Axis("tp")),
            init_std=config.hidden_std,
        )
        self.experts = Experts(
            settings.num_experts,
            h,
            width,
            inner=partial(gate, activation=config.activation, clamp=settings.swiglu_clamp),
            axes=axes,
            init_stds=(config.hidden_std, config.hidden_std / math.sqrt(2 * config.num_layers)),
            bias=settings.bias,
        )
        self.shared: GatedMLP | None = None
        if settings.shared_experts:
            dense = replace(config, ffn_hidden_size=settings.shared_experts * width)
            self.shared = GatedMLP(dense, tp=tp, sequence_parallel=sequence_parallel)
        self.shared_gate: PlainLinear | None = None
        if settings.shared_gate:
            self.shared_gate = PlainLinear(h, 1, init_std=config.hidden_std, bias=False)
            self.shared_gate.constant_sides = {"weight": "out"}

    def forward(self, x: Tensor) -> Tensor:
        """[S, B, H] -> [S, B, H]."""
        routing = self.router(x)
        exchange, order, weights, in_flight = self._send(x, routing)
        shared: Tensor | None = None
        if self.shared is not None:  # computed while tokens travel
            shared = self.shared(x)
            if self.shared_gate is not None:
                shared = shared * self.shared_gate(x).sigmoid()
        y = self._receive(exchange, order, weights, in_flight)
        return y if shared is None else y + shared

    @skip_compile
    def _send(self, x: Tensor, routing: Routing) -> tuple[Exchange, Order, Tensor, Tensor]:
        """Begin to send rows to their experts; also return the weights of all tokens, [S, B, k]."""
        rows, experts, weights = (self.enter(t, self.axes.tp) for t in (x, routing.experts, routing.weights))
        num_experts = self.router.settings.num_experts
        order = sort_by_expert(experts.flatten(0, 1), num_experts, drops=routing.drops)
        exchange = Exchange(self.axes.ep, order.runs, x.device)
        return exchange, order, weights, exchange.start(permute(rows.flatten(0, 1), order))

    @skip_compile
    def _receive(self, exchange: Exchange, order: Order, weights: Tensor, in_flight: Tensor) -> Tensor:
        """Weighted sum of each token's expert outputs: [S, B, H], or this rank's part of the sequence."""
        y = self.experts(exchange.finish(in_flight), exchange.runs)
        y = combine(exchange.back(y), weights.flatten(0, 1), order).view(*weights.shape[:2], -1)
        return self.leave(y, self.axes.tp)
