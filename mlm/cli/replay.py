"""The command `mlm replay`."""

from mlm.cli.command import Command
from mlm.training.incidents.config import ReplayConfig

COMMANDS = (
    Command(
        words=("replay",),
        spec=ReplayConfig,
        target="mlm.training.incidents.replay:run",
        positional=("incident",),
        summary="compute the step of an incident once more, and find where it went wrong",
        about=(
            "Loads the checkpoint before the incident, trains up to its step and computes that step again: "
            "bit for bit on the same layout, to rounding on another or on one process. Prints the first "
            "number that is not finite or far from the others (module, tensor, sample, position), and "
            "compares another precision. Changes nothing in the run."
        ),
        examples=(
            ("On the run's own layout", "mlm replay runs/a/incidents/step-00001234"),
            (
                "A run of many ranks, on one process, beside float32",
                "mlm replay runs/a/incidents/step-00001234 tp=1 pp=1 dp=1 precision=fp32",
            ),
        ),
    ),
)
