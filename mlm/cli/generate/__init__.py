"""The command `mlm generate`: its settings, checks and help."""

from mlm.cli.command import Command
from mlm.cli.generate.settings import GenerateConfig
from mlm.data import files_present as present
from mlm.inference.config import too_few_new_tokens
from mlm.launch.rules.checks import (
    checked_by,
    checkpoint_exists,
    devices_exist,
    loss_scale_can_fall,
    tokenizer_exists,
)
from mlm.launch.rules.layout import READER_RULES, Launch
from mlm.util.errors import Problem


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
