"""Settings of `mlm generate`."""

from dataclasses import dataclass
from typing import Annotated

from mlm.config.fields import POSITIVE, Aliases, InputPath, OnlyIf, ResultFile
from mlm.inference.config import SamplingOptions, TrainedModelConfig

STDIN = "-"
"""As `prompt`: the text comes from standard input."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateConfig(SamplingOptions, TrainedModelConfig):
    """The run spec of `mlm generate`: continue prompts with a checkpoint.

    When a text has filled the model's max_positions, the newest half of them is read again, and the text goes
    on from there.
    """

    prompt: Annotated[str, OnlyIf("prompts", None), Aliases("start", "text")] = ""
    """Text to continue; - reads it from standard input. Empty begins a document: after what the tokenizer
    itself puts before a text, else an end-of-document token."""
    prompts: InputPath | None = None
    """File of prompts to continue, in place of prompt: one per line, or rows with `prompt` or `text` (.jsonl,
    .json, .parquet, .csv, .tsv, packed or not)."""
    num_samples: Annotated[int, POSITIVE] = 1
    """Continuations of each prompt."""
    out: ResultFile | None = None
    """JSONL file for the results: prompt, continuation, tokens, why it stopped; null writes none."""
    stop: tuple[str, ...] = ()
    """Strings that end a continuation, which is truncated before the first of them: stop=["\\n\\n",ROMEO].
    \\n is a line break and \\t a tab, as shells pass neither easily."""
    chat: bool = False
    """Answer messages: prompt is the user's, or a line of prompts is {"messages": [{"role", "content"}, …]}.
    The tokenizer's chat template makes text of them; the token after an answer ends it."""
    chat_template: Annotated[InputPath | None, OnlyIf("chat")] = None
    """Jinja file with the chat template, or chatml; null takes the tokenizer's."""
    system: Annotated[str | None, OnlyIf("chat")] = None
    """With chat=true and a prompt: message of the system before it; null sends none."""
    special_tokens: bool = False
    """Read names of special tokens in a prompt, such as <|endoftext|>, as those tokens, not as letters."""

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings of `stop` as characters."""
        return tuple(stop.replace("\\n", "\n").replace("\\t", "\t") for stop in self.stop)
