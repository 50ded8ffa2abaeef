"""Gradient norms by layer: train.observers=[{use: mlm.training.gradient_norms:GradientNorms, every: 10}]."""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from mlm.config.fields import POSITIVE
from mlm.models.stage import parameter_home
from mlm.optim.clip import sum_of_squares
from mlm.parallel.collectives import all_reduce
from mlm.tracking.reporter import Reporter
from mlm.training.observer import Observer, StepOutcome


@dataclass(eq=False)
class GradientNorms(Observer):
    """Reports the gradient norm of each layer, the embedding and the head, before clipping.

    Their squares sum up to the square of `grad_norm`. A table that embedding and head share counts in the
    embedding. All ranks send one message for all layers.
    """

    every: Annotated[int, POSITIVE] = 100
    """Steps between reports."""

    def on_run_start(self, trainer: Any, reporter: Reporter) -> None:
        self.trainer, self.reporter = trainer, reporter
        layers = range(trainer.config.model.num_layers)
        self.homes: list[int | str] = ["first", *layers, "last"]
        self.squares: Tensor | None = None

    def before_update(self, parts: Tensor, grad_norm: Tensor) -> None:
        """Sum the squares by home, each element of the model on one rank: [homes]."""
        trainer = self.trainer
        if (trainer.step + 1) % self.every:
            return
        grads: dict[int | str, list[Tensor]] = {home: [] for home in self.homes}
        for shard in trainer.shards:
            grad = shard.parameter.grad
            if shard.is_stored(trainer.ctx.replicas) and grad is not None:
                grads[parameter_home(shard.name)].append(grad)
        squares = torch.stack([sum_of_squares(group, trainer.ctx.device) for group in grads.values()])
        self.squares = squares / trainer.scaler.scale.double() ** 2

    def after_step(self, outcome: StepOutcome) -> None:
        """Sum over all ranks and report; waits for the device."""
        if self.squares is None:
            return
        norms = all_reduce(self.squares.cpu(), self.trainer.ctx.world).sqrt().tolist()
        self.squares = None
        ends = {"first": "embedding", "last": "head"}
        names = [ends[home] if isinstance(home, str) else f"layers.{home}" for home in self.homes]
        values = {f"grad_norm/{name}": norm for name, norm in zip(names, norms, strict=True)}
        self.reporter.measured(self.trainer.step, values)
