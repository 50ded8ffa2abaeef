"""When the training loop logs, validates and saves, with a trainer that only counts."""

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlm.checkpoint.native.run_state import VALIDATION_DUE
from mlm.cli.pretrain.run import PretrainLoop
from mlm.data.config import DataConfig
from mlm.launch.stop import StopRequest
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import CheckpointConfig, TrainConfig
from mlm.runs.corpora import ValidationSet
from mlm.tracking.config import LogConfig
from mlm.tracking.metrics import Throughput
from mlm.training.loop import StepLogger
from mlm.training.observer import Observer, RewindRequested
from tests.tracking.reporting import Clock

Event = tuple[str, int]


class Quiet(PretrainLoop):
    """The loop without data, devices or numbers: what it does, in `events`."""

    def __init__(self, *, weights: tuple[float, ...] = (1.0,), **every: int) -> None:
        self.clock, self.events = Clock(), []
        steps = every.pop("steps", 7)
        losses = iter([2.0, 4.0] * 50)
        config = SimpleNamespace(
            train=TrainConfig(steps=steps, validate_every=every.pop("validate", 0)),
            checkpoint=CheckpointConfig(save_every=every.pop("save", 0)),
            log=LogConfig(every=every.pop("log", 100)),
            data=DataConfig(),
            precision=None,
        )
        trainer = SimpleNamespace(
            step=0,
            config=config,
            model=SimpleNamespace(polled=iter),
            extra_state={},
            ctx=ParallelContext(),
            objective=SimpleNamespace(num_losses=1, metrics=("loss",)),
            train_step=self.take_step,
            average=None,
            is_finite=True,
            newest_samples=range(0),
            validate=lambda batches: self.spend(10.0, [next(losses)]),
        )
        reporter = SimpleNamespace(
            advance=lambda step: None,
            micro_batch=lambda number, count: None,
            validation=lambda step, loss, perplexity, parts: self.events.append(("validate", step)),
        )
        saver = SimpleNamespace(poll=lambda: None, begin=lambda: self.spend(20.0), finish=lambda **_: None)
        super().__init__(
            trainer=trainer,  # type: ignore[arg-type]
            samples=None,  # type: ignore[arg-type]
            validation=[ValidationSet(str(n), None, weight) for n, weight in enumerate(weights)],  # type: ignore[arg-type]
            reporter=reporter,  # type: ignore[arg-type]
            throughput=Throughput(
                tokens_per_step=1, flops_per_token=1.0, devices=1, peak=None, clock=self.clock
            ),
            stop=StopRequest(),
            saver=saver,  # type: ignore[arg-type]
        )
        self.incidents = SimpleNamespace(judge_end=lambda: None)  # type: ignore[assignment]

    events: list[Event]

    def log(self, outcome: object) -> None:
        self.events.append(("log", self.trainer.step))

    def spend(self, seconds: float, result: Any = None) -> Any:
        self.clock.now += seconds
        return result

    def observers(self) -> list[Observer]:
        logger = StepLogger(self)
        logger.log = self.log  # type: ignore[method-assign]
        return [self.vote, logger]

    def take_step(self, batches: object) -> None:
        self.forward_backward()
        self.trainer.observers.before_update(torch.zeros(1), torch.ones(()))
        self.clock.now += 1.0
        self.update()
        self.trainer.step += 1

    def forward_backward(self) -> None:
        """Before the vote."""

    def update(self) -> None:
        """After it."""

    def batches(self) -> AbstractContextManager[Iterator[list[Any]]]:  # type: ignore[override]
        return nullcontext(iter(lambda: [], None))

    def validation_batches(self, part: ValidationSet) -> Iterator[Any]:
        return iter(())

    def save(self, *, awaited: bool) -> None:
        self.events.append(("save and wait" if awaited else "save", self.trainer.step))

    def steps_of(self, *names: str) -> list[int]:
        return [step for name, step in self.events if name in names]


def test_the_first_and_the_last_step_are_logged_and_the_last_is_validated_and_saved() -> None:
    loop = Quiet(log=3, validate=3, save=4)
    assert loop.run()
    assert loop.steps_of("log") == [1, 3, 6, 7]
    assert loop.steps_of("validate") == [3, 6, 7]
    assert loop.steps_of("save") == [4]
    assert loop.steps_of("save and wait") == [7]


@pytest.mark.parametrize("phase", ["forward_backward", "update", "validate"])
def test_one_process_stops_after_the_step_in_progress(phase: str) -> None:
    loop, asked_at = Quiet(validate=1), 4
    place = loop.trainer if phase == "validate" else loop
    work = getattr(place, phase)

    def interrupted(*arguments: object) -> object:
        if loop.stops_after == asked_at:
            loop.stop.request(signal.SIGTERM)
        return work(*arguments)

    setattr(place, phase, interrupted)
    assert not loop.run()
    assert loop.events[-1] == ("save and wait", asked_at)


def test_one_of_several_processes_says_which_step_is_the_last() -> None:
    """Their vote is open until the weights' update; a later request takes a further step, if there is one."""
    loop, said = Quiet(steps=2), list[str]()
    loop.vote.is_open = False
    loop.vote.result = lambda: 0  # type: ignore[method-assign]
    loop.forward_backward = loop.update = lambda: said.append(loop.last_step())  # type: ignore[method-assign]
    loop.run()
    assert [*said, loop.last_step()] == ["step 1", "step 2", "step 2", "step 2", "step 2"]


def test_a_stop_between_batches_saves_and_leaves_the_validation_to_the_next_start() -> None:
    loop = Quiet(validate=3, steps=7)
    batches = iter(range(100))

    def validate(_: object) -> list[float]:
        for number in loop.trainer.model.polled(batches):
            if number == 1:
                loop.stop.request(signal.SIGTERM)
        return [2.0]

    loop.trainer.validate = validate  # type: ignore[method-assign]
    assert not loop.run()
    assert (loop.events, next(batches)) == ([("log", 1), ("save and wait", 3)], 3)
    assert VALIDATION_DUE in loop.trainer.extra_state


@pytest.mark.parametrize("is_due", [False, True])
def test_a_stop_in_the_last_batch_of_a_validation_comes_before_the_next_step(is_due: bool) -> None:
    """Of several processes, whose vote on that batch has begun; also where a start begins with it."""
    loop, said = Quiet(validate=1, steps=3), list[str]()
    loop.vote.is_open = False
    if is_due:
        loop.trainer.step, loop.trainer.extra_state = 1, {VALIDATION_DUE: True}

    def validate(_: object) -> list[float]:
        for _ in loop.trainer.model.polled([1.0]):
            said.append(loop.last_step())
            loop.stop.request(signal.SIGTERM)
        return [2.0]

    loop.trainer.validate = validate  # type: ignore[method-assign]
    assert not loop.run()
    assert (said, loop.trainer.step) == (["the batch of validation after step 1"], 1)
    assert VALIDATION_DUE not in loop.trainer.extra_state


def test_a_stop_while_prompts_are_continued_leaves_them_alone_to_the_next_start() -> None:
    """The words promise the batch in progress, and no step."""
    loop, said, continued = Quiet(validate=1, steps=2), list[str](), list[int]()

    class Prompts(Observer):
        def after_validation(self) -> None:
            for number in loop.trainer.model.polled(range(2)):
                if not said and number == 0:
                    said.append(loop.last_step())
                    loop.stop.request(signal.SIGTERM)
            continued.append(loop.trainer.step)

    watching = loop.observers
    loop.observers = lambda: [*watching(), Prompts()]  # type: ignore[method-assign]
    assert not loop.run()
    assert (said, loop.steps_of("validate")) == (["the batch of validation after step 1"], [1])
    loop.is_stopping, loop.stop.number = False, None
    assert loop.run()
    assert (loop.steps_of("validate"), continued) == ([1, 2], [1, 2])


def test_a_stop_at_a_step_that_rewinds_saves_after_the_next() -> None:
    """The checkpoint that is returned to knows nothing of the rewind."""
    loop = Quiet(steps=9)

    def rewind() -> None:
        loop.trainer.step = 2

    class Rewinds(Observer):
        def after_step(self, outcome: object) -> None:
            if loop.trainer.step == 5:
                raise RewindRequested(rewind)

    watching = loop.observers
    loop.observers = lambda: [Rewinds(), *watching()]  # type: ignore[method-assign]
    loop.update = lambda: loop.stop.request(signal.SIGTERM) if loop.trainer.step == 4 else None  # type: ignore[method-assign]
    assert not loop.run()
    assert loop.events[-1] == ("save and wait", 3)


def test_a_finished_run_whose_last_validation_was_stopped_is_not_over() -> None:
    loop = Quiet(steps=2, validate=2)
    loop.update = lambda: loop.stop.request(signal.SIGTERM)  # type: ignore[method-assign]
    loop.trainer.validate = lambda _: list(loop.trainer.model.polled([1.0]))  # type: ignore[method-assign]
    loop.trainer.step = 1
    assert not loop.run()
    assert loop.steps_of("save and wait") == [2]


def test_validation_is_on_the_clock_of_nobody() -> None:
    loop = Quiet(validate=1, steps=3)
    loop.run()
    assert loop.throughput.lap().step_time_s == pytest.approx(1.0)


def test_the_validation_loss_of_a_blend_is_weighted() -> None:
    loop = Quiet(weights=(3.0, 1.0), validate=1, steps=1)
    loop.run()
    assert loop.last_validation == pytest.approx((3 * 2.0 + 4.0) / 4)
