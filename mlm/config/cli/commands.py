"""All commands, in the order of `mlm --help`, collected from the features."""

from mlm.checkpoint.commands.command import CONVERSION, MAINTENANCE
from mlm.config.command import Command, resolve
from mlm.corpus.command import COMMANDS as CORPUS
from mlm.evaluate.command import COMMANDS as EVALUATE
from mlm.finetune.command import COMMANDS as FINETUNE
from mlm.inference.generate.command import COMMANDS as GENERATE
from mlm.launch.doctor.command import COMMANDS as DOCTOR
from mlm.plan.command import COMMANDS as PLAN
from mlm.tracking.page.command import COMMANDS as PAGE
from mlm.training.incidents.command import COMMANDS as INCIDENTS
from mlm.training.pretrain.command import COMMANDS as PRETRAIN
from mlm.verify.command import COMMANDS as VERIFY

__all__ = ["COMMANDS", "SPECS", "Command", "resolve"]

COMMANDS: tuple[Command, ...] = (
    *PRETRAIN,
    *VERIFY,
    *DOCTOR,
    *INCIDENTS,
    *PAGE,
    *PLAN,
    *EVALUATE,
    *GENERATE,
    *FINETUNE,
    *CONVERSION,
    *MAINTENANCE,
    *CORPUS,
)

SPECS: dict[str, type] = {command.config: command.spec for command in COMMANDS}
"""The primary config in configs/ of each command, and the dataclass it becomes."""
