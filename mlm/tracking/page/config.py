"""Run spec of `mlm report`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from mlm.config.fields import Bound, Forbid, InputPath, ResultFile

WAIT = Bound(lambda x: 0 < x <= 86_400, "above 0 and at most 86400, a day")
"""Longer waits overflow a browser's timer, which then reloads without a pause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportConfig:
    """The run spec of `mlm report`: runs on one page."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    runs: tuple[InputPath, ...]
    """Run folders, at most 20; other paths among them are skipped."""
    out: ResultFile = "report.html"
    """Page to write, .html."""
    watch: bool = False
    """Write the page again while the runs go on, and show them here, until they are finished or stopped."""
    every_s: Annotated[float, WAIT] = 5.0
    """Seconds between updates with watch=true, at most a day (86400)."""
