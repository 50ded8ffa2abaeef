"""Peak FLOP/s of a device, and the memory in use."""

import re
import resource
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from mlm.optim.precision import DTYPES
from mlm.parallel.matmul import product

TABLE: tuple[tuple[str, dict[str, float]], ...] = (
    # Pattern of torch.cuda.get_device_name and dense TFLOP/s; the first match counts. half: bf16 and fp16
    # with fp32 accumulation on tensor cores. tf32: fp32 products if torch may use TF32; fp32: if it may not.
    # NVIDIA prints data-centre figures "with sparsity" since the A100: the dense ones here are half of them.
    # Whitepapers "NVIDIA Tesla V100 GPU Architecture" and "Turing": no bf16 before Ampere.
    (r"V100S", {"fp16": 130, "fp32": 16.4, "fp64": 8.2}),
    (r"V100-PCIE", {"fp16": 112, "fp32": 14, "fp64": 7}),
    (r"V100", {"fp16": 125, "fp32": 15.7, "fp64": 7.8}),
    (r"T4\b", {"fp16": 65, "fp32": 8.1}),
    # Datasheets of the A100 (SXM and PCIe alike), A40, A10, RTX A6000; whitepaper "GA102" for the 3090.
    (r"A[18]00(?!\d)", {"half": 312, "tf32": 156, "fp32": 19.5, "fp64": 19.5}),
    (r"A40\b", {"half": 149.7, "tf32": 74.8, "fp32": 37.4}),
    (r"A10\b", {"half": 125, "tf32": 62.5, "fp32": 31.2}),
    (r"RTX A6000\b", {"half": 154.8, "tf32": 77.4, "fp32": 38.7}),
    (r"RTX 3090$", {"half": 71, "tf32": 35.6, "fp32": 35.6}),
    # Datasheets of the H100 and H200 (fp64 on tensor cores); the H800 differs in its links and fp64 only.
    (r"H100 PCIe", {"fp8": 1513, "half": 756, "tf32": 378, "fp32": 51, "fp64": 51}),
    (r"H[12]00 NVL", {"fp8": 1671, "half": 835, "tf32": 417.5, "fp32": 60, "fp64": 60}),
    (r"H100\b|G?H200\b", {"fp8": 1978.9, "half": 989.4, "tf32": 494.7, "fp32": 66.9, "fp64": 66.9}),
    (r"H800$", {"half": 989.4, "tf32": 494.7, "fp32": 66.9}),
    (r"H20\b", {"half": 148, "tf32": 74, "fp32": 44}),
    # Datasheets of GB200 NVL72 and HGX B200, figures of one GPU.
    (r"GB200", {"fp8": 5000, "half": 2500, "tf32": 1250, "fp32": 80, "fp64": 40}),
    (r"B200", {"fp8": 4500, "half": 2250, "tf32": 1100, "fp32": 75, "fp64": 37}),
    # Datasheets of the L4, L40S and RTX 6000 Ada; whitepapers "Ada" and "RTX Blackwell" for GeForce cards.
    (r"L4\b", {"half": 121, "tf32": 60, "fp32": 30.3}),
    (r"L40S", {"fp8": 733, "half": 362, "tf32": 183, "fp32": 91.6}),
    (r"RTX 6000 Ada", {"fp8": 728.5, "half": 364.2, "tf32": 182.1, "fp32": 91.1}),
    (r"RTX 4090$", {"fp8": 330.3, "half": 165.2, "tf32": 82.6, "fp32": 82.6, "fp64": 1.29}),
    (r"RTX 5090$", {"half": 209.5, "tf32": 104.8, "fp32": 104.8}),
    # Datasheet "AMD Instinct MI300X Accelerator", which prints dense figures; all on matrix cores.
    (r"MI300X", {"fp8": 2614.9, "half": 1307.4, "tf32": 653.7, "fp32": 163.4, "fp64": 163.4}),
)

MEASURE_S = 0.3  # seconds of matrix products on a CPU


@dataclass(frozen=True)
class DevicePeak:
    """Peak FLOP/s of one device, the base of MFU, and its source."""

    flops: float
    label: str


def peak_flops(device: torch.device, dtype: str, override_tflops: float | None = None) -> DevicePeak | None:
    """Return the dense peak of `device` in `dtype` (a name of precision.dtype); None for an unknown GPU.

    `override_tflops` (dist.peak_tflops, TFLOP/s) wins. A CPU is measured once, for 0.3 s with this process's
    threads; let other ranks on its host wait meanwhile.
    """
    if override_tflops:
        return DevicePeak(override_tflops * 1e12, f"dist.peak_tflops={override_tflops:g}")
    if device.type == "cpu":
        flops = measure_matmul(dtype, torch.get_num_threads())
        return DevicePeak(flops, f"measured {dtype} matmul {flops / 1e12:.3g}")
    if device.type != "cuda":
        return None
    tf32 = dtype == "fp32" and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return table_peak(torch.cuda.get_device_name(device), "tf32" if tf32 else dtype)


def table_peak(name: str, unit: str) -> DevicePeak | None:
    """Return the peak of the GPU that torch calls `name`, in `unit` (a dtype, or tf32); None if unknown."""
    if re.search(r"\bMIG\b|Laptop|Max-Q", name):  # a slice of the chip, or one on a lower clock
        return None
    figures = next((figures for pattern, figures in TABLE if re.search(rf"\b({pattern})", name)), {})
    if "half" in figures:
        figures = {**figures, "bf16": figures["half"], "fp16": figures["half"]}
    if unit not in figures:
        return None
    return DevicePeak(figures[unit] * 1e12, f"{name} {unit} dense {figures[unit]:g}")


@cache
def measure_matmul(dtype: str, threads: int) -> float:
    """Return the best FLOP/s of a square matrix product on this CPU, by PyTorch's faster library.

    `threads` only keys the cache.
    """
    size = 1024 if dtype in ("fp32", "fp64") else 512  # half formats may be emulated, a hundred times slower
    a = torch.ones(size, size, dtype=DTYPES[dtype])
    best = float("inf")
    for multiply in (torch.mm, product):
        multiply(a, a)  # warm-up
        end = time.perf_counter() + MEASURE_S / 2
        while True:
            begin = time.perf_counter()
            multiply(a, a)
            best = min(best, time.perf_counter() - begin)
            if time.perf_counter() >= end:
                break
    return 2 * size**3 / best


STATM = Path("/proc/self/statm")


def memory_bytes(device: torch.device) -> int:
    """Return the peak bytes that this process allocated on a CUDA device; on CPU its resident set now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if not STATM.exists():  # macOS, which counts the peak in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(STATM.read_text().split()[1]) * resource.getpagesize()
