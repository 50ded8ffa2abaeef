"""What each choice of kernels is worth: the 1.2B step as shipped, and with one setting changed at a time."""

from dataclasses import replace

import torch

from gpu.child import Case
from gpu.facts import compiler_problem
from gpu.shapes import Change, gpt2
from gpu.speed import first_line, measure_changed

MICRO_BATCH = 8


def precision(**changed: str) -> Change:
    """Other settings of `precision`."""
    return lambda config: replace(config, precision=replace(config.precision, **changed))  # type: ignore[arg-type]


CHANGES: tuple[tuple[str, Change, bool], ...] = (  # words, change, compiled
    ("as shipped", lambda config: config, True),
    ("compile=false", lambda config: config, False),
    ("compile=false precision.cast=use", precision(cast="use"), False),
    ("precision.cast=use", precision(cast="use"), True),
    ("attention=flash", lambda config: replace(config, attention="flash"), True),
    ("attention=cudnn", lambda config: replace(config, attention="cudnn"), True),
    ("precision=fp8", precision(dtype="fp8"), True),
    ("deterministic=true", lambda config: replace(config, deterministic=True), True),
)


def run(case: Case) -> None:
    """A row each; one that fails is a problem and does not end the others."""
    can_compile = case.is_cuda and not compiler_problem()
    shape = gpt2("1.2b", quick=case.quick, batch_size=2 if case.quick else MICRO_BATCH)
    for words, change, compiled in CHANGES:
        if compiled and case.is_cuda and not can_compile:
            continue
        try:
            measure_changed(case, shape, words, change, compiled=compiled and can_compile)
        except (RuntimeError, ValueError) as error:
            case.problem(f"{words}: {type(error).__name__}: {first_line(error)}")
        finally:
            torch.use_deterministic_algorithms(False)
