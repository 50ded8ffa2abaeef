"""All commands, in the order of `mlm --help`."""

from mlm.cli.ckpt.diff import DIFF
from mlm.cli.ckpt.inspect import INSPECT
from mlm.cli.ckpt.prune import PRUNE
from mlm.cli.ckpt.rollback import ROLLBACK
from mlm.cli.ckpt.verify import VERIFY as CKPT_VERIFY
from mlm.cli.command import Command
from mlm.cli.convert import CONVERT
from mlm.cli.data import COMMANDS as CORPUS
from mlm.cli.doctor import COMMANDS as DOCTOR
from mlm.cli.evaluate import COMMANDS as EVALUATE
from mlm.cli.export_dcp import EXPORT_DCP
from mlm.cli.export_gguf import EXPORT_GGUF
from mlm.cli.export_hf import EXPORT_HF
from mlm.cli.export_megatron import EXPORT_MEGATRON
from mlm.cli.finetune import COMMANDS as FINETUNE
from mlm.cli.generate import COMMANDS as GENERATE
from mlm.cli.import_hf import IMPORT_HF
from mlm.cli.import_megatron import IMPORT_MEGATRON
from mlm.cli.plan import COMMANDS as PLAN
from mlm.cli.pretrain import COMMANDS as PRETRAIN
from mlm.cli.replay import COMMANDS as REPLAY
from mlm.cli.report import COMMANDS as REPORT
from mlm.cli.reshard import RESHARD
from mlm.cli.verify import COMMANDS as VERIFY

COMMANDS: tuple[Command, ...] = (
    *PRETRAIN,
    *VERIFY,
    *DOCTOR,
    *REPLAY,
    *REPORT,
    *PLAN,
    *EVALUATE,
    *GENERATE,
    *FINETUNE,
    *(RESHARD, CONVERT, IMPORT_HF, IMPORT_MEGATRON, EXPORT_MEGATRON, EXPORT_DCP, EXPORT_HF, EXPORT_GGUF),
    *(INSPECT, CKPT_VERIFY, DIFF, PRUNE, ROLLBACK),
    *CORPUS,
)

SPECS: dict[str, type] = {command.config: command.spec for command in COMMANDS}
"""The primary config in configs/ of each command, and the dataclass it becomes."""
