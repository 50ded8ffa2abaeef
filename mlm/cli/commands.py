"""All commands, in the order of `mlm --help`."""

from mlm.checkpoints.command import CHECKPOINTS
from mlm.config.command import Command, resolve
from mlm.corpus.command import DATA
from mlm.finetune.command import FINETUNE
from mlm.evaluate.command import MODELS
from mlm.pretrain.command import TRAINING

__all__ = ["COMMANDS", "Command", "resolve"]

COMMANDS: tuple[Command, ...] = (*TRAINING, *MODELS, *FINETUNE, *CHECKPOINTS, *DATA)
