"""The command line: `mlm COMMAND [TASK] [key=value …]`."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module

from mlm.launch.stop import requests_noted, unblock_requests
from mlm.launch.typed import typed_as

TRAINING = ("pretrain", "finetune")
"""Commands that save when they are asked to stop."""
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mlm` with `argv` (default: of this process) and return its exit code: see mlm.config.cli.entry."""
    words = list(sys.argv[1:] if argv is None else argv)
    noting = (
        requests_noted(ends_process=argv is None) if words[:1] and words[0] in TRAINING else nullcontext()
    )
    with noting, typed_as(words):
        unblock_requests()  # what arrived before the handlers were there arrives now
        try:  # the imports take seconds: signals are noted
            code: int = import_module("mlm.config.cli.entry").main(words)
        except KeyboardInterrupt:
            return INTERRUPTED
        return code


__all__ = ["main"]
