"""The loads of experts: counted over the global batch, the same at every layout, and recorded."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlm.config.cli import main
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.tracking.metrics import ExpertLoads
from mlm.training.config import PretrainConfig
from mlm.training.incidents.experts import ExpertWatch
from mlm.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.slow import thinned
from tests.training.test_trainer import steps_of
from tests.verify.parity_layouts import Layout, parse_layouts

LAYOUTS = parse_layouts(
    "dp=2 ep=2 moe=sigmoid",
    "tp=2 sequence_parallel expert_tp=1 pp=2 micro_batches=4 moe=sigmoid",
    "cp=2 ep=2 micro_batches=4 moe=sigmoid",
)


def loads_of(ctx: ParallelContext, spec: PretrainConfig) -> ExpertLoads:
    """Those of the second step."""
    trainer = Trainer(spec, ctx)
    steps_of(trainer, 2)
    return ExpertWatch(trainer, SimpleNamespace()).read()  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", thinned(LAYOUTS, 2), ids=str)
def test_loads_are_those_of_the_global_batch_at_every_layout(layout: Layout) -> None:
    one = loads_of(shape_context(), Layout(moe="sigmoid", micro_batches=4).config())
    assert list(one.counts) == [1, 2, 3]  # the first layer has no experts
    assert {sum(counts) for counts in one.counts.values()} == {8 * layout.seq * 3}
    assert run_on_ranks(loads_of, layout.config(), **layout.sizes) == [one] * (
        layout.tp * layout.cp * layout.pp * layout.dp
    )


def test_a_run_records_the_loads_of_validated_steps(tmp_path: Path) -> None:
    words = "model=moe_tiny data=synthetic data.seq_length=16 train.steps=2 train.global_batch_size=2"
    words += f" train.micro_batch_size=2 train.validate_every=1 train.validate_batches=1 out={tmp_path}"
    assert main(["pretrain", *words.split()]) == 0
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps, loads = ([r for r in records if r["kind"] == kind] for kind in ("step", "experts"))
    assert [r["step"] for r in loads] == [1, 2]
    for step, record in zip(steps, loads, strict=True):
        assert {sum(counts) for counts in record["counts"].values()} == {2 * 16 * 2}
        largest = {layer: max(counts) / 16 for layer, counts in record["counts"].items()}  # the mean is 16
        assert step["imbalance_by_layer"] == pytest.approx(largest, abs=1e-4)
        assert step["imbalance"] == max(step["imbalance_by_layer"].values())
