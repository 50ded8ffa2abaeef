"""Exit codes of a command, and a user's mistake as lines on stderr."""

import os
import sys
import time
from collections.abc import Callable, Mapping

from mlm.cli.command import Command
from mlm.util.errors import UserError

OK, FAILED, MISTAKE, INTERRUPTED = 0, 1, 2, 130
HEAD_START_S = 5.0  # launchers end all ranks when one ends; let the reporting rank print first


def print_stdout(text: str) -> int:
    print(text)
    return OK


def report(command: Command, work: Callable[[], int]) -> int:
    """Return the exit code of `work`; print a user's mistake as one line per error, without a traceback.

    2: a mistake the user can fix. 1: a damaged file or failed check. 130: interrupted. Other exceptions pass.
    """
    try:
        return work()
    except UserError as error:
        if speaks_for_host(os.environ):
            for line in error.lines():
                print(f"mlm {command.name}: {line}", file=sys.stderr)
        else:
            time.sleep(HEAD_START_S)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def speaks_for_host(environ: Mapping[str, str]) -> bool:
    """True if this process reports mistakes: a single process, or the first rank of its host.

    All ranks of a host see the same settings and files, so they find the same mistakes.
    """
    if "RANK" in environ and "WORLD_SIZE" in environ:
        return environ.get("LOCAL_RANK", "0") == "0"
    return environ.get("SLURM_LOCALID", "0") == "0"
