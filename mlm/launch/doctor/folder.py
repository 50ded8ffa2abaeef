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
PARAMETER, BILLION = 12, 10**9
"""Bytes of a parameter in a checkpoint: weights and both moments in float32."""
POLL_S = 0.02
SHARED, DISK, SPEED, LOCKS = "shared folder", "fsync and rename", "write speed", "flock"
MARK = ".mlm-doctor"
SHARE = "name a folder on a file system that all hosts mount (out)"


def folder_of(config: DoctorConfig) -> Path:
    """Return the folder whose disk is checked."""
    return Path.cwd() if config.out is None or is_stream(config.out) else Path(config.out).absolute().parent


def tidy(config: DoctorConfig) -> None:
    """Remove the folder of a trial whose ranks were killed, as by Ctrl-C."""
    remove_abandoned(folder_of(config), f"{MARK}-{'[0-9a-f]' * 32}/")


def wait_for_content(path: Path, content: bytes, wait_s: float | None = None) -> bool:
    """Return True once a file has this content; False if it has not within `wait_s` seconds."""
    end = time.monotonic() + (SEEN_S if wait_s is None else wait_s)
    while True:
        with suppress(OSError):
            if read_regular(path) == content:
                return True
        if time.monotonic() >= end:
            return False
        time.sleep(POLL_S)


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
    return folder / f"{MARK}-{rank}"


def check_folder(folder: Path, control: Control) -> list[Finding]:
    """Judge a folder as this rank sees it; only a folder for the trial is made in it. Collective."""
    token = control.all_gather(SHARED, uuid.uuid4().hex)[0]
    work = folder / f"{MARK}-{token}"
    with ExitStack() as stack:
        made = ""
        if control.rank == 0:
            try:
                remove_abandoned(folder, f"{MARK}-{'[0-9a-f]' * 32}/")
                work.mkdir(parents=True)
                stack.enter_context(held_folder(work))
                write_atomic(work / "first", b"first")
            except OSError as error:
                made = str(error.strerror)
        if problem := control.all_gather(SHARED, made)[0]:
            remedy = "make it writable or free some space there, or name another out"
            return [Finding(SHARED, "fail", f"rank 0 cannot write to {folder}: {problem}", remedy)]
        sharing = _check_sharing(work, control)
        others = [_check_rename(work, control)]
        if control.rank == control.hosts.index(control.hosts[control.rank]):
            # the first rank of each host writes, all hosts at once, as they save checkpoints
            others.append(_speed(work / f"speed-{control.rank}"))
        control.all_gather(SPEED, None)
        others.append(_check_lock(work, control))
        return [sharing, *(others if sharing.status == "ok" else ())]


def _check_sharing(work: Path, control: Control) -> Finding:
    """All must see the file of rank 0, and rank 0 those of all."""
    where, finding = work.parent, Finding(SHARED, "ok", f"{work.parent}")
    if not wait_for_content(work / "first", b"first"):
        said = f"{where} does not show what rank 0 wrote there within {SEEN_S:g} s"
        finding = Finding(SHARED, "fail", said, SHARE)
    else:
        try:
            write_atomic(work / f"rank-{control.rank}", str(control.rank).encode())
        except OSError as error:
            finding = Finding(
                SHARED, "fail", f"cannot write to {where}: {error.strerror}", "make it writable"
            )
    wrote = control.all_gather(SHARED, finding.status == "ok")
    end = time.monotonic() + SEEN_S
    for rank, written in enumerate(wrote if control.rank == 0 else ()):
        name, wait_s = work / f"rank-{rank}", max(0.0, end - time.monotonic())
        if written and not wait_for_content(name, str(rank).encode(), wait_s):
            said = f"{where} does not show what rank {rank} wrote there within {SEEN_S:g} s"
            return Finding(SHARED, "fail", said, SHARE)
    return finding


def _check_rename(work: Path, control: Control) -> Finding:
    """Rank 0 replaces a file, which the others must see whole; each pushes a file to the disk."""
    begin, problem = time.monotonic(), ""
    try:
        write_atomic(work / f"disk-{control.rank}", b"again")  # rank 0 may still look for the other
        if control.rank == 0:
            write_atomic(work / "first", b"second")
    except OSError as error:
        problem = f"{error.strerror} ({error.filename or work.parent})"
    seconds = time.monotonic() - begin
    control.all_gather(DISK, None)
    if not problem and not wait_for_content(work / "first", b"second"):
        problem = f"a file that rank 0 replaced keeps its old content for {SEEN_S:g} s"
    if problem:
        remedy = "checkpoints need both: name an out on a local or cluster file system, not FUSE or S3"
        return Finding(DISK, "fail", problem, remedy)
    said, remedy = f"{seconds * 1000:.0f} ms for a small file", "name an out on a faster disk"
    return Finding(DISK, "warn" if seconds > SLOW_S else "ok", said, remedy)


def _write_pieces(path: Path) -> float:
    """Write a file that no disk compresses; return bytes a second. Raises OSError."""
    piece, count, begin, seconds = os.urandom(PIECE), 0, time.monotonic(), 0.0
    with open(path, "xb") as f:
        while count < PIECES * PIECE and seconds < SPEED_S:
            f.write(piece)
            f.flush()
            os.fsync(f.fileno())
            count, seconds = count + PIECE, time.monotonic() - begin
    return count / max(seconds, 1e-9)


def _speed(path: Path) -> Finding:
    try:
        speed = _write_pieces(path)
    except OSError as error:
        remedy = "free some space there, or name an out on another disk"
        said = f"{error.strerror} within {format_bytes(PIECES * PIECE)} ({path.parent.parent})"
        return Finding(SPEED, "fail", said, remedy)
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    said = f"{format_bytes(int(speed))}/s"
    if speed >= SLOW_SPEED:
        return Finding(SPEED, "ok", said)
    minutes = PARAMETER * BILLION / speed / 60
    said = f"{said}: a checkpoint of a billion parameters takes {minutes:,.0f} minutes"
    return Finding(SPEED, "warn", said, "name an out on a faster disk, or raise checkpoint.save_every")


def _check_lock(work: Path, control: Control) -> Finding:
    """Rank 0 locks a file, which nobody else must get before it is released."""
    remedy = "mount it with flock (Lustre: -o flock, NFS: version 4), or let no two runs share an out"
    finding, held = Finding(LOCKS, "ok", "excludes the other ranks"), Lock(work / "lock")
    try:
        if control.rank == 0 and not held.take():
            finding = Finding(LOCKS, "fail", "a new file cannot be locked", remedy)
    except OSError as error:
        finding = Finding(LOCKS, "fail", f"{error.strerror}", remedy)
    control.all_gather(LOCKS, None)
    if control.rank or control.world_size == 1:
        other = Lock(work / "lock", create=False)
        try:
            if other.take():
                other.release()
                finding = Finding(LOCKS, "fail", "two processes hold one lock", remedy)
        except FileNotFoundError:
            pass  # not shared: another finding
        except OSError as error:
            finding = Finding(LOCKS, "fail", f"{error.strerror}", remedy)
    control.all_gather(LOCKS, None)
    held.release()
    return finding


def check_start(out: str, ctx: ParallelContext) -> None:
    """Raise UserError on every rank unless all have the same versions and share the folder `out`.

    Each writes a file there and looks for that of rank 0. Addresses and the port were checked when the ranks
    came. Collective.
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
        each = ranks.all_gather([socket.gethostname(), versions(), problem])
    hosts = [host for host, _, _ in each]
    if differ := different_versions(hosts, [own for _, own, _ in each]):
        raise UserError(f"{differ}: the ranks of a run need the same versions; {SAME_VERSIONS}")
    bad = [rank for rank, (_, _, problem) in enumerate(each) if problem]
    if bad:
        same = [rank for rank in bad if each[rank][2] == each[bad[0]][2]]
        raise UserError(f"out={out}: {ranks_with_hosts(same, hosts)}: {each[bad[0]][2]}")
