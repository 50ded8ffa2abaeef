"""Conditions of the settings of a mixture of experts: model.options.NAME."""

from dataclasses import replace
from typing import TYPE_CHECKING

from mlm.models.config import ModelConfig
from mlm.util.errors import ConfigError, Problem, show

if TYPE_CHECKING:
    from mlm.models.llama.settings import LlamaSettings

ROUTER_SCORES = ("softmax", "sigmoid")
"""Values of router_scores."""
BALANCES = ("none", "bias", "sequence", "global_batch", "micro_batch")
"""Values of balance."""


def mixture_problem(model: ModelConfig, settings: "LlamaSettings") -> Problem | None:
    """Return the problem of the settings of experts."""

    def problem(name: str, why: str, fix: str) -> Problem:
        key = f"model.options.{name}"
        return Problem((key,), f"{key}={show(getattr(settings, name))} {why}", fix)

    experts, groups = settings.num_experts, settings.router_groups
    if not experts:
        why = "is of experts, and model.options.num_experts=0"
        return problem("capacity_factor", why, "remove it") if settings.capacity_factor else None
    for name, values in (("router_scores", ROUTER_SCORES), ("balance", BALANCES)):
        if getattr(settings, name) not in values:
            return problem(name, "is none of ours", f"use {', '.join(values[:-1])} or {values[-1]}")
    if settings.dense_layers >= model.num_layers:
        why = f"leaves no layer of model.num_layers={model.num_layers} to experts"
        return problem("dense_layers", why, "use fewer, or model.options.num_experts=0")
    if groups < 1 or experts % groups:
        valid = [n for n in range(1, experts + 1) if experts % n == 0]
        nearest = min(valid, key=lambda n: abs(n - groups))
        why = f"does not divide model.options.num_experts={experts}"
        return problem("router_groups", why, f"use model.options.router_groups={nearest}")
    if not 1 <= settings.router_top_groups <= groups:
        why = f"must be from 1 to model.options.router_groups={groups}"
        return problem("router_top_groups", why, f"use model.options.router_top_groups={groups}")
    most = experts // groups * settings.router_top_groups
    if not 1 <= settings.experts_per_token <= most:
        known = f"model.options.num_experts={experts}"
        if most < experts:
            known = f"the {most} experts of router_top_groups={settings.router_top_groups} groups"
        fix = f"use model.options.experts_per_token={max(1, min(settings.experts_per_token, most))}"
        return problem("experts_per_token", f"must be from 1 to {known}", fix)
    if not settings.router_scale > 0:
        return problem("router_scale", "must be above 0", "use 1.0 for none")
    return None


def without_experts(model: ModelConfig, settings: "LlamaSettings") -> ModelConfig | None:
    """Return the dense model of which experts can be copies; None for a dense model.

    Raises ConfigError if they cannot.
    """
    if not settings.num_experts:
        return None
    width, shared = settings.expert_ffn_size, settings.shared_experts
    if width != model.ffn_size:
        key = "model.options.expert_ffn_size"
        problem = f"{key}={width}: experts that start from a dense model are copies of its MLP"
        raise ConfigError([Problem((key,), problem, f"set {key}={model.ffn_size}, or 0")])
    if shared:
        key = "model.options.shared_experts"
        problem = f"{key}={shared}: a dense model has no MLP that they could start from"
        raise ConfigError([Problem((key,), problem, f"set {key}=0")])
    options = {name: value for name, value in model.options.items() if not is_of_experts(name)}
    return replace(model, options=options)


def is_of_experts(option: str) -> bool:
    """Return True for an option that means nothing without experts."""
    return "expert" in option or option.startswith(("router_", "balance", "capacity")) or option in OTHERS


OTHERS = ("dense_layers", "z_loss")
"""Options of experts whose names do not say so."""
