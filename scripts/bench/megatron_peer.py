"""Megatron Core's GPTModel on one process, from the same weights: its own layers, without extensions.

Those of Transformer Engine or Apex, which Megatron-LM uses where they are installed, are other kernels.
"""

import contextlib
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bench.contenders import TorchTrainee
from bench.shapes import gpt2_state
from bench.spec import Spec
from mlm.models.gpt2.huggingface import MAPPING
from mlm.util.errors import UserError

NAMES = (
    ("embedding.word_embeddings.", "token."),
    ("embedding.position_embeddings.", "position."),
    ("decoder.final_layernorm.", "final_norm."),
    ("decoder.layers.", "layers."),
    (".input_layernorm.", ".attention_norm."),
    (".self_attention.linear_qkv.", ".attention.qkv."),
    (".self_attention.linear_proj.", ".attention.out."),
    (".pre_mlp_layernorm.", ".mlp_norm."),
    (".mlp.linear_fc1.", ".mlp.up."),
    (".mlp.linear_fc2.", ".mlp.down."),
)
"""Megatron Core's names -> ours; shapes and the order of qkv rows are the same."""
ATTENTION = "megatron.core.transformer.dot_product_attention"


class MegatronTrainee(TorchTrainee):
    """GPTModel with the local layer specification; it asks for a process group, and on a CPU for patience."""

    notes = ("Megatron Core's local layers: attention keeps S × S scores; no Transformer Engine",)

    def __init__(self, name: str, spec: Spec, device: torch.device) -> None:
        try:
            from megatron.core import parallel_state, tensor_parallel
            from megatron.core.models.gpt import GPTModel
            from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
            from megatron.core.transformer.transformer_config import TransformerConfig
        except ImportError as error:
            raise UserError(f"--contenders megatron needs Megatron Core: {error}") from None
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel(1, 1)
        if device.type == "cuda":
            tensor_parallel.model_parallel_cuda_manual_seed(spec.seed)
        shape = spec.shape
        config = TransformerConfig(
            num_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_heads,
            ffn_hidden_size=shape.model().ffn_size,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_func=partial(F.gelu, approximate="tanh"),
            layernorm_epsilon=shape.model().layer_norm_eps,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            persist_layer_norm=False,
            attention_softmax_in_fp32=True,
        )
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=shape.vocab_size,
            max_sequence_length=shape.seq_length,
            share_embeddings_and_output_weights=True,
        )
        with torch.no_grad():
            weights = MAPPING.to_ours(gpt2_state(shape, spec.seed), shape.model())
            for theirs, parameter in model.named_parameters():
                parameter.copy_(weights[our_name(theirs)])
        super().__init__(name, spec, device, model, list(model.decoder.layers))
        s = shape.seq_length
        self.positions = torch.arange(s, device=device).expand(shape.batch_size, s)
        self.hidden = torch.ones(1, 1, s, s, dtype=torch.bool, device=device).triu_(1)

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with runs_on(self.device):
            loss: Tensor = self.model(tokens, self.positions, self.hidden, labels=labels)
        return loss.mean()

    def in_our_names(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return {our_name(name): gradient for name, gradient in gradients.items()}


def our_name(name: str) -> str:
    """Our name of a parameter."""
    for theirs, ours in NAMES:
        name = name.replace(theirs, ours)
    return name


def runs_on(device: torch.device) -> Any:
    """On a CPU, for a comparison of numbers: what Megatron Core asks of CUDA there answered in its place."""
    if device.type == "cuda":
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    stack.enter_context(patch("torch.cuda.current_device", lambda: torch.device("cpu")))
    tracker = f"{ATTENTION}.tensor_parallel.get_cuda_rng_tracker"
    stack.enter_context(
        patch(tracker, lambda: type("", (), {"fork": staticmethod(contextlib.nullcontext)})())
    )
    return stack
