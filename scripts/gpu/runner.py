"""Runs the steps, each in a process of its own that is killed with its children when its time is over.

Standard library only, see gpu/record.py.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu.catalogue import Step
from gpu.record import BAD, Record

MARK = "GPU_CHECK_STEP"
"""Environment variable that all processes of a step carry, those in a new session too."""
TAIL = 30
"""Lines of output kept of a step that failed."""
SPARE_S = 5.0
"""Seconds kept for the end of the check."""

Say = Callable[[str], None]
Command = Callable[[Step, Path], Sequence[str]]
"""command(step, file for its results) -> words."""


@dataclass(frozen=True)
class Ended:
    """End of a step's process."""

    code: int | None
    """Exit code; None if it was killed."""
    seconds: float
    tail: tuple[str, ...]


def run_steps(
    steps: Iterable[Step],
    record: Record,
    command: Command,
    *,
    environment: Mapping[str, str],
    end: float,
    again: Iterable[str] = (),
    say: Say,
    log: Path,
) -> int:
    """Run what is not recorded yet, until `end` (time.monotonic()). Return 1 if a step failed, else 0."""
    for step in steps:
        if record.is_done(step.name) and step.name not in again:
            say(f"kept         {step.name}: {record.state(step.name)}")
            continue
        left = end - time.monotonic() - SPARE_S
        if left < step.likely_s:
            say(f"not reached  {step.name}: {left:.0f} s left, it takes about {step.likely_s:.0f} s")
            if record.steps.get(step.name, {}).get("identity") != record.identity:
                record.put(step.name, state="not reached")
            continue
        say(f"begins       {step.name}: {step.title}")
        record.put(step.name, **run_step(step, command, environment, min(step.limit_s, left), say, log))
        entry = record.steps[step.name]
        say(f"{entry['state']:12} {step.name}, {entry['seconds']:.0f} s")
    return int(any(entry["state"] in BAD for entry in record.steps.values()))


def run_step(
    step: Step, command: Command, environment: Mapping[str, str], limit_s: float, say: Say, log: Path
) -> dict[str, Any]:
    """Run one step; its entry in the record."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as scratch:
        results = Path(scratch, "results.jsonl")
        begun = datetime.now(UTC).isoformat(timespec="seconds")
        scratched = {**environment, "GPU_CHECK_SCRATCH": scratch}
        ended = run_limited(command(step, results), scratched, limit_s, say, log)
        entries = []
        for line in results.read_text().splitlines() if results.exists() else []:
            with suppress(ValueError):  # of a killed step the last line may be torn
                entries.append(json.loads(line))
    if ended.code is None:
        state = "timed out" if limit_s >= step.limit_s else "cut short"
    else:
        problems = any("problem" in entry for entry in entries)
        state = "failed" if ended.code or problems else "ok"
    entry = {"state": state, "seconds": round(ended.seconds, 1), "when": begun, "entries": entries}
    return entry if state == "ok" else {**entry, "tail": list(ended.tail)}


def run_limited(
    words: Sequence[str],
    environment: Mapping[str, str],
    limit_s: float,
    say: Say,
    log: Path,
    folder: Path | None = None,
) -> Ended:
    """Run a command in `folder` for at most `limit_s` seconds; nothing that it started outlives this call."""
    mark, begin, tail = uuid.uuid4().hex, time.monotonic(), deque[str](maxlen=TAIL)
    with log.open("a") as sink:
        process = subprocess.Popen(
            words,
            env={**environment, MARK: mark},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        reader = threading.Thread(target=_read, args=(process, sink, tail, say), daemon=True)
        reader.start()
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_marked(mark)
            with suppress(ProcessLookupError):  # a system that does not show environments
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            reader.join(5)
    return Ended(code, time.monotonic() - begin, tuple(tail))


def _read(process: "subprocess.Popen[str]", sink: Any, tail: deque[str], say: Say) -> None:
    """Copy the output to the log; lines that a step marks as progress are said too."""
    assert process.stdout is not None
    for line in process.stdout:
        with suppress(ValueError):  # the log is closed: a killed step's last words
            sink.write(line)
            sink.flush()
        tail.append(line.rstrip())
        if line.startswith("· "):
            say(f"             {line.rstrip()}")


def kill_marked(mark: str, wait_s: float = 5.0) -> None:
    """Kill every process whose environment carries the mark, and wait until none is left."""
    end = time.monotonic() + wait_s
    while (alive := processes_with(f"{MARK}={mark}")) and time.monotonic() < end:
        for pid in alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def processes_with(variable: str) -> list[int]:
    """Processes with NAME=value in their environment, which ended ones that nobody waited for do not have."""
    wanted, found = variable.encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def python_environment(root: Path, base: Mapping[str, str]) -> dict[str, str]:
    """Environment of the steps: the checkout's packages, no network, one visible GPU, no buffering."""
    path = [str(root / "scripts"), str(root)]
    return {
        "CUDA_VISIBLE_DEVICES": "0",  # unless the caller has chosen: the check is of one GPU
        **base,
        "PYTHONPATH": os.pathsep.join(path + [p for p in [base.get("PYTHONPATH")] if p]),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "MPLBACKEND": "Agg",
        "TOKENIZERS_PARALLELISM": "false",
    }


def child_command(device: str, quick: bool, record: Path) -> Callable[[Step, Path], list[str]]:
    """The words that run a step (gpu/child.py)."""

    def command(step: Step, results: Path) -> list[str]:
        options = {"device": device, "quick": quick, "record": str(record)}
        return [sys.executable, "-m", "gpu.child", step.run, str(results), json.dumps(options)]

    return command
