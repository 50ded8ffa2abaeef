"""What the commands that use a trained model need to know; see schema.py."""

from dataclasses import dataclass, field
from typing import ClassVar

from mlm.config.schema import DistConfig, Forbid, ParallelConfig, PrecisionConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalLossConfig:
    """The run spec of `mlm eval loss`: mean loss of a checkpoint over an indexed corpus."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    ckpt: str
    """Checkpoint (step-…) or run directory (its latest checkpoint)."""
    out: str | None = None
    """JSON file for the result; null means eval-loss-<corpus>.json in the run directory."""
    batch_size: int = 8
    """Samples per micro-batch on each rank. The score does not depend on it."""
    seq_length: int | None = None
    """Tokens per window; null takes the checkpoint's data.seq_length."""
    path: str | None = None
    """Prefix of the .bin/.idx to score; null takes the validation set the checkpoint was trained with."""
    tokenizer: str | None = None
    """tokenizer.json for bits per byte; null takes the one saved with the run."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    dist: DistConfig = field(default_factory=DistConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """The run spec of `mlm generate`: sample a continuation from a checkpoint."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    ckpt: str
    """Checkpoint (step-…) or run directory (its latest checkpoint)."""
    prompt: str
    """Text to continue."""
    max_new_tokens: int = 128
    """Tokens to add at most; the text may end by itself."""
    min_new_tokens: int = 0
    """Tokens before which the text may not end."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the most probable token."""
    top_k: int = 0
    """Sample among this many most probable tokens; 0 means all."""
    top_p: float = 1.0
    """Sample among the fewest most probable tokens whose probabilities reach this sum."""
    seed: int = 1234
    """Of the sampling."""
    tokenizer: str | None = None
    """tokenizer.json; null takes the one saved with the run."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    dist: DistConfig = field(default_factory=DistConfig)
