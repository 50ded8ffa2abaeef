"""Settings of `mlm generate`."""

from dataclasses import dataclass, field
from typing import ClassVar

from mlm.config.fields import Forbid, InputPath, ResultFile
from mlm.launch.config import DistConfig
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig

STDIN = "-"
"""As `prompt`: the text comes from standard input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """The run spec of `mlm generate`: continue texts with a checkpoint.

    When a text has filled the model's max_positions, the newest half of them is read again, and the text goes
    on from there.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    ckpt: InputPath
    """Checkpoint (step-…), run directory (its latest checkpoint), or Hugging Face folder or id (GPT-2)."""
    prompt: str = ""
    """Text to continue; - reads it from standard input. Empty begins a document: after an end-of-document
    token."""
    prompts: InputPath | None = None
    """File of texts to continue, in place of prompt: one per line, or .jsonl with `prompt` or `text`."""
    num_samples: int = 1
    """Continuations of each prompt."""
    out: ResultFile | None = None
    """JSONL file for the results: prompt, continuation, tokens, why it stopped; null writes none."""
    batch_size: int = 8
    """Texts continued at a time. What is drawn does not depend on it."""
    max_new_tokens: int = 128
    """Tokens to add at most; the text may end by itself."""
    min_new_tokens: int = 0
    """Tokens before which the text may not end by itself."""
    stop: tuple[str, ...] = ()
    """Texts that end a continuation, which is cut before the first of them: stop=["\\n\\n",ROMEO]."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the most probable token."""
    top_k: int = 0
    """Sample among this many most probable tokens; 0 means all."""
    top_p: float = 1.0
    """Sample among the fewest most probable tokens whose probabilities reach this sum."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens that the text holds already, and multiplies those below 0
    (arXiv:1909.05858, section 4.1); 1 changes none."""
    special_tokens: bool = False
    """Read names of special tokens in a prompt, such as <|endoftext|>, as those tokens, not as letters."""
    seed: int = 1234
    """Of the sampling."""
    tokenizer: InputPath | None = None
    """tokenizer.json; null takes the one saved with the run."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    dist: DistConfig = field(default_factory=DistConfig)
