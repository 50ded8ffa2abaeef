"""Counts of a model's layers and ends: state, work, and memory of a micro-batch.

The trainer of one rank runs micro-batches of one sample and of two on the meta device, through one layer of
each distinct kind between embedding and head, and a `Meter` counts. memory.py and cost.py compose stages,
models and schedules from these counts. Process groups are fakes of the split, not the job's, so that a
training rank may count too.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Any, cast

from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import HashStore, ProcessGroup

from mlm.data.sampler import MicroBatch
from mlm.models.family import family_of
from mlm.models.shape import architecture_of, num_distinct_layers
from mlm.models.stage import PipelineStage, parameter_home
from mlm.optim.adamw import moments
from mlm.parallel.compute_state import is_cast_to_8_bits
from mlm.parallel.config import ParallelConfig
from mlm.parallel.expert.router import Router
from mlm.parallel.matmul import prepare_products
from mlm.parallel.mesh import CPU, Axis, ExpertAxes, ParallelContext, folds_tp
from mlm.plan.dry_run_memory import EMBEDDING, VOCABULARY, Log
from mlm.plan.dry_run_meter import BACKWARD, HEAD, OPTIMIZER, OUTSIDE, RECOMPUTED, Meter
from mlm.plan.dry_run_rank import META, MetaAttention, batches_of, is_router_state, make_countable, tag_state
from mlm.plan.layout import BOTH, FIRST, LAST, split_of_state
from mlm.plan.trace import Place, TracedWatch, Work, sum_work
from mlm.runs.config import PretrainConfig
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError

HOMES = {HEAD: VOCABULARY}
"""Homes of labels with another name: the last norm is a part of the head."""
SIZES = (1, 1, 2)
"""Samples of the micro-batches. The first creates the gradients that the others add to."""


@dataclass(frozen=True, slots=True)
class ShardSize:
    """A parameter's shard on one rank of a split, before ZeRO shards it."""

    rows: int
    columns: int
    weight_bytes: float
    """Per element."""
    state_bytes: int
    """Per element: the optimizer's moments; 0 if frozen."""
    cast_bytes: int
    """Per element: copies that are cast once a step."""
    is_trained: bool
    is_whole: bool
    """True if ZeRO does not shard it."""
    is_expert: bool
    is_state: bool
    """True for a router's running state, which is not a parameter of the model."""

    @property
    def size(self) -> int:
        return self.rows * self.columns

    def held_bytes(self, elements: int) -> int:
        return round(self.weight_bytes * elements)

    def share(self, rank: int, ranks: int) -> int:
        """Elements on one of `ranks` that shard the rows as torch.chunk does."""
        most = -(-self.rows // ranks)
        return min(most, self.rows - min(rank * most, self.rows)) * self.columns


@dataclass(frozen=True, slots=True)
class PassCounts:
    """One micro-batch through embedding, a layer of each kind, and head."""

    work: dict[Place, Work]
    """By phase and home."""
    saved_bytes: dict[str, int]
    """Bytes saved from forward for backward, by home."""
    peak_workspace_bytes: dict[str, int]
    """Most bytes while a home runs backward, without those saved by it and the homes before; for the head
    also while it computes the loss."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Micro-batches of a split, and an optimizer's step."""

    first: PassCounts
    """One sample, before there are gradients."""
    passes: tuple[PassCounts, PassCounts]
    """One sample and two, when gradients exist."""
    trained: int
    """Elements of the trained parameters."""
    per_step: Work
    """The optimizer's step and casts of all parameters."""
    accumulation: Work
    """Additions to gradients outside any module in one pass."""


class LayerCounts:
    """Counts of one run's model by split, cached.

    `device` is gpu, cpu, or unfused: a GPU whose program computes attention by its formula.
    """

    def __init__(self, run: PretrainConfig, device: str) -> None:
        self.run, self.device = make_countable(run), device
        self.element = {"fp32": 4, "tf32": 4, "fp64": 8}.get(run.precision.dtype, 2)
        """Bytes per element of activations."""
        self._state, self._counts = cache(self._shard_sizes), cache(self._count)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """For each layer the first one with equal names and shapes of parameters, modules and attention."""
        model, firsts, kinds = self.run.model, dict[object, int](), list[int]()
        parts = architecture_of(model)
        period = max(1, len(parts.window_layers))
        built = min(model.num_layers, num_distinct_layers(model) + period - 1)
        with without_numbers(self.run), META:
            module = family_of(model.kind).model(model, stage=PipelineStage(range(built), False, False))
        for n, layer in module.layers.items():
            shapes = tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())
            types = tuple(map(type, layer.modules()))
            kinds.append(firsts.setdefault((shapes, types, parts.scores(int(n))), int(n)))
        while len(kinds) < model.num_layers:
            kinds.append(kinds[-period])
        return tuple(kinds)

    def state(self, split: ParallelConfig, home: str) -> list[ShardSize]:
        """Return the parameters of a home: FIRST, LAST, BOTH or the number of a kind of layer."""
        return self._state(split_of_state(split), home if home in (FIRST, LAST) else BOTH)[home]

    def _shard_sizes(self, split: ParallelConfig, ends: str) -> dict[str, list[ShardSize]]:
        """Count the shards, by home, of a stage with these ends and a layer of each kind."""
        numbers = sorted(set(self.kinds)) if ends == BOTH else [0]  # with adapters, ends alone train nothing
        stage = PipelineStage(numbers, ends != LAST, ends != FIRST)  # type: ignore[arg-type]
        sizes = defaultdict[str, list[ShardSize]](list)
        with self._trainer(split, stage) as (trainer, _):
            width = trainer.model.dtype.itemsize
            cast_bytes = {
                getattr(module, name): width + 2 * is_cast_to_8_bits(module, name)
                for module, name, _ in trainer.model.casts.reads
            }
            for shard in trainer.shards:
                p, layer = shard.parameter, parameter_home(shard.name)
                state, rows = trainer.optimizer.state.get(p, {}), p.shape[0] if p.dim() else 1
                is_adapter = bool(self.run.lora.rank) and p.requires_grad
                size = ShardSize(
                    rows=rows,
                    columns=p.numel() // max(rows, 1),
                    weight_bytes=getattr(p, "element_bytes", p.element_size()),
                    state_bytes=sum(
                        state[name].element_size()
                        for name in moments(trainer.optimizer, shard)
                        if name in state
                    )
                    + p.element_size() * bool(self.run.ema.decay and p.requires_grad),
                    cast_bytes=cast_bytes.get(p, 0),
                    is_trained=p.requires_grad,
                    is_whole=isinstance(shard.module, Router) or is_adapter,
                    is_expert=shard.experts is not None,
                    is_state=is_router_state(shard),
                )
                sizes[str(layer) if isinstance(layer, int) else ends].append(size)
        return sizes

    def elements(self, split: ParallelConfig, home: str) -> int:
        """Elements of a home's parameters."""
        return sum(shard.size for shard in self.state(split, home))

    def tied(self, split: ParallelConfig) -> int:
        """Elements of the embedding table that both ends of a pipeline hold."""
        return self.elements(split, FIRST) + self.elements(split, LAST) - self.elements(split, BOTH)

    def counts(self, split: ParallelConfig) -> Counts:
        """Return counts of one sample and of two through a layer of each kind and the ends."""
        if split.recompute != "budget":
            return self._counts(split, SIZES, True)
        # PyTorch's activation memory budget: the share that layers keep of the memory that recompute=full
        # frees. Work is counted without recomputation.
        none, full = (self.counts(replace(split, recompute=mode)) for mode in ("none", "full"))
        budget = split.recompute_budget

        def interpolate(most: dict[str, int], least: dict[str, int]) -> dict[str, int]:
            return {home: round(budget * most[home] + (1 - budget) * least[home]) for home in most}

        def limit(a: PassCounts, b: PassCounts) -> PassCounts:
            workspace = interpolate(a.peak_workspace_bytes, b.peak_workspace_bytes)
            return PassCounts(a.work, interpolate(a.saved_bytes, b.saved_bytes), workspace)

        single, double = map(limit, none.passes, full.passes)
        return replace(none, first=limit(none.first, full.first), passes=(single, double))

    def ends(self, split: ParallelConfig, micro_batch: int) -> Counts:
        """Return counts of micro-batches of one size without layers: the loss is not linear in the size."""
        return self._counts(split, (micro_batch,) * 2, False)

    def _count(self, split: ParallelConfig, sizes: tuple[int, ...], has_layers: bool) -> Counts:
        """Run micro-batches of these sizes and an optimizer's step; return the meter's counts by home."""
        numbers = sorted(set(self.kinds)) if has_layers or self.run.lora.rank else []  # as above
        stage = PipelineStage(numbers, True, True)  # type: ignore[arg-type]  # any layers, in order
        with self._trainer(split, stage) as (trainer, meter):
            tag_state(trainer, meter)
            batches, trace, log = batches_of(trainer.config, sizes), meter.trace, meter.log
            with meter.watching(trainer.model.chunks):
                trace.begin_pass()
                before = len(trace.passes)
                parts = trainer.forward_backward(batches)
                begins = [*log.pass_begins, len(log.events)]
                trace.begin_pass()
                with meter.phase(OPTIMIZER):
                    trainer.reduce_gradients()
                    trainer.clip_and_update(parts)
            casts, *works, update = trace.passes[before - 1 :]
            homes = [EMBEDDING, *trainer.model.chunks[0].layers, VOCABULARY]
            passes = [
                pass_counts(work, log, begin, end, homes)
                for work, (begin, end) in zip(works, pairwise(begins), strict=True)
            ]
            return Counts(
                first=passes[0],
                passes=(passes[1], passes[-1]),
                trained=sum(shard.parameter.numel() for shard in trainer.shards if shard.is_trained),
                per_step=sum_work([*casts.values(), *update.values()]),
                accumulation=works[1][BACKWARD, OUTSIDE],
            )

    @contextmanager
    def _trainer(
        self, split: ParallelConfig, stage: PipelineStage
    ) -> Iterator[tuple[Trainer[MicroBatch], Meter]]:
        """Build the trainer of a rank with this stage, and its meter.

        Groups of tp, cp and ep are fakes that answer at once; there is no default process group.
        """
        meter = Meter("meta", is_traced=True)
        watch = TracedWatch(meter.trace)

        def axis(name: str, size: int) -> Axis:
            if size == 1:
                return Axis(name)
            backend = FakeProcessGroup._create_internal(rank=0, world_size=size)
            group = ProcessGroup(HashStore(), 0, size)
            group._register_backend(META, ProcessGroup.BackendType.CUSTOM, backend)
            group._set_group_name(cast(Any, f"counts of {name} {size}"))
            meter.axes[group.group_name] = (name, size)
            return Axis(name, 0, size, group, tuple(range(size)), watch)

        tp = axis("tp", split.tp)
        folds = folds_tp(split.tp, split.expert_tp)
        experts = ExpertAxes(ep=axis("ep", split.ep), tp=Axis("tp") if folds else tp)
        size = split.tp * split.cp
        ctx = ParallelContext(tp=tp, cp=axis("cp", split.cp), experts=experts, world_size=size, device=META)
        prepare_products(META)
        run = replace(self.run, parallel=replace(split, dp=1))
        is_gpu, recomputes = self.device == "gpu", split.recompute == "selective"
        choice = self.run.attention if is_gpu else "efficient"
        device = CPU if self.device == "cpu" else META
        with without_numbers(self.run), MetaAttention(choice, is_unfused=not is_gpu, recomputes=recomputes):
            with meter:
                trainer: Trainer[MicroBatch] = Trainer(run, ctx, stages=[stage], device=device)
            yield trainer, meter


@contextmanager
def without_numbers(run: PretrainConfig) -> Iterator[None]:
    """Raise UserError if custom code needs numbers, which meta tensors do not have."""
    try:
        yield
    except Exception as error:
        kinds = {"model.kind": run.model.kind, "optimizer.kind": run.optimizer.kind}
        custom = [f"{key}={kind}" for key, kind in kinds.items() if ":" in kind]
        cause = error.__cause__ or error
        if not custom or isinstance(cause, UserError):
            raise
        why = f"{type(cause).__name__}: {cause}".splitlines()[0]
        raise UserError(
            f"{' '.join(custom)}: cannot be planned, as it does not run on tensors without numbers "
            f"({why[:160]}); let no shape or branch depend on values (item(), nonzero(), if), or train "
            "without a plan"
        ) from error


CACHE = dict[tuple[str, str], LayerCounts]()
"""Counts of this process by the settings that they depend on, and type of device."""


def counts_of(run: PretrainConfig, device: str) -> LayerCounts:
    """Return the counts of a run's model on a type of device, cached."""
    settings = {f.name: getattr(run, f.name) for f in fields(run) if f.name not in ("parallel", "train")}
    return CACHE.setdefault((repr(settings), device), LayerCounts(run, device))


def pass_counts(work: dict[Place, Work], log: Log, begin: int, end: int, homes: list[str]) -> PassCounts:
    """Count the pass between the events `begin` and `end` of the log."""
    parts = defaultdict[Place, list[Work]](list)
    for (phase, label), part in work.items():
        if label != OUTSIDE:  # recomputation is a part of backward
            parts[BACKWARD if phase == RECOMPUTED else phase, HOMES.get(label, label)].append(part)
    by_home = {place: sum_work(works) for place, works in parts.items()}
    saved = dict.fromkeys(homes, 0)
    for block, change in log.events[begin:end]:
        if change > 0 and block.is_saved and block.part is None:
            saved[HOMES.get(block.label, block.label)] += block.size
    until = dict(zip(homes, accumulate(saved.values()), strict=True))  # saved by a home and those before
    workspace, live, home = dict.fromkeys(homes, 0), 0, homes[0]
    for block, change in log.events[begin:end]:
        live += change
        label = HOMES.get(block.label, block.label)
        home = label if label in saved and change > 0 else home
        if change > 0 and (block.phase in (BACKWARD, RECOMPUTED) or home == homes[-1]):
            workspace[home] = max(workspace[home], live - until[home])
    return PassCounts(by_home, saved, workspace)
