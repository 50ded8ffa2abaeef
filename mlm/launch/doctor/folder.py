"""Checks of the folder that ranks share: seen by all, written, renamed and locked as on one disk.

`check_start` is the part of `mlm doctor` that every training run begins with, in less than a second.
"""

import errno
import os
import socket
import time
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path

from mlm.checkpoint.native.exchange import Ranks
from mlm.launch.config import DoctorConfig
from mlm.launch.doctor.findings import (
    SAME_VERSIONS,
    CheckResult,
    check_result,
    different_versions,
    ranks_with_hosts,
    versions,
)
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError
from mlm.util.files import read_regular, write_atomic
from mlm.util.lock import Lock, held_folder, remove_abandoned
from mlm.util.results import is_stream
from mlm.util.system import poll
from mlm.util.terminal import format_bytes

SEEN_S = 2.0
"""Seconds within which a rank must see a file that another host wrote."""
SLOW_SPEED = 50e6
"""Bytes a second below which a disk is slow: a checkpoint of a billion parameters takes 4 minutes there."""
PIECE, PIECES, SPEED_S = 4 << 20, 8, 2.0
"""Bytes written and synced at a time, how often, and the seconds after which the trial ends."""
SHARED, RENAMED, SPEED, LOCKS = "shared folder", "rename", "write speed", "flock"
TRIALS = f".mlm-doctor-{'[0-9a-f]' * 32}/"
"""Pattern of trial folders."""
SHARE = "name a folder on a file system that all hosts mount (out)"


def folder_of(config: DoctorConfig) -> Path:
    return Path.cwd() if config.out is None or is_stream(config.out) else Path(config.out).absolute().parent


def check_folder(folder: Path, ctx: ParallelContext, *, is_first_of_host: bool) -> list[CheckResult]:
    """Judge a folder as this rank sees it; writes only a trial folder in it. Collective."""
    ranks = Ranks.of(ctx)
    trial = folder / f".mlm-doctor-{ranks.broadcast(uuid.uuid4().hex)}"
    with ExitStack() as stack:
        problem = ""
        if ctx.is_main:
            try:
                remove_abandoned(folder, TRIALS)
                trial.mkdir(parents=True)
                stack.enter_context(held_folder(trial))
            except OSError as error:
                problem = str(error.strerror)
        if problem := str(ranks.broadcast(problem)):
            remedy = "make it writable or free some space there, or name another out"
            return [CheckResult(SHARED, "fail", f"rank 0 cannot write to {folder}: {problem}", remedy)]
        problem, _, remedy = sharing_problems(trial, ctx)[ctx.rank].partition("; ")
        shared = check_result(SHARED, problem or str(folder), remedy, fails=bool(problem))
        findings = [_check_rename(trial, ctx)]
        if is_first_of_host:  # all hosts write at once, as they save checkpoints
            findings.append(_check_speed(trial / f"speed-{ctx.rank}"))
        ranks.all_gather(None)
        findings.append(_check_lock(trial, ctx))
        return [shared, *(findings if shared.status == "ok" else ())]


def sharing_problems(folder: Path, ctx: ParallelContext) -> list[str]:
    """Return the problem of each rank, or "": it cannot write, or does not see files of other ranks.

    All ranks look for the file of rank 0, and rank 0 for all files. Collective.
    """
    ranks, path, problem = Ranks.of(ctx), folder / f".mlm-doctor-{ctx.rank}", ""
    nonce = uuid.uuid4().hex
    try:
        try:
            write_atomic(path, nonce.encode())
        except OSError as error:
            remedy = "free space there" if error.errno in (errno.ENOSPC, errno.EDQUOT) else SHARE
            problem = f"cannot write to it: {error.strerror}; {remedy}"
        nonces = ranks.all_gather(None if problem else nonce)
        deadline = time.monotonic() + SEEN_S
        for rank in range(ctx.world_size) if ctx.is_main else (0,):
            wait_s, file = max(0.0, deadline - time.monotonic()), folder / f".mlm-doctor-{rank}"
            if not problem and nonces[rank] and not wait_for_content(file, nonces[rank], wait_s):
                problem = f"does not see what rank {rank} wrote there within {SEEN_S:g} s; {SHARE}"
        return [str(answer) for answer in ranks.all_gather(problem)]
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def wait_for_content(path: Path, content: str, wait_s: float) -> bool:
    """True once a file has this content; False if it has not within `wait_s` seconds."""
    for _ in poll(wait_s):
        with suppress(OSError):
            if read_regular(path) == content.encode():
                return True
    return False


def _check_rename(trial: Path, ctx: ParallelContext) -> CheckResult:
    """Replace a file on rank 0; all others must see the new content."""
    problem = ""
    try:
        for content in ("first", "second") if ctx.is_main else ():
            write_atomic(trial / "replaced", content.encode())
    except OSError as error:
        problem = f"{error.strerror} ({error.filename or trial.parent})"
    Ranks.of(ctx).all_gather(None)
    if not problem and not wait_for_content(trial / "replaced", "second", SEEN_S):
        problem = f"a file that rank 0 replaced keeps its old content for {SEEN_S:g} s"
    remedy = "checkpoints need it: name an out on a local or cluster file system, not FUSE or S3"
    return check_result(RENAMED, problem or "replaces a file whole", remedy, fails=bool(problem))


def _check_speed(path: Path) -> CheckResult:
    """Time writes of random bytes, which no disk compresses."""
    piece, count, start, seconds = os.urandom(PIECE), 0, time.monotonic(), 0.0
    try:
        with open(path, "xb") as f:
            while count < PIECES * PIECE and seconds < SPEED_S:
                f.write(piece)
                f.flush()
                os.fsync(f.fileno())
                count, seconds = count + PIECE, time.monotonic() - start
    except OSError as error:
        remedy = "free some space there, or name an out on another disk"
        text = f"{error.strerror} within {format_bytes(PIECES * PIECE)} ({path.parent.parent})"
        return CheckResult(SPEED, "fail", text, remedy)
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
    speed = count / max(seconds, 1e-9)
    text = f"{format_bytes(int(speed))}/s"
    if speed < SLOW_SPEED:
        minutes = 12e9 / speed / 60  # weights and both moments in float32
        text += f": a checkpoint of a billion parameters takes {minutes:,.0f} minutes"
    remedy = "name an out on a faster disk, or raise checkpoint.save_every"
    return check_result(SPEED, text, remedy, warns=speed < SLOW_SPEED)


def _check_lock(trial: Path, ctx: ParallelContext) -> CheckResult:
    """Lock a file on rank 0; no other rank must get the lock until its release."""
    ranks, problem, lock = Ranks.of(ctx), "", Lock(trial / "lock")
    try:
        if ctx.is_main and not lock.take():
            problem = "a new file cannot be locked"
    except OSError as error:
        problem = str(error.strerror)
    ranks.all_gather(None)
    if not ctx.is_main or ctx.world_size == 1:
        other = Lock(trial / "lock", create=False)
        try:
            if other.take():
                other.release()
                problem = "two processes hold one lock"
        except FileNotFoundError:
            pass  # not shared: `sharing_problems` reports it
        except OSError as error:
            problem = str(error.strerror)
    ranks.all_gather(None)
    lock.release()
    remedy = "mount it with flock (Lustre: -o flock, NFS: version 4), or let no two runs share an out"
    return check_result(LOCKS, problem or "excludes the other ranks", remedy, fails=bool(problem))


def check_start(out: str, ctx: ParallelContext) -> None:
    """Raise UserError on every rank unless all have the same versions and share the folder `out`.

    The rendezvous has checked addresses. Collective.
    """
    if ctx.world_size == 1:
        return
    problems = sharing_problems(Path(out), ctx)
    answers = Ranks.of(ctx).all_gather([socket.gethostname(), versions()])
    hosts, versions_of_ranks = zip(*answers, strict=True)
    if difference := different_versions(hosts, versions_of_ranks):
        raise UserError(f"{difference}: the ranks of a run need the same versions; {SAME_VERSIONS}")
    if problem := next(
        filter(None, (*problems[1:], problems[0])), ""
    ):  # a failure of any rank fails rank 0 too
        ranks = [rank for rank, other in enumerate(problems) if other == problem]
        raise UserError(f"out={out}: {ranks_with_hosts(ranks, hosts)}: {problem}")
