"""The training loop and session (reports, signals, saves), and the list of its observers.

Pretraining and finetuning derive from `Loop`.
"""

import math
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from omegaconf import OmegaConf

from mlm.checkpoint.native.format import CheckpointError
from mlm.checkpoint.native.run_state import VALIDATION_DUE
from mlm.config.build import to_dict
from mlm.config.imports import paths_in
from mlm.config.tree import leaves, values_of
from mlm.launch.command_line import run_origin
from mlm.launch.stop import StopRequest
from mlm.models.shape import count_parameters, flops_per_token
from mlm.tracking.metrics import Parts, Rates, StepMetrics, Throughput
from mlm.tracking.peak import DevicePeak, memory_bytes
from mlm.tracking.reporter import Reporter
from mlm.training.incidents.divergence import DivergenceStop
from mlm.training.incidents.experts import ExpertWatch
from mlm.training.incidents.timing import PROFILED_RANKS, Profiler, SlowRanks
from mlm.training.incidents.watcher import Incidents
from mlm.training.named_observers import SHIPPED, named_observers
from mlm.training.observer import Observer, Observers, RewindRequested, StepOutcome
from mlm.training.saver import SaveFailedError, Saver
from mlm.training.state import save_best
from mlm.training.trainer import StopAgreed, StopVote, Trainer
from mlm.util.errors import format_value

Batches = list[Any]
"""The micro-batches of one step on this rank."""


@dataclass
class Loop(ABC):
    """Train step by step, and log, validate, save and stop when due.

    Subclasses define the batches, the validation and the end of training.
    """

    trainer: Trainer
    reporter: Reporter
    throughput: Throughput
    stop: StopRequest
    saver: Saver
    is_stopping: bool = field(default=False, init=False)
    """True once all ranks agree that one received a request to stop."""
    incidents: Incidents = field(init=False)
    experts: ExpertWatch | None = field(default=None, init=False)
    """None without balanced experts."""
    stops_after: int = field(default=1, init=False)
    """Step after which a stop requested now takes effect, unless its vote has started."""

    warmup_key: ClassVar[str]
    """Setting of the warm-up, which the error of a diverged run names."""

    def run(self) -> bool:
        """Train until done; return False if a stop was requested before."""
        trainer = self.trainer
        self.stop.last_step = self.last_step
        trainer.observers = observers = Observers(self.observers())
        try:
            while True:
                observers.on_run_start(trainer, self.reporter)
                try:
                    is_finished = self.run_steps()
                    break
                except RewindRequested as request:
                    self.throughput.pause()
                    request.rewind()
                    # stop after the next step: its checkpoint records the samples excluded by the rewind
                    self.is_stopping = False
            observers.on_run_end()
        finally:
            trainer.observers = Observers()
        return is_finished

    def run_steps(self) -> bool:
        """Train until done, or stopped (False)."""
        trainer, observers, save_due = self.trainer, self.trainer.observers, False
        with self.batches() as batches_of_steps:
            self.throughput.start()
            if VALIDATION_DUE in trainer.extra_state:  # interrupted by the last stop
                self.validate()
                if self.is_done() and VALIDATION_DUE not in trainer.extra_state:
                    self.save(awaited=True)
            while not (self.is_done() or self.is_stopping):
                self.stops_after = trainer.step + 1
                with observers.phase("data"):
                    batches = next(batches_of_steps)
                observers.on_step_start(batches)
                outcome = trainer.train_step(batches)
                self.poll()
                observers.after_step(outcome)
                # the last step is always validated
                is_due = self.is_done() or is_step_due(trainer.step, self.validate_every)
                if validated := self.validate_every > 0 and is_due:
                    self.validate()
                self.stops_after = trainer.step + 1
                is_last = self.is_done() or self.is_stopping
                save_due |= self.is_save_due(validated)  # waits for a step that is finite
                if is_last or (save_due and trainer.is_finite):
                    if self.is_done():
                        self.incidents.judge_end()
                    self.save(awaited=is_last)
                    save_due = False
        return self.is_done() and VALIDATION_DUE not in trainer.extra_state

    def observers(self) -> list[Observer]:
        """Return the observers of the run, in the order of their calls."""
        trainer, reporter, saver = self.trainer, self.reporter, self.saver
        config, out = trainer.config, saver.out
        self.incidents = incidents = Incidents(trainer, out, reporter, saver)
        # incidents first: a step that they rewind is not reported
        watching: list[Observer] = [incidents, self.vote]
        if trainer.ctx.world_size > 1:
            watching.append(SlowRanks(trainer, incidents.report))
        if config.profile and trainer.ctx.rank < PROFILED_RANKS:
            watching.append(Profiler(trainer, out, reporter))
        if trainer.balances_experts:
            self.experts = ExpertWatch(trainer, incidents.report, self.is_log_due)
            watching.append(self.experts)
        watching += [saver, StepLogger(self), DivergenceStop(incidents, self.warmup_key)]
        return [*watching, *self.further_observers(), *named_observers(config.train.observers)]

    @cached_property
    def vote(self) -> StopVote:
        return StopVote(self.trainer, lambda: int(self.stop.number or 0))

    def poll(self) -> None:
        if number := self.vote.result():
            self.stop.number = self.stop.number or signal.Signals(number)
            self.is_stopping = True

    def further_observers(self) -> list[Observer]:
        return []

    @property
    @abstractmethod
    def validate_every(self) -> int:
        """Steps between validations; 0 never validates."""

    @abstractmethod
    def batches(self) -> AbstractContextManager[Iterator[Batches]]:
        """Yield this rank's micro-batches of each step, from the next step on."""

    @abstractmethod
    def score(self) -> None:
        """Validate and report the results."""

    @abstractmethod
    def tokens(self) -> int:
        """Tokens trained on so far, over all ranks and attempts."""

    def last_step(self) -> str:
        """Describe the step after which a stop requested now takes effect."""
        if VALIDATION_DUE in self.trainer.extra_state:
            return f"the batch of validation after step {self.trainer.step}"
        after_vote = 0 if self.vote.is_open else self.vote.step + 1
        end = self.trainer.step if self.is_done() else self.trainer.config.train.steps
        return f"step {min(end, max(self.stops_after, after_vote))}"

    def parts(self, means: Sequence[float], rates: Rates) -> Parts:
        return {}

    def is_done(self) -> bool:
        return self.trainer.step >= self.trainer.config.train.steps

    def is_log_due(self) -> bool:
        step = self.trainer.step
        is_last = self.is_done() or self.is_stopping
        return is_last or step == 1 or is_step_due(step, self.trainer.config.log.every)

    def is_save_due(self, validated: bool) -> bool:
        """True if a checkpoint is due; the last step is always saved."""
        return is_step_due(self.trainer.step, self.trainer.config.checkpoint.save_every)

    def count(self) -> None:
        self.throughput.count()

    def validate(self) -> None:
        """Validate with the clock stopped. After a stop request the next start validates the remainder."""
        self.throughput.pause()
        trainer, model = self.trainer, self.trainer.model
        state, model.polled = trainer.extra_state, self.vote.polled
        try:
            with suppress(StopAgreed), trainer.observers.phase("validation"):
                if state.setdefault(VALIDATION_DUE, True):
                    self.score()
                    state[VALIDATION_DUE] = False
                trainer.observers.after_validation()
                # a request after the last batch's vote also stops the run before the next step
                self.vote.begin()
                del state[VALIDATION_DUE]
        finally:
            model.polled = iter
        self.poll()
        self.throughput.start()

    def save_best(self, *, is_needed: bool = False) -> bool:
        """Save the weights as the run's best; where that fails, report it and return False. Collective.

        Raises SaveFailedError instead if the run cannot end without them.
        """
        try:
            save_best(self.trainer, self.saver.out)
        except CheckpointError as error:  # of all ranks
            self.reporter.save_failed(self.trainer.step, str(error))
            if is_needed:
                raise SaveFailedError(str(error)) from error
            return False
        return True

    def save(self, *, awaited: bool) -> None:
        self.throughput.pause()
        self.trainer.observers.before_save()
        with self.trainer.observers.phase("saving"):
            self.saver.begin()
            if awaited:
                self.saver.finish(is_judged=self.is_done())
        self.throughput.start()


class StepLogger(Observer):
    """Counts steps, and reports the first, the last and every log.every-th."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop

    def on_micro_batch(self, number: int, count: int) -> None:
        self.loop.reporter.micro_batch(number, count)

    def after_step(self, outcome: StepOutcome) -> None:
        self.loop.count()
        self.loop.reporter.done = self.loop.trainer.step
        if self.loop.is_log_due():
            self.log(outcome)

    def log(self, outcome: StepOutcome) -> None:
        """Read the step's numbers from the device and report them."""
        loop, trainer = self.loop, self.loop.trainer
        means = trainer.mean_parts(outcome)  # waits for the device, so the clock may be read now
        rates, scaler = loop.throughput.lap(), trainer.scaler
        loop.reporter.step(
            StepMetrics(
                step=trainer.step,
                loss=math.fsum(means[: trainer.objective.num_losses]),
                lr=outcome.lr,
                grad_norm=float(outcome.grad_norm.item()),
                loss_scale=float(scaler.scale.item()) if scaler.dynamic else None,
                skipped_steps=int(scaler.skipped.item()),
                tokens=loop.tokens(),
                tokens_per_s=rates.tokens_per_s,
                step_time_s=rates.step_time_s,
                tflops=rates.tflops,
                mfu=rates.mfu,
                memory_bytes=memory_bytes(trainer.ctx.device),
                parts=loop.parts(means, rates),
                loads=loop.experts.loads if loop.experts else None,
            )
        )


def is_step_due(step: int, every: int) -> bool:
    """True if something done every `every` steps (0: never) is due after `step`."""
    return every > 0 and step % every == 0


class Session(NamedTuple):
    """The first arguments of `Loop`."""

    trainer: Trainer
    reporter: Reporter
    throughput: Throughput
    stop: StopRequest
    saver: Saver

    def note_stopped(self, how_to_resume: str) -> int:
        """Report that a run was stopped and saved; return the exit code of its command."""
        reason, step = self.stop.reason, self.trainer.step
        self.reporter.note(f"stopped by {reason} after step {step}, saved.{how_to_resume}")
        return self.stop.exit_code


@contextmanager
def training_session(
    trainer: Trainer,
    out: Path,
    *,
    header: Sequence[tuple[str, str]],
    record: Mapping[str, object],
    notes: Sequence[str],
    warnings: Sequence[str] = (),
    peak: DevicePeak | None,
    tokens_per_step: int,
    seq_length: int,
    loss_unit: str,
    mirror: Callable[[Path], None] = lambda path: None,
) -> Iterator[Session]:
    """Report, listen to signals and save until the block ends.

    `header` are rows shown above the numbers, `record` JSON values of the record of kind "run" in
    metrics.jsonl, `notes` and `warnings` lines shown before training begins. MFU is stated against `peak`.
    `tokens_per_step` of 0 lets the loop count them; `seq_length` may be a mean, for FLOP/s. `mirror` receives
    each checkpoint that is complete.
    """
    config, ctx = trainer.config, trainer.ctx
    throughput = Throughput(
        tokens_per_step=tokens_per_step,
        flops_per_token=flops_per_token(config.model, seq_length, ctx.tp.size),
        devices=ctx.world_size,
        peak=peak.flops if peak else None,
    )
    reporter = Reporter(
        out,
        total_steps=config.train.steps,
        start_step=trainer.step,
        config=config.log,
        is_main=ctx.is_main,
        header=header,
        run={**record, **run_origin(), "loss_unit": loss_unit},
    )
    with StopRequest(announce=ctx.is_main) as stop, reporter, Saver(trainer, out, reporter, mirror) as saver:
        for note in notes:
            reporter.note(note)
        for warning in warnings:
            reporter.problem(warning)
        yield Session(trainer, reporter, throughput, stop, saver)


def composed_yaml(config: Any, command: str) -> str:
    """Configuration of a run of `command` as YAML for `resume={out}` (mlm/cli/compose/saved.py)."""
    values = to_dict(config)
    values.update(values.pop("parallel"))
    return OmegaConf.to_yaml({"command": command, **values})


def resume_command(command: str, out: Path, config: Any) -> list[str]:
    spec: type = type(config)
    values = values_of(config)
    named = {key: values[key] for key, leaf in leaves(spec).items() if leaf.shipped is not None}
    # user code in saved settings is imported only if its path is typed again
    user_code = [
        f"{key}={format_value(value)}" for key, value in named.items() if {*paths_in(value)} - SHIPPED.keys()
    ]
    return ["mlm", command, f"resume={out}", *user_code]


def run_row(name: str, out: Path) -> tuple[str, str]:
    """Name of the run, with its folder unless that is runs/{name}."""
    return "run", name if out == Path("runs", name) else f"{name} in {out}"


def model_row(trainer: Trainer, run_origin: str = "") -> tuple[str, str]:
    model = trainer.config.model
    shape = f"{model.num_layers} layers × {model.hidden_size} × {model.num_heads} heads"
    return "model", f"{model.kind} {count_parameters(model) / 1e6:,.1f}M ({shape}){run_origin}"


def layout_row(trainer: Trainer, *, even_batches: bool = True) -> tuple[str, str]:
    """Sizes and options of the parallel layout, and with `even_batches` the bubble."""
    config, ctx, p = trainer.config, trainer.ctx, trainer.settled.parallel
    schedule: str = p.pipeline
    if ctx.pp.size > 1 and even_batches:
        micro_batches = config.train.global_batch_size // (ctx.dp.size * config.train.micro_batch_size)
        schedule += f", bubble {trainer.model.bubble(micro_batches):.1%}"
    over_context = f"cp={ctx.cp.size} × " if ctx.cp.size > 1 else ""
    sizes = f"tp={ctx.tp.size} × {over_context}pp={ctx.pp.size} × dp={ctx.dp.size}"
    ranks = f"{ctx.world_size} {ctx.device.type} rank{'s' * (ctx.world_size > 1)}"
    options = [
        f"ep={p.ep}" if p.ep > 1 else "",
        f"expert_tp={p.expert_tp}" if p.expert_tp not in (None, p.tp) else "",
        f"vp={p.vp}" if p.vp > 1 else "",
        "sequence parallel" if p.sequence_parallel and ctx.tp.size > 1 else "",
        f"tp_overlap={p.tp_overlap}" if (p.tp_overlap or 1) > 1 and ctx.tp.size > 1 else "",
        f"zero={p.zero}" if p.zero and ctx.replicas.size > 1 else "",
        "reduced every micro-batch" if p.zero and ctx.replicas.size > 1 and p.zero_reduce == "every" else "",
        f"recompute={p.recompute}" if p.recompute != "none" else "",
        schedule if ctx.pp.size > 1 else "",
    ]
    return "layout", ", ".join([f"{sizes} on {ranks}", *filter(None, options)])
