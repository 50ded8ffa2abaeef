"""kill -9 at random instants, full disks, damage and mix-ups: no checkpoint may be lost, none be wrong.

    python scripts/torture_checkpoint.py --rounds 100 --faults 2 --out RECORD.json

`mlm pretrain` and `mlm reshard` of a tiny GPT-2 that saves each of six steps and keeps two. After every round
what `latest` and the policy promise is whole by its digests, what passes for whole holds the bytes of an
undisturbed run, and the same command ends with the weights of that run. Mounting the small disk that becomes
full needs root.
Exit code: 0 nothing was found, 1 something was.
"""

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import xxhash
from gpu.runner import processes_with
from safetensors.torch import load_file

from mlm.checkpoint.native.folders import CHECKPOINTS, checkpoints, latest_name, step_name
from mlm.checkpoint.native.format import read_manifest
from mlm.checkpoint.native.verify import verify_checkpoint

REPO = Path(__file__).parents[1]
HUNG_S = 120.0
"""Limit of a command."""
STEPS, HALF, KEEP = 6, 3, 2
# From the start of a save, load or reshard: about its length, so that some kills come after its end.
WINDOW_S = 0.25
LAYOUTS = {"dp=1": 1, "tp=2": 2, "dp=2 zero=2": 2}
PRETRAIN = (
    "pretrain model=gpt2_tiny model.num_layers=1 model.hidden_size=16 model.num_heads=2 "
    "model.max_positions=8 model.vocab_size=60 data=synthetic train.global_batch_size=2 "
    "train.micro_batch_size=1 train.validate_every=0 checkpoint.save_every=1 schedule=constant "
    "optimizer.lr=1e-2 dist.device=cpu dist.timeout_s=60 log.every=1"
)
SAVE, LOAD = "mlm.checkpoint.native.save_load:save_checkpoint", "mlm.training.resume:resume"


class Job:
    """A command in a process group of its own, which pauses `at` a call."""

    def __init__(self, line: str, place: Path, root: Path, at: str = "::0") -> None:
        self.marks, self.log = place / "marks", place / "said"
        self.marks.mkdir(parents=True)
        environ = os.environ | {"PAUSE_AT": at, "PAUSE_MARKS": str(self.marks), "OMP_NUM_THREADS": "1"}
        environ |= {"PYTHONPATH": f"{REPO / 'scripts' / 'torture'}:{REPO}", "PAUSE_S": "0"}
        words = [sys.executable, "-m", "mlm", *line.split()]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                words, env=environ, cwd=root, stdout=log, stderr=log, process_group=0
            )

    def pids(self) -> list[int]:
        return processes_with(f"PAUSE_MARKS={self.marks}")

    def paused(self) -> list[int]:
        return sorted(int(path.name) for path in self.marks.iterdir())

    def wait_for_pause(self, ranks: int) -> bool:
        """Wait until the ranks have reached the phase; False if the job ends, or hangs, before one has."""
        end = time.monotonic() + HUNG_S
        while len(self.paused()) < ranks and time.monotonic() < end and self.process.poll() is None:
            time.sleep(0.02)
        return bool(self.paused()) and self.process.poll() is None

    def send(self, number: int, pids: Sequence[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait(self, limit_s: float = HUNG_S) -> int | None:
        """Its exit code as a shell shows it; None if it takes longer."""
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(limit_s)
            return 128 - code if code < 0 else code
        return None


def content(path: Path) -> dict[str, str]:
    """Digest of each tensor, assembled by safetensors from the chunks in the manifest, and the counters."""
    manifest = read_manifest(path)
    files = {name: load_file(path / name) for name in manifest.files}
    digests = {}
    for name, entry in manifest.tensors.items():
        full = torch.empty(entry.shape, dtype=entry.dtype)
        for chunk in entry.chunks:
            full[tuple(slice(b, b + n) for b, n in zip(*chunk.region, strict=True))] = files[chunk.file][name]
        digests[name] = xxhash.xxh3_128_hexdigest(full.numpy().tobytes())
    counters = ("step", "consumed_samples", "applied_steps", "scaler")
    return digests | {"counters": repr([manifest.state.get(key) for key in counters])}


class Trial:
    """A run folder, what happens to it, and what is found."""

    def __init__(self, root: Path, layout: str, rng: random.Random) -> None:
        self.folder = Path(tempfile.mkdtemp(dir=root, prefix="round-"))
        self.layout, self.rng, self.out = layout, rng, self.folder / "out"
        self.reference = root / layout.replace(" ", "-")
        if not self.reference.exists():
            for out, steps, keep in ((self.reference, STEPS, STEPS), (self.half, HALF, KEEP)):
                line = f"{PRETRAIN} {layout} train.steps={steps} checkpoint.keep_last={keep} out={out}"
                if Job(line, Path(tempfile.mkdtemp(dir=root)), root).wait():
                    raise RuntimeError(f"the undisturbed run failed: {line}")
        self.contents = {n: content(path) for n, path in checkpoints(self.reference / CHECKPOINTS).items()}
        self.found: list[str] = []
        self.jobs, self.oldest = 0, 1

    @property
    def half(self) -> Path:
        return self.reference.with_name(f"{self.reference.name}-half")

    def begin_halfway(self) -> None:
        shutil.copytree(self.half, self.out)
        self.oldest = HALF - KEEP + 1

    def start(self, line: str, at: str = "::0") -> Job:
        self.jobs += 1
        return Job(line, self.folder / f"job-{self.jobs}", self.folder, at)

    def pretrain(self, at: str = "::0") -> Job:
        line = f"{PRETRAIN} {self.layout} train.steps={STEPS} checkpoint.keep_last={KEEP} out={self.out}"
        return self.start(line, at)

    def saving(self, last: int = STEPS - HALF) -> Job:
        """The run, at the start of a random save that is not its last but `last`."""
        job = self.pretrain(f"{SAVE}:{self.rng.randint(1, last)}")
        job.wait_for_pause(LAYOUTS[self.layout])
        return job

    def must_hold(self, steps: Iterable[int]) -> None:
        """Report each of these steps that is not there or not whole."""
        present = checkpoints(self.out / CHECKPOINTS)
        for step in steps:
            if step not in present or not verify_checkpoint(present[step]).is_intact:
                self.found.append(f"lost: step {step}")

    def check(self, promised: Iterable[int] | None = None, naming: str = "") -> None:
        """Check that nothing promised is lost, nothing wrong passes, and the same command continues."""
        folder = self.out / CHECKPOINTS
        if promised is None and (name := latest_name(folder)):
            newest = int(name.removeprefix("step-"))
            promised = range(max(newest - KEEP + 1, self.oldest), newest + 1)
        self.must_hold(promised or ())
        for step, path in checkpoints(folder).items():
            if verify_checkpoint(path).is_intact and content(path) != self.contents.get(step):
                self.found.append(f"silent: step {step} passes for whole and holds something else")
        job = self.pretrain()
        if code := job.wait():
            self.found.append(
                f"other: the run does not continue: exit code {code}: {job.log.read_text()[-300:]}"
            )
        elif (final := checkpoints(folder).get(STEPS)) is None or not verify_checkpoint(final).is_intact:
            self.found.append("lost: the last checkpoint")
        elif content(final) != self.contents[STEPS]:
            self.found.append("silent: training ended with other weights")
        if naming not in job.log.read_text():
            self.found.append(f"other: no word about {naming}")
        if partial := [
            path.name for path in folder.iterdir() if path.name.startswith((".saving-", ".latest-"))
        ]:
            self.found.append(f"other: left behind: {partial}")

    def must_fail(self, job: Job, reason: str) -> None:
        """Report a save that failed and is not told."""
        code, said = job.wait(), job.log.read_text()
        if code not in (1, 2) or reason not in said or "Traceback" in said:
            self.found.append(f"other: a save that fails is not told well: exit code {code}: {said[-300:]}")


def kill_later(trial: Trial, job: Job, window_s: float = WINDOW_S) -> None:
    """SIGKILL all processes of a job within the window, or one rank alone."""
    time.sleep(trial.rng.uniform(0, window_s))
    pids = job.pids()
    job.send(signal.SIGKILL, pids if trial.rng.random() < 0.7 else job.paused()[-1:])
    job.wait()
    job.send(signal.SIGKILL, job.pids())


def kill_saving(trial: Trial) -> None:
    if halfway := trial.rng.random() < 0.5:
        trial.begin_halfway()
    kill_later(trial, trial.saving(STEPS - HALF * halfway))
    trial.check()


def kill_loading(trial: Trial) -> None:
    trial.begin_halfway()
    job = trial.pretrain(f"{LOAD}:1")
    job.wait_for_pause(LAYOUTS[trial.layout])
    kill_later(trial, job)
    trial.check()


def kill_anywhere(trial: Trial) -> None:
    kill_later(trial, trial.pretrain(), 6.0)
    trial.check()


def kill_resharding(trial: Trial) -> None:
    """Kill `mlm reshard`, start it again, compare with an undisturbed one, and continue from its result."""
    trial.begin_halfway()
    target, straight = trial.folder / "cut", trial.folder / "straight"
    line = f"reshard ckpt={trial.out} tp={trial.rng.choice((1, 2))} out="
    job = trial.start(f"{line}{target}", "mlm.cli.convert.reshard:run:1")
    job.wait_for_pause(1)
    kill_later(trial, job)
    trial.must_hold(range(HALF - KEEP + 1, HALF + 1))
    for out in (target, straight):
        if not out.exists() and trial.start(f"{line}{out}").wait():
            trial.found.append(f"other: mlm reshard does not end: {out.name}")
    cut, uncut = (path / CHECKPOINTS / step_name(HALF) for path in (target, straight))
    if any(path.read_bytes() != (uncut / path.name).read_bytes() for path in cut.iterdir()):
        trial.found.append("silent: a resharded checkpoint differs from one made without a kill")
    if content(cut) != trial.contents[HALF]:
        trial.found.append("silent: a resharded checkpoint holds something other than its source")
    trial.out, trial.oldest = target, HALF
    trial.check()


def flip(trial: Trial, path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[trial.rng.randrange(len(content))] ^= 1 << trial.rng.randrange(8)
    path.write_bytes(content)


def truncate(trial: Trial, path: Path) -> None:
    os.truncate(path, trial.rng.choice((0, trial.rng.randrange(path.stat().st_size))))


def delete(trial: Trial, path: Path) -> None:
    path.unlink()


def replace_by_older(trial: Trial, path: Path) -> None:
    """Put the file of the checkpoint before in its place: a rank's has the same size."""
    shutil.copy(path.parent.with_name(step_name(HALF - 1)) / path.name, path)


def damage(pattern: str, harm: Callable[[Trial, Path], None], trial: Trial) -> None:
    """Harm a file of a stopped run. If its newest checkpoint is hit, it continues from the one before."""
    trial.begin_halfway()
    path = trial.rng.choice(sorted(trial.out.glob(pattern)))
    harm(trial, path)
    if step_name(HALF) in path.parts:
        trial.check([HALF - 1], naming=step_name(HALF))
    else:
        trial.check([HALF - 1, HALF])


def disk_full(trial: Trial) -> None:
    """A file system of 4 MiB that others fill from a save on."""
    trial.out.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={4 << 20}", "tmpfs", trial.out]
    if subprocess.run(mount, capture_output=True).returncode:
        print("disk full: not tried, as no file system can be mounted here")
        return
    try:
        job, filler = trial.saving(STEPS - 1), trial.out / "filler"
        job.send(signal.SIGSTOP, pids := job.pids())  # or a busy machine ends the run before the disk is full
        with open(filler, "ab", buffering=0) as file:
            while job.process.poll() is None:
                try:
                    file.write(bytes(4096))
                except OSError:
                    job.send(signal.SIGCONT, pids)
                    time.sleep(0.005)
        trial.must_fail(job, "No space left on device")
        filler.unlink()
        trial.check()
    finally:
        subprocess.run(["umount", "--lazy", trial.out], check=True)


def deleted(trial: Trial) -> None:
    """The folder of checkpoints is deleted under the run: what it saves later is right."""
    trial.begin_halfway()
    job = trial.saving()
    shutil.rmtree(trial.out / CHECKPOINTS, ignore_errors=True)
    job.wait()
    if "Traceback" in job.log.read_text():
        trial.found.append("other: the run ends with a traceback")
    trial.check([])


def intrude(line: str, refusal: str, trial: Trial) -> None:
    """A second job into the folder of one that is held up in a save: only the second may suffer."""
    trial.begin_halfway()
    first = trial.saving(STEPS - HALF - 1)
    first.send(signal.SIGSTOP, pids := first.pids())
    second = trial.start(line.format(half=trial.half, out=trial.out)) if line else trial.pretrain()
    if second.wait() != 2 or refusal not in second.log.read_text():
        trial.found.append(f"other: a second job was let in: {second.log.read_text()[-300:]}")
    first.send(signal.SIGCONT, pids)
    if first.wait():
        trial.found.append(f"other: the first run was disturbed: {first.log.read_text()[-300:]}")
    trial.check([STEPS - 1, STEPS])


KILLS = {"saving": kill_saving, "loading": kill_loading, "resharding": kill_resharding, "any": kill_anywhere}
NEWEST = f"{CHECKPOINTS}/{step_name(HALF)}"
FAULTS: dict[str, Callable[[Trial], None]] = {
    f"{harm.__name__} {pattern}": lambda trial, pattern=pattern, harm=harm: damage(pattern, harm, trial)
    for pattern in (
        f"{NEWEST}/*.safetensors",
        f"{NEWEST}/manifest.json",
        f"{CHECKPOINTS}/latest",
        "metrics.jsonl",
    )
    for harm in (flip, truncate, delete, *([replace_by_older] if NEWEST in pattern else []))
}
FAULTS |= {
    "flip config.yaml": lambda trial: damage("config.yaml", flip, trial),
    "disk full": disk_full,
    "checkpoints deleted": deleted,
    "two runs in one folder": lambda trial: intrude("", "in use by", trial),
    "reshard into a run": lambda trial: intrude(
        "reshard ckpt={half} out={out} tp=1", "is there already", trial
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100, help="kills (default %(default)s)")
    parser.add_argument("--faults", type=int, default=2, help="times each other fault (default %(default)s)")
    parser.add_argument(
        "--aims", nargs="+", choices=(*KILLS, *FAULTS), metavar="AIM", help="these, once each"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args()
    root, begun, found = Path(tempfile.mkdtemp(prefix="torture-")), time.monotonic(), Counter[str]()
    everything = [list(KILLS)[i % len(KILLS)] for i in range(args.rounds)] + list(FAULTS) * args.faults
    aims = args.aims or everything
    for number, aim in enumerate(aims):
        layout = list(LAYOUTS)[number // len(KILLS) % len(LAYOUTS)]
        trial = Trial(root, layout, random.Random(f"{args.seed}-{number}"))
        (KILLS | FAULTS)[aim](trial)
        found.update(line.partition(":")[0] for line in trial.found)
        print(f"{number + 1} of {len(aims)}: {aim}, {layout}: {'; '.join(trial.found) or 'fine'}", flush=True)
        if not trial.found:
            shutil.rmtree(trial.folder)
    counts: dict[str, Any] = {"checkpoints_lost": found["lost"], "silent_corruptions": found["silent"]}
    counts |= {"other_findings": found["other"], "seconds": round(time.monotonic() - begun, 1)}
    record = {
        "command": shlex.join(["torture_checkpoint.py", *sys.argv[1:]]),
        "by_aim": dict(Counter(aims)),
        **counts,
        "torch": torch.__version__,
    }
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{record}; runs with findings stay in {root}")
    return int(found.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
