"""The same step by other libraries: the rounds of scripts/bench_train.py, with fewer of them."""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from bench import machine
from bench.compare import Plan, run_shape
from bench.spec import Spec

from gpu.child import Case
from gpu.facts import compiler_problem
from gpu.shapes import gpt2, spec_of
from mlm.util.errors import UserError

PAIRS, ATTEMPTS, SECONDS = 4, 8, 4.0
SIZES = (("124m", 16), ("355m", 8))
"""Model, micro-batch."""


def run_eager(case: Case) -> None:
    """Without compilation."""
    compare(case, *SIZES[0], ["mlm", "transformers", "transformers-gelu", "nanogpt", "megatron"])
    compare(case, *SIZES[1], ["mlm", "transformers", "nanogpt", "megatron"])


def run_compiled(case: Case) -> None:
    """Each layer compiled, in all of them."""
    if not case.is_cuda:
        case.note("compiling for a CPU takes minutes: left out of a rehearsal")
        return
    if problem := compiler_problem():
        case.note(f"not compiled: {problem}")
        return
    name, size = SIZES[0]
    compare(case, name, size, ["mlm-compiled", "transformers-compiled", "nanogpt-compiled"])


def compare(case: Case, name: str, size: int, contenders: list[str]) -> None:
    """One shape; a contender that does not compute the same is a problem; the others continue."""
    shape = gpt2(name, quick=case.quick, batch_size=2 if case.quick else size)
    spec = replace(spec_of(shape, case.device, "fp32" if case.quick else "bf16"), peers=case.peers)
    if case.quick:
        machine.PEAK_SIZES = {case.device: (256,)}
    able = [one for one in contenders if is_there(case, one, noted=name == SIZES[0][0])]
    try:
        results = [run_shape(spec, plan_of(able, case), print)]
    except (UserError, RuntimeError) as error:
        case.note(f"{shape.name}: {first_line(error)}: each in turn")
        results = [result for one in able[1:] if (result := alone(case, spec, [able[0], one])) is not None]
    for result in results:
        report(case, shape.name, result)


def alone(case: Case, spec: Spec, pair: list[str]) -> dict[str, Any] | None:
    """One pair; None and a problem if it cannot be compared."""
    try:
        return run_shape(spec, plan_of(pair, case), print)
    except (UserError, RuntimeError) as error:
        case.problem(f"{spec.shape.name}: {first_line(error)}")
        return None


def is_there(case: Case, contender: str, *, noted: bool) -> bool:
    """True if the contender can run here; else a note."""
    missing = ""
    if contender.startswith("transformers") and find_spec("transformers") is None:
        missing = "transformers is not installed"
    if contender.startswith("megatron") and find_spec("megatron") is None:
        missing = "Megatron Core is not installed"
    if contender.startswith("nanogpt") and "nanogpt" not in case.peers:
        missing = "no checkout of nanoGPT (--peers nanogpt=PATH)"
    if missing and noted:
        case.note(f"{contender}: {missing}")
    return not missing


def plan_of(contenders: list[str], case: Case) -> Plan:
    """All of them against the first."""
    return Plan(
        whole=tuple(contenders),
        split=(),
        tp=1,
        pairs=1 if case.quick else PAIRS,
        limit=4 if case.quick else ATTEMPTS,
        seconds=0.0 if case.quick else SECONDS,
        memory=True,
    )


def report(case: Case, shape: str, result: dict[str, Any]) -> None:
    """Rows of one shape."""
    ratios = {series["other"]: series["tokens_ratio"] for series in result["series"]}
    reference = result["series"][0]["reference"] if result["series"] else ""
    for name, entry in result["contenders"].items():
        ratio = ratios.get(name)
        case.row(
            "training step",
            model=shape,
            contender=name,
            **{
                "tokens/s": entry["tokens_per_s"]["median"] if "tokens_per_s" in entry else "not timed",
                "MFU, measured peak": entry.get("mfu", ""),
                f"speed of {reference} over it": ratio["median"] if ratio else "",
                "quartiles": f"{ratio['low']:.3f} to {ratio['high']:.3f}" if ratio else "",
                "memory above weights GB": (entry["memory"] or {}).get("peak_above_bytes", 0) / 1e9,
                "worst gradient by": entry["gradient_error"],
                "build s": entry["build_s"],
                "warm-up s": entry["warm_up_s"],
            },
        )
    for doubt in result["doubts"]:
        if "a trial" not in doubt:
            case.note(f"{shape}: {doubt}")


def first_line(error: BaseException) -> str:
    """Of an error that came from another process the last line, of others the first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    traced = any(line.startswith("Traceback") for line in lines)
    if isinstance(error, torch.OutOfMemoryError) or "OutOfMemoryError" in str(error):
        return "out of memory"
    return (lines[-1] if traced else lines[0])[:300] if lines else type(error).__name__
