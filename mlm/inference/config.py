"""Settings of commands that read a trained model, and options of sampling, which the Python API has too."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Annotated, Any

from mlm.config.fields import (
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    SEED,
    Aliases,
    CheckpointPath,
    InputPath,
    OnlyIf,
)
from mlm.config.tree import leaves
from mlm.data.config import MicroBatchSize
from mlm.launch.config import DistConfig
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.util.errors import Problem


@dataclass(frozen=True, kw_only=True)
class TrainedModelConfig:
    """The trained model that a command reads, and the ranks that it runs on."""

    ckpt: CheckpointPath
    """Checkpoint (step-…), run directory (its latest checkpoint), or Hugging Face folder or id (GPT-2)."""
    tokenizer: InputPath | None = None
    """tokenizer.json; null takes the one saved with the run."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    dist: DistConfig = field(default_factory=DistConfig)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options as typed; nulls are filled from the model's generation_config.json, else from `Sampling`."""

    batch_size: MicroBatchSize = 8
    """Texts continued at a time. What is drawn does not depend on it."""
    max_new_tokens: Annotated[int, POSITIVE, Aliases("max_tokens")] = 128
    """Most tokens to generate; a sequence may end earlier."""
    min_new_tokens: Annotated[int, NOT_NEGATIVE] = 0
    """Fewest tokens to generate before the end-of-document token is allowed."""
    temperature: Annotated[float | None, NOT_NEGATIVE] = None
    """Divides the logits; 0 takes the most probable token. For this and the next four, null takes the value
    of the model's generation_config.json, else 0.8."""
    top_k: Annotated[int | None, NOT_NEGATIVE, OnlyIf("temperature", or_null=True)] = None
    """Sample among this many most probable tokens; 0 means all; null as declared, else 0."""
    top_p: Annotated[float | None, PROBABILITY, OnlyIf("temperature", or_null=True)] = None
    """Sample among the fewest most probable tokens whose probabilities reach this sum; null as declared, else
    1."""
    repetition_penalty: Annotated[float | None, POSITIVE] = None
    """Divides the logits of tokens that occur in the text, and multiplies logits below 0
    (arXiv:1909.05858, section 4.1); 1 changes none; null as declared, else 1."""
    no_repeat_ngram_size: Annotated[int | None, NOT_NEGATIVE] = None
    """No run of this many tokens occurs twice in a text, its prompt included; 0 allows all; null as declared,
    else 0."""
    seed: Annotated[int, SEED, OnlyIf("temperature", or_null=True)] = 1234
    """Seed of the sampling."""


@dataclass(frozen=True, kw_only=True)
class Sampling(SamplingOptions):
    """Options without nulls, with the defaults where neither user nor model has a value."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0

    def problems(self) -> list[Problem]:
        """Return the problems of values of a wrong type; without any, of values out of range."""
        wrong = list[Problem]()
        for option in fields(self):
            value, is_integer = getattr(self, option.name), TYPES[option.name] is Integral
            if not (isinstance(value, TYPES[option.name]) and (is_integer or math.isfinite(value))):
                noun = "an integer" if is_integer else "a finite number"
                wrong.append(Problem.at(option.name, value, f"must be {noun}"))
        if wrong:
            return wrong
        bounds = {key: leaf.bound for key, leaf in leaves(SamplingOptions).items() if leaf.bound}
        problems = [bound.problem(key, getattr(self, key)) for key, bound in bounds.items()]
        return [*filter(None, [*problems, too_few_new_tokens(self)])]


TYPES = {option.name: Integral if type(option.default) is int else Real for option in fields(Sampling)}
DECLARED = [option.name for option in fields(SamplingOptions) if option.default is None]
"""Options that a generation_config.json may declare."""


def too_few_new_tokens(options: SamplingOptions) -> Problem | None:
    least, most = options.min_new_tokens, options.max_new_tokens
    if least <= most:
        return None
    return Problem(
        ("min_new_tokens", "max_new_tokens"),
        f"min_new_tokens={least} is more than max_new_tokens={most}",
        f"use min_new_tokens={most} or fewer",
    )


def declared_sampling(generation: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the sampling settings of a generation_config.json as `transformers` reads it.

    Without `do_sample` it declares no temperature; sampling without a top_k takes 50.
    """
    defaults = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
    samples = generation.get("do_sample")
    names = [name for name in DECLARED if samples is True or name not in defaults]
    declared = {name: generation[name] for name in names if isinstance(generation.get(name), TYPES[name])}
    if samples is False:
        return {"temperature": 0.0} | declared
    return defaults | declared if samples is True else declared


def resolve_sampling(generation: Mapping[str, Any], typed: Mapping[str, Any]) -> Sampling:
    """Return the typed options that are not None, else the declared ones, else the defaults of `Sampling`."""
    options = {key: value for key, value in typed.items() if value is not None}
    return Sampling(**declared_sampling(generation) | options)
