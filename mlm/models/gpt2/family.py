"""GPT-2 as a model family."""

from pathlib import Path

from mlm.data.config import DataConfig
from mlm.data.gpt import EvalWindows, GPTDataset
from mlm.data.indexed import IndexedDataset
from mlm.data.sampler import Dataset, SyntheticDataset
from mlm.data.tokenizer import Tokenizer
from mlm.models.config import ModelConfig
from mlm.models.family import ModelFamily
from mlm.util.errors import Problem


class Windows:
    """Windows of seq_length + 1 tokens of shuffled documents; scored ones are in corpus order."""

    def train(
        self,
        data: DataConfig,
        prefix: Path,
        tokenizer: Tokenizer | None,
        num_samples: int,
        *,
        seed: int,
        cache: Path | None,
    ) -> Dataset:
        indexed, length = IndexedDataset(prefix), data.seq_length
        return GPTDataset(indexed, seq_length=length, num_samples=num_samples, seed=seed, cache_dir=cache)

    def validation(self, data: DataConfig, prefix: Path, tokenizer: Tokenizer | None) -> Dataset:
        return EvalWindows(IndexedDataset(prefix), seq_length=data.seq_length)

    def synthetic(self, data: DataConfig, vocab_size: int, num_samples: int, seed: int) -> Dataset:
        return SyntheticDataset(vocab_size, data.seq_length, num_samples, seed)


def model_problem(model: ModelConfig) -> Problem | None:
    if model.activation == "silu":
        problem = f"model.activation=silu is llama's, and model.kind={model.kind} has a GELU or relu2"
        return Problem(("model.activation", "model.kind"), problem, "use model.activation=gelu")
    return decoder_problem(model)


def decoder_problem(model: ModelConfig) -> Problem | None:
    """Return the problem of settings that only BERT has."""
    if model.norm == "post":
        problem = f"model.norm=post is BERT's, and model.kind={model.kind} has its norms first"
        return Problem(("model.norm", "model.kind"), problem, "use model.norm=pre")
    if model.token_types:
        problem = f"model.token_types={model.token_types}: model.kind={model.kind} has no segment types"
        return Problem(("model.token_types", "model.kind"), problem, "use model.token_types=0")
    return None


def head_products(model: ModelConfig, tp: int) -> float:
    return model.hidden_size * model.padded_vocab_size(tp) if model.head == "language_model" else 0.0


FAMILY = ModelFamily(
    model="mlm.models.gpt2.model:GPT2",
    causal=True,
    objective="mlm.models.gpt2.model:NextToken.of",
    samples=Windows(),
    splits_sequences=True,
    head_products=head_products,
    protocol="consecutive windows, every token but the first scored once",
    model_problem=model_problem,
    converts_as="gpt2",
)
