"""The models of `transformers` that mlm's Llama computes: a row of VARIANTS for each model_type.

Keys of config.json and their defaults: the documentation of LlamaConfig, MistralConfig and the others
(https://huggingface.co/docs/transformers/model_doc/llama, …/mistral, …).
"""

from dataclasses import replace

from mlm.convert.huggingface import mapping as hf
from mlm.convert.huggingface.variant import INPUT_NORMS, Defaults, Variant
from mlm.convert.locations import ExpertRows
from mlm.models.config import ModelConfig
from mlm.models.llama.settings import LlamaSettings


def _experts(
    key: str, count: int, per_token: int, width: int | None = None
) -> dict[str, tuple[str, hf.JSON]]:
    """Return keys of a mixture: experts, experts per token, and their width if not intermediate_size."""
    experts = {key: ("num_experts", count), "num_experts_per_tok": ("experts_per_token", per_token)}
    return experts if width is None else experts | {"moe_intermediate_size": ("expert_ffn_size", width)}


_OUTPUT_NORMS = {
    "attention_output_norm": "post_attention_layernorm",
    "mlp_output_norm": "post_feedforward_layernorm",
}
_BOTH_NORMS = {
    **{"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm"},
    **_OUTPUT_NORMS,
}
_SCALAR = {"query_pre_attn_scalar": ("query_pre_attn_scalar", 256)}
_GEMMA: dict[str, bool | str] = {"zero_centered_norms": True}
_LAYER_NORM = {"layer_norm": True, "norm_bias": True}
_NO_BIAS: dict[str, tuple[hf.JSON, ...]] = {"attention_bias": (False,)}
_BIASES: dict[str, tuple[str, hf.JSON]] = {"attention_bias": ("qkv_bias", False), "mlp_bias": ("bias", False)}
_LATENT: dict[str, tuple[str, hf.JSON]] = {
    "kv_lora_rank": ("kv_lora_rank", 512),
    "q_lora_rank": ("q_lora_rank", None),
    "qk_rope_head_dim": ("rope_head_dim", 64),
    "v_head_dim": ("v_head_dim", 128),
    "qk_nope_head_dim": ("unrotated_head_dim", 128),
}
_GRANITE: dict[str, tuple[str, hf.JSON]] = {
    "embedding_multiplier": ("embedding_multiplier", 1.0),
    "attention_multiplier": ("attention_multiplier", 1.0),
    "residual_multiplier": ("residual_multiplier", 1.0),
    "logits_scaling": ("logits_scaling", 1.0),
}
_ALL_SLIDE = ("sliding_window",)
_LAST_SLIDE = ("sliding_window", "use_sliding_window", "max_window_layers")
_GLM = Variant(
    classes="Glm",
    defaults=Defaults(
        4096, 13696, 40, 32, 2, 131072, 151552, head_dim=128, rotary_fraction=0.5, eps=1.5625e-7
    ),
    fields={"attention_bias": ("qkv_bias", True)},
    rotates_neighbours=True,
    fuses_gate=True,
)
_COHERE = Variant(
    classes="Cohere",
    options={"parallel": True, "layer_norm": True},
    defaults=Defaults(8192, 22528, 40, 64, None, 8192, 256000, theta=5e5, eps=1e-5),
    fields={"logit_scale": ("logit_multiplier", 0.0625)},
    fixed=_NO_BIAS | {"use_qk_norm": (False,)},
    tied=True,
    eps_key="layer_norm_eps",
    rotates_neighbours=True,
    writes_head_dim="unusual",
)
_MISTRAL = Variant(
    classes="Mistral",
    marks=("window",),
    defaults=Defaults(4096, 14336, 32, 32, 8, 131072, 32000),
    window_keys=_ALL_SLIDE,
    window=4096,
)
_QWEN2 = Variant(
    classes="Qwen2",
    marks=("qkv_bias",),
    options={"qkv_bias": True},
    defaults=Defaults(4096, 22016, 32, 32, 32, 32768, 151936),
    writes_head_dim="unusual",
    window_keys=_LAST_SLIDE,
    window=4096,
    full_layers=28,
)
_OLMO2 = Variant(
    classes="Olmo2",
    marks=("output_norms", "qk_norm_whole"),
    options={"input_norms": False, "output_norms": True, "qk_norm": True, "qk_norm_whole": True},
    defaults=Defaults(4096, 11008, 32, 32, None, 2048, 50304, eps=1e-5),
    fixed=_NO_BIAS,
    norms=_OUTPUT_NORMS,
    writes_head_dim="unusual",
)
_GEMMA2 = Variant(
    classes="Gemma2",
    marks=("zero_centered_norms", "output_norms"),
    options=_GEMMA | {"output_norms": True},
    defaults=Defaults(2304, 9216, 26, 8, 4, 8192, 256000, head_dim=256),
    fields=_SCALAR
    | {
        "attn_logit_softcapping": ("attention_softcap", 50.0),
        "final_logit_softcapping": ("logit_softcap", 30.0),
    },
    fixed=_NO_BIAS,
    activation="hidden_activation",
    activations=(hf.TANH_GELU[1], *hf.TANH_GELU, *hf.SILU, *hf.EXACT_GELU),
    norms=_BOTH_NORMS,
    tied=True,
    scales_embedding=True,
    window_keys=_ALL_SLIDE,
    window=4096,
    layer_keys=("layer_types",),
    sliding_layers="sf",
)
VARIANTS = {
    "llama": Variant(
        classes="Llama", defaults=Defaults(4096, 11008, 32, 32, None, 2048, 32000), fields=_BIASES
    ),
    "arcee": Variant(
        classes="Arcee",
        activations=hf.RELU_SQUARED,
        options={"gated": False},
        defaults=Defaults(2560, 18432, 32, 32, None, 4096, 32000, eps=1e-5),
        fields=_BIASES,
    ),
    "ernie4_5": Variant(
        classes="Ernie4_5",
        defaults=Defaults(1024, 3072, 18, 16, 2, 131072, 103424, head_dim=128, theta=5e5, eps=1e-5),
        fixed={"use_bias": (False,)},
        tied=True,
        rotates_neighbours=True,
    ),
    "glm": _GLM,
    "helium": Variant(
        classes="Helium",
        defaults=Defaults(2560, 7040, 24, 20, 20, 4096, 48000, head_dim=128, theta=1e5, eps=1e-8),
        fixed=_NO_BIAS | {"mlp_bias": (False,)},
        rotates_neighbours=True,
    ),
    "phi3": Variant(
        classes="Phi3",
        defaults=Defaults(3072, 8192, 32, 32, None, 4096, 32064, rotary_fraction=1.0, eps=1e-5),
        absent={"original_max_position_embeddings": 4096},
        window_keys=_ALL_SLIDE,
        writes_head_dim="unusual",
        fuses_qkv=True,
        fuses_gate=True,
    ),
    "seed_oss": Variant(
        classes="SeedOss",
        defaults=Defaults(4096, 27648, 64, 80, 8, 524288, 155136, head_dim=128),
        fields={"attention_bias": ("qkv_bias", True), "attention_dropout": ("attention_dropout", 0.1)},
        fixed={"attention_out_bias": (False,), "mlp_bias": (False,)},
        written={"residual_dropout": 0.0},
    ),
    "glm4": replace(
        _GLM,
        classes="Glm4",
        options={"output_norms": True},
        norms={
            **INPUT_NORMS,
            "attention_output_norm": "post_self_attn_layernorm",
            "mlp_output_norm": "post_mlp_layernorm",
        },
    ),
    "granite": Variant(
        classes="Granite",
        defaults=Defaults(4096, 11008, 32, 32, None, 2048, 32000),
        fields=_GRANITE,
        fixed=_NO_BIAS | {"mlp_bias": (False,)},
        writes_head_dim="unusual",
    ),
    "starcoder2": Variant(
        classes="Starcoder2",
        options={"qkv_bias": True, "bias": True, "gated": False, **_LAYER_NORM},
        activations=(hf.TANH_GELU[1], *hf.TANH_GELU, *hf.EXACT_GELU, *hf.RELU_SQUARED, *hf.SILU),
        defaults=Defaults(3072, 12288, 30, 24, 2, 4096, 49152, eps=1e-5),
        fields={"initializer_range": ("init_std", 0.018042)},
        fixed={"use_bias": (True,)},
        written={"residual_dropout": 0.0, "embedding_dropout": 0.0},
        tied=True,
        eps_key="norm_epsilon",
        mlp=("c_fc", "c_proj"),
        writes_head_dim="unusual",
        window_keys=_ALL_SLIDE,
    ),
    "stablelm": Variant(
        classes="StableLm",
        options=_LAYER_NORM,
        defaults=Defaults(2560, 6912, 32, 32, 32, 4096, 50304, rotary_fraction=0.25, eps=1e-5),
        fields={
            "use_qkv_bias": ("qkv_bias", False),
            "use_parallel_residual": ("parallel", False),
        },
        fixed={"qk_layernorm": (False,)},
        written={"hidden_dropout": 0.0},
        eps_key="layer_norm_eps",
        writes_head_dim="never",
    ),
    "nemotron": Variant(
        classes="Nemotron",
        activations=(*hf.RELU_SQUARED, *hf.SILU, *hf.EXACT_GELU, *hf.TANH_GELU),
        options={"gated": False, "zero_centered_norms": True, **_LAYER_NORM},
        defaults=Defaults(6144, 24576, 32, 48, None, 4096, 256000, rotary_fraction=0.5, eps=1e-5),
        fields={"initializer_range": ("init_std", 0.0134)},
        fixed=_NO_BIAS | {"mlp_bias": (False,)},
        eps_key="norm_eps",
    ),
    "cohere": _COHERE,
    "cohere2": replace(
        _COHERE,
        classes="Cohere2",
        marks=("parallel", "rotary_layers"),
        defaults=_COHERE.defaults._replace(theta=1e4),
        fixed=_NO_BIAS,
        writes_head_dim="never",
        window_keys=_ALL_SLIDE,
        window=4096,
        layer_keys=("layer_types", "sliding_window_pattern"),
        sliding_layers="sssf",
        full_layers_lack_rotary=True,
    ),
    "internlm3": Variant(
        classes="Llama",
        defaults=Defaults(4096, 10240, 48, 32, 2, 32768, 128512, head_dim=128, eps=1e-5),
        aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
        fixed=_NO_BIAS | {"mlp_bias": (False,)},
    ),
    "mistral": _MISTRAL,
    "ministral": replace(
        _MISTRAL, classes="Ministral", marks=("window", "window_layers"), layer_keys=("layer_types",)
    ),
    "smollm3": Variant(
        classes="SmolLM3",
        marks=("rotary_layers",),
        defaults=Defaults(2048, 11008, 36, 16, 4, 32768, 128256, theta=2e6),
        fixed=_NO_BIAS | {"mlp_bias": (False,)},
        tied=True,
        writes_head_dim="unusual",
        window_keys=("sliding_window", "use_sliding_window"),
        layer_keys=("layer_types", "no_rope_layers"),
    ),
    "qwen2": _QWEN2,
    "qwen3": replace(
        _QWEN2,
        classes="Qwen3",
        marks=("qk_norm",),
        options={"qk_norm": True},
        defaults=_QWEN2.defaults._replace(head_dim=128),
        fixed=_NO_BIAS,
        writes_head_dim="always",
    ),
    "mixtral": Variant(
        classes="Mixtral",
        marks=("num_experts",),
        defaults=Defaults(4096, 14336, 32, 32, 8, 131072, 32000, theta=1e6, eps=1e-5),
        fields=_experts("num_local_experts", 8, 2),
        fixed={"router_jitter_noise": (0.0, 0)},
        window_keys=_ALL_SLIDE,
        block="block_sparse_moe",
        projections=("w1", "w3", "w2"),
    ),
    "granitemoe": Variant(
        classes="GraniteMoe",
        marks=("num_experts", "attention_multiplier"),
        defaults=Defaults(4096, 11008, 32, 32, None, 2048, 32000),
        fields=_experts("num_local_experts", 8, 2) | _GRANITE,
        fixed=_NO_BIAS,
        writes_head_dim="unusual",
        block="block_sparse_moe",
        router="router.layer",
        all_experts=(
            ("input_linear.weight", ExpertRows(2)),
            ("output_linear.weight", ExpertRows()),
        ),
    ),
    "ernie4_5_moe": Variant(
        classes="Ernie4_5_Moe",
        marks=("num_experts", "has_router_bias"),
        options={"router_bias": True},
        defaults=Defaults(2560, 12288, 28, 20, 4, 131072, 103424, theta=5e5, eps=1e-5),
        aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        fields={
            "moe_num_experts": ("num_experts", 64),
            "moe_k": ("experts_per_token", 6),
            "moe_intermediate_size": ("expert_ffn_size", 1536),
            "moe_num_shared_experts": ("shared_experts", 2),
        },
        may_be_0=frozenset({"shared_experts"}),
        fixed={"use_bias": (False,), "moe_layer_interval": (1,)},
        written={"moe_layer_end_index": -1},
        absent={"moe_layer_start_index": 1},
        dense_key="moe_layer_start_index",
        router_bias="moe_statics.e_score_correction_bias",
        tied=True,
        rotates_neighbours=True,
    ),
    "glm4_moe": Variant(
        classes="Glm4Moe",
        marks=("num_experts", "has_router_bias", "router_scores=sigmoid"),
        options={"router_scores": "sigmoid", "router_bias": True},
        defaults=Defaults(4096, 10944, 46, 96, 8, 131072, 151552, rotary_fraction=0.5, eps=1e-5),
        fields=_experts("n_routed_experts", 128, 8, 1408)
        | {
            "n_shared_experts": ("shared_experts", 1),
            "n_group": ("router_groups", 1),
            "topk_group": ("router_top_groups", 1),
            "routed_scaling_factor": ("router_scale", 1.0),
            "attention_bias": ("qkv_bias", False),
            "use_qk_norm": ("qk_norm", False),
        },
        absent={"first_k_dense_replace": 1},
        written={"num_nextn_predict_layers": 0},
        normalises=True,
        dense_key="first_k_dense_replace",
    ),
    "qwen3_moe": Variant(
        classes="Qwen3Moe",
        marks=("num_experts", "qk_norm"),
        options={"qk_norm": True},
        defaults=Defaults(2048, 6144, 24, 32, 4, 32768, 151936),
        aliases={"num_local_experts": "num_experts"},  # since transformers 5
        fields=_experts("num_experts", 128, 8, 768),
        fixed=_NO_BIAS | {"decoder_sparse_step": (1,)},
        window_keys=_LAST_SLIDE,
        window=4096,
        normalises=False,
        dense_key="mlp_only_layers",
    ),
    "qwen2_moe": Variant(
        classes="Qwen2Moe",
        marks=("num_experts", "shared_gate"),
        options={"shared_gate": True},
        defaults=Defaults(2048, 5632, 24, 16, 16, 32768, 151936),
        aliases={"num_local_experts": "num_experts"},
        fields=_experts("num_experts", 60, 4, 1408)
        | {
            "shared_expert_intermediate_size": ("shared_width", 5632),
            "qkv_bias": ("qkv_bias", True),
        },
        # with windows every other layer of the first max_window_layers has one
        fixed={"decoder_sparse_step": (1,), "use_sliding_window": (False,)},
        writes_head_dim="unusual",
        window_keys=_LAST_SLIDE,
        window=4096,
        full_layers=28,
        normalises=False,
        dense_key="mlp_only_layers",
        shared="shared_expert",
    ),
    "olmoe": Variant(
        classes="Olmoe",
        marks=("num_experts", "qk_norm_whole"),
        options={"qk_norm": True, "qk_norm_whole": True},
        defaults=Defaults(2048, 2048, 16, 16, None, 4096, 50304, eps=1e-5),
        fields=_experts("num_experts", 64, 8),
        fixed=_NO_BIAS | {"clip_qkv": (None,)},
        writes_head_dim="never",
        normalises=False,
    ),
    "deepseek_v3": Variant(
        classes="DeepseekV3",
        marks=("kv_lora_rank",),
        options={"router_scores": "sigmoid", "router_bias": True},
        defaults=Defaults(7168, 18432, 61, 128, None, 4096, 129280),
        absent={"q_lora_rank": 1536, "first_k_dense_replace": 3},
        fields=_experts("n_routed_experts", 256, 8, 2048)
        | _LATENT
        | {
            "n_shared_experts": ("shared_experts", 1),
            "n_group": ("router_groups", 8),
            "topk_group": ("router_top_groups", 4),
            "routed_scaling_factor": ("router_scale", 2.5),
        },
        fixed=_NO_BIAS
        | {
            "rope_interleave": (True,),
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "moe_layer_freq": (1,),
        },
        written={"num_nextn_predict_layers": 0},
        writes_head_dim="never",
        normalises=True,
        dense_key="first_k_dense_replace",
    ),
    "deepseek_v2": Variant(
        classes="DeepseekV2",
        marks=("kv_lora_rank", "num_experts", "router_scores=softmax"),
        options={"router_normalise": False, "router_group_best": 1},
        defaults=Defaults(4096, 11008, 32, 32, None, 2048, 102400),
        absent={"q_lora_rank": 1536, "first_k_dense_replace": 0, "topk_method": "greedy"},
        fields=_experts("n_routed_experts", 64, 6, 1407)
        | _LATENT
        | {
            "n_shared_experts": ("shared_experts", 2),
            "n_group": ("router_groups", None),
            "topk_group": ("router_top_groups", None),
            "routed_scaling_factor": ("router_scale", 1.0),
        },
        fixed=_NO_BIAS
        | {
            "mlp_bias": (False,),
            "norm_topk_prob": (False, None),
            "scoring_func": ("softmax",),
            "topk_method": ("greedy", "group_limited_greedy"),
            "moe_layer_freq": (1,),
        },
        writes_head_dim="never",
        dense_key="first_k_dense_replace",
    ),
    "gpt_oss": Variant(
        classes="GptOss",
        marks=("num_experts", "attention_sinks"),
        options={
            **{"attention_sinks": True, "qkv_bias": True, "bias": True},
            "router_logit_bias": True,
        },
        defaults=Defaults(2880, 2880, 36, 64, 8, 131072, 201088, head_dim=64, theta=1.5e5, eps=1e-5),
        fields=_experts("num_local_experts", 128, 4)
        | {"swiglu_alpha": ("swiglu_alpha", 1.702), "swiglu_limit": ("swiglu_limit", 7.0)},
        fixed={"attention_bias": (True,)},
        absent={
            "rope_parameters": {
                **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0},
                **{"truncate": False, "original_max_position_embeddings": 4096},
            },
        },
        activations=hf.SILU,
        window_keys=_ALL_SLIDE,
        window=128,
        layer_keys=("layer_types",),
        sliding_layers="sf",
        router="router",
        all_experts=(
            ("experts.gate_up_proj", ExpertRows(2, interleaves=True, transposed=True)),
            ("experts.down_proj", ExpertRows(transposed=True)),
        ),
        quantised="mxfp4",
    ),
    "olmo2": _OLMO2,
    "olmo3": replace(
        _OLMO2,
        classes="Olmo3",
        marks=("output_norms", "qk_norm_whole", "window"),
        defaults=_OLMO2.defaults._replace(theta=5e5),
        window_keys=_ALL_SLIDE,
        window=4096,
        layer_keys=("layer_types",),
        sliding_layers="sssf",
        sliding_theta=5e5,
    ),
    "gemma": Variant(
        classes="Gemma",
        marks=("zero_centered_norms",),
        options=_GEMMA,
        defaults=Defaults(3072, 24576, 28, 16, 16, 8192, 256000, head_dim=256),
        fixed=_NO_BIAS,
        activations=(hf.TANH_GELU[1], *hf.TANH_GELU, *hf.SILU),
        meanings={"hidden_act": {"gelu": hf.TANH_GELU[1]}},  # of the first releases
        tied=True,
        scales_embedding=True,
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        classes="Gemma3",
        marks=("zero_centered_norms", "output_norms", "qk_norm"),
        options=_GEMMA | {"output_norms": True, "qk_norm": True},
        defaults=_GEMMA2.defaults._replace(positions=131072, vocabulary=262208, theta=1e6),
        fields=_SCALAR | {"final_logit_softcapping": ("logit_softcap", None)},
        fixed=_NO_BIAS | {"attn_logit_softcapping": (None,)},  # which its class does not compute
        base="Gemma3TextModel",
        layer_keys=("layer_types", "sliding_window_pattern"),
        sliding_layers="sssssf",
        sliding_theta=1e4,
    ),
}
"""model_type -> its row."""


def model_type(model: ModelConfig) -> str:
    """Return the model_type of a model: model.options.model_type, else the last row whose marks it has."""
    settings = LlamaSettings.of(model)
    if settings.model_type:
        return settings.model_type
    rows = reversed(VARIANTS.items())

    def has(mark: str) -> bool:
        name, _, value = mark.partition("=")
        setting = getattr(settings, name)
        return setting == value if value else bool(setting)

    matching = (kind for kind, row in rows if row.marks and all(map(has, row.marks)))
    return next(matching, "llama")
