"""Rotary settings as config.json may spell them: resolved as `transformers` resolves them, or rejected."""

import copy
import random
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mlm.convert.huggingface.llama import MAPPING
from mlm.models.llama.rope import frequencies
from mlm.models.llama.settings import LlamaSettings
from mlm.util.errors import ConfigError

KINDS = ("llama", "mistral", "qwen2", "qwen3")
CPU = torch.device("cpu")
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
ORIGINAL = "original_max_position_embeddings"


def config_of(kind: str = "llama", **settings: Any) -> dict[str, Any]:
    shape = {"vocab_size": 97, "hidden_size": 128, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64}
    return {"model_type": kind, **shape, **heads, "max_position_embeddings": 4096, **settings}


def our_table(config: dict[str, Any]) -> tuple[torch.Tensor, float]:
    """Frequencies and factor of a config.json; raises ConfigError."""
    return frequencies(LlamaSettings.of(MAPPING.read(config, "config.json")[0]), torch.float32, CPU)


def check_equal(config: dict[str, Any]) -> None:
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(config))
    kind = theirs.rope_parameters["rope_type"]
    compute = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    (table, factor), (want, their_factor) = our_table(config), compute(theirs)
    # float32 products in another order; a ramp's end is the difference of two numbers, factor times as large
    torch.testing.assert_close(table, want, rtol=2e-5, atol=0)
    assert factor == pytest.approx(float(their_factor), rel=1e-12)


def one_of(draw: random.Random, *values: Any) -> Any:
    return draw.choice(values)


def random_config(draw: random.Random) -> dict[str, Any]:
    """A config.json with rotary settings that are mostly usual, with odd ones among them."""

    def maybe(share: float, **entries: Any) -> dict[str, Any]:
        return entries if draw.random() < share else {}

    kind = one_of(draw, "default", "linear", "dynamic", *(["llama3"] * 3), *(["yarn"] * 6))
    rope: dict[str, Any] = {one_of(draw, "rope_type", "rope_type", "type"): kind}
    contexts = (8, 64, 1024, 2048, 4096, 8192, 100_000)
    if kind != "default":
        rope |= maybe(0.95, factor=one_of(draw, 1, 1.0, 2, 8.0, 32.5, 40))
    if kind == "llama3":
        rope |= maybe(0.95, low_freq_factor=one_of(draw, 1, 1.0, 2.5))
        rope |= maybe(0.95, high_freq_factor=one_of(draw, 4, 4.0, 32, 1.0))
        rope |= maybe(0.7, **{ORIGINAL: one_of(draw, *contexts)})
    if kind == "yarn":
        rope |= maybe(0.7, **{ORIGINAL: one_of(draw, *contexts)})
        rope |= maybe(0.3, attention_factor=one_of(draw, None, 1.0, 1.3, 2, 0.0))
        rope |= maybe(0.3, beta_fast=one_of(draw, None, 0, 32, 64.0, 4, 0.5))
        rope |= maybe(0.3, beta_slow=one_of(draw, None, 0, 1, 2.0, 30))
        rope |= maybe(0.3, truncate=one_of(draw, True, False, None))
        rope |= maybe(0.3, mscale=one_of(draw, None, 0, 1.0, 0.707, 2))
        rope |= maybe(0.3, mscale_all_dim=one_of(draw, None, 0, 1.0, 0.707, 3))
        rope |= maybe(0.15, factor=None)
    rope |= maybe(0.03, **{draw.choice([*rope]): one_of(draw, None, "8", -1, [2], {"a": 1}, 0)})
    theta = one_of(draw, 100.0, 10000, 500000.0, 1e6)
    spelling = one_of(draw, "rope_scaling", "rope_parameters")
    inside = maybe(0.5, rope_theta=theta) if spelling == "rope_scaling" else {"rope_theta": theta}
    other = {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}}
    return config_of(
        draw.choice(KINDS),
        **{spelling: rope | inside},
        **maybe(0.5, rope_theta=one_of(draw, 10000.0, 300)),
        **maybe(0.25, **{ORIGINAL: one_of(draw, *contexts, None)}),
        **(maybe(0.1, **other) if spelling == "rope_scaling" else {}),
        **maybe(0.3, max_position_embeddings=one_of(draw, 64, 2048, 131072)),
    )


def test_200_random_settings_are_those_of_transformers_or_rejected() -> None:
    """What theirs cannot compute is rejected, too; most of what it can is computed."""
    draw, rejected = random.Random(0), 0
    for _ in range(200):
        config = random_config(draw)
        try:
            our_table(config)
        except ConfigError:
            rejected += 1
        else:
            check_equal(config)
    assert 20 <= rejected <= 100


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "linear", "factor": None}, "factor=null"),
        ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor=null"),
        ({**YARN, ORIGINAL: None}, "original_max_position_embeddings=null"),
        ({**YARN, "factor": None, ORIGINAL: 8192}, "factor=0.5"),
        ({**YARN, "mscale": -1.0, "mscale_all_dim": 1.0}, "mscale=-1.0"),
        ({**YARN, "truncate": "no"}, "truncate=no"),
        ({"full_attention": YARN, "sliding_attention": YARN}, "full_attention: settings of some layers"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_rejected_by_name(rope: dict[str, Any], named: str) -> None:
    for spelling in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ConfigError) as caught:
            our_table(config_of(**{spelling: rope}))
        assert f"{spelling}.{named}" in str(caught.value)


def test_a_context_that_is_none_is_rejected_where_another_counts() -> None:
    """As by `transformers`, which checks it first."""
    rope = {**YARN, ORIGINAL: None}
    with pytest.raises(ConfigError, match="original_max_position_embeddings=null"):
        our_table(config_of(rope_scaling=rope, original_max_position_embeddings=2048))
