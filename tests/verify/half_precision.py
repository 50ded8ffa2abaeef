"""Layouts in half precision, and the differences from one process that rounding explains.

Let g be a parameter's gradient in float64, h the one that one process computes in half precision, l the
layout's, and u the unit roundoff: 2^-8 in bfloat16, 2^-11 in float16. |h - g| is measured, for each parameter
and step: it is what the roundings of one pass through the network come to, cancellations included.

A layout computes in one of two ways:

- It reorders: stages, schedules, recomputation and replicas compute the numbers of half precision that one
  process does and add them up in float32 in another order. A sum of n <= 256 tokens is sqrt(n) 2^-24 = 2^-20
  off; where the terms cancel, as in the biases of keys, by the same share of |h - g|: 2^-16 sqrt(n) = 2^-12,
  of float16's 2^-9.
- It rounds: with tp = t the t terms of a sum are rounded each, with cp the results of blocks, with zero=2|3
  norms, tables and the gradients of a micro-batch, with ep an expert's gradient once for the rows of all
  ranks. l - g then is of the size of h - g, but of other signs;
  sums of up to 4 terms round 4 times where one process rounds once, which doubles it at most. So
  |l - h| <= |l - g| + |h - g| <= (2 + 1) |h - g|, and u |h| more for gradients that leave in half precision.

Losses are means over the scored tokens: each is off by up to u of itself, their mean by u / sqrt(tokens).
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from mlm.models.backbone import LearnedTable
from mlm.optim.config import OptimizerConfig, PrecisionConfig
from mlm.optim.precision import DTYPES
from mlm.parallel.mesh import ParallelContext
from mlm.training.observer import StepOutcome
from mlm.training.trainer import Trainer
from mlm.verify.config import ParityConfig, comparable
from mlm.verify.parity import Difference, Report, compare_trainers, one_process
from tests.ranks import run_on_ranks
from tests.verify.parity_layouts import Layout

ROUNDOFF = {"bf16": 2.0**-8, "fp16": 2.0**-11}
STEPS = 2
MOST_TOKENS = 256
"""Of a step, at any layout here."""


@dataclass(frozen=True)
class Half:
    """A comparison (rank 0's), and the parameters that hold nothing but numbers of half precision."""

    report: Report | None
    coarse_gradients: tuple[str, ...]
    coarse_weights: tuple[str, ...]


def config_of(layout: Layout) -> ParityConfig:
    """The tiny run, whose update is a smooth function of the gradient.

    With Adam's usual eps the first steps are the gradient's sign, which rounding decides for small ones.
    """
    optimizer = OptimizerConfig(lr=1e-3, eps=1e-2, clip_grad_norm=0.1)
    return comparable(replace(layout.config(STEPS), optimizer=optimizer))


def compare_half(
    ctx: ParallelContext, layout: Layout, plant: Callable[[Trainer], None] = lambda _: None
) -> Half:
    """Body of a rank: the layout, with what is planted in it, against one process of its precision."""
    config = config_of(layout)
    trainer = Trainer(config, ctx)
    plant(trainer)
    return compare_noting(config, trainer, one_process(config, ctx) if ctx.is_main else None)


def measure_rounding(ctx: ParallelContext, layout: Layout) -> Report:
    """Body of a rank: one process in the layout's precision against one in float64."""
    config = config_of(layout)
    exact = replace(config, precision=PrecisionConfig(dtype="fp64"))
    report = compare_noting(config, Trainer(config, ctx), Trainer(exact, ctx)).report
    assert report is not None
    return report


def compare_noting(config: ParityConfig, layout: Trainer, alone: Trainer | None) -> Half:
    half, coarse, update = DTYPES[config.precision.dtype], set[str](), layout.clip_and_update

    def noting(parts: Tensor) -> StepOutcome:  # the update overwrites gradients by clipped ones
        sums = (
            s for s in layout.shards if not isinstance(s.module, LearnedTable)
        )  # whose rows may be read once
        coarse.update(s.name for s in sums if _is_coarse(s.parameter.grad, half))
        return update(parts)

    layout.clip_and_update = noting  # type: ignore[method-assign]
    report = compare_trainers(layout, alone, config.steps)
    weights_in_half = tuple(s.name for s in layout.shards if _is_coarse(s.parameter, half))
    return Half(report, tuple(sorted(coarse)), weights_in_half)


def _is_coarse(x: Tensor | None, half: torch.dtype) -> bool:
    """True if x holds nothing but numbers of half precision, and enough of them for that to be no chance."""
    if x is None:
        return False
    values = x.detach()[x.detach() != 0]
    return values.numel() >= 64 and bool((values.to(half) == values).all())


def one_process_of(layout: Layout) -> Layout:
    """The same run on one process."""
    plain = Layout(micro_batches=layout.micro_batches * layout.dp)
    same = ("layers", "precision", "dropout", "documents", "bert", "llama", "seq")
    return replace(plain, **{name: getattr(layout, name) for name in same})


@cache
def rounding_of(alone: Layout) -> Report:
    """The differences |h - g| of one process."""
    report: Report = run_on_ranks(measure_rounding, alone)[0]
    return report


def problems(half: Half, layout: Layout, rounding: Report | None = None) -> Iterator[str]:
    """What rounding does not explain; `rounding` is that of one process."""
    if half.report is not None:
        yield from differences(half.report, layout, rounding or rounding_of(one_process_of(layout)))
    yield from (f"gradient in half precision: {name}" for name in half.coarse_gradients)
    yield from (f"weight in half precision: {name}" for name in half.coarse_weights)


def differences(report: Report, layout: Layout, scale: Report) -> Iterator[str]:
    """The differences of a report that are beyond what one process's, `scale`, allow."""
    u = ROUNDOFF[layout.precision]
    reorders = layout.tp == layout.cp == layout.ep == 1 and layout.zero == 0
    ordered = math.sqrt(MOST_TOKENS) * 2.0**-24
    of_scale, of_norm = (ordered / u, ordered) if reorders else (3.0, u)
    of_loss = ordered if reorders else u / math.sqrt(MOST_TOKENS / 4)

    def beyond(step: str, found: Sequence[Difference], rounding: Sequence[Difference]) -> Iterator[str]:
        for mine, error in zip(found, rounding, strict=True):
            limit = of_scale * max(error.distance, _of_namesakes(error, rounding)) + of_norm * mine.norm
            if not mine.distance <= limit:
                yield f"{step} of {mine.name}: {mine.distance:.2g} beyond {limit:.2g}"

    for step in range(1, STEPS + 1):
        gradients, errors = (each.of("gradient", step) for each in (report, scale))
        (loss,), (norm,) = report.of("loss", step), report.of("norm", step)
        if not loss.difference <= of_loss * loss.norm:
            yield f"loss {step}: {loss.difference:.2g}"
        yield from beyond(f"gradient {step}", gradients, errors)
        far, limit = (math.hypot(*(x.distance for x in each)) for each in (gradients, errors))
        whole = of_norm * norm.norm
        if not far <= of_scale * limit * (1 if reorders else 2 / 3) + whole:
            yield f"all gradients {step}: {far:.2g} beyond {limit:.2g}"
        if not norm.difference <= far + whole:
            yield f"gradient norm {step}: {norm.difference:.2g}"
    yield from beyond("weight", *(each.of("weight", STEPS) for each in (report, scale)))
    yield from (f"torn: {name}" for name in report.torn)


def _of_namesakes(error: Difference, all_errors: Sequence[Difference]) -> float:
    """The rounding expected of a parameter by that of all layers'.

    A vector of a few elements may happen to be exact on one process.
    """
    kind = error.name.split(".", 2)[-1]
    alike = [e for e in all_errors if e.name.split(".", 2)[-1] == kind]
    norm = math.hypot(*(e.norm for e in alike))
    return math.hypot(*(e.distance for e in alike)) / norm * error.norm if norm else 0.0


SCHEDULES: dict[str, dict[str, Any]] = {
    "none": {},
    "1f1b": {"pp": 2},
    "interleaved": {"pp": 2, "vp": 2},
    "zb_h1": {"pp": 2, "pipeline": "zb_h1"},
    "gpipe": {"pp": 2, "pipeline": "gpipe"},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "bert": {"bert": "post"},
    "llama": {"llama": "llama"},
    "qwen": {"llama": "qwen"},
}
SPLITS: dict[str, dict[str, Any]] = {
    "whole": {},
    "tp": {"tp": 2},
    "sp": {"tp": 2, "sequence_parallel": True},
}
AXES: dict[str, tuple[Any, ...]] = {
    "precision": ("bf16", "fp16"),
    "zero": (0, 2, 3),
    "zero_reduce": ("last", "every"),
    "family": tuple(FAMILIES),
    "schedule": tuple(SCHEDULES),
    "recompute": ("none", "selective", "full"),
    "cp": (1, 2),
    "split": tuple(SPLITS),
    "dp": (1, 2),
    "dropout": (0.0, 0.1),
    "documents": (False, True),
}
"""Values of a layout."""
PLAIN = ("precision", "zero", "zero_reduce", "recompute", "cp", "dp", "dropout", "documents")


def is_compatible(a: dict[str, Any], most_ranks: int) -> bool:
    """True if the values are compatible."""
    return (
        2 <= ranks_of(a) <= most_ranks
        and (a["zero"] == 0 or a["dp"] * a["cp"] > 1)
        and (a["zero"] > 0 or a["zero_reduce"] == "last")
        and (a["zero"] < 3 or a["schedule"] == "none")
        and (a["family"] != "bert" or (a["cp"] == 1 and not a["documents"]))
    )


def ranks_of(a: dict[str, Any]) -> int:
    """Number of ranks of a layout."""
    ranks: int = SCHEDULES[a["schedule"]].get("pp", 1) * SPLITS[a["split"]].get("tp", 1) * a["cp"] * a["dp"]
    return ranks


def layout_of(a: dict[str, Any]) -> Layout:
    """The layout of a value on each axis; of four micro-batches over all replicas."""
    own = {**SCHEDULES[a["schedule"]], **FAMILIES[a["family"]], **SPLITS[a["split"]]}
    return Layout(**{name: a[name] for name in PLAIN}, **own, micro_batches=4 // a["dp"])


def draw(size: int, count: int, *, most_ranks: int, candidates: int = 100) -> list[dict[str, Any]]:
    """Draw values of layouts: of some candidates that in which most new groups of `size` values meet.

    Ends where no group of the candidates is left, or at `count`.
    """
    generator, met, chosen = random.Random(0), set[tuple[Any, ...]](), list[dict[str, Any]]()
    while len(chosen) < count:
        drawn = [{k: generator.choice(v) for k, v in AXES.items()} for _ in range(10 * candidates)]
        valid = [a for a in drawn if is_compatible(a, most_ranks)][:candidates]
        best = max(valid, key=lambda a: len(groups(a, size) - met))
        if groups(best, size) <= met:
            break
        met |= groups(best, size)
        chosen.append(best)
    return chosen


def groups(a: dict[str, Any], size: int) -> set[tuple[Any, ...]]:
    """Every `size` values that occur together."""
    return set(combinations(a.items(), size))
