"""Worth of each choice of kernels: the 1.2B step as shipped, and with one setting changed at a time.

Sums over micro-batches need several in a step: they have a row of their own to compare with.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from gpu.child import Case
from gpu.facts import compiler_problem
from gpu.shapes import Change, gpt2
from gpu.speed import first_line, measure_changed

MICRO_BATCH, SEVERAL = 8, 4


def precision(**changed: str) -> Change:
    return lambda config: replace(config, precision=replace(config.precision, **changed))  # type: ignore[arg-type]


def settings(**changed: Any) -> Change:
    return lambda config: replace(config, **changed)


AS_SHIPPED = settings()


@dataclass(frozen=True)
class Switch:
    """A step under other settings."""

    words: str
    change: Change = AS_SHIPPED
    compiled: bool = True
    micro_batches: int = 1


SWITCHES = (  # the most valuable first: the step's time may end before the last
    Switch("as shipped"),
    Switch("compile=false", compiled=False),
    Switch("cuda_graphs=true", settings(cuda_graphs=True)),
    Switch("4 micro-batches", micro_batches=SEVERAL),
    Switch(
        "4 micro-batches fuse_accumulation=false", settings(fuse_accumulation=False), micro_batches=SEVERAL
    ),
    Switch(
        "recompute=budget recompute_budget=0.5",
        lambda config: replace(config, parallel=replace(config.parallel, recompute="budget")),
    ),
    Switch("attention=flash", settings(attention="flash")),
    Switch("attention=cudnn", settings(attention="cudnn")),
    Switch("precision=fp8", precision(dtype="fp8")),
    Switch("precision.cast=use", precision(cast="use")),
    Switch("compile=false precision.cast=use", precision(cast="use"), compiled=False),
    Switch(
        "compile=false 4 micro-batches fuse_accumulation=false",
        settings(fuse_accumulation=False),
        compiled=False,
        micro_batches=SEVERAL,
    ),
    Switch("compile=false 4 micro-batches", compiled=False, micro_batches=SEVERAL),
    Switch("deterministic=true", settings(deterministic=True)),
)


def run(case: Case) -> None:
    """A row each; one that fails is a problem and does not end the others."""
    can_compile = case.is_cuda and not compiler_problem()
    shape = gpt2("1.2b", quick=case.quick, batch_size=2 if case.quick else MICRO_BATCH)
    for switch in SWITCHES:
        if switch.compiled and case.is_cuda and not can_compile:
            continue
        try:
            measure_changed(
                case,
                shape,
                switch.words,
                switch.change,
                compiled=switch.compiled and can_compile,
                micro_batches=switch.micro_batches,
            )
        except (RuntimeError, ValueError) as error:
            case.problem(f"{switch.words}: {type(error).__name__}: {first_line(error)}")
        finally:
            torch.use_deterministic_algorithms(False)
