"""A layout against one process: the same few steps on both, recorded, and compared as an audit compares.

Rank 0 runs the whole model a second time, alone, on the same micro-batches. Each rank records the loss, its
parts of every gradient and the norm before the update, and of every weight after it; rank 0 compares.
Dropout masks are functions of their place, so one process can draw exactly those of t tensor-parallel ranks.

The layout is run by the same `Trainer` as training: what is compared is what trains.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import repeat

import numpy as np
import torch
from torch import Tensor

from mlm.checkpoint.native import exchange
from mlm.checkpoint.native.save_load import resolve
from mlm.data.sampler import Dataset, Loader, MicroBatch
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.training.corpora import train_dataset
from mlm.training.state import load_weights
from mlm.training.trainer import Trainer
from mlm.verify.audit.compare import Comparison, Layout, Place, Ranks, Rounding, magnitude
from mlm.verify.audit.diagnose import LOADS, Finding, diagnose
from mlm.verify.audit.record import Key, Record
from mlm.verify.audit.subject import AXES
from mlm.verify.config import ParityConfig, comparable

PIECES = 16
"""Messages in which a rank's record travels, so that no copy of all is needed."""
NARROW = ("bf16", "fp16", "fp8")
"""Formats whose rounding sends a token between experts that score alike to the other one: loads differ."""


@dataclass(frozen=True)
class Pair:
    """A number as one process and as the layout have it."""

    one_process: float
    layout: float

    @property
    def difference(self) -> float:
        """|layout - one process|; NaN where either is."""
        return abs(self.layout - self.one_process)


@dataclass(frozen=True)
class Difference:
    """Difference of a parameter's gradient or weight between the layout and one process."""

    name: str
    largest: float
    """Largest magnitude of an element on one process."""
    difference: float
    """Largest difference of an element, over all ranks. Infinite where one side is not finite, or where the
    ranks together do not hold each element."""
    relative: float
    """That of a gradient by its largest element, of a weight by the learning rates summed over steps."""
    norm: float
    """Length of the vector of all elements on one process."""
    distance: float
    """Length of the vector of all differences, replicas counted once."""

    @classmethod
    def of(cls, place: Place, whole: Tensor) -> "Difference":
        """Sum up a compared tensor."""
        match = place.match
        once = {match.regions[at]: part.double() - right for at, (part, right) in match.pairs.items()}
        far = math.hypot(*(float(off.norm()) for off in once.values()))
        norm = float(whole.double().norm())
        return cls(place.key.name, magnitude(whole), match.error, place.relative, norm, far)


@dataclass(frozen=True)
class StepReport:
    """One step on both sides."""

    step: int
    loss: Pair
    """Mean loss per token of the global batch, in nats."""
    grad_norm: Pair
    """Global gradient norm before clipping."""
    lr: float
    gradients: tuple[Difference, ...] = ()
    """Of every parameter, in the order of the model; of none in a step that both skip."""
    weights: tuple[Difference, ...] = ()
    """Of every parameter, after the update."""

    @property
    def is_skipped(self) -> bool:
        """True if both sides skipped the step because its gradients overflow."""
        return not (math.isfinite(self.grad_norm.one_process) or math.isfinite(self.grad_norm.layout))


@dataclass
class Report:
    """All that was compared; `sizes` are those of the axes, `eps` is the optimizer's."""

    sizes: Layout
    eps: float
    steps: list[StepReport] = field(default_factory=list)
    replicated: int = 0
    """Parameters that several ranks hold copies of."""
    torn: tuple[str, ...] = ()
    """Those of them whose copies are not equal bit for bit after the last step."""
    by_gradient: int = 0
    """Elements whose gradient is rounding, so that it is compared and the weight is not."""
    wrong: int = 0
    """Tensors beyond the tolerance in the first step that has one."""
    blind: str = ""
    """The first tensor that is not finite on both sides, in words."""
    finding: Finding | None = None
    """The first difference."""

    def __post_init__(self) -> None:
        """Begin without a step."""
        self._rounding: Rounding = {}

    def add(self, reference: Record, ranks: Ranks, lr: float) -> None:
        """Compare the next step."""
        step, layout = len(self.steps), next(iter(ranks.values()))
        loss, norm = (
            Pair(*(float(record.tensors[Key(step, kind, kind)]) for record in (reference, layout)))
            for kind in ("loss", "norm")
        )
        report = StepReport(step + 1, loss, norm, lr)
        if report.is_skipped:
            for record in (reference, *ranks.values()):
                record.tensors = {k: x for k, x in record.tensors.items() if k.kind in ("loss", "weight")}
        units = {"loss": 1.0, "norm": abs(norm.one_process), "weight": lr + sum(s.lr for s in self.steps)}
        comparison = Comparison(
            reference, ranks, self.sizes, units=units, eps=self.eps, rounding=self._rounding
        )
        gradients, weights = (differences(comparison, kind) for kind in ("gradient", "weight"))
        self.steps.append(replace(report, gradients=gradients, weights=weights))
        self.blind = self.blind or comparison.blind
        if self.finding is None and not self.blind:
            self.finding, self.wrong = diagnose(comparison), len(comparison.wrong)
        self._compare_copies(ranks)

    def _compare_copies(self, ranks: Ranks) -> None:
        """Count the weights that ranks hold in copies, and name those whose copies differ."""
        copies: dict[str, dict[Hashable, list[Tensor]]] = {}
        for record in ranks.values():
            for key, x in record.tensors.items():
                if key.kind == "weight":
                    region = record.offsets[key.name], tuple(x.shape)
                    copies.setdefault(key.name, {}).setdefault(region, []).append(x)
        held = {name: [each for each in c.values() if len(each) > 1] for name, c in copies.items()}
        self.replicated = sum(map(bool, held.values()))
        self.torn = tuple(
            n for n, c in held.items() if any(not torch.equal(x, y) for x, *ys in c for y in ys)
        )
        masks = {
            (name, ranks[stage, *at].offsets[name]): mask
            for (name, stage), each in self._rounding.items()
            for at, mask in each.items()
        }
        self.by_gradient = sum(int(mask.sum()) for mask in masks.values())


def compare(
    config: ParityConfig, ctx: ParallelContext, on_step: Callable[[], None] = lambda: None
) -> Report | None:
    """Run `config.steps` steps on the layout and, on rank 0, on one process. Collective over all ranks.

    Returns the report on rank 0, None on the others. `on_step` is called after each. Raises UserError for
    what the user can fix.
    """
    config = comparable(config)
    layout: Trainer[MicroBatch] = Trainer(config, ctx)
    alone = one_process(config, ctx) if ctx.is_main else None
    if config.ckpt is not None:
        load_weights(tuple(layout.shards), resolve(config.ckpt), ctx)
        if alone is not None:
            load_weights(tuple(alone.shards), resolve(config.ckpt), alone.ctx)
    return compare_trainers(layout, alone, config.steps, on_step)


def one_process(config: ParityConfig, ctx: ParallelContext) -> Trainer:
    """The whole run on this rank alone, with the attention masks that the layout's kernels draw."""
    alone: Trainer[MicroBatch] = Trainer(config.on_one_process(), replace(shape_context(), device=ctx.device))
    alone.split_parts = tuple(range(ctx.tp.size))
    return alone


def compare_trainers(
    layout: Trainer, alone: Trainer | None, steps: int, on_step: Callable[[], None] = lambda: None
) -> Report | None:
    """As `compare`; `alone` is that of rank 0."""
    samples = train_dataset(layout.config, steps * layout.config.train.global_batch_size)
    sizes = {axis: getattr(layout.ctx, axis).size for axis in AXES}
    report = None if alone is None else Report(sizes, layout.config.optimizer.eps)
    with batches_of(layout, samples) as own, batches_of(alone, samples) as whole:
        for _, batches, all_batches in zip(range(steps), own, whole, strict=False):
            precision = layout.config.precision.dtype
            record, lr = record_step(layout, batches, precision)
            reference = None if alone is None else record_step(alone, all_batches, precision)[0]
            ranks = gather_records(record, layout.ctx, tuple(sizes.values()))
            if report is not None and reference is not None:
                report.add(reference, ranks, lr)
            on_step()
    return report


def batches_of(
    trainer: Trainer | None, samples: Dataset
) -> AbstractContextManager[Iterator[list[MicroBatch]]]:
    """This rank's micro-batches of each step, for the trainer's layout; nothing, for ever, without one."""
    if trainer is None:
        return nullcontext(repeat([]))
    config, ctx = trainer.config, trainer.ctx
    return Loader(
        samples,
        consumed_samples=0,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        rank=ctx.dp.rank,
        size=ctx.dp.size,
        ramp=config.train.ramp_batch,
    )


def record_step(trainer: Trainer, batches: Sequence[MicroBatch], precision: str) -> tuple[Record, float]:
    """Train a step; what it computed, and its learning rate. Weights are views of the live ones."""
    step, record = trainer.step, Record(precision=precision)
    parts = trainer.compute_gradients(batches)
    for shard in trainer.shards:
        if (grad := shard.parameter.grad) is not None:  # without the loss scale of half precision
            own = shard.without_padding(grad) / trainer.scaler.scale
            record.tensors[Key(step, "gradient", shard.name)] = own.cpu()
    outcome = trainer.clip_and_update(parts)
    for kind, value in ("loss", trainer.mean_loss(outcome)), ("norm", float(outcome.grad_norm.item())):
        record.tensors[Key(step, kind, kind)] = torch.tensor(value, dtype=torch.float64)
    for shard in trainer.shards:
        record.offsets[shard.name] = shard.offset
        if not (precision in NARROW and shard.name.endswith(LOADS)):
            own = shard.without_padding(shard.parameter.detach())
            record.tensors[Key(step, "weight", shard.name)] = own.cpu()
    return record, outcome.lr


def gather_records(record: Record, ctx: ParallelContext, sizes: tuple[int, ...]) -> Ranks:
    """Every rank's record by its coordinates, on rank 0; none on the others. Collective."""
    gathered: Ranks = {}
    items = list(record.tensors.items())
    for piece in range(PIECES):
        own = replace(record, tensors=dict(items[piece::PIECES]))
        for rank, content in enumerate(exchange.Ranks.of(ctx).gather_bytes(own.to_bytes())):
            at = tuple(map(int, np.unravel_index(rank, sizes)))
            received = Record.of_bytes(content)
            gathered.setdefault(at, received).tensors.update(received.tensors)
    return gathered


def differences(comparison: Comparison, kind: str) -> tuple[Difference, ...]:
    """The difference of each parameter, of one on two stages the larger."""
    found: dict[str, Difference] = {}
    for place in comparison.places:
        if place.key.kind == kind:
            each = Difference.of(place, comparison.reference.tensors[place.key])
            found[each.name] = max(found.get(each.name, each), each, key=lambda d: d.difference)
    return tuple(found.values())
