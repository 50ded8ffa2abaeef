"""The command `mlm doctor`: the checks of its settings and its help."""

from mlm.cli.command import Command
from mlm.launch.config import DoctorConfig
from mlm.launch.rules.checks import checked_by, devices_exist
from mlm.launch.rules.layout import RANK_RULES
from mlm.util.results import folder_problem

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
