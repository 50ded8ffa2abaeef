"""Running the stages of a build on a cluster: datatrove's SLURM and Ray executors.

SLURM: each stage is a job array that waits for the one before it; the command submits them and ends. Run it
again to see their progress and, when all are done, to finish the corpus. A job receives the path of the
plan and the name of its stage: `python -m mlm.corpus.stages.cluster PLAN STAGE`. (datatrove would have it
unpickle its executor from a file of the work folder, which could execute code.)
Ray: the command waits. Ray itself passes tasks to its workers pickled, from this process.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from datatrove.executor.ray import RayPipelineExecutor
from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from datatrove.utils.stats import PipelineStats
from loguru import logger
from rich.console import Console

from mlm.corpus.config import ExecutorConfig
from mlm.corpus.stages.plan import Plan, Stage
from mlm.corpus.stages.run import first_error, run_task
from mlm.util.errors import UserError
from mlm.util.files import write_atomic

JOBS = "jobs.json"


class Task(PipelineStep):
    """Work of one rank of an executor: one task of a stage."""

    name = "mlm data build"

    def __init__(self, plan: Path, stage: str) -> None:
        super().__init__()
        self.plan, self.stage = plan, stage

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        """Do task `rank`."""
        run_task(Plan.load(self.plan), self.stage, rank)


class MarkerBasedExecutor:
    """Mixin of datatrove's executors: markers of tasks decide what is done, and a rank runs its task alone.

    datatrove would log every rank to a file and its failures as tracebacks.
    """

    stage: Stage
    pipeline: list[Task]

    def is_rank_completed(self, rank: int) -> bool:
        """True if the task's marker is there."""
        return self.stage.is_done(rank)

    def get_incomplete_ranks(
        self, ranks: Iterable[int] | None = None, skip_completed: Any = None
    ) -> list[int]:
        """Return the tasks without a marker."""
        candidates = range(self.stage.tasks) if ranks is None else ranks
        return [rank for rank in candidates if not self.stage.is_done(rank)]

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> PipelineStats:
        self.pipeline[0](None, rank, self.stage.tasks)
        return PipelineStats()


class Slurm(MarkerBasedExecutor, SlurmPipelineExecutor):
    """A job array."""

    plan: Path

    def get_launch_file_contents(self, sbatch_args: dict[str, Any], run_script: str) -> str:
        """Return the job script, which runs our command for each rank."""
        mine = f"srun -l -n 1 {sys.executable} -m mlm.corpus.stages.cluster {self.plan} {self.stage.name}"
        return str(super().get_launch_file_contents(sbatch_args, mine))

    def launch_merge_stats(self) -> None:
        """Do nothing: datatrove's statistics are not used."""

    def launch_job(self) -> None:
        """Submit the job; delete the pickled executor."""
        super().launch_job()
        (Path(self.stage.folder) / "datatrove" / "executor.pik").unlink(missing_ok=True)


class Ray(MarkerBasedExecutor, RayPipelineExecutor):
    """Tasks of a Ray cluster."""

    def _run_for_rank(self, rank: int, local_rank: int = 0, node_rank: int = -1) -> PipelineStats:
        stats = super()._run_for_rank(rank, local_rank, node_rank)
        with self.logging_dir.open(f"stats/{rank:05d}.json", "w") as f:  # the executor adds them up
            stats.save_to_disk(f)
        return stats


def slurm(stage: Stage, path: Path, config: ExecutorConfig) -> Slurm:
    """The executor of one stage."""
    executor = Slurm(
        [Task(path, stage.name)],
        tasks=stage.tasks,
        time=config.time,
        partition=config.partition,
        mem_per_cpu_gb=config.memory_gb,
        workers=config.workers or -1,
        job_name=f"mlm-{stage.name}",
        qos="",
        env_command=config.environment or "true",
        logging_dir=str(stage.folder / "datatrove"),
    )
    executor.stage, executor.plan = stage, path
    return executor


def run_slurm(plan: Plan, path: Path, console: Console) -> bool:
    """Submit what is left to do, or report its progress. Returns True if all stages are done.

    Raises UserError: no SLURM here, no partition, or what a task found wrong with its input.
    """
    if all(not stage.unfinished() for stage in plan.stages.values()):
        return True
    if shutil.which("sbatch") is None or plan.config.executor.partition is None:
        raise UserError(
            "executor.kind=slurm needs sbatch on the PATH and executor.partition=NAME: set it, run this "
            "where jobs are submitted, or set executor.kind=local"
        )
    ids = submitted(plan.work)
    waiting = queued(ids)
    errors = [error for stage in plan.stages.values() if (error := first_error(stage)) is not None]
    if errors:
        if waiting:  # what depends on the failed job would wait for ever
            subprocess.run(["scancel", *waiting], check=False)
        for stage in plan.stages.values():  # reported once: the next run tries again
            for file in stage.folder.glob("*.error.txt"):
                file.unlink(missing_ok=True)
        raise UserError(errors[0])
    if waiting:
        for stage in plan.stages.values():
            console.print(
                f"{stage.name}: {stage.tasks - len(stage.unfinished())} of {stage.tasks} tasks done"
            )
        console.print(f"jobs {' '.join(waiting)} are in the queue: run this again when they have finished")
        return False
    submit(plan, path, console)
    return False


def submit(plan: Plan, path: Path, console: Console) -> None:
    """Submit a job array per unfinished stage, each to start when the one before it has ended well."""
    logger.disable("datatrove")
    ids, before = list[str](), None
    for stage in plan.stages.values():
        stage.folder.mkdir(parents=True, exist_ok=True)
        left = stage.unfinished()
        if not left:
            continue
        executor = slurm(stage, path.resolve(), plan.config.executor)
        if before is not None:
            executor.depends_job_id = before
        try:
            executor.run()
        except (OSError, subprocess.CalledProcessError) as error:
            raise UserError(
                f"sbatch rejected stage {stage.name} ({error}): check executor.partition and time"
            ) from error
        before = str(executor.job_id)
        ids.append(before)
        console.print(f"{stage.name}: {len(left)} tasks, job {before}")
    write_atomic(plan.work / JOBS, json.dumps(ids).encode())
    console.print("submitted: run this again to see their progress and to finish the corpus")


def submitted(work: Path) -> list[str]:
    """Ids of the jobs that were submitted for this work folder."""
    try:
        ids = json.loads((work / JOBS).read_bytes())
        return [job for job in ids if isinstance(job, str) and job.isalnum()]
    except (OSError, ValueError, TypeError):
        return []


def queued(ids: list[str]) -> list[str]:
    """Return those of these jobs that wait or run."""
    if not ids:
        return []
    asked = ["squeue", "--noheader", "--format=%A", f"--jobs={','.join(ids)}"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
    return [job for job in ids if job in answer]


def run_ray(plan: Plan, path: Path) -> None:
    """Run every stage on the Ray cluster this process is connected to, or that it can find.

    Raises UserError: no package ray, or what a task found wrong with its input.
    """
    try:
        import ray
    except ImportError as error:
        raise UserError(
            "executor.kind=ray needs the package ray: pip install ray, or set executor.kind=local"
        ) from error
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    logger.disable("datatrove")
    config = plan.config.executor
    for stage in plan.stages.values():
        stage.folder.mkdir(parents=True, exist_ok=True)
        if not stage.unfinished():
            continue
        executor = Ray(
            [Task(path.resolve(), stage.name)],
            tasks=stage.tasks,
            workers=config.workers or -1,
            mem_per_cpu_gb=config.memory_gb,
            logging_dir=str(stage.folder / "datatrove"),
        )
        executor.stage = stage
        executor.run()
        if left := stage.unfinished():
            raise UserError(
                first_error(stage)
                or f"{stage.folder}: tasks {left[:10]} failed: see Ray's logs, then run this again"
            )


def main() -> int:
    """Run, in a SLURM job, the tasks of its index in the array; return the exit code."""
    path, name = Path(sys.argv[1]), sys.argv[2]
    try:
        plan = Plan.load(path)
        slurm(plan.stages[name], path, plan.config.executor).run()
    except UserError as error:
        print(f"mlm data build: {error}", file=sys.stderr)  # into the job's log
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
