"""Settings of `mlm generate`."""

from dataclasses import dataclass, field
from typing import Annotated

from mlm.config.fields import (
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    SEED,
    Also,
    CheckpointPath,
    InputPath,
    OnlyIf,
    ResultFile,
)
from mlm.data.config import MicroBatchSize
from mlm.launch.config import DistConfig
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig

STDIN = "-"
"""As `prompt`: the text comes from standard input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig:
    """The run spec of `mlm generate`: continue prompts with a checkpoint.

    When a text has filled the model's max_positions, the newest half of them is read again, and the text goes
    on from there.
    """

    ckpt: CheckpointPath
    """Checkpoint (step-…), run directory (its latest checkpoint), or Hugging Face folder or id (GPT-2)."""
    prompt: Annotated[str, OnlyIf("prompts", None), Also("start", "text")] = ""
    """Text to continue; - reads it from standard input. Empty begins a document: after what the tokenizer
    itself puts before a text, else an end-of-document token."""
    prompts: InputPath | None = None
    """File of prompts to continue, in place of prompt: one per line, or rows with `prompt` or `text` (.jsonl,
    .json, .parquet, .csv, .tsv, packed or not)."""
    num_samples: Annotated[int, POSITIVE] = 1
    """Continuations of each prompt."""
    out: ResultFile | None = None
    """JSONL file for the results: prompt, continuation, tokens, why it stopped; null writes none."""
    batch_size: MicroBatchSize = 8
    """Texts continued at a time. What is drawn does not depend on it."""
    max_new_tokens: Annotated[int, POSITIVE, Also("max_tokens")] = 128
    """Most tokens to generate; a sequence may end earlier."""
    min_new_tokens: Annotated[int, NOT_NEGATIVE] = 0
    """Fewest tokens to generate before the end-of-document token is allowed."""
    stop: tuple[str, ...] = ()
    """Strings that end a continuation, which is truncated before the first of them: stop=["\\n\\n",ROMEO].
    \\n is a line break and \\t a tab, as shells pass neither easily."""
    temperature: Annotated[float | None, NOT_NEGATIVE] = None
    """Divides the logits; 0 takes the most probable token. Of this and the next three, null takes what the
    model's generation_config.json declares, else 0.8."""
    top_k: Annotated[int | None, NOT_NEGATIVE, OnlyIf("temperature", or_null=True)] = None
    """Sample among this many most probable tokens; 0 means all; null as declared, else 0."""
    top_p: Annotated[float | None, PROBABILITY, OnlyIf("temperature", or_null=True)] = None
    """Sample among the fewest most probable tokens whose probabilities reach this sum; null as declared, else
    1."""
    repetition_penalty: Annotated[float | None, POSITIVE] = None
    """Divides the logits of tokens that the text holds already, and multiplies those below 0
    (arXiv:1909.05858, section 4.1); 1 changes none; null as declared, else 1."""
    chat: bool = False
    """Answer messages: prompt is the user's, or a line of prompts is {"messages": [{"role", "content"}, …]}.
    The tokenizer's chat template makes text of them; the token after an answer ends it."""
    chat_template: Annotated[InputPath | None, OnlyIf("chat")] = None
    """Jinja file with the chat template, or chatml; null takes the tokenizer's."""
    system: Annotated[str | None, OnlyIf("chat")] = None
    """With chat=true and a prompt: message of the system before it; null sends none."""
    special_tokens: bool = False
    """Read names of special tokens in a prompt, such as <|endoftext|>, as those tokens, not as letters."""
    seed: Annotated[int, SEED, OnlyIf("temperature", or_null=True)] = 1234
    """Seed of the sampling."""
    tokenizer: InputPath | None = None
    """tokenizer.json; null takes the one saved with the run."""
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    dist: DistConfig = field(default_factory=DistConfig)

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings of `stop` as characters."""
        return tuple(stop.replace("\\n", "\n").replace("\\t", "\t") for stop in self.stop)
