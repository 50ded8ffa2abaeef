"""Megatron Core's Mixtral as a contender: in one process, on a CPU by its layers without Transformer Engine.

Experts are SequentialMLP, attention is DotProductAttention over a mask, both in plain PyTorch: nothing
else of it computes on a CPU.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron_on_cpu import NO_DROPOUT, UNFUSED, replace_cuda
from torch import Tensor

from bench.contenders import TorchTrainee, imported, load_exactly
from bench.llama import BLOCK, NUM_EXPERTS, MixtralShape
from bench.spec import Spec

RENAMED = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
    "self_attention.linear_proj": "self_attn.o_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.router": f"{BLOCK}.gate",
    "mlp.experts.local_experts": f"{BLOCK}.experts",
    "linear_fc2": "w2",
    "decoder.layers": "model.layers",
}
"""Part of a name in Megatron Core -> in Mixtral's files."""


class MegatronMixtral(TorchTrainee):
    """Megatron Core's GPTModel with the weights of all contenders."""

    notes = ("experts one after the other (SequentialMLP), attention over a mask: what it has on a CPU",)

    def __init__(self, name: str, spec: Spec, device: torch.device) -> None:
        assert isinstance(spec.shape, MixtralShape)
        self.spec, self.shape = spec, spec.shape
        join_alone()
        model = self.build()
        state = spec.shape.state(spec.seed)
        names = [name for name, _ in model.named_parameters()]
        load_exactly(model, {name: self.whole(name, state) for name in names})
        length = spec.shape.seq_length
        self.mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        self.positions = torch.arange(length).expand(spec.shape.batch_size, length)
        super().__init__(name, spec, device, model)

    def build(self) -> Any:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        shape, model = self.shape, self.shape.model()
        config = TransformerConfig(
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_heads,
            num_query_groups=shape.num_kv_heads,
            ffn_hidden_size=model.ffn_size,
            moe_ffn_hidden_size=model.ffn_size,
            num_moe_experts=NUM_EXPERTS,
            moe_router_topk=2,
            moe_router_load_balancing_type="none",
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            normalization="RMSNorm",
            layernorm_epsilon=model.layer_norm_eps,
            **NO_DROPOUT,
            **UNFUSED,
        )
        spec = get_gpt_layer_local_spec(num_experts=NUM_EXPERTS, normalization="RMSNorm")
        return GPTModel(
            config,
            spec,
            vocab_size=shape.vocab_size,
            max_sequence_length=shape.seq_length,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        losses: Tensor = self.model(tokens, self.positions, self.mask, labels=labels)
        return losses.mean()

    def whole(self, name: str, state: dict[str, Tensor]) -> Tensor:
        """A parameter of the module, from the weights by the names of files."""
        parts = [state[part] for part in self.parts(name)]
        if len(parts) < 3:
            return torch.cat(parts)
        groups, d = self.shape.num_kv_heads, self.shape.head_dim  # [group][queries, key, value]
        return torch.cat([part.view(groups, -1, d, part.shape[1]) for part in parts], 1).flatten(0, 2)

    def parts(self, name: str) -> list[str]:
        for ours, theirs in RENAMED.items():
            name = name.replace(ours, theirs)
        if "linear_qkv" in name:
            return [name.replace("self_attention.linear_qkv", f"self_attn.{x}_proj") for x in "qkv"]
        return [name.replace("linear_fc1", x) for x in (("w1", "w3") if "linear_fc1" in name else ("",))]

    def as_huggingface(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        groups, d = self.shape.num_kv_heads, self.shape.head_dim
        for name, gradient in gradients.items():
            names = self.parts(name)
            pieces: tuple[Tensor, ...] = gradient.chunk(len(names))
            if len(names) == 3:
                queries = self.shape.num_heads // groups
                fused = gradient.view(groups, queries + 2, d, -1)
                pieces = tuple(x.flatten(0, 2) for x in fused.split([queries, 1, 1], 1))
            found |= dict(zip(names, pieces, strict=True))
        return found


def join_alone() -> None:
    warnings.simplefilter("ignore")
    imported("megatron.core")
    from megatron.core import parallel_state

    replace_cuda()
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        parallel_state.initialize_model_parallel()
