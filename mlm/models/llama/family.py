"""Llama, Mistral, Qwen, OLMoE and DeepSeek-V3 as one model family."""

from mlm.models.family import ModelFamily
from mlm.models.gpt2.family import Windows, head_products
from mlm.models.llama import settings

FAMILY = ModelFamily(
    model="mlm.models.llama.model:Llama",
    causal=True,
    packs=False,  # another order of heads, and windows
    objective="mlm.models.gpt2.model:NextToken.of",
    samples=Windows(),
    splits_sequences=True,
    options=settings.DEFAULTS,
    settings=settings.LlamaSettings,
    architecture=settings.architecture,
    head_products=head_products,
    protocol="consecutive windows, every token but the first scored once",
    model_problem=settings.model_problem,
    warning=settings.warning,
    dense_twin=settings.dense_twin,
    converts_as="llama",
)
