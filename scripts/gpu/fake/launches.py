"""Launches of a training step on a fake GPU, and the processor time in which the host makes them.

    python scripts/fake_gpu.py --no-arithmetic -- scripts/gpu/fake/launches.py

GPT-2 1.2B, one micro-batch of 8 × 1,024 tokens in bf16, as gpu_check.py measures it. A GPU hides the host's
time as long as its own is longer. One line for each setting; products are those of matrices and attention.
"""

import ctypes
import sys
import time
from itertools import islice
from statistics import median

import torch

from gpu.shapes import freed, gpt2, loader_of
from gpu.speed import own_step
from mlm.cli.compose.composition import load_config

WARM_UP, STEPS = 2, 5
SETTINGS = (
    ("compile=false", 0.0),
    ("compile=true", 0.0),
    ("compile=true cuda_graphs=true", 0.0),
    ("compile=true cuda_graphs=stack", 0.0),
    ("compile=false", 0.1),
    ("compile=true", 0.1),
)
"""Words, and dropout."""


def measure(words: str, dropout: float, *, quick: bool) -> tuple[int, int, float]:
    """Launches and products of a step, and the median of its milliseconds of processor time."""
    counted = ctypes.CDLL("libcuda.so.1")
    counted.fake_launches.restype = counted.fake_products.restype = ctypes.c_long
    shape = gpt2("1.2b", quick=quick, batch_size=8, dropout=dropout)
    line = [*shape.split(), *words.split(), "data=synthetic", f"train.steps={WARM_UP + STEPS}"]
    with freed("cuda"):
        config = load_config("pretrain", line)
        step, times = own_step(config, torch.device("cuda", 0)), []
        with loader_of(config, WARM_UP + STEPS, pin_memory=True) as loader:
            for batches in islice(loader, WARM_UP):
                step(batches)
            for batches in loader:
                before = counted.fake_launches(), counted.fake_products()
                begin = time.process_time()
                step(batches)
                times.append(time.process_time() - begin)
        found = counted.fake_launches() - before[0], counted.fake_products() - before[1]
        del step
    return *found, 1e3 * median(times)


def main() -> int:
    quick = "--quick" in sys.argv
    for words, dropout in SETTINGS:
        launches, products, ms = measure(words, dropout, quick=quick)
        name = f"{words}, dropout {dropout}" if dropout else words
        print(f"{name}: {launches} launches, {products} products, {ms:.1f} ms of the host", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
