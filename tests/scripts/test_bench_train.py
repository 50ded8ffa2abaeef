"""The training benchmark: its arithmetic, what it drops and rejects, one tiny run. No time is asserted."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bench_train
import pytest
import torch
from bench.compare import doubts
from bench.contenders import MlmTrainee, Trainee, TransformersTrainee
from bench.llama import LlamaShape, MixtralShape, TransformersMixtral
from bench.shapes import NAMED
from bench.spec import Spec
from bench.stats import Pair, Ratio, Timing, Turn, reject_above_peak
from bench.timing import take_rounds

from mlm.util.errors import UserError
from tests.megatron_core import megatron_core

TINY = NAMED["cpu"]["tiny"][0]
SPEC = Spec(TINY, "cpu", "fp32", threads=1)


def gradient_error(one: Trainee, other: Trainee) -> float:
    return one.check(other.reference()).gradient_error


def turn(seconds: float = 1.0, *, cpu_s: float = 1.0, waited_s: float = 0.0, before: float = 1.0) -> Turn:
    return Turn("mlm", Timing(seconds, cpu_s, waited_s), before, 1.0)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small products, and the threads of other tests as they were."""
    monkeypatch.setattr("bench.machine.PEAK_SIZES", {"cpu": (256,)})
    monkeypatch.setattr("bench.machine.PROBE_SIZE", {"cpu": 128})
    monkeypatch.setattr("bench.machine.PROBE_S", 0.0005)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_ratio_is_the_median_over_pairs() -> None:
    pairs = [Pair(turn(a), turn(b)) for a, b in ((1.0, 1.5), (2.0, 2.0), (1.0, 3.0))]
    assert Ratio.of(pairs, "wall") == Ratio(1.5, 1.25, 2.25, least=1.0, most=3.0, kept=3)


def test_ratio_of_processor_time_keeps_pairs_that_waited_for_other_jobs() -> None:
    pairs = [Pair(turn(cpu_s=2.0), turn(9.0, cpu_s=3.0, waited_s=6.0))]
    assert Ratio.of(pairs, "wall") is None
    by_cpu = Ratio.of(pairs, "cpu")
    assert (by_cpu.median, by_cpu.kept) == (1.5, 1)


@pytest.mark.parametrize(("before", "steady"), [(1.0, True), (1.09, True), (1.11, False), (0.89, False)])
def test_pair_is_dropped_when_a_product_around_either_step_differs(before: float, steady: bool) -> None:
    assert Pair(turn(before=before), turn()).steady("wall") is steady
    assert Pair(turn(), turn(before=before)).steady("wall") is steady
    assert Pair(turn(before=before), turn()).steady("cpu")  # which may differ by 30 %


def test_contenders_take_turns_forwards_and_backwards() -> None:
    order = []

    class Contender:
        def __init__(self, name: str) -> None:
            self.name = name

        def time(self, index: int, steps: int) -> Timing:
            order.append(self.name)
            return Timing(1.0, 1.0)

    contenders: dict[str, Any] = {name: Contender(name) for name in "ABC"}
    probe: Any = lambda seconds: 1.0  # noqa: E731
    rounds = take_rounds(
        contenders, [("A", "C")], probe, measures=["wall"], pairs=3, limit=9, seconds=0.0, say=print
    )
    assert "".join(order) == "ABCCBAABC"
    assert [sorted(one) for one in rounds] == [list("ABC")] * 3


def test_result_above_the_peak_is_rejected() -> None:
    reject_above_peak("mlm", 1e9, peak=1e9)
    with pytest.raises(UserError, match=r"mlm reached 2\.0 model GFLOP/s, above .* 1\.0: rejected"):
        reject_above_peak("mlm", 2e9, peak=1e9)


def test_contender_with_other_weights_is_not_timed() -> None:
    ours = MlmTrainee("mlm", SPEC, torch.device("cpu"))
    other = MlmTrainee("mlm", dataclasses.replace(SPEC, seed=5), torch.device("cpu"))
    with pytest.raises(UserError, match="does not compute the same"):
        other.check(ours.reference())


SHAPES: dict[str, tuple[Any, type[Trainee]]] = {
    "gpt2": (SPEC.shape, TransformersTrainee),
    # untied, and with heads of keys and values that three queries share
    "llama": (
        LlamaShape.of(dataclasses.replace(SPEC.shape, num_heads=3, hidden_size=24)),
        TransformersTrainee,
    ),
    "mixtral": (
        MixtralShape.of(dataclasses.replace(SPEC.shape, num_heads=2, hidden_size=24)),
        TransformersMixtral,
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_agrees_with_mlm(name: str) -> None:
    """Loss, and gradients: of a mixture those of router and experts too."""
    shape, trainee = SHAPES[name]
    spec = dataclasses.replace(SPEC, shape=shape)
    ours = MlmTrainee("mlm", spec, torch.device("cpu"))
    assert gradient_error(trainee("transformers", spec, torch.device("cpu")), ours) < 1e-5


def test_bf16_is_compared_with_fp32_to_its_own_rounding() -> None:
    ours = MlmTrainee("mlm", SPEC, torch.device("cpu"))
    half = MlmTrainee("mlm-bf16", SPEC.of("mlm-bf16"), torch.device("cpu"))
    for one, other in ((half, ours), (ours, half)):
        assert 1e-4 < gradient_error(one, other) < 5e-2


@pytest.mark.slow
def test_megatrons_mixtral_agrees_with_mlm(tmp_path: Path) -> None:
    """In a process of its own, as it replaces functions of torch.cuda; unequal, it would not be timed."""
    megatron_core("transformer.moe")
    options = "--family mixtral --shape tiny --threads 1 --seconds 0 --pairs 1 --no-memory"
    words, out = options.split(), tmp_path / "result.json"
    assert bench_train.BENCH.main([*words, "--contenders", "mlm", "megatron", "--out", str(out)]) == 1
    found = json.loads(out.read_text())["shapes"][0]["contenders"]["megatron"]
    assert 0 < found["gradient_error"] < 1e-5


@pytest.mark.parametrize(
    ("problems", "threads", "doubted"),
    [({"wall": []}, 2, False), ({"cpu": []}, 2, True), ({"cpu": []}, 1, False), ({}, 1, True)],
)
def test_processor_time_is_a_result_with_one_thread(
    problems: dict[str, list[str]], threads: int, doubted: bool
) -> None:
    series = {"reference": "a", "other": "b", "problems": {"wall": ["few"], "cpu": ["few"]} | problems}
    assert bool(doubts(8, [series], dataclasses.replace(SPEC, threads=threads))) is doubted


@pytest.mark.slow
def test_tiny_run_writes_ratios_samples_and_machine(tmp_path: Path) -> None:
    out = tmp_path / "tiny.json"
    options = "--shape tiny --device cpu --threads 1 --pairs 1 --attempts 2 --seconds 0"
    arguments = [
        *options.split(),
        "--contenders",
        "mlm",
        "mlm-mkl",
        "--out",
        str(out),
    ]
    assert bench_train.BENCH.main(arguments) == 1  # one pair is a trial
    document = json.loads(out.read_text())
    result = document["shapes"][0]
    assert {"cpu", "threads", "torch", "commit"} <= set(document["machine"])
    assert result["contenders"]["mlm-mkl"]["gradient_error"] < 1e-5
    assert len(result["series"]) == 1
    assert sorted(result["rounds"][0]) == ["mlm", "mlm-mkl"]
    mlm = result["contenders"]["mlm"]
    assert mlm["step_cpu_s"]["median"] > 0
    assert "a trial" in result["doubts"][0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shape", "huge"], "--shape 'huge' is no shape"),
        (["--contenders", "mlm", "nanogpt"], "needs --peers nanogpt=PATH"),
        (["--contenders", "mlm-compiled"], "needs a compiler for torch.compile"),
        (["--peers", "nanogpt=/nowhere"], "no such folder"),
        (["--contenders", "tq=2"], "give key=value"),
    ],
)
def test_mistake_is_named_and_exits_with_2(
    options: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert bench_train.BENCH.main(["--device", "cpu", *options]) == 2
    assert message in capsys.readouterr().err
