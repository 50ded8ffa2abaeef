"""The first place where a step goes wrong, found by hooks while the step is repeated.

Shapes: S sequence, B micro-batch, H features. With sequence parallelism S is S/t.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from mlm.checkpoint.native.exchange import Ranks
from mlm.models.family import family_of
from mlm.parallel.context import local_positions
from mlm.parallel.mesh import CPU
from mlm.parallel.sharding import ParameterShard
from mlm.parallel.watch import name_ranks
from mlm.training.graphs import eager_layers
from mlm.training.kernels import should_compile
from mlm.training.trainer import Trainer

WEIGHT, INPUT, OUTPUT, GRADIENT, WEIGHT_GRADIENT = "weight", "input", "output", "gradient", "weight gradient"
ComputeOrder = tuple[int, int, int]
"""Position of a tensor in the order of computation: weights, forward, backward, weight gradients."""
Places = dict[str, dict[str, Any] | None]
"""Fields of incident.json: first_not_finite, the first number that is not finite (tensor, name, sample,
position, ranks), and first_outlier, the first activation or gradient with one sample far from the others."""


@dataclass
class TensorRow:
    """One tensor in all micro-batches of the step, on this rank."""

    kind: str
    """weight, input or output of a module, gradient of the output, weight gradient."""
    name: str
    """Module, or parameter."""
    order: ComputeOrder
    elements: int = 0
    bad: int = 0
    """Elements that are not finite."""
    sample: int | None = None
    """Sample of the first element that is not finite, like `position` and `expert`."""
    position: int | None = None
    expert: int | None = None
    norms: dict[int, float] = field(default_factory=dict)
    """Norm of each sample's part."""

    def place(self) -> dict[str, Any]:
        """The first sample and position that are not finite, as JSON values."""
        expert = {} if self.expert is None else {"expert": self.expert}
        return {
            "tensor": self.kind,
            "name": self.name,
            "order": list(self.order),
            **expert,
            "sample": self.sample,
            "position": self.position,
            "share": self.bad / self.elements,
        }


def deviations(value: float, sample: Sequence[float]) -> float:
    """Return the distance of a value from the median of a sample, in robust standard deviations."""
    middle = median(sample)
    # The median absolute deviation of normally distributed numbers times 1.4826 is their standard deviation;
    # at least a hundredth of the median, so that equal numbers make no outlier of a small change.
    spread = 1.4826 * median([abs(x - middle) for x in sample])
    return (value - middle) / max(spread, 0.01 * abs(middle), 1e-30)


def sample_number(batch: Any, row: int, position: int | None = None) -> int:
    """Return the number of the sample in a row of a micro-batch; packed rows hold several."""
    if hasattr(batch, "sample"):
        return int(batch.sample(row, position))
    return int(batch.first_sample) + row


class StepProbe:
    """Repeats a step's forward and backward passes and inspects every tensor between its modules.

    Gradients hold the same numbers afterwards. Collective over all ranks.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.batch: Any = None
        """The micro-batch in its forward pass."""
        self.rows: dict[tuple[str, str], TensorRow] = {}
        with torch.device("meta"):  # names of all stages in their order, on every rank
            full = family_of(trainer.config.model.kind).model(trainer.config.model, tp=trainer.ctx.tp)
        leaves = [name for name, module in full.named_modules() if name and not list(module.children())]
        self.modules = {name: number for number, name in enumerate(leaves)}
        self.parameters = {name: number for number, (name, _) in enumerate(full.named_parameters())}

    def run(self, batches: Sequence[Any]) -> tuple[Tensor, Places]:
        """Repeat the step; return this rank's share of the metrics, and places, the same on every rank."""
        trainer, last = self.trainer, len(self.parameters)
        for shard in trainer.shards:
            self.inspect_shard(WEIGHT, shard, (0, self.parameters.get(shard.name, last), 0), shard.parameter)
        with self._hooks():
            parts = trainer.compute_gradients(batches, _ObservedObjective(trainer.objective, self))
        for shard in trainer.shards:
            if shard.parameter.grad is not None:
                order = (3, -self.parameters.get(shard.name, last), 0)
                self.inspect_shard(WEIGHT_GRADIENT, shard, order, shard.parameter.grad)
        rows = sorted(self.rows.values(), key=lambda row: row.order)
        first_bad = next((row.place() for row in rows if row.bad), None)
        answers = Ranks.of(trainer.ctx).all_gather([first_bad, first_outlier(rows)])
        bad, outliers = zip(*answers, strict=True)
        return parts, {"first_not_finite": earliest_place(bad), "first_outlier": earliest_place(outliers)}

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        """Inspect inputs, outputs and gradients of all modules without children."""
        trainer = self.trainer

        def inspect(name: str, _module: nn.Module, inputs: Any, output: Any) -> None:
            batch, number = self.batch, self.modules[name]
            if batch is None:
                return
            if inputs and isinstance(inputs[0], Tensor):
                self.inspect(INPUT, name, (1, number, 0), inputs[0], batch)
            if isinstance(output, Tensor):
                self.inspect(OUTPUT, name, (1, number, 1), output, batch)
                if output.requires_grad:
                    output.register_hook(
                        lambda grad: self.inspect(GRADIENT, name, (2, -number, 0), grad, batch)
                    )

        handles = [
            module.register_forward_hook(partial(inspect, name))
            for chunk in trainer.model.chunks
            for name, module in chunk.named_modules()
            if name in self.modules
        ]
        compiled = should_compile(trainer.config.compile, trainer.ctx.device)
        try:
            stance = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
            with stance, eager_layers(trainer.model.chunks):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def inspect_shard(self, kind: str, shard: ParameterShard, order: ComputeOrder, x: Tensor) -> None:
        """Inspect a weight or its gradient, and record the first expert that is not finite."""
        self.inspect(kind, shard.name, order, x)
        row = self.rows.get((kind, shard.name))
        if shard.experts is not None and row is not None and row.bad:
            row.expert = shard.offset[0] + int((~x.isfinite()).flatten(1).any(1).nonzero()[0])

    @torch.no_grad()
    def inspect(self, kind: str, name: str, order: ComputeOrder, x: Tensor, batch: Any = None) -> None:
        """Count the elements of a tensor that are not finite, and compute the norm of each sample."""
        if not x.is_floating_point() or not x.numel():
            return
        row = self.rows.setdefault((kind, name), TensorRow(kind, name, order))
        finite = x.isfinite()
        bad = int((~finite).sum())
        row.elements += x.numel()
        if batch is not None and x.dim() == 3 and x.shape[1] == len(batch.tokens):
            clean = torch.where(finite, x, 0).to(torch.float64 if x.device.type == "cpu" else torch.float32)
            for number, norm in enumerate(clean.square().sum((0, 2)).sqrt().tolist()):
                row.norms[sample_number(batch, number)] = norm
            if bad and not row.bad:
                position, sample = (~finite).any(2).nonzero()[0].tolist()  # local, in the micro-batch
                ctx, length = self.trainer.ctx, batch.tokens.shape[1]
                is_split = x.shape[0] < length // ctx.cp.size
                start = ctx.tp.rank * x.shape[0] if is_split else 0
                row.position = int(local_positions(length, ctx.cp, CPU)[start + position])
                row.sample = sample_number(batch, sample, row.position)
        row.bad += bad


class _ObservedObjective:
    """An objective that reports the micro-batch of the forward pass to a probe."""

    def __init__(self, objective: Any, probe: StepProbe) -> None:
        self.objective, self.probe = objective, probe

    def __getattr__(self, name: str) -> Any:
        return getattr(self.objective, name)

    def output(self, chunk: Any, batch: Any, *arguments: Any) -> Tensor:
        self.probe.batch = batch
        y: Tensor = self.objective.output(chunk, batch, *arguments)
        if chunk.stage.is_last:
            self.probe.inspect(OUTPUT, "loss", (1, len(self.probe.modules), 0), y, batch)
        self.probe.batch = None  # layers that backward recomputes are not inspected
        return y


def first_outlier(rows: Sequence[TensorRow]) -> dict[str, Any] | None:
    """Return the first activation or gradient in which one of four samples or more is an outlier."""
    for row in rows:
        if len(row.norms) < 4:
            continue
        sample, norm = max(row.norms.items(), key=lambda item: item[1])
        distance = deviations(norm, [x for number, x in row.norms.items() if number != sample])
        if distance >= 10:
            return {**row.place(), "sample": sample, "deviations": round(distance, 1)}
    return None


def describe_places(places: Places) -> list[str]:
    lines, outlier = [], places["first_outlier"]
    if (place := places["first_not_finite"]) is not None:
        lines.append(f"the first number that is not finite is in {describe_place(place)}")
    if outlier is not None:
        distance = f"{outlier['deviations']:g} deviations from other samples"
        lines.append(f"the first outlier is {describe_place(outlier)}, {distance}")
    return lines


def earliest_place(places: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the place that is computed first, with its ranks; `places` are in rank order."""
    by_rank = {rank: place for rank, place in enumerate(places) if place is not None}
    if not by_rank:
        return None
    first = min(place["order"] for place in by_rank.values())
    ranks = [rank for rank, place in by_rank.items() if place["order"] == first]
    return {**{key: value for key, value in by_rank[ranks[0]].items() if key != "order"}, "ranks": ranks}


def describe_place(place: dict[str, Any]) -> str:
    """Describe a place: the output of layers.1.mlp.up, sample 12, position 3, on rank 1."""
    link = "at the output of" if place["tensor"] == GRADIENT else "of"
    text = f"the {place['tensor']} {link} {place['name']}"
    for key in ("expert", "sample", "position"):
        if place.get(key) is not None:
            text += f", {key} {place[key]}"
    return f"{text}, on {name_ranks(place['ranks'])}"
