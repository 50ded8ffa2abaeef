"""One training step of each precision against the same step in float64 on the CPU: loss, every gradient.

Initial weights and samples are functions of the seed, so both sides have the same. Three further steps
compare losses, which see the optimizer, clipping and the loss scale of the device. Of a mixture the narrow
formats choose other experts where two are almost equal: there the products of experts are compared alone.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import yaml
from bench.equality import Reference
from torch import Tensor

from gpu.child import Case
from gpu.facts import compiler_problem
from gpu.shapes import loader_of
from mlm.cli.compose.composition import load_config
from mlm.data.sampler import MicroBatch
from mlm.optim.precision import DTYPES
from mlm.parallel.expert.experts import grouped_linear
from mlm.parallel.matmul import GroupedRows
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import PretrainConfig
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError
from mlm.verify.verdict import FLOOR, TOLERANCES

STEPS = 4
SAMPLES, MICRO_BATCH = 16, 8
EXPERTS_BOUND = 2**-7
"""Of a product of bf16 inputs, rounded to bf16 once, as a fraction of the largest."""
LATER = 10
"""Bound of later losses, in units of the first's: weights have moved by then."""
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
KINDS = {"gpt2": PRECISIONS, "bert": PRECISIONS, "llama": PRECISIONS[:-1], "mixtral": PRECISIONS[:2]}
"""Precisions of each family."""
NARROW_FLOOR = 1e-2
"""FLOOR of `mlm parity` for tf32 and half precision. Gradients of a BERT's sentence order are sums that
cancel to 2e-3 of the model's largest, so that they hold a fifth of rounding."""


SETTINGS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))


def config_of(kind: str, precision: str, words: str = "", *, quick: bool) -> PretrainConfig:
    """The run of a family with further settings."""
    line = f"{SETTINGS['models'][kind]} {SETTINGS['sizes']}".format(**SETTINGS["quick" if quick else "large"])
    line += f" {SETTINGS['trained']} precision.dtype={precision if precision in DTYPES else 'fp32'}"
    line += f" {words}" if "compile=" in words else f" compile=false {words}"
    config: PretrainConfig = load_config("pretrain", line.split())
    return config


def batches_of(config: PretrainConfig, *, pin_memory: bool = False) -> list[list[MicroBatch]]:
    with loader_of(config, STEPS, pin_memory=pin_memory) as loader:
        return list(loader)


def train(config: PretrainConfig, device: str) -> tuple[Reference, list[float]]:
    index = 0 if device == "cuda" else None
    trainer: Trainer[MicroBatch] = Trainer(config, ParallelContext(device=torch.device(device, index)))
    losses, first = [], None
    for batches in batches_of(config):
        parts = trainer.compute_gradients(batches)
        if first is None:
            first = Reference(float(parts[: trainer.objective.num_losses].sum()), gradients_of(trainer))
        losses.append(trainer.mean_loss(trainer.clip_and_update(parts)))
    assert first is not None
    return first, losses


def gradients_of(trainer: Trainer[MicroBatch]) -> dict[str, Tensor]:
    """Gradients by name in float64 on the CPU, without padding and loss scale."""
    return {
        shard.name: (shard.without_padding(grad) / trainer.scaler.scale).detach().double().cpu()
        for shard in trainer.shards
        if (grad := shard.parameter.grad) is not None
    }


def run(case: Case) -> None:
    if case.is_cuda:
        torch.cuda.set_device(0)
    for kind, precisions in KINDS.items():
        expected = train(config_of(kind, "fp64", quick=case.quick), "cpu")
        for precision in precisions if case.is_cuda else [p for p in precisions if p in ("fp32", "bf16")]:
            compare(case, kind, precision, *expected)
        for words in SETTINGS["switches"].get(kind, ()):
            if "compile" in words and (not case.is_cuda or compiler_problem()):
                continue  # compiling for a CPU takes minutes
            compare(case, kind, "bf16", *expected, words=words)
    # training as it is by default: with dropout of hidden states, whose masks are the same everywhere, as
    # those of attention's kernels are not, and compiled
    dropout = "model.hidden_dropout=0.1"
    expected = train(config_of("gpt2", "fp64", dropout, quick=case.quick), "cpu")
    for compiled in ("false", "true") if case.is_cuda and not compiler_problem() else ("false",):
        compare(case, "gpt2", "bf16", *expected, words=f"{dropout} compile={compiled}")
    # Muon's update of matrices, whose iterations are in bf16 on a GPU unless told otherwise
    expected = train(config_of("gpt2", "fp64", "optimizer.kind=muon", quick=case.quick), "cpu")
    for precision, dtype in (("fp32", "fp32"), ("bf16", "auto")):
        words = f"optimizer.kind=muon optimizer.muon.dtype={dtype}"
        compare(case, "gpt2", precision, *expected, words=words)
    experts(case)


def experts(case: Case) -> None:
    """Products of experts in bf16, one kernel for all of them on a GPU: output and both gradients."""
    generator = torch.Generator().manual_seed(1)
    counts = [37, 0, 1, 218]  # unequal, none, one
    rows, weights, dy = (
        torch.randn(size, generator=generator).bfloat16()
        for size in ((sum(counts), 256), (len(counts), 512, 256), (sum(counts), 512))
    )
    parts = []
    for device, dtype in (("cpu", torch.float64), (case.device, torch.bfloat16)):
        leaves = [leaf.to(device, dtype).requires_grad_() for leaf in (rows, weights)]
        y = grouped_linear(*leaves, GroupedRows(counts))
        y.backward(dy.to(device, dtype))
        parts.append([part.detach().double().cpu() for part in (y, *(leaf.grad for leaf in leaves))])
    for name, expected, found in zip(("output", "input gradient", "weight gradient"), *parts, strict=True):
        by = float((found - expected).abs().max() / expected.abs().max())
        case.row("products of experts in bf16", of=name, **{"differs by": by, "allowed": EXPERTS_BOUND})
        if not by <= EXPERTS_BOUND:
            case.problem(f"products of experts, {name}: differs by {by:.1e}, allowed {EXPERTS_BOUND:.0e}")


def compare(
    case: Case,
    kind: str,
    precision: str,
    reference: Reference,
    expected_losses: Sequence[float],
    *,
    words: str = "",
) -> None:
    """One precision, with further settings: a row, and a problem where it differs by more than its bounds."""
    name = " ".join(filter(None, (kind, precision, words)))
    try:
        found, losses = train(config_of(kind, precision, words, quick=case.quick), case.device)
    except (RuntimeError, UserError) as error:
        case.problem(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
        return
    bounds, differences = TOLERANCES[precision], differences_of(found.gradients, reference.gradients)
    floor = FLOOR if precision in ("fp64", "fp32") else NARROW_FLOOR
    least = floor * max(largest for _, largest, _ in differences)
    by, worst = max((off / max(largest, least), name) for name, largest, off in differences)
    first = abs(found.loss - reference.loss)
    later = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True))
    case.row(
        "against float64 on the CPU",
        model=kind,
        precision=precision,
        settings=words,
        loss=found.loss,
        **{
            "loss differs by": first,
            "allowed": bounds.loss,
            "worst gradient by": by,
            "of": worst,
            "allowed there": bounds.gradient,
            "later losses by": later,
        },
    )
    if not (first <= bounds.loss and by <= bounds.gradient and later <= LATER * bounds.loss):
        case.problem(
            f"{name}: the loss differs by {first:.1e} (allowed {bounds.loss:.0e}), the gradient of {worst} "
            f"by {by:.1e} ({bounds.gradient:.0e}), later losses by {later:.1e} ({LATER * bounds.loss:.0e})"
        )


def differences_of(
    found: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> list[tuple[str, float, float]]:
    """Of each gradient: its name, its largest element, the largest difference (infinite without it)."""
    out = []
    for name, expected in reference.items():
        gradient = found.get(name, torch.full_like(expected, torch.inf))
        off = (gradient - expected).abs().nan_to_num(nan=torch.inf)
        out.append((name, float(expected.abs().amax()), float(off.amax())))
    return out
