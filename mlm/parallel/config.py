"""Settings of the parallel layout."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from mlm.config.fields import Forbid


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Parallel degrees: tp * pp * dp = world size (arXiv:2104.04473, section 3)."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    tp: int = 1
    """Tensor-parallel size, t: ranks that split each layer. Must divide model.num_heads."""
    pp: int = 1
    """Pipeline-parallel size, p: ranks that hold consecutive layers. At most model.num_layers."""
    vp: int = 1
    """Virtual stages (chunks) per pipeline rank, v; more than 1 interleaves the schedule."""
    dp: int | None = None
    """Data-parallel size, d: replicas. null takes world size / (tp * pp)."""
    sequence_parallel: bool = False
    """Cut activations outside the tensor-parallel regions along the sequence too (arXiv:2205.05198)."""
    pipeline: Literal["1f1b", "gpipe", "zb_h1"] = "1f1b"
    """Pipeline schedule. 1f1b interleaves when vp > 1; zb_h1 puts weight gradients into the bubble."""
    zero: Literal[0, 2, 3] = 0
    """Sharded over dp replicas: 0 nothing, 2 optimizer state and reduced gradients, 3 weights too."""
    zero_reduce: Literal["last", "every"] = "last"
    """zero=2|3: reduce-scatter gradients in the last micro-batch of a step, until which the whole gradient is
    kept, or in every micro-batch, which keeps 1/dp of it."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that backward recomputes: selective the attention matrices, full each layer."""
