"""A tiny model with its reducer and optimizer, as the tests of sharded data parallelism use it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mlm.models.config import ModelConfig
from mlm.models.gpt2.model import GPT2
from mlm.models.stage import PipelineStage
from mlm.optim.adamw import build_optimizer, ensure_state
from mlm.optim.config import OptimizerConfig
from mlm.parallel.compute_state import DeferredWeightGrads
from mlm.parallel.config import ZeroReduce
from mlm.parallel.gradients import Reducer, build_reducer
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.random import init_parameters
from mlm.parallel.sharding import parameter_shards
from tests.models.tiny import tiny

VOCAB, SEQ, BATCH, LAYERS = 61, 5, 2, 2
# max_positions: over dp=4 its rows are 2, 2, 1 and none
MODEL = tiny(num_layers=LAYERS, hidden_size=12, num_heads=2, max_positions=SEQ, vocab_size=VOCAB)
SCALE = torch.tensor(0.1, dtype=torch.float64)
MICRO_BATCHES = 3
EXACT = {"rtol": 0.0, "atol": 1e-10}


class Rank:
    """A model with its reducer, shards and optimizer, as a trainer has them."""

    def __init__(
        self,
        ctx: ParallelContext,
        zero: int = 0,
        *,
        dtype: torch.dtype = torch.float64,
        master: torch.dtype = torch.float64,
        recompute: str = "none",
        stage: PipelineStage | None = None,
        reduce: ZeroReduce = "last",
        late_weights: bool = False,
        model: ModelConfig = MODEL,
    ) -> None:
        self.ctx = ctx
        self.model = GPT2(model, tp=ctx.tp, dtype=dtype, recompute=recompute, stage=stage).to(master)
        init_parameters(self.model, 7, ctx.tp)
        self.reducer: Reducer = build_reducer(
            self.model,
            ctx.dp,
            zero=zero,
            compute_dtype=dtype,
            units=self.model.layers.values(),
            methods=("losses",),
            reduce=reduce,
            late_weights=late_weights,
        )
        self.shards = tuple(parameter_shards(self.model, ctx.tp))
        self.optimizer = build_optimizer(self.shards, OptimizerConfig(lr=1e-2))
        ensure_state(self.optimizer)

    def loss(self, sample: Tensor) -> Tensor:
        out: Tensor = self.model(sample[:, :-1], sample[:, 1:], SCALE)
        return out

    def accumulate(self, samples: Sequence[Tensor]) -> float:
        """Gradients of the sum of the losses of this rank's micro-batches, summed over dp; their loss."""
        total = 0.0
        self.reducer.start_step()
        for i, sample in enumerate(samples):
            self.reducer.sync = i == len(samples) - 1
            loss = self.loss(sample)
            loss.backward()
            total += loss.item()
        self.reducer.finish()
        return total


def samples_of(step: int, dp_rank: int) -> Tensor:
    """Token ids [micro-batch, B, S + 1] of a data-parallel rank."""
    generator = torch.Generator().manual_seed(100 * step + dp_rank)
    return torch.randint(0, VOCAB, (MICRO_BATCHES, BATCH, SEQ + 1), generator=generator)


def all_samples(ctx: ParallelContext, step: int) -> list[Tensor]:
    return [x for rank in range(ctx.dp.size) for x in samples_of(step, rank)]


def assert_gradients_equal(mine: Rank, one: Rank) -> None:
    """Gradients of this rank's region of each parameter are those of the unsharded model `one`."""
    full = {s.name: s.without_padding(s.parameter.grad) for s in one.shards}
    for s in mine.shards:
        grad = s.without_padding(s.parameter.grad)
        region = tuple(slice(o, o + n) for o, n in zip(s.offset, grad.shape, strict=True))
        torch.testing.assert_close(grad, full[s.name][region], msg=s.name, **EXACT)


def defer_weight_grads(model: GPT2) -> DeferredWeightGrads:
    """Let backward passes of the model leave their weight gradients in what is returned."""
    deferred = DeferredWeightGrads()
    deferred.open = True
    for module in model.modules():
        if hasattr(module, "compute"):
            module.compute.deferred = deferred
    return deferred
