"""SLURM with two nodes on one machine: its daemons, and jobs of scripts/slurm/pretrain.sbatch."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from rehearsal.network import ADDRESSES, HEAD, NODES, Network, end

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts/slurm/pretrain.sbatch"
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "munged")
PACKAGES = "slurmctld slurmd slurm-client munge iproute2"
CPUS = 8
"""CPUs that a node claims, so that several jobs of one-core tasks share it."""
LOST_AFTER_S = 30
"""SlurmdTimeout: seconds after which a node that does not answer is lost. SLURM's default is 300."""
KILL_WAIT_S = 20
"""KillWait: seconds between the SIGTERM and the SIGKILL of a cancelled job."""
NODE = "NodeName={name} NodeHostname={host} NodeAddr={address} Port={port} CPUs={cpus} RealMemory=64000\n"
PARTITION = "PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP\n"
ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
"""States that a job does not leave."""
Answer = TypeVar("Answer")


class Failed(Exception):  # noqa: N818 - of a case, not of the program
    """A case's problem, in one line."""


def wait(what: str, found: Callable[[], Answer], seconds: float, every: float = 0.1) -> Answer:
    """Poll until `found()` is true, and return it. Raises Failed."""
    limit = time.monotonic() + seconds
    while not (answer := found()):
        if time.monotonic() > limit:
            raise Failed(f"not within {seconds:g} s: {what}")
        time.sleep(every)
    return answer


@dataclass
class Cluster:
    """SLURM's daemons on the hosts of a network."""

    network: Network
    folder: Path
    python: str = sys.executable
    started: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    @property
    def environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        ours = {"SLURM_CONF": str(self.folder / "slurm.conf"), "PYTHON": self.python, "OMP_NUM_THREADS": "1"}
        hold = ROOT / "scripts" / "torture"
        return kept | ours | {"PYTHONPATH": f"{hold}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}

    def up(self) -> None:
        """Start the daemons, and wait for both nodes. Raises Failed."""
        if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
            raise Failed(f"no {', '.join(missing)} on the PATH: apt-get install {PACKAGES}")
        self.folder.chmod(0o755)  # munged requires that everybody reaches its socket
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        values = {"controller": HEAD, "head": ADDRESSES[HEAD], "folder": self.folder}
        values |= {"lost": LOST_AFTER_S, "kill": KILL_WAIT_S}
        text = Path(__file__).with_name("slurm.conf").read_text("utf-8").format(**values)
        for number, name in enumerate(NODES):
            port = 6820 + number
            text += NODE.format(name=name, host=name, address=ADDRESSES[name], port=port, cpus=CPUS)
        (self.folder / "slurm.conf").write_text(text + PARTITION)
        files = [f"--{kind}-file={self.folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
        self._start(HEAD, "munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files)
        wait("munged's socket", (self.folder / "munge.socket").exists, 20)
        self._start(HEAD, "slurmctld", "-D")
        for name in NODES:
            self.start_node(name)
        self.wait_for_nodes(*NODES)

    def start_node(self, name: str) -> None:
        self.network.cable(name, "up")
        self._start(name, "slurmd", "-D", "-N", name)

    def wait_for_nodes(self, *names: str) -> None:
        wanted = ",".join(names)
        states = ("sinfo", "--noheader", "--Node", f"--nodes={wanted}", "--format=%T")
        wait(f"{wanted} idle", lambda: set(self.ask(*states).split()) == {"idle"}, 60, every=0.5)

    def lose(self, name: str) -> None:
        """Pull a node's cable, and let everything on it die, of which nobody hears."""
        self.network.cable(name, "down")
        end(partial(self.network.processes, name))

    def ask(self, *words: str, check: bool = True, **variables: str) -> str:
        """Run a command on the head; its output. Raises Failed."""
        command = self.network.on(HEAD, *words)
        environment = self.environment | variables
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, check=False)
        if check and done.returncode:
            raise Failed(f"{words[0]}: {done.stderr.strip()}")
        return done.stdout

    def _start(self, host: str, *words: str) -> None:
        log = (self.folder / f"{words[0]}-{host}.out").open("ab")
        command = self.network.on(host, *words)
        self.started.append(
            subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=log, start_new_session=True, cwd=self.folder
            )
        )

    def clear(self) -> None:
        if jobs := self.ask("squeue", "--noheader", "--format=%A").split():
            self.ask("scancel", *jobs)
            self.ask("scancel", "--signal=KILL", *jobs, check=False)
        self.wait_for_nodes(*NODES)

    def down(self) -> None:
        self.network.down()
        for process in self.started:
            process.kill()
            process.wait()

    def submit(
        self,
        words: Sequence[str],
        *,
        options: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> "Job":
        """Submit a job on both nodes, a task each, unless `options` say otherwise."""
        log = self.folder / "job-%j.log"
        size = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", "--time=10")
        fixed = ("--parsable", "--oversubscribe", f"--output={log}", f"--chdir={self.folder}")
        number = self.ask("sbatch", *fixed, *size, *options, str(SCRIPT), *words, **(variables or {})).strip()
        return Job(self, number, Path(str(log).replace("%j", number)))


REVOKED_S = 2.0
"""A node rejects a job that starts in the second in which it was queued again (`Job credential revoked`), and
SLURM calls it FAILED. Its own wait of two minutes is long enough."""


@dataclass
class Job:
    """A submitted job."""

    cluster: Cluster
    number: str
    log: Path

    @property
    def facts(self) -> dict[str, str]:
        text = self.cluster.ask("scontrol", "show", "job", "--oneliner", self.number)
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_for(self, state: str, seconds: float = 240) -> None:
        """Wait until it is in a state. Raises Failed if it ends in another."""

        def look() -> bool:
            now = self.facts["JobState"]
            if now in ENDS and now != state:
                raise Failed(f"the job is {now}, not {state}; its log ends with: {last_line(self.said)}")
            return now == state

        wait(f"job {self.number} {state}; its log: {last_line(self.said)}", look, seconds, every=0.5)

    def wait_to_say(self, pattern: str, seconds: float = 120) -> tuple[str, float]:
        """Wait for a line in its log; the line, and the seconds that took."""
        begin = time.monotonic()
        found = wait(
            f"a line like {pattern!r}", lambda: re.search(f"^.*{pattern}.*$", self.said, re.M), seconds
        )
        return found.group().strip(), time.monotonic() - begin

    def wait_for_requeue(self, seconds: float = 240) -> None:
        """Wait until it is queued again. Raises Failed if it ends instead."""

        def look() -> bool:
            facts = self.facts
            if facts["JobState"] in ENDS:
                raise Failed(
                    f"{facts['JobState']}, not queued again; its log ends with: {last_line(self.said)}"
                )
            return facts["Restarts"] != "0" and facts["JobState"] in ("PENDING", "RUNNING")

        wait(f"job {self.number} queued again", look, seconds, every=0.5)

    def start_again(self, limit: int | None = None) -> None:
        """Let it start at once, where SLURM would wait two minutes; `limit` is its time limit in minutes."""
        time.sleep(REVOKED_S)
        change = ["StartTime=now", *([] if limit is None else [f"TimeLimit={limit}"])]
        self.cluster.ask("scontrol", "update", f"JobId={self.number}", *change, check=False)

    def signal(self, *options: str) -> None:
        self.cluster.ask("scancel", *options, self.number)


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "nothing"
