"""Model families: one object holds all that the rest of the toolkit knows of a family.

`model.kind` names a shipped family (gpt2, bert, llama), or one of the user's own by its import path,
`my_package.my_family:FAMILY`. A variation of a shipped one takes the rest from it:

    FAMILY = replace(gpt2.FAMILY, model=MyGPT2)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from mlm.config.imports import imported
from mlm.models.sizes import Sizes, usual_sizes
from mlm.util.errors import Problem

if TYPE_CHECKING:  # settings know their family, so nothing here may need them, or torch, at run time
    import torch

    from mlm.data.config import DataConfig
    from mlm.data.sampler import Dataset, MicroBatch
    from mlm.data.tokenizer import Tokenizer
    from mlm.models.backbone import Transformer
    from mlm.models.config import ModelConfig
    from mlm.models.huggingface import HuggingFaceMapping
    from mlm.models.megatron import MegatronMapping
    from mlm.models.objective import Objective
    from mlm.parallel.mesh import ParallelContext

SHIPPED = {
    "gpt2": "mlm.models.gpt2.family",
    "bert": "mlm.models.bert.family",
    "llama": "mlm.models.llama.family",
}
"""Module of the FAMILY of each shipped kind."""
SIZES = {
    "gpt2": "mlm.models.sizes:usual_sizes",
    "bert": "mlm.models.sizes:usual_sizes",
    "llama": "mlm.models.llama.settings:sizes",
}
"""`sizes` of each, where neither the family nor torch is imported: a plan's formulas need no more."""

C = TypeVar("C", bound="Transformer")
B = TypeVar("B", bound="MicroBatch")


class SampleSource(Protocol):
    """The samples that a family is trained and scored on.

    `tokenizer` is None unless the family has a `check_tokenizer`. All raise UserError where samples cannot
    be made.
    """

    def train(
        self,
        data: "DataConfig",
        prefix: Path,
        tokenizer: "Tokenizer | None",
        num_samples: int,
        *,
        seed: int,
        cache: Path | None,
    ) -> "Dataset":
        """Return training samples 0 to num_samples of an indexed corpus; `cache` keeps their order."""
        ...

    def validation(self, data: "DataConfig", prefix: Path, tokenizer: "Tokenizer | None") -> "Dataset":
        """Return what of an indexed corpus is scored, each once and the same whatever the run's seed."""
        ...

    def synthetic(self, data: "DataConfig", vocab_size: int, num_samples: int, seed: int) -> "Dataset":
        """Return random samples of data.seq_length tokens."""
        ...


def no_problem(*_: object) -> None:
    """Settings that need no check."""


def no_problems(*_: object) -> list[Problem]:
    """Corpora that need no check."""
    return []


@dataclass(frozen=True, kw_only=True)
class ModelFamily(Generic[C, B]):
    """A model family. C is the class of its models, B its micro-batches."""

    model: type[C]
    """Module of one pipeline stage, or of the whole model."""
    causal: bool
    """True if a token attends only to itself and to the tokens before it: such a model generates text, looks
    at no padding on the right, and is finetuned on texts that end with the end-of-document token. Others read
    both ways, and sequences framed by [CLS] and [SEP]."""
    objective: "Callable[[DataConfig, ParallelContext, torch.dtype], Objective[C, B]]"
    """Objective of pretraining; the dtype is that of activations."""
    samples: SampleSource
    """Samples of pretraining."""
    splits_sequences: bool = False
    """True if its models and objective take sequences that cp ranks split (parallel/context/zigzag.py)."""
    check_tokenizer: "Callable[[Tokenizer], object] | None" = None
    """Raises UserError if samples cannot be made with a tokenizer; None if they depend on none."""
    scored: float = 1.0
    """Share of the tokens of pretraining that go through the vocabulary projection."""
    packs: bool = True
    """True if its attention takes packed sequences in place of a bias (mlm/models/packed.py)."""
    data_keys: tuple[str, ...] = ()
    """Keys of data.* that shape the samples of this family and not of others."""
    sizes: "Callable[[ModelConfig], Sizes]" = usual_sizes
    """Return parts and sizes of a model: heads of keys, gates, biases, what is tied."""
    num_head_parameters: "Callable[[ModelConfig], int]"
    """Parameters after the layers and their norm, without the language model's output layer."""
    head_products: "Callable[[ModelConfig, int], float]"
    """Weights that a token of pretraining is multiplied with after the layers, at a tp: an average."""
    options: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Names of its own settings, model.options.NAME, with their defaults."""
    loss_unit: str = "nats per token"
    """Unit of the loss in curves."""
    protocol: str
    """Scoring by `mlm eval loss`, for its receipt."""
    model_problem: "Callable[[ModelConfig], Problem | None]" = no_problem
    """Return the problem of a model's settings."""
    data_problem: "Callable[[DataConfig], Problem | None]" = no_problem
    """Return the problem of data settings that samples cannot be made with."""
    corpus_problems: "Callable[[ModelConfig, Sequence[Path], Path | None], list[Problem]]" = no_problems
    """Return the problems of making samples of corpora (their prefixes) with a tokenizer.json."""
    huggingface: "HuggingFaceMapping | None" = None
    """None if `transformers` has no such model."""
    megatron: "MegatronMapping | None" = None
    """None if Megatron-LM has no such model."""


def family_of(kind: str) -> "ModelFamily[Transformer, MicroBatch]":
    """Return the family that model.kind names. Raises OwnCodeError (a UserError) if there is none."""
    if kind in SHIPPED:
        return shipped(kind)
    family: ModelFamily[Transformer, MicroBatch] = imported("model.kind", kind, SHIPPED, ModelFamily)
    return family


@cache
def shipped(kind: str) -> "ModelFamily[Transformer, MicroBatch]":
    """Return a family of SHIPPED."""
    family: ModelFamily[Transformer, MicroBatch] = import_module(SHIPPED[kind]).FAMILY
    return family


def count_parameters(model: "ModelConfig") -> int:
    """Parameters of a model, counted in its modules: no formula knows those of the user's own family.

    `model` has no padding (vocab_multiple=1). Raises OwnCodeError (a UserError) if there is no such family.
    """
    family = family_of(model.kind)
    with import_module("torch").device("meta"):
        whole: Any = family.model(model)
    return sum(parameter.numel() for parameter in whole.parameters())


def sizes_of(model: "ModelConfig") -> Sizes:
    """Return parts and sizes of a model. Raises OwnCodeError (a UserError) if there is no such family."""
    if model.kind not in SIZES:
        return family_of(model.kind).sizes(model)
    module, _, name = SIZES[model.kind].partition(":")
    found: Sizes = getattr(import_module(module), name)(model)
    return found
