"""`mlm parity`: compare a layout's training with that of one process, and judge the differences."""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryFile

import torch
from rich.table import Table

from mlm.checkpoint.native.save_load import read_manifest, resolve
from mlm.launch.devices import device_kind
from mlm.launch.environment import read_rank_place
from mlm.models.family import SHIPPED
from mlm.optim.config import OPTIMIZERS
from mlm.parallel.mesh import ParallelContext
from mlm.plan.layer_counts import counts_of
from mlm.plan.layout import PlannedLayout
from mlm.plan.memory import MemoryModel
from mlm.training.corpora import corpus_problems
from mlm.training.memory import reuse_large_blocks
from mlm.util.errors import CheckFailedError, UserError, writing_to
from mlm.util.results import result_problems
from mlm.util.system import available_memory
from mlm.util.terminal import add_row, progress_bar, table
from mlm.verify.compare import Difference, Report, StepReport, compare
from mlm.verify.config import ParityConfig, comparable, describe_layout
from mlm.verify.verdict import FLOOR, TOLERANCES, Tolerance, Verdict, write_and_show

RESULT = "parity.json"
SHOWN = 3
"""Parameters listed: those that differ most."""
ALIKE = 1e-6
"""Cosines this close to 1, and factors this close to each other, count as the same in a diagnosis."""


def preflight(config: ParityConfig) -> list[str]:
    """Problems that the named files and this host's memory show; called before any rank starts."""
    problems = corpus_problems(comparable(config))
    if config.ckpt is not None:
        try:
            read_manifest(resolve(config.ckpt))
        except UserError as error:
            problems += error.problems
    is_gpu = device_kind(config.dist) == "cuda"
    available = torch.cuda.get_device_properties(0).total_memory if is_gpu else available_memory()
    too_large = memory_problem(config, available)
    problems += result_problems(Path(config.out, RESULT))
    return [*problems, too_large] if too_large else problems


def memory_problem(config: ParityConfig, available: int) -> str | None:
    """Why the whole model does not fit beside its layout; None where it does, and for custom families."""
    if config.model.kind not in SHIPPED or (needed := needed_bytes(config)) <= available:
        return None
    return (
        f"model.num_layers={config.model.num_layers}: a model of {config.model.num_parameters() / 1e9:.2g} "
        f"billion parameters, whole in one process beside its layout, takes about {needed / 1e9:,.1f} GB of "
        f"the {available / 1e9:,.1f} GB there are; use fewer layers of the same shapes, or a smaller model=…"
    )


def needed_bytes(config: ParityConfig) -> float:
    """Memory of rank 0's whole model, and of the layout's ranks that share the same memory."""
    is_gpu, train = device_kind(config.dist) == "cuda", config.train
    memory = MemoryModel(counts_of(config, "gpu" if is_gpu else "cpu"))
    micro_batch, global_batch = train.micro_batch_size, train.global_batch_size
    whole = PlannedLayout(micro_batch=micro_batch, global_batch=global_batch)
    dp = config.parallel.dp or 1
    layout = PlannedLayout.of(config.parallel, dp=dp, micro_batch=micro_batch, global_batch=global_batch)
    place = read_rank_place(os.environ)
    ranks = layout.gpus if place is None else place.local_world_size
    split = memory.worst(layout).total * (1 if is_gpu else ranks)
    return memory.worst(whole).total + split


def run(config: ParityConfig, ctx: ParallelContext) -> None:
    """Compare; rank 0 prints tables and writes out/parity.json. Raises CheckFailedError if not equal."""
    if ctx.device.type == "cpu":
        reuse_large_blocks()
    out = Path(config.out, RESULT)
    if ctx.is_main:
        with writing_to(config.out):
            out.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=out.parent):  # a full disk is reported before all is computed
                pass
    with progress_bar("comparing", config.steps, shown=ctx.is_main) as advance:
        report = compare(config, ctx, lambda: advance(1))
    verdict = judge(report, config.precision.dtype, config.optimizer.kind)
    if ctx.is_main:
        layout = describe_layout(replace(config.parallel, dp=ctx.dp.size))
        numbers = {
            "layout": layout,
            "tolerance": asdict(TOLERANCES[config.precision.dtype]),
            **asdict(report),
        }
        tables = (table_of_steps(report), table_of_parameters(report))
        write_and_show(out, config, verdict, numbers, heading(config, layout), *tables)
    if not verdict.equal:
        raise CheckFailedError(f"{verdict.headline} ({out})")


def heading(config: ParityConfig, layout: str) -> str:
    """Return lines on what was compared."""
    model, train = config.model, config.train
    return (
        f"parity of {layout} with one process\n"
        f"{model.kind} {model.num_parameters() / 1e6:,.1f}M, {config.precision.dtype}, dropout "
        f"{max(model.hidden_dropout, model.attention_dropout):g}, {train.global_batch_size} × "
        f"{config.data.seq_length} tokens a step in micro-batches of {train.micro_batch_size}"
    )


def table_of_steps(report: Report) -> Table:
    """Return the losses and gradient norms."""
    columns = ("step#", "one process#", "layout#", "difference#", "norm#", "difference#")
    rows = table("losses and gradient norms", *columns)
    for step in report.steps:
        loss, norm = step.loss, step.grad_norm
        losses = (f"{loss.one_process:.10f}", f"{loss.layout:.10f}", f"{loss.difference:.1e}")
        off = "overflow" if is_skipped(step) else f"{norm.difference:.1e}"
        add_row(rows, step.step, *losses, f"{norm.one_process:.6g}", off)
    return rows


def table_of_parameters(report: Report) -> Table:
    """Return the parameters that differ most: gradients relative to their largest, weights to Σ lr."""
    rows = table("largest differences of a parameter", "", "parameter", "step#", "difference#", "relative#")
    gradients = [
        (by, gradient, step.step)
        for step in report.steps
        if not is_skipped(step)
        for gradient, by in zip(step.gradients, relative(step.gradients), strict=True)
    ]
    for by, gradient, step_number in sorted(gradients, key=lambda row: -row[0])[:SHOWN]:
        add_row(rows, "gradient", gradient.name, step_number, f"{gradient.difference:.1e}", f"{by:.1e}")
    sum_lr = sum(step.lr for step in report.steps)
    for weight in sorted(report.weights, key=lambda weight: -weight.difference)[:SHOWN]:
        by = in_units_of(sum_lr, weight.difference)
        add_row(
            rows, "weight", weight.name, len(report.steps), f"{weight.difference:.1e}", f"{by:.1e} of Σ lr"
        )
    return rows


def judge(report: Report, precision: str, optimizer: str = "adamw") -> Verdict:
    """The verdict on a comparison in the format `precision`, of runs with this optimizer.kind."""
    if all(is_skipped(step) for step in report.steps):
        return Verdict(
            "UNDECIDED", "nothing could be compared: on both sides every step's gradients overflow"
        )
    is_narrow = precision in ("bf16", "fp16", "fp8")
    first = next(_differences(report, TOLERANCES[precision], optimizer, is_narrow=is_narrow), None)
    return Verdict("EQUAL", _agreement(report)) if first is None else Verdict("DIFFERENT", *first)


def is_skipped(step: StepReport) -> bool:
    """True if both sides skipped the step because its gradients overflow float16."""
    return not (math.isfinite(step.grad_norm.one_process) or math.isfinite(step.grad_norm.layout))


def relative(gradients: Sequence[Difference]) -> list[float]:
    """Differences as fractions of the largest element of the same parameter, or of FLOOR of the largest."""
    floor = FLOOR * max((g.largest for g in gradients), default=0.0)
    return [g.difference / max(g.largest, floor) if g.largest or floor else g.difference for g in gradients]


def in_units_of(sum_lr: float, difference: float) -> float:
    """A difference of weights in units of the learning rates summed over steps, which may all be 0."""
    return difference / sum_lr if sum_lr else math.inf if difference else 0.0


def _differences(
    report: Report, tolerance: Tolerance, optimizer: str, *, is_narrow: bool
) -> Iterator[tuple[str, str]]:
    """Yield what is beyond the tolerance in the order of computation: a sentence and what to suspect.

    Loads of experts count in wide formats alone: rounding sends a token between experts that score alike to
    the other one.
    """
    sum_lr = 0.0
    for step in report.steps:
        yield from _differences_of_step(step, tolerance)
        sum_lr += step.lr
        weights = [weight for weight in step.weights if not (is_narrow and is_load(weight.name))]
        worst = max(weights, key=lambda weight: weight.difference, default=None)
        if worst is not None and not worst.difference <= tolerance.weight * sum_lr:
            yield (
                f"the weights of {worst.name} differ by {worst.difference:.2g} after step {step.step}, "
                f"{in_units_of(sum_lr, worst.difference):.2g} times what the learning rate moved them; "
                "gradients are equal",
                "suspect the counts of the experts' loads: over all ranks that hold other tokens, once a step"
                if is_load(worst.name)
                else "suspect the optimizer: its state, weight decay, or which parameters it holds"
                if optimizer in OPTIMIZERS.shipped
                else f"suspect optimizer.kind={optimizer}: an update of an element that reads other elements",
            )
    if report.torn:
        yield (
            f"the copies of {report.torn[0]} on several ranks are no longer equal bit for bit"
            + (f", nor those of {len(report.torn) - 1} more" if len(report.torn) > 1 else ""),
            "suspect a reduction that reaches some copies only: they will drift apart",
        )


def _differences_of_step(step: StepReport, tolerance: Tolerance) -> Iterator[tuple[str, str]]:
    limit = tolerance.gradient if step.step == 1 else tolerance.later
    by = dict(zip(step.gradients, relative(step.gradients), strict=True))
    wrong = [gradient for gradient in step.gradients if not by[gradient] <= limit]  # in the model's order
    loss, norm = step.loss, step.grad_norm
    if not loss.difference <= tolerance.loss:
        yield (
            f"the first difference is in the loss of step {step.step}: {loss.one_process:.10g} on one "
            f"process, {loss.layout:.10g} on the layout",
            _hint_of_loss(step, wrong),
        )
    if is_skipped(step):
        return
    if wrong:
        # backward begins at the end of the model: the last wrong one is the first it computed
        yield (
            f"the first difference is in the gradient of {wrong[-1].name} at step {step.step}: "
            f"{by[wrong[-1]]:.2g} of its largest element; {len(wrong)} of {len(by)} parameters differ",
            _hint_of_gradients(wrong, step.gradients),
        )
    if not norm.difference <= tolerance.norm * abs(norm.one_process):
        yield (
            f"the first difference is in the gradient norm of step {step.step}: {norm.one_process:.10g} on "
            f"one process, {norm.layout:.10g} on the layout; the gradients are equal",
            "suspect what counts in the norm: each part once over tp, pp and dp, and each expert",
        )


def _hint_of_loss(step: StepReport, wrong: Sequence[Difference]) -> str:
    if step.step > 1:
        return "gradients and weights of the steps before are equal: suspect the samples of this step"
    factor = common_factor(step.gradients)
    if factor is not None and wrong:
        return (
            f"all gradients are {factor:.6g} times those of one process: suspect what the loss is divided by"
        )
    return (
        "the forward pass differs: suspect how weights are split (the order of the qkv rows), a sum over tp, "
        "positions (learned or rotary positions, of tp and cp ranks too), dropout masks, the order in which "
        "tokens come back from experts, the biases of routers, which move once a step, the capacity of "
        "experts, which is of a whole sequence, or which samples each replica reads"
    )


def _hint_of_gradients(wrong: Sequence[Difference], gradients: Sequence[Difference]) -> str:
    factor = common_factor(gradients)
    if factor is not None and len(wrong) == len(gradients):
        return (
            f"all gradients are {factor:.6g} times those of one process: suspect what the loss is divided "
            "by, or a sum over dp or cp that is missing or made twice"
        )
    if [gradient.name for gradient in wrong] == [gradients[0].name]:
        return (
            "only the table that embedding and head share is wrong: suspect the sum over the first and the "
            "last stage"
        )
    if all(".mlp.experts." in gradient.name for gradient in wrong):
        return (
            "only experts are wrong: suspect the ranks that hold the same ones, over which alone their "
            "gradients are summed, and once"
        )
    if ".mlp.router." in wrong[-1].name:
        return (
            "the router is the first that is wrong: suspect a loss of balance (z-loss, loads), the order of "
            "a token's weights, or the sum of its gradient over the ranks that route other tokens"
        )
    if all(gradient.replicated for gradient in wrong):
        return (
            "only parameters that every tp rank holds, or several share, are wrong: suspect the sum of their "
            "gradients over tp, which sequence_parallel=true, norms of heads and shared key-value heads "
            "need, or a bias that each rank adds"
        )
    last = gradients.index(wrong[-1])
    if any(gradient not in wrong for gradient in gradients[:last]):
        return (
            "gradients before and after it are right, so backward through the layers is right: suspect how "
            "its own gradient is computed, kept or reduced"
        )
    if last == len(gradients) - 1:
        return (
            "everything is wrong: suspect where the backward pass begins, the loss and the head, or a sum "
            "over dp or cp that is missing"
        )
    return (
        f"{gradients[last + 1].name} is right and all before it is wrong: suspect what is done to the "
        "gradient of that layer's input (f, its sum over tp; its way to the stage before), or to that of "
        "keys and values (its sum over cp)"
    )


def is_load(name: str) -> bool:
    """True for state of a router that the loads of its experts move, and no gradient."""
    return name.endswith((".router.bias", ".router.load"))


def common_factor(gradients: Sequence[Difference]) -> float | None:
    """The number by which all gradients are those of one process multiplied; None where there is none."""
    factors = [gradient.factor for gradient in gradients]
    if not all(math.isfinite(factor) for factor in factors) or not factors:
        return None
    mean = sum(factors) / len(factors)
    same = all(abs(factor - mean) <= ALIKE * abs(mean) for factor in factors)
    return mean if same and all(gradient.cosine >= 1 - ALIKE for gradient in gradients) else None


def _agreement(report: Report) -> str:
    """The agreement in words."""
    losses = max(step.loss.difference for step in report.steps)
    gradients = max(by for step in report.steps if not is_skipped(step) for by in relative(step.gradients))
    weights = max(weight.difference for weight in report.weights)
    sum_lr = sum(step.lr for step in report.steps)
    moves = f"{in_units_of(sum_lr, weights):.1e} of what the learning rate moves them"
    rounding, copies = report.by_gradient, report.replicated
    return (
        f"losses to {losses:.1e}, gradients to {gradients:.1e} of the largest of each, weights to "
        + (moves if sum_lr else f"{weights:.1e}, as every learning rate is 0")
        + (f"; {rounding} elements compared by gradient alone, which is rounding" if rounding else "")
        + (f"; {copies} parameters held in copies, all bit-equal" if copies else "")
    )
