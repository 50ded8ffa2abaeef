"""Asynchronous saving: copy the state, write it in the background, and report the result.

A save copies the state into host memory; then a thread of the lowest priority writes it, agrees with the
other ranks over a separate group, and publishes.

On a CPU all cores copy at once: a thread during the next step would cost more. On a GPU the thread copies:
weights and moments change only in the optimizer's step, so the copy overlaps the forward and backward pass of
the next step, and `before_weights_change` waits for its end.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from mlm.checkpoint.native.compare import tensors_digest
from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.folders import CHECKPOINTS
from mlm.checkpoint.native.retention import prune
from mlm.checkpoint.native.run_state import Save
from mlm.checkpoint.native.save_load import (
    CheckpointError,
    TensorShard,
    read_manifest,
    save_checkpoint,
    stored_tensors,
)
from mlm.checkpoint.native.staging import StagedFile
from mlm.parallel.mesh import host_group
from mlm.parallel.watch import LostPeer, Watch
from mlm.tracking.reporter import Reporter
from mlm.training.identity import RunAncestry
from mlm.training.observer import Observer
from mlm.training.state import counters, owned_shards
from mlm.training.trainer import Trainer
from mlm.util.files import digest_bytes


class SaveFailedError(CheckpointError):
    """The last save of a run failed."""

    exit_code = 1


@dataclass
class PendingSave:
    """A save in progress."""

    step: int
    save_id: str
    shards: dict[str, TensorShard]
    """Shards that this rank writes: views of the live tensors."""
    state: dict[str, Any]
    ready: "torch.cuda.Event | None"
    """On the device's queue after every update of the weights so far."""
    staged: threading.Event = field(default_factory=threading.Event)
    """Set when the state has been copied, or the save has ended."""
    thread: threading.Thread | None = None
    """None if training waits for the disk."""
    started: float = field(default_factory=time.perf_counter)
    waited: float = 0.0
    """Seconds that training has waited for the save."""
    judged: threading.Event = field(default_factory=threading.Event)
    """Set when a later step, or the end of training, has judged its weights."""
    wrong_since: int | None = None
    """`Trainer.wrong_since` after that step; set before `judged`."""
    seconds: float = 0.0
    """Seconds until it was written; 0 before."""
    path: Path | None = None
    digest: str | None = None
    """Digest of the tensors, in a run with exact=N."""
    error: BaseException | None = None


class Saver(Observer):
    """Saves a trainer's state, in the background if checkpoint.asynchronous. Every rank has one.

    As an observer of the trainer it delays changes of weights until they are copied.

        with Saver(trainer, out, reporter) as saver:
            while …:
                trainer.train_step(…)
                if …: saver.begin()
            saver.begin()
            saver.finish()  # the last one is awaited, and its failure raised

    At most one save is in flight: `begin` waits for the previous one. A failed save is reported; training and
    the previous checkpoint continue. Leaving the context waits for a save in flight, unless ranks are lost or
    the user interrupts. Complete checkpoints are passed to `mirror`, which returns at once.

    A save deletes the last good checkpoint only when the step after it is sound too, as bad weights may show
    only in that step (`Trainer.wrong_since`).
    """

    def __init__(
        self,
        trainer: Trainer,
        out: Path,
        reporter: Reporter,
        mirror: Callable[[Path], None] = lambda path: None,
    ) -> None:
        self.trainer, self.out, self.reporter, self.mirror = trainer, out, reporter, mirror
        self._pending: PendingSave | None = None
        self._failed: BaseException | None = None
        """Error of a synchronous save."""
        self._unjudged: PendingSave | None = None
        """The synchronous save, until a later step has judged its weights."""
        ctx, limit_s = trainer.ctx, trainer.config.dist.checkpoint_timeout_s
        self._run_id, self._count = str(Ranks.of(ctx).broadcast(os.urandom(16).hex())), 0
        self._asynchronous = trainer.config.checkpoint.asynchronous
        self._copies_aside = ctx.device.type == "cuda"
        if self._asynchronous:
            self._watch = Watch(ctx.rank, limit_s, setting="dist.checkpoint_timeout_s")
            self._group = host_group(ctx.world_size, limit_s)
            self._file = StagedFile()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._collect()
        elif not isinstance(error, (LostPeer, KeyboardInterrupt)):
            with suppress(Exception):  # the error that ended training takes precedence
                self._collect()

    def begin(self) -> None:
        """Save the trainer's state as it is now. Collective; reads counters back from the device."""
        self._collect()
        trainer, self._count = self.trainer, self._count + 1
        save_id = digest_bytes(f"{self._run_id} {self._count} {trainer.step}".encode()).partition(":")[2]
        ready = None
        if trainer.ctx.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record()  # on the device's queue after every update of the weights so far
        pending = PendingSave(trainer.step, save_id, owned_shards(trainer), counters(trainer), ready)
        pending.wrong_since = trainer.wrong_since or trainer.step + 1  # until it is judged
        self._pending = pending
        if self._asynchronous:
            if not self._copies_aside:
                self._copy(pending)
            pending.thread = threading.Thread(
                target=self._write,
                args=(pending, self._group, self._watch, self._file),
                name="checkpoint",
                daemon=True,
            )
            pending.thread.start()
            pending.waited = time.perf_counter() - pending.started
        else:
            pending.judged.set()
            self._write(pending, trainer.ctx.host_group, trainer.ctx.watch, None)
            pending.waited = pending.seconds
            self._failed, self._unjudged = self._collect(), pending

    @property
    def ancestry(self) -> RunAncestry:
        """Ancestry of the trainer's state, with the save in flight; known to rank 0."""
        ancestry, pending = self.trainer.ancestry, self._pending
        return ancestry.after(Save(pending.step, pending.save_id)) if pending else ancestry

    def before_weights_change(self) -> None:
        """Wait until the state of the save in flight has been copied."""
        if self._pending is not None and not self._pending.staged.is_set():
            begin = time.perf_counter()
            self._pending.staged.wait()
            self._pending.waited += time.perf_counter() - begin

    def after_step(self, outcome: object) -> None:
        """Judge the save in flight by the finished step; report it if written. Raises LostPeer."""
        self._judge(self._pending or self._unjudged)
        thread = None if self._pending is None else self._pending.thread
        if thread is not None and not thread.is_alive():
            self._collect()

    def finish(self, *, is_judged: bool = False) -> None:
        """Wait for the save in flight; it is judged if training has ended. Raises SaveFailedError."""
        self._judge(self._pending or self._unjudged, is_judged=is_judged)
        error, self._failed = self._collect() or self._failed, None
        if isinstance(error, CheckpointError):
            raise SaveFailedError(str(error)) from error
        if error is not None:
            raise error

    def _collect(self) -> BaseException | None:
        """Wait for the save in flight, report it, and return its error."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        self._judge(pending)
        pending.judged.set()
        if pending.thread is not None and pending.thread.is_alive():
            begin = time.perf_counter()
            pending.thread.join()
            pending.waited += time.perf_counter() - begin
        if pending.path is not None:
            self.trainer.ancestry = self.trainer.ancestry.after(Save(pending.step, pending.save_id))
            self.reporter.saved(
                pending.step,
                pending.path,
                pending.seconds,
                min(pending.waited, pending.seconds),
                pending.digest,
            )
            self.mirror(pending.path)
        elif isinstance(pending.error, CheckpointError):
            self.reporter.save_failed(pending.step, str(pending.error))
        else:
            assert pending.error is not None
            raise pending.error  # a lost rank, or a bug
        return pending.error

    def _judge(self, save: PendingSave | None, *, is_judged: bool = False) -> None:
        """Let a save delete older checkpoints, if a step after it has shown that its weights are sound."""
        trainer, settings = self.trainer, self.trainer.config.checkpoint
        if save is None or not (is_judged or trainer.step > save.step):
            return
        if not save.judged.is_set():
            save.wrong_since = trainer.wrong_since
            save.judged.set()
        elif save is self._unjudged:
            self._unjudged = None
            if trainer.ctx.is_main and save.path is not None:
                prune(
                    save.path.parent,
                    keep_last=settings.keep_last,
                    keep_every=settings.keep_every,
                    since=trainer.wrong_since,
                )

    def _copy(self, pending: PendingSave) -> None:
        """Copy the tensors to be written, on a GPU after `pending.ready`."""
        stream = None
        if pending.ready is not None:  # a separate stream: copies do not queue after training
            stream = torch.cuda.Stream(self.trainer.ctx.device)  # a new thread's current device is 0
            stream.wait_event(pending.ready)
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            self._file.fill(stored_tensors(pending.shards), pending.save_id)
        pending.staged.set()

    def _write(self, pending: PendingSave, group: Any, watch: Watch, staged: StagedFile | None) -> None:
        """Write the checkpoint and set its result in `pending`; in a thread if `staged` holds the copy."""
        ctx, settings = self.trainer.ctx, self.trainer.config.checkpoint

        def await_judgement() -> int | None:
            pending.seconds = time.perf_counter() - pending.started
            pending.judged.wait()
            return pending.wrong_since

        try:
            if staged is not None:
                with suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)  # the lowest
                if self._copies_aside:
                    self._copy(pending)
            pending.path = save_checkpoint(
                self.out / CHECKPOINTS,
                pending.step,
                pending.shards,
                state=pending.state,
                ranks=Ranks(ctx.rank, ctx.world_size, group, watch),
                keep_last=settings.keep_last,
                keep_every=settings.keep_every,
                save_id=pending.save_id,
                staged=staged,
                wrong_since=await_judgement,
            )
            if self.trainer.config.exact and ctx.is_main:
                pending.digest = tensors_digest(pending.path, read_manifest(pending.path))
        except BaseException as error:
            pending.error = error
        finally:
            pending.seconds = pending.seconds or time.perf_counter() - pending.started
            pending.staged.set()
