"""Faults planted in jobs of SLURM, and what has to come of each."""

import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rehearsal.cluster import LOST_AFTER_S, Cluster, Failed, Job, wait
from rehearsal.network import kill
from rehearsal.record import Finding
from rehearsal.training import RUN, SAVE_EVERY, History, checkpoints, compare, wait_for_step

TRAIN_STEP = "mlm.training.trainer:Trainer.train_step"
PHASES = {
    "starting": "runpy:_run_module_as_main:1",
    "importing": "torch:<module>:1",
    "rendezvous": "mlm.launch.rendezvous:rendezvous_store:1",
    "loading": "mlm.training.resume:resume:1",
    "training": f"{TRAIN_STEP}:3",
    "saving": "mlm.training.saver:Saver._write:1",
    "validating": "mlm.training.pipelined:PipelinedModel.evaluate:1",
}
HOLD_S = 120.0
SLOW_RATE, SLOW_S = "2mbit", 0.1
"""Of a node's network in the case of a slow one, and by how much a step's waits become longer."""
GONE = re.compile(r"mlm: rank \d+: .*(gone|did not finish|did not rendezvous)")


@dataclass(frozen=True)
class Stage:
    """Surroundings of a case: the cluster, a folder of its own, and the losses of an undisturbed run."""

    cluster: Cluster
    folder: Path
    alone: dict[int, float]

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def words(self, *more: str, steps: int) -> list[str]:
        return [*RUN, f"train.steps={steps}", f"out={self.out}", *more]

    def submit(
        self,
        *more: str,
        steps: int,
        options: tuple[str, ...] = (),
        hold: str = "",
        step_s: float = 0.0,
        **variables: str,
    ) -> Job:
        """Submit a run, held in a phase and slowed in its first attempt."""
        self.marks.mkdir(exist_ok=True)
        variables |= {"PAUSE_MARKS": str(self.marks), "PAUSE_S": str(HOLD_S)}
        if hold:
            variables["PAUSE_AT"] = PHASES[hold]
        if hold == "rendezvous":
            variables["PAUSE_RANK"] = "1"  # one rank alone is late
        if step_s:
            variables |= {"SLOW_AT": TRAIN_STEP, "SLOW_S": str(step_s)}
        return self.cluster.submit(self.words(*more, steps=steps), options=options, variables=variables)

    @property
    def marks(self) -> Path:
        return self.folder / "marks"

    def release(self) -> None:
        (self.marks / "released").touch()

    def wait_until_held(self, ranks: int) -> None:
        """Wait until all ranks are in the phase in which they are held."""
        wait(f"{ranks} ranks held", lambda: len(list(self.marks.iterdir())) == ranks, 240)


Case = Callable[[Stage], Finding]


def submitted(stage: Stage) -> Finding:
    job = stage.submit(steps=10, options=("--ntasks-per-node=2",))
    job.wait_for("COMPLETED")
    history = compare(stage.out, stage.alone, steps=10)
    if history.sizes != [4]:
        raise Failed(f"dp={history.sizes}, not 4")
    return Finding("nothing: 4 ranks on 2 nodes", None, "10 steps, losses as of one process", "nothing")


def out_of_time(phase: str, stage: Stage) -> Finding:
    """The signal before the time limit, in a phase of the job's life."""
    steps = 12
    validate = ("train.validate_every=4", "train.validate_batches=1") if phase == "validating" else ()
    # A task that is only starting hears the next repetition of the signal, and trains until then.
    job = stage.submit(*validate, steps=steps, hold=phase, step_s=1.0 if phase == "starting" else 0.0)
    stage.wait_until_held(2)
    begin = time.monotonic()
    job.signal("--batch", "--signal=USR1")
    if phase == "starting":
        time.sleep(1.0)
        stage.release()
    said, _ = job.wait_to_say("SIGUSR1: (noted|finishing)")
    found = time.monotonic() - begin
    stage.release()
    lost = continue_once(stage, job, steps=steps)
    return Finding(f"the signal before the time limit, while {phase}", found, said, lost)


def continue_once(stage: Stage, job: Job, *, steps: int, limit: int | None = None) -> str:
    """Let a job that was queued again run to its end; what it lost. Raises Failed."""
    job.wait_for_requeue()
    job.start_again(limit)
    before = History.of(stage.out).last
    job.wait_for("COMPLETED")
    history = compare(stage.out, stage.alone, steps=steps)
    check_continued(history, before)
    return f"nothing: saved after step {before}, continued there"


def time_limit(stage: Stage) -> Finding:
    job = stage.submit(steps=120, options=("--time=2", "--signal=B:USR1@60"), step_s=0.5)
    wait_for_step(stage.out, 1)
    begin = time.monotonic()
    said, _ = job.wait_to_say("SIGUSR1: (noted|finishing)", 120)
    found = time.monotonic() - begin
    lost = continue_once(stage, job, steps=120, limit=10)  # minutes: the second attempt runs through
    planted = f"--time=2 --signal=B:USR1@60; the signal came {found:.0f} s after the first step"
    return Finding(planted, None, said, lost)


def cancelled(stage: Stage) -> Finding:
    """`scancel`: SIGTERM, and SIGKILL after KillWait."""
    job = stage.submit(steps=400, step_s=0.2)
    wait_for_step(stage.out, 3)
    begin = time.monotonic()
    job.signal()
    said, found = job.wait_to_say("SIGTERM: finishing")
    wait("the last checkpoint", lambda: History.of(stage.out).last in checkpoints(stage.out), 40)
    took = time.monotonic() - begin
    job.wait_for("CANCELLED")
    last = History.of(stage.out).last
    if last not in checkpoints(stage.out):
        raise Failed(f"step {last} is not saved: {checkpoints(stage.out)}")
    compare(stage.out, stage.alone, steps=last)
    return Finding("`scancel JOB`", found, said, f"nothing: saved after step {last} within {took:.1f} s")


def node_lost(node: str, stage: Stage) -> Finding:
    """One of a job's two nodes disappears, and comes back: it needs both."""
    job = stage.submit(steps=60, step_s=0.3)
    try:
        last = wait_for_step(stage.out, SAVE_EVERY + 2)
        begin = time.monotonic()
        stage.cluster.lose(node)
        job.wait_for_requeue(seconds=240)
        found = time.monotonic() - begin
    finally:
        stage.cluster.start_node(node)
    # Not `start_again`: what arrives late of the first attempt leaves the second one node, and srun hangs.
    job.wait_for("COMPLETED", 420)
    stage.cluster.wait_for_nodes("n1", "n2")
    lost = steps_lost(compare(stage.out, stage.alone, steps=60), last)
    role = "runs the script" if node == "n1" else "holds ranks only"
    said = next((line for line in job.said.splitlines() if GONE.search(line)), "")
    said = said or f"slurmctld: {requeued_for(stage.cluster, node)}"
    return Finding(f"{node}, which {role}, loses its power (SlurmdTimeout={LOST_AFTER_S})", found, said, lost)


def requeued_for(cluster: Cluster, node: str) -> str:
    """Lines of SLURM's controller of a job that it queues again for a lost node. Raises Failed."""
    lines = (cluster.folder / "slurmctld.log").read_text().splitlines()
    found = [line.partition("] ")[2] for line in lines if f"due to failure of node {node}" in line]
    if not found:
        raise Failed(f"slurmctld's log names no failure of {node}")
    return found[-1]


def check_continued(history: History, step: int) -> None:
    """Raise Failed unless the second of two attempts continued after a step."""
    if history.starts != [0, step]:
        raise Failed(f"attempts began after the steps {history.starts}; the first ended with {step}")


def steps_lost(history: History, last: int) -> str:
    """The steps that a run of two attempts computed again, `last` and the one in progress. Raises Failed."""
    start = history.starts[-1]
    if len(history.starts) != 2 or not 0 < start <= last or last + 1 - start > 2 * SAVE_EVERY:
        raise Failed(f"attempts began after the steps {history.starts}; step {last} was logged at the fault")
    return f"{last + 1 - start} steps: continued from the checkpoint of step {start}"


def rank_killed(stage: Stage) -> Finding:
    """SIGKILL of one rank."""
    job = stage.submit(steps=400, step_s=0.2)
    wait_for_step(stage.out, SAVE_EVERY + 2)
    kill(ranks_on(stage.cluster, "n2"), signal.SIGKILL)
    said, found = job.wait_to_say(GONE.pattern)
    job.wait_for("FAILED")
    saved, last = max(checkpoints(stage.out)), History.of(stage.out).last
    return Finding("SIGKILL of the rank on n2", found, said, f"{last - saved} steps: step {saved} is saved")


def slow_network(stage: Stage) -> Finding:
    job = stage.submit("check.ranks_every=10", steps=400, step_s=0.05)
    wait_for_step(stage.out, 25)
    before = waits_of(stage.out)[-1]
    stage.cluster.network.narrow("n2", SLOW_RATE)
    begin = time.monotonic()
    wait("longer waits", lambda: waits_of(stage.out)[-1] > before + SLOW_S, 120)
    found = time.monotonic() - begin
    said = [line for line in job.said.splitlines() if "slowest rank" in line][-1]
    named = re.search(r"([\d.]+) s waiting (over dp|for all)", said)
    if named is None or float(named[1]) < SLOW_S:
        raise Failed(f"not named: {said}")
    stage.cluster.network.narrow("n2", "1gbit")
    stage.cluster.clear()
    compare(stage.out, stage.alone, steps=History.of(stage.out).last)
    return Finding(f"n2 sends {SLOW_RATE} at most", found, said, "time")


def waits_of(out: Path) -> list[float]:
    """Seconds a step that the least patient rank waits over dp, of each report."""
    records = [record for record in History.of(out).records if record["kind"] == "ranks"]
    return [min(rank["waiting over dp"] for rank in record["ranks"]) for record in records]


def ranks_on(cluster: Cluster, node: str) -> list[int]:
    found = []
    for pid in cluster.network.processes(node):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[1:4] == [b"-m", b"mlm", b"pretrain"]:
            found.append(pid)
    return found


CASES: dict[str, Case] = {
    "submit": submitted,
    **{f"time limit while {phase}": partial(out_of_time, phase) for phase in PHASES},
    "time limit of SLURM's own": time_limit,
    "scancel": cancelled,
    "a rank killed": rank_killed,
    "slow network": slow_network,
    "a node of ranks lost": partial(node_lost, "n2"),
    "the script's node lost": partial(node_lost, "n1"),
}
