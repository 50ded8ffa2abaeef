"""Layers of a model that have low-rank adapters, and the model that trains these alone."""

from collections.abc import Callable, Iterator, Mapping
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

HEADS = ("classifier.", "pooler.")
"""Modules of a finetuning head, which are trained with the adapters."""


LayerNames: TypeAlias = Mapping[str, tuple[str, ...]]
"""Our linear layer -> what `transformers` calls it, several names if it is several layers there."""


def adapted_rows(name: str, theirs: tuple[str, ...], targets: tuple[str, ...]) -> AdaptedRows | None:
    """Return the parts of a layer's weight that `targets` name; None if they name none.

    A weight here that is several in `transformers` has those as parts.
    """
    whole = ALL_LINEAR in targets or any(_ends(name, target) for target in targets)
    adapted = [n for n, part in enumerate(theirs) if whole or any(_ends(part, target) for target in targets)]
    if len(theirs) < 2:
        return AdaptedRows() if whole or adapted else None
    return AdaptedRows(len(theirs), tuple(adapted)) if adapted else None


def _ends(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def add_adapters(chunk: Transformer, lora: LoraConfig, names: LayerNames) -> None:
    """Add adapters beside the layers that `lora.targets` name, with parameters of the default dtype."""
    for number, layer in chunk.layers.items():
        added: list[LowRankAdapter] = []
        for inner, module in list(layer.named_modules()):
            name = f"layers.{number}.{inner}"
            if isinstance(module, Experts) and any(_ends(name, target) for target in lora.targets):
                module.lora = ExpertAdapter(module, rank=lora.rank, scale=lora.scale)
            if not isinstance(module, ColumnParallelLinear | RowParallelLinear):
                continue
            rows = adapted_rows(name, names.get(name, ()), lora.targets)
            if rows is not None:
                module.lora = LowRankAdapter(
                    module,
                    rank=lora.rank,
                    scale=lora.scale,
                    rows=rows,
                    dropout=lora.dropout,
                    dora=lora.dora,
                    site=(int(number), f"{inner} adapter"),
                    cp=chunk.cp,
                )
                added.append(module.lora)
        if lora.dropout:
            layer.register_forward_pre_hook(partial(_hand_stream, added))


def _hand_stream(adapters: list[LowRankAdapter], layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Give a layer's adapters the masks of each pass, recomputed ones too."""
    for adapter in adapters:
        adapter.stream = inputs[1]


def freeze_base(chunk: Transformer, dtype: torch.dtype) -> None:
    """Leave adapters and a finetuning head alone to be trained, in `dtype` as are routers.

    Rounded routers would choose other experts.
    """
    of_routers = {parameter for router in routers(chunk) for parameter in router.parameters()}
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_(is_trained(name))
        if is_trained(name) or parameter in of_routers:
            parameter.data = parameter.data.to(dtype)


def is_trained(name: str) -> bool:
    """True for a parameter that is trained beside a frozen base."""
    return ".lora." in name or name.startswith(HEADS)


def adapter_shards(
    model: ModelConfig, lora: LoraConfig, names: LayerNames
) -> Iterator[tuple[ParameterShard, LowRankAdapter | ExpertAdapter]]:
    """Yield the parameters of a model's adapters, whole and without memory, each with its adapter."""
    for shard in parameter_shards(adapted_on_meta(model, lora, names), Axis("tp")):
        if isinstance(shard.module, LowRankAdapter | ExpertAdapter):
            yield shard, shard.module


def adapted_on_meta(model: ModelConfig, lora: LoraConfig, names: LayerNames) -> Transformer:
    """Return a whole model with adapters, without memory for its parameters. Raises ConfigError.

    A target that names no layer is an error.
    """
    with torch.device("meta"):
        chunk: Transformer = family_of(model.kind).model(model, tp=Axis("tp"))
        add_adapters(chunk, lora, names)
    _check_targets(chunk, lora, names)
    return chunk


def _check_targets(chunk: Transformer, lora: LoraConfig, names: LayerNames) -> None:
    known = list[str]()
    for name, module in chunk.layers.named_modules(prefix="layers"):
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            known += [name, *names.get(name, ())]
        elif isinstance(module, Experts):
            known.append(name)
    for target in lora.targets or ("",):
        if target != ALL_LINEAR and not any(_ends(name, target) for name in known):
            ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in known))
            problem = (
                f"lora.targets={format_value(list(lora.targets))}: no layer is named {target or 'there'}"
            )
            raise ConfigError([Problem(("lora.targets",), problem, f"use {ends} or {ALL_LINEAR}")])


def merged_changes(
    model: ModelConfig, lora: LoraConfig, names: LayerNames, adapters: Mapping[str, Tensor]
) -> dict[str, Callable[[], WeightChange]]:
    """Return by name of a weight what computes its change, whole, from whole float32 adapters by name."""
    changes = dict[str, Callable[[], WeightChange]]()
    for shard, adapter in adapter_shards(model, lora, names):
        if isinstance(adapter, ExpertAdapter):
            if shard.name.endswith("_a"):
                weight = shard.name.removesuffix("_a")
                pair = adapters[f"{weight}_b"], adapters[shard.name]
                changes[weight.replace(".lora.", ".")] = partial(_change_of_experts, adapter, *pair)
        elif shard.name.endswith(".a"):
            layer = shard.name.removesuffix(".lora.a")
            pair = adapters[shard.name], adapters[f"{layer}.lora.b"]
            norms = adapters.get(f"{layer}.lora.magnitude")
            changes[f"{layer}.weight"] = partial(_change_of_layer, adapter, *pair, norms)
    return changes


def _change_of_experts(adapter: ExpertAdapter, b: Tensor, a: Tensor) -> WeightChange:
    return WeightChange(adapter.scale * torch.einsum("e...or,eri->e...oi", b, a))


def _change_of_layer(adapter: LowRankAdapter, a: Tensor, b: Tensor, norms: Tensor | None) -> WeightChange:
    change = weight_change(a, b, adapter.scale, adapter.rows, adapter.size)
    return WeightChange(change, None if norms is None else adapter.in_order(norms))
