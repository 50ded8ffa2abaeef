"""A run with experts continues at any layout: ep, expert_tp, tp, pp and zero may change at a checkpoint."""

from pathlib import Path

import pytest

from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.runs.config import PretrainConfig
from mlm.training.state import load
from mlm.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.slow import slow_but
from tests.training.saving import save
from tests.training.test_trainer import steps_of
from tests.verify.parity_layouts import Layout, parse_layouts

ONE = Layout(moe="sigmoid", micro_batches=4)
ROUTES = tuple(
    zip(
        parse_layouts(
            "dp=2 ep=2 moe=sigmoid",
            "dp=4 ep=2 zero=3 micro_batches=1 moe=sigmoid",
            "tp=2 sequence_parallel expert_tp=1 dp=2 ep=4 zero=2 moe=sigmoid",
            "pp=2 dp=2 ep=2 moe=sigmoid",
        ),
        parse_layouts(
            "tp=2 dp=2 ep=2 moe=sigmoid",
            "tp=2 sequence_parallel expert_tp=1 ep=2 micro_batches=4 moe=sigmoid",
            "dp=2 zero=3 moe=sigmoid",
            "moe=sigmoid micro_batches=4",
        ),
        strict=True,
    )
)


def train_and_save(ctx: ParallelContext, spec: PretrainConfig, out: Path) -> tuple[list[float], Path]:
    trainer = Trainer(spec, ctx)
    return steps_of(trainer, 2), save(trainer, out)


def load_and_train(ctx: ParallelContext, spec: PretrainConfig, path: Path) -> list[float]:
    trainer = Trainer(spec, ctx)
    load(trainer, path)
    return steps_of(trainer, 2)


@pytest.mark.parametrize(("first", "second"), slow_but({0}, ROUTES), ids=str)
def test_a_run_continues_at_another_layout_of_its_experts(
    tmp_path: Path, first: Layout, second: Layout
) -> None:
    """In float64 to 1e-10 of the losses of one process that never stopped; biases of routers included."""
    straight = steps_of(Trainer(ONE.config(), shape_context()), 4)
    begun, path = run_on_ranks(train_and_save, first.config(), tmp_path / "run", **first.sizes)[0]
    continued = run_on_ranks(load_and_train, second.config(), path, **second.sizes)[0]
    assert begun + continued == pytest.approx(straight, abs=1e-10)
