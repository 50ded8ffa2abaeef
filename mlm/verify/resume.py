"""`mlm verify-resume`: compare a killed and resumed run with an uninterrupted one, by steps and tensors."""

import os
import random
import subprocess
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.compare import CheckpointComparison, compare_checkpoints, tensors_digest
from mlm.checkpoint.native.folders import CHECKPOINTS, latest_name, step_name, step_of
from mlm.checkpoint.native.format import Manifest
from mlm.checkpoint.native.run_state import LINEAGE
from mlm.launch.child_run import child_run, command_failure, kill
from mlm.launch.environment import read_rank_position
from mlm.runs.corpora import corpus_problems
from mlm.runs.tokenizer import tokenizer_of
from mlm.tracking.history import FILE_NAME, read_records
from mlm.training.loop import composed_yaml
from mlm.training.resume import continued_candidates
from mlm.util.errors import CheckFailedError, UserError, attempt, writing_to
from mlm.util.files import write_atomic
from mlm.util.lock import single_writer
from mlm.util.ownership import claim_folder, claim_problems, delete_owned
from mlm.util.terminal import console
from mlm.verify.config import KillPlan, VerifyResumeConfig, comparable
from mlm.verify.verdict import Verdict, write_and_show

TASK, RESULT = "verify-resume", "verify-resume.json"
STRAIGHT, RESUMED = "straight", "resumed"
LOGS = (f"{STRAIGHT}.log", "killed.log", f"{RESUMED}.log")
WRITES = (RESULT, STRAIGHT, RESUMED, f"{STRAIGHT}.yaml", f"{RESUMED}.yaml", *LOGS)
"""Names written in `out`."""
FIELDS = ("loss", "grad_norm", "lr", "loss_scale", "skipped_steps", "tokens")
"""Compared fields of each step in metrics.jsonl, in the order of computation."""
NO_COUNTERS = ("config", "versions", LINEAGE)
"""Entries of a checkpoint's state other than counters."""
TRIES = 5
POLL_S = 0.002  # between reads of `latest`: tiny models are fast

Facts = dict[tuple[int, str], Any]
"""Numbers by (step, name), in the order of computation: FIELDS, then counters of the last checkpoint."""


@dataclass(frozen=True)
class Runs:
    """Numbers of both runs."""

    plan: KillPlan
    straight: Facts
    resumed: Facts
    """Of the killed run up to plan.kill, then of the resumed one."""
    starts: tuple[int, ...]
    """First step of each start of the resumed run."""
    final: CheckpointComparison
    """Checkpoints of the last step, the straight run's first."""
    digest: str = ""
    """Of both last checkpoints, with exact=N."""


def preflight(config: VerifyResumeConfig) -> list[str]:
    """Problems of the settings, files and host; called before runs start."""
    run = comparable(config)
    problems = [*corpus_problems(run), *claim_problems(config.out, TASK, writes=WRITES)]
    if attempt(problems, partial(read_rank_position, os.environ)) is not None:
        return ["runs here are killed and started again, on one host: start this plainly, not as a rank"]
    attempt(problems, partial(first_step, config))
    attempt(problems, partial(tokenizer_of, run.data))
    return problems


def first_step(config: VerifyResumeConfig) -> int:
    """Step at which both runs begin. Raises UserError if there is no checkpoint to continue from."""
    origin = config.checkpoint.from_run
    return 0 if origin is None else step_of(continued_candidates(origin)[0])


def run(config: VerifyResumeConfig) -> None:
    """Run, kill, resume and compare; write out/verify-resume.json. Raises CheckFailedError if they differ."""
    out, plan = Path(config.out), config.plan(first_step(config))
    with writing_to(config.out):
        claim_folder(out, TASK, writes=WRITES)
    with writing_to(config.out), single_writer(out, wait_s=0.0):
        delete_owned(out, TASK, names=WRITES, keep_folder=True)
        rehearsal = Rehearsal(config, plan)
        rehearsal.run_to_end(STRAIGHT)
        killed = rehearsal.run_killed()
        rehearsal.run_to_end(RESUMED)
        runs = collect(out, plan, exact=config.exact > 0)
        verdict = judge(runs)
        title = f"{config.parallel.described}, {config.precision.dtype}, {killed}"
        facts = {
            "killed": killed,
            "plan": plan._asdict(),
            "starts_of_the_resumed_run": runs.starts,
            "numbers": [
                {"step": k[0], "name": k[1], STRAIGHT: runs.straight.get(k), RESUMED: runs.resumed.get(k)}
                for k in runs.straight | runs.resumed
            ],
            "tensors": {
                "compared": len(runs.final.tensors),
                "differing": [asdict(tensor) for tensor in runs.final.differing],
            },
        }
        write_and_show(out / RESULT, config, verdict, facts, title)
    if not verdict.equal:
        raise CheckFailedError(f"{verdict.headline} ({out / RESULT})")


def collect(out: Path, plan: KillPlan, *, exact: bool = False) -> Runs:
    """Read the numbers of both runs. Raises UserError for unreadable checkpoints, OSError for metrics."""
    first, second = (out / name / CHECKPOINTS / step_name(plan.last) for name in (STRAIGHT, RESUMED))
    final = compare_checkpoints(first, second)
    straight = facts_of(out / STRAIGHT / FILE_NAME, final.first)
    resumed = facts_of(out / RESUMED / FILE_NAME, final.second)
    starts = (r["start_step"] for r in read_records(out / RESUMED / FILE_NAME) if r["kind"] == "run")
    digest = tensors_digest(second, final.second) if exact else ""
    return Runs(plan, straight, resumed, tuple(starts), final, digest)


def facts_of(metrics: Path, last: Manifest) -> Facts:
    """Numbers of a run. Raises OSError."""
    steps = records_by_step(metrics, "step").items()
    facts: Facts = {(step, key): record[key] for step, record in steps for key in FIELDS}
    counters = sorted(last.state.keys() - set(NO_COUNTERS))
    return facts | {(last.step, f"{key} in the last checkpoint"): last.state[key] for key in counters}


def records_by_step(metrics: Path, kind: str) -> dict[int, dict[str, Any]]:
    """Newest record of a kind by step in a metrics.jsonl. Raises OSError."""
    return {record["step"]: record for record in read_records(metrics) if record["kind"] == kind}


def judge(runs: Runs) -> Verdict:
    plan, tensors = runs.plan, runs.final.tensors
    if runs.starts != (plan.first, plan.kill):
        starts = ", ".join(map(str, runs.starts)) or "nowhere"
        sentence = f"the killed run should have gone on from step {plan.kill}, but its starts were at: "
        sentence += starts
        hint = "the checkpoint was not found, or found damaged; see the log of the resumed run"
        return Verdict("DIFFERENT", sentence, hint)
    for step, name in runs.straight | runs.resumed:
        straight, resumed = (side.get((step, name), "no record") for side in (runs.straight, runs.resumed))
        if straight != resumed:  # null (not finite) equals only null
            values = f"{straight!r} straight, {resumed!r} resumed"
            sentence = f"the first difference is in {name} of step {step}: {values}"
            return Verdict("DIFFERENT", sentence, _hint(step, name, plan))
    if not runs.final.equal:
        sentence = f"the first difference is in the last checkpoint: {runs.final.sentence}"
        hint = "every step was equal, the last one's update is not: suspect the optimizer's state"
        return Verdict("DIFFERENT", sentence, hint)
    return Verdict(
        "EQUAL bit for bit",
        f"loss, gradient norm, learning rate, loss scale and samples of {plan.last - plan.first} steps, then "
        f"{len(tensors)} tensors of {sum(tensor.elements for tensor in tensors):,} elements"
        + (f", {runs.digest}" if runs.digest else ""),
    )


def _hint(step: int, name: str, plan: KillPlan) -> str:
    if step <= plan.kill:
        return (
            "the run does not repeat itself even before the kill: on a GPU add deterministic=true (fastest "
            "attention repeats no bits), else suspect an operation that is not deterministic on this device"
        )
    if name not in ("loss", "grad_norm"):
        return "suspect what the checkpoint saves of this counter"
    if (step, name) == (plan.kill + 1, "loss"):
        return "suspect the weights that were loaded, the position in the data, or the dropout masks"
    return "the loss after the kill is right: suspect backward, the moments, or the place in the data"


class Rehearsal:
    """Runs in folders below `out`, which exists and is empty."""

    def __init__(self, config: VerifyResumeConfig, plan: KillPlan) -> None:
        self.plan, self.out = plan, Path(config.out)
        for name in (STRAIGHT, RESUMED):
            run = config.training_run(str(self.out / name), plan.last)
            write_atomic(self.out / f"{name}.yaml", composed_yaml(run, "pretrain").encode())

    def run_to_end(self, name: str) -> None:
        """Run the remaining steps. Raises UserError with the run's last line if it fails."""
        log = self.out / f"{name}.log"
        with self._run(name, log) as process:
            process.wait()
        if failure := command_failure(process, f"the {name} run", log):
            raise failure
        if self._latest(name) != step_name(self.plan.last):
            raise UserError(f"the {name} run was stopped before step {self.plan.last} (its output: {log})")

    def run_killed(self) -> str:
        """Kill a run at a random time between its two checkpoints. Return when, in words.

        Raises UserError if it fails, or if every try ends before the kill.
        """
        plan, log = self.plan, self.out / "killed.log"
        saves = records_by_step(self.out / STRAIGHT / FILE_NAME, "saved")
        window_s = saves[plan.last]["time"] - saves.get(plan.kill, saves[plan.last])["time"]
        for number in range(1, TRIES + 1):
            delete_owned(self.out, TASK, names=(RESUMED,), keep_folder=True)
            delay_s = random.uniform(0.0, window_s) * 0.5 ** (number - 1)  # earlier at each try
            with self._run(RESUMED, log) as process:
                while process.poll() is None and self._latest(RESUMED) != step_name(plan.kill):
                    time.sleep(POLL_S)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(delay_s)
                if failure := command_failure(process, "the run to be killed", log):
                    raise failure
                kill(process)
            if process.returncode and self._latest(RESUMED) == step_name(plan.kill):
                step = max(records_by_step(self.out / RESUMED / FILE_NAME, "step"), default=plan.first)
                return (
                    f"killed {delay_s:.3f} s after a checkpoint, with step {step} reported, at try {number}"
                )
        k = plan.last - plan.kill
        raise UserError(
            f"steps={k}: {TRIES} runs were over before they could be killed after step {plan.kill}; "
            f"use more, such as steps={4 * k}"
        )

    def _run(self, name: str, log: Path) -> AbstractContextManager["subprocess.Popen[bytes]"]:
        console().print(f"running {name}.yaml to step {self.plan.last}, with its output in {log}")
        return child_run(["pretrain", f"resume={self.out / name}.yaml", f"out={self.out / name}"], log)

    def _latest(self, name: str) -> str | None:
        return latest_name(self.out / name / CHECKPOINTS)
