"""Entry point of a launched rank: `python -P -m mlm.launch.rank JOB.json`.

Up to `run_launched` it imports the standard library alone: the log is open, and the process dies with its
parent, before the import of torch, which takes seconds and may print.
"""

import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from mlm.launch.failure import (
    RECORDS,
    REPORT_S,
    Failure,
    FailureReporter,
    exit_now,
    load_failures,
    log_path,
    note_exit_code,
    save_failure,
)
from mlm.launch.stop import SIGNAL_NAMES, Stopped, ignore, keep_noting
from mlm.util.system import die_with_parent, resolve, warn_once, writable_streams


def main() -> None:
    path = Path(sys.argv[1])
    folder, job = path.parent, json.loads(path.read_bytes())
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    die_with_parent(job["parent"])
    warn_once(job["warned"])
    if signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        keep_noting(SIGNAL_NAMES)  # else a signal to a new thread of torch would kill the process
    if rank:  # rank 0 keeps the terminal
        descriptor = os.open(log_path(Path(job["logs"]), rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(descriptor, 1)  # C++ output too
        os.dup2(descriptor, 2)
        os.close(descriptor)
        if sys.stdout is not None:  # None if the command started without one
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    reporter = FailureReporter(rank, partial(publish, folder), lambda: any(folder.glob(RECORDS)))
    try:
        with writable_streams() as output:
            code = int(resolve("mlm.launch.process:run_launched")(job, reporter))  # imports torch
        code = 1 if output.has_failed and not code else code
        if rank == 0 and code:
            note_exit_code(folder, code)
        ignore(SIGNAL_NAMES)  # repeated while Python ends
    except KeyboardInterrupt as error:
        exit_now(128 + (error.number if isinstance(error, Stopped) else signal.SIGINT))
    except Exception as error:
        failure = reporter.report(error)
        end = time.monotonic() + REPORT_S
        # A user's mistake is often the same on all ranks: let each report it before the parent ends them.
        while failure.is_user_error and len(load_failures(folder)) < world_size and time.monotonic() < end:
            time.sleep(0.02)
        exit_now(failure.exit_code)


def publish(folder: Path, failure: Failure) -> None:
    try:
        save_failure(failure, folder)
    except OSError:  # no space, or no parent: print it here
        print(failure.text, file=sys.stderr)


if __name__ == "__main__":
    main()
