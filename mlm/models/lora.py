"""Layers of a model that have low-rank adapters, and the model that trains these alone."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from mlm.models.backbone import Transformer
from mlm.models.config import ALL_LINEAR, LoraConfig, ModelConfig
from mlm.models.family import family_of
from mlm.parallel.expert.experts import Experts
from mlm.parallel.expert.router import routers
from mlm.parallel.layers import ColumnParallelLinear, RowParallelLinear
from mlm.parallel.low_rank import AdaptedRows, ExpertAdapter, LowRankAdapter, WeightChange, weight_change
from mlm.parallel.mesh import Axis
from mlm.parallel.sharding import ParameterShard, parameter_shards
from mlm.util.errors import ConfigError, Problem, format_value

LayerNames: TypeAlias = Mapping[str, tuple[str, ...]]
"""Linear layer -> its names in `transformers`, several if it fuses several layers."""


def add_adapters(chunk: Transformer, lora: LoraConfig, names: LayerNames) -> None:
    """Add adapters to the layers that `lora.targets` name, with parameters of the default dtype."""
    for number, layer in chunk.layers.items():
        adapters: list[LowRankAdapter] = []
        for inner, module in list(layer.named_modules()):
            name = f"layers.{number}.{inner}"
            if isinstance(module, Experts) and _is_named(name, lora.targets):
                module.lora = ExpertAdapter(module, rank=lora.rank, scale=lora.scale)
            if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
                continue
            # each part of a fused weight may be adapted
            parts = names.get(name, ())
            is_full = ALL_LINEAR in lora.targets or _is_named(name, lora.targets)
            adapted = [n for n, part in enumerate(parts) if is_full or _is_named(part, lora.targets)]
            if not (is_full or adapted):
                continue
            module.lora = LowRankAdapter(
                module,
                rank=lora.rank,
                scale=lora.scale,
                rows=AdaptedRows(len(parts), tuple(adapted)) if len(parts) > 1 else AdaptedRows(),
                dropout=lora.dropout,
                dora=lora.dora,
                site=(int(number), f"{inner} adapter"),
                cp=chunk.cp,
            )
            adapters.append(module.lora)
        if lora.dropout:
            layer.register_forward_pre_hook(partial(_set_stream, adapters))


def quantized_layers(chunk: Transformer, lora: LoraConfig) -> dict[str, nn.Module]:
    """Return the layers whose weights `lora` holds in 4 bits, by name."""
    kinds = (ColumnParallelLinear, RowParallelLinear) if lora.quantize == "nf4" else ()
    return {name: m for name, m in chunk.layers.named_modules(prefix="layers") if isinstance(m, kinds)}


def _is_named(name: str, targets: Iterable[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _set_stream(adapters: list[LowRankAdapter], layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Set the dropout stream of a layer's adapters before each pass, recomputed ones too."""
    for adapter in adapters:
        adapter.stream = inputs[1]


def freeze_base(chunk: Transformer, dtype: torch.dtype) -> None:
    """Train only adapters and a finetuning head, in `dtype`; routers, too, as rounding changes choices."""
    router_parameters = {parameter for router in routers(chunk) for parameter in router.parameters()}
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_(is_trained(name))
        if is_trained(name) or parameter in router_parameters:
            parameter.data = parameter.data.to(dtype)


def is_trained(name: str) -> bool:
    """True for a parameter that is trained with a frozen base: of an adapter or a finetuning head."""
    return ".lora." in name or name.startswith(("classifier.", "pooler."))


def adapter_shards(
    model: ModelConfig, lora: LoraConfig, names: LayerNames
) -> Iterator[tuple[ParameterShard, LowRankAdapter | ExpertAdapter]]:
    """Yield the full parameters of a model's adapters, without memory, each with its adapter."""
    for shard in parameter_shards(adapted_on_meta(model, lora, names), Axis("tp")):
        if isinstance(shard.module, LowRankAdapter | ExpertAdapter):
            yield shard, shard.module


def adapted_on_meta(model: ModelConfig, lora: LoraConfig, names: LayerNames) -> Transformer:
    """Return a full model with adapters, without memory for its parameters.

    Raises ConfigError for a target that names no layer.
    """
    with torch.device("meta"):
        chunk: Transformer = family_of(model.kind).model(model, tp=Axis("tp"))
        add_adapters(chunk, lora, names)
    layer_names = list[str]()
    for name, module in chunk.layers.named_modules(prefix="layers"):
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            layer_names += [name, *names.get(name, ())]
        elif isinstance(module, Experts):
            layer_names.append(name)
    for target in lora.targets or ("",):
        if target != ALL_LINEAR and not any(_is_named(name, (target,)) for name in layer_names):
            ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in layer_names))
            problem = (
                f"lora.targets={format_value(list(lora.targets))}: no layer is named {target or 'there'}"
            )
            raise ConfigError([Problem(("lora.targets",), problem, f"use {ends} or {ALL_LINEAR}")])
    return chunk


def merged_changes(
    model: ModelConfig, lora: LoraConfig, names: LayerNames, adapters: Mapping[str, Tensor]
) -> dict[str, Callable[[], WeightChange]]:
    """Return functions that compute the full change of each weight by name, from full float32 `adapters`."""

    def experts_change(adapter: ExpertAdapter, weight: str) -> WeightChange:
        a, b = adapters[f"{weight}_a"], adapters[f"{weight}_b"]
        return WeightChange(adapter.scale * torch.einsum("e...or,eri->e...oi", b, a))

    def layer_change(adapter: LowRankAdapter, layer: str) -> WeightChange:
        a, b = adapters[f"{layer}.lora.a"], adapters[f"{layer}.lora.b"]
        norms = adapters.get(f"{layer}.lora.magnitude")
        change = weight_change(a, b, adapter.scale, adapter.rows, adapter.size)
        return WeightChange(change, None if norms is None else adapter.in_order(norms))

    changes = dict[str, Callable[[], WeightChange]]()
    for shard, adapter in adapter_shards(model, lora, names):
        if isinstance(adapter, ExpertAdapter):
            if shard.name.endswith("_a"):
                weight = shard.name.removesuffix("_a")
                changes[weight.replace(".lora.", ".")] = partial(experts_change, adapter, weight)
        elif shard.name.endswith(".a"):
            layer = shard.name.removesuffix(".lora.a")
            changes[f"{layer}.weight"] = partial(layer_change, adapter, layer)
    return changes
