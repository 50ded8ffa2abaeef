"""`mlm parity`: a layout against one process: the same few steps on both, compared and judged as by an audit.

Rank 0 runs the whole model a second time, alone, on the same micro-batches. Each rank records the loss, its
parts of every gradient and the norm before the update, and of every weight after it; rank 0 compares.
Dropout masks are functions of their place, so one process draws exactly the masks of t tensor-parallel ranks.

The layout is run by the same `Trainer` as training: what is compared is what trains.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mlm.checkpoint.native import exchange
from mlm.checkpoint.native.save_load import read_manifest, resolve
from mlm.data.sampler import MicroBatch
from mlm.launch.devices import device_kind
from mlm.models.shape import count_parameters
from mlm.optim.precision import parameter_dtype
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.runs.corpora import corpus_problems, train_dataset
from mlm.training.state import load_weights
from mlm.training.trainer import Trainer
from mlm.util.errors import CheckFailedError, attempt
from mlm.util.results import result_problems
from mlm.util.system import available_memory
from mlm.verify.audit.compare import Comparison, Layout, Location, Ranks
from mlm.verify.audit.diagnose import Finding, diagnose
from mlm.verify.audit.record import AXES, Key, Record
from mlm.verify.config import ParityConfig, comparable
from mlm.verify.verdict import TOLERANCES, Verdict, write_and_show

RESULT = "parity.json"
NARROW = ("bf16", "fp16", "fp8")
"""Formats whose rounding sends a token between experts that score alike to the other one: loads differ."""
EXACT_HINT = "exact=N makes all sums in one order at every layout: report what the run was"
LOADS = (".router.bias", ".router.load")
"""Ends of the names of a router's state that the loads of its experts move, and no gradient."""


@dataclass(frozen=True)
class Difference:
    """Difference of a tensor between the layout and one process."""

    step: int
    """From 1."""
    kind: str
    """loss (a token's of the global batch, in nats), norm (before clipping), gradient or updated weight."""
    name: str
    norm: float
    """Length of the vector of all elements on one process."""
    difference: float
    """Largest difference of an element, over all ranks. Infinite where one side is not finite, or where the
    ranks together do not hold each element."""
    relative: float
    """That of a gradient by its largest element, of a weight by the learning rates summed over steps."""
    distance: float
    """Length of the vector of all differences, replicas counted once."""

    @classmethod
    def of(cls, place: Location, whole: Tensor) -> "Difference":
        key, match = place.key, place.match
        once = {match.regions[at]: part.double() - right for at, (part, right) in match.pairs.items()}
        far, norm = math.hypot(*(float(off.norm()) for off in once.values())), float(whole.double().norm())
        return cls(key.step + 1, key.kind, key.name, norm, match.error, place.relative, far)


@dataclass
class Report:
    """All that was compared; `sizes` are the axes', `eps` is the optimizer's."""

    sizes: Layout
    eps: float
    lrs: list[float] = field(default_factory=list)
    """Learning rate of each step."""
    differences: list[Difference] = field(default_factory=list)
    """In the order of computation."""
    replicated: int = 0
    """Parameters that several ranks hold copies of."""
    torn: tuple[str, ...] = ()
    """Those of them whose copies are not equal bit for bit after the last step."""
    wrong: int = 0
    """Tensors beyond the tolerance in the first step that has one."""
    blind: str = ""
    """The first tensor that is not finite on both sides, in words."""
    finding: Finding | None = None
    """The first difference."""
    is_exact: bool = False
    """True in a run with exact=N, whose layouts have the same bits."""
    changed: str = ""
    """The first tensor of which a bit differs in such a run, in words."""
    digest: str = ""
    """Of all bits of all steps on one process in such a run."""

    def of(self, kind: str, step: int | None = None) -> list[Difference]:
        return [d for d in self.differences if d.kind == kind and step in (None, d.step)]

    def add(self, reference: Record, ranks: Ranks, lr: float) -> None:
        """Compare the next step, and the weights that ranks hold in copies."""
        self.lrs.append(lr)
        if self.is_exact:
            self.changed = self.changed or changed_bits(reference, ranks)
            self.digest = record_digest(reference, self.digest)
        comparison = Comparison(reference, ranks, self.sizes, lr_sum=sum(self.lrs), eps=self.eps)
        found: dict[Key, Difference] = {}
        for place in comparison.locations:  # of a parameter on two stages, the larger
            each = Difference.of(place, reference.tensors[place.key])
            found[place.key] = max(found.get(place.key, each), each, key=lambda d: d.difference)
        self.differences += found.values()
        self.blind = self.blind or comparison.blind
        if self.finding is None and not self.blind:
            self.finding, self.wrong = diagnose(comparison), len(comparison.wrong)
        copies = defaultdict[tuple[str, Hashable], list[Tensor]](list)
        for record in ranks.values():
            for key, x in record.tensors.items():
                if key.kind == "weight":
                    copies[key.name, (record.offsets[key.name], x.shape)].append(x)
        held = [(name, each) for (name, _), each in copies.items() if len(each) > 1]
        torn = (name for name, (x, *ys) in held if any(not torch.equal(x, y) for y in ys))
        self.replicated, self.torn = len({name for name, _ in held}), tuple(dict.fromkeys(torn))


def preflight(config: ParityConfig) -> list[str]:
    """Problems that the named files and this host's memory show; called before any rank starts."""
    problems = corpus_problems(comparable(config))
    if (ckpt := config.ckpt) is not None:
        attempt(problems, lambda: read_manifest(resolve(ckpt)))
    is_gpu = device_kind(config.dist) == "cuda"
    available = torch.cuda.get_device_properties(0).total_memory if is_gpu else available_memory()
    # weights, gradients, two moments and a record, of one process and of replicas on this host
    models = 5 * (1 + (1 if is_gpu else config.parallel.dp or 1))
    needed = models * parameter_dtype(config.precision).itemsize * count_parameters(config.model)
    if needed > available:
        problems.append(
            f"model.num_layers={config.model.num_layers}: the whole model and its layout take more than "
            f"{needed / 1e9:,.1f} GB of the {available / 1e9:,.1f} GB there are; use fewer layers or a "
            "smaller model=…"
        )
    return [*problems, *result_problems(Path(config.out, RESULT))]


def run(config: ParityConfig, ctx: ParallelContext) -> None:
    """Compare; rank 0 prints the verdict and writes out/parity.json. Raises CheckFailedError if not equal."""
    out = Path(config.out, RESULT)
    report = compare(config, ctx)
    verdict = shared_verdict(report, ctx)
    if report is not None:
        layout = replace(config.parallel, dp=ctx.dp.size).described
        numbers = {"layout": layout, "tolerance": asdict(TOLERANCES[config.precision.dtype])} | asdict(report)
        what = f"parity of {layout} with one process, {config.model.kind}, {config.precision.dtype}"
        write_and_show(out, config, verdict, numbers, what)
    if not verdict.equal:
        raise CheckFailedError(f"{verdict.headline} ({out})")


def compare(config: ParityConfig, ctx: ParallelContext) -> Report | None:
    """Run `config.steps` steps on the layout and, on rank 0, on one process. Collective over all ranks.

    Returns the report on rank 0, None on the others. Raises UserError for what the user can fix.
    """
    config = comparable(config)
    layout: Trainer[MicroBatch] = Trainer(config, ctx)
    alone = one_process(config, ctx) if ctx.is_main else None
    if (ckpt := config.ckpt) is not None:
        for trainer in filter(None, (layout, alone)):
            load_weights(tuple(trainer.shards), resolve(ckpt), trainer.ctx)
    return compare_trainers(layout, alone, config.steps)


def one_process(config: ParityConfig, ctx: ParallelContext) -> Trainer:
    """The whole run on this rank alone, with the attention masks that the layout's kernels draw."""
    alone: Trainer[MicroBatch] = Trainer(config.on_one_process(), replace(shape_context(), device=ctx.device))
    alone.split_parts = tuple(range(ctx.tp.size))
    return alone


def compare_trainers(layout: Trainer, alone: Trainer | None, steps: int) -> Report | None:
    samples = train_dataset(layout.config, steps * layout.config.train.global_batch_size)
    sizes = {axis: getattr(layout.ctx, axis).size for axis in AXES}
    config = layout.config
    report = None if alone is None else Report(sizes, config.optimizer.eps, is_exact=config.exact > 0)
    with layout.batches(samples) as own, (alone or layout).batches(samples) as whole:
        for _, batches, all_batches in zip(range(steps), own, whole, strict=False):
            precision = config.precision.dtype
            record, lr = record_step(layout, batches, precision)
            reference = None if alone is None else record_step(alone, all_batches, precision)[0]
            contents = enumerate(exchange.Ranks.of(layout.ctx).gather_bytes(record.to_bytes()))
            ranks = {  # by coordinates, on rank 0
                tuple(map(int, np.unravel_index(rank, tuple(sizes.values())))): Record.of_bytes(content)
                for rank, content in contents
            }
            if report is not None and reference is not None:
                report.add(reference, ranks, lr)
    return report


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


def changed_bits(reference: Record, ranks: Ranks) -> str:
    """The first tensor of one process of which a rank has other bits, in words; empty for none."""
    for key, whole in reference.tensors.items():
        for record in ranks.values():
            if (part := record.tensors.get(key)) is None:
                continue
            offset = record.offsets.get(key.name, ())
            region = whole[tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))]
            if bits_of(part) != bits_of(region):
                return key.words
    return ""


def record_digest(record: Record, before: str = "") -> str:
    """SHA-256 of names and bits of a record, and of the digest of the one before."""
    digest = hashlib.sha256(before.encode())
    for key, x in record.tensors.items():
        digest.update(f"{key.kind} {key.name}\n".encode() + bits_of(x))
    return f"sha256:{digest.hexdigest()}"


def bits_of(x: Tensor) -> bytes:
    return x.double().contiguous().numpy().tobytes()  # a wider format is exact


def shared_verdict(report: Report | None, ctx: ParallelContext) -> Verdict:
    """The verdict on the report of rank 0, on every rank. Collective."""
    verdict = None if report is None else list(astuple(judge(report)))
    return Verdict(*exchange.Ranks.of(ctx).broadcast(verdict))


def judge(report: Report) -> Verdict:
    if report.blind:
        sentence = f"{report.blind} is not finite on one process either; nothing after it counts"
        return Verdict("UNDECIDED", sentence, "in float16 set a lower precision.initial_loss_scale")
    if report.is_exact and report.changed:
        return Verdict("DIFFERENT", f"the first bits that differ are of {report.changed}", EXACT_HINT)
    if report.finding is not None:
        found = report.finding
        others = f"; {report.wrong - 1} more tensors of that step differ" if report.wrong > 1 else ""
        return Verdict("DIFFERENT", f"first at {found.where}{others}", f"{found.cause}: {found.sentence}")
    if report.torn:
        others = f", nor those of {len(report.torn) - 1} more" if len(report.torn) > 1 else ""
        sentence = f"the copies of {report.torn[0]} on several ranks are no longer equal bit for bit{others}"
        hint = "look at a reduction that reaches some copies only: they will drift apart"
        return Verdict("DIFFERENT", sentence, hint)
    if report.is_exact:
        steps, tensors = len(report.lrs), len(report.differences)
        return Verdict("EQUAL bit for bit", f"{tensors} tensors of {steps} steps, {report.digest}")
    losses = max(each.difference for each in report.of("loss"))
    gradients = max(each.relative for each in report.of("gradient"))
    weights = max(each.relative for each in report.of("weight", len(report.lrs)))
    moves = f"{weights:.1e} of what the learning rate moves them"
    agreement = (
        f"losses to {losses:.1e}, gradients to {gradients:.1e} of the largest of each, weights to "
        + (moves if any(report.lrs) else "the last bit, as every learning rate is 0")
        + (f"; {report.replicated} parameters held in copies, all bit-equal" if report.replicated else "")
    )
    return Verdict("EQUAL", agreement)
