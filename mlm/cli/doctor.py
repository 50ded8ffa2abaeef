"""The command `mlm doctor`: its settings, their checks and its help."""

from dataclasses import dataclass, field
from typing import Annotated

from mlm.cli.command import Command
from mlm.config.fields import SECONDS, ResultFile
from mlm.launch.config import DistConfig
from mlm.launch.rules.checks import checked_by, devices_exist
from mlm.launch.rules.layout import RANK_RULES
from mlm.parallel.config import ParallelConfig
from mlm.util.results import folder_problem


@dataclass(frozen=True, kw_only=True, slots=True)
class DoctorConfig:
    """The run spec of `mlm doctor`: the hosts, disks and network of a run, before it."""

    out: ResultFile | None = None
    """JSON file for the result. The disk that it is on is the one that is checked; null checks that of the
    working folder."""
    timeout_s: Annotated[float, SECONDS] = 60.0
    """Seconds in which all ranks must come to each check; those that do not are named."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    dist: DistConfig = field(default_factory=DistConfig)


COMMANDS = (
    Command(
        words=("doctor",),
        spec=DoctorConfig,
        target="mlm.launch.doctor.run:run",
        check=checked_by(RANK_RULES, (devices_exist, lambda config, _: folder_problem(config.out))),
        forecast="mlm.launch.doctor.run:lines",
        tidy="mlm.launch.doctor.folder:tidy",
        summary="check hosts, disks, GPUs and the network of a layout before a run",
        about=(
            "Looks on every rank at versions, device and driver, memory, disk, limits, /dev/shm, "
            "host names and variables; tries whether the folder is shared, renames, locks and is fast; and "
            "compares collectives over each axis with exact numbers and times them. Prints a table with a "
            "remedy for each problem. Ends with 0, or 1 if a check failed. Starts its ranks as "
            "`mlm pretrain` does: plainly, under torchrun or under srun."
        ),
        examples=(
            ("This host", "mlm doctor"),
            (
                "The layout of a run, and the disk that it will write to",
                "mlm doctor tp=2 out=runs/doctor.json",
            ),
            (
                "Two hosts of 8 GPUs (on each of them)",
                "torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 "
                "--no-python mlm doctor tp=8",
            ),
        ),
        keys=(
            *("out", "timeout_s", "tp", "cp", "pp", "dp", "ep", "expert_tp"),
            *("dist.device", "dist.backend", "dist.timeout_s"),
        ),
    ),
)
