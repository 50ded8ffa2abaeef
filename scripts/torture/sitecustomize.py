"""Pauses each Python that has this folder on its path in TORTURE_AT, the n-th call of `module:function:n`.

It leaves a file named by its process id in TORTURE_MARKS, and pauses for TORTURE_PAUSE_S (1 s). The
function of an import is `<module>`.
"""

import os
import sys
import threading
import time
from types import FrameType

MODULE, FUNCTION, CALL = os.environ.get("TORTURE_AT", "::0").split(":")
left = int(CALL)


def watch(frame: FrameType, event: str, argument: object) -> None:
    """Pause in the wanted call, also after a signal whose handler raises nothing."""
    global left
    if (frame.f_globals.get("__name__"), frame.f_code.co_qualname, event) == (MODULE, FUNCTION, "call"):
        left -= 1
        if not left:
            sys.setprofile(None)
            threading.setprofile(None)
            open(os.path.join(os.environ["TORTURE_MARKS"], str(os.getpid())), "w").close()
            time.sleep(float(os.environ.get("TORTURE_PAUSE_S", "1")))


if MODULE:
    sys.setprofile(watch)
    threading.setprofile(watch)
