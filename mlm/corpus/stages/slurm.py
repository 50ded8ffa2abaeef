"""Running the stages of a build on SLURM: a job array for each stage, which waits for the one before it.

The command submits them and ends. Run it again to see their progress and, when all are done, to finish the
corpus. Job `i` of `n` in an array does the unfinished tasks i, i + n, … of its stage:
`python -m mlm.corpus.stages.slurm PLAN STAGE i n`.
"""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from mlm.corpus.config import ExecutorConfig
from mlm.corpus.stages.plan import BuildPlan, BuildStage
from mlm.corpus.stages.run import error_path, first_error, run_task
from mlm.util.errors import UserError
from mlm.util.files import write_atomic

JOBS = "jobs.json"
MAX_ARRAY = 1000  # jobs of an array: SLURM's default MaxArraySize is 1001
SCRIPT = """\
#!/bin/bash
set -e
{environment}
exec {python} -m mlm.corpus.stages.slurm {plan} {stage} "$SLURM_ARRAY_TASK_ID" {jobs}
"""


def run_slurm(plan: BuildPlan, path: Path, console: Console) -> bool:
    """Submit what is left to do, or report its progress. Returns True if all stages are done.

    Raises UserError: no SLURM here, no partition, or what a task found wrong with its input.
    """
    stages = list(plan.stages.values())
    if not any(stage.unfinished() for stage in stages):
        return True
    if shutil.which("sbatch") is None:
        raise UserError(
            "executor.kind=slurm needs sbatch on the PATH: run this where jobs are submitted, or set "
            "executor.kind=local"
        )
    waiting = queued_jobs(plan.work)
    errors = [error for stage in stages if (error := first_error(stage)) is not None]
    if errors:
        if waiting:  # what depends on the failed job would wait for ever
            subprocess.run(["scancel", *waiting], check=False)
        for stage in stages:  # reported once: the next run tries again
            for task in range(stage.tasks):
                error_path(stage.folder, task).unlink(missing_ok=True)
        raise UserError(errors[0])
    if waiting:
        for stage in stages:
            console.print(
                f"{stage.name}: {stage.tasks - len(stage.unfinished())} of {stage.tasks} tasks done"
            )
        console.print(f"jobs {' '.join(waiting)} are in the queue: run this again when they have finished")
        return False
    ids = list[str]()
    for stage in stages:
        if left := len(stage.unfinished()):
            ids.append(submit(stage, path.resolve(), left, plan.config.executor, after=ids[-1:]))
            console.print(f"{stage.name}: {left} tasks, job {ids[-1]}")
    write_atomic(plan.work / JOBS, json.dumps(ids).encode())
    console.print("submitted: run this again to see their progress and to finish the corpus")
    return False


def submit(stage: BuildStage, path: Path, left: int, config: ExecutorConfig, *, after: list[str]) -> str:
    """Submit the job array of a stage, to start when job `after` has ended well; return its id."""
    stage.folder.mkdir(parents=True, exist_ok=True)
    jobs = min(left, MAX_ARRAY)
    at_a_time = f"%{config.workers}" if config.workers else ""
    command = [
        *("sbatch", "--parsable", "--requeue", f"--job-name=mlm-{stage.name}"),
        *(f"--array=0-{jobs - 1}{at_a_time}", "--cpus-per-task=1", f"--mem-per-cpu={config.memory_gb}G"),
        *(f"--partition={config.partition}", f"--time={config.time}"),
        f"--output={stage.folder.resolve() / '%A_%a.log'}",
        *(f"--dependency=afterok:{job}" for job in after),
    ]
    script = SCRIPT.format(
        environment=config.environment,
        python=shlex.quote(sys.executable),
        plan=shlex.quote(str(path)),
        stage=stage.name,
        jobs=jobs,
    )
    try:
        answer = subprocess.run(command, input=script, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        reason = " ".join((getattr(error, "stderr", None) or str(error)).split())
        raise UserError(
            f"sbatch rejected stage {stage.name} ({reason}): check executor.partition and executor.time"
        ) from error
    return answer.strip().partition(";")[0]  # of several clusters the name follows


def queued_jobs(work: Path) -> list[str]:
    """Return those of the jobs submitted for this work folder that wait or run."""
    try:
        ids = [job for job in json.loads((work / JOBS).read_bytes()) if job.isalnum()]
    except (OSError, ValueError, TypeError, AttributeError):
        return []
    asked = ["squeue", "--noheader", "--format=%A", f"--jobs={','.join(ids)}"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
    return [job for job in ids if job in answer]


def main() -> int:
    """Run, in a SLURM job, its share of the tasks of a stage; return the exit code."""
    path, name, job, jobs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    try:
        plan = BuildPlan.load(path)
        for task in range(job, plan.stages[name].tasks, jobs):
            run_task(plan, name, task)
    except UserError as error:
        print(f"mlm data build: {error}", file=sys.stderr)  # into the job's log
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
