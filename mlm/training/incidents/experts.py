"""Loads of experts, counted on the device and read in logged steps.

Shapes: n layers of this rank that have experts, E experts.
"""

from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor

from mlm.models.shape import architecture_of
from mlm.parallel.collectives import all_reduce
from mlm.tracking.metrics import ExpertLoads
from mlm.tracking.reporter import Reporter
from mlm.training.observer import Observer, StepOutcome
from mlm.training.trainer import Trainer

LISTED = 8
"""Experts that a line names."""


class ExpertWatch(Observer):
    """Reads the loads of a trainer's experts in logged steps; validated steps record them.

    `report(kind, line)` reports an incident: experts that no token, or nearly every token, chose for
    check.expert_steps steps. `is_due()` is true after a logged step.
    """

    loads: ExpertLoads
    """Loads of the newest logged or validated step."""

    def __init__(
        self, trainer: Trainer, report: Callable[[str, str], object], is_due: Callable[[], bool]
    ) -> None:
        self.trainer, self.report, self.is_due = trainer, report, is_due
        self.steps, self.share = trainer.config.check.expert_steps, trainer.config.check.expert_share

    def on_run_start(self, trainer: Trainer, reporter: Reporter) -> None:
        self.reporter = reporter
        self.streaks: Tensor | int = 0
        """[n, 2, E] int64: newest steps in a row in which no token, or nearly every one, chose an expert."""
        self.reported = set[tuple[str, str]]()
        """Kinds and experts that were reported and still hold."""

    def after_step(self, outcome: StepOutcome) -> None:
        """Count the step, and where it is logged read and report. Collective then."""
        counts = self.trainer.balance.counts
        if counts is not None:
            per_token = architecture_of(self.trainer.config.model).experts_per_token
            most = max(self.share, per_token / counts.shape[-1]) * counts.sum(-1, keepdim=True) / per_token
            self.streaks = (self.streaks + 1) * torch.stack([counts == 0, counts > most], 1)
        if self.is_due():
            self.read()

    def after_validation(self) -> None:
        """Record all loads, which `mlm report` draws. Collective."""
        self.read()
        self.reporter.event("experts", {"step": self.trainer.step, **asdict(self.loads)})

    def read(self) -> None:
        """Read the newest step's loads, and report streaks. Collective; waits for the device."""
        ctx, model, balance = self.trainer.ctx, self.trainer.config.model, self.trainer.balance
        shape = (model.num_layers, 4, architecture_of(model).experts)
        table = torch.zeros(shape, dtype=torch.int64, device=ctx.device)
        if balance.totals is not None:  # a stage may have dense layers alone
            table[balance.layers, :2], table[balance.layers, 2:] = balance.totals, self.streaks
        rows = list(enumerate(all_reduce(table, ctx.pp).tolist()))[architecture_of(model).dense_layers :]
        self.loads = ExpertLoads({n: row[0] for n, row in rows}, {n: row[1] for n, row in rows})

        before, self.reported = self.reported, set()
        idle, crowded = "no token", f"more than {self.share:.0%} of the tokens"
        for kind, chosen, column in (("idle_expert", idle, 2), ("collapsed_router", crowded, 3)):
            names = [
                f"expert {expert} of layer {layer}"
                for layer, numbers in rows
                for expert, streak in enumerate(numbers[column])
                if 0 < self.steps <= streak
            ]
            self.reported |= {(kind, name) for name in names}
            if new := [name for name in names if (kind, name) not in before]:
                more = f" and {len(new) - LISTED} others" if len(new) > LISTED else ""
                self.report(kind, f"{chosen} for {self.steps} steps: {', '.join(new[:LISTED])}{more}")
