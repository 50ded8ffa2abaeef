"""The command `mlm reproduce`."""

from mlm.config.command import Command
from mlm.reproduce.checks import check_reproduce
from mlm.reproduce.config import ReproduceConfig

COMMANDS = (
    Command(
        words=("reproduce",),
        config="reproduce",
        spec=ReproduceConfig,
        target="mlm.reproduce.run:run",
        local_check=check_reproduce,
        preflight="mlm.reproduce.preflight:preflight",
        positional=("name",),
        summary="run a figure or table of the papers at this machine's scale, beside the published numbers",
        about=(
            "Without a name, lists the experiments. With one, runs its steps, each a command line that can "
            "be typed by hand, and writes a page, pictures and numbers: what agrees with the paper, what "
            "does not, and what cannot be concluded. Stopped with Ctrl-C, the same command continues. "
            "scale=paper trains nothing: it prints the commands for a cluster with the plan's times and cost."
        ),
        examples=(
            ("The experiments", "mlm reproduce"),
            ("A figure, at a laptop's scale", "mlm reproduce ptdp-schedules"),
            ("The commands for a cluster", "mlm reproduce v1-figure6 scale=paper"),
        ),
    ),
)
