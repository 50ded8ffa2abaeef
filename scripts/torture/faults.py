"""Everything else that happens to checkpoints: full disks, permissions, damage, mix-ups, two runs at once."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from mlm.checkpoint.native.folders import CHECKPOINTS, LATEST, step_name
from mlm.checkpoint.native.format import MANIFEST
from torture.children import SAVE, Job, Manner
from torture.inspection import Trial, last_line, run_folder_writable_by_all
from torture.runs import HALF, STEPS, start_reshard

TMPFS_BYTES = 4 << 20
NEWEST, OLDER = step_name(HALF), step_name(HALF - 1)
SHARDS = "*.safetensors"
Harm = Callable[[Trial, Path], None]


def damaged(pattern: str, harm: Harm, *, names_file: bool = True) -> Callable[[Trial], None]:
    """Harm to a file of a stopped run's newest checkpoint: it goes on from the one before, and says why."""

    def fault(trial: Trial) -> None:
        trial.begin_halfway()
        path = trial.rng.choice(sorted((trial.root / NEWEST).glob(pattern)))
        harm(trial, path)
        trial.note = f"{trial.reference.layout}, {path.name}"
        trial.must_hold([HALF - 1])
        trial.goes_on(naming=f"{NEWEST}/{path.name}" if names_file else NEWEST)

    return fault


def beside(name: str, harm: Harm) -> Callable[[Trial], None]:
    """Harm to a file that is no part of a checkpoint: nothing is lost, and the run goes on."""

    def fault(trial: Trial) -> None:
        trial.begin_halfway()
        harm(trial, trial.out / name)
        trial.note = f"{trial.reference.layout}, {name}"
        trial.must_hold([HALF - 1, HALF])
        trial.goes_on()

    return fault


def flip(trial: Trial, path: Path, part: slice = slice(None)) -> None:
    """Change one bit, of these bytes."""
    content = bytearray(path.read_bytes())
    content[trial.rng.choice(range(len(content))[part])] ^= 1 << trial.rng.randrange(8)
    path.write_bytes(content)


def flip_header(trial: Trial, path: Path) -> None:
    """Change one bit before the tensors of a safetensors file."""
    flip(trial, path, slice(header_size(path)))


def flip_tensor(trial: Trial, path: Path) -> None:
    """Change one bit of a tensor."""
    flip(trial, path, slice(header_size(path), None))


def header_size(path: Path) -> int:
    """Bytes of a safetensors file before its tensors."""
    with open(path, "rb") as f:
        return 8 + int.from_bytes(f.read(8), "little")


def truncate(trial: Trial, path: Path) -> None:
    """Cut a file short, to nothing sometimes."""
    os.truncate(path, trial.rng.choice((0, trial.rng.randrange(path.stat().st_size))))


def delete(_: Trial, path: Path) -> None:
    """Delete a file."""
    path.unlink()


def replace_by_older(_: Trial, path: Path) -> None:
    """Put the file of the checkpoint before in its place: a rank's has the same size."""
    shutil.copy(path.parent.with_name(OLDER) / path.name, path)


def disk_full(trial: Trial) -> None:
    """A small file system that others fill from the n-th save on; for who may not mount, a limit on files."""
    if not mount(trial.out):
        return file_limit(trial)
    try:
        job = trial.reference.pretrain(trial.out)
        job.wait_for(SAVE, trial.rng.randint(1, STEPS))
        filler = trial.out / "filler"
        code = job.end(between=lambda: fill(filler))
        fails_loudly(trial, code, job.said(), "No space left on device")
        trial.must_hold(trial.published())
        filler.unlink()
        trial.note = "tmpfs"
        trial.after_kill()
    finally:
        subprocess.run(["umount", "--lazy", str(trial.out)], check=True)


def mount(folder: Path) -> bool:
    """Mount a small tmpfs; False where that is not permitted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(folder)]
    if os.getuid() == 0 and shutil.which("mount"):
        return subprocess.run(command, capture_output=True).returncode == 0
    folder.rmdir()
    return False


def fill(path: Path) -> None:
    """Take all the space that is left."""
    with open(path, "ab", buffering=0) as f:
        try:
            while True:
                f.write(bytes(4096))
        except OSError:
            pass


def file_limit(trial: Trial) -> None:
    """No file may grow beyond a size, as with a quota, from the n-th save on."""
    limit = (trial.rng.randint(1, STEPS), trial.rng.choice((16_000, 32_000)))
    job = trial.reference.pretrain(trial.out, manner=Manner(file_limit=limit))
    fails_loudly(trial, job.end(), job.said(), "File too large")
    trial.note = f"{trial.reference.layout}, {limit[1]} bytes"
    trial.after_kill()


def fails_loudly(trial: Trial, code: int, said: str, reason: str) -> None:
    """A run that could not save must not end as if it had."""
    if code not in (1, 2) or reason not in said or "Traceback" in said:
        trial.found.other.append(f"a save that fails is not told well: exit code {code}: {last_line(said)}")


def read_only_folder(trial: Trial) -> None:
    """The folder of checkpoints may no longer be written, from the n-th save on."""
    trial.begin_halfway()
    run_folder_writable_by_all(trial.out)
    job = trial.reference.pretrain(trial.out, manner=Manner(unprivileged=True))
    job.wait_for(SAVE, trial.rng.randint(1, STEPS - HALF - 1))
    trial.root.chmod(0o555)
    fails_loudly(trial, job.end(), job.said(), "Permission denied")
    trial.root.chmod(0o777)
    trial.note = trial.reference.layout
    trial.after_kill()


def unreadable(trial: Trial) -> None:
    """A file of the newest checkpoint, or its folder, may not be read."""
    trial.begin_halfway()
    run_folder_writable_by_all(trial.out)
    shards = sorted(path.name for path in (trial.root / NEWEST).glob(SHARDS))
    name = trial.rng.choice([MANIFEST, trial.rng.choice(shards), "."])
    (trial.root / NEWEST / name).chmod(0)
    trial.note = f"{trial.reference.layout}, {name}"
    trial.must_hold([HALF - 1])
    job = trial.reference.pretrain(trial.out, manner=Manner(unprivileged=True))
    if code := job.end():
        trial.found.other.append(f"the run does not go on: exit code {code}: {last_line(job.said())}")
        return
    trial.ends_right()
    if NEWEST not in job.said():
        trial.found.other.append(f"the run goes on without a word about {NEWEST}")


def moved_away(trial: Trial, what: Path) -> None:
    """A folder is moved away while the run saves, and put back when it has ended."""
    trial.begin_halfway()
    aside = trial.out.with_name(f"{trial.out.name}-aside")
    job = trial.reference.pretrain(trial.out)
    job.wait_for(SAVE, trial.rng.randint(1, STEPS - HALF))
    what.rename(aside)
    code, there = job.end(), what.exists()
    trial.note = f"{trial.reference.layout}, {'made again' if there else 'gone'}, exit code {code}"
    told_well(trial, job.said())
    if code == 0:
        trial.ends_right()
    if there:
        shutil.rmtree(what)
    aside.rename(what)
    trial.after_kill()


def told_well(trial: Trial, said: str) -> None:
    """Check that the output of a run is no traceback."""
    if "Traceback" in said:
        last = next(line for line in reversed(said.splitlines()) if "Error" in line)
        trial.found.other.append(f"the run ends with a traceback: {last}")


def deleted_folder(trial: Trial) -> None:
    """The folder of checkpoints is deleted under the run: what it saves later is right."""
    trial.begin_halfway()
    job = trial.reference.pretrain(trial.out)
    job.wait_for(SAVE, trial.rng.randint(1, STEPS - HALF))
    shutil.rmtree(trial.root, ignore_errors=True)
    code = job.end()
    trial.note = f"{trial.reference.layout}, exit code {code}"
    told_well(trial, job.said())
    if code == 0:
        trial.ends_right()
    trial.all_that_is_whole_is_right()
    trial.goes_on()


def two_runs(trial: Trial) -> None:
    """The same command again while the first is held up in a save."""
    intrude(trial, lambda manner: trial.reference.pretrain(trial.out, manner=manner), "in use by")


def reshard_into_run(trial: Trial) -> None:
    """`mlm reshard` into the folder of a run: no checkpoint there is replaced."""
    half = trial.reference.half
    intrude(trial, lambda manner: start_reshard(half, trial.out, tp=1, manner=manner), "is there already")


def intrude(trial: Trial, start_second: Callable[[Manner], Job], *refusals: str) -> None:
    """Start a second job into the folder of one that is held up in a save: only the second may suffer."""
    trial.begin_halfway()
    first = trial.reference.pretrain(trial.out)
    first.wait_for(SAVE, trial.rng.randint(1, STEPS - HALF - 1))
    for pid in first.pids:
        os.kill(pid, signal.SIGSTOP)
    second = start_second(Manner(lock_wait_s=0.1))
    code, said = second.end(), second.said()
    for pid in first.pids:
        os.kill(pid, signal.SIGCONT)
    if code != 2 or not any(refusal in said for refusal in refusals):
        trial.found.other.append(f"a second run was let in: exit code {code}: {last_line(said)}")
    if code := first.end():
        trial.found.other.append(f"the first run was disturbed: exit code {code}: {last_line(first.said())}")
    trial.note = trial.reference.layout
    trial.ends_right()
    trial.must_hold([STEPS - 1, STEPS])


FAULTS: dict[str, Callable[[Trial], None]] = {
    "disk full": disk_full,
    "file size limit": file_limit,
    "read-only folder": read_only_folder,
    "checkpoints moved away": lambda trial: moved_away(trial, trial.root),
    "run directory moved away": lambda trial: moved_away(trial, trial.out),
    "checkpoints deleted": deleted_folder,
    "bit flipped in a tensor": damaged(SHARDS, flip_tensor),
    "bit flipped in a shard's header": damaged(SHARDS, flip_header),
    "bit flipped in the manifest": damaged(MANIFEST, flip),
    "bit flipped in latest": beside(f"{CHECKPOINTS}/{LATEST}", flip),
    "bit flipped in metrics.jsonl": beside("metrics.jsonl", flip),
    "bit flipped in config.yaml": beside("config.yaml", flip),
    "shard cut short": damaged(SHARDS, truncate),
    "manifest cut short": damaged(MANIFEST, truncate),
    "latest cut short": beside(f"{CHECKPOINTS}/{LATEST}", truncate),
    "metrics.jsonl cut short": beside("metrics.jsonl", truncate),
    "shard deleted": damaged(SHARDS, delete),
    "manifest deleted": damaged(MANIFEST, delete),
    "latest deleted": beside(f"{CHECKPOINTS}/{LATEST}", delete),
    "shard of an older step": damaged(SHARDS, replace_by_older),
    "manifest of an older step": damaged(MANIFEST, replace_by_older, names_file=False),
    "no permission to read": unreadable,
    "two runs in one folder": two_runs,
    "reshard into the folder of a run": reshard_into_run,
}
