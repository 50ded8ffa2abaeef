"""All commands, in the order of `mlm --help`, collected from the features."""

from mlm.cli.command import Command
from mlm.cli.conversions import CONVERSION, MAINTENANCE
from mlm.cli.data import COMMANDS as CORPUS
from mlm.cli.doctor import COMMANDS as DOCTOR
from mlm.cli.evaluate import COMMANDS as EVALUATE
from mlm.cli.finetune import COMMANDS as FINETUNE
from mlm.cli.generate import COMMANDS as GENERATE
from mlm.cli.plan import COMMANDS as PLAN
from mlm.cli.pretrain import COMMANDS as PRETRAIN
from mlm.cli.replay import COMMANDS as INCIDENTS
from mlm.cli.report import COMMANDS as PAGE
from mlm.cli.verify import COMMANDS as VERIFY
from mlm.util.system import resolve

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
