"""Checks of the folder that ranks share: seen by all, written, renamed and locked as on one disk.

`check_start` is the part of `mlm doctor` that every training run begins with, in less than a second.
"""

import errno
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from mlm.checkpoint.native.exchange import Ranks
from mlm.launch.config import DoctorConfig
from mlm.launch.doctor.findings import (
    SAME_VERSIONS,
    Control,
    Finding,
    different_versions,
    finding,
    ranks_with_hosts,
    versions,
)
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError
from mlm.util.files import read_regular, write_atomic
from mlm.util.lock import Lock, held_folder, remove_abandoned
from mlm.util.results import is_stream
from mlm.util.terminal import format_bytes

SEEN_S = 2.0
"""Seconds in which a file that another host wrote must be seen."""
SLOW_S = 1.0
"""Seconds that writing a small file to the disk may take."""
SLOW_SPEED = 50e6
"""Bytes a second below which a disk is slow: a checkpoint of a billion parameters takes 4 minutes there."""
PIECE, PIECES, SPEED_S = 4 << 20, 8, 2.0
"""Bytes that are written and pushed to the disk at a time, how often, and the seconds after which it ends."""
SHARED, DISK, SPEED, LOCKS = "shared folder", "fsync and rename", "write speed", "flock"
TRIALS = f".mlm-doctor-{'[0-9a-f]' * 32}/"
"""Folders of trials, as a pattern."""
SHARE = "name a folder on a file system that all hosts mount (out)"


def folder_of(config: DoctorConfig) -> Path:
    """Return the folder whose disk is checked."""
    return Path.cwd() if config.out is None or is_stream(config.out) else Path(config.out).absolute().parent


def tidy(config: DoctorConfig) -> None:
    """Remove the folder of a trial whose ranks were killed, as by Ctrl-C."""
    remove_abandoned(folder_of(config), TRIALS)


def wait_for_content(path: Path, content: bytes, wait_s: float | None = None) -> bool:
    """Return True once a file has this content; False if it has not within `wait_s` (SEEN_S) seconds."""
    end = time.monotonic() + (SEEN_S if wait_s is None else wait_s)
    while True:
        with suppress(OSError):
            if read_regular(path) == content:
                return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)


def check_folder(folder: Path, control: Control) -> list[Finding]:
    """Judge a folder as this rank sees it; only a folder for the trial is made in it. Collective."""
    token = control.all_gather(SHARED, uuid.uuid4().hex)[0]
    trial = folder / f".mlm-doctor-{token}"
    with ExitStack() as stack:
        problem = ""
        if control.rank == 0:
            try:
                remove_abandoned(folder, TRIALS)
                trial.mkdir(parents=True)
                stack.enter_context(held_folder(trial))
                write_atomic(trial / "first", b"first")
            except OSError as error:
                problem = str(error.strerror)
        if problem := control.all_gather(SHARED, problem)[0]:
            remedy = "make it writable or free some space there, or name another out"
            return [Finding(SHARED, "fail", f"rank 0 cannot write to {folder}: {problem}", remedy)]
        shared = _check_sharing(trial, control)
        others = [_check_rename(trial, control)]
        if control.rank == control.hosts.index(control.hosts[control.rank]):
            # The first rank of each host writes, all hosts at once, as they save checkpoints.
            others.append(_check_speed(trial / f"speed-{control.rank}"))
        control.all_gather(SPEED, None)
        others.append(_check_lock(trial, control))
        return [shared, *(others if shared.status == "ok" else ())]


def _check_sharing(trial: Path, control: Control) -> Finding:
    """All ranks must see the file of rank 0, and rank 0 the files of all."""
    where, problem, remedy = trial.parent, "", SHARE
    if not wait_for_content(trial / "first", b"first"):
        problem = f"{where} does not show what rank 0 wrote there within {SEEN_S:g} s"
    else:
        try:
            write_atomic(trial / f"rank-{control.rank}", str(control.rank).encode())
        except OSError as error:
            problem, remedy = f"cannot write to {where}: {error.strerror}", "make it writable"
    has_written = control.all_gather(SHARED, not problem)
    end = time.monotonic() + SEEN_S
    for rank in range(control.world_size) if control.rank == 0 else ():
        wait_s = max(0.0, end - time.monotonic())
        if has_written[rank] and not wait_for_content(trial / f"rank-{rank}", str(rank).encode(), wait_s):
            problem = f"{where} does not show what rank {rank} wrote there within {SEEN_S:g} s"
            break
    return finding(SHARED, problem or str(where), remedy, fails=bool(problem))


def _check_rename(trial: Path, control: Control) -> Finding:
    """Rank 0 replaces a file, which the others must see whole; each pushes a file to the disk."""
    begin, problem = time.monotonic(), ""
    try:
        write_atomic(trial / f"disk-{control.rank}", b"again")  # rank 0 may still look for the other
        if control.rank == 0:
            write_atomic(trial / "first", b"second")
    except OSError as error:
        problem = f"{error.strerror} ({error.filename or trial.parent})"
    seconds = time.monotonic() - begin
    control.all_gather(DISK, None)
    if not problem and not wait_for_content(trial / "first", b"second"):
        problem = f"a file that rank 0 replaced keeps its old content for {SEEN_S:g} s"
    if problem:
        remedy = "checkpoints need both: name an out on a local or cluster file system, not FUSE or S3"
        return Finding(DISK, "fail", problem, remedy)
    text = f"{seconds * 1000:.0f} ms for a small file"
    return finding(DISK, text, "name an out on a faster disk", warns=seconds > SLOW_S)


def _check_speed(path: Path) -> Finding:
    """Write a file that no disk compresses."""
    piece, written, begin, seconds = os.urandom(PIECE), 0, time.monotonic(), 0.0
    try:
        with open(path, "xb") as f:
            while written < PIECES * PIECE and seconds < SPEED_S:
                f.write(piece)
                f.flush()
                os.fsync(f.fileno())
                written, seconds = written + PIECE, time.monotonic() - begin
    except OSError as error:
        remedy = "free some space there, or name an out on another disk"
        text = f"{error.strerror} within {format_bytes(PIECES * PIECE)} ({path.parent.parent})"
        return Finding(SPEED, "fail", text, remedy)
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    speed = written / max(seconds, 1e-9)
    text = f"{format_bytes(int(speed))}/s"
    if speed >= SLOW_SPEED:
        return Finding(SPEED, "ok", text)
    minutes = 12e9 / speed / 60  # weights and both moments in float32
    text = f"{text}: a checkpoint of a billion parameters takes {minutes:,.0f} minutes"
    return Finding(SPEED, "warn", text, "name an out on a faster disk, or raise checkpoint.save_every")


def _check_lock(trial: Path, control: Control) -> Finding:
    """Rank 0 locks a file, which nobody else must get before it is released."""
    problem, held = "", Lock(trial / "lock")
    try:
        if control.rank == 0 and not held.take():
            problem = "a new file cannot be locked"
    except OSError as error:
        problem = str(error.strerror)
    control.all_gather(LOCKS, None)
    if control.rank or control.world_size == 1:
        other = Lock(trial / "lock", create=False)
        try:
            if other.take():
                other.release()
                problem = "two processes hold one lock"
        except FileNotFoundError:
            pass  # not shared: another finding
        except OSError as error:
            problem = str(error.strerror)
    control.all_gather(LOCKS, None)
    held.release()
    remedy = "mount it with flock (Lustre: -o flock, NFS: version 4), or let no two runs share an out"
    return finding(
        LOCKS, problem or "excludes the other ranks", remedy if problem else "", fails=bool(problem)
    )


@contextmanager
def trial_file(folder: Path, rank: int) -> Iterator[bytes]:
    """Write a small file for other ranks to see, and yield its content. Raises OSError."""
    path, content = trial_path(folder, rank), uuid.uuid4().hex.encode()
    try:
        write_atomic(path, content)
        yield content
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def trial_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's trial file."""
    return folder / f".mlm-doctor-{rank}"


def check_start(out: str, ctx: ParallelContext) -> None:
    """Raise UserError on every rank unless all have the same versions and share the folder `out`.

    Each rank writes a file there and looks for rank 0's. The rendezvous has checked addresses. Collective.
    """
    if ctx.world_size == 1:
        return
    ranks, folder = Ranks.of(ctx), Path(out)
    with ExitStack() as stack:
        problem, content = "", b""
        try:
            content = stack.enter_context(trial_file(folder, ctx.rank))
        except OSError as error:
            remedy = "free space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else SHARE
            problem = f"cannot write to it: {error.strerror}; {remedy}"
        first = str(ranks.broadcast(content.decode())).encode()
        if not problem and not wait_for_content(trial_path(folder, 0), first):
            problem = f"does not see what rank 0 wrote there within {SEEN_S:g} s; {SHARE}"
        answers = ranks.all_gather([socket.gethostname(), versions(), problem])
    hosts, versions_of_ranks, problems = zip(*answers, strict=True)
    if differ := different_versions(hosts, versions_of_ranks):
        raise UserError(f"{differ}: the ranks of a run need the same versions; {SAME_VERSIONS}")
    if problem := next(filter(None, problems), ""):
        affected = [rank for rank, other in enumerate(problems) if other == problem]
        raise UserError(f"out={out}: {ranks_with_hosts(affected, hosts)}: {problem}")
