"""log.timeline_every: computations of a pipeline's step, measured."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.pipeline.actions import Action
from mlm.tracking.config import LogConfig
from mlm.tracking.page.pipeline import RunPlan, draw_schedule
from mlm.tracking.page.runs import read_run
from mlm.tracking.reporter import Reporter
from mlm.training.config import PretrainConfig
from mlm.training.incidents.timing import Timeline, align_stages, pipeline_line
from mlm.training.observer import Observers
from mlm.training.pretrain.run import run
from mlm.training.trainer import Trainer
from tests.ranks import command, run_on_ranks
from tests.training.records import records
from tests.training.test_gradient_sums import MICRO_BATCHES, batches
from tests.training.test_trainer import config


class Kept:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Mapping[str, Any]]] = []

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        self.events.append((kind, fields))

    def note(self, text: str) -> None:
        self.events.append(("note", {"text": text}))


def spec_of(parallel: ParallelConfig) -> PretrainConfig:
    spec = config(global_batch_size=2 * MICRO_BATCHES, micro_batch_size=2)
    model = replace(spec.model, num_layers=4)
    return replace(spec, model=model, parallel=parallel, log=LogConfig(timeline_every=2))


def timed_steps(ctx: ParallelContext, spec: PretrainConfig) -> tuple[list[Any], list[str]]:
    """Reports on three steps, of which the second is measured, and the names of this rank's actions.

    Steps that are measured have the gradients of those that are not.
    """
    trainer, other = Trainer[Any](spec, ctx), Trainer[Any](spec, ctx)
    kept = Kept()
    timeline = Timeline(trainer, cast(Reporter, kept))
    mine = batches(ctx.dp.rank, ctx.dp.size)
    trainer.observers = Observers([timeline])
    for step in (1, 2, 3):
        timeline.on_step_start(mine)
        if step == 2:
            with trainer.unobserved():  # computed twice, measured once
                trainer.compute_gradients(mine)
        outcome = trainer.train_step(mine)
        timeline.after_step(outcome)
        assert torch.equal(outcome.grad_norm, other.train_step(mine).grad_norm)
    actions = [i for i in trainer.model.instructions(len(mine), train=True) if isinstance(i, Action)]
    return kept.events, [str(action) for action in actions]


@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(pp=2, dp=2), ParallelConfig(pp=2, vp=2), ParallelConfig(pp=2, pipeline="zb_h1")],
    ids=["1f1b, dp", "interleaved", "zero bubble"],
)
def test_a_record_has_each_computation_after_what_it_needs(parallel: ParallelConfig) -> None:
    each = run_on_ranks(timed_steps, spec_of(parallel), pp=2, dp=parallel.dp or 1)
    assert [events for events, _ in each[1:]] == [[]] * (len(each) - 1)
    (kind, record), (_, note) = each[0][0]
    assert (kind, record["step"], record["aligned"]) == ("timeline", 2, "clock")
    assert note["text"].startswith("step 2: pipeline ")
    plans = [actions for _, actions in each[:: parallel.dp or 1]]
    assert [[name(row) for row in rows] for rows in record["stages"]] == plans
    ends, inputs = dict[tuple[str, int], float](), dict[tuple[str, int], float]()
    for rank, rows in enumerate(record["stages"]):
        previous = 0.0
        for op, chunk, batch, begin, arrived, end in rows:
            assert previous <= begin <= arrived < end
            previous = end
            place = f"{op}{batch}", chunk * 2 + rank
            ends[place], inputs[place] = end, arrived
    last = 2 * parallel.vp - 1
    for (action, stage), arrived in inputs.items():
        before = stage - 1 if action[0] == "F" else stage + 1
        if action[0] != "W" and 0 <= before <= last:
            assert ends[action, before] <= arrived


def name(row: list[Any]) -> str:
    op, chunk, micro_batch = row[:3]
    return f"{op}{micro_batch}" + (f".{chunk}" if chunk else "")


def test_times_of_one_host_are_of_its_clock_and_those_of_several_begin_at_the_barrier() -> None:
    rows = [["F", 0, 0, 1.0, 1.5, 2.0]]
    found = [["a", 100.0, rows], ["a", 100.25, None], ["a", 100.5, rows]]
    late = [["F", 0, 0, 500.0, 500.5, 501.0]]
    first = [["F", 0, 0, 0.0, 0.5, 1.0]]
    assert align_stages(found) == {"aligned": "clock", "stages": [first, late]}
    apart = [["a", 100.0, rows], ["b", 100.25, None], ["b", 100.5, rows]]
    assert align_stages(apart) == {"aligned": "barrier", "stages": [first, first]}
    assert pipeline_line([first, late], 0.5).startswith("pipeline 501 ms, bubble 100100.0% ")


def test_a_run_is_drawn_as_measured(tmp_path: Path) -> None:
    spec = spec_of(ParallelConfig(pp=2))
    spec = replace(spec, out=str(tmp_path / "run"), train=replace(spec.train, steps=3, validate_every=0))
    run_on_ranks(command, run, spec, pp=2)
    assert [each["step"] for each in records(tmp_path / "run", "timeline")] == [2]
    drawn = draw_schedule(RunPlan(read_run(tmp_path / "run", "run")))
    assert "take the means of step 2 (forward " in drawn
    assert drawn.count("<svg") == 2
