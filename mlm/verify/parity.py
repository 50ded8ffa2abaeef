"""`mlm parity`: the first steps of a run on its layout and on one process, compared as in an audit.

Both sides run the `Trainer` of `mlm pretrain`; rank 0 also runs the full model alone, on the same batches.
Each rank records the loss, its parts of every gradient and the norm before the update, and its parts of every
weight after it. Dropout masks depend on positions, so one process draws the masks of all ranks.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from itertools import product
from pathlib import Path

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
from mlm.verify.audit.parts import region_at
from mlm.verify.audit.record import AXES, Key, Record
from mlm.verify.config import ParityConfig, comparable
from mlm.verify.verdict import TOLERANCES, Verdict, write_and_show

RESULT = "parity.json"
NARROW = ("bf16", "fp16", "fp8")
"""Formats whose rounding moves tokens between experts of similar scores, which changes their loads."""
EXACT_HINT = "exact=N makes all sums in one order at every layout: report what the run was"
LOADS = (".router.bias", ".router.load")
"""Name endings of router state that follows the loads of experts rather than gradients."""


@dataclass(frozen=True)
class Difference:
    """Difference of a tensor between the layout and one process."""

    step: int
    """From 1."""
    kind: str
    """loss (a token's of the global batch, in nats), norm (before clipping), gradient or updated weight."""
    name: str
    norm: float
    """2-norm of the tensor on one process."""
    difference: float
    """Largest difference of an element over all ranks; infinite if it is not finite or on no rank."""
    relative: float
    """Difference of a gradient over its largest element, of a weight over the sum of learning rates."""
    distance: float
    """2-norm of the differences, replicas counted once."""

    @classmethod
    def of(cls, location: Location, full: Tensor) -> "Difference":
        key, match = location.key, location.match
        errors = {match.regions[rank]: part.double() - x for rank, (part, x) in match.pairs.items()}
        distance = math.hypot(*(float(error.norm()) for error in errors.values()))
        norm = float(full.double().norm())
        return cls(key.step + 1, key.kind, key.name, norm, match.error, location.relative, distance)


@dataclass
class Report:
    """Differences of all steps."""

    sizes: Layout
    """Sizes of AXES."""
    eps: float
    """Of the optimizer."""
    lrs: list[float] = field(default_factory=list)
    """Learning rate of each step."""
    differences: list[Difference] = field(default_factory=list)
    """In the order of computation."""
    replicated: int = 0
    """Number of parameters with copies on several ranks."""
    torn: tuple[str, ...] = ()
    """Parameters whose copies are not equal bit for bit after the last step."""
    wrong: int = 0
    """Number of tensors beyond the tolerance in the first step that has any."""
    blind: str = ""
    """First tensor that is not finite on both sides, in words."""
    finding: Finding | None = None
    """First difference."""
    is_exact: bool = False
    """True with exact=N: all layouts have the same bits."""
    changed: str = ""
    """With exact=N: first tensor with another bit, in words."""
    digest: str = ""
    """With exact=N: digest of all bits of all steps on one process."""

    def of(self, kind: str, step: int | None = None) -> list[Difference]:
        return [d for d in self.differences if d.kind == kind and step in (None, d.step)]

    def add(self, reference: Record, ranks: Ranks, lr: float) -> None:
        """Compare the next step, and copies of weights."""
        self.lrs.append(lr)
        if self.is_exact:
            self.changed = self.changed or changed_bits(reference, ranks)
            self.digest = record_digest(reference, self.digest)
        comparison = Comparison(reference, ranks, self.sizes, lr_sum=sum(self.lrs), eps=self.eps)
        largest: dict[Key, Difference] = {}
        for location in comparison.locations:  # the larger of a parameter on two stages
            key = location.key
            new = Difference.of(location, reference.tensors[key])
            largest[key] = max(largest.get(key, new), new, key=lambda d: d.difference)
        self.differences += largest.values()
        self.blind = self.blind or comparison.first_nonfinite
        if self.finding is None and not self.blind:
            self.finding, self.wrong = diagnose(comparison), len(comparison.wrong_locations)
        copies = defaultdict[tuple[str, Hashable], list[Tensor]](list)
        for record in ranks.values():
            for key, x in record.tensors.items():
                if key.kind == "weight":
                    copies[key.name, (record.offsets[key.name], x.shape)].append(x)
        replicated = [(name, x) for (name, _), x in copies.items() if len(x) > 1]
        unequal = (name for name, (x, *ys) in replicated if any(not torch.equal(x, y) for y in ys))
        self.replicated, self.torn = len({name for name, _ in replicated}), tuple(dict.fromkeys(unequal))


def preflight(config: ParityConfig) -> list[str]:
    """Problems that the named files and this host's memory show; called before any rank starts."""
    problems = corpus_problems(comparable(config))
    if (ckpt := config.ckpt) is not None:
        attempt(problems, lambda: read_manifest(resolve(ckpt)))
    is_gpu = device_kind(config.dist) == "cuda"
    available = torch.cuda.get_device_properties(0).total_memory if is_gpu else available_memory()
    # weights, gradients, two moments and a record, for one process and for each replica on this host
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
    """Compare; rank 0 prints the verdict and writes out/parity.json. Raises CheckFailedError."""
    out = Path(config.out, RESULT)
    report = compare(config, ctx)
    verdict = shared_verdict(report, ctx)
    if report is not None:
        layout = replace(config.parallel, dp=ctx.dp.size).described
        numbers = {"layout": layout, "tolerance": asdict(TOLERANCES[config.precision.dtype])} | asdict(report)
        title = f"parity of {layout} with one process, {config.model.kind}, {config.precision.dtype}"
        write_and_show(out, config, verdict, numbers, title)
    if not verdict.equal:
        raise CheckFailedError(f"{verdict.headline} ({out})")


def compare(config: ParityConfig, ctx: ParallelContext) -> Report | None:
    """Run `config.steps` steps on the layout and, on rank 0, on one process. Collective over all ranks.

    Returns the report on rank 0, None elsewhere. Raises UserError.
    """
    config = comparable(config)
    trainer: Trainer[MicroBatch] = Trainer(config, ctx)
    reference = one_process(config, ctx) if ctx.is_main else None
    if (ckpt := config.ckpt) is not None:
        for side in filter(None, (trainer, reference)):
            load_weights(tuple(side.shards), resolve(ckpt), side.ctx)
    return compare_trainers(trainer, reference, config.steps)


def one_process(config: ParityConfig, ctx: ParallelContext) -> Trainer:
    """Trainer of the full run on this rank alone, with the attention masks that the layout's kernels draw."""
    alone = replace(shape_context(), device=ctx.device)
    trainer: Trainer[MicroBatch] = Trainer(config.on_one_process(), alone)
    trainer.split_parts = tuple(range(ctx.tp.size))
    return trainer


def compare_trainers(trainer: Trainer, reference: Trainer | None, steps: int) -> Report | None:
    """Run both trainers and compare; `reference` and the report are rank 0's. Collective over all ranks."""
    config, precision = trainer.config, trainer.config.precision.dtype
    samples = train_dataset(config, steps * config.train.global_batch_size)
    sizes = {axis: getattr(trainer.ctx, axis).size for axis in AXES}
    report = None if reference is None else Report(sizes, config.optimizer.eps, is_exact=config.exact > 0)
    with trainer.batches(samples) as local_batches, (reference or trainer).batches(samples) as full_batches:
        for _, local, full in zip(range(steps), local_batches, full_batches, strict=False):
            record, lr = record_step(trainer, local, precision)
            reference_record = None if reference is None else record_step(reference, full, precision)[0]
            contents = exchange.Ranks.of(trainer.ctx).gather_bytes(record.to_bytes())
            if report is not None and reference_record is not None:
                coordinates = product(*map(range, sizes.values()))
                ranks = dict(zip(coordinates, map(Record.of_bytes, contents), strict=True))
                report.add(reference_record, ranks, lr)
    return report


def record_step(trainer: Trainer, batches: Sequence[MicroBatch], precision: str) -> tuple[Record, float]:
    """Train a step. Returns its record, where weights are views of live ones, and its learning rate."""
    step, record = trainer.step, Record(precision=precision)
    parts = trainer.compute_gradients(batches)
    for shard in trainer.shards:
        if (grad := shard.parameter.grad) is not None:  # divide out the loss scale of half precision
            unscaled = shard.without_padding(grad) / trainer.scaler.scale
            record.tensors[Key(step, "gradient", shard.name)] = unscaled.cpu()
    outcome = trainer.clip_and_update(parts)
    for kind, value in ("loss", trainer.mean_loss(outcome)), ("norm", float(outcome.grad_norm.item())):
        record.tensors[Key(step, kind, kind)] = torch.tensor(value, dtype=torch.float64)
    for shard in trainer.shards:
        record.offsets[shard.name] = shard.offset
        if not (precision in NARROW and shard.name.endswith(LOADS)):
            weight = shard.without_padding(shard.parameter.detach())
            record.tensors[Key(step, "weight", shard.name)] = weight.cpu()
    return record, outcome.lr


def changed_bits(reference: Record, ranks: Ranks) -> str:
    """First tensor with other bits on a rank than on one process, in words; empty if there is none."""
    for key, full in reference.tensors.items():
        for record in ranks.values():
            if (part := record.tensors.get(key)) is None:
                continue
            if bits_of(part) != bits_of(region_at(full, record.offsets.get(key.name, ()), part.shape)):
                return key.words
    return ""


def record_digest(record: Record, previous: str = "") -> str:
    """SHA-256 of the previous digest, and of names and bits of a record."""
    digest = hashlib.sha256(previous.encode())
    for key, x in record.tensors.items():
        digest.update(f"{key.kind} {key.name}\n".encode() + bits_of(x))
    return f"sha256:{digest.hexdigest()}"


def bits_of(x: Tensor) -> bytes:
    return x.double().contiguous().numpy().tobytes()  # a wider format is exact


def shared_verdict(report: Report | None, ctx: ParallelContext) -> Verdict:
    """Verdict on rank 0's report, on every rank. Collective."""
    verdict = None if report is None else list(astuple(judge(report)))
    return Verdict(*exchange.Ranks.of(ctx).broadcast(verdict))


def judge(report: Report) -> Verdict:
    if report.blind:
        sentence = f"{report.blind} is not finite on one process either; nothing after it counts"
        return Verdict("UNDECIDED", sentence, "in float16 set a lower precision.initial_loss_scale")
    if report.is_exact and report.changed:
        return Verdict("DIFFERENT", f"the first bits that differ are of {report.changed}", EXACT_HINT)
    if report.finding is not None:
        finding = report.finding
        suffix = f"; {report.wrong - 1} more tensors of that step differ" if report.wrong > 1 else ""
        hint = f"{finding.cause}: {finding.sentence}"
        return Verdict("DIFFERENT", f"first at {finding.where}{suffix}", hint)
    if report.torn:
        suffix = f", nor those of {len(report.torn) - 1} more" if len(report.torn) > 1 else ""
        sentence = f"the copies of {report.torn[0]} on several ranks are no longer equal bit for bit{suffix}"
        hint = "look at a reduction that reaches some copies only: they will drift apart"
        return Verdict("DIFFERENT", sentence, hint)
    if report.is_exact:
        steps, tensors = len(report.lrs), len(report.differences)
        return Verdict("EQUAL bit for bit", f"{tensors} tensors of {steps} steps, {report.digest}")
    losses = max(d.difference for d in report.of("loss"))
    gradients = max(d.relative for d in report.of("gradient"))
    weights = max(d.relative for d in report.of("weight", len(report.lrs)))
    weight_text = f"{weights:.1e} of what the learning rate moves them"
    sentence = (
        f"losses to {losses:.1e}, gradients to {gradients:.1e} of the largest of each, weights to "
        + (weight_text if any(report.lrs) else "the last bit, as every learning rate is 0")
        + (f"; {report.replicated} parameters held in copies, all bit-equal" if report.replicated else "")
    )
    return Verdict("EQUAL", sentence)
