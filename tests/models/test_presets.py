"""Every model preset on the meta device: its parameter count against the built model and its paper."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import mlm
from mlm.cli.compose.composition import load_config
from mlm.cli.compose.groups import parameters_of
from mlm.convert.huggingface.llama import MAPPING, NOT_COMPUTED
from mlm.models.config import ModelConfig
from mlm.models.family import family_of
from mlm.models.llama.settings import DEFAULTS, LlamaSettings
from mlm.models.shape import architecture_of, count_active_parameters, count_parameters, layer_weights
from mlm.parallel.mesh import Axis
from mlm.parallel.sharding import parameter_shards

FOLDER = Path(mlm.__file__).parent / "configs" / "model"
PRESETS = sorted(path.stem for path in FOLDER.glob("*.yaml"))

PUBLISHED = {  # billions, as the papers print them: v1 table 1, table 2; SC21 table 1
    "gpt2_1_2b": 1.2,
    "gpt2_2_5b": 2.5,
    "gpt2_4_2b": 4.2,
    "gpt2_8b": 8.3,
    "gpt2_v1_355m": 0.355,
    "gpt2_v1_2_5b": 2.5,
    "gpt2_v1_8_3b": 8.3,
    "gpt2_sc21_1_7b": 1.7,
    "gpt2_sc21_3_6b": 3.6,
    "gpt2_sc21_7_5b": 7.5,
    "gpt2_sc21_18b": 18.4,
    "gpt2_sc21_39b": 39.1,
    "gpt2_sc21_76b": 76.1,
    "gpt2_sc21_145b": 145.6,
    "gpt2_sc21_310b": 310.1,
    "gpt2_sc21_530b": 529.6,
    "gpt2_sc21_1t": 1008.0,
}

BERTS = {  # billions and digits, as printed: arXiv:1810.04805, section 3; arXiv:1909.08053, table 4
    "bert_base": (0.11, 2),
    "bert_large": (0.34, 2),
    "bert_336m": (0.336, 3),
    "bert_1_3b": (1.3, 1),
    "bert_3_9b": (3.9, 1),
}


KIN = {  # parameters of the released models with their masked-token heads, as transformers counts them
    "roberta_base": 124_697_433,
    "roberta_large": 355_412_057,
    "xlm_roberta_base": 278_295_186,
    "xlm_roberta_large": 560_142_482,
    "distilbert_base": 66_985_530,
}
RELEASED = {  # parameters of the released models, as their model cards and safetensors count them
    "gpt2_124m": 124_439_808,
    "gpt2_355m": 354_823_168,
    "gpt2_774m": 774_030_080,
    "gpt2_1_5b": 1_557_611_200,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
    "qwen2_0_5b": 494_032_768,
    "qwen2_1_5b": 1_543_714_304,
    "qwen2_7b": 7_615_616_512,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_8b": 8_190_735_360,
    "mistral_7b": 7_241_732_096,
    "smollm2_135m": 134_515_008,
    "smollm2_360m": 361_821_120,
    "smollm2_1_7b": 1_711_376_384,
    "tinyllama_1b": 1_100_048_384,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
    "olmoe_1b_7b": 6_919_161_856,
    "deepseek_v3": 671_026_404_352,
    "olmo2_1b": 1_484_916_736,
    "olmo2_7b": 7_298_617_344,
    "olmo3_7b": 7_298_011_136,
    "smollm3_3b": 3_075_098_624,
    "gemma_2b": 2_506_172_416,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma3_270m": 268_098_176,
    "gemma3_1b": 999_885_952,
    "deepseek_v2": 235_741_434_880,
    "deepseek_v2_lite": 15_706_484_224,
    "qwen15_moe_a2_7b": 14_315_784_192,
    "granite3_1b_a400m": 1_334_628_352,
    "glm45_air": 106_852_245_504,
    "ernie45_21b_a3b": 21_825_436_160,
    "phi4_mini": 3_836_021_760,
    "phi4_14b": 14_659_507_200,
    "granite3_2b": 2_533_539_840,
    "granite3_8b": 8_170_864_640,
    "glm4_9b": 9_400_279_040,
    "seed_oss_36b": 36_151_104_512,
    "ernie4_5_0_3b": 360_748_032,
    "starcoder2_3b": 3_030_371_328,
    "stablelm2_1_6b": 1_644_515_328,
    "command_r_35b": 34_980_831_232,
    "helium_2b": 2_172_643_840,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
}
ACTIVE = {
    **{"mixtral_8x7b": 12.9, "qwen3_30b_a3b": 3.35, "olmoe_1b_7b": 1.28, "deepseek_v3": 37.55},
    **{"deepseek_v2": 21.38, "deepseek_v2_lite": 2.66, "qwen15_moe_a2_7b": 2.69},
    "granite3_1b_a400m": 0.43,
    **{"gpt_oss_20b": 4.19, "gpt_oss_120b": 5.71, "glm45_air": 13.42, "ernie45_21b_a3b": 3.35},
}
"""Billions that a token goes through; printed are 13B (12.9B), 3B (3.3B), 1B (1.3B), 37B, 21B, 2.7B, 3B,
0.4B and, without a token table, 2.4B, 3.6B, 5.1B and 12B."""
SETTINGS: dict[str, tuple[float, float, int, float]] = {  # rope_theta, factor of llama3, context, norm's eps
    "llama2": (10_000.0, 1.0, 4096, 1e-5),
    "llama3": (500_000.0, 8.0, 131_072, 1e-5),
    "llama3_1b": (500_000.0, 32.0, 131_072, 1e-5),
    "llama3_3b": (500_000.0, 32.0, 131_072, 1e-5),
    "qwen2": (1_000_000.0, 1.0, 131_072, 1e-6),
    "qwen2_0_5b": (1_000_000.0, 1.0, 32_768, 1e-6),
    "qwen3": (1_000_000.0, 1.0, 32_768, 1e-6),
    "mistral": (10_000.0, 1.0, 32_768, 1e-5),
    "smollm2": (100_000.0, 1.0, 8192, 1e-5),
    "smollm2_1_7b": (130_000.0, 1.0, 8192, 1e-5),
    "tinyllama": (10_000.0, 1.0, 2048, 1e-5),
    "mixtral": (1_000_000.0, 1.0, 32_768, 1e-5),
    "olmoe": (10_000.0, 1.0, 4096, 1e-5),
    "deepseek": (10_000.0, 40.0, 163_840, 1e-6),
}
"""Of a preset or of all whose names begin so; from config.json."""
TIED = {
    *("llama3_1b", "llama3_3b", "qwen2_0_5b", "qwen2_1_5b", "qwen3_0_6b", "qwen3_1_7b"),
    *("smollm2_135m", "smollm2_360m", "smollm2_1_7b"),
}

_YARN_40 = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32}
_YARN_40 |= {"beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707}
_DEEPSEEK_V2 = {
    **{"model_type": "deepseek_v2", "aux_loss_alpha": 0.001, "seq_aux": True, "scoring_func": "softmax"},
    **{"first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": False, "num_experts_per_tok": 6},
    **{"max_position_embeddings": 163_840, "rope_scaling": _YARN_40, "rope_theta": 10_000},
}
_GPT_OSS = {
    **{
        "model_type": "gpt_oss",
        "experts_per_token": 4,
        "initial_context_length": 4096,
        "rope_theta": 150_000,
    },
    **{"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}},
    "rope_scaling": {
        **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        "original_max_position_embeddings": 4096,
    },
}
_OLMO2 = {"model_type": "olmo2", "rms_norm_eps": 1e-6, "rope_theta": 500_000, "vocab_size": 100_352}
_OLMO2 |= {"max_position_embeddings": 4096}
_GRANITE = {
    **{"model_type": "granite", "vocab_size": 49_159, "num_hidden_layers": 40, "num_key_value_heads": 8},
    **{"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 1e7},
    **{"tie_word_embeddings": True, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
}
_PHI4_FACTORS = [
    *(1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649),
    *(2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845),
    *(5.351743533, 5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158),
    *(11.70738129, 13.09260651, 14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105),
    *(25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7, 32.71),
    *(32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
]
CONFIGS: dict[str, dict[str, Any]] = {
    "phi4_mini": {
        **{"model_type": "phi3", "vocab_size": 200_064, "num_attention_heads": 24, "num_key_value_heads": 8},
        **{"max_position_embeddings": 131_072, "partial_rotary_factor": 0.75, "sliding_window": 262_144},
        **{"original_max_position_embeddings": 4096, "tie_word_embeddings": True},
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": _PHI4_FACTORS},
    },
    "phi4_14b": {
        **{"model_type": "phi3", "vocab_size": 100_352, "hidden_size": 5120, "intermediate_size": 17_920},
        **{"num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10},
        **{"max_position_embeddings": 16_384, "rope_theta": 250_000},
    },
    "granite3_2b": {
        **_GRANITE,
        **{"hidden_size": 2048, "intermediate_size": 8192},
        **{"attention_multiplier": 0.015625, "logits_scaling": 8.0},
    },
    "granite3_8b": {
        **_GRANITE,
        **{"intermediate_size": 12_800, "attention_multiplier": 0.0078125, "logits_scaling": 16.0},
    },
    "glm4_9b": {"model_type": "glm4", "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5},
    "seed_oss_36b": {
        **{"model_type": "seed_oss", "hidden_size": 5120, "rope_theta": 1e7, "attention_dropout": 0.0},
    },
    "ernie4_5_0_3b": {"model_type": "ernie4_5"},
    "helium_2b": {"model_type": "helium"},
    "starcoder2_3b": {
        **{"model_type": "starcoder2", "max_position_embeddings": 16_384, "sliding_window": 4096},
        "rope_theta": 999_999.4420358813,
    },
    "stablelm2_1_6b": {
        **{"model_type": "stablelm", "vocab_size": 100_352, "hidden_size": 2048, "use_qkv_bias": True},
        **{"intermediate_size": 5632, "num_hidden_layers": 24},
    },
    "command_r_35b": {"model_type": "cohere", "rope_theta": 8e6},
    "qwen15_moe_a2_7b": {
        **{"model_type": "qwen2_moe", "max_position_embeddings": 8192, "rope_theta": 1_000_000.0},
        **{"sliding_window": 32_768, "use_sliding_window": False, "max_window_layers": 21},
    },
    "deepseek_v2": {
        **_DEEPSEEK_V2,
        **{"hidden_size": 5120, "intermediate_size": 12_288, "moe_intermediate_size": 1536},
        **{"num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 60},
        **{"n_routed_experts": 160, "n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"},
        "routed_scaling_factor": 16.0,
    },
    "deepseek_v2_lite": {
        **_DEEPSEEK_V2,
        **{"hidden_size": 2048, "intermediate_size": 10_944, "moe_intermediate_size": 1408},
        **{"num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 27},
        **{"n_group": 1, "topk_group": 1, "topk_method": "greedy", "q_lora_rank": None},
    },
    "granite3_1b_a400m": {
        **{"model_type": "granitemoe", "hidden_size": 1024, "intermediate_size": 512, "vocab_size": 49_155},
        **{"num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 8},
        **{"num_local_experts": 32, "num_experts_per_tok": 8, "tie_word_embeddings": True},
        **{"embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22},
        **{"logits_scaling": 6.0, "max_position_embeddings": 4096, "rope_scaling": None},
    },
    "glm45_air": {
        **{"model_type": "glm4_moe", "attention_bias": True, "head_dim": 128, "partial_rotary_factor": 0.5},
        **{"rope_theta": 1_000_000, "rope_scaling": None, "num_nextn_predict_layers": 1},
        **{"use_qk_norm": False, "n_routed_experts": 128, "norm_topk_prob": True},
    },
    "ernie45_21b_a3b": {
        **{"model_type": "ernie4_5_moe", "moe_layer_start_index": 1, "moe_layer_end_index": 27},
        **{"moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_use_aux_free": True, "use_bias": False},
        **{"rope_theta": 500_000.0, "rope_scaling": None, "tie_word_embeddings": True},
    },
    "gpt_oss_20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt_oss_120b": {**_GPT_OSS, "layer_types": ["sliding_attention", "full_attention"] * 18},
    "olmo2_1b": {
        **_OLMO2,
        **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
        **{"num_attention_heads": 16, "num_key_value_heads": 16},
    },
    "olmo2_7b": _OLMO2,
    "olmo3_7b": {
        **_OLMO2,
        **{"model_type": "olmo3", "vocab_size": 100_278, "max_position_embeddings": 65_536},
        **{"sliding_window": 4096, "num_key_value_heads": 32},
        "layer_types": ([*["sliding_attention"] * 3, "full_attention"] * 8),
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192},
            **{"attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1},
        },
    },
    "smollm3_3b": {
        **{"model_type": "smollm3", "rope_theta": 5_000_000.0, "max_position_embeddings": 65_536},
        **{"no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4, "sliding_window": None},
        **{"use_sliding_window": False, "layer_types": ["full_attention"] * 36, "rope_scaling": None},
    },
    "gemma_2b": {
        **{"model_type": "gemma", "hidden_act": "gelu", "hidden_size": 2048, "intermediate_size": 16_384},
        **{"num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1, "head_dim": 256},
    },
    "gemma2_2b": {
        **{"model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"},
        **{"query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_size": 4096},
    },
    "gemma2_9b": {
        **{"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14_336},
        **{"num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8},
    },
    "gemma3_270m": {
        **{"model_type": "gemma3_text", "hidden_size": 640, "intermediate_size": 2048, "vocab_size": 262_144},
        **{"num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1},
        **{"max_position_embeddings": 32_768, "sliding_window": 512, "rope_local_base_freq": 10_000.0},
        **{"layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3, "rope_scaling": None},
        "_sliding_window_pattern": 6,
    },
    "gemma3_1b": {
        **{
            "model_type": "gemma3_text",
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "vocab_size": 262_144,
        },
        **{"num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256},
        **{"max_position_embeddings": 32_768, "sliding_window": 512, "sliding_window_pattern": 6},
        **{"rope_theta": 1_000_000, "rope_local_base_freq": 10_000, "query_pre_attn_scalar": 256},
    },
}
"""Keys of the releases' config.json that differ from the defaults of transformers, and some that do not."""


@cache
def preset(name: str) -> ModelConfig:
    config: ModelConfig = load_config("pretrain", [f"model={name}"]).model
    return config


@cache
def count(name: str) -> int:
    return count_parameters(preset(name))


@pytest.mark.parametrize("name", ["gpt2_sc21_1t", "bert_3_9b", "deepseek_v3", "gemma3_1b", "gpt_oss_20b"])
def test_parameters_counted_from_two_layers_are_those_of_all(name: str) -> None:
    config, tp = preset(name), Axis("tp")
    with torch.device("meta"):
        model = family_of(config.kind).model(config, tp=tp)
    shards = (s for s in parameter_shards(model, tp) if s.is_trained)
    assert sum(s.without_padding(s.parameter).numel() for s in shards) == count_parameters(config)


@pytest.mark.parametrize("name", PRESETS)
def test_size_of_a_preset_is_that_of_the_release_and_of_its_help(name: str) -> None:
    """Of models that were released; of papers' below."""
    assert count(name) == (RELEASED | KIN).get(name, count(name))
    millions = count(name) / 1e6
    shown = f"{millions:.1f}M" if millions < 1000 else f"{millions / 1000:.1f}B"
    assert parameters_of(FOLDER / f"{name}.yaml") == shown


@pytest.mark.parametrize("name", sorted(set(RELEASED) - set(CONFIGS) - {n for n in RELEASED if "gpt2" in n}))
def test_llamas_have_the_settings_of_their_config_json(name: str) -> None:
    """What no count of parameters shows."""
    config = preset(name)
    settings = LlamaSettings.of(config)
    family = name.split("_")[0]
    theta, factor, context, eps = SETTINGS.get(name) or SETTINGS[family]
    scaling = ("yarn" if family == "deepseek" else "llama3") if factor > 1 else "default"
    assert (settings.rope_theta, settings.rope_scaling, settings.rope_factor) == (theta, scaling, factor)
    assert (config.max_positions, config.layer_norm_eps) == (context, eps)
    if scaling == "llama3":
        assert settings.rope_original_positions == 8192
        assert (settings.rope_low_freq_factor, settings.rope_high_freq_factor) == (1.0, 4.0)
    assert settings.window == (4096 if family == "mistral" else 0)
    assert (settings.qkv_bias, settings.qk_norm) == (
        family == "qwen2",
        family in ("qwen3", "olmoe"),
    )
    assert settings.tied == (name in TIED)
    assert (config.activation, config.hidden_dropout, config.attention_dropout) == ("silu", 0.0, 0.0)


@pytest.mark.parametrize("name", CONFIGS)
def test_presets_are_what_their_config_json_is_read_as(name: str) -> None:
    """From the keys that their releases hold, and the defaults of transformers for the others."""
    config = MAPPING.read(CONFIGS[name], "config.json")[0]
    settings = LlamaSettings.of(preset(name))
    usual = {name: DEFAULTS[name] for name in NOT_COMPUTED if name != "model_type"}
    assert replace(settings, **usual) == LlamaSettings.of(config)  # type: ignore[arg-type]
    assert replace(preset(name), options={}) == replace(config, options={})


@pytest.mark.parametrize("name", sorted(ACTIVE))
def test_a_token_goes_through_the_published_parameters(name: str) -> None:
    """Without the token table, which multiplies nothing, they are the weights that FLOPs are counted of."""
    config = preset(name)
    active = count_active_parameters(config)
    assert round(active / 1e9, 2) == pytest.approx(ACTIVE[name], abs=0.05)
    layers, table = config.num_layers * layer_weights(config), config.vocab_size * config.hidden_size
    tables = 1 if architecture_of(config).tied else 2
    assert layers + tables * table == pytest.approx(active, rel=1e-3)  # norms apart


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_paper_presets_have_the_published_size(name: str) -> None:
    """To the printed digits, by SC21's own formula: 12 l h² (1 + 13/(12 h) + (V + s)/(12 l h)), V=51,200."""
    config, billions = preset(name), PUBLISHED[name]
    h, layers = config.hidden_size, config.num_layers
    counted = 12 * layers * h * h * (1 + 13 / (12 * h) + (51_200 + config.max_positions) / (12 * layers * h))
    assert abs(counted / 1e9 - billions) <= (0.05 if billions >= 1 else 0.001)
    assert count(name) == pytest.approx(counted, rel=0.01)


def test_every_preset_of_a_paper_is_checked() -> None:
    checked = {*PUBLISHED, *BERTS, *KIN, *RELEASED}
    small = {"bert", "roberta", "llama"}  # of no size
    assert {name for name in PRESETS if not name.endswith(("_tiny", "_demo"))} == checked | small


@pytest.mark.parametrize("name", sorted(BERTS))
def test_berts_have_the_published_size(name: str) -> None:
    """Pretraining heads included, to the digits that the papers print."""
    billions, digits = BERTS[name]
    assert round(count(name) / 1e9, digits) == billions
