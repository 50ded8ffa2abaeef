"""The slow rank and its reason, from the times of ranks and of a real run; profile=true."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlm.parallel.collectives import all_reduce
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import CheckConfig
from mlm.training.incidents.timing import RankTimes, SlowRanks
from tests.ranks import run_on_ranks
from tests.training.incidents.runs import pretrain

EVEN = {"computing": 1.0, "reading data": 0.1, "saving": 0.0, "waiting over dp": 0.2}


@pytest.mark.parametrize(
    "slower, cause", [({"computing": 2.5}, "computing"), ({"reading data": 1.5}, "reading data")]
)
def test_the_slowest_rank_is_named_with_host_and_cause(slower: dict[str, float], cause: str) -> None:
    times = RankTimes(["a", "b", "c", "d"], [EVEN, EVEN, {**EVEN, **slower, "waiting over dp": 0.0}, EVEN])
    assert (times.slowest, times.cause) == (2, cause)
    assert times.factor > 2
    assert times.line().startswith("slowest rank 2 (host c): busy")
    assert f"most of the difference is {cause}" in times.line()


def slow_ranks(ctx: ParallelContext) -> SlowRanks:
    trainer: Any = SimpleNamespace(ctx=ctx, config=SimpleNamespace(check=CheckConfig()), step=0)
    return SlowRanks(trainer, lambda *_: None)


def slowed(ctx: ParallelContext, what: str) -> dict[str, Any]:
    clock = slow_ranks(ctx)
    import torch

    for _ in range(4):
        if ctx.rank == 1 and what == "computing":
            time.sleep(0.05)
        with clock.phase("data"):
            time.sleep(0.05 if ctx.rank == 1 and what == "data" else 0)
        all_reduce(torch.ones(1), ctx.dp)
    return clock.gather(4).encode()


@pytest.mark.parametrize("what, cause", [("computing", "computing"), ("data", "reading data")])
def test_ranks_that_wait_for_a_slow_one_are_not_busy(what: str, cause: str) -> None:
    for found in run_on_ranks(slowed, what, dp=3):
        assert (found["slowest"], found["cause"]) == (1, cause)
        assert found["factor"] > 2
        assert found["ranks"][0]["waiting over dp"] > 0.03 > found["ranks"][1]["waiting over dp"]
        assert found["ranks"][1][cause] > 0.045


def compared(ctx: ParallelContext, out: Path, shares: list[Any]) -> list[str]:
    """Lines about these times of three ranks."""
    from mlm.training.trainer import Trainer
    from tests.training.incidents.runs import watcher
    from tests.training.test_trainer import config

    incidents = watcher(Trainer(config(), ctx), out)
    slow_ranks = SlowRanks(incidents.trainer, incidents.report)
    slow_ranks.on_run_start(incidents.trainer, incidents.reporter)
    for each in shares:
        slow_ranks.compare(RankTimes(["h0", "h1", "h2"], each))
    return incidents.said  # type: ignore[attr-defined,no-any-return]


class Time:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def waited(ctx: ParallelContext, axis: str, seconds: float, time: Time) -> None:
    time.now += seconds
    ctx.watch.spent[axis] = ctx.watch.spent.get(axis, 0.0) + seconds


def test_seconds_of_a_step_are_work_or_waiting_never_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving waits for other ranks, which is no work; what was spent before the report is not in it."""
    now, ctx = Time(), ParallelContext()
    monkeypatch.setattr("mlm.training.incidents.timing.time", now)
    waited(ctx, "dp", 50.0, now)
    clock = slow_ranks(ctx)
    clock.start(4)
    now.now += 6.0
    waited(ctx, "dp", 2.0, now)
    with clock.phase("saving"):
        now.now += 1.0
        waited(ctx, "dp", 4.0, now)
        waited(ctx, "world", 8.0, now)
    with clock.phase("data"):
        now.now += 3.0
    assert clock.shares(6) == {
        **{"computing": 3.0, "reading data": 1.5, "saving": 0.5, "validation": 0.0},
        **{"waiting over dp": 3.0, "waiting for all": 4.0},
    }
    clock.start(6)
    now.now += 3.0
    assert (clock.shares(7)["computing"], clock.shares(7)["waiting over dp"]) == (3.0, 0.0)


def test_a_rank_that_is_slow_is_an_incident_once_and_again_after_it_was_not(tmp_path: Path) -> None:
    """From check.slow_factor times on; a second slow rank at once."""
    factor = CheckConfig().slow_factor
    even, slow, nearly = ({"computing": seconds} for seconds in (1.0, factor, factor * 0.99))
    rows = [[even, slow, even], [even, slow, even], [even, even, slow], [even, nearly, even]]
    said = run_on_ranks(compared, tmp_path, [*rows, rows[0]], dp=3)[0]
    reported = [line.split(" (")[0].rpartition(" ")[2] for line in said if "incident: slowest" in line]
    assert reported == ["1", "2", "1"]
    record = (tmp_path / "incidents" / "step-00000000" / "incident.json").read_text()
    assert '"slow_rank"' in record


def test_a_run_that_ends_before_the_last_profiled_step_has_a_profile_of_those_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tracer is closed: one that was left open ended the process with SIGSEGV after its last step."""
    assert pretrain(tmp_path / "run", "train.steps=3", "checkpoint.save_every=0", "profile=true") == 0
    assert "profile of 1 step: " in capsys.readouterr().out
    events = json.loads((tmp_path / "run" / "profile" / "rank-00000.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    counts = [names.count(f"mlm: {name}") for name in ("optimizer", "forward", "backward")]
    assert counts == [1, 2, 2]
