"""Llama, Mistral, Qwen 2 and Qwen 3 as one model family."""

from mlm.data.sampler import Batch
from mlm.models.family import ModelFamily
from mlm.models.gpt2.family import Windows, head_products
from mlm.models.gpt2.objective import NextToken
from mlm.models.llama import huggingface
from mlm.models.llama.model import Llama
from mlm.models.llama.settings import DEFAULTS, architecture, model_problem

FAMILY: ModelFamily[Llama, Batch] = ModelFamily(
    model=Llama,
    causal=True,
    packs=False,  # its heads lie otherwise, and a window would have to be one of the kernel's
    objective=NextToken.of,
    samples=Windows(),
    splits_sequences=True,
    options=DEFAULTS,
    architecture=architecture,
    head_products=head_products,
    protocol="consecutive windows, every token but the first scored once",
    model_problem=model_problem,
    huggingface=huggingface.MAPPING,
)
