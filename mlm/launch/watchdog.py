"""The thread of a rank that ends it when a communication hangs without an error.

gloo raises at its timeout by itself; NCCL leaves the host waiting in some later call, and aborts the process
with a message of its own. The watchdog polls, so that a communication costs nothing for being watched.
"""

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from mlm.launch.failure import LastWords, leave
from mlm.parallel.watch import LostPeer, Watch

POLL_S = 0.25
GRACE_S = 2.0  # the transport's own error comes first where there is one
DUMP_S = 10.0  # NCCL's flight recorder writes its file within seconds of the timeout


class Watchdog:
    """Watches one rank's communications while the context is entered.

    What is overdue is told through `words`, and the process ends with exit code 1. When another rank has
    failed, this one tells what it is waiting for, if anything: who says nothing is where to look.
    """

    def __init__(self, watch: Watch, words: LastWords) -> None:
        self._watch, self._words = watch, words
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(POLL_S):
            lost = self._watch.overdue(GRACE_S)
            if lost is None and self._words.others_failed():
                lost = self._watch.interrupted()
            if lost is not None:
                return self._end(lost)

    def _end(self, lost: LostPeer) -> None:
        on_device = bool(self._watch.followed)
        failure = self._words.say(lost)
        if on_device:
            time.sleep(DUMP_S)
        leave(failure.exit_code)


def flight_recorder(base: Mapping[str, str], folder: Path | None) -> dict[str, str]:
    """Variables that have NCCL's flight recorder write what was under way when it times out.

    One file per rank in `folder`, or where torch puts it. What `base` sets stays. The files are pickles:
    `torchfrtrace` reads them, this package never does.
    """
    ours = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    if not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & set(base):
        ours["TORCH_FR_BUFFER_SIZE"] = "2000"
    paths = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")  # since torch 2.9, and before
    if folder is not None and not set(paths) & set(base):
        ours |= dict.fromkeys(paths, str(folder / "nccl-rank-"))
    return {key: value for key, value in ours.items() if key not in base}
