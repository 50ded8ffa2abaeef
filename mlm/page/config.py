"""Run spec of `mlm report`."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from mlm.config.fields import POSITIVE, Forbid, InputPath, ResultFile


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportConfig:
    """The run spec of `mlm report`: runs on one page."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    runs: tuple[InputPath, ...]
    """Run folders, at most 20."""
    out: ResultFile = "report.html"
    """Page to write, .html."""
    watch: bool = False
    """Write the page again while the runs go on, and show them here, until they are finished or Ctrl-C."""
    every_s: Annotated[float, POSITIVE] = 5.0
    """Seconds between updates with watch=true."""
