"""Training speed, MFU and memory of one model, by micro-batch size until memory is out, compiled or not."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from bench.ranks import WARM_UP_STEPS, synchronise, time_steps
from bench.shapes import Shape
from bench.stats import Spread

from gpu.child import Case
from gpu.facts import compiler_problem, measured_peak, sheet_peak
from gpu.shapes import Change, SpeedTrainee, freed, gpt2, spec_of
from gpu.waits import device_of
from mlm.tracking.peak import memory_bytes

SAMPLES, SAMPLE_S = 3, 0.4
FIRST = {"124m": 16, "355m": 8, "774m": 4, "1.2b": 4, "2.5b": 2}
"""Smallest micro-batch size measured; each next one is twice as large."""
MOST = 512
GAIN = 1.01
"""A larger micro-batch is the better one if it is so many times as fast."""
OUT_OF_MEMORY = "out of memory"


def run_model(case: Case, name: str, *, dropouts: Sequence[float] = (0.0,), longer: bool = False) -> None:
    """Eager at every size that fits, then compiled at the best; with dropout and with S=2048 where asked."""
    measure = partial(measure_shape, case)
    sizes = sizes_of(case, name)
    for dropout in dropouts:
        shape = gpt2(name, quick=case.quick, dropout=dropout)
        best = measure(shape, sizes, compiled=False)
        if best == 0:
            return
        if case.is_cuda and (problem := compiler_problem()):
            case.note(f"not compiled: {problem}")
        elif case.is_cuda or name == "124m":  # compiling for a CPU takes minutes: once in a rehearsal
            measure(shape, [best], compiled=True)
        sizes = [max(1, best // 2), best]  # masks take memory too
    if longer:
        measure(gpt2(name, quick=case.quick, seq_length=2048), sizes_of(case, name)[:3], compiled=False)


def sizes_of(case: Case, name: str) -> list[int]:
    sizes = [FIRST[name]]
    while sizes[-1] < MOST:
        sizes.append(2 * sizes[-1])
    return [1, 2] if case.quick else sizes


def measure_shape(case: Case, shape: Shape, sizes: Sequence[int], *, compiled: bool) -> int:
    """A row for each size until memory is out; return the best size, 0 if none fits."""
    best, speed = 0, 0.0
    with freed(case.device):
        if compiled:
            torch._dynamo.config.automatic_dynamic_shapes = False  # every size gets kernels of its own
        try:
            trainee = SpeedTrainee(
                "mlm-compiled" if compiled else "mlm",
                spec_of(replace(shape, batch_size=sizes[0]), case.device),
                device_of(case),
            )
        except torch.OutOfMemoryError:
            case.row("speed", **labels(shape, sizes[0], compiled), result=OUT_OF_MEMORY)
            return 0
        for size in sizes:
            tokens_per_s = measure_size(case, trainee, size, compiled)
            if tokens_per_s is None:
                break
            if tokens_per_s > speed * GAIN:
                best, speed = size, tokens_per_s
        del trainee
    return best


def measure_changed(
    case: Case,
    shape: Shape,
    words: str,
    change: Change,
    *,
    compiled: bool,
    micro_batches: int = 1,
) -> None:
    with freed(case.device):
        spec, name = spec_of(shape, case.device), "mlm-compiled" if compiled else "mlm"
        trainee = SpeedTrainee(name, spec, device_of(case), change, micro_batches)
        measure_size(case, trainee, shape.batch_size, compiled, words)
        del trainee


def labels(shape: Shape, size: int, compiled: bool) -> dict[str, object]:
    return {
        "model": shape.name,
        "S": shape.seq_length,
        "micro-batch": size,
        "dropout": shape.dropout,
        "compiled": compiled,
    }


def measure_size(
    case: Case, trainee: SpeedTrainee, size: int, compiled: bool, words: str = ""
) -> float | None:
    """Tokens/s at one micro-batch size; None if it cannot run, which is a row as well."""
    named = labels(trainee.spec.shape, size, compiled) | ({"settings": words} if words else {})
    begin = time.perf_counter()
    try:
        trainee.use(size)
        time_steps(trainee, 0, WARM_UP_STEPS)
        warm_up_s = time.perf_counter() - begin
        if case.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        steps = max(1, round((0.01 if case.quick else SAMPLE_S) / time_steps(trainee, 0, 1)))
        times = [time_steps(trainee, n * steps, steps) for n in range(SAMPLES)]
        host_s = host_time(trainee)
    except Exception as error:
        if is_out_of_memory(error):
            trainee.clear()
            case.row("speed", **named, result=OUT_OF_MEMORY)
            return None
        if not compiled:  # no compiler on the machine, say: the rest is worth having
            raise
        case.problem(f"compiled {trainee.spec.shape.name}: {type(error).__name__}: {first_line(error)}")
        return None
    spread = Spread.of(times)
    tokens_per_s = trainee.micro_batches * trainee.spec.shape.tokens_per_step / spread.median
    flops = tokens_per_s * trainee.flops_per_token()
    peaks = {"MFU, measured peak": measured_peak(case), "MFU, data sheet": sheet_peak(case)}
    case.row(
        "speed",
        **named,
        result="ok",
        **{
            "tokens/s": tokens_per_s,
            "TFLOP/s": flops / 1e12,
            **{name: flops / peak if peak else "" for name, peak in peaks.items()},
            "step ms": 1e3 * spread.median,
            "spread": (max(times) - min(times)) / spread.median,
            "host ms": 1e3 * host_s,
            "memory GB": memory_bytes(trainee.device) / 1e9,
            "reserved GB": torch.cuda.max_memory_reserved() / 1e9 if case.is_cuda else "",
            "warm-up s": warm_up_s,
        },
    )
    return tokens_per_s


def is_out_of_memory(error: Exception) -> bool:
    """True for PyTorch's error and for those of libraries and of the compiler that mean the same."""
    text = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in text or "ALLOC_FAILED" in text


def host_time(trainee: SpeedTrainee) -> float:
    """Seconds until the host has launched one step: near the step's time, the device may wait for the host.

    A device queues about a thousand launches, after which the host waits for it.
    """
    synchronise(trainee.device)
    begin = time.perf_counter()
    trainee.step(0)
    seconds = time.perf_counter() - begin
    synchronise(trainee.device)
    return seconds


def first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]


run_124m = partial(run_model, name="124m")
run_355m = partial(run_model, name="355m")
run_774m = partial(run_model, name="774m")
run_1_2b = partial(run_model, name="1.2b", dropouts=(0.0, 0.1))
run_2_5b = partial(run_model, name="2.5b", longer=True)
