"""All commands, in the order of `mlm --help`, collected from the features."""

from mlm.check.command import COMMANDS as CHECK
from mlm.checkpoints.command import COMMANDS as CHECKPOINTS
from mlm.config.command import Command, resolve
from mlm.convert.command import COMMANDS as CONVERT
from mlm.corpus.command import COMMANDS as CORPUS
from mlm.doctor.command import COMMANDS as DOCTOR
from mlm.evaluate.command import COMMANDS as EVALUATE
from mlm.finetune.command import COMMANDS as FINETUNE
from mlm.generate.command import COMMANDS as GENERATE
from mlm.incidents.command import COMMANDS as INCIDENTS
from mlm.page.command import COMMANDS as PAGE
from mlm.plan.command import COMMANDS as PLAN
from mlm.pretrain.command import COMMANDS as PRETRAIN

__all__ = ["COMMANDS", "SPECS", "Command", "resolve"]

COMMANDS: tuple[Command, ...] = (
    *PRETRAIN,
    *CHECK,
    *DOCTOR,
    *INCIDENTS,
    *PAGE,
    *PLAN,
    *EVALUATE,
    *GENERATE,
    *FINETUNE,
    *CONVERT,
    *CHECKPOINTS,
    *CORPUS,
)

SPECS: dict[str, type] = {command.config: command.spec for command in COMMANDS}
"""The primary config in configs/ of each command, and the dataclass it becomes."""
