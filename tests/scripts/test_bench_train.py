"""The training benchmark: its arithmetic, what it drops and rejects, one tiny run. No time is asserted."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import bench_train
import pytest
import torch
from bench.compare import Plan, doubts
from bench.contenders import MlmTrainee
from bench.equality import Reference
from bench.ranks import Ranks
from bench.shapes import NAMED, Shape
from bench.spec import Spec
from bench.stats import Pair, Sample, Spread, next_order, quantile, reject_above_peak

from mlm.errors import UserError

TINY = NAMED["cpu"]["tiny"][0]
SPEC = Spec(TINY, "cpu", "fp32", threads=1, allocator="default")


def sample(seconds: float = 1.0, before: float = 1.0, after: float = 1.0) -> Sample:
    return Sample("mlm", seconds, 1, before, after)


def pair(reference_s: float = 1.0, other_s: float = 1.0, order: str = "AB") -> Pair:
    return Pair(sample(reference_s), sample(other_s), order)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small products, and the threads of other tests as they were."""
    monkeypatch.setattr("bench.machine.PEAK_SIZES", {"cpu": (256,)})
    monkeypatch.setattr("bench.machine.PROBE_SIZE", {"cpu": 128})
    monkeypatch.setattr("bench.machine.PROBE_S", 0.002)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_quantile_interpolates_between_neighbours() -> None:
    assert [quantile([1.0, 2.0, 4.0, 8.0], q) for q in (0.0, 0.25, 0.5, 1.0)] == [1.0, 1.75, 3.0, 8.0]


def test_spread_is_median_and_quartiles_of_unsorted_values() -> None:
    assert Spread.of([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(3.0, 2.0, 4.0, 5)


def test_spread_of_one_value_is_that_value() -> None:
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0, 1)


def test_rate_of_a_spread_of_seconds_turns_its_quartiles_round() -> None:
    assert Spread(2.0, 1.0, 4.0, 3).inverse_of(8.0) == Spread(4.0, 2.0, 8.0, 3)


def test_ratio_says_how_many_times_faster_the_reference_is() -> None:
    assert pair(reference_s=2.0, other_s=3.0).ratio == 1.5


@pytest.mark.parametrize(
    ("before", "after", "steady"),
    [
        (1.0, 1.0, True),
        (1.0, 1.09, True),
        (1.0, 1.11, False),  # slower after
        (1.11, 1.0, False),  # faster after
        (0.95, 1.05, False),  # each near the median, but apart by more than 10 %
        (1.12, 1.12, False),  # alike, but not like the session
        (0.88, 0.88, False),
    ],
)
def test_sample_is_dropped_when_the_bracketing_product_shifts(
    before: float, after: float, steady: bool
) -> None:
    assert sample(before=before, after=after).steady(session_median=1.0) is steady


def test_pair_counts_only_if_both_samples_are_steady() -> None:
    bad = sample(after=1.2)
    assert [Pair(a, b, "AB").steady(1.0) for a, b in [(sample(), bad), (bad, sample())]] == [False, False]


def test_orders_alternate_and_balance_what_is_kept() -> None:
    kept: list[Pair] = []
    orders = []
    for _ in range(4):
        orders.append(next_order(kept))
        kept.append(pair(order=orders[-1]))
    assert orders == ["AB", "BA", "AB", "BA"]
    assert next_order([p for p in kept if p.order == "BA"]) == "AB"


def test_result_above_the_peak_is_rejected() -> None:
    reject_above_peak("mlm", 1e9, peak=1e9)
    with pytest.raises(UserError, match=r"mlm reached 2\.0 model GFLOP/s, above .* 1\.0: rejected"):
        reject_above_peak("mlm", 2e9, peak=1e9)


def test_contender_with_other_weights_is_not_timed() -> None:
    ours = MlmTrainee("mlm", SPEC, torch.device("cpu"))
    other = MlmTrainee("mlm", dataclasses.replace(SPEC, seed=5), torch.device("cpu"))
    with pytest.raises(UserError, match="does not compute the same"):
        other.check(Reference(*ours.loss_and_gradients()))


def test_transformers_agrees_with_mlm() -> None:
    pytest.importorskip("transformers")
    from bench.contenders import TransformersTrainee

    ours = MlmTrainee("mlm", SPEC, torch.device("cpu"))
    theirs = TransformersTrainee("transformers", SPEC, torch.device("cpu"))
    assert theirs.check(Reference(*ours.loss_and_gradients())).gradient_error < 1e-5


@pytest.mark.slow
def test_megatron_core_agrees_with_mlm(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    path = tmp_path / "reference.safetensors"
    Reference(*MlmTrainee("mlm", SPEC, torch.device("cpu")).loss_and_gradients()).save(path)
    with Ranks("megatron", SPEC, 1) as ranks:  # in a process of its own: it starts a process group
        assert ranks.check(path).gradient_error < 1e-5


@pytest.mark.slow
def test_split_contender_agrees_and_reports_its_memory(tmp_path: Path) -> None:
    ours, path = MlmTrainee("mlm", SPEC, torch.device("cpu")), tmp_path / "reference.safetensors"
    Reference(*ours.loss_and_gradients()).save(path)
    with Ranks("mlm-tp2", SPEC, 2) as ranks:
        assert ranks.check(path).gradient_error < 1e-5
        assert [m["baseline_bytes"] > 0 for m in ranks.memory()] == [True, True]


def test_every_other_contender_meets_the_first_and_picotron_meets_our_split() -> None:
    plan = Plan(("mlm", "nanogpt"), ("mlm-tp2", "picotron-tp2"), 2, 8, 18, 0.5, True)
    assert plan.opponents() == [("mlm", "nanogpt"), ("mlm", "mlm-tp2"), ("mlm-tp2", "picotron-tp2")]


@pytest.mark.parametrize(
    ("kept", "dropped", "quartiles", "doubt"),
    [
        (8, 8, (0.96, 1.05), None),
        (7, 11, (1.0, 1.0), "7 of 8 pairs kept, 11 dropped"),
        (8, 9, (1.0, 1.0), "8 of 8 pairs kept, 9 dropped"),
        (8, 0, (0.95, 1.06), "quartiles 0.950 to 1.060 are too far apart"),
    ],
)
def test_doubts_name_lost_pairs_and_wide_spreads(
    kept: int, dropped: int, quartiles: tuple[float, float], doubt: str | None
) -> None:
    plan = Plan(("mlm", "transformers"), (), 1, 8, 18, 0.5, True)
    ratio = {"median": 1.0, "low": quartiles[0], "high": quartiles[1], "count": kept}
    series = {"reference": "a", "other": "b", "kept": kept, "dropped": dropped, "tokens_ratio": ratio}
    found = doubts(plan, [series])
    assert found == [] if doubt is None else doubt in found[0]


def test_tp_keeps_the_vocabulary_of_every_shape() -> None:
    shapes: list[Shape] = [s for group in NAMED["cpu"].values() for s in group]
    assert [s.model().padded_vocab_size(2) for s in shapes] == [s.vocab_size for s in shapes]


def test_tiny_run_writes_ratios_samples_and_machine(tmp_path: Path) -> None:
    out = tmp_path / "tiny.json"
    options = "--shape tiny --device cpu --threads 1 --pairs 1 --attempts 40 --min-sample-s 0.001 --no-memory"
    arguments = [
        *options.split(),
        "--allocator",
        "default",
        "--contenders",
        "mlm",
        "mlm-mkl",
        "--out",
        str(out),
    ]
    assert bench_train.main(arguments) == 1  # one pair is a trial
    document = json.loads(out.read_text())
    result = document["shapes"][0]
    assert {"cpu", "threads", "torch", "commit"} <= set(document["machine"])
    assert result["contenders"]["mlm-mkl"]["gradient_error"] < 1e-5
    assert len(result["series"]) == 1
    assert (
        result["series"][0]["pairs"] or result["series"][0]["cut_short"]
    )  # a busy machine may drop them all
    assert "a trial" in result["doubts"][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shape", "huge"], "--shape 'huge' is no shape"),
        (["--shape", "custom", "2,30,4,8,64,2"], "H=30 must be a multiple of N=4"),
        (["--contenders", "deepspeed"], "--contenders 'deepspeed' is unknown"),
        (["--contenders", "mlm", "nanogpt"], "needs --peers nanogpt=PATH"),
        (["--peers", "nanogpt=/nowhere"], "no such folder"),
        (["--pairs", "0"], "--pairs 0 must be at least 1"),
        (["--shape", "custom", "2,30,3,8,64,2", "--tp", "2"], "N=3 must be a multiple of --tp 2"),
        (["--out", "/nowhere/x.json"], "its folder does not exist"),
    ],
)
def test_mistake_is_one_line_and_exit_2(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_train.main(["--device", "cpu", *options]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
