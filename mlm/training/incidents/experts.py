"""The loads of experts, followed on the device and read where a step is logged."""

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
        shape = (model.num_layers, model.architecture.experts)
        table = torch.zeros(shape, dtype=torch.int64, device=trainer.ctx.device)
        if trainer.balance.counts is not None:  # a stage may have dense layers alone
            table[trainer.balance.layers] = trainer.balance.counts
        rows = all_reduce(table, trainer.ctx.pp).tolist()
        return ExpertLoads(dict(list(enumerate(rows))[model.architecture.dense_layers :]))

    def after_validation(self) -> None:
        """Record all loads, which `mlm report` draws. Collective over pp."""
        self.reporter.event("experts", {"step": self.trainer.step, "counts": self.read().counts})
