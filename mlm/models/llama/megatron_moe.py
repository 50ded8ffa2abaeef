"""Mixtures of experts as Megatron Core names and configures them: what they have beyond Llama.

Each expert is an MLP of its own, [gate, up] on each tensor-parallel rank. Losses of balance are settings of
training and not converted. Source: NVIDIA/Megatron-LM, core/transformer/moe/router.py, moe_utils.py
(topk_routing_with_score_function), experts.py, shared_experts.py; arguments.py.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mlm.models.config import ModelConfig
from mlm.models.llama.settings import LlamaSettings, num_blocks
from mlm.models.megatron import Weaves, Woven
from mlm.parallel.expert.settings import GROUP_MEMBERS
from mlm.util.errors import UserError

ARGS: Mapping[str, tuple[Any, ...]] = {
    "moe_layer_freq": (None, 1),
    "moe_router_load_balancing_type": (None, "none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
    "moe_router_topk_limited_devices": (None,),
    "moe_expert_capacity_factor": (None,),
    "moe_apply_probs_on_input": (None, False),
    "moe_shared_expert_gate": (None, False),
    "moe_latent_size": (None,),
}
"""Arguments of experts -> supported values."""
MOST = 1 << 17
"""Bound of whole numbers in a file's arguments."""


def add_weaves(weaves: Weaves, model: ModelConfig, tp: int) -> Weaves:
    """Return the weaves of attention with those of one expert, and of the shared experts."""
    settings = LlamaSettings.of(model)
    ours, theirs = dict(weaves.ours), dict(weaves.theirs)
    widths = {"mlp.experts.up": settings.expert_ffn_size}
    if settings.shared_experts:
        widths["mlp.shared.up.weight"] = settings.shared_experts * settings.expert_ffn_size
    for name, width in widths.items():
        pair = ((f"{name} gate", width), (f"{name} up", width))
        ours[name] = Woven(pair, num_blocks(replace(model, ffn_hidden_size=width)))
        theirs[name] = Woven(pair, tp)
    return Weaves(ours, theirs)


def options_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of the experts of a run. Raises UserError for numbers that no such run has."""
    width = _whole(args, "moe_ffn_hidden_size") or _whole(args, "ffn_hidden_size")
    shared = _whole(args, "moe_shared_expert_intermediate_size")
    if shared % max(width, 1):
        name = "moe_shared_expert_intermediate_size"
        raise UserError(f"args.{name}={shared}: supported is a multiple of an expert's {width}")
    scores = args.get("moe_router_score_function") or "softmax"
    tops = _whole(args, "moe_router_topk") or 2
    normalise = tops > 1 if scores == "sigmoid" else args.get("moe_router_pre_softmax") is not True
    scale = args.get("moe_router_topk_scaling_factor") or 1.0
    return {
        "num_experts": _whole(args, "num_experts"),
        "experts_per_token": tops,
        "expert_ffn_size": width,
        "shared_experts": shared // max(width, 1),
        "router_scores": scores,
        "router_normalise": normalise,
        "router_scale": float(scale) if type(scale) is int else scale,
        "router_groups": _whole(args, "moe_router_num_groups") or 1,
        "router_top_groups": _whole(args, "moe_router_group_topk") or 1,
        "router_bias": args.get("moe_router_enable_expert_bias") is True,
    }


def _whole(args: Mapping[str, Any], name: str) -> int:
    """Return a whole number of the arguments; 0 for none."""
    value = args.get(name)
    if value is None:
        return 0
    if type(value) is not int or not 0 < value <= MOST:
        raise UserError(f"args.{name} is no whole number from 1 to {MOST}: copy the checkpoint again")
    return value


def write_args(settings: LlamaSettings) -> dict[str, Any]:
    """Return the arguments of such experts."""
    is_grouped = settings.router_groups > 1
    return {
        "num_experts": settings.num_experts,
        "moe_ffn_hidden_size": settings.expert_ffn_size,
        "moe_shared_expert_intermediate_size": settings.shared_experts * settings.expert_ffn_size or None,
        "moe_router_topk": settings.experts_per_token,
        "moe_router_score_function": settings.router_scores,
        "moe_router_pre_softmax": settings.router_scores == "softmax" and not settings.router_normalise,
        "moe_router_topk_scaling_factor": settings.router_scale,
        "moe_router_num_groups": settings.router_groups if is_grouped else None,
        "moe_router_group_topk": settings.router_top_groups if is_grouped else None,
        "moe_router_enable_expert_bias": settings.has_router_bias,
        "moe_router_load_balancing_type": "none",
        "moe_layer_freq": 1,
        "moe_grouped_gemm": False,
    }


def problem(settings: LlamaSettings) -> str | None:
    """Return why Megatron Core computes no such experts, or we do not convert them."""
    is_sigmoid, tops = settings.router_scores == "sigmoid", settings.experts_per_token
    if settings.dense_layers:
        return f"its dense_layers={settings.dense_layers}: layers with experts and without are not converted"
    if settings.has_router_bias and not is_sigmoid:
        return "its router_bias: Megatron's is of router_scores=sigmoid"
    if is_sigmoid and settings.router_normalise != (tops > 1):
        return f"its router_normalise={settings.router_normalise}: Megatron's sigmoid scores have the other"
    if settings.router_groups > 1 and not is_sigmoid and settings.router_normalise:
        return (
            f"its router_groups={settings.router_groups}: Megatron scores groups by logits then, not softmax"
        )
    if settings.router_groups > 1 and tops // settings.router_top_groups != GROUP_MEMBERS:
        return (
            f"its router_top_groups={settings.router_top_groups}: Megatron scores a group by its best "
            f"{tops // settings.router_top_groups}, and not its best {GROUP_MEMBERS}"
        )
    return None
