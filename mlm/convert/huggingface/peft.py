"""Adapters as `peft` stores them: adapter_config.json, and tensors of each layer in one safetensors file.

Names and keys: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from mlm.checkpoint.native.format import JSON
from mlm.convert.huggingface.families import layer_locations, layer_names, mapping_of
from mlm.convert.huggingface.folder import SAVE_AGAIN, WRAPPERS, unwrap_names
from mlm.convert.huggingface.mapping import Location, Note, show
from mlm.models.config import LoraConfig, ModelConfig
from mlm.models.lora import adapter_shards
from mlm.parallel.low_rank import ExpertAdapter, LowRankAdapter
from mlm.util.errors import CorruptFileError, UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TASK_TYPES = {
    **{"language_model": "CAUSAL_LM", "none": "FEATURE_EXTRACTION"},
    **{"classification": "SEQ_CLS", "span": "QUESTION_ANS"},
}
"""model.head -> peft's name of a task."""
PREFIX = "base_model.model."
MOST_ALPHA = 1e9
MERGE = "merge it (merge_and_unload of peft), save the model, and import that"
PLAIN: Mapping[str, tuple[JSON, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None,),
    "lora_bias": (False,),
    "init_lora_weights": (True, False, "gaussian", "eva"),  # others change the weights of the base
    "use_qalora": (False,),
    **dict.fromkeys(("use_bdlora", "layer_replication", "alora_invocation_tokens", "arrow_config"), (None,)),
    **dict.fromkeys(("kasa_config", "velora_config", "monteclora_config"), (None,)),
}
"""Keys of adapter_config.json, and the values that our adapters compute; the first is the default."""
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
            value = value + self._norms(base) if part == "magnitude" else value
            for module, stored in zip(self.modules, location.to_theirs(value), strict=True):
                yield f"{PREFIX}{module}{end}", stored

    def to_ours(self, read: Read, base: Read) -> Iterator[tuple[str, Tensor]]:
        """Yield our (name, tensor); `read` returns tensors by their names, `base` by ours."""
        for part, (end, location) in self.forms.items():
            value = location.to_ours([read(f"{PREFIX}{module}{end}") for module in self.modules])
            yield f"{self.name}.lora.{part}", value - self._norms(base) if part == "magnitude" else value

    def _norms(self, base: Read) -> Tensor:
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
    tensors, fused = dict[str, Tensor](), defaultdict[str, list[StoredAdapter]](list)
    for adapter in stored_adapters(model, lora):
        if adapter.rows.section is None:
            tensors.update(adapter.to_theirs(read, base))
        else:
            fused[adapter.modules[0]].append(adapter)
    for module, adapters in fused.items():
        tensors.update(_fuse(module, adapters, layer_locations(model), read, base))
    return tensors


def _fuse(
    module: str, adapters: list[StoredAdapter], locations: Mapping[str, Location], read: Read, base: Read
) -> dict[str, Tensor]:
    """Return the one adapter of a module whose rows are several of our layers, such as qkv_proj of Phi-3.

    Ranks are stacked, each with its layer's rows of B alone, unless all have the same A.
    """
    names = [f"{PREFIX}{module}{end}" for end, _ in adapters[0].forms.values()]
    stored = [dict(adapter.to_theirs(read, base)) for adapter in adapters]
    a = [tensors[names[0]] for tensors in stored]
    is_shared, rank = all(torch.equal(a[0], other) for other in a), len(a[0])
    fused = {names[0]: a[0] if is_shared else torch.cat(a)}
    rows = adapters[0].rows.shape(tuple(stored[0][names[1]].shape))[0]
    fused[names[1]] = a[0].new_zeros(rows, len(fused[names[0]]))
    if adapters[0].adapter.magnitude is not None:
        (weight,) = {locations[adapter.name].names for adapter in adapters}
        layers = {ours: at for ours, at in locations.items() if at.names == weight}
        norms = {ours: torch.linalg.vector_norm(base(f"{ours}.weight"), dim=1) for ours in layers}
        fused[names[2]] = torch.cat([at.to_theirs(norms[ours])[0] for ours, at in layers.items()])
    for number, (adapter, tensors) in enumerate(zip(adapters, stored, strict=True)):
        assert adapter.rows.section is not None
        first, end, _ = adapter.rows.section
        column = 0 if is_shared else number * rank
        fused[names[1]][first:end, column : column + rank] = tensors[names[1]]
        for name in names[2:]:
            fused[name][first:end] = tensors[name]
    return fused


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


@dataclass(frozen=True)
class PeftFolder:
    """Settings and names of tensors in a folder of `peft`."""

    lora: LoraConfig
    """The largest rank of all modules, with its alpha."""
    names: Mapping[str, str]
    """Name without wrappers -> name in the file."""
    modules: Mapping[str, LoraConfig]
    """Module -> settings with the rank and alpha of its adapter."""
    notes: tuple[Note, ...]

    def to_common_rank(self, name: str, value: Tensor) -> Tensor:
        """Return a tensor as `lora` has it: ranks padded with zeros, which get no gradient, and scales in B.

        Raises CorruptFileError for another rank than the settings give.
        """
        module, _, part = name.removeprefix(PREFIX).rpartition(".lora_")
        if part not in ("A.weight", "B.weight"):
            return value
        own, dim = self.modules[module], "AB".index(part[0])
        if value.ndim != 2 or value.shape[dim] != own.rank:
            problem = f"{name} is {list(value.shape)}, r or rank_pattern gives it rank {own.rank}"
            raise CorruptFileError(f"{CONFIG}: {problem}. {SAVE_AGAIN}")
        missing = self.lora.rank - own.rank
        if dim == 0:
            return pad(value, (0, 0, 0, missing))
        return pad(value, (0, missing)) * (own.scale / self.lora.scale)


def read_folder(config: Mapping[str, JSON], stored: list[str], model: ModelConfig, path: str) -> PeftFolder:
    """Return what an adapter_config.json and the names of the tensors beside it describe.

    The names alone tell which modules have adapters. Raises UserError for what ours do not compute.
    """
    for key, allowed in PLAIN.items():
        if (value := config.get(key, allowed[0])) not in allowed:
            problem = f"{key}={show(value)} is not supported; supported: {show(allowed[0])}"
            raise UserError(f"{path}: {problem}. Or {MERGE}")
    unwrapped, _, notes = unwrap_names(stored, (*WRAPPERS, PREFIX))
    mapping, suffix = mapping_of(model), ".lora_A.weight"
    assert mapping is not None
    outer = [n for ours, at in mapping.locations(model) if not ours.startswith("layers.") for n in at.names]
    outside = tuple(weight.rpartition(".")[0] + "." for weight in (*outer, *mapping.copies(model)))
    if tables := [theirs for theirs, n in unwrapped.items() if mapping.plain(n).startswith(outside)]:
        raise UserError(
            f"{path}: {tables[0]}: adapters and copies of this module are not supported, only adapters of "
            f"transformer layers; train without it in target_modules, or {MERGE}"
        )
    modules = {  # as they are named here, and in rank_pattern
        name.removesuffix(suffix): theirs.rpartition(PREFIX)[2].removesuffix(suffix)
        for theirs, name in unwrapped.items()
        if name.endswith(suffix)
    }
    if not modules:
        raise UserError(f"{path}: no tensor beside it ends with {suffix}. Save it by save_pretrained of peft")
    settings = dict(zip(modules, _read_settings(config, modules.values(), path), strict=True))
    common = max(settings.values(), key=lambda own: (own.rank, own.alpha))
    lora = replace(common, targets=tuple(map(mapping.plain, short_names(model, list(modules)))))
    if any(own != common for own in settings.values()):
        change = f"ranks are padded with zeros to {lora.rank}, and scales other than {lora.scale:g} are in B"
        notes.append(Note(f"rank_pattern, alpha_pattern: {change}"))
    names = {f"{PREFIX}{name}": theirs for theirs, name in unwrapped.items()}
    known = {
        f"{PREFIX}{module}{end}"
        for adapter in stored_adapters(model, lora)
        for module in adapter.modules
        for end, _ in adapter.forms.values()
    }
    if other := sorted(known ^ names.keys()):
        where = "is not there" if other[0] in known else "is the adapter of no layer of this base"
        raise UserError(f"{path}: {other[0]} {where}; name the base that peft trained it on")
    return PeftFolder(lora, names, settings, tuple(notes))


def _read_settings(config: Mapping[str, JSON], modules: Iterable[str], path: str) -> list[LoraConfig]:
    """Return settings of each module's adapter; of patterns the first counts that matches a name's end."""
    columns, dropout = [], config.get("lora_dropout", 0.0)
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise UserError(f"{path}: lora_dropout={show(dropout)} must be a number from 0 to 1")
    for key, default in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        listed, usual = config.get(key) or {}, config.get(default)
        try:
            patterns = [(re.compile(rf"(.*\.)?({pattern})$"), value) for pattern, value in listed.items()]
        except (AttributeError, re.error) as error:
            raise UserError(f"{path}: {key}={show(listed)} names no modules: {error}. Fix it") from error
        columns.append([next((own for p, own in patterns if p.match(name)), usual) for name in modules])
    rslora, dora = (config.get(key, False) is True for key in ("use_rslora", "use_dora"))
    common, settings = LoraConfig(dropout=float(dropout), rslora=rslora, dora=dora), []
    for rank, alpha in zip(*columns, strict=True):
        is_number = type(rank) is int and isinstance(alpha, int | float)
        if not is_number or rank < 1 or not 0 < alpha < MOST_ALPHA:
            raise UserError(f"{path}: r={show(rank)}, lora_alpha={show(alpha)} must be numbers above 0")
        settings.append(replace(common, rank=rank, alpha=float(alpha)))
    return settings
