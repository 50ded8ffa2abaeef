"""Launches of a training step on a fake GPU, and the processor time in which the host makes them.

    python scripts/fake_gpu.py --no-arithmetic -- scripts/gpu/fake/launches.py

GPT-2 1.2B, one micro-batch of 8 × 1,024 tokens in bf16, as gpu_check.py measures it. A GPU hides the host's
time as long as its own is longer. One line for each setting; products are those of matrices and attention.
"""

import ctypes
import sys
import time
from dataclasses import replace
from statistics import median

import torch

from gpu.shapes import Change, SpeedTrainee, freed, gpt2, spec_of
from mlm.runs.config import PretrainConfig

WARM_UP, STEPS = 2, 5


def as_shipped(config: PretrainConfig) -> PretrainConfig:
    return config


def replayed(config: PretrainConfig) -> PretrainConfig:
    return replace(config, cuda_graphs=True)


SETTINGS: tuple[tuple[str, str, float, Change], ...] = (
    ("compile=false", "mlm", 0.0, as_shipped),
    ("compile=true", "mlm-compiled", 0.0, as_shipped),
    ("cuda_graphs=true", "mlm-compiled", 0.0, replayed),
    ("compile=false, dropout 0.1", "mlm", 0.1, as_shipped),
    ("compile=true, dropout 0.1", "mlm-compiled", 0.1, as_shipped),
)


def measure(name: str, dropout: float, change: Change, *, quick: bool) -> tuple[int, int, float]:
    """Launches and products of a step, and the median of its milliseconds of processor time."""
    counted = ctypes.CDLL("libcuda.so.1")
    counted.fake_launches.restype = counted.fake_products.restype = ctypes.c_long
    shape = gpt2("1.2b", quick=quick, batch_size=8, dropout=dropout)
    with freed("cuda"):
        trainee = SpeedTrainee(name, spec_of(shape, "cuda"), torch.device("cuda", 0), change)
        for n in range(WARM_UP):
            trainee.step(n)
        times = []
        for n in range(STEPS):
            before = counted.fake_launches(), counted.fake_products()
            begin = time.process_time()
            trainee.step(n)
            times.append(time.process_time() - begin)
        found = counted.fake_launches() - before[0], counted.fake_products() - before[1]
        del trainee
    return *found, 1e3 * median(times)


def main() -> int:
    quick = "--quick" in sys.argv
    for words, name, dropout, change in SETTINGS:
        launches, products, ms = measure(name, dropout, change, quick=quick)
        print(f"{words}: {launches} launches, {products} products, {ms:.1f} ms of the host", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
