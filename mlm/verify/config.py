"""Run specs of `mlm parity`, `mlm verify-resume` and `mlm audit`."""

from dataclasses import dataclass, fields, replace
from typing import Annotated, NamedTuple, TypeVar

from mlm.config.fields import POSITIVE, Aliases, CheckpointPath, OutFolder, ResultFile
from mlm.parallel.config import ParallelConfig, PipelineSize, TensorSize
from mlm.runs.config import PretrainConfig
from mlm.tracking.config import LogConfig

FIRST_LOSS_SCALE = 2.0**14
"""Largest initial loss scale of a comparison in float16: above it, gradients may overflow."""

Spec = TypeVar("Spec", bound=PretrainConfig)


def comparable(config: Spec) -> Spec:
    """Return the run to compare: on its corpus, if it names one, and without skipped steps in float16."""
    data, precision = config.data, config.precision
    if data.path is not None or data.train is not None or data.blend:
        data = replace(data, kind="indexed")
    if precision.dtype == "fp16":
        scale = max(min(precision.initial_loss_scale, FIRST_LOSS_SCALE), precision.min_loss_scale)
        precision = replace(precision, initial_loss_scale=scale)
    return replace(config, data=data, precision=precision)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityConfig(PretrainConfig):
    """The run spec of `mlm parity`: the first steps of a pretraining run, on its layout and on one rank."""

    out: OutFolder
    """Folder for parity.json, which holds every number compared."""
    ckpt: CheckpointPath | None = None
    """Checkpoint or run directory to take weights from, instead of the initial ones."""
    steps: Annotated[int, POSITIVE] = 3
    """Optimizer steps compared. Two show the effect of a wrong update; more show nothing new."""

    def on_one_process(self) -> "ParityConfig":
        """The same run without parallelism, recomputation and compilation."""
        return replace(self, parallel=ParallelConfig(dp=1), compile=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyResumeConfig(PretrainConfig):
    """The run spec of `mlm verify-resume`: 2k steps straight, against k, a kill -9, and k more."""

    out: OutFolder
    """Folder for both runs and verify-resume.json."""
    steps: Annotated[int, POSITIVE] = 4
    """Steps before the kill, k; as many follow it."""

    def plan(self, first_step: int) -> "KillPlan":
        """Kill and end steps of a run that begins after `first_step` steps."""
        kill = (first_step // self.steps + 1) * self.steps  # a multiple of k, which is saved
        return KillPlan(first_step, kill, kill + self.steps)

    def training_run(self, out: str, last_step: int) -> PretrainConfig:
        """A run of `mlm pretrain` up to `last_step` in the folder `out`, saved every k steps.

        It has the learning rates of the full run.
        """
        run, steps = comparable(self), self.train.steps
        common = {f.name: getattr(run, f.name) for f in fields(PretrainConfig)}
        ends = {
            "warmup_steps": self.schedule.warmup_end(steps),
            "decay_steps": self.schedule.decay_end(steps),
            "cooldown": 0,  # comes at the end of the full run
        }
        saves = {"save_every": self.steps, "keep_last": 2, "keep_every": 0, "resume": True}
        changed = {
            "out": out,
            "schedule": replace(self.schedule, **ends),  # type: ignore[arg-type]
            "train": replace(self.train, steps=last_step, validate_every=0),
            "checkpoint": replace(self.checkpoint, **saves),  # type: ignore[arg-type]
            "log": LogConfig(every=1),
        }
        return PretrainConfig(**common | changed)


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditConfig:
    """The run spec of `mlm audit`: a function that builds a part of any training step, and a layout."""

    build: str
    """Function of a mesh with the axes pp, dp, cp, tp that returns an AuditSubject: FILE.py:FUNCTION."""
    tp: TensorSize = 1
    """Tensor-parallel size."""
    pp: PipelineSize = 1
    """Pipeline-parallel size."""
    dp: Annotated[int, POSITIVE, Aliases("data_parallel", "data_parallel_size")] = 1
    """Data-parallel size."""
    cp: Annotated[int, POSITIVE, Aliases("context_parallel", "context_parallel_size")] = 1
    """Context-parallel size."""
    steps: Annotated[int, POSITIVE] = 2
    """Steps compared."""
    timeout_s: Annotated[float, POSITIVE] = 60.0
    """Seconds that a collective may take; a rank that waits longer is named."""
    out: ResultFile | None = None
    """File for the report: .html for a page, .json for every number."""


class KillPlan(NamedTuple):
    """Steps at which a run begins, is killed and ends."""

    first: int
    kill: int
    last: int
