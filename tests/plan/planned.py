"""Small models and runs that tests of plans share."""

from dataclasses import replace
from typing import Any

from mlm.data.config import DataConfig
from mlm.models.config import ModelConfig
from mlm.optim.config import PrecisionConfig
from mlm.plan.layer_counts import counts_of
from mlm.plan.memory import MemoryModel
from mlm.runs.config import PretrainConfig, TrainConfig
from tests.models.tiny import tiny

GPT2 = tiny(num_layers=7, hidden_size=48, max_positions=32, vocab_size=1000)
LLAMA = replace(
    tiny("llama", num_layers=4, hidden_size=48, max_positions=32, vocab_size=1000),
    ffn_hidden_size=40,
    options={"num_kv_heads": 1},
)


def planned_run(
    model: ModelConfig, seq: int | None = None, *, batch: int = 512, dtype: str = "bf16", **more: Any
) -> PretrainConfig:
    return PretrainConfig(
        name="planned",
        out="",
        model=model,
        data=DataConfig(kind="synthetic", seq_length=seq or model.max_positions),
        precision=PrecisionConfig(dtype=dtype),  # type: ignore[arg-type]
        train=TrainConfig(global_batch_size=batch),
        **more,
    )


def memory_of(model: ModelConfig, device: str = "gpu", reserved: float = 0.0) -> MemoryModel:
    return MemoryModel(counts_of(planned_run(model), device), reserved)
