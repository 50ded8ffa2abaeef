"""Judges every step of a run, records incidents and acts upon them."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.folders import checkpoints
from mlm.checkpoint.native.save_load import CheckpointError
from mlm.config.build import to_dict
from mlm.launch.doctor.findings import versions
from mlm.optim.adamw import can_defer
from mlm.parallel.transfer import ToHost
from mlm.parallel.watch import name_ranks
from mlm.tracking.reporter import Reporter
from mlm.training.diagnose import DivergedError, diagnosis
from mlm.training.hooks import Hooks
from mlm.training.incidents.clock import Clock, Times
from mlm.training.incidents.findings import Findings, Numbers, beyond, gather, shared_numbers, sum_numbers
from mlm.training.incidents.memory import decode
from mlm.training.incidents.probe import Probe
from mlm.training.incidents.profiler import Profiler
from mlm.training.incidents.record import FOLDER, free_name, rows_of, write_rank, write_record, write_samples
from mlm.training.incidents.replicas import differences, digests
from mlm.training.incidents.timeline import Timeline
from mlm.training.incidents.transient import SecondPass, compute_again
from mlm.training.resume import folder, returns, rewind
from mlm.training.saver import Saver
from mlm.training.state import FINETUNING, INCIDENTS
from mlm.training.trainer import Doubt, Trainer
from mlm.util.errors import UserError

DEFERRING = ("cuda",)
"""Devices that apply an update while the host reads the step's numbers."""
MILD = frozenset(("loss_outlier", "gradient_outlier", "slow_rank"))
"""Incidents that chance or load may cause."""
REPEATED = 16
"""Tensors that a repeated step that differs names at most."""


class IncidentError(UserError):
    """An incident that ends the run, as incident.action=stop asks."""

    exit_code = 1


@dataclass
class Verdict:
    """Why a step is an incident."""

    kinds: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def add(self, kind: str, line: str) -> None:
        """Add a reason."""
        self.kinds.append(kind)
        self.lines.append(line)


class Incidents(Hooks):
    """Watches the steps of a trainer.

        loop.hooks = Incidents(trainer, out, reporter, saver)

    A normal step costs one small all-reduce, on GPUs two over each axis. All decisions follow from numbers
    that all ranks share.
    """

    def __init__(self, trainer: Trainer, out: Path, reporter: Reporter, saver: Saver) -> None:
        self.trainer, self.out, self.reporter, self.saver = trainer, out, reporter, saver
        self.settings, self.checks = trainer.config.incident, trainer.config.check
        self.root = out / FOLDER
        self.remembered()
        self.batches: Sequence[Any] = ()
        self.rewinds, self.slow = False, set[int]()
        existing = len(list(self.root.glob("step-*"))) if trainer.ctx.is_main else 0
        self.count = int(Ranks.of(trainer.ctx).broadcast(existing))
        self.clock = Clock(trainer.ctx)
        self.clock.start(trainer.step)
        self.profiler = Profiler(trainer, out, reporter) if trainer.config.profile else None
        self.timeline = Timeline(trainer, reporter)
        trainer.judge, trainer.doubt = self.judge, self.doubt
        saver.is_sound = self.is_finite
        self.defers = trainer.ctx.device.type in DEFERRING and can_defer(
            trainer.optimizer, trainer.shards[0].parameter.dtype
        )

    def remembered(self) -> None:
        """Take the memory from the state of the trainer, which a checkpoint may have filled."""
        self.memory = decode(self.trainer.extra_state.get(INCIDENTS), self.settings.window)
        self.trainer.left_out = self.memory.ranges

    def remember(self) -> None:
        """Put the memory into the state of the trainer."""
        self.trainer.extra_state[INCIDENTS] = self.memory.encode()

    def timed(self, what: str) -> AbstractContextManager[None]:
        """Measure time that is not the step's own."""
        return self.clock.timed(what)

    def begin(self, batches: Sequence[Any]) -> None:
        """Take note of the micro-batches of the step that begins."""
        self.batches = batches
        self.trainer.ctx.watch.traffic = []
        if self.profiler is not None:
            self.profiler.begin()
        self.timeline.begin(len(batches))

    def must_rewind(self) -> bool:
        """Return True if training is to return to a checkpoint."""
        return self.rewinds

    def doubt(self, parts: Tensor, norm: Tensor) -> Doubt | None:
        """Begin to read a step's numbers, to judge it if they are far; None judges it now. Collective."""
        if not self.defers or self.repeats_now():
            return None
        numbers = sum_numbers(self.trainer, parts, norm)
        flag = beyond(numbers, self.memory.recent.limits(self.settings.threshold))
        arriving = ToHost(torch.cat([numbers, flag.view(1)]))

        def holds() -> bool:
            loss, gradient, is_flagged = arriving.read()
            if not is_flagged:
                self.memory.streak = self.memory.since = 0
                self.memory.recent.add(loss, gradient)
            return bool(is_flagged)

        return Doubt(flag, holds)

    def judge(self, parts: Tensor, norm: Tensor) -> bool:
        """Decide on a step before its update; True leaves the update out. Collective.

        The first step of an incident is computed again. Where that is no incident, the update is the second
        pass's, whose numbers `parts` and `norm` then hold.
        """
        numbers, again = shared_numbers(self.trainer, parts, norm), None
        verdict = self.judge_numbers(numbers)
        if self.repeats_now():
            self.judge_repetition(parts, verdict)
        if verdict.kinds and not self.memory.streak:
            again = compute_again(self.trainer, self.batches, parts, norm)
            if not is_finite(again.numbers) or self.judge_numbers(again.numbers).kinds:
                again = None
        kept = numbers if again is None else again.numbers
        self.count_bad_steps(kept, verdict)
        self.memory.recent.add(kept.loss, kept.norm)
        return bool(verdict.kinds) and self.act(verdict, numbers, again)

    def count_bad_steps(self, numbers: Numbers, verdict: Verdict) -> None:
        """Count steps in a row that are not finite; an overflow that halves the loss scale is none."""
        memory, patience = self.memory, self.settings.patience
        if is_finite(numbers):
            memory.since = memory.streak = 0
            return
        memory.since = memory.since or self.trainer.step + 1
        if verdict.kinds:
            memory.streak += 1
            if memory.streak == patience:
                verdict.add("exhausted", f"{patience} steps in a row without finite gradients")

    def judge_numbers(self, numbers: Numbers) -> Verdict:
        """Return what is not finite or far from recent numbers."""
        scaler, settings, verdict = self.trainer.scaler, self.settings, Verdict()
        floor = self.trainer.config.precision.min_loss_scale
        if not math.isfinite(numbers.norm) and scaler.dynamic and numbers.scale > floor:
            return verdict  # the loss scale is halved, as usual
        if not is_finite(numbers):
            if scaler.dynamic:
                verdict.add("loss_scale_at_floor", f"overflow at the smallest loss scale, {floor:g}")
            if not math.isfinite(numbers.loss):
                verdict.add("loss_not_finite", f"loss {numbers.loss}")
            if not math.isfinite(numbers.norm):
                verdict.add("gradient_not_finite", f"gradient norm {numbers.norm}")
        elif settings.threshold:
            limits = self.memory.recent.limits(settings.threshold)
            values = {"loss": numbers.loss, "gradient norm": numbers.norm}
            for (what, value), limit in zip(values.items(), limits, strict=True):
                if value >= limit:
                    line = f"{what} {value:.6g} is at least {limit:.6g}, which chance reaches once in"
                    verdict.add(f"{what.split()[0]}_outlier", f"{line} {settings.threshold:,.0f} steps")
        return verdict

    def repeats_now(self) -> bool:
        """Return True if the step is to be computed twice."""
        every = self.checks.every
        return every > 0 and (self.trainer.step + 1) % every == 0 and self.repeats()

    def repeats(self) -> bool:
        """Return True if a step repeats bit for bit here."""
        repeat, config = self.checks.repeat, self.trainer.config
        return config.deterministic or self.trainer.ctx.device.type == "cpu" if repeat is None else repeat

    def judge_repetition(self, parts: Tensor, verdict: Verdict) -> None:
        """Compute the step once more and compare its gradients and parts. Collective."""
        trainer, ctx = self.trainer, self.trainer.ctx
        grads = {s.name: s.parameter.grad for s in trainer.shards if s.parameter.grad is not None}
        first = digests({"loss": parts, **grads}, ctx.device)
        again = trainer.forward_backward(self.batches)
        grads = {s.name: s.parameter.grad for s in trainer.shards if s.parameter.grad is not None}
        second = digests({"loss": again, **grads}, ctx.device)
        names = [
            name for name, same in zip(["loss", *grads], (first == second).tolist(), strict=True) if not same
        ]
        if not Ranks.of(ctx).any_of([bool(names)])[0]:
            return
        found = Ranks.of(ctx).all_gather(names[:REPEATED])
        loss = [rank for rank, torn in enumerate(found) if "loss" in torn]
        torn = sorted({name for each in found for name in each} - {"loss"})
        where = f"the loss on {name_ranks(loss)}" if loss else "gradients after they were summed"
        verdict.add(
            "repetition_differs", f"computed twice, the step differs in {where}: {', '.join(torn[:4])}"
        )

    def act(self, verdict: Verdict, numbers: Numbers, again: SecondPass | None) -> bool:
        """Record an incident and follow incident.action; return True to leave the update out.

        `again` is a second pass that is no incident: then no sample is to blame, and none is left out.
        """
        action, lines, place = self.action(), list(verdict.lines), None
        if again is not None:
            verdict.kinds.append("transient")
            lines.append(again.line("normal" if is_finite(numbers) else "finite"))
            action = "stop" if self.settings.action == "stop" else "computed again"
        if self.has_place(verdict):
            findings, probe = None, Probe(self.trainer)
            if again is None:
                probe.run(self.batches)
                findings = gather(probe, self.trainer.ctx)
                lines += findings.lines()
            more = {"second_pass": again.encode()} if again is not None else None
            place = self.write(verdict, numbers, lines, findings, probe, more)
        step = self.trainer.step + 1
        where = f"; see {place}" if place is not None else ""
        text = f"step {step}: incident: {'; '.join(lines)}{where}"
        self.reporter.problem(f"{text} ({done_about_it(action)})")
        if action == "stop":
            raise IncidentError(f"{text}; stopped as incident.action={self.settings.action} asks")
        if action == "rewind":
            self.rewinds = True
        else:
            self.note(verdict, numbers, action, place)
        if action == "skip":
            self.memory.steps.append(step)
        return action not in ("log", "computed again")

    def action(self) -> str:
        """Return what is done: as asked, or as far as it can be."""
        asked = self.settings.action
        if asked != "rewind":
            return asked
        trainer, before = self.trainer, self.memory.limit(self.trainer.step + 1)
        found = bool(returns(trainer.config, before)) if trainer.ctx.is_main else False
        if not Ranks.of(trainer.ctx).any_of([found])[0]:
            return "skip" if before is None else "stop"
        return "rewind" if self.memory.rewinds < self.settings.rewinds else "stop"

    def has_place(self, verdict: Verdict) -> bool:
        """Return True if a folder is left for an incident of this severity."""
        is_mild = MILD.issuperset(verdict.kinds)
        return self.count < (self.settings.keep // 2 if is_mild else self.settings.keep)

    def note(self, verdict: Verdict, numbers: Numbers, action: str, place: Path | None) -> None:
        """Add a record to metrics.jsonl."""
        record = {"kinds": verdict.kinds, "loss": numbers.loss, "grad_norm": numbers.norm, "action": action}
        at = {"step": self.trainer.step, "at": self.trainer.step + 1}
        self.reporter.event("incident", {**at, **record, "folder": place and str(place)})

    def write(
        self,
        verdict: Verdict,
        numbers: Numbers | None,
        lines: Sequence[str],
        findings: Findings | None,
        probe: Probe | None,
        more: dict[str, Any] | None = None,
    ) -> Path | None:
        """Write the folder of an incident, each rank its part; None if it cannot be. Collective."""
        trainer, ctx = self.trainer, self.trainer.ctx
        step, name = trainer.step + (probe is not None), None
        if ctx.is_main:
            with suppress(OSError):
                name = free_name(self.root, step)
                (self.root / name).mkdir(parents=True, exist_ok=True)
        name = Ranks.of(ctx).broadcast(name)
        if name is None:
            return None
        self.count, place = self.count + 1, self.root / str(name)
        rows = self.rows() if probe is not None else []
        try:
            if probe is not None:
                write_rank(place, ctx, probe)
                write_samples(place, ctx, self.batches)
            if ctx.is_main:
                record = {"step": step, "kinds": verdict.kinds, "action": self.settings.action}
                record |= self.facts(numbers) | ({"rows": rows} if rows else {}) | (more or {})
                write_record(place, {**record, **(findings.encode() if findings else {})}, lines)
        except OSError as error:
            self.reporter.problem(
                f"{error.filename or place}: {error.strerror}; the incident is recorded in part"
            )
        return place

    def rows(self) -> list[int]:
        """Return the rows of the training split that the step reads, on all ranks. Collective."""
        mine = [number for batch in self.batches for number in rows_of(batch)]
        return sorted({number for found in Ranks.of(self.trainer.ctx).all_gather(mine) for number in found})

    def facts(self, numbers: Numbers | None) -> dict[str, Any]:
        """Return what a replay needs, and what a reader asks first."""
        trainer, config = self.trainer, self.trainer.config
        saved = [path.name for step, path in checkpoints(folder(config)).items() if step <= trainer.step]
        first, is_finetuning = trainer.first_sample, FINETUNING in trainer.extra_state
        return {
            "numbers": {"loss": numbers.loss, "grad_norm": numbers.norm} if numbers else None,
            "exact": {"loss": numbers.loss.hex(), "grad_norm": numbers.norm.hex()} if numbers else None,
            "samples": None if is_finetuning else [first, config.train.global_batch_size],
            "finetuning": is_finetuning,
            "checkpoint": saved[-1] if saved else None,
            "layout": {"tp": trainer.ctx.tp.size, "pp": trainer.ctx.pp.size, "dp": trainer.ctx.dp.size},
            "memory": {**self.memory.encode(), "recent": []},
            "scaler": trainer.scaler.state(),
            "versions": versions(),
            "config": to_dict(config),
        }

    def is_finite(self) -> bool:
        """Return True if the numbers of the newest step are finite."""
        return not self.memory.since

    def stop_if_diverged(self, warmup_key: str) -> None:
        """Raise DivergedError once incident.patience steps in a row were not finite. Collective."""
        memory = self.memory
        if not memory.since or not 0 < self.settings.patience <= memory.streak:
            return
        text, good = diagnosis(self.trainer, list(self.batches), memory.since, warmup_key)
        record = {"step": self.trainer.step, "since": memory.since, "good": good and good.name}
        self.reporter.event("diverged", record)
        raise DivergedError(text)

    def end(self) -> None:
        """Look at the state after the update: compare replicas, and ranks' times, where due."""
        step = self.trainer.step
        if self.checks.every and step % self.checks.every == 0:
            self.compare_replicas()
        if (
            self.checks.ranks_every
            and step % self.checks.ranks_every == 0
            and self.trainer.ctx.world_size > 1
        ):
            self.compare_times(self.clock.gather(step))
        self.timeline.end()
        self.trainer.ctx.watch.traffic = None
        if self.profiler is not None and self.profiler.end():
            self.profiler = None

    def close(self) -> None:
        """End a profile that the last step leaves open."""
        if self.profiler is not None:
            self.profiler.close()

    def compare_replicas(self) -> None:
        """Report what is not equal on all ranks that must hold the same; stop if asked. Collective."""
        found = differences(self.trainer)
        if not found:
            return
        verdict = Verdict()
        verdict.add("replicas_differ", f"silent corruption: {'; '.join(found)}")
        text = self.report(verdict)
        if self.settings.action in ("stop", "rewind"):
            raise IncidentError(
                f"{text}; resume from a checkpoint before it (mlm ckpt inspect), on another host"
            )

    def report(self, verdict: Verdict, more: dict[str, Any] | None = None) -> str:
        """Record an incident of the state after a step, and return its line. Collective."""
        step, place = self.trainer.step, None
        if self.has_place(verdict):
            place = self.write(verdict, None, verdict.lines, None, None, more)
        text = f"step {step}: incident: {'; '.join(verdict.lines)}" + (f"; see {place}" if place else "")
        self.reporter.problem(text)
        record = {"kinds": verdict.kinds, "lines": verdict.lines, "folder": place and str(place)}
        self.reporter.event("incident", {"step": step, **record})
        return text

    def compare_times(self, times: Times) -> None:
        """Name the slowest rank; one far slower than the others is an incident. Collective."""
        self.reporter.note(times.line())
        self.reporter.event("ranks", {"step": self.trainer.step, **times.encode()})
        is_slow = times.factor >= self.checks.slow_factor
        if is_slow and times.slowest not in self.slow:
            verdict = Verdict()
            verdict.add("slow_rank", times.line())
            self.report(verdict, {"times": times.encode()})
        self.slow = {times.slowest} if is_slow else set()

    def rewind(self) -> None:
        """Return to the last good checkpoint and leave out the samples of the incident. Collective.

        From the same incident it goes one checkpoint further back.
        """
        trainer, memory, size = self.trainer, self.memory, self.trainer.config.train.global_batch_size
        first = trainer.consumed_samples - size  # the step was counted
        failed, self.rewinds = trainer.step, False
        with suppress(CheckpointError):  # a failed save was reported
            self.saver.finish()
        path = rewind(trainer, memory.limit(failed))
        assert path is not None, "action() has looked"
        self.remembered()
        for range_ in memory.ranges:
            self.memory.leave_out(*range_)
        self.memory.leave_out(first, size)
        self.memory.rewinds, self.memory.returned = memory.rewinds + 1, (failed, trainer.step)
        trainer.left_out = self.memory.ranges
        self.reporter.rewound(trainer.step)
        self.clock.start(trainer.step)
        line = f"returned from step {failed} to {path}; samples {first} to {first + size - 1} are left out"
        self.reporter.problem(line)
        self.reporter.event("rewound", {"step": trainer.step, "from": failed, "left_out": [first, size]})


def is_finite(numbers: Numbers) -> bool:
    """Return True if loss and gradient norm are finite."""
    return math.isfinite(numbers.loss) and math.isfinite(numbers.norm)


def done_about_it(action: str) -> str:
    """Return an action as a participle."""
    return {
        "log": "training continues",
        "skip": "its update is left out",
        "rewind": "training returns to a checkpoint",
        "stop": "training stops",
        "computed again": "the update is that of the second pass",
    }[action]
