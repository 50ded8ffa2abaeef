"""Memory of a process: reuse of large blocks; PyTorch's errors for missing memory or kernels."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mlm.runs.config import PretrainConfig
from mlm.util.errors import UserError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
MISSING = {
    "No available kernel": "attention={attention} serves no such attention on this GPU; use attention=auto",
    "FlashAttention only supports": (
        "attention={attention}: this GPU has no flash kernel for packed sequences; use attention=auto"
    ),
    "does not have a deterministic implementation": (
        "deterministic={deterministic}: PyTorch has no kernel that repeats every bit for this run; use "
        "deterministic=false"
    ),
}
"""Words of PyTorch's errors for a missing kernel, and the messages in their place."""


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None


def reuse_large_blocks() -> bool:
    """Let glibc's malloc keep freed blocks of any size for the next allocation; True if it does.

    By default a tensor above a threshold is mapped on allocation and unmapped when freed, and the system
    zeroes all of its pages again at each step: 1.1 to 1.25 times the step time. Peak memory is the same.
    """
    libc, largest = _glibc(), 2**31 - 1
    if libc is None:
        return False
    mapped = libc.mallopt(M_MMAP_THRESHOLD, largest) or libc.mallopt(M_MMAP_THRESHOLD, 32 << 20)
    return bool(mapped and libc.mallopt(M_TRIM_THRESHOLD, largest))


def trim_memory() -> None:
    """Return freed memory that `reuse_large_blocks` keeps to the system, if possible.

    Blocks whose sizes change from step to step fragment memory: finetuning on RTE grew from 1 to 6 GB in 600
    steps.
    """
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


@contextmanager
def torch_errors_as_user_errors(config: PretrainConfig, length: str) -> Iterator[None]:
    """Turn errors for missing memory or a missing kernel into a UserError with a fix.

    `length` is the setting of a sample's length.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text, on_gpu = str(error), isinstance(error, torch.OutOfMemoryError)
        if on_gpu or isinstance(error, MemoryError) or "can't allocate memory" in text:
            size, parallel = config.train.micro_batch_size, config.parallel
            remedies = {
                "lower it": size > 1,
                "set recompute=full": parallel.recompute != "full",
                "set sequence_parallel=true": parallel.tp > 1 and not parallel.sequence_parallel,
                "set zero=3 and raise dp": parallel.zero < 3,
            }
            helping = [remedy for remedy, helps in remedies.items() if helps]
            problem = (
                f"train.micro_batch_size={size} is too much for the memory of "
                f"{'the GPU' if on_gpu else 'this host'}: "
                f"{', '.join([*helping, 'raise tp or pp', f'or lower {length}'])}"
            )
        else:
            template = next((problem for words, problem in MISSING.items() if words in text), None)
            if template is None:
                raise
            deterministic = str(config.deterministic).lower()
            problem = template.format(attention=config.attention, deterministic=deterministic)
        reason = f" ({text.splitlines()[0]})" if text else ""
        raise UserError(f"{problem}{reason}") from error
