"""What a checkpoint holds of a run's incidents."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from mlm.checkpoint.native.run_state import INCIDENTS
from mlm.training.incidents import numbers as module
from mlm.training.incidents.numbers import IncidentState, RecentSteps, decode, spare_samples
from mlm.util.errors import CorruptFileError


def memory(**changes: Any) -> IncidentState:
    settings: dict[str, Any] = {
        "ranges": ((8, 4), (40, 2)),
        "steps": [3, 11],
        "rewinds": 2,
        "nonfinite_steps": 1,
    }
    return IncidentState(RecentSteps(4, [(1.5, 2.5), (1.25, 0.5)]), **settings | changes)


def test_a_resumed_run_remembers_all_that_the_first_did() -> None:
    saved = json.loads(json.dumps(memory().encode()))
    found = decode(saved, 4)
    assert (found.ranges, found.steps, found.rewinds, found.nonfinite_steps) == (
        ((8, 4), (40, 2)),
        [3, 11],
        2,
        1,
    )
    assert found.encode() == memory().encode()
    assert found.recent.pairs == memory().recent.pairs


def test_of_too_many_steps_the_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_STEPS", 2)
    assert memory(steps=[3, 5, 9]).encode()["left_out_steps"] == [5, 9]


@pytest.mark.parametrize(
    "change",
    [
        *({"rewinds": -1}, {"streak": -1}, {"streak": 1.0}, {"rewinds": True}, {"left_out_steps": [-3]}),
        *(
            {"left_out_samples": [[-4, 4]]},
            {"left_out_samples": [[4, -4]]},
            {"left_out_samples": [[1 << 62, 1]]},
        ),
    ],
    ids=str,
)
def test_a_count_that_is_none_is_damage(change: dict[str, Any]) -> None:
    with pytest.raises(CorruptFileError, match=r"state of incidents is damaged .* is no whole number"):
        decode({**memory().encode(), **change}, 4)


@pytest.mark.parametrize(("action", "further"), [("skip", 0), ("log", 0), ("rewind", 2 * 4 * 3)])
def test_a_run_may_need_the_samples_in_place_of_those_left_out(action: str, further: int) -> None:
    """Each range, with the rest of its batch; for each rewind to come as much again."""
    config = SimpleNamespace(
        incident=SimpleNamespace(window=4, rewinds=3, action=action),
        train=SimpleNamespace(global_batch_size=4),
    )
    trainer: Any = SimpleNamespace(config=config, extra_state={INCIDENTS: memory().encode()})
    assert spare_samples(trainer) == (4 + 4) + (2 + 4) + further
    trainer.extra_state = {}
    assert spare_samples(trainer) == further
