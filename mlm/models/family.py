"""Model families: one object describes a family to the rest of the toolkit.

`model.kind` names a shipped family (gpt2, bert, roberta, llama), or a custom one by its import path,
`my_package.my_family:FAMILY`. A variation of a shipped family replaces some of its fields:

    FAMILY = replace(gpt2.FAMILY, model=MyGPT2)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from mlm.config.imports import OwnCodeError, imported
from mlm.models.config import KINDS, ModelConfig
from mlm.parallel.config import AttentionScores
from mlm.util.errors import Problem, format_value

if TYPE_CHECKING:  # checks of settings need no torch
    import torch
    from torch import Tensor, nn

    from mlm.data.config import DataConfig
    from mlm.data.sampler import Dataset, MicroBatch
    from mlm.data.tokenizer import Tokenizer
    from mlm.parallel.dropout import DropoutStream
    from mlm.parallel.mesh import ParallelContext

T = TypeVar("T")
C_in = TypeVar("C_in", bound="nn.Module", contravariant=True)
B_in = TypeVar("B_in", bound="MicroBatch", contravariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Parts and sizes of a model beyond ModelConfig; the defaults are GPT-2's."""

    head_dim: int
    """Width of one attention head, D."""
    kv_heads: int
    """Heads of keys and of values, K; num_heads where each query head has its own."""
    value_dim: int = 0
    """Width of the values of one head; 0 for head_dim."""
    gated: bool = False
    """True for an MLP of three matrices: its input is multiplied by a gate (arXiv:2002.05202)."""
    bias: bool = True
    """True if attention's output and the MLP have biases."""
    learned_positions: bool = True
    """True if there is a table of positions."""
    position_offset: int = 0
    """Row of that table for the first token of a sequence."""
    tied: bool = True
    """True if a language model's output layer is the token table."""
    window: int = 0
    """Tokens that a token attends to, itself included; 0 for all before it."""
    window_layers: str = ""
    """Layers with the window, a pattern of s (sliding) and f (full) that repeats; empty for all."""
    attention_scale: float | None = None
    """Factor of attention's scores; None for 1 / sqrt(head_dim)."""
    attention_softcap: float = 0.0
    """Bound of attention's scores; 0 for none."""
    embedding_multiplier: float = 1.0
    """Factor of the token table's rows as they enter the first layer."""
    changes_positions_after: int = 0
    """Tokens beyond which all positions of a text have another encoding (longrope); 0 for none."""
    residual_multiplier: float = 1.0
    """Factor of the outputs of attention and MLP as they join the residual stream."""
    logit_multiplier: float = 1.0
    """Factor of the logits."""
    is_parallel: bool = False
    """True if attention and MLP read the same norm of the residual stream."""
    input_norms: bool = True
    """True if the inputs of attention and MLP are normed, with norm=pre."""
    output_norms: bool = False
    """True if the outputs of attention and MLP are normed before they join the residual stream."""
    experts: int = 0
    """Experts of each layer in place of its MLP; 0 for a dense model."""
    experts_per_token: int = 0
    """Experts that a token goes through."""
    active_size: int = 0
    """Total width of the experts that a token goes through."""
    dense_layers: int = 0
    """First layers without experts."""

    @property
    def values_dim(self) -> int:
        return self.value_dim or self.head_dim

    def scores(self, layer: int) -> AttentionScores:
        """Scores of a layer's attention, by its global number."""
        is_sliding = not self.window_layers or self.window_layers[layer % len(self.window_layers)] == "s"
        return AttentionScores(
            window=self.window if is_sliding else 0,
            scale=self.attention_scale,
            softcap=self.attention_softcap,
        )

    def attended(self, seq_length: int, num_layers: int) -> float:
        """Attended tokens per token, mean over the layers: S, as FLOP formulas ignore the causal mask.

        A window W < S leaves S W - W^2/2 of the S^2/2 pairs under the mask.
        """
        widths = (self.scores(layer).window or seq_length for layer in range(num_layers))
        return sum((w := min(width, seq_length)) * (2 - w / seq_length) for width in widths) / num_layers


class SampleSource(Protocol):
    """Samples for training and scoring a family.

    `tokenizer` is None unless the family has a `check_tokenizer`. All raise UserError if samples cannot be
    made.
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

    def validation(self, data: "DataConfig", prefix: Path, tokenizer: "Tokenizer | None") -> "Dataset":
        """Return the scored samples of an indexed corpus, each once, independent of the run's seed."""

    def synthetic(self, data: "DataConfig", vocab_size: int, num_samples: int, seed: int) -> "Dataset":
        """Return random samples of data.seq_length tokens."""


class Objective(Protocol[C_in, B_in]):
    """Training objective: sums over a micro-batch, and their divisors.

    `metrics` names its k numbers, of which the first `num_losses` are minimised.
    """

    metrics: tuple[str, ...]
    num_losses: int
    methods: tuple[str, ...]
    """Methods of the model that it calls, other than `forward`."""

    def counts(self, batch: B_in) -> Sequence[int]:
        """Return the number of terms in each part of a micro-batch: scored tokens, samples. On the host.

        Over cp ranks the number on all of them; `output` and `sums` add up this rank's.
        """

    def output(
        self, chunk: C_in, batch: B_in, scale: "Tensor", stream: "DropoutStream | None", x: "Tensor | None"
    ) -> "Tensor":
        """Return a stage's hidden states, or in the last stage `scale` [k] times each part's sum.

        The latter is [k], with differentiable losses. `x` are the hidden states of the previous stage, None
        in the first.
        """

    def sums(self, chunk: C_in, batch: B_in, x: "Tensor | None") -> "Tensor":
        """Return the same without dropout, gradients and scale: [k] float64."""


class LazyImport(Generic[T]):
    """Dataclass field set to a value or its import path, which is imported when the field is read.

    Checks of settings read other fields of a family: importing its modules, and torch, takes a second.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __set__(self, instance: object, value: "T | str") -> None:
        instance.__dict__[self.name] = value

    def __get__(self, instance: object | None, owner: type) -> T:
        if instance is None:  # a dataclass reads the default here
            raise AttributeError(self.name)
        value: Any = instance.__dict__[self.name]
        if isinstance(value, str):
            module, _, name = value.partition(":")
            value = instance.__dict__[self.name] = reduce(getattr, name.split("."), import_module(module))
        return value  # type: ignore[no-any-return]


def no_problem(*_: object) -> None:
    """Default of checks that a family does not have."""


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """A model family. A `LazyImport` takes a value or its import path, "my_package.my_model:MyModel"."""

    model: LazyImport[type[Any]] = LazyImport()
    """Module of one pipeline stage, or of the full model."""
    causal: bool
    """True if a token attends only to itself and earlier tokens: the model generates text, ignores padding on
    the right, and is finetuned on texts that end with the end-of-document token. Other models are
    bidirectional and read sequences framed by [CLS] and [SEP]."""
    objective: "LazyImport[Callable[[DataConfig, ParallelContext, torch.dtype], Objective[Any, Any]]]" = (
        LazyImport()
    )
    """Objective of pretraining; the dtype is the activations'."""
    samples: SampleSource
    """Samples of pretraining."""
    splits_sequences: bool = False
    """True if its models and objective support context parallelism (parallel/context.py)."""
    check_tokenizer: "Callable[[Tokenizer], object] | None" = None
    """Raises UserError if samples cannot be made with a tokenizer; None if they depend on none."""
    scored: float = 1.0
    """Share of the tokens of pretraining that go through the vocabulary projection."""
    packs: bool = True
    """True if its attention takes packed sequences in place of a bias (mlm/models/documents.py)."""
    data_keys: tuple[str, ...] = ()
    """Keys of data.* that affect samples of this family only."""
    architecture: Callable[[ModelConfig], Architecture] = lambda model: Architecture(
        head_dim=model.hidden_size // model.num_heads, kv_heads=model.num_heads
    )
    """Return parts and sizes of a model: heads of keys, gates, biases, what is tied."""
    head_products: Callable[[ModelConfig, int], float]
    """Average number of weights after the layers in a pretraining token's products, at a tp."""
    options: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Defaults of the family's settings, model.options.NAME."""
    settings: type | None = None
    """Dataclass of the options, with conditions on when they apply."""
    dense_twin: Callable[[ModelConfig], ModelConfig | None] = no_problem
    """Return the dense model to upcycle a mixture of experts from; None for other models. Raises ConfigError
    if the experts cannot be copies of an MLP."""
    loss_unit: str = "nats per token"
    """Unit of the loss in curves."""
    protocol: str
    """Scoring by `mlm eval loss`, for its receipt."""
    model_problem: Callable[[ModelConfig], Problem | None] = no_problem
    """Return the problem of a model's settings."""
    warning: Callable[[ModelConfig], str | None] = no_problem
    """Return a warning on settings of a model in pretraining."""
    data_problem: "Callable[[DataConfig], Problem | None]" = no_problem
    """Return the problem of data settings that prevent samples."""
    corpus_problems: Callable[[ModelConfig, Sequence[Path], Path | None], list[Problem]] = lambda *_: []
    """Return the problems of making samples of corpora (their prefixes) with a tokenizer.json."""
    converts_as: str | None = None
    """Shipped kind that conversion to `transformers` uses (mlm/convert/huggingface); None for none."""


def family_of(kind: str) -> ModelFamily:
    """Return the family that model.kind names. Raises OwnCodeError (a UserError) if there is none."""
    family: ModelFamily = (
        import_module(f"mlm.models.{kind}.family").FAMILY
        if kind in KINDS
        else imported("model.kind", kind, KINDS, ModelFamily)
    )
    return family


def option_problem(defaults: Mapping[str, object], name: str, value: object) -> Problem | None:
    """Return the problem of a model.options.NAME of another type than its default, or out of range."""
    expected, key = type(defaults[name]), f"model.options.{name}"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a name"}
    if not (type(value) is expected or (expected is float and type(value) is int)):
        return Problem((key,), f"{key}={format_value(value)} must be {words[expected]}")
    if isinstance(value, int | float) and not 0 <= value < 1 << 31:
        return Problem((key,), f"{key}={format_value(value)} must be from 0 to 2147483647")
    return None


def option(model: ModelConfig, name: str) -> bool | int | float | str:
    """Value of model.options.NAME, or its default in the family."""
    return model.options.get(name, family_of(model.kind).options[name])


def model_problem(model: ModelConfig) -> Problem | None:
    """Return the problem of a model's family or its settings."""
    try:
        family = family_of(model.kind)
    except OwnCodeError as error:
        return error.problems[0]
    for name in model.options.keys() - family.options.keys():
        names = ", ".join(family.options) or "none"
        problem = f"model.options.{name}: model.kind={model.kind} has the settings: {names}"
        return Problem((f"model.options.{name}", "model.kind"), problem, "remove it")
    if model.mup_base_width is not None and not family.causal:
        problem = f"model.mup_base_width={model.mup_base_width}: muP is for gpt2 and llama, not {model.kind}"
        return Problem(("model.mup_base_width", "model.kind"), problem, "use model.mup_base_width=null")
    return family.model_problem(model)


def pretraining_problem(config: Any) -> Problem | None:
    head = config.model.head
    if head == "language_model":
        return None
    return Problem(
        ("model.head",),
        f"model.head={head} is for finetuning (`mlm finetune`)",
        "pretraining needs model.head=language_model",
    )


def data_problem(config: Any) -> Problem | None:
    try:
        problem: Problem | None = family_of(config.model.kind).data_problem(config.data)
    except OwnCodeError:  # reported by `model_problem`
        return None
    return problem
