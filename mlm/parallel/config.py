"""Settings of the parallel layout and of experts, and the label of unscored tokens: without torch."""

import math
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

from mlm.config.fields import POSITIVE, Aliases, Bound, OnlyIf
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
Schedule = Literal["1f1b", "gpipe", "zb_h1"]
Zero = Annotated[Literal[0, 2, 3], Aliases("zero_stage")]
ZeroReduce = Literal["last", "every"]
Recompute = Literal["none", "selective", "full", "budget"]
Budget = Bound(lambda x: 0 < x < 1, "above 0 and below 1")
EXPERTS = OnlyIf("num_experts")
IGNORE_INDEX = -100
"""Label of a token without a loss (the value of PyTorch and of `transformers`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionScores:
    """Scores of a layer's attention: how q k^T becomes them, and which of them a query sees."""

    window: int = 0
    """Tokens that each attends to, itself included; 0 for all before it."""
    scale: float | None = None
    """Factor of q k^T; None for 1 / sqrt(head_dim)."""
    softcap: float = 0.0
    """Scores s become softcap * tanh(s / softcap) (arXiv:2408.00118, section 2); 0 for none."""

    def factor(self, head_dim: int) -> float:
        return 1 / math.sqrt(head_dim) if self.scale is None else self.scale

    def hides(self, length: int) -> bool:
        """True if a token of a sequence of `length` does not see all before it."""
        return 0 < self.window < length


PLAIN_SCORES = AttentionScores()


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
    expert_tp: Annotated[int | None, POSITIVE, Aliases("expert_tensor_parallel_size")] = None
    """Ranks that split each expert: null takes tp, 1 leaves experts whole (sequence_parallel=true then lets
    each tp rank send its own tokens)."""
    pp: PipelineSize = 1
    """Pipeline-parallel size, p: ranks that hold consecutive layers. At most model.num_layers."""
    vp: VirtualSize = 1
    """Virtual stages (chunks) per pipeline rank, v; more than 1 interleaves the schedule."""
    dp: Annotated[int | None, POSITIVE, Aliases("data_parallel", "data_parallel_size")] = None
    """Data-parallel size, d: replicas. null takes world size / (tp * cp * pp)."""
    sequence_parallel: bool = False
    """Cut activations outside the tensor-parallel regions along the sequence too (arXiv:2205.05198)."""
    tp_overlap: Annotated[int | None, POSITIVE] = None
    """Parts of a sequence, communicated over tp while others are multiplied; 1 leaves it whole. null takes 2
    on GPUs with sequence_parallel=true, else 1."""
    pipeline: Schedule = "1f1b"
    """Pipeline schedule. 1f1b interleaves when vp > 1; zb_h1 puts weight gradients into the bubble."""
    zero: Zero = 0
    """Sharded over dp * cp replicas: 0 nothing, 2 optimizer state and reduced gradients, 3 weights too."""
    zero_reduce: Annotated[ZeroReduce, OnlyIf("zero")] = "last"
    """zero=2|3: reduce-scatter gradients in the last micro-batch of a step, until which the whole gradient is
    kept, or in every micro-batch, which keeps 1/dp of it."""
    recompute: Annotated[Recompute, Aliases("recompute_granularity")] = "none"
    """Activations that backward recomputes: selective the attention matrices, full each layer, budget what
    the compiler chooses of a layer (compile=true)."""
    recompute_budget: Annotated[float, Budget, OnlyIf("recompute", "budget")] = 0.5
    """Of budget: activations that a compiled layer may keep, over those between full and none."""

    @property
    def replica(self) -> int:
        """Ranks of one data-parallel replica."""
        return self.tp * self.cp * self.pp

    @property
    def described(self) -> str:
        """`tp=2 pp=1 zero=2`: these two sizes, and what else is not as on one process."""
        plain, chosen = asdict(ParallelConfig()), asdict(self)
        return format_settings({k: v for k, v in chosen.items() if k in ("tp", "pp") or v != plain[k]})


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSettings:
    """Choice of the experts of each token, and balance of their loads (router.py)."""

    num_experts: int = 0
    """Experts of each layer, E, in place of its MLP; 0 for a dense model. A multiple of ep."""
    experts_per_token: Annotated[int, EXPERTS] = 2
    """Experts that each token goes through, k."""
    router_scores: Annotated[str, EXPERTS] = "softmax"
    """Scores of experts from their logits: softmax, or sigmoid (arXiv:2412.19437, section 2.1.2)."""
    router_normalise: Annotated[bool, EXPERTS] = True
    """Divide the weights of a token's experts by their sum."""
    router_scale: Annotated[float, EXPERTS] = 1.0
    """Factor of those weights."""
    router_groups: Annotated[int, EXPERTS] = 1
    """Groups of consecutive experts, of which each token chooses some first (arXiv:2412.19437)."""
    router_top_groups: Annotated[int, EXPERTS] = 1
    """Groups that a token's experts are of."""
    router_group_best: Annotated[int, EXPERTS] = 2
    """Best experts of a group whose scores, summed, rank it: 2 in DeepSeek-V3, 1 in DeepSeek-V2
    (arXiv:2405.04434, section 2.1.2)."""
    router_bias: Annotated[bool, EXPERTS] = False
    """Add a bias to the scores for the choice alone; balance=bias has one too."""
    router_logit_bias: Annotated[bool, EXPERTS] = False
    """Learned biases of the router's logits, as gpt-oss."""
    balance: Annotated[str, EXPERTS] = "none"
    """What keeps the loads of experts even: none, bias (arXiv:2408.15664), or a loss of the loads of each
    sequence (arXiv:2412.19437), of the global_batch before (arXiv:2501.11873), or of the micro_batch, which
    makes training depend on the layout."""
    balance_rate: Annotated[float, OnlyIf("balance", "bias")] = 0.001
    """Of bias: its step after each global batch."""
    balance_coefficient: Annotated[float, OnlyIf("balance", "sequence", "global_batch", "micro_batch")] = 0.01
    """Of the losses: their coefficient."""
    z_loss: Annotated[float, EXPERTS] = 0.0
    """Coefficient of the squared logarithm of the router's partition function (arXiv:2202.08906)."""
    capacity_factor: Annotated[float, EXPERTS] = 0.0
    """In pretraining, tokens of a sequence that an expert takes, over its even share of them: later ones pass
    it by (arXiv:2101.03961, section 2.2). 0 takes all, as evaluation, generation and finetuning do anyway."""

    @property
    def has_router_bias(self) -> bool:
        return self.num_experts > 0 and (self.router_bias or self.balance == "bias")
