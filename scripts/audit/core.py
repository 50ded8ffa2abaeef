"""Megatron Core's GPT on CPUs over gloo, as subjects of `mlm audit`: healthy layouts, cases of issue #7452.

    mlm audit scripts/audit/core.py:label_smoothing --tp 2

Facts of https://github.com/NVIDIA/Megatron-LM/issues/7452 only; the cases here are written anew. Findings 1
and 2 are in Megatron Core 0.16.1, finding 3 is not; 4 to 11 are not tried: they need later versions,
Transformer Engine, or sequence parallelism, which its norms of PyTorch reject.
"""

import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mlm import AuditSubject

sys.path.append(str(Path(__file__).parents[1]))
from megatron_on_cpu import NO_DROPOUT, UNFUSED, replace_cuda

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about accelerators that are not here
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
    from megatron.core.transformer.transformer_config import TransformerConfig

VOCAB, LENGTH, BATCH = 64, 8, 4
COUNTS = (8, 5, 7, 3)
"""Tokens of each sample that count, in the cases with unequal counts."""


def prepare(mesh) -> None:
    replace_cuda()
    parallel_state.initialize_model_parallel(mesh["tp"].size(), mesh["pp"].size())


def own_samples(mesh, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels and weights of this replica's samples, of so many tokens each."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator)
    keep = (torch.arange(LENGTH) < torch.tensor(counts)[:, None]).double()
    rank, size = mesh["dp"].get_local_rank(), mesh["dp"].size()
    tokens, labels, keep = (x.chunk(size)[rank].contiguous() for x in (tokens[:, :-1], tokens[:, 1:], keep))
    return tokens, labels, keep


def gpt(
    mesh,
    *,
    smoothing: float = 0.0,
    gathered: bool = False,
    unequal: bool = False,
    per_token: bool = False,
    mtp: bool = False,
    **options: Any,
) -> AuditSubject:
    prepare(mesh)
    experts = options.get("num_moe_experts")
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        tensor_model_parallel_size=mesh["tp"].size(),
        calculate_per_token_loss=per_token,
        mtp_num_layers=1 if mtp else None,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        **NO_DROPOUT,
        **UNFUSED,
        **options,
    )
    spec = get_gpt_layer_local_spec(num_experts=experts, normalization=config.normalization)
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        parallel_output=not gathered,
        share_embeddings_and_output_weights=True,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if mtp else None,
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    tokens, labels, keep = own_samples(mesh, COUNTS if unequal else (LENGTH,) * BATCH)
    positions = torch.arange(LENGTH).expand_as(tokens)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)

    def step() -> Tensor:
        model.zero_grad_buffer()
        MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))
        MTPLossAutoScaler.set_loss_scale(torch.ones(1))
        if smoothing:
            logits = model(tokens, positions, mask)
            losses = vocab_parallel_cross_entropy(logits, labels, smoothing)
        else:
            losses = model(tokens, positions, mask, labels=labels, loss_mask=keep)
        total = (losses * keep).sum()
        (total if per_token else total / keep.sum()).backward()
        return total.detach() / keep.sum()

    def reduce() -> None:
        finalize_model_grads([model], keep.sum().round().int() if per_token else None)
        for parameter in model.parameters():
            parameter.grad = parameter.main_grad

    # rows of the router are experts, and the split of the others is an attribute of theirs
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return AuditSubject(module=model, step=step, reduce=reduce, optimizer=optimizer)


healthy = gpt
healthy_swiglu_rms = partial(
    gpt, gated_linear_unit=True, activation_func=F.silu, normalization="RMSNorm", add_bias_linear=False
)
healthy_per_token = partial(gpt, unequal=True, per_token=True)
healthy_mtp_per_token = partial(gpt, mtp=True, unequal=True, per_token=True)
"""#7452, finding 3: of a later version than 0.16.1, where main and MTP losses are divided alike."""
mean_of_local_means = partial(gpt, unequal=True)
"""Unequal counts without calculate_per_token_loss: each replica's mean, and the mean of these."""

label_smoothing = partial(gpt, smoothing=0.2)
"""#7452, finding 1."""
gathered_logits = partial(gpt, gathered=True)
"""#7452, finding 2."""
moe = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "none",
    "add_bias_linear": False,
}
healthy_moe = partial(gpt, **moe)
