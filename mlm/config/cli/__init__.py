"""The command line: `mlm COMMAND [TASK] [key=value …]`."""

from mlm.config.cli.entry import main

__all__ = ["main"]
