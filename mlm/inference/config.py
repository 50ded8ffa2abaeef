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
    """Options as typed; a null is settled by the model's generation_config.json, else by `Sampling`."""

    batch_size: MicroBatchSize = 8
    """Texts continued at a time. What is drawn does not depend on it."""
    max_new_tokens: Annotated[int, POSITIVE, Aliases("max_tokens")] = 128
    """Most tokens to generate; a sequence may end earlier."""
    min_new_tokens: Annotated[int, NOT_NEGATIVE] = 0
    """Fewest tokens to generate before the end-of-document token is allowed."""
    temperature: Annotated[float | None, NOT_NEGATIVE] = None
    """Divides the logits; 0 takes the most probable token. Of this and the next four, null takes what the
    model's generation_config.json declares, else 0.8."""
    top_k: Annotated[int | None, NOT_NEGATIVE, OnlyIf("temperature", or_null=True)] = None
    """Sample among this many most probable tokens; 0 means all; null as declared, else 0."""
    top_p: Annotated[float | None, PROBABILITY, OnlyIf("temperature", or_null=True)] = None
    """Sample among the fewest most probable tokens whose probabilities reach this sum; null as declared, else
    1."""
    repetition_penalty: Annotated[float | None, POSITIVE] = None
    """Divides the logits of tokens that the text holds already, and multiplies those below 0
    (arXiv:1909.05858, section 4.1); 1 changes none; null as declared, else 1."""
    no_repeat_ngram_size: Annotated[int | None, NOT_NEGATIVE] = None
    """No run of this many tokens occurs twice in a text, its prompt included; 0 allows all; null as declared,
    else 0."""
    seed: Annotated[int, SEED, OnlyIf("temperature", or_null=True)] = 1234
    """Seed of the sampling."""


@dataclass(frozen=True, kw_only=True)
class Sampling(SamplingOptions):
    """Options without nulls: the values here are taken where neither user nor model has one."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0

    def problems(self) -> list[Problem]:
        """Return the problem of each value of another type, else of each that is out of range."""
        wrong = list[Problem]()
        for each in fields(self):
            value, is_whole = getattr(self, each.name), type(each.default) is int
            if not (isinstance(value, KINDS[each.name]) and (is_whole or math.isfinite(value))):
                noun = "an integer" if is_whole else "a finite number"
                wrong.append(Problem.at(each.name, value, f"must be {noun}"))
        if wrong:
            return wrong
        bounds = {key: leaf.bound for key, leaf in leaves(SamplingOptions).items() if leaf.bound}
        found = [bound.problem(key, getattr(self, key)) for key, bound in bounds.items()]
        return [*filter(None, [*found, too_few_new_tokens(self)])]


KINDS = {each.name: Integral if type(each.default) is int else Real for each in fields(Sampling)}
"""Type of each option."""
DECLARED = [each.name for each in fields(SamplingOptions) if each.default is None]
"""Options that a generation_config.json may declare."""


def too_few_new_tokens(options: SamplingOptions) -> Problem | None:
    """Return the problem of a least number of new tokens above the most."""
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

    One that says nothing of `do_sample` declares no temperature; sampling without a top_k takes 50.
    """
    usual = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
    draws = generation.get("do_sample")
    said: dict[str, Any] = {"temperature": 0.0} if draws is False else usual if draws is True else {}
    names = (name for name in DECLARED if draws is True or name not in usual)
    return said | {name: generation[name] for name in names if isinstance(generation.get(name), KINDS[name])}


def as_declared(generation: Mapping[str, Any], typed: Mapping[str, Any]) -> Sampling:
    """Return sampling settings: those that are typed and not None, else declared, else the usual ones."""
    return Sampling(
        **declared_sampling(generation) | {key: value for key, value in typed.items() if value is not None}
    )
