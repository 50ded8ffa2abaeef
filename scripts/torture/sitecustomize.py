"""Pause, or slow, every Python that has this folder on its path: imported by its name before anything else.

PAUSE_AT      the n-th call of a function, as `module:function:n`; `<module>` is the import of the module
PAUSE_MARKS   folder in which a process leaves a file named by its id as it pauses
PAUSE_S       seconds of a pause (1), which a file `released` in that folder ends earlier
PAUSE_RANK    the rank that pauses, where others only leave their mark
SLOW_AT       a function of which every call, as `module:function`, takes SLOW_S longer

The second attempt of a SLURM job runs through.
"""

import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

MODULE, FUNCTION, CALL = os.environ.get("PAUSE_AT", "::0").split(":")
SLOW = tuple(os.environ.get("SLOW_AT", ":").split(":"))
RANK = os.environ.get("SLURM_PROCID", os.environ.get("RANK", "0"))
left = int(CALL)


def watch(frame: FrameType, event: str, argument: object) -> None:
    """Pause in the wanted call, also after a signal whose handler raises nothing."""
    global left
    if event != "call":
        return
    call = (frame.f_globals.get("__name__"), frame.f_code.co_qualname)
    if call == SLOW:
        time.sleep(float(os.environ["SLOW_S"]))
    if call == (MODULE, FUNCTION):
        left -= 1
        if not left:
            pause()


def pause() -> None:
    if SLOW == ("", ""):
        sys.setprofile(None)
        threading.setprofile(None)
    marks, end = Path(os.environ["PAUSE_MARKS"]), time.monotonic() + float(os.environ.get("PAUSE_S", "1"))
    (marks / str(os.getpid())).touch()
    while time.monotonic() < end and not (marks / "released").exists():
        if os.environ.get("PAUSE_RANK", RANK) != RANK:
            return
        time.sleep(min(0.05, max(0.0, end - time.monotonic())))


if (MODULE or SLOW != ("", "")) and not int(os.environ.get("SLURM_RESTART_COUNT") or 0):
    sys.setprofile(watch)
    threading.setprofile(watch)
