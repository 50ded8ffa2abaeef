"""Run spec of `mlm verify-resume`: that of a pretraining run, and the step to kill it after."""

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, ClassVar, Literal

from mlm.config.fields import POSITIVE, Forbid, OutFolder
from mlm.parallel.config import ParallelConfig
from mlm.tracking.config import LogConfig
from mlm.training.config import PretrainConfig
from mlm.verify.parity.config import comparable


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumedLayout:
    """The layout a killed run is resumed with; null keeps that of the run."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    tp: int | None = None
    """Tensor-parallel size."""
    cp: int | None = None
    """Context-parallel size."""
    pp: int | None = None
    """Pipeline-parallel size."""
    vp: int | None = None
    """Virtual stages per pipeline rank."""
    dp: int | None = None
    """Data-parallel size."""
    zero: Literal[0, 2, 3] | None = None
    """State sharded over dp replicas, as parallel.zero."""
    sequence_parallel: bool | None = None
    """Split activations along the sequence."""

    @property
    def chosen(self) -> dict[str, int | bool]:
        """Settings that may differ from the run's layout: those that are not null."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyResumeConfig(PretrainConfig):
    """The run spec of `mlm verify-resume`: 2k steps straight, against k, a kill -9, and k more."""

    out: OutFolder
    """Folder for both runs and verify-resume.json."""
    steps: Annotated[int, POSITIVE] = 4
    """Steps before the kill, k; as many follow it."""
    resumed: ResumedLayout = field(default_factory=ResumedLayout)
    """Layout of the second half."""

    def resumed_parallel(self) -> ParallelConfig:
        """The layout of the second half."""
        return replace(self.parallel, **self.resumed.chosen)  # type: ignore[arg-type]  # checked on building

    def resumed_run(self) -> "VerifyResumeConfig":
        """The same settings with the layout of the second half in place of the first's."""
        return replace(self, parallel=self.resumed_parallel(), resumed=ResumedLayout())

    def plan(self, first_step: int) -> "KillPlan":
        """Kill and end steps of a run that begins after `first_step` steps."""
        kill = (first_step // self.steps + 1) * self.steps  # a multiple of k: those are saved
        return KillPlan(first_step, kill, kill + self.steps)

    def training_run(self, out: str, last_step: int) -> PretrainConfig:
        """A run of `mlm pretrain` up to `last_step` in the folder `out`, saved every k steps.

        Its learning rates are those of the whole run, of which this is the beginning.
        """
        run = comparable(self)
        common = {f.name: getattr(run, f.name) for f in fields(PretrainConfig)}
        steps = self.train.steps
        schedule = replace(
            self.schedule,
            warmup_steps=self.schedule.warmup_end(steps),
            decay_steps=self.schedule.decay_end(steps),
        )
        return PretrainConfig(
            **common
            | {
                "out": out,
                "schedule": schedule,
                "train": replace(self.train, steps=last_step, validate_every=0),
                "checkpoint": replace(
                    self.checkpoint, save_every=self.steps, keep_last=2, keep_every=0, resume=True
                ),
                "log": LogConfig(every=1, live="off"),
            }
        )


@dataclass(frozen=True)
class KillPlan:
    """Steps of the run that is killed."""

    first: int
    """Steps done before it begins: 0, or those of the checkpoint that `ckpt` names."""
    kill: int
    """Step whose checkpoint exists when it is killed."""
    last: int
    """Last step, as of the run that is not killed."""
