"""Checks of the settings of `mlm generate`."""

from mlm.data import files_present as present
from mlm.inference.generate.config import GenerateConfig
from mlm.launch.checks import (
    checkpoint_exists,
    devices_exist,
    loss_scale_can_fall,
    problems_of,
    tokenizer_exists,
)
from mlm.parallel.layout_checks import READER_RULES, Launch
from mlm.util.errors import Problem


def check_generate(
    config: GenerateConfig, *, world_size: int | None, local_devices: int | None
) -> list[Problem]:
    """Problems of `mlm generate` that are visible without reading the checkpoint.

    Of the layout as `check_eval_loss`.
    """
    return problems_of(config, Launch(world_size, local_devices), READER_RULES, GENERATE_RULES)


def _one_source_of_prompts(config: GenerateConfig, _: Launch) -> Problem | None:
    if config.prompts is None or not config.prompt:
        return None
    both = f"prompts={config.prompts} and prompt={config.prompt}: give one of the two"
    return Problem(("prompts", "prompt"), both)


def _least_below_most(config: GenerateConfig, _: Launch) -> Problem | None:
    least, most = config.min_new_tokens, config.max_new_tokens
    if least <= most:
        return None
    return Problem(
        ("min_new_tokens", "max_new_tokens"),
        f"min_new_tokens={least} is more than max_new_tokens={most}",
        f"use min_new_tokens={most} or fewer",
    )


def _prompts_exist(config: GenerateConfig, _: Launch) -> Problem | None:
    return present.file("prompts", config.prompts)


def _chat_settings_serve(config: GenerateConfig, _: Launch) -> Problem | None:
    chat = {"chat_template": config.chat_template, "system": config.system}
    if not config.chat:
        for key, value in chat.items():
            if value is not None:
                return Problem((key, "chat"), f"{key}={value} is of chat=true", "set chat=true")
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


def _chat_template_exists(config: GenerateConfig, _: Launch) -> Problem | None:
    return present.chat_template("chat_template", config.chat_template)


GENERATE_RULES = (
    devices_exist,
    loss_scale_can_fall,
    _one_source_of_prompts,
    _prompts_exist,
    _least_below_most,
    checkpoint_exists,
    tokenizer_exists,
    _chat_settings_serve,
    _chat_template_exists,
)
