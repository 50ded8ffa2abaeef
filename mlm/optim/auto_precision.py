"""`precision=auto` and `default`: the number format in which this machine trains a model fastest."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

MIN_HIDDEN = 256
"""Narrower models spend their steps on casts and calls. On a Zen 5, layers x hidden: 2 x 64 takes 17.5 ms in
bfloat16 and 10.0 in float32; 4 x 256 takes 94.5 and 115."""
CPUINFO = Path("/proc/cpuinfo")
AMPERE = (8, 0)
"""Compute capability of the first GPUs that multiply bfloat16."""


class Gpu(NamedTuple):
    name: str
    capability: tuple[int, int]


def read_cpuinfo() -> str:
    return CPUINFO.read_text(errors="replace") if CPUINFO.exists() else ""


def has_fast_bfloat16(cpuinfo: str) -> bool:
    """True if a processor multiplies bfloat16 faster than float32, by the text of /proc/cpuinfo.

    True with tiles (AMX), and on AMD since Zen 4. Intel's AVX512-BF16 alone takes two cycles where a float32
    product takes one: 85 to 97 GFLOP/s against 114 to 154 on a core (PyTorch 2.13).
    """
    flags = next((line.split() for line in cpuinfo.splitlines() if line.startswith("flags")), [])
    return "amx_bf16" in flags or ("avx512_bf16" in flags and "AuthenticAMD" in cpuinfo)


def choose_precision(hidden_size: int | None, gpu: Gpu | None, cpuinfo: str) -> tuple[str, str]:
    """Return a value of precision.dtype, and the reason.

    `hidden_size` is None if only the checkpoint holds it, `gpu` if the model trains on a CPU; `cpuinfo` is
    the text of /proc/cpuinfo.
    """
    if gpu is not None:
        if gpu.capability >= AMPERE:
            return "bf16", f"{gpu.name} multiplies it"
        return "fp16", f"{gpu.name} multiplies no bfloat16"
    if not has_fast_bfloat16(cpuinfo):
        return "fp32", "this processor multiplies bfloat16 no faster"
    if hidden_size is not None and hidden_size < MIN_HIDDEN:
        return "fp32", f"faster than bf16 where model.hidden_size={hidden_size} is below {MIN_HIDDEN}"
    return "bf16", "this processor multiplies it faster than float32"


def settle_precision(values: dict[str, Any], first_gpu: Callable[[str], Gpu | None]) -> str | None:
    """Replace precision.dtype=auto or default in composed settings by a format; return what to print.

    A plan for GPUs takes the half format of its hardware. `first_gpu` returns this host's GPU for a value of
    dist.device. `default` is `auto` on a GPU, and fp32 on a CPU.
    """
    precision = values.get("precision")
    if not isinstance(precision, dict) or (choice := precision.get("dtype")) not in ("auto", "default"):
        return None
    model, hardware, dist = (_mapping(values.get(key)) for key in ("model", "hardware", "dist"))
    if hardware.get("device") == "gpu":
        dtype = "bf16" if "bf16" in _mapping(hardware.get("peak_tflops")) else "fp16"
        reason = f"{hardware.get('name')} multiplies it"
    else:
        hidden_size = model.get("hidden_size")
        gpu = first_gpu("cpu" if hardware else dist.get("device", "auto"))
        if choice == "default" and gpu is None:
            precision["dtype"] = "fp32"
            return None
        known_size = hidden_size if isinstance(hidden_size, int) else None
        dtype, reason = choose_precision(known_size, gpu, read_cpuinfo())
    precision["dtype"] = dtype
    return f"precision={choice}: {dtype}, as {reason}"


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
