"""The command line: `mlm COMMAND [TASK] [key=value …]`."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module

from mlm.launch.stop import note_stop_requests, unblock_stop_signals
from mlm.launch.typed import record_command_line

TRAINING = ("pretrain", "finetune")
"""Commands that save when they are asked to stop."""
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mlm` with `argv` (default: of this process) and return its exit code: see mlm.config.cli.entry."""
    words = list(sys.argv[1:] if argv is None else argv)
    noting = (
        note_stop_requests(ends_process=argv is None) if words[:1] and words[0] in TRAINING else nullcontext()
    )
    with noting, record_command_line(words):
        unblock_stop_signals()  # what arrived before the handlers were there arrives now
        try:  # the imports take seconds: signals are noted
            code: int = import_module("mlm.config.cli.entry").main(words)
        except KeyboardInterrupt:
            return INTERRUPTED
        return code


__all__ = ["main"]
