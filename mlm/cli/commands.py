"""All commands, in the order of `mlm --help`."""

from mlm.cli import chat, ckpt, convert, data, evaluate, finetune, generate, plan, pretrain, report, verify
from mlm.cli.command import Command

COMMANDS: tuple[Command, ...] = (
    *pretrain.COMMANDS,
    *verify.COMMANDS,
    *report.COMMANDS,
    *plan.COMMANDS,
    *evaluate.COMMANDS,
    *generate.COMMANDS,
    chat.CHAT,
    *finetune.COMMANDS,
    *convert.COMMANDS,
    *ckpt.COMMANDS,
    *data.COMMANDS,
)

SPECS: dict[str, type] = {command.config: command.spec for command in COMMANDS}
"""The primary config in configs/ of each command, and the dataclass it becomes."""
