"""An observer of a run that multiplies the weights for one step."""

from typing import Any

import torch

from mlm.tracking.reporter import Reporter
from mlm.training.observer import Observer
from mlm.training.trainer import Trainer

STEP, FACTOR = 5, 90.0
"""Step after which the weights are multiplied, until the next is done."""


class Spike(Observer):
    """Multiplies all weights before a step, and divides them after it."""

    def on_run_start(self, trainer: Trainer[Any], reporter: Reporter) -> None:
        self.trainer = trainer

    @torch.no_grad()
    def after_step(self, outcome: object) -> None:
        factor = {STEP: FACTOR, STEP + 1: 1 / FACTOR}.get(self.trainer.step, 1.0)
        for shard in self.trainer.shards:
            shard.parameter.mul_(factor)
