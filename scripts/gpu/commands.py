"""Commands of `mlm` on the device: what they say themselves is the result.

They run side by side: nothing here is timed, and most of each is start-up.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.machine import free_port

from gpu.child import Case
from gpu.facts import compiler_problem

TOGETHER = 8
"""Commands at a time: each has a context of some 0.5 GB on the device."""
SHOWN = 400
"""Characters shown of why one fails."""


@dataclass(frozen=True)
class Job:
    """One command."""

    name: str
    words: str
    """Of `mlm`, without out=."""
    ranks: int = 0
    """Started by torchrun as so many ranks; 0: started plainly."""


PRETRAIN = (
    "pretrain data=synthetic train.validate_every=0 schedule.warmup_steps=2 log.every=5 "
    "train.global_batch_size=16 train.micro_batch_size=8"
)
SMALL, LARGE = "model=gpt2_tiny data.seq_length=128", "model=gpt2_124m"
EXPERTS = "model=moe_tiny data.seq_length=128"
DOCTOR = "doctor"
DROPOUT = "model.attention_dropout=0.1 model.hidden_dropout=0.1"
ONE_RANK = (  # the longest first
    Job("verify-resume fp32", "verify-resume precision=fp32 steps=4 deterministic=true"),
    Job("verify-resume bf16", f"verify-resume precision=bf16 steps=4 deterministic=true {DROPOUT}"),
    Job("compiled 124M", f"{PRETRAIN} {LARGE} precision=bf16 compile=true train.steps=10"),
    Job("saves beside training", f"{PRETRAIN} {LARGE} precision=bf16 train.steps=12 checkpoint.save_every=4"),
    Job("Muon resumed", "verify-resume optimizer=muon precision=bf16 steps=4 deterministic=true"),
    Job("a mixture, compiled", f"{PRETRAIN} {EXPERTS} precision=bf16 compile=true train.steps=10"),
    Job("parity fp32, compiled", "parity compile=true precision=fp32"),
    Job("parity fp64", "parity"),
    Job("parity bf16, recompute=full", "parity recompute=full precision=bf16"),
    Job("parity bf16, recompute=selective", f"parity recompute=selective {DROPOUT} precision=bf16"),
    Job("parity fp16", "parity precision=fp16"),
    Job("parity bert bf16", f"parity model=bert_tiny {DROPOUT} precision=bf16"),
    Job("one rank under torchrun", f"{PRETRAIN} {SMALL} precision=bf16 train.steps=5", 1),
    Job("60 steps fp16", f"{PRETRAIN} {SMALL} precision=fp16 train.steps=60"),
    Job(
        "incidents and a profile",
        f"{PRETRAIN} {SMALL} precision=bf16 train.steps=12 profile=true "
        "incident.window=4 incident.threshold=0.01 incident.keep=2 incident.action=skip",
    ),
    Job("doctor", DOCTOR),
)
TWO_RANKS = (
    *(
        Job(layout, f"parity {layout} precision={precision}", 2)
        for layout, precision in (
            ("tp=2", "fp64"),
            ("tp=2 sequence_parallel=true", "fp64"),
            ("cp=2", "fp64"),
            ("cp=2", "bf16"),
            ("pp=2", "fp64"),
            ("pp=2 vp=2 model.num_layers=4", "fp64"),
            ("pp=2 pipeline=zb_h1", "bf16"),
            ("dp=2", "fp64"),
            ("dp=2 zero=2", "fp64"),
            ("dp=2 zero=3", "bf16"),
            ("dp=2 optimizer=muon", "fp64"),
            ("model=moe_tiny dp=2 ep=2", "fp64"),
            ("model=moe_tiny tp=2", "fp64"),
        )
    ),
    Job(
        "a run of two replicas, compared",
        f"{PRETRAIN} {SMALL} dp=2 precision=bf16 train.steps=6 check.every=3 check.ranks_every=3 "
        "checkpoint.save_every=3",
        2,
    ),
    Job(
        "a run of two stages",
        f"{PRETRAIN} {SMALL} pp=2 pipeline=zb_h1 precision=bf16 train.steps=6",
        2,
    ),
)
COMPILED = "compile=true"
QUICK = ("parity fp64", "one rank under torchrun", "pp=2")
"""Jobs of a rehearsal."""


def run_one_rank(case: Case) -> None:
    """One rank: parity with itself under other settings, resuming, saving, NCCL."""
    jobs = [job for job in ONE_RANK if not case.quick or job.name in QUICK]
    if case.is_cuda and (problem := compiler_problem()):
        case.note(f"not compiled: {problem}")
        jobs = [job for job in jobs if COMPILED not in job.words]
    run_jobs(case, jobs, "")


def run_two_ranks(case: Case) -> None:
    """Two ranks that share the device: NCCL rejects that, over gloo tensors go through the host."""
    backend = "dist.backend=gloo"
    run_jobs(case, [job for job in TWO_RANKS if not case.quick or job.name in QUICK], backend)
    case.note("over gloo through host memory: the logic of each layout on CUDA, not its speed")


def run_jobs(case: Case, jobs: Sequence[Job], options: str) -> None:
    with ThreadPoolExecutor(TOGETHER if case.is_cuda else 1) as pool:
        for _ in pool.map(lambda number: run_job(case, jobs[number], options, number), range(len(jobs))):
            pass


def run_job(case: Case, job: Job, options: str, number: int) -> None:
    """Run one; its row, and a problem if it fails."""
    out = case.scratch / f"job-{number}"
    words = [*start_of(job), *job.words.split(), *options.split(), f"dist.device={case.device}", f"out={out}"]
    if COMPILED not in words and job.words != DOCTOR:
        words.append("compile=false")  # which is not the default everywhere
    threads = str(max(1, len(os.sched_getaffinity(0)) // TOGETHER))
    begin = time.monotonic()
    done = subprocess.run(
        words,
        cwd=case.scratch,
        env={**os.environ, "OMP_NUM_THREADS": threads, **loopback()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
    )
    lines = [line.rstrip() for line in done.stdout.splitlines() if line.strip()]
    print(f"--- {job.name}: exit code {done.returncode}", *lines, sep="\n")
    seconds = time.monotonic() - begin
    case.row("commands", command=job.name, code=done.returncode, seconds=seconds, said=verdict_in(lines))
    if done.returncode:
        case.problem(f"{job.name}: exit code {done.returncode}: {reason_in(lines)}")


def start_of(job: Job) -> list[str]:
    mlm = ["-m", "mlm"]
    if not job.ranks:
        return [sys.executable, *mlm]
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={job.ranks}", "--master-addr=127.0.0.1"]
    return [sys.executable, *launcher, f"--master-port={free_port()}", *mlm]


def loopback() -> dict[str, str]:
    """Variables for ranks of one host, whose name may resolve to nothing; none where lo is missing."""
    if not Path("/sys/class/net/lo").exists():
        return {}
    return {key: os.environ.get(key, "lo") for key in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}


def verdict_in(lines: Sequence[str]) -> str:
    """The line that says how it went: a verdict, the last step, or the last line."""
    for mark in ("EQUAL", "DIFFERENT", "UNDECIDED", "step "):
        found = [line.strip() for line in lines if mark in line]
        if found:
            return found[-1][:160]
    return lines[-1][:160] if lines else ""


def reason_in(lines: Sequence[str]) -> str:
    """Why it failed: its last line with an error, of torchrun that of a rank."""
    errors = [
        line.strip() for line in lines if re.match(r"\s*(mlm[\w -]*|[\w.]*(Error|Exception)): \S", line)
    ]
    return (errors or [line.strip() for line in lines] or ["no output"])[-1][:SHOWN]
