"""Statistics of a step's tensors, by hooks while it is repeated, and the first place where it goes wrong.

Shapes: S sequence, B micro-batch, H features. With sequence parallelism S is S/t.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mlm.checkpoint.native.exchange import Ranks
from mlm.models.family import family_of
from mlm.parallel.context import local_positions
from mlm.parallel.mesh import CPU
from mlm.parallel.sharding import ParameterShard
from mlm.parallel.watch import name_ranks
from mlm.training.incidents.numbers import deviations
from mlm.training.kernels import should_compile
from mlm.training.trainer import Trainer

WEIGHT, INPUT, OUTPUT, GRADIENT, WEIGHT_GRADIENT = "weight", "input", "output", "gradient", "weight gradient"
FEWEST_SAMPLES = 4
"""Samples of a rank from which one of them can be an outlier."""
FAR = 10.0
"""Robust standard deviations from the others that make a sample an outlier of its step."""


@dataclass
class TensorStatistics:
    """One tensor in all micro-batches of the step, on this rank."""

    what: str
    """Its kind: weight, input or output of a module, gradient of the output, weight gradient."""
    name: str
    """Module, or parameter."""
    order: tuple[int, int, int]
    """Its place in the order of computation: weights, forward, backward."""
    elements: int = 0
    bad: int = 0
    """Elements that are not finite."""
    square: float = 0.0
    """Sum of squares of the finite elements."""
    largest: float = 0.0
    """Largest magnitude of a finite element."""
    sample: int | None = None
    """That of the first element that is not finite; so is the next."""
    position: int | None = None
    expert: int | None = None
    """Of experts' weights and gradients: the first that is not finite."""
    norms: dict[int, float] = field(default_factory=dict)
    """Norm of each sample's part."""

    def encode(self) -> dict[str, Any]:
        """As JSON values."""
        norm = math.sqrt(self.square)
        return {
            "tensor": self.what,
            "name": self.name,
            "norm": norm if math.isfinite(norm) else None,
            "largest": self.largest,
            "not_finite": self.bad / max(1, self.elements),
            **({"sample": self.sample, "position": self.position} if self.sample is not None else {}),
            **({"expert": self.expert} if self.expert is not None else {}),
        }

    def place(self) -> dict[str, Any]:
        """Its tensor with the first sample and position that are not finite."""
        place: dict[str, Any] = {"tensor": self.what, "name": self.name, "order": list(self.order)}
        place |= {} if self.expert is None else {"expert": self.expert}
        return {**place, "sample": self.sample, "position": self.position, "share": self.bad / self.elements}


def sample_of(batch: Any, row: int, position: int | None = None) -> int:
    """Return the number of the sample in a row of a micro-batch: its own, where it has more than a count."""
    if own := getattr(batch, "sample", None):
        return int(own(row, position))
    return int(batch.first_sample) + row


class _Noted:
    """An objective that reports which micro-batch is in its forward pass."""

    def __init__(self, inner: Any, probe: "StepProbe") -> None:
        self.inner, self.probe = inner, probe

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def output(self, chunk: Any, batch: Any, *rest: Any) -> Tensor:
        self.probe.batch = batch
        y: Tensor = self.inner.output(chunk, batch, *rest)
        if chunk.stage.is_last:
            self.probe.look(OUTPUT, "loss", (1, len(self.probe.modules), 0), y, batch)
        self.probe.batch = None  # backward may run layers again: those are not seen
        return y


class StepProbe:
    """Repeats a step's forward and backward passes and looks at every tensor between its modules.

    Gradients hold the same numbers afterwards. Collective over all ranks.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.batch: Any = None
        self.rows: dict[tuple[str, str], TensorStatistics] = {}
        with torch.device("meta"):  # names of all stages in their order, on every rank
            whole = family_of(trainer.config.model.kind).model(trainer.config.model, tp=trainer.ctx.tp)
        leaves = [name for name, module in whole.named_modules() if name and not list(module.children())]
        self.modules = {name: number for number, name in enumerate(leaves)}
        self.parameters = {name: number for number, (name, _) in enumerate(whole.named_parameters())}

    def run(self, batches: Sequence[Any]) -> Tensor:
        """Repeat the step and return this rank's share of its parts."""
        trainer = self.trainer
        for shard in trainer.shards:
            self.look_at_shard(WEIGHT, shard, (0, self._number(shard.name), 0), shard.parameter)
        with self._watching():
            parts = trainer.compute_gradients(batches, _Noted(trainer.objective, self))
        for shard in trainer.shards:
            if shard.parameter.grad is not None:
                order = (3, -self._number(shard.name), 0)
                self.look_at_shard(WEIGHT_GRADIENT, shard, order, shard.parameter.grad)
        return parts

    def _number(self, name: str) -> int:
        return self.parameters.get(name, len(self.parameters))

    @contextmanager
    def _watching(self) -> Iterator[None]:
        trainer = self.trainer
        handles = []
        for chunk in trainer.model.chunks:
            for name, module in chunk.named_modules():
                if name in self.modules:
                    handles.append(module.register_forward_hook(self._hook(name)))
        compiled = should_compile(trainer.config.compile, trainer.ctx.device)
        try:
            with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        number = self.modules[name]

        def seen(_module: nn.Module, inputs: Any, output: Any) -> None:
            batch = self.batch
            if batch is None:
                return
            if inputs and isinstance(inputs[0], Tensor):
                self.look(INPUT, name, (1, number, 0), inputs[0], batch)
            if isinstance(output, Tensor):
                self.look(OUTPUT, name, (1, number, 1), output, batch)
                if output.requires_grad:
                    order = (2, -number, 0)
                    output.register_hook(lambda grad: self.look(GRADIENT, name, order, grad, batch))

        return seen

    def look_at_shard(self, what: str, shard: ParameterShard, order: tuple[int, int, int], x: Tensor) -> None:
        """Add a weight or its gradient; of experts, note the first that is not finite."""
        self.look(what, shard.name, order, x)
        row = self.rows.get((what, shard.name))
        if shard.experts is not None and row is not None and row.bad:
            row.expert = shard.offset[0] + int((~x.isfinite()).flatten(1).any(1).nonzero()[0])

    @torch.no_grad()
    def look(self, what: str, name: str, order: tuple[int, int, int], x: Tensor, batch: Any = None) -> None:
        """Add a tensor to the statistics."""
        if not x.is_floating_point() or not x.numel():
            return
        row = self.rows.setdefault((what, name), TensorStatistics(what, name, order))
        finite = x.isfinite()
        clean = torch.where(finite, x, 0).to(torch.float64 if x.device.type == "cpu" else torch.float32)
        bad = int((~finite).sum())
        row.elements += x.numel()
        row.square += float(clean.square().sum())
        row.largest = max(row.largest, float(clean.abs().max()))
        by_sample = batch is not None and x.dim() == 3 and x.shape[1] == len(batch.tokens)
        if by_sample:
            for number, norm in enumerate(clean.square().sum((0, 2)).sqrt().tolist()):
                row.norms[sample_of(batch, number)] = norm
        if bad and not row.bad and by_sample:
            where = (~finite).any(2).nonzero()[0].tolist()  # [position, sample in the micro-batch]
            ctx, rows, length = self.trainer.ctx, x.shape[0], batch.tokens.shape[1]
            first = ctx.tp.rank * rows if rows < length // ctx.cp.size else 0
            row.position = int(local_positions(length, ctx.cp, CPU)[first + where[0]])
            row.sample = sample_of(batch, where[1], row.position)
        row.bad += bad

    def ordered(self) -> list[TensorStatistics]:
        """Return all rows in the order of computation."""
        return sorted(self.rows.values(), key=lambda row: row.order)

    def first_bad(self) -> dict[str, Any] | None:
        """Return the first place with a number that is not finite on this rank."""
        return next((row.place() for row in self.ordered() if row.bad), None)

    def first_outlier(self) -> dict[str, Any] | None:
        """Return the first activation or gradient in which one sample is far from this rank's others."""
        for row in self.ordered():
            if len(row.norms) < FEWEST_SAMPLES:
                continue
            sample, norm = max(row.norms.items(), key=lambda item: item[1])
            others = [other for number, other in row.norms.items() if number != sample]
            if (far := deviations(norm, others)) >= FAR:
                return {**row.place(), "sample": sample, "deviations": round(far, 1)}
        return None

    def gather(self) -> "Findings":
        """Compare what each rank saw. Collective over all ranks."""
        mine = [self.first_bad(), self.first_outlier()]
        bad, outliers = zip(*Ranks.of(self.trainer.ctx).all_gather(mine), strict=True)
        return Findings(earliest_place(bad), earliest_place(outliers))


@dataclass(frozen=True)
class Findings:
    """Places of a repeated step, the same on every rank."""

    first_bad: dict[str, Any] | None
    """First number that is not finite: tensor, name, sample, position, ranks."""
    outlier: dict[str, Any] | None
    """First activation or gradient of one sample that is far from those of others."""

    def encode(self) -> dict[str, Any]:
        """As JSON values."""
        return {"first_not_finite": self.first_bad, "first_outlier": self.outlier}

    def lines(self) -> list[str]:
        """Sentences for a reader, the most telling first."""
        lines = []
        if self.first_bad is not None:
            lines.append(f"the first number that is not finite is in {describe_place(self.first_bad)}")
        if self.outlier is not None:
            far = self.outlier["deviations"]
            lines.append(
                f"the first outlier is {describe_place(self.outlier)}, {far:g} deviations from other samples"
            )
        return lines


def earliest_place(places: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the place that is computed first, with the ranks on which it is."""
    known = [(place["order"], rank) for rank, place in enumerate(places) if place is not None]
    if not known:
        return None
    first = min(known)[0]
    ranks = [rank for order, rank in known if order == first]
    place = dict(places[ranks[0]] or {})
    return {**{key: value for key, value in place.items() if key != "order"}, "ranks": ranks}


def describe_place(place: dict[str, Any]) -> str:
    """Return a place as words: the output of layers.1.mlp.up, sample 12, position 3, on rank 1."""
    tensor = place["tensor"]
    link = "at the output of" if tensor == "gradient" else "of"
    text = f"the {tensor} {link} {place['name']}"
    for key in ("expert", "sample", "position"):
        if place.get(key) is not None:
            text += f", {key} {place[key]}"
    return f"{text}, on {name_ranks(place['ranks'])}"
