"""A port for a job, and waits for what the ranks of jobs.py tell and for their end."""

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

DEADLINE_S = 60.0


def told(folder: Path, when: Callable[[dict[str, Any]], bool] = lambda facts: True) -> list[dict[str, Any]]:
    """Return the facts of two ranks, once both satisfy `when`."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        facts = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
        if len(facts) == 2 and all(map(when, facts)):
            return facts
        time.sleep(0.05)
    raise AssertionError(f"ranks did not come that far: {facts}")


def wait_gone(facts: list[dict[str, Any]]) -> None:
    """Return once no rank that told these facts is left."""
    end, pids = time.monotonic() + 10.0, [rank["pid"] for rank in facts]

    def is_rank(pid: int) -> bool:
        with suppress(OSError):
            return b"mlm.launch.rank" in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False

    while any(map(is_rank, pids)):
        assert time.monotonic() < end, f"ranks {pids} are still there"
        time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
