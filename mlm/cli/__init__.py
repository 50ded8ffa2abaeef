"""The command line: `mlm COMMAND [TASK] [key=value …]`."""

from mlm.cli.entry import main

__all__ = ["main"]
