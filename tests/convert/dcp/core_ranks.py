"""Ranks that build Megatron Core's own GPT on CPUs, save it and load it by its dist_checkpointing."""

import argparse
import os
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron_on_cpu import NO_DROPOUT, UNFUSED, replace_cuda

from tests.convert.dcp import llamas

VOCAB, LAYERS = 128, 4
TOKENS = torch.randint(0, llamas.VOCAB, (2, 19), generator=torch.Generator().manual_seed(1))
GPT = {
    "group_query_attention": False,
    "num_query_groups": llamas.HEADS,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
    "openai_gelu": False,
    "bias_gelu_fusion": False,
}
"""Arguments of a GPT that a Llama has otherwise."""


def arguments(kind: str) -> argparse.Namespace:
    """The arguments of a Megatron-LM run, of layers that two stages share."""
    changes = {} if kind == "llama" else GPT
    return llamas.arguments(num_layers=LAYERS, vocab_size=VOCAB, **changes)


def start(rank: int, world: int, port: int) -> None:
    """Join the ranks, with CUDA replaced."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    replace_cuda()


def build(args: argparse.Namespace, tp: int, pp: int) -> Any:
    """Megatron Core's model of some arguments at a layout, random weights."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tp, pp)
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        ffn_hidden_size=args.ffn_hidden_size,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else F.gelu,
        add_bias_linear=args.add_bias_linear,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        **NO_DROPOUT,
        **UNFUSED,
    )
    spec = get_gpt_layer_local_spec(normalization=args.normalization)
    model = GPTModel(
        config,
        spec,
        vocab_size=getattr(args, "padded_vocab_size", args.vocab_size),
        max_sequence_length=args.max_position_embeddings,
        position_embedding_type=args.position_embedding_type,
        rotary_base=getattr(args, "rotary_base", 10000),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    for name, parameter in model.named_parameters():
        is_split = getattr(parameter, "tensor_model_parallel", False)
        split = parallel_state.get_tensor_model_parallel_rank() if is_split else 0
        seed = zlib.crc32(name.encode()) + split + 100 * parallel_state.get_pipeline_model_parallel_rank()
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.data.add_(noise * 0.2)
    return model.eval()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    """Of TOKENS, [2, 19, VOCAB]."""
    length = TOKENS.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    found: torch.Tensor = model(TOKENS, torch.arange(length).expand_as(TOKENS), mask)
    return found


def save(rank: int, world: int, port: int, folder: Path, layouts: list[tuple[str, int, int]]) -> None:
    """Save a model at each layout (kind, tp, pp) in folder/kind-tp-pp."""
    from megatron.core import dist_checkpointing

    start(rank, world, port)
    for kind, tp, pp in layouts:
        out = folder / f"{kind}-{tp}-{pp}"
        out.mkdir(exist_ok=True)
        model = build(arguments(kind), tp, pp)
        state = {"args": arguments(kind), "iteration": 3, "checkpoint_version": 3.0}
        dist_checkpointing.save(state | {"model": model.sharded_state_dict()}, str(out))
    torch.distributed.destroy_process_group()


def load(rank: int, world: int, port: int, folders: list[Path]) -> None:
    """Load each folder in one process, and write its logits beside it."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import load_common_state_dict

    start(rank, world, port)
    for folder in folders:
        args = load_common_state_dict(str(folder))["args"]
        model = build(args, 1, 1)
        wanted = {
            name: value
            for name, value in model.sharded_state_dict().items()
            if not name.endswith("_extra_state")
        }
        model.load_state_dict(dist_checkpointing.load({"model": wanted}, str(folder))["model"], strict=False)
        torch.save(logits(model), folder / "logits.pt")
    torch.distributed.destroy_process_group()
