"""The loads of experts, followed on the device and read where a step is logged."""

from dataclasses import asdict

import torch

from mlm.parallel.collectives import all_reduce
from mlm.tracking.metrics import ExpertLoads
from mlm.tracking.reporter import Reporter
from mlm.training.observer import Observer
from mlm.training.trainer import Trainer


class ExpertWatch(Observer):
    """Reads the loads of a trainer's experts, and records those of validated steps."""

    def __init__(self, trainer: Trainer, reporter: Reporter) -> None:
        self.trainer, self.reporter = trainer, reporter

    def read(self) -> ExpertLoads:
        """Loads in the newest step, of all stages' layers. Collective over pp; waits for the device."""
        trainer, model = self.trainer, self.trainer.config.model
        shape = (model.num_layers, 2, model.architecture.experts)
        table = torch.zeros(shape, dtype=torch.int64, device=trainer.ctx.device)
        if trainer.balance.totals is not None:  # a stage may have dense layers alone
            table[trainer.balance.layers] = trainer.balance.totals
        rows = list(enumerate(all_reduce(table, trainer.ctx.pp).tolist()))[model.architecture.dense_layers :]
        return ExpertLoads({n: counts for n, (counts, _) in rows}, {n: dropped for n, (_, dropped) in rows})

    def after_validation(self) -> None:
        """Record all loads, which `mlm report` draws. Collective over pp."""
        self.reporter.event("experts", {"step": self.trainer.step, **asdict(self.read())})
