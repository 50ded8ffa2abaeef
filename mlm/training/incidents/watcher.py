"""Judges every step of a run, records incidents and acts upon them.

The folder of an incident is out/incidents/step-00001234:

    incident.json      settings, versions, numbers, samples, first bad tensor, last checkpoint
    README.md          the same in a few lines
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.folders import step_name
from mlm.checkpoint.native.run_state import FINETUNING, INCIDENTS, LINEAGE
from mlm.checkpoint.native.save_load import CheckpointError
from mlm.config.build import to_dict
from mlm.launch.doctor.findings import versions
from mlm.optim.adamw import can_defer
from mlm.parallel.collectives import ToHost
from mlm.tracking.history import replace_nonfinite
from mlm.tracking.reporter import Reporter
from mlm.training.incidents.comparisons import replica_differences
from mlm.training.incidents.numbers import (
    MOST_RANGES,
    StepNumbers,
    decode,
    exceeds_limits,
    shared_numbers,
    sum_numbers,
)
from mlm.training.incidents.probe import WEIGHT, StepProbe, describe_places
from mlm.training.observer import DeferredCheck, Observer, RewindRequested, StepOutcome
from mlm.training.resume import rewind, rewind_candidates
from mlm.training.saver import Saver
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError
from mlm.util.files import dump_json, write_atomic

FOLDER, FILE, REPORT = "incidents", "incident.json", "README.md"
FORMAT = 1
DEFERRING = ("cuda",)
"""Devices that apply an update while the host reads the step's numbers."""
MILD = frozenset(("loss_outlier", "gradient_outlier", "slow_rank", "idle_expert", "collapsed_router"))
"""Incidents that chance or load may cause."""
OUTCOMES = {
    "log": "training continues",
    "skip": "its update is left out",
    "rewind": "training returns to a checkpoint",
    "stop": "training stops",
    "computed again": "the update is that of the second pass",
}
"""Actions in words."""
SUSPECT_HARDWARE = "if it comes back, test memory and processors"
OTHER_HOST = "; resume from a checkpoint before it (mlm ckpt inspect), on another host"


class IncidentError(UserError):
    """An incident that ends the run: incident.action=stop asks for it, or it has diverged."""

    exit_code = 1


@dataclass
class IncidentReasons:
    """Why a step is an incident: kinds, and a line each."""

    kinds: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def add(self, kind: str, line: str) -> None:
        self.kinds.append(kind)
        self.lines.append(line)

    def text(self, folder: Path | None) -> str:
        return "; ".join(self.lines) + (f"; see {folder}" if folder else "")


class Incidents(Observer):
    """Judges the steps of a trainer before their updates.

    A normal step costs one small all-reduce, on GPUs two over each axis. All decisions follow from numbers
    that all ranks share.
    """

    def __init__(self, trainer: Trainer, out: Path, reporter: Reporter, saver: Saver) -> None:
        self.trainer, self.reporter, self.saver = trainer, reporter, saver
        self.settings, self.checks = trainer.config.incident, trainer.config.check
        self.root = out / FOLDER
        self.load_state()
        self.batches: Sequence[Any] = ()
        self.rewinds = False
        """True if the newest step asks for a rewind."""
        self.differences: list[str] = []
        """Tensors and counters that are not equal on all replicas, in words."""
        self.end: StepNumbers | None = None
        """Numbers of the weights that the run ends with."""
        existing = len(list(self.root.glob("step-*"))) if trainer.ctx.is_main else 0
        self.count = int(Ranks.of(trainer.ctx).broadcast(existing))
        self.defers = trainer.ctx.device.type in DEFERRING and can_defer(
            trainer.optimizer, trainer.shards[0].parameter.dtype
        )

    def load_state(self) -> None:
        self.state = decode(self.trainer.extra_state.get(INCIDENTS), self.settings.window)
        self.trainer.excluded_samples = self.state.ranges
        self.note_doubt()

    def before_save(self) -> None:
        self.check_replicas()
        self.trainer.extra_state[INCIDENTS] = self.state.encode()

    def on_step_start(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def before_update(self, parts: Tensor, grad_norm: Tensor) -> DeferredCheck | bool:
        """Judge the step: at once, or while the device applies the update. Collective."""
        if not self.defers:
            return self.judge(parts, grad_norm)
        numbers = sum_numbers(self.trainer, parts, grad_norm)
        hold = exceeds_limits(numbers, self.state.recent.limits(self.settings.threshold))
        numbers_on_host = ToHost(torch.cat([numbers, hold.view(1)]))

        def decide() -> bool | None:
            loss, norm, is_held = numbers_on_host.read()
            if is_held:
                return not self.judge(parts, grad_norm)
            self.note_finite(loss)
            self.state.recent.add(loss, norm)
            return None

        return DeferredCheck(hold, decide)

    def judge(self, parts: Tensor, norm: Tensor) -> bool:
        """Decide on a step before its update; True skips the update. Collective.

        The first step of an incident is computed again, to see if its error came from hardware. Gradients,
        `parts` and `norm` are then of the second pass, and so is the update if that pass is normal.
        """
        trainer, second_pass = self.trainer, None
        numbers = shared_numbers(trainer, parts, norm)
        reasons = self.judge_numbers(numbers)
        if reasons.kinds and not self.state.nonfinite_steps:
            parts.copy_(trainer.compute_gradients(self.batches))
            norm.copy_(trainer.gradient_norm())
            second_pass = shared_numbers(trainer, parts, norm)
            if not second_pass.are_finite or self.judge_numbers(second_pass).kinds:
                second_pass = None
                self.compare_replicas()
        if reasons.kinds and second_pass is None and self.differences:
            reasons.add("replicas_differ", f"silent corruption: {'; '.join(self.differences)}")
        accepted = numbers if second_pass is None else second_pass
        self.count_nonfinite(accepted, reasons)
        self.state.recent.add(accepted.loss, accepted.norm)
        return bool(reasons.kinds) and self.act(reasons, numbers, second_pass)

    def judge_numbers(self, numbers: StepNumbers) -> IncidentReasons:
        """Return reasons for numbers that are not finite or far from recent ones."""
        scaler, settings, reasons = self.trainer.scaler, self.settings, IncidentReasons()
        floor = self.trainer.config.precision.min_loss_scale
        if not math.isfinite(numbers.norm) and scaler.dynamic and numbers.scale > floor:
            return reasons  # the loss scale is halved, as usual
        if not numbers.are_finite:
            if scaler.dynamic:
                reasons.add("loss_scale_at_floor", f"overflow at the smallest loss scale, {floor:g}")
            if not math.isfinite(numbers.loss):
                reasons.add("loss_not_finite", f"loss {numbers.loss}")
            if not math.isfinite(numbers.norm):
                reasons.add("gradient_not_finite", f"gradient norm {numbers.norm}")
        elif settings.threshold:
            limits = self.state.recent.limits(settings.threshold)
            values = {"loss": numbers.loss, "gradient norm": numbers.norm}
            for (name, value), limit in zip(values.items(), limits, strict=True):
                if value >= limit:
                    line = f"{name} {value:.6g} is at least {limit:.6g}, which chance reaches once in"
                    reasons.add(f"{name.split()[0]}_outlier", f"{line} {settings.threshold:,.9g} steps")
        return reasons

    def count_nonfinite(self, numbers: StepNumbers, reasons: IncidentReasons) -> None:
        """Count steps in a row that are not finite, without overflows that halve the loss scale."""
        state, patience = self.state, self.settings.patience
        if numbers.are_finite:
            self.note_finite(numbers.loss)
            return
        state.first_nonfinite_step = state.first_nonfinite_step or self.trainer.step + 1
        self.note_doubt()
        if reasons.kinds:
            state.nonfinite_steps += 1
            if state.nonfinite_steps == patience:
                reasons.add("exhausted", f"{patience} steps in a row without finite gradients")

    def note_finite(self, loss: float) -> None:
        self.state.first_nonfinite_step = self.state.nonfinite_steps = 0
        self.state.judge_loss(loss, self.trainer.step + 1, is_repeated=self.end is not None)
        self.note_doubt()

    def note_doubt(self) -> None:
        """Report to the trainer if its weights are finite, and since when they are suspect."""
        state = self.state
        self.trainer.is_finite = not state.first_nonfinite_step
        self.trainer.wrong_since = min(filter(None, (state.doubt, state.suspect)), default=None)

    def judge_end(self) -> None:
        """Judge the weights after the last update, by the batches of the last step. Collective."""
        trainer = self.trainer
        parts = trainer.compute_gradients(self.batches)
        self.end = numbers = shared_numbers(trainer, parts, trainer.gradient_norm())
        # Gradients that overflow once at a dynamic loss scale are usual.
        if trainer.scaler.dynamic and not self.state.nonfinite_steps:
            numbers = replace(numbers, norm=0.0)
        self.count_nonfinite(numbers, IncidentReasons())

    def act(self, reasons: IncidentReasons, numbers: StepNumbers, second_pass: StepNumbers | None) -> bool:
        """Record an incident and follow incident.action; return True to skip the update.

        `second_pass` is a normal second pass: then no sample is to blame, and none is excluded.
        """
        step, details = self.trainer.step + 1, dict[str, Any]()
        action = "computed again" if second_pass else self.action()
        if second_pass is not None:
            state = "normal" if numbers.are_finite else "finite"
            reasons.add(
                "transient", f"computed again: {state} ({second_pass}); not in the data; {SUSPECT_HARDWARE}"
            )
            action = "stop" if self.settings.action == "stop" else action
            details = {"second_pass": {"loss": second_pass.loss, "grad_norm": second_pass.norm}}
        elif self.keeps_folder(reasons):
            _, places = StepProbe(self.trainer).run(self.batches)
            if not self.differences or (places["first_not_finite"] or {}).get("tensor") == WEIGHT:
                reasons.lines += describe_places(places)
                details = dict(places)
        folder = self.write(reasons, details, numbers)
        text = f"step {step}: incident: {reasons.text(folder)}"
        ends_run = "exhausted" in reasons.kinds and action != "rewind"  # DivergenceStop ends the run
        self.reporter.problem(f"{text} ({OUTCOMES['stop' if ends_run else action]})")
        if action == "stop":
            text += f"; stopped as incident.action={self.settings.action} asks"
            if self.settings.action == "rewind" and not self.differences:
                if self.state.rewinds >= self.settings.rewinds:
                    text += f": training has returned incident.rewinds={self.settings.rewinds} times"
                else:
                    text += ": no earlier checkpoint is left to return to"
                text += "; resume with a lower optimizer.lr or incident.action=skip"
            raise IncidentError(text + (OTHER_HOST if self.differences else ""))
        if action == "skip":
            self.state.steps.append(step)
        self.rewinds = action == "rewind"
        if not self.rewinds:
            record = {"loss": numbers.loss, "grad_norm": numbers.norm, "action": action}
            self.record_event(reasons, {"at": step, **record}, folder)
        return action not in ("log", "computed again")

    def action(self) -> str:
        """Return incident.action, or the nearest possible one. Collective."""
        if self.settings.action != "rewind":
            return self.settings.action
        if self.differences:
            return "stop"
        before = self.state.rewind_below(self.trainer.step + 1)
        if not rewind_candidates(self.trainer, before):
            return "skip" if before is None else "stop"
        return "rewind" if self.state.rewinds < self.settings.rewinds else "stop"

    def report(self, kind: str, line: str, details: dict[str, Any] | None = None) -> str:
        """Record an incident of the state after a step, and return its line. Collective."""
        reasons = IncidentReasons([kind], [line])
        folder = self.write(reasons, details or {})
        text = f"step {self.trainer.step}: incident: {reasons.text(folder)}"
        self.reporter.problem(text)
        self.record_event(reasons, {"lines": [line]}, folder)
        return text

    def record_event(self, reasons: IncidentReasons, record: dict[str, Any], folder: Path | None) -> None:
        common = {"step": self.trainer.step, "kinds": reasons.kinds, "folder": folder and str(folder)}
        self.reporter.event("incident", {**common, **record})

    def keeps_folder(self, reasons: IncidentReasons) -> bool:
        """Return True if incident.keep leaves a folder for an incident of this severity."""
        is_mild = MILD.issuperset(reasons.kinds)
        return self.count < (self.settings.keep // 2 if is_mild else self.settings.keep)

    def write(
        self, reasons: IncidentReasons, details: dict[str, Any], numbers: StepNumbers | None = None
    ) -> Path | None:
        """Write the folder of an incident; None if there are too many, or it cannot be made. Collective.

        `numbers` are of a step before its update, None for an incident of the state after it.
        """
        if not self.keeps_folder(reasons):
            return None
        ctx, ranks = self.trainer.ctx, Ranks.of(self.trainer.ctx)
        step = self.trainer.step + (numbers is not None)
        name = first = step_name(step)
        for number in count(2) if ctx.is_main else ():
            try:
                (self.root / name).mkdir(parents=True)
                break
            except FileExistsError:
                name = f"{first}-{number}"
            except OSError:  # full or read-only disk
                name = ""
                break
        name = str(ranks.broadcast(name))
        if not name:
            return None
        self.count, folder = self.count + 1, self.root / name
        record = {"format": FORMAT, "step": step, "kinds": reasons.kinds, "action": self.settings.action}
        record |= self.facts(numbers)
        if numbers is not None:
            # rows of the training split in this step on all ranks, if batches hold their numbers
            local_rows = [row for batch in self.batches for row in getattr(batch, "examples", ())]
            if rows := sorted({row for local in ranks.all_gather(local_rows) for row in local}):
                record["rows"] = rows
        try:
            if ctx.is_main:
                content = cast(Mapping[str, Any], replace_nonfinite({**record, **details}))
                write_atomic(folder / FILE, dump_json(content))
                title = f"# Incident at step {step}: {', '.join(reasons.kinds)}\n\n"
                write_atomic(folder / REPORT, (title + "".join(f"- {s}\n" for s in reasons.lines)).encode())
        except OSError as error:
            where = error.filename or folder
            self.reporter.problem(f"{where}: {error.strerror}; the incident is recorded in part")
        return folder

    def facts(self, numbers: StepNumbers | None) -> dict[str, Any]:
        trainer, ctx = self.trainer, self.trainer.ctx
        ancestry, samples = self.saver.ancestry, trainer.next_samples
        is_finetuning = FINETUNING in trainer.extra_state
        return {
            "numbers": {"loss": numbers.loss, "grad_norm": numbers.norm} if numbers else None,
            "exact": {"loss": numbers.loss.hex(), "grad_norm": numbers.norm.hex()} if numbers else None,
            "samples": None if is_finetuning else [samples.start, len(samples)],
            "finetuning": is_finetuning,
            "checkpoint": next((step_name(save.step) for save in ancestry.lineage.ancestors[-1:]), None),
            LINEAGE: ancestry.encode(),
            "layout": {"tp": ctx.tp.size, "pp": ctx.pp.size, "dp": ctx.dp.size},
            "memory": {**self.state.encode(), "recent": []},
            "scaler": trainer.scaler.state(),
            "versions": versions(),
            "config": to_dict(trainer.config),
        }

    def after_step(self, outcome: StepOutcome) -> None:
        """Rewind if the step requested it; compare replicas when due. Collective."""
        if self.rewinds:
            raise RewindRequested(self.rewind)
        if self.checks.every and self.trainer.step % self.checks.every == 0:
            self.check_replicas()

    def compare_replicas(self) -> None:
        """Find weights and moments that differ between replicas. Collective."""
        self.differences = replica_differences(self.trainer)
        if self.differences:
            self.state.differ = self.state.differ or self.trainer.step + 1
            self.note_doubt()

    def check_replicas(self) -> None:
        """Report replicas that differ, once. Collective."""
        if self.differences or not self.checks.every:
            return
        self.compare_replicas()
        if self.differences:
            text = self.report("replicas_differ", f"silent corruption: {'; '.join(self.differences)}")
            if self.settings.action in ("stop", "rewind"):
                raise IncidentError(text + OTHER_HOST)

    def rewind(self) -> None:
        """Return to the last good checkpoint and exclude the samples of the incident. Collective.

        A second rewind from the same incident goes one checkpoint further back.
        """
        trainer, old_state, samples = self.trainer, self.state, self.trainer.newest_samples
        failed, self.rewinds = trainer.step, False
        with suppress(CheckpointError):  # a failed save was reported
            self.saver.finish()
        path = rewind(trainer, old_state.rewind_below(failed))
        assert path is not None, "checked by action()"
        self.load_state()
        # The checkpoint knows nothing of incidents after it.
        ranges = {*self.state.ranges, *old_state.ranges, (samples.start, len(samples))}
        self.state.ranges = tuple(sorted(ranges))[:MOST_RANGES]
        self.state.rewinds, self.state.last_rewind = old_state.rewinds + 1, (failed, trainer.step)
        trainer.excluded_samples = self.state.ranges
        self.reporter.rewound(trainer.step)
        excluded = f"samples {samples.start} to {samples.stop - 1} are left out"
        self.reporter.problem(f"returned from step {failed} to {path}; {excluded}")
        event = {"step": trainer.step, "from": failed, "left_out": [samples.start, len(samples)]}
        self.reporter.event("rewound", event)
