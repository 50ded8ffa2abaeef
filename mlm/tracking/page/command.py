"""The command `mlm report`."""

from mlm.config.command import Command
from mlm.tracking.page.checks import check_report
from mlm.tracking.page.config import ReportConfig

COMMANDS = (
    Command(
        words=("report",),
        also=("dashboard", "plot", "tensorboard"),
        config="report",
        spec=ReportConfig,
        target="mlm.tracking.page.run:run",
        local_check=check_report,
        preflight="mlm.tracking.page.checks:preflight",
        positional=("runs",),
        several=True,
        summary="show runs on one page for a browser: curves, settings, layout, memory, incidents, scores",
        about=(
            "Writes one HTML page that opens from disk and loads nothing: loss, validation, gradient norm, "
            "learning rate, throughput and memory over steps, tokens or time, runs overlaid; the settings in "
            "which they differ; the layout, pipeline schedule and memory by part; incidents, checkpoints and "
            "scores with their receipts. Reads run folders and changes nothing in them."
        ),
        examples=(
            ("One run", "mlm report runs/shakespeare"),
            ("Two runs compared", "mlm report runs/shakespeare runs/longer out=compared.html"),
            ("While a run goes on, from another terminal", "mlm report runs/shakespeare watch=true"),
        ),
    ),
)
