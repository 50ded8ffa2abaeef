"""Checks of the settings of `mlm generate`."""

from mlm.data import files_present as present
from mlm.generate.config import GenerateConfig
from mlm.launch.checks import (
    Rule,
    devices_are_there,
    errors_of,
    loss_scale_can_fall,
)
from mlm.parallel.layout_checks import RANK_RULES, Launch


def check_generate(config: GenerateConfig, *, world_size: int | None, local_devices: int | None) -> list[str]:
    """Faults of `mlm generate` that show without reading the checkpoint. Its layout: as `check_eval_loss`."""
    return errors_of(config, Launch(world_size, local_devices), RANK_RULES, GENERATE_RULES)


def _one_source_of_prompts(config: GenerateConfig, _: Launch) -> str | None:
    if config.prompts is None or not config.prompt:
        return None
    return f"prompts={config.prompts} and prompt={config.prompt}: give one of the two"


def _least_below_most(config: GenerateConfig, _: Launch) -> str | None:
    least, most = config.min_new_tokens, config.max_new_tokens
    if least <= most:
        return None
    return f"min_new_tokens={least} is more than max_new_tokens={most}; use min_new_tokens={most} or fewer"


GENERATE_RULES: list[tuple[str, Rule]] = [
    ("", devices_are_there),
    ("precision.min_loss_scale precision.initial_loss_scale", loss_scale_can_fall),
    ("", _one_source_of_prompts),
    ("", lambda config, _: present.file("prompts", config.prompts)),
    ("min_new_tokens max_new_tokens", _least_below_most),
    ("", lambda config, _: present.model(config.ckpt)),
    ("", lambda config, _: present.tokenizer("tokenizer", config.tokenizer)),
]
