"""All commands, in the order of `mlm --help`."""

from mlm.cli.checkpoint_commands import CHECKPOINTS
from mlm.cli.command import Command, resolve
from mlm.cli.data_commands import DATA
from mlm.cli.finetune_commands import FINETUNE
from mlm.cli.model_commands import MODELS
from mlm.cli.training_commands import TRAINING

__all__ = ["COMMANDS", "Command", "resolve"]

COMMANDS: tuple[Command, ...] = (*TRAINING, *MODELS, *FINETUNE, *CHECKPOINTS, *DATA)
