"""Specification of a contender, sent to the worker process that builds it, so plain data only."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch

from bench.shapes import Shape
from mlm.training.memory import reuse_large_blocks

Dtype = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Spec:
    """One benchmark: the same for all of its contenders."""

    shape: Shape
    device: Literal["cpu", "cuda"]
    dtype: Dtype
    threads: int
    """CPU threads of all processes of a contender together."""
    seed: int = 1234
    peers: Mapping[str, str] = field(default_factory=dict)
    """Name of a peer -> path of its checkout."""
    stock: bool = False
    """True if the program keeps its own optimizer and the system's allocator settings."""

    def of(self, contender: str) -> "Spec":
        """The same with the dtype and the settings that a contender's name ends in."""
        if "=" in contender:  # a layout
            return self
        _, *variants = contender.split("-")
        half, single = "bf16" in variants, "fp32" in variants
        dtype: Dtype = "bf16" if half else "fp32" if single else self.dtype
        return replace(self, dtype=dtype, stock="stock" in variants)

    def prepare_process(self, processes: int = 1) -> None:
        """Give this process its share of the threads, and the allocator's settings of `mlm pretrain`."""
        torch.set_num_threads(max(1, self.threads // processes))
        if not self.stock:
            reuse_large_blocks()
