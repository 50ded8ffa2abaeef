"""The device and its machine: what they are, and the peaks that speeds are stated against."""

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import torch
from bench.machine import gpu_facts, machine_facts, timed

from gpu.child import Case
from mlm.tracking.peak import table_peak

QUERY = (
    "name,driver_version,pstate,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,"
    "memory.total,memory.used,ecc.mode.current,compute_mode,persistence_mode"
)
PACKAGES = ("torch", "numpy", "triton", "transformers", "pydantic")
PRODUCTS = (
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (16384, 6144, 1536),  # the MLP of GPT-2 1.2B at 16 sequences
    (16384, 50304, 1536),  # its logits
)
"""(rows, outputs, inputs)."""
BEST_S, SUSTAINED_S = 0.4, 2.0


def run(case: Case) -> None:
    machine(case)
    if case.is_cuda:
        smi(case, "before")
    products(case)
    if case.is_cuda:
        smi(case, "after the products")


def machine(case: Case) -> None:
    facts = machine_facts(PACKAGES) | {
        "/dev/shm GiB": free_gib(Path("/dev/shm")),
        "scratch GiB": free_gib(case.scratch),
        "torch.compile": compiler_problem() or "has what it needs",
    }
    if case.is_cuda:
        p = torch.cuda.get_device_properties(0)
        facts |= gpu_facts() | {
            "compute capability": f"{p.major}.{p.minor}",
            "multiprocessors": p.multi_processor_count,
            "GPU memory GiB": round(p.total_memory / 2**30, 1),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
            "cuDNN": torch.backends.cudnn.version(),
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        }
    for name, value in facts.items():
        case.row("facts", fact=name, value="not installed" if value is None else str(value))


def compiler_problem() -> str:
    """Why torch.compile cannot work on a GPU here; empty if it can."""
    if os.environ.get("MLM_FAKE_GPU_ARITHMETIC") == "1":
        return "a fake GPU computes nothing that is compiled"
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "no C compiler, which triton's launchers are built with"
    return "" if find_spec("triton") else "triton is not installed"


def free_gib(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 2**30:.1f}"
    except OSError as error:
        return f"{error.strerror}"


def smi(case: Case, when: str) -> None:
    command = ["nvidia-smi", "--id=0", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        case.note(f"nvidia-smi {when}: {error}")
        return
    values = (word.strip() for word in done.stdout.splitlines()[0].split(","))
    case.row("nvidia-smi", when=when, **dict(zip(QUERY.split(","), values, strict=False)))


@torch.no_grad()
def products(case: Case) -> None:
    """FLOP/s of x @ w^T on random data: the best of many, and of the largest the mean of two seconds."""
    device = torch.device(case.device)
    for unit, dtype in (("bf16", torch.bfloat16), ("tf32", torch.float32), ("fp32", torch.float32)):
        if unit == "tf32" and not case.is_cuda:
            continue
        torch.set_float32_matmul_precision("high" if unit == "tf32" else "highest")
        sheet = table_peak(torch.cuda.get_device_name(), unit) if case.is_cuda else None
        for m, n, k in [(256, 256, 256)] if case.quick else PRODUCTS:
            x, w = (torch.randn(rows, k, device=device).to(dtype) for rows in (m, n))
            multiply = partial(torch.mm, x, w.t(), out=torch.empty(m, n, dtype=dtype, device=device))
            timed(multiply, device, 3)
            best = min(repeated(multiply, device, 0.01 if case.quick else BEST_S))
            flops = 2 * m * n * k
            values: dict[str, object] = {
                "unit": unit,
                "m, n, k": f"{m}, {n}, {k}",
                "best TFLOP/s": flops / best / 1e12,
            }
            if m == n == k == 8192 or case.quick:
                seconds = 0.01 if case.quick else SUSTAINED_S
                count = max(1, int(seconds / best))
                values["sustained TFLOP/s"] = flops * count / timed(multiply, device, count) / 1e12
            if sheet is not None:
                values["data sheet"] = sheet.flops / 1e12
            case.row("products", **values)
    torch.set_float32_matmul_precision("highest")


def repeated(run: Callable[[], object], device: torch.device, seconds: float) -> list[float]:
    end, times = perf_counter() + seconds, [timed(run, device)]
    while perf_counter() < end:
        times.append(timed(run, device))
    return times
