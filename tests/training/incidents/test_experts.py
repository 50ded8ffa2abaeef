"""The loads of experts: counted over the global batch, the same at every layout, recorded and judged."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mlm.cli import main
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.runs.config import CheckConfig, PretrainConfig
from mlm.tracking.metrics import ExpertLoads
from mlm.training.incidents.experts import ExpertWatch
from mlm.training.incidents.probe import describe_place
from mlm.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.training.incidents.test_places import found
from tests.training.records import records
from tests.training.test_trainer import steps_of
from tests.verify.parity_layouts import MIXTURES, Layout, parse_layouts

LAYOUTS = parse_layouts(
    "dp=2 ep=2 moe=sigmoid", "tp=2 sequence_parallel cp=2 ep=2 micro_batches=4 moe=capacity"
)


def watch(trainer: Trainer, report: Callable[[str, str], object], *, is_due: bool = True) -> ExpertWatch:
    watching = ExpertWatch(trainer, report, lambda: is_due)
    watching.on_run_start(trainer, SimpleNamespace())  # type: ignore[arg-type]
    return watching


BROKEN, PLANTED = parse_layouts("pp=2 dp=2 ep=2 moe=softmax", "dp=4 ep=2 zero=3 micro_batches=1 moe=softmax")


def loads_of(ctx: ParallelContext, spec: PretrainConfig) -> ExpertLoads:
    """Those of the second step."""
    trainer = Trainer(spec, ctx)
    steps_of(trainer, 2)
    watching = watch(trainer, print)
    watching.read()
    return watching.loads


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_loads_are_those_of_the_global_batch_at_every_layout(layout: Layout) -> None:
    one = loads_of(shape_context(), Layout(moe=layout.moe, micro_batches=4).config())
    assert list(one.counts) == [1, 2, 3]  # the first layer has no experts
    per_token = int(MIXTURES[str(layout.moe)]["experts_per_token"])
    assert {sum(counts) for counts in one.counts.values()} == {8 * layout.seq * per_token}
    assert (one.dropped_share > 0) == (layout.moe == "capacity")
    assert run_on_ranks(loads_of, layout.config(), **layout.sizes) == [one] * (
        layout.tp * layout.cp * layout.pp * layout.dp
    )


def lines_of_broken_router(ctx: ParallelContext, spec: PretrainConfig) -> list[list[tuple[str, str]]]:
    """Reports after each step in which all experts of layer 2 are equal, but in the fourth."""
    trainer = Trainer(spec, ctx)
    reported, by_step = list[tuple[str, str]](), list[list[tuple[str, str]]]()
    watching = watch(trainer, lambda kind, line: reported.append((kind, line)))
    for step in range(6):
        for layer, router in zip(trainer.balance.layers, trainer.balance.routers, strict=True):
            if layer == 2:
                router.weight.data.zero_()  # ties go to the lower numbers
                if step == 3:
                    router.weight.data.normal_(generator=torch.Generator().manual_seed(1))
        steps_of(trainer, 1)
        watching.after_step(None)  # type: ignore[arg-type]
        by_step.append(reported.copy())
        reported.clear()
    return by_step


def test_a_router_that_collapses_and_its_idle_experts_are_named_once() -> None:
    """After two steps in a row, again after it has recovered; the same line on every rank."""
    spec = replace(BROKEN.config(), check=CheckConfig(expert_steps=2))
    lines = [
        ("idle_expert", "no token for 2 steps: expert 2 of layer 2, expert 3 of layer 2"),
        (
            "collapsed_router",
            "more than 90% of the tokens for 2 steps: expert 0 of layer 2, expert 1 of layer 2",
        ),
    ]
    for by_step in run_on_ranks(lines_of_broken_router, spec, **BROKEN.sizes):
        assert by_step == [[], lines, [], [], [], lines]


def first_bad_of(ctx: ParallelContext, spec: PretrainConfig, what: str) -> dict[str, Any]:
    """The place of a NaN that expert 3 of layer 2 has in its weight, or gets in its gradient."""
    trainer = Trainer(spec, ctx)
    compute_gradients = trainer.compute_gradients

    def plant(_: Any = None) -> None:
        for shard in trainer.shards:
            row = 3 - shard.offset[0]
            if shard.name == "layers.2.mlp.experts.down" and 0 <= row < len(shard.parameter):
                held = shard.parameter.data if what == "weight" else shard.parameter.grad
                held[row, 1, 0] = float("nan")

    def spoil(batches: Any, objective: Any = None) -> Tensor:
        parts = compute_gradients(batches, objective)
        plant()
        return parts

    if what == "weight gradient":
        trainer.compute_gradients = spoil  # type: ignore[method-assign]
    place: dict[str, Any] = found(trainer, plant if what == "weight" else lambda _: None)["first_not_finite"]
    return place


@pytest.mark.parametrize("what", ["weight", "weight gradient"])
def test_an_expert_that_is_not_finite_is_named(what: str) -> None:
    for place in run_on_ranks(first_bad_of, PLANTED.config(), what, **PLANTED.sizes):
        assert place["expert"] == 3
        assert f"the {what} of layers.2.mlp.experts.down, expert 3, on rank" in describe_place(place)


def test_a_run_records_loads_and_idle_experts(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """64 choices of 80 experts leave some without any."""
    words = "model=moe_tiny model.options.num_experts=80 model.options.expert_ffn_size=8 check.expert_steps=2"
    words += " data=synthetic data.seq_length=16 train.steps=2 train.global_batch_size=2"
    words += f" train.micro_batch_size=2 train.validate_every=1 train.validate_batches=1 out={tmp_path}"
    assert main(["pretrain", *words.split()]) == 0
    steps, loads = (records(tmp_path, kind) for kind in ("step", "experts"))
    assert [r["step"] for r in loads] == [1, 2]
    for step, record in zip(steps, loads, strict=True):
        assert {sum(counts) for counts in record["counts"].values()} == {2 * 16 * 2}
        largest = {layer: max(counts) * 80 / 64 for layer, counts in record["counts"].items()}
        assert step["imbalance_by_layer"] == pytest.approx(largest, abs=1e-4)
        assert step["imbalance"] == max(step["imbalance_by_layer"].values())
    (incident,) = records(tmp_path, "incident")
    assert incident["kinds"] == ["idle_expert"]
    assert "step 2: incident: no token for 2 steps: expert " in capfd.readouterr().err
