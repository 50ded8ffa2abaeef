"""Norms of saved tensors, and what a save does with a state that is not finite or has blown up."""

import logging
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mlm.checkpoint.native.exchange import Ranks
from mlm.checkpoint.native.folders import latest_checkpoint, step_name
from mlm.checkpoint.native.format import NotFiniteError, TensorEntry
from mlm.checkpoint.native.norms import norm, with_norms
from mlm.checkpoint.native.retention import checkpoint_doubt, newest_good, outdated
from mlm.checkpoint.native.run_state import DOUBTFUL_SINCE, INCIDENTS, NOT_FINITE_SINCE
from mlm.checkpoint.native.save_load import save_checkpoint
from mlm.checkpoint.native.slices import TensorShard
from mlm.parallel.mesh import ParallelContext
from tests.checkpoint.native.helpers import save
from tests.ranks import on_ranks

NAN, INF = float("nan"), float("inf")


def model(value: float = 1.0, moment: float = 1e-9) -> dict[str, Tensor]:
    return {"model.w": torch.full((6, 4), value), "optimizer.exp_avg_sq.w": torch.full((6, 4), moment)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norm_is_the_l2_norm_in_every_dtype(dtype: torch.dtype) -> None:
    x = torch.randn(37_000, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert norm(x.t()) == pytest.approx(float(x.double().norm()), rel=1e-5)


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        (torch.full((4,), 3e38), 6e38),
        (torch.full((4,), 1e150, dtype=torch.float64), 2e150),
        (torch.full((4,), 1.7e308, dtype=torch.float64), torch.finfo(torch.float64).max),
    ],
    ids=["3e38", "1e150", "1.7e308"],
)
def test_large_finite_numbers_are_finite(x: Tensor, expected: float) -> None:
    """Their squares are not."""
    assert norm(x) == pytest.approx(expected)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_number_that_is_not_finite_shows(bad: float, dtype: torch.dtype) -> None:
    x = torch.zeros(200_000, dtype=dtype)
    x[177_777] = bad
    assert math.isnan(norm(x))
    entry = TensorEntry((2,), dtype)
    parts = [{"x": 1.0}, {"x": norm(x)}, {"x": 1.0}]
    assert math.isnan(with_norms({"x": entry}, parts, {})["x"].norm or 0.0)


@pytest.mark.parametrize("name", ["model.w", "optimizer.exp_avg_sq.w"])
@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_state_that_is_not_finite_is_not_saved_and_replaces_nothing(
    tmp_path: Path, name: str, bad: float
) -> None:
    save(tmp_path, 1, model(), keep_last=1)
    tensors = model()
    tensors[name][3, 1] = bad
    with pytest.raises(NotFiniteError, match=rf"not finite: {name}"):
        save(tmp_path, 2, tensors, keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", step_name(1)]
    assert latest_checkpoint(tmp_path) == tmp_path / step_name(1)


@on_ranks(dp=2)
def test_all_ranks_hear_of_what_one_rank_holds(ctx: ParallelContext, tmp_path: Path) -> None:
    rows = torch.full((3, 4), NAN if ctx.rank else 1.0)
    shards = {"model.w": TensorShard(rows, (6, 4), (3 * ctx.rank, 0))}
    with pytest.raises(NotFiniteError, match=r"weights not finite: model\.w"):
        save_checkpoint(tmp_path, 1, shards, state={}, ranks=Ranks.of(ctx), keep_last=1, keep_every=0)


def test_weights_that_jump_are_saved_with_a_warning_and_push_out_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 1, model(1.0), keep_last=1)
    with caplog.at_level(logging.WARNING):
        save(tmp_path, 2, model(1e30), keep_last=1)
    assert "the norm of model.w is 1e+30 times what it was" in caplog.text
    assert latest_checkpoint(tmp_path) == tmp_path / step_name(2)
    assert newest_good(tmp_path) == tmp_path / step_name(1)
    for step in (3, 4):  # as far from the last good one as before
        save(tmp_path, step, model(1e30), keep_last=1)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [step_name(1), step_name(4)]
    save(tmp_path, 5, model(1.1), keep_last=1)
    assert newest_good(tmp_path) == tmp_path / step_name(5)
    assert [path.name for path in tmp_path.glob("step-*")] == [step_name(5)]


@pytest.mark.parametrize("after", [90.0, 0.02])
def test_growth_of_training_is_no_jump(tmp_path: Path, after: float) -> None:
    save(tmp_path, 1, model(1.0))
    assert checkpoint_doubt(save(tmp_path, 2, model(after, moment=1e-2))) is None


@pytest.mark.parametrize(
    ("value", "since", "doubt"),
    [(1.0, 2, "steps are not finite since step 2"), (0.0, 0, "the norm of model.w is 0 times what it was")],
    ids=["steps that are not finite", "weights that have vanished"],
)
def test_a_doubtful_checkpoint_pushes_out_nothing(
    tmp_path: Path, value: float, since: int, doubt: str
) -> None:
    save(tmp_path, 1, model(), keep_last=1)
    path = save(tmp_path, 2, model(value), keep_last=1, state={INCIDENTS: {NOT_FINITE_SINCE: since}})
    assert checkpoint_doubt(path) == doubt
    assert outdated(tmp_path, keep_last=1, keep_every=0) == []
    assert newest_good(tmp_path) == tmp_path / step_name(1)


def test_checkpoints_of_doubtful_steps_push_out_nothing_and_are_not_good(tmp_path: Path) -> None:
    """The newest says since which step; the weights before that step are what it judged."""
    for step, since in ((1, 0), (4, 0), (6, 6), (7, 6)):
        save(tmp_path, step, model(), keep_last=1, state={INCIDENTS: {DOUBTFUL_SINCE: since}})
        assert newest_good(tmp_path) == tmp_path / step_name(min(step, 4))
    assert sorted(path.name for path in tmp_path.glob("step-*")) == [step_name(4), step_name(7)]


def test_weights_before_steps_that_were_never_finite_are_not_good(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, model(), keep_last=9)
    assert newest_good(tmp_path, since=4) == tmp_path / step_name(2)
    assert newest_good(tmp_path, since=2) is None


@pytest.mark.parametrize(("key", "is_good"), [(NOT_FINITE_SINCE, True), (DOUBTFUL_SINCE, False)])
def test_where_all_steps_are_doubtful_those_that_only_overflowed_are_good(
    tmp_path: Path, key: str, is_good: bool
) -> None:
    path = save(tmp_path, 1, model(), state={INCIDENTS: {key: 1}})
    save(tmp_path, 2, model(1e30))
    assert newest_good(tmp_path, since=None) == (path if is_good else None)
