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

import yaml
from bench.machine import free_port

from gpu.child import Case
from gpu.facts import compiler_problem

TOGETHER = 8
"""Commands at a time: each has a context of some 0.5 GB on the device."""
SHOWN = 400
"""Characters shown of why one fails."""
COMPILED = "compile=true"


@dataclass(frozen=True)
class Job:
    """One command."""

    name: str
    words: str
    """Of `mlm`, without out=."""
    ranks: int = 0
    """Started by torchrun as so many ranks; 0: started plainly."""


def jobs_of(kind: str, *, quick: bool) -> list[Job]:
    """Jobs of commands.yaml, `one_rank` or `two_ranks`; with `quick` a rehearsal's."""
    listed = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
    jobs = []
    for name, words in (pair for entry in listed[kind] for pair in entry.items()):
        ranks = 2 if kind == "two_ranks" else int(name in listed["torchrun"])
        if not quick or name in listed["quick"]:
            jobs.append(Job(name, words.format(**listed["words"]), ranks))
    return jobs


def run_one_rank(case: Case) -> None:
    """One rank: parity with itself under other settings, resuming, saving, NCCL."""
    jobs = jobs_of("one_rank", quick=case.quick)
    if case.is_cuda and (problem := compiler_problem()):
        case.note(f"not compiled: {problem}")
        jobs = [job for job in jobs if COMPILED not in job.words]
    run_jobs(case, jobs, "")


def run_two_ranks(case: Case) -> None:
    """Two ranks that share the device: NCCL rejects that, over gloo tensors go through the host."""
    backend = "dist.backend=gloo"
    run_jobs(case, jobs_of("two_ranks", quick=case.quick), backend)
    case.note("over gloo through host memory: the logic of each layout on CUDA, not its speed")


def run_jobs(case: Case, jobs: Sequence[Job], options: str) -> None:
    with ThreadPoolExecutor(TOGETHER if case.is_cuda else 1) as pool:
        for _ in pool.map(lambda number: run_job(case, jobs[number], options, number), range(len(jobs))):
            pass


def run_job(case: Case, job: Job, options: str, number: int) -> None:
    """Run one; its row, and a problem if it fails."""
    out, words = case.scratch / f"job-{number}", [sys.executable]
    if job.ranks:
        words += ["-m", "torch.distributed.run", f"--nproc-per-node={job.ranks}"]
        words += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    words += ["-m", "mlm", *job.words.split(), *options.split(), f"dist.device={case.device}", f"out={out}"]
    if COMPILED not in words and job.words != "doctor":
        words.append("compile=false")  # which is not the default everywhere
    threads = str(max(1, len(os.sched_getaffinity(0)) // TOGETHER))
    variables = {**os.environ, "OMP_NUM_THREADS": threads}
    if Path("/sys/class/net/lo").exists():  # the name of this host may resolve to nothing
        variables = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", **variables}
    begin = time.monotonic()
    done = subprocess.run(
        words,
        cwd=case.scratch,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
    )
    lines = [line.rstrip() for line in done.stdout.splitlines() if line.strip()]
    print(f"--- {job.name}: exit code {done.returncode}", *lines, sep="\n")
    seconds = time.monotonic() - begin
    stripped = [line.strip() for line in lines] or ["no output"]
    # a verdict, the last step, or the last line says how it went
    marks = ("EQUAL", "DIFFERENT", "UNDECIDED", "step ")
    by_mark = ([line for line in stripped if mark in line] for mark in marks)
    said = next((marked[-1] for marked in by_mark if marked), stripped[-1])[:160]
    case.row("commands", command=job.name, code=done.returncode, seconds=seconds, said=said)
    if done.returncode:
        # the last line with an error, of a rank under torchrun
        errors = [line for line in stripped if re.match(r"(mlm[\w -]*|[\w.]*(Error|Exception)): \S", line)]
        reason = (errors or stripped)[-1][:SHOWN]
        case.problem(f"{job.name}: exit code {done.returncode}: {reason}")
