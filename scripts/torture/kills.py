"""kill -9 at random instants of saving, loading and resharding."""

import time
from collections.abc import Callable
from pathlib import Path

from mlm.checkpoint.native.folders import CHECKPOINTS, checkpoints, step_name
from mlm.checkpoint.native.verify import verify_checkpoint
from mlm.launch.child_run import child_run, kill
from torture.children import LOAD, RESHARD, SAVE, Job
from torture.inspection import Trial
from torture.runs import HALF, STEPS, WORDS, content, start_reshard

WIDER = 1.3  # of the time an operation takes: some kills fall behind its end
POLL_S = 0.005
OVER, COMMAND = "over already", "the command itself"
"""Labels of a kill that came too late, and of one that hit an unknown operation."""


def kill_in(trial: Trial, job: Job, letter: str, count: int, usual_s: float) -> str:
    """Kill a job after a random part of the `count`-th operation; what it was doing, by what it had told.

    Of two ranks one may be killed alone: the other must end by itself.
    """
    rng = trial.rng
    job.wait_for(letter, count)
    time.sleep(rng.uniform(0.0, WIDER * usual_s) * trial.haste)
    alone = len(job.pids) > 1 and rng.random() < 0.5
    job.kill([rng.choice(job.pids)] if alone else None)
    job.end()
    names = {SAVE: "saving", LOAD: "loading", RESHARD: "resharding"}
    running = [name for key, name in names.items() if job.heard.count(key) > job.heard.count(key.lower())]
    if all(code != -9 for code in job.codes.values()):
        running = [OVER]
    whom = ", one rank alone" if alone else ""
    trial.note = f"{trial.reference.layout}{whom}, {' and '.join(running) or 'between'}"
    return running[0] if running else "between"


def kill_saving(trial: Trial) -> str:
    """Kill a fresh or a resumed run during one of its saves."""
    done = 0 if trial.rng.random() < 0.5 else HALF
    if done:
        trial.begin_halfway()
    job = trial.reference.pretrain(trial.out)
    phase = kill_in(trial, job, SAVE, trial.rng.randint(1, STEPS - done), trial.reference.save_s)
    trial.after_kill()
    return phase


def kill_loading(trial: Trial) -> str:
    """Kill a resumed run while it loads; sometimes again."""
    trial.begin_halfway()
    phase = OVER
    for _ in range(trial.rng.randint(1, 2)):
        job = trial.reference.pretrain(trial.out)
        phase = kill_in(trial, job, LOAD, 1, trial.reference.load_s)
    trial.after_kill()
    return phase


def kill_resharding(trial: Trial) -> str:
    """Kill `mlm reshard`, start it again, compare with an undisturbed one, and go on from its result."""
    rng, reference = trial.rng, trial.reference
    trial.begin_halfway()
    target, tp = trial.out.with_name(f"{trial.out.name}-cut"), rng.choice((1, 2))
    source = trial.root / step_name(HALF)
    job = start_reshard(trial.out, target, tp=tp)
    phase = kill_in(trial, job, RESHARD, 1, reference.reshard_s)
    trial.must_hold(range(HALF - 1, HALF + 1))
    for path in checkpoints(target / CHECKPOINTS).values():
        if not verify_checkpoint(path).whole:
            trial.found.silent.append("a resharded checkpoint has its name and is not whole")
    if not target.exists() and (code := start_reshard(trial.out, target, tp=tp).end()):
        trial.found.other.append(f"mlm reshard does not go on: exit code {code}")
        return phase
    straight = trial.out.with_name(f"{trial.out.name}-straight")
    start_reshard(trial.out, straight, tp=tp).end()
    cut = target / CHECKPOINTS / step_name(HALF)
    if files(cut) != files(straight / CHECKPOINTS / step_name(HALF)):
        trial.found.silent.append("a resharded checkpoint differs from one made without a kill")
    if content(cut) != content(source):
        trial.found.silent.append("a resharded checkpoint holds something else than its source")
    trial.out = target
    trial.goes_on()
    return phase


def files(folder: Path) -> dict[str, bytes]:
    """Name and bytes of each file."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def kill_command(trial: Trial) -> str:
    """Kill `mlm pretrain` as a user types it, after a random checkpoint."""
    after = trial.rng.randint(1, STEPS - 1)
    words = ["pretrain", *WORDS, f"out={trial.out}"]
    with child_run(words, trial.out.with_suffix(".command.log")) as process:
        while process.poll() is None and max(checkpoints(trial.root), default=0) < after:
            time.sleep(POLL_S)
        time.sleep(trial.rng.uniform(0.0, trial.reference.save_s))
        over = process.poll() is not None
        kill(process)
    trial.note = COMMAND
    trial.after_kill()
    return OVER if over else COMMAND


KILLS: dict[str, Callable[[Trial], str]] = {
    "saving": kill_saving,
    "loading": kill_loading,
    "resharding": kill_resharding,
    "command": kill_command,
}
"""Target of a round → its function, which returns the operation that the kill hit."""
