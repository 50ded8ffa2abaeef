"""Settings of the parallel layout."""

from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from mlm.config.fields import POSITIVE, Aliases, OnlyIf
from mlm.util.errors import format_settings

TensorSize = Annotated[
    int, POSITIVE, Aliases("tensor_model_parallel_size", "tensor_parallel", "tensor_parallel_size")
]
PipelineSize = Annotated[
    int, POSITIVE, Aliases("pipeline_model_parallel_size", "pipeline_parallel", "pipeline_parallel_size")
]
VirtualSize = Annotated[int, POSITIVE, Aliases("virtual_pipeline_model_parallel_size")]
ContextSize = Annotated[
    int, POSITIVE, Aliases("context_parallel", "context_parallel_size", "ring_attention_size")
]
ExpertSize = Annotated[int, POSITIVE, Aliases("expert_model_parallel_size", "expert_parallel_size")]
ExpertTensorSize = Annotated[int, POSITIVE, Aliases("expert_tensor_parallel_size")]
DataSize = Annotated[int, POSITIVE, Aliases("data_parallel", "data_parallel_size")]
Schedule = Literal["1f1b", "gpipe", "zb_h1"]
Zero = Annotated[Literal[0, 2, 3], Aliases("zero_stage")]
ZeroReduce = Literal["last", "every"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Parallel degrees: tp * cp * pp * dp = world size (arXiv:2104.04473, section 3)."""

    tp: TensorSize = 1
    """Tensor-parallel size, t: ranks that split each layer. Must divide model.num_heads."""
    cp: ContextSize = 1
    """Context-parallel size, c: ranks that split each sequence. 2 * cp must divide data.seq_length."""
    ep: ExpertSize = 1
    """Expert-parallel size: ranks that split a layer's experts, folded of the cp * dp replicas (with
    expert_tp=1 of tp * cp * dp). Must divide their number and model.options.num_experts."""
    expert_tp: ExpertTensorSize | None = None
    """Ranks that split each expert: null takes tp, 1 leaves experts whole (sequence_parallel=true then lets
    each tp rank send its own tokens)."""
    pp: PipelineSize = 1
    """Pipeline-parallel size, p: ranks that hold consecutive layers. At most model.num_layers."""
    vp: VirtualSize = 1
    """Virtual stages (chunks) per pipeline rank, v; more than 1 interleaves the schedule."""
    dp: DataSize | None = None
    """Data-parallel size, d: replicas. null takes world size / (tp * cp * pp)."""
    sequence_parallel: bool = False
    """Cut activations outside the tensor-parallel regions along the sequence too (arXiv:2205.05198)."""
    tp_overlap: Annotated[int, POSITIVE] = 1
    """Parts of a sequence, communicated over tp while others are multiplied; 1 leaves it whole."""
    pipeline: Schedule = "1f1b"
    """Pipeline schedule. 1f1b interleaves when vp > 1; zb_h1 puts weight gradients into the bubble."""
    zero: Zero = 0
    """Sharded over dp * cp replicas: 0 nothing, 2 optimizer state and reduced gradients, 3 weights too."""
    zero_reduce: Annotated[ZeroReduce, OnlyIf("zero")] = "last"
    """zero=2|3: reduce-scatter gradients in the last micro-batch of a step, until which the whole gradient is
    kept, or in every micro-batch, which keeps 1/dp of it."""
    recompute: Annotated[Recompute, Aliases("recompute_granularity")] = "none"
    """Activations that backward recomputes: selective the attention matrices, full each layer."""

    @property
    def replica(self) -> int:
        """Ranks of one data-parallel replica."""
        return self.tp * self.cp * self.pp

    @property
    def described(self) -> str:
        """`tp=2 pp=1 zero=2`: these two sizes, and what else is not as on one process."""
        plain, chosen = asdict(ParallelConfig()), asdict(self)
        return format_settings({k: v for k, v in chosen.items() if k in ("tp", "pp") or v != plain[k]})
