"""Asynchronous saving: copy the state, write it in the background, and report the result.

A save copies the state into host memory; then a thread of the lowest priority writes it, agrees with the
other ranks over a separate group, and publishes.

On a CPU the copy is made at once, by all cores: a thread beside those that compute would cost them more. On a
GPU the thread makes it: weights and moments change only in the optimizer's step, so the copy overlaps the
forward and backward pass of the next step, and `before_weights_change` waits for the rest of it.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.run_state import Save
from mlm.checkpoint.native.save_load import CheckpointError, TensorShard, save_checkpoint, stored_tensors
from mlm.checkpoint.native.staging import StagedFile
from mlm.parallel.mesh import ParallelContext, host_group
from mlm.parallel.watch import LostPeer, Watch
from mlm.tracking.reporter import Reporter
from mlm.training.observer import Observer
from mlm.training.state import CHECKPOINTS, counters, owned_shards, save
from mlm.training.trainer import Trainer
from mlm.util.files import digest_bytes

LOWEST_PRIORITY = 19


class SaveFailedError(CheckpointError):
    """The last save of a run failed: start the run again."""

    exit_code = 1


@dataclass
class Job:
    """A save in progress."""

    step: int
    save_id: str = ""
    """Empty for a save that training waits for, which records itself."""
    staged: threading.Event = field(default_factory=threading.Event)
    """Set when the state has been copied, or the job has failed."""
    thread: threading.Thread | None = None
    begun: float = field(default_factory=time.perf_counter)
    waited: float = 0.0
    """Seconds that training has waited for it."""
    judged: threading.Event = field(default_factory=threading.Event)
    """Set when a later step, or the end of training, has shown what its weights are worth."""
    is_sound: bool = True
    """True if the numbers of that step are finite; set before `judged`."""
    seconds: float = 0.0
    """Seconds until it was written; 0 before."""
    path: Path | None = None
    error: BaseException | None = None


class Saver(Observer):
    """Saves a trainer's state, in the background if checkpoint.asynchronous. Every rank has one.

    As an observer of the trainer it lets weights change only when they are copied.

        with Saver(trainer, out, reporter) as saver:
            while …:
                trainer.train_step(…)
                if …: saver.begin()
            saver.begin()
            saver.finish()  # the last one is awaited, and its failure raised

    At most one save is in flight: `begin` waits for the one before. A failed one is reported loudly and
    leaves the training and the previous checkpoint as they are; the next is due as usual. Leaving the context
    waits for a save in flight, unless ranks are lost or the user interrupts.

    A save deletes older checkpoints only when the step after it is finite too, as its own weights may be what
    ruins the next (`Trainer.is_sound`).
    """

    def __init__(self, trainer: Trainer, out: Path, reporter: Reporter) -> None:
        self.trainer, self.out, self.reporter = trainer, out, reporter
        self._job: Job | None = None
        self._failed: BaseException | None = None
        """Error of a save that training waited for."""
        self._asynchronous = trainer.config.checkpoint.asynchronous
        if self._asynchronous:
            ctx, limit_s = trainer.ctx, trainer.config.dist.checkpoint_timeout_s
            self._watch = Watch(ctx.rank, limit_s, setting="dist.checkpoint_timeout_s")
            self._group = host_group(ctx.world_size, limit_s)
            self._file = StagedFile()
            self._run_id, self._count = shared_id(ctx), 0
            self._copies_aside = ctx.device.type == "cuda"

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self._collect()
        elif not isinstance(error, (LostPeer, KeyboardInterrupt)):
            with suppress(Exception):  # what ended the training comes first
                self._collect()

    def begin(self) -> None:
        """Save the trainer's state as it is now. Collective; reads counters back from the device."""
        self._collect()
        self._job = job = Job(self.trainer.step)
        if not self._asynchronous:
            _run(job, lambda: save(self.trainer, self.out, lambda: self.trainer.is_sound))
            job.waited = job.seconds
            self._failed = self._collect()
            return
        shards, state = owned_shards(self.trainer), counters(self.trainer)
        save_id = digest_bytes(f"{self._run_id} {self._count} {job.step}".encode()).partition(":")[2]
        self._count += 1
        job.save_id = save_id
        ready = _mark(self.trainer.ctx)
        if not self._copies_aside:
            self._copy(job, shards, save_id, ready)
        job.thread = threading.Thread(
            target=_run,
            args=(job, lambda: self._write(job, shards, state, save_id, ready)),
            name="checkpoint",
            daemon=True,
        )
        job.thread.start()
        job.waited = time.perf_counter() - job.begun

    def before_weights_change(self) -> None:
        """Wait until the state of the save in flight has been copied: it may change then."""
        if self._job is not None and not self._job.staged.is_set():
            begin = time.perf_counter()
            self._job.staged.wait()
            self._job.waited += time.perf_counter() - begin

    def after_step(self, outcome: object) -> None:
        """Judge the save in flight by the step that has ended; report it if written. Raises LostPeer."""
        if self._job is not None and self.trainer.step > self._job.step:
            self._judge(self._job)
        if self._job is not None and self._job.thread is not None and not self._job.thread.is_alive():
            self._collect()

    def finish(self) -> None:
        """Wait for the save in flight. Raises SaveFailedError on every rank if it failed."""
        error, self._failed = self._collect() or self._failed, None
        if isinstance(error, CheckpointError):
            raise SaveFailedError(str(error)) from error
        if error is not None:
            raise error

    def _collect(self) -> BaseException | None:
        """Wait for the save in flight, report it, and return its error."""
        job, self._job = self._job, None
        if job is None:
            return None
        self._judge(job)
        if job.thread is not None and job.thread.is_alive():
            begin = time.perf_counter()
            job.thread.join()
            job.waited += time.perf_counter() - begin
        if job.path is not None:
            if job.save_id:
                self.trainer.past = self.trainer.past.after(Save(job.step, job.save_id))
            self.reporter.saved(job.step, job.path, job.seconds, min(job.waited, job.seconds))
        elif isinstance(job.error, CheckpointError):
            self.reporter.save_failed(job.step, str(job.error))
        else:
            assert job.error is not None
            raise job.error  # a rank is lost, or a bug: no disk can be blamed
        return job.error

    def _judge(self, job: Job) -> None:
        """Let a save delete older checkpoints if the newest step is finite."""
        if not job.judged.is_set():
            job.is_sound = self.trainer.is_sound
            job.judged.set()

    def _copy(
        self, job: Job, shards: dict[str, TensorShard], save_id: str, ready: "torch.cuda.Event | None"
    ) -> None:
        """Copy the tensors to be written."""
        with _after(ready, self.trainer.ctx.device):
            self._file.fill(stored_tensors(shards), save_id)
        job.staged.set()

    def _write(
        self,
        job: Job,
        shards: dict[str, TensorShard],
        state: dict[str, Any],
        save_id: str,
        ready: "torch.cuda.Event | None",
    ) -> Path:
        """Write the checkpoint: the thread's work."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
        ctx, settings = self.trainer.ctx, self.trainer.config.checkpoint
        if self._copies_aside:
            self._copy(job, shards, save_id, ready)
        return save_checkpoint(
            self.out / CHECKPOINTS,
            job.step,
            shards,
            state=state,
            ranks=Ranks(ctx.rank, ctx.world_size, self._group, self._watch),
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            save_id=save_id,
            staged=self._file,
            may_prune=lambda: _await_judgement(job),
        )


def _run(job: Job, work: Callable[[], Path]) -> None:
    try:
        job.path = work()
    except BaseException as error:
        job.error = error
    finally:
        job.seconds = job.seconds or time.perf_counter() - job.begun
        job.staged.set()


def _await_judgement(job: Job) -> bool:
    """Wait until a save that is written is judged; return the judgement."""
    job.seconds = time.perf_counter() - job.begun
    job.judged.wait()
    return job.is_sound


def shared_id(ctx: ParallelContext) -> str:
    """A random text, the same on all ranks. Collective."""
    return str(Ranks.of(ctx).broadcast(os.urandom(16).hex()))


def _mark(ctx: ParallelContext) -> "torch.cuda.Event | None":
    """An event on the device's queue after every update of the weights so far."""
    if ctx.device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def _after(ready: "torch.cuda.Event | None", device: torch.device) -> Any:
    """Copies made inside wait for `ready`, on a separate stream: they do not queue after training."""
    if ready is None:
        return nullcontext()
    stream = torch.cuda.Stream(device)  # a new thread's current device is the first one, whatever the rank's
    stream.wait_event(ready)
    return torch.cuda.stream(stream)
