"""Faults planted in jobs of torchrun, whose agents run on two hosts."""

import re
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from rehearsal.cases import TRAIN_STEP, Case, Stage
from rehearsal.cluster import ROOT, Failed, last_line, wait
from rehearsal.record import Finding
from rehearsal.training import SAVE_EVERY, TIMEOUT_S, History, checkpoints, compare, wait_for_step

STEP_S = 0.3
NEW_AGENTS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, agents of torch 2.13 keep the address of their first rendezvous to themselves: one that
joins later waits for it until it times out."""


@dataclass
class Agents:
    """torchrun on hosts, all of one job."""

    stage: Stage
    nodes: str
    steps: int
    started: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    begun: dict[str, int] = field(default_factory=dict)

    def start(self, host: str) -> "subprocess.Popen[bytes]":
        network = self.stage.cluster.network
        network.cable(host, "up")
        self.begun[host] = self.begun.get(host, 0) + 1
        environment = self.stage.cluster.environment | {
            "SLOW_AT": TRAIN_STEP,
            "SLOW_S": str(STEP_S),
            **NEW_AGENTS,
        }
        torchrun = (
            f"-m torch.distributed.run --nnodes={self.nodes} --nproc-per-node=1 --rdzv-backend=c10d "
            "--rdzv-endpoint=n1:29500 --rdzv-id=rehearsal --rdzv-conf=join_timeout=120,last_call_timeout=2 "
            "--max-restarts=3 --monitor-interval=0.5 -m mlm pretrain"
        ).split()
        words = [self.stage.cluster.python, *torchrun, *self.stage.words(steps=self.steps)]
        log = self.log(host).open("ab")
        process = subprocess.Popen(
            network.on(host, *words),
            env=environment,
            cwd=ROOT,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def log(self, host: str) -> Path:
        return self.stage.folder / f"agent-{host}-{self.begun[host]}.log"

    def wait_to_say(self, host: str, pattern: str, seconds: float) -> str:
        log = self.log(host)
        found = wait(
            f"{host} says {pattern!r}; it said: {last_line(log.read_text())}",
            lambda: re.search(f"^.*{pattern}.*$", log.read_text(errors="replace"), re.M),
            seconds,
        )
        return found.group().strip()

    def wait_for_end(self, process: "subprocess.Popen[bytes]", host: str, seconds: float = 240) -> None:
        wait(f"the agent of {host} to end", lambda: process.poll() is not None, seconds)
        if process.returncode:
            said = last_line(self.log(host).read_text())
            raise Failed(f"the agent of {host} ended with {process.returncode}: {said}")

    def end(self) -> None:
        for host in ("n1", "n2"):
            self.stage.cluster.network.cable(host, "up")
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.wait()


def replaced(stage: Stage) -> Finding:
    agents = Agents(stage, "2", steps=60)
    try:
        first = agents.start("n1")
        agents.start("n2")
        last = wait_for_step(stage.out, SAVE_EVERY + 3)
        wait("a checkpoint", lambda: checkpoints(stage.out), 30)
        begin = time.monotonic()
        stage.cluster.lose("n2")
        said = agents.wait_to_say("n1", "rank 0: .*(lost|waited|gone|closed|rank 1)", TIMEOUT_S + 40)
        found = time.monotonic() - begin
        second = agents.start("n2")
        agents.wait_for_end(first, "n1")
        agents.wait_for_end(second, "n2")
    finally:
        agents.end()
    history = compare(stage.out, stage.alone, steps=60)
    lost = last + 1 - history.starts[-1]
    check_sizes(history, [2, 2])
    return Finding(
        f"torchrun: n2 disappears (dist.timeout_s={TIMEOUT_S}), another agent takes its place",
        found,
        said,
        f"{lost} steps: continued from the checkpoint of step {history.starts[-1]}",
    )


def check_sizes(history: History, sizes: list[int]) -> None:
    """Raise Failed unless the attempts had these data-parallel sizes."""
    if history.sizes != sizes:
        raise Failed(f"dp={history.sizes}, not {sizes}")


CASES: dict[str, Case] = {
    "torchrun: a node replaced": replaced,
}
