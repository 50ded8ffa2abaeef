"""Runs of `mlm pretrain` for the experiment on layer norm: a few at a time, each resumed or kept."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.machine import REPOSITORY
from mlm.errors import UserError
from mlm.files.atomic import write_atomic
from mlm.report.history import FILE_NAME, read_records

POLL_S = 1.0
LOGGED = 3000
"""Logged steps of a run, about."""
ENDED = "ended.txt"
"""Error of a run that could not continue to its last step, beside it."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Inputs shared by all runs."""

    hidden: int
    heads: int
    seq_length: int
    batch: int
    steps: int
    warmup: int
    """Steps."""
    vocab: int
    init_std: float
    corpus: str
    threads: int
    """Of each run."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run."""

    layers: int
    norm: str
    lr: float
    seed: int

    @property
    def name(self) -> str:
        """Its folder."""
        return f"{self.layers}-layers-{self.norm}-lr{self.lr:g}-seed{self.seed}"


def settings_of(trial: Trial, sizes: Sizes) -> list[str]:
    """Arguments of `mlm pretrain`: only norm differs between two runs of a pair."""
    return [
        "model=bert_tiny",
        f"model.num_layers={trial.layers}",
        f"model.norm={trial.norm}",
        f"model.hidden_size={sizes.hidden}",
        f"model.num_heads={sizes.heads}",
        f"model.max_positions={sizes.seq_length}",
        f"model.vocab_size={sizes.vocab}",
        f"model.init_std={sizes.init_std:.6g}",
        f"data.path={sizes.corpus}",
        f"data.seq_length={sizes.seq_length}",
        f"train.steps={sizes.steps}",
        f"train.global_batch_size={sizes.batch}",
        f"train.micro_batch_size={sizes.batch}",
        f"train.validate_every={sizes.steps}",
        "train.validate_batches=50",
        "optimizer=adamw_bert",
        f"optimizer.lr={trial.lr}",
        "schedule=linear_bert",
        f"schedule.warmup_steps={sizes.warmup}",
        f"schedule.decay_steps={sizes.steps}",
        f"checkpoint.save_every={max(1, sizes.steps // 5)}",
        "checkpoint.keep_last=1",
        f"log.every={max(1, sizes.steps // LOGGED)}",
        "log.live=off",
        f"dist.threads_per_rank={sizes.threads}",
        f"seed={trial.seed}",
    ]


def last_step(run: Path) -> int:
    """The last step that a run logged; 0 before the first."""
    try:
        return max((r["step"] for r in read_records(run / FILE_NAME) if r.get("kind") == "step"), default=0)
    except OSError:
        return 0


def is_over(run: Path, steps: int) -> bool:
    """True if the run is complete: the last step is validated, or it could not continue."""
    if (run / ENDED).exists():
        return True
    try:
        records = list(read_records(run / FILE_NAME))
    except OSError:
        return False
    return any(r.get("kind") == "validation" and r["step"] == steps for r in records)


class Runs:
    """All trials, `jobs` at a time; processes are asked to save and end when this is left."""

    def __init__(self, trials: Sequence[Trial], sizes: Sizes, work: Path, jobs: int) -> None:
        self.sizes, self.work, self.jobs = sizes, work, jobs
        self.trials = trials
        self.waiting = [trial for trial in trials if not self.is_kept(trial)]
        self.running: dict[Trial, subprocess.Popen[bytes]] = {}

    def is_kept(self, trial: Trial) -> bool:
        """True if a finished run of the same settings exists. Raises UserError for one of others."""
        run, said = self.work / trial.name, self.work / f"{trial.name}.json"
        told = {"settings": settings_of(trial, self.sizes)}
        if said.exists():
            if json.loads(said.read_bytes()) != told:
                raise UserError(f"{run}: was made with other settings: remove it, or name another --work")
        else:
            self.work.mkdir(parents=True, exist_ok=True)
            write_atomic(said, (json.dumps(told, indent=1) + "\n").encode())
        return is_over(run, self.sizes.steps)

    def __enter__(self) -> "Runs":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.terminate()  # saves after the step it is at
        for process in self.running.values():
            process.wait()

    def start(self, trial: Trial) -> None:
        """Start a run, from its last checkpoint if it has one."""
        run = self.work / trial.name
        command = [sys.executable, "-m", "mlm", "pretrain", f"out={run}", *settings_of(trial, self.sizes)]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        with open(self.work / f"{trial.name}.log", "ab") as log:
            self.running[trial] = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=REPOSITORY
            )

    def wait(self, progress: Callable[[int, str], None], say: Say) -> None:
        """Run all that is left. `progress` gets the steps done of all trials and what runs now."""
        while self.waiting or self.running:
            while self.waiting and len(self.running) < self.jobs:
                self.start(self.waiting.pop(0))
            time.sleep(POLL_S)
            for trial, process in list(self.running.items()):
                if process.poll() is not None:
                    del self.running[trial]
                    self.finish(trial, process.returncode, say)
            progress(self.steps_done(), ", ".join(self.describe(trial) for trial in self.running))

    def finish(self, trial: Trial, code: int, say: Say) -> None:
        """Take note of a run that ended. Raises UserError when it did not train at all."""
        run = self.work / trial.name
        if code:
            tail = (self.work / f"{trial.name}.log").read_text(errors="replace").strip().splitlines()[-3:]
            if last_step(run) == 0 or code < 0 or code >= 128:
                raise UserError(f"{trial.name} ended with {code}: {' / '.join(tail)}")
            (run / ENDED).write_text("\n".join(tail) + "\n")  # a diagnosis: it belongs to the result
        say(self.describe(trial) + (f", ended with {code}" if code else ""))

    def describe(self, trial: Trial) -> str:
        """A trial and how far it is, in a few words."""
        step = last_step(self.work / trial.name)
        return f"{trial.layers} layers {trial.norm} lr {trial.lr:g}: step {step}/{self.sizes.steps}"

    def steps_done(self) -> int:
        """Steps weighed by layers, for the time left."""
        return sum(last_step(self.work / trial.name) * trial.layers for trial in self.trials)

    @property
    def steps_in_all(self) -> int:
        """The same at the end."""
        return sum(self.sizes.steps * trial.layers for trial in self.trials)


def about(sizes: Sizes) -> dict[str, object]:
    """The sizes for the record, without this machine's folders."""
    return {**asdict(sizes), "corpus": Path(sizes.corpus).name}
