"""Adapters as `peft` stores them: adapter_config.json, and tensors of each layer in one safetensors file.

Names and keys: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mlm.checkpoint.native.format import JSON
from mlm.convert.huggingface.families import layer_locations, layer_names, mapping_of
from mlm.convert.huggingface.mapping import show
from mlm.convert.locations import Location
from mlm.models.config import LoraConfig, ModelConfig
from mlm.models.lora import adapter_shards
from mlm.parallel.low_rank import ExpertAdapter, LowRankAdapter
from mlm.util.errors import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_ALPHA = 1e9
TASK_TYPES = {
    **{"language_model": "CAUSAL_LM", "none": "FEATURE_EXTRACTION"},
    **{"classification": "SEQ_CLS", "span": "QUESTION_ANS"},
}
"""model.head -> peft's name of a task."""
PREFIX = "base_model.model."
SUFFIX = ".lora_A.weight"
COMPUTED: Mapping[str, tuple[JSON, ...]] = {
    **{"peft_type": ("LORA",), "bias": ("none",)},
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # others change the base's weights
}
"""Keys of adapter_config.json, and the values that our adapters compute."""
WITHOUT_EFFECT = (
    *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying"),
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora", "fan_in_fan_out", "qalora_group_size"),
    *("megatron_core", "megatron_config", "loftq_config", "eva_config", "runtime_config"),
)
"""Keys that are read elsewhere, repeat the names of the tensors, or only matter with other keys."""
ReadTensor = Callable[[str], Tensor]


@dataclass(frozen=True)
class StoredAdapter:
    """The adapter of a layer, and the modules of `transformers` that it is stored for."""

    name: str
    """Layer, such as layers.0.attention.kv."""
    modules: tuple[str, ...]
    """Modules of `transformers`, one per adapted part, named as in the class of the model."""
    rows: Location
    """Location of B, for the order of its rows."""
    adapter: LowRankAdapter
    """On the meta device."""

    @property
    def forms(self) -> dict[str, tuple[str, Location]]:
        """Parameter of the adapter -> suffix of its name in `peft`, and its location."""
        forms = {"a": (".lora_A.weight", Location(self.modules)), "b": (".lora_B.weight", self.rows)}
        has_norms = self.adapter.magnitude is not None
        return forms | ({"magnitude": (".lora_magnitude_vector", self.rows)} if has_norms else {})

    def to_peft(self, load: ReadTensor, base: ReadTensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in `peft`, tensor); `load` and `base` return tensors of adapter and base."""
        for part, (end, location) in self.forms.items():
            value = load(f"{self.name}.lora.{part}")
            value = value + self.norms(base) if part == "magnitude" else value
            for module, stored in zip(self.modules, location.to_stored(value), strict=True):
                yield f"{PREFIX}{module}{end}", stored

    def from_peft(self, load: ReadTensor, base: ReadTensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (parameter, tensor); `load` returns tensors by names in `peft`, `base` the base's weights."""
        for part, (end, location) in self.forms.items():
            value = location.from_stored([load(f"{PREFIX}{module}{end}") for module in self.modules])
            yield f"{self.name}.lora.{part}", value - self.norms(base) if part == "magnitude" else value

    def norms(self, base: ReadTensor) -> Tensor:
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


def stored_tensors(
    model: ModelConfig, lora: LoraConfig, load: ReadTensor, base: ReadTensor
) -> dict[str, Tensor]:
    """Return all adapters as `peft` stores them; `load` and `base` return tensors of adapters and base.

    Raises UserError as `stored_adapters` does.
    """
    tensors = dict[str, Tensor]()
    for adapter in stored_adapters(model, lora):
        if adapter.rows.section is not None:
            raise UserError(
                f"{adapter.name} is a part of {adapter.modules[0]} in transformers, and peft adapts no part; "
                "use mlm export hf merge=true"
            )
        tensors.update(adapter.to_peft(load, base))
    return tensors


def write_config(
    model: ModelConfig,
    lora: LoraConfig,
    base: str,
    tensors: Mapping[str, Tensor],
    head_names: Sequence[str] = (),
) -> dict[str, JSON]:
    """Return adapter_config.json; `base` is the name or folder of the base model.

    `tensors` is the result of `stored_tensors`; `head_names` are the tensors of a task's fully trained head.
    """
    mapping = mapping_of(model)
    assert mapping is not None
    heads = mapping.head_prefixes  # peft replaces the module of a head, not its layers
    trained_modules = sorted(
        {name[: name.find(".") if name.startswith(heads) else name.rfind(".")] for name in head_names}
    )
    ranks = adapted_ranks(tensors)
    stacked = {rank: [module for module in ranks if ranks[module] == rank] for rank in {*ranks.values()}}
    stacked.pop(lora.rank, None)
    rank_pattern = {n: rank for rank, modules in stacked.items() for n in short_names(model, modules)}
    alphas = {n: lora.alpha * lora.scale / replace(lora, rank=rank).scale for n, rank in rank_pattern.items()}
    return {
        "peft_type": "LORA",
        "task_type": TASK_TYPES[model.head],
        **({"modules_to_save": trained_modules} if trained_modules else {}),
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
    """Return the last components of module names if they match no other layer, else the full names."""
    short = {name.rpartition(".")[2] for name in adapted}
    matching = {name for name in layer_modules(model) if name.rpartition(".")[2] in short}
    return sorted(short if matching == set(adapted) else adapted)


def layer_modules(model: ModelConfig) -> set[str]:
    """Return the modules of the transformer layers, named as in the class of the model."""
    mapping = mapping_of(model)
    assert mapping is not None
    names = [name for location in layer_locations(model).values() for name in location.names]
    return {mapping.stored_name(name.removesuffix(".weight"), model) for name in names}


def adapted_ranks(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the rank of each module with an adapter among tensors of `peft`."""
    return {
        name.removeprefix(PREFIX).removesuffix(SUFFIX): len(value) if value.ndim else 0
        for name, value in tensors.items()
        if name.endswith(SUFFIX)
    }


def read_adapters(
    config: Mapping[str, JSON], tensors: Mapping[str, Tensor], model: ModelConfig, base: ReadTensor
) -> tuple[LoraConfig, dict[str, Tensor]]:
    """Return settings and tensors for an adapter_config.json and its tensors.

    `base` returns the base's weights. Raises UserError for adapters that mlm does not compute.
    """
    merge = "merge it by merge_and_unload of peft, save the model and import that"
    for key, value in {"peft_type": None, **config}.items():
        allowed = COMPUTED.get(key, (None, False, [], {}))
        if key not in WITHOUT_EFFECT and value not in allowed:
            raise UserError(f"{CONFIG}: {key}={show(value)} is not supported; {merge}")
    alpha, dropout = config.get("lora_alpha"), config.get("lora_dropout", 0.0)
    if not (
        (isinstance(alpha, int | float) and 0 < alpha < MOST_ALPHA)
        and (isinstance(dropout, int | float) and 0 <= dropout < 1)
    ):
        problem = f"lora_alpha={show(alpha)}, lora_dropout={show(dropout)}: not above 0, or not from 0 to 1"
        raise UserError(f"{CONFIG}: {problem}; save it again")
    ranks = adapted_ranks(tensors)
    if outside := sorted(ranks.keys() - layer_modules(model)):
        raise UserError(f"{WEIGHTS}: {outside[0]} is not a linear layer of a layer of the base; {merge}")
    if not ranks or any(rank != config.get("r") for rank in ranks.values()):
        problem = f"r={show(config.get('r'))}, ranks in {WEIGHTS} are {sorted({*ranks.values()})}"
        raise UserError(f"{CONFIG}: {problem}; {merge}")
    mapping = mapping_of(model)
    assert mapping is not None
    lora = LoraConfig(
        rank=max(ranks.values()),
        alpha=float(alpha),
        targets=tuple(map(mapping.plain, short_names(model, list(ranks)))),
        dropout=float(dropout),
        rslora=config.get("use_rslora", False) is True,
        dora=config.get("use_dora", False) is True,
    )
    adapters = stored_adapters(model, lora)
    expected_names = {f"{PREFIX}{m}{end}" for a in adapters for m in a.modules for end, _ in a.forms.values()}
    if unexpected := sorted(expected_names ^ tensors.keys()):
        problem = "is missing" if unexpected[0] in expected_names else "is no part of an adapter"
        raise UserError(f"{WEIGHTS}: {unexpected[0]} {problem}; {merge}")
    shapes = {shard.name: shard.global_shape for shard, _ in adapter_shards(model, lora, layer_names(model))}
    for adapter in adapters:
        for part, (end, location) in adapter.forms.items():
            expected = location.shapes(shapes[f"{adapter.name}.lora.{part}"])[0]
            for name in (f"{PREFIX}{module}{end}" for module in adapter.modules):
                if (shape := tuple(tensors[name].shape)) != expected:
                    problem = f"is {list(shape)}, its base makes it {list(expected)}; name its base"
                    raise UserError(f"{WEIGHTS}: {name} {problem}")
    return lora, {n: x for a in adapters for n, x in a.from_peft(tensors.__getitem__, base)}
