"""Mixtral, Qwen3-MoE, OLMoE and DeepSeek-V3 as `transformers` stores them: what they have beyond Llama.

Keys of config.json and their defaults: the documentation of MixtralConfig, Qwen3MoeConfig, OlmoeConfig and
DeepseekV3Config (https://huggingface.co/docs/transformers/model_doc/mixtral, …/qwen3_moe, …/olmoe,
…/deepseek_v3). Each expert has tensors of its own there, one of all experts here.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace

from mlm.convert.huggingface.mapping import JSON, Location, NumberKey, SizeKey, show
from mlm.models.config import ModelConfig
from mlm.models.llama.settings import LlamaSettings, is_of_experts, num_blocks

Options = dict[str, bool | int | float | str]

TRAINING_ONLY = ("balance", "balance_rate", "balance_coefficient", "z_loss", "capacity_factor")
"""Settings that do not change what a model computes."""
_MOST = 1 << 16


@dataclass(frozen=True)
class ExpertKeys:
    """Keys of one model type's config.json, and the names of its tensors."""

    sizes: Mapping[str, SizeKey]
    """Keys of whole numbers above 0; `ours` is an option, or "" for none."""
    fixed: Mapping[str, tuple[JSON, ...]] = field(default_factory=dict)
    """As in ConfigKeys."""
    numbers: Mapping[str, NumberKey] = field(default_factory=dict)
    """Keys of other numbers, for which `ours` is ""."""
    normalises: bool | None = None
    """Default of norm_topk_prob; None where weights are always divided by their sum."""
    always: Mapping[str, bool | str] = field(default_factory=dict)
    """Options that are so in every model of this type, where ours have another default."""
    block: str = "mlp"
    """Module of router and experts."""
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def read(
        self, config: Mapping[str, JSON], values: Mapping[str, JSON], path: str
    ) -> tuple[Options, list[str]]:
        """Return our options, and a line for each setting that is not supported."""
        options: Options = {key.ours: values[theirs] or 0 for theirs, key in self._options}
        options |= self.always
        if self.normalises is not None:
            options["router_normalise"] = config.get("norm_topk_prob", self.normalises) is True
        dense, problems = _dense_layers(config, values["num_hidden_layers"], path)
        if "kv_lora_rank" in self.sizes:
            options["head_dim"] = values["qk_nope_head_dim"] + values["qk_rope_head_dim"]
            options["router_scale"] = float(values["routed_scaling_factor"])
        options["dense_layers"] = dense
        if dense >= values["num_hidden_layers"]:
            options = {name: value for name, value in options.items() if not is_of_experts(name)}
        return options, problems

    def write(self, model: ModelConfig, settings: LlamaSettings) -> dict[str, JSON]:
        """Return the keys of config.json."""
        keys: dict[str, JSON] = {
            theirs: getattr(settings, key.ours) or key.default for theirs, key in self._options
        }
        if self.normalises is not None:
            keys["norm_topk_prob"] = settings.router_normalise
        keys |= {theirs: allowed[0] for theirs, allowed in self.fixed.items()}
        dense = settings.dense_layers if settings.num_experts else model.num_layers
        if "kv_lora_rank" in self.sizes:
            keys |= {
                "qk_nope_head_dim": settings.head_dim - settings.rope_head_dim,
                "routed_scaling_factor": settings.router_scale,
                "first_k_dense_replace": dense,
                "num_nextn_predict_layers": 0,
            }
        elif "moe_intermediate_size" in self.sizes:
            keys["mlp_only_layers"] = list(range(dense))
        return keys

    @property
    def _options(self) -> list[tuple[str, SizeKey]]:
        return [(theirs, key) for theirs, key in self.sizes.items() if key.ours]


_PER_TOKEN = "num_experts_per_tok"
EXPERT_KEYS = {
    "mixtral": ExpertKeys(
        sizes={
            "num_local_experts": SizeKey("num_experts", 8, _MOST),
            _PER_TOKEN: SizeKey("experts_per_token", 2, _MOST),
        },
        fixed={"router_jitter_noise": (0.0, 0)},
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    ),
    "qwen3_moe": ExpertKeys(
        sizes={
            "num_experts": SizeKey("num_experts", 128, _MOST),
            _PER_TOKEN: SizeKey("experts_per_token", 8, _MOST),
            "moe_intermediate_size": SizeKey("expert_ffn_size", 768, 1 << 24),
        },
        fixed={"decoder_sparse_step": (1,)},
        normalises=False,
    ),
    "olmoe": ExpertKeys(
        sizes={
            "num_experts": SizeKey("num_experts", 64, _MOST),
            _PER_TOKEN: SizeKey("experts_per_token", 8, _MOST),
        },
        fixed={"clip_qkv": (None,)},
        normalises=False,
        always={"qk_norm_whole": True},
    ),
    "deepseek_v3": ExpertKeys(
        sizes={
            "n_routed_experts": SizeKey("num_experts", 256, _MOST),
            _PER_TOKEN: SizeKey("experts_per_token", 8, _MOST),
            "moe_intermediate_size": SizeKey("expert_ffn_size", 2048, 1 << 24),
            "n_shared_experts": SizeKey("shared_experts", 1, _MOST),
            "n_group": SizeKey("router_groups", 8, _MOST),
            "topk_group": SizeKey("router_top_groups", 4, _MOST),
            "kv_lora_rank": SizeKey("kv_lora_rank", 512, 1 << 20),
            "q_lora_rank": SizeKey("q_lora_rank", None, 1 << 20),
            "qk_rope_head_dim": SizeKey("rope_head_dim", 64, _MOST),
            "v_head_dim": SizeKey("v_head_dim", 128, _MOST),
            "qk_nope_head_dim": SizeKey("", 128, _MOST),
        },
        numbers={"routed_scaling_factor": NumberKey("", 2.5, below=1e6)},
        fixed={
            "rope_interleave": (True,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "moe_layer_freq": (1,),
        },
        normalises=True,
        always={"router_scores": "sigmoid", "router_bias": True},
    ),
}
"""model_type -> its keys."""


def _dense_layers(config: Mapping[str, JSON], layers: int, path: str) -> tuple[int, list[str]]:
    """Return the first layers without experts, and what is wrong with them."""
    only, first = config.get("mlp_only_layers"), config.get("first_k_dense_replace")
    if config["model_type"] == "qwen3_moe" and only:
        if only != list(range(len(only))):
            return 0, [f"{path}: mlp_only_layers={show(only)}: supported: the first layers, [0, 1, …], or []"]
        return min(len(only), layers), []
    if config["model_type"] != "deepseek_v3":
        return 0, []
    first = 3 if "first_k_dense_replace" not in config else first
    if type(first) is not int or first < 0:
        return 0, [f"{path}: first_k_dense_replace={show(first)} must be a whole number from 0"]
    return min(first, layers), []


def expert_problem(model: ModelConfig, again: ModelConfig, name: str) -> str | None:
    """Return which setting of a model no `transformers` model of this name has.

    `again` are the settings that its config.json would be read as.
    """
    mine, theirs = LlamaSettings.of(model), LlamaSettings.of(again)
    for each in fields(LlamaSettings):
        value, other = (getattr(settings, each.name) for settings in (mine, theirs))
        if each.name in TRAINING_ONLY or (each.name == "dense_layers" and not mine.num_experts):
            continue
        if each.name == "router_bias":
            value, other = mine.has_router_bias, theirs.has_router_bias
        if value != other:
            return (
                f"its model.options.{each.name}={show(value)} is not what {name} of transformers computes, "
                f"which has {show(other)}"
            )
    return None


def mlp_locations(
    ours: str, stored: str, layer: int, model: ModelConfig, settings: LlamaSettings, kind: str
) -> Iterator[tuple[str, Location]]:
    """Yield (our name, location) of a layer's MLP, or of its router and experts."""
    if not settings.has_experts(layer):
        yield from _gated(f"{ours}.mlp", f"{stored}.mlp", num_blocks(model))
        return
    keys, width = EXPERT_KEYS[kind], settings.expert_ffn_size
    block, count = f"{stored}.{keys.block}", settings.num_experts
    yield f"{ours}.mlp.router.weight", Location((f"{block}.gate.weight",))
    if settings.has_router_bias:
        yield f"{ours}.mlp.router.bias", Location((f"{block}.gate.e_score_correction_bias",))
    gate, up, down = keys.projections
    each = [f"{block}.experts.{expert}" for expert in range(count)]
    pairs = tuple(f"{expert}.{part}.weight" for expert in each for part in (gate, up))
    yield f"{ours}.mlp.experts.up", Location(pairs, stacked=(count, 2))
    yield f"{ours}.mlp.experts.down", Location(tuple(f"{e}.{down}.weight" for e in each), stacked=(count,))
    if settings.shared_experts:
        blocks = num_blocks(replace(model, ffn_hidden_size=settings.shared_experts * width))
        yield from _gated(f"{ours}.mlp.shared", f"{block}.shared_experts", blocks)


def _gated(ours: str, stored: str, blocks: int) -> Iterator[tuple[str, Location]]:
    gate, up, down = (f"{stored}.{name}_proj.weight" for name in ("gate", "up", "down"))
    yield f"{ours}.up.weight", Location((gate, up), num_heads=blocks, parts=2)
    yield f"{ours}.down.weight", Location((down,))


def predictors(model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> frozenset[str]:
    """Return the tensors of multi-token prediction, layers after the model's (arXiv:2412.19437, 2.2)."""
    numbers = itertools.takewhile(
        lambda layer: f"layers.{layer}.eh_proj.weight" in shapes, itertools.count(model.num_layers)
    )
    prefixes = tuple(f"layers.{layer}." for layer in numbers)
    return frozenset(name for name in shapes if name.startswith(prefixes))
