"""The command `mlm generate`: its settings, checks and help."""

from dataclasses import dataclass
from typing import Annotated

from mlm.cli.command import Command
from mlm.config.fields import POSITIVE, Aliases, InputPath, OnlyIf, ResultFile
from mlm.data import files_present as present
from mlm.inference.config import SamplingOptions, TrainedModelConfig, too_few_new_tokens
from mlm.launch.rules.checks import (
    checked_by,
    checkpoint_exists,
    devices_exist,
    loss_scale_can_fall,
    tokenizer_exists,
)
from mlm.launch.rules.layout import READER_RULES, Launch
from mlm.util.errors import Problem

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


def _chat_settings_serve(config: GenerateConfig, _: Launch) -> Problem | None:
    if not config.chat:
        return None
    if config.special_tokens:
        problem = "special_tokens=true: in a message names of special tokens are text"
        return Problem(("special_tokens", "chat"), problem, "use special_tokens=false")
    if config.prompts is not None and config.system is not None:
        problem = f"system={config.system}: the conversations of prompts={config.prompts} hold theirs"
        return Problem(("system", "prompts"), problem, "remove system=")
    if config.prompts is None and not config.prompt:
        return Problem(("prompt", "chat"), "chat=true: no message to answer", "set prompt=… or prompts=FILE")
    return None


check_generate = checked_by(
    READER_RULES,
    (
        *(devices_exist, loss_scale_can_fall),
        lambda config, _: present.file("prompts", config.prompts),
        lambda config, _: too_few_new_tokens(config),
        *(checkpoint_exists, tokenizer_exists, _chat_settings_serve),
        lambda config, _: present.chat_template("chat_template", config.chat_template),
    ),
)

COMMANDS = (
    Command(
        name="generate",
        other_names=("sample",),
        spec=GenerateConfig,
        target="mlm.cli.generate.run:run",
        check=check_generate,
        preflight="mlm.cli.generate.run:preflight",
        summary="continue prompts with a checkpoint",
        about="""Samples continuations of a prompt, or of a file of prompts, and prints them as they come.
            What is drawn depends on the seed and the prompt's number alone, not on tp, pp or batch_size. With
            chat=true it answers messages instead.""",
        examples="""
            # Generate a passage
            mlm generate ckpt=runs/shakespeare prompt="ROMEO:"
            # The most probable continuation
            mlm generate --ckpt runs/shakespeare --prompt "To be, or" --temperature 0
            # An answer of a model that knows conversations
            mlm generate ckpt=runs/chat chat=true prompt="Who wrote Hamlet?"
            # From standard input
            head -3 play.txt | mlm generate ckpt=runs/shakespeare prompt=-
            # Four continuations of each line of a file, with GPT-2
            mlm generate ckpt=openai-community/gpt2 prompts=prompts.txt num_samples=4 out=texts.jsonl
        """,
        keys="""
            ckpt prompt prompts num_samples out max_new_tokens min_new_tokens stop temperature top_k top_p
            repetition_penalty no_repeat_ngram_size special_tokens seed batch_size tokenizer chat
            chat_template system tp pp dist.device
        """,
    ),
)
