"""A profile of training steps: device time by class of kernel, idle time, launches, and host time."""

import gzip
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench.ranks import WARM_UP_STEPS, time_steps
from torch.profiler import ProfilerActivity, profile

from gpu.child import Case
from gpu.shapes import SpeedTrainee, gpt2, spec_of
from gpu.speed import OUT_OF_MEMORY, host_time
from gpu.waits import device_of

STEPS = 2
MICRO_BATCHES = (16, 8, 4)
"""The first that fits is profiled."""
LARGEST_TRACE = 5 << 20
TRACE = "trace.json.gz"
LISTED = 12
"""Kernels listed: those with most device time."""
CLASSES: tuple[tuple[str, str], ...] = (
    ("communication", r"nccl|gloo|all_?reduce|all_?gather|reduce_?scatter"),
    ("optimizer", r"adam"),
    ("attention", r"flash|fmha|sdpa|attention|mem_eff"),
    ("matmul", r"gemm|nvjet|cutlass|cublas|xmma|splitk|\b(add)?b?mm\b|matmul|linear"),
    ("copy or cast", r"memcpy|memset|copy|cast|_to_\b|catarray|\bfill|zero_|fillfunctor"),
    ("reduction", r"reduce|softmax|layer_?norm|gammabeta|lpnorm|triton_(red|per)|\bsum\b|\bnorm\b|amax|scan"),
    ("elementwise", r"elementwise|vectorized|triton_poi|multi_tensor|dropout|gelu|\b(mul|add|sub|div)_?\b"),
    ("index", r"index|gather|scatter|embedding"),
)
"""Class -> pattern of kernel names; the first that matches counts."""


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel on the device, times in µs."""

    name: str
    start: float
    end: float


def class_of(name: str) -> str:
    """The class of a kernel."""
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name, re.IGNORECASE)), "other")


def busy_time(kernels: Iterable[Kernel]) -> float:
    """Time in which any kernel runs: streams overlap."""
    total, until = 0.0, float("-inf")
    for kernel in sorted(kernels, key=lambda k: k.start):
        total += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return total


def run(case: Case) -> None:
    """Profile the 1.2B step at the largest micro-batch that fits."""
    for size in (2,) if case.quick else MICRO_BATCHES:
        try:
            return profile_size(case, size)
        except torch.OutOfMemoryError:
            case.note(f"micro-batch {size}: {OUT_OF_MEMORY}")
            torch.cuda.empty_cache()
    case.problem("no micro-batch size fits")


def profile_size(case: Case, size: int) -> None:
    """Profile steps of one micro-batch size."""
    shape = gpt2("1.2b", quick=case.quick, batch_size=size)
    trainee = SpeedTrainee("mlm", spec_of(shape, case.device), device_of(case))
    time_steps(trainee, 0, WARM_UP_STEPS)
    seconds, host_s = time_steps(trainee, 0, STEPS), host_time(trainee)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if case.is_cuda else [])]
    with profile(activities=activities) as profiler:
        time_steps(trainee, 0, STEPS)
    kernels = kernels_of(profiler.events() or (), on_device=case.is_cuda)
    case.note(f"{shape.describe()}, bf16, {STEPS} steps; without the profiler {1e3 * seconds:.1f} ms a step")
    if not kernels:
        case.problem("the profiler saw no kernel")
        return
    report(case, kernels, seconds, host_s)
    keep_trace(case, profiler)


def kernels_of(events: Sequence[Any], *, on_device: bool) -> list[Kernel]:
    """Kernels and copies of a profile; on a CPU the operations that call no other."""
    wanted = torch.autograd.DeviceType.CUDA if on_device else torch.autograd.DeviceType.CPU
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == wanted
        and not getattr(event, "is_user_annotation", False)  # a range, such as that of the optimizer
        and not event.name.startswith(("ProfilerStep", "Optimizer.", "## "))
        and (on_device or ("::" in event.name and not event.cpu_children))
    ]


def report(case: Case, kernels: Sequence[Kernel], seconds: float, host_s: float) -> None:
    """Tables of one profile, per step."""
    times: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for kernel in kernels:
        times[kernel.name] += (kernel.end - kernel.start) / STEPS / 1e3
        counts[kernel.name] += 1
    by_class: defaultdict[str, list[str]] = defaultdict(list)
    for name in times:
        by_class[class_of(name)].append(name)
    total = sum(times.values())
    for kind, names in sorted(by_class.items(), key=lambda item: -sum(times[n] for n in item[1])):
        spent = sum(times[name] for name in names)
        case.row(
            "device time by class",
            kind=kind,
            **{"ms a step": spent, "share": spent / total, "launches": sum(counts[n] for n in names) / STEPS},
        )
    busy = busy_time(kernels) / STEPS / 1e3
    span = (max(k.end for k in kernels) - min(k.start for k in kernels)) / STEPS / 1e3
    case.row(
        "a step",
        **{
            "step ms": 1e3 * seconds,
            "device busy ms": busy,
            "idle share while profiled": 1 - busy / span,
            "idle share": max(0.0, 1 - busy / (1e3 * seconds)),
            "host ms": 1e3 * host_s,
            "launches": len(kernels) / STEPS,
        },
    )
    for name in sorted(times, key=lambda n: -times[n])[:LISTED]:
        case.row(
            "kernels with most time",
            kernel=name[:110],
            kind=class_of(name),
            **{"ms a step": times[name], "launches": counts[name] / STEPS},
        )


def keep_trace(case: Case, profiler: Any) -> None:
    """Keep the trace for chrome://tracing where it is small."""
    plain = case.scratch / "trace.json"
    profiler.export_chrome_trace(str(plain))
    packed = gzip.compress(plain.read_bytes(), 6)
    if len(packed) > LARGEST_TRACE:
        case.note(f"the trace has {len(packed) / 1e6:.1f} MB and is not kept")
        return
    Path(case.out, TRACE).write_bytes(packed)
    case.note(f"{TRACE}: {len(packed) / 1e6:.1f} MB")
