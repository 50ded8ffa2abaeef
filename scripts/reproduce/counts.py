"""Bytes that a layer keeps for backward, counted without its devices (`mlm plan dry-run`)."""

from collections.abc import Iterator, Mapping
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

MODEL = {"hidden_size": 6144, "num_heads": 64, "vocab_size": 51200}
"""A shape of 22 billion parameters, of 2,048 tokens."""
SCORED = {"hidden_size": 96, "num_heads": 16, "vocab_size": 1024}
"""A model of 128 tokens and the same a s / h, counted on a CPU: no GPU kernel keeps attention's scores."""


def kept_per_layer(parallel: Mapping[str, Any], *, has_scores: bool) -> float:
    """Bytes over s b h that a layer keeps: of three layers, less two layers'."""
    model, seq, batch = (SCORED, 128, 1) if has_scores else (MODEL, 2048, 4)
    kept = []
    for layers in (3, 2):
        config = PlanDryRunConfig(
            name="counted",
            model=ModelConfig(max_positions=seq, num_layers=layers, **model),
            parallel=ParallelConfig(dp=1, **parallel),
            precision=PrecisionConfig(dtype="bf16"),
            data=DataConfig(kind="synthetic", seq_length=seq),
            train=TrainConfig(global_batch_size=batch, micro_batch_size=batch),
        )
        events = dry_run(config, 0, device=torch.device("cpu") if has_scores else META).log.events
        kept.append(
            sum(block.size for block, change in events if change > 0 and block.purpose == ACTIVATIONS)
        )
    return (kept[0] - kept[1]) / (seq * batch * model["hidden_size"])


def count_kept(experiment: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each technique of table 2, with formula and count."""
    for name, run in experiment["runs"].items():
        formula = float(eval(run["formula"], {}, experiment["counted"]))
        counted = kept_per_layer(run["parallel"], has_scores=run.get("scores", False))
        yield {
            "run": name,
            "formula / sbh": run["formula"].replace("*", " "),
            "by the paper": formula,
            "counted / sbh": counted,
            "error": f"{counted / formula - 1:+.2%}",
        }
