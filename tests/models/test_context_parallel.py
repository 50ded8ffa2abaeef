"""Context parallelism: what a rank keeps for backward."""

from dataclasses import replace

import pytest
import torch

from mlm.models.config import ModelConfig
from mlm.models.gpt2.model import GPT2
from mlm.models.llama.model import Llama
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.parallel.random import init_parameters
from tests.models.test_sequence_parallel import saved_bytes
from tests.ranks import run_on_ranks
from tests.slow import thinned

S, B = 128, 1
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=128,
    num_heads=4,
    max_positions=S,
    vocab_size=61,
    vocab_multiple=16,
    hidden_dropout=0.1,
    attention_dropout=0.0,
)
LLAMA = replace(MODEL, kind="llama", activation="silu", options={"num_kv_heads": 2}, hidden_dropout=0.0)


@pytest.mark.parametrize("model", thinned([MODEL, LLAMA], 2), ids=lambda model: model.kind)
@pytest.mark.parametrize("cp", [2, 4])
def test_activations_of_a_layer_fall_as_one_over_cp(cp: int, model: ModelConfig) -> None:
    """Bytes that autograd keeps of one layer: what a model of two keeps more than a model of one."""
    for split, whole in run_on_ranks(measure, model, cp=cp):
        assert split * cp == pytest.approx(whole, rel=0.01)


def measure(ctx: ParallelContext, model: ModelConfig) -> tuple[int, int]:
    split, whole = (kept(model, 2, cp) - kept(model, 1, cp) for cp in (ctx.cp, Axis("cp")))
    return split, whole


def kept(config: ModelConfig, layers: int, cp: Axis) -> int:
    kind = Llama if config.kind == "llama" else GPT2
    model = kind(replace(config, num_layers=layers), dtype=torch.bfloat16, cp=cp)
    init_parameters(model, 1, Axis("tp"))
    tokens = torch.zeros(B, S, dtype=torch.int64)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return saved_bytes(lambda: model(tokens, tokens, torch.tensor(1.0)), parameters)
