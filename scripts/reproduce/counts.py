"""Bytes that the trainer of one rank keeps, counted without its devices (`mlm plan dry-run`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mlm.data.config import DataConfig
from mlm.models.config import ModelConfig
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.plan.config import PlanDryRunConfig
from mlm.plan.dry_run_memory import ACTIVATIONS
from mlm.plan.dry_run_rank import META, dry_run
from mlm.runs.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a layout: sizes of each as configured."""

    model: Mapping[str, Any]
    seq: int
    parallel: Mapping[str, Any]
    micro_batch: int = 1
    global_batch: int = 1

    def config(self, **sizes: int) -> PlanDryRunConfig:
        """Return the settings of a dry run, with other sizes of the model where given."""
        return PlanDryRunConfig(
            name="counted",
            model=ModelConfig(**{"max_positions": self.seq, **self.model, **sizes}),
            parallel=ParallelConfig(dp=1, **self.parallel),
            precision=PrecisionConfig(dtype="bf16"),
            data=DataConfig(kind="synthetic", seq_length=self.seq),
            train=TrainConfig(global_batch_size=self.global_batch, micro_batch_size=self.micro_batch),
        )


def kept_per_layer(case: Case, *, on_cpu: bool = False) -> int:
    """Return the bytes that a micro-batch keeps for backward in a layer: of three layers, less those of two.

    `on_cpu` computes with real numbers, and keeps attention's scores, which no GPU kernel does.
    """
    device = torch.device("cpu") if on_cpu else META
    three, two = (
        sum(
            block.size
            for block, change in dry_run(case.config(num_layers=layers), 0, device=device).log.events
            if change > 0 and block.purpose == ACTIVATIONS
        )
        for layers in (3, 2)
    )
    return three - two
