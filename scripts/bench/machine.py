"""The machine: what it is, what its matrix products reach at best, and whether it is still the same."""

import math
import os
import platform
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from bench.spec import Spec
from mlm.parallel.matmul import product
from mlm.plan.hardware import cpu_name

PROBE_S = 0.005
"""Seconds one run of the bracketing product lasts, about."""
PROBE_RUNS = 3
"""Runs of which the fastest counts: less than one turn of a busy system's scheduler each."""
PROBE_SIZE = {"cpu": 384, "cuda": 4096}
PEAK_SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
PEAK_S = 0.4
"""Seconds each candidate for the peak is repeated for."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
REPOSITORY = Path(__file__).resolve().parents[2]


class Probe:
    """A fixed float32 matrix product: always the same work, so that its time shows a change of the machine.

    On a CPU its time is processor time, which other jobs lengthen only as they lengthen a contender's: by the
    cache, the memory and the clock that they share. Of one thread: several spin while they wait for each
    other, which would count.
    """

    def __init__(self, spec: Spec) -> None:
        self.device = torch.device(spec.device)
        self.clock = time.thread_time if spec.device == "cpu" else time.perf_counter
        size = PROBE_SIZE[spec.device]
        self.a = torch.ones(size, size, device=self.device)
        self.out = torch.mm(self.a, self.a)
        self.repeats = 1
        once = min(self._run() for _ in range(5))
        self.repeats = max(1, math.ceil(PROBE_S / once))
        self.times: list[float] = []

    def __call__(self, seconds: float = 0.0) -> float:
        """Return the time of the fastest of PROBE_RUNS runs, or of as many as fit into `seconds`."""
        begin, fastest, runs = time.perf_counter(), math.inf, 0
        while runs < PROBE_RUNS or time.perf_counter() < begin + seconds:
            fastest, runs = min(fastest, self._run()), runs + 1
        self.times.append(fastest)
        return fastest

    def _run(self) -> float:
        with one_thread():
            return timed(
                lambda: torch.mm(self.a, self.a, out=self.out), self.device, self.repeats, clock=self.clock
            )


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def timed(
    run: Callable[[], object],
    device: torch.device,
    repeats: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Seconds of `repeats` runs, the device synchronised at both ends."""
    synchronise(device)
    begin = clock()
    for _ in range(repeats):
        run()
    synchronise(device)
    return clock() - begin


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.no_grad()
def measure_peak_flops(spec: Spec, seconds: float = PEAK_S) -> dict[str, float]:
    """Best FLOP/s of square products in the dtype of the benchmark, by library and size.

    torch.mm is what every contender gets; mlm.parallel.matmul.product may choose another library. The time of
    one CPU thread is processor time, which other jobs do not interrupt.
    """
    device, best = torch.device(spec.device), {}
    clock = time.process_time if (spec.device, spec.threads) == ("cpu", 1) else time.perf_counter
    for size in PEAK_SIZES[spec.device]:
        a = torch.randn(size, size, device=device).to(DTYPES[spec.dtype])
        for name, multiply in (("torch.mm", torch.mm), ("mlm product", product)):
            once = partial(timed, partial(multiply, a, a), device, clock=clock)
            fastest, end = once(), time.perf_counter() + seconds
            while time.perf_counter() < end:
                fastest = min(fastest, once())
            best[f"{name} {size}"] = 2 * size**3 / fastest
    return best


def machine_facts(packages: Sequence[str]) -> dict[str, object]:
    """Settings that a measurement depends on, for its result file; no path and no host name."""
    versions: dict[str, str | None] = dict.fromkeys(packages)
    for name in packages:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "commit": commit_of(REPOSITORY),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        **versions,
    }


def gpu_facts() -> dict[str, object]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "fp32_precision": torch.backends.cuda.matmul.fp32_precision,
    }


PEERS = {"nanogpt": "model.py"}
"""The file of each checkout that holds its model."""


def cpu_model() -> str:
    """The processor's name and its vector extensions that matter here."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(errors="replace") if info.exists() else ""
    flags = set(re.findall(r"\b(?:avx2|avx512f|avx512_bf16|amx_bf16)\b", text))
    return f"{cpu_name()} ({' '.join(sorted(flags)) or 'no AVX2'})"


def commit_of(folder: Path) -> str:
    git = ["git", "-C", str(folder)]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        )
        status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + (" with changes" if status.stdout.strip() else "")


def status_bytes(key: str) -> int:
    """A size from /proc/self/status."""
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None, f"no {key} in /proc/self/status"
    return int(found[1]) * 1024


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return int(s.getsockname()[1])
