"""When the training loop logs, validates and saves, with a trainer that only counts."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from mlm.data.config import DataConfig
from mlm.parallel.mesh import ParallelContext
from mlm.tracking.config import LogConfig
from mlm.tracking.metrics import Throughput
from mlm.training.config import CheckpointConfig, TrainConfig
from mlm.training.corpora import ValidationSet
from mlm.training.pretrain.loop import PretrainLoop
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
            ctx=ParallelContext(),
            objective=SimpleNamespace(losses=1, parts=("loss",)),
            forward_backward=lambda batches: None,
            update=self.take_step,
            validate=lambda batches: self.spend(10.0, [next(losses)]),
        )
        reporter = SimpleNamespace(
            advance=lambda step: None,
            validation=lambda step, loss, perplexity, parts: self.events.append(("validate", step)),
        )
        saver = SimpleNamespace(poll=lambda: None, begin=lambda: self.spend(20.0), finish=lambda: None)
        super().__init__(
            trainer=trainer,  # type: ignore[arg-type]
            samples=None,  # type: ignore[arg-type]
            validation=[ValidationSet(str(n), None, weight) for n, weight in enumerate(weights)],  # type: ignore[arg-type]
            reporter=reporter,  # type: ignore[arg-type]
            throughput=Throughput(
                tokens_per_step=1, flops_per_token=1.0, devices=1, peak=None, clock=self.clock
            ),
            stop=SimpleNamespace(requested=False),  # type: ignore[arg-type]
            saver=saver,  # type: ignore[arg-type]
        )

    events: list[Event]

    def spend(self, seconds: float, result: Any = None) -> Any:
        self.clock.now += seconds
        return result

    def take_step(self, parts: object) -> None:
        self.clock.now += 1.0
        self.trainer.step += 1

    def batches(self) -> AbstractContextManager[Iterator[list[Any]]]:  # type: ignore[override]
        return nullcontext(iter(lambda: [], None))

    def validation_batches(self, part: ValidationSet) -> Iterator[Any]:
        return iter(())

    def log(self, outcome: object, batches: object) -> None:
        self.events.append(("log", self.trainer.step))

    def save(self, batches: object, *, awaited: bool) -> None:
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


@pytest.mark.parametrize("asked_at", [1, 4])
@pytest.mark.parametrize("phase", ["forward_backward", "update", "validate"])
def test_one_process_stops_after_the_step_in_progress(asked_at: int, phase: str) -> None:
    loop = Quiet(validate=1)
    work = getattr(loop.trainer, phase)

    def interrupted(argument: object) -> object:
        if loop.stops_after == asked_at:
            loop.stop.requested = True  # type: ignore[misc]
        return work(argument)

    setattr(loop.trainer, phase, interrupted)
    assert not loop.run()
    assert loop.events[-1] == ("save and wait", asked_at)


def test_one_of_several_processes_says_which_step_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their vote is open until the weights' update; a request made later takes a further step."""
    now = 100.0
    monkeypatch.setattr("mlm.training.loop.time.monotonic", lambda: now)
    loop = Quiet(steps=1)
    loop.step_time, said = 60.0, list[str]()
    monkeypatch.setattr("mlm.training.loop.StopVote", Several)
    loop.trainer.forward_backward = lambda batches: said.append(loop.last_step())  # type: ignore[assignment]
    loop.trainer.update = lambda parts: (said.append(loop.last_step()), loop.take_step(parts))  # type: ignore
    loop.run()
    assert said == ["step 1 (about 60 s)", "step 2 (about 2 min)"]


class Several:
    """The vote of a process among several."""

    is_open = False

    def __init__(self, *_: object) -> None:
        pass

    def result(self) -> bool:
        return False

    asked_since = result


def test_validation_is_on_the_clock_of_nobody() -> None:
    loop = Quiet(validate=1, steps=3)
    loop.run()
    assert loop.throughput.lap().step_time_s == pytest.approx(1.0)


def test_the_validation_loss_of_a_blend_is_weighted() -> None:
    loop = Quiet(weights=(3.0, 1.0), validate=1, steps=1)
    loop.run()
    assert loop.last_validation == pytest.approx((3 * 2.0 + 4.0) / 4)
