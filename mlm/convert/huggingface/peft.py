"""Adapters as `peft` stores them: adapter_config.json, and tensors of each layer in one safetensors file.

Names and keys: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mlm.checkpoint.native.format import JSON
from mlm.convert.huggingface.families import layer_locations, layer_names, mapping_of
from mlm.convert.huggingface.mapping import Location, show
from mlm.models.config import LoraConfig, ModelConfig
from mlm.models.lora import adapter_shards
from mlm.parallel.low_rank import ExpertAdapter, LowRankAdapter
from mlm.util.errors import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TASK_TYPES = {
    **{"language_model": "CAUSAL_LM", "none": "FEATURE_EXTRACTION"},
    **{"classification": "SEQ_CLS", "span": "QUESTION_ANS"},
}
"""model.head -> peft's name of a task."""
PREFIX = "base_model.model."
Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class StoredAdapter:
    """The adapter of one of our layers, and the modules of `transformers` that it is stored for."""

    name: str
    """Our layer, such as layers.0.attention.kv."""
    modules: tuple[str, ...]
    """Their modules, one per adapted part, as the class of the model names them."""
    rows: Location
    """How the rows of B are stored."""
    adapter: LowRankAdapter
    """On the meta device."""

    @property
    def forms(self) -> dict[str, tuple[str, Location]]:
        """By our parameter: the end of its name in `peft`, and how its rows are stored."""
        forms = {"a": (".lora_A.weight", Location(self.modules)), "b": (".lora_B.weight", self.rows)}
        has_norms = self.adapter.magnitude is not None
        return forms | ({"magnitude": (".lora_magnitude_vector", self.rows)} if has_norms else {})

    def to_theirs(self, read: Read, base: Read) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of each module; `read` and `base` return tensors by our names."""
        for part, (end, location) in self.forms.items():
            value = read(f"{self.name}.lora.{part}")
            value = value + self.norms(base) if part == "magnitude" else value
            for module, stored in zip(self.modules, location.to_theirs(value), strict=True):
                yield f"{PREFIX}{module}{end}", stored

    def norms(self, base: Read) -> Tensor:
        """Norms of the rows of the base's weight that have adapters, in B's order."""
        rows, norms = self.adapter.rows, torch.linalg.vector_norm(base(f"{self.name}.weight"), dim=1)
        parts: Tensor = norms.unflatten(0, (-1, rows.parts, self.adapter.size))
        return parts[:, list(rows.adapted)].flatten()


def stored_adapters(model: ModelConfig, lora: LoraConfig) -> list[StoredAdapter]:
    """Return every adapter of a model. Raises UserError if `transformers` has no such model."""
    mapping, locations, stored = mapping_of(model), layer_locations(model), []
    if mapping is None:
        raise UserError(f"model.kind={model.kind} has no counterpart in transformers, nor in peft")
    for shard, adapter in adapter_shards(model, lora, layer_names(model)):
        if isinstance(adapter, ExpertAdapter):
            problem = f"lora.targets={show(list(lora.targets))}: adapters of routed experts"
            raise UserError(f"{problem} are not stored as peft stores any; use mlm export hf merge=true")
        if shard.name.endswith(".a"):
            name = shard.name.removesuffix(".lora.a")
            if name not in locations:
                raise UserError(f"{name} has no counterpart in transformers; use lora.targets without it")
            location = locations[name]
            names = tuple(location.names[part] for part in adapter.rows.adapted)
            modules = tuple(mapping.stored_name(n.removesuffix(".weight"), model) for n in names)
            # B has rows of the adapted parts alone, and is never transposed
            parts = location.parts if adapter.rows.parts == 1 else len(names)
            rows = replace(location, names=names, transposed=False, parts=parts)
            stored.append(StoredAdapter(name, modules, rows, adapter))
    return stored


def stored_tensors(model: ModelConfig, lora: LoraConfig, read: Read, base: Read) -> dict[str, Tensor]:
    """Return all adapters as `peft` stores them; `read` and `base` return tensors by our names.

    Raises UserError as `stored_adapters` does.
    """
    tensors = dict[str, Tensor]()
    for adapter in stored_adapters(model, lora):
        if adapter.rows.section is not None:
            raise UserError(
                f"{adapter.name} is a part of {adapter.modules[0]} in transformers, and peft adapts no part; "
                "use mlm export hf merge=true"
            )
        tensors.update(adapter.to_theirs(read, base))
    return tensors


def write_config(
    model: ModelConfig,
    lora: LoraConfig,
    base: str,
    tensors: Mapping[str, Tensor],
    trained: Sequence[str] = (),
) -> dict[str, JSON]:
    """Return adapter_config.json; `base` is the name or folder of the base model.

    `tensors` are those of `stored_tensors`; `trained` are the names of a task's head, which is trained whole.
    """
    mapping = mapping_of(model)
    assert mapping is not None
    heads = mapping.head_prefixes  # peft replaces the module of a head, not its layers
    whole = sorted(
        {name[: name.find(".") if name.startswith(heads) else name.rfind(".")] for name in trained}
    )
    suffix = ".lora_A.weight"
    ranks = {
        name.removeprefix(PREFIX).removesuffix(suffix): len(value)
        for name, value in tensors.items()
        if name.endswith(suffix)
    }
    stacked = {rank: [module for module in ranks if ranks[module] == rank] for rank in {*ranks.values()}}
    stacked.pop(lora.rank, None)
    rank_pattern = {n: rank for rank, modules in stacked.items() for n in short_names(model, modules)}
    alphas = {n: lora.alpha * lora.scale / replace(lora, rank=rank).scale for n, rank in rank_pattern.items()}
    return {
        "peft_type": "LORA",
        "task_type": TASK_TYPES[model.head],
        **({"modules_to_save": whole} if whole else {}),
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        **({"rank_pattern": rank_pattern, "alpha_pattern": alphas} if rank_pattern else {}),
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "target_modules": short_names(model, list(ranks)),
        "fan_in_fan_out": any(location.transposed for location in layer_locations(model).values()),
        "bias": "none",
        "inference_mode": True,
    }


def short_names(model: ModelConfig, adapted: list[str]) -> list[str]:
    """Return the last parts of the names of modules if they name no other layer, else the full names."""
    mapping = mapping_of(model)
    assert mapping is not None
    every = [
        mapping.stored_name(name.removesuffix(".weight"), model)
        for location in layer_locations(model).values()
        for name in location.names
    ]
    short = {name.rpartition(".")[2] for name in adapted}
    named = {name for name in every if name.rpartition(".")[2] in short}
    return sorted(short if named == set(adapted) else adapted)
