"""The training benchmark: its arithmetic, what it drops and rejects, one tiny run. No time is asserted."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import bench_train
import pytest
import torch
from bench.contenders import MlmTrainee, Trainee
from bench.llama import LlamaShape, MixtralShape, TransformersLlama, TransformersMixtral
from bench.shapes import NAMED
from bench.spec import Spec
from bench.stats import Pair, Ratio, Timing, Turn

from mlm.util.errors import UserError

TINY = NAMED["cpu"]["tiny"][0]
SPEC = Spec(TINY, "cpu", "fp32", threads=1)


def gradient_error(one: Trainee, other: Trainee) -> float:
    agreement = one.check(other.reference())
    assert agreement is not None
    return agreement.gradient_error


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
    assert by_cpu is not None
    assert (by_cpu.median, by_cpu.kept) == (1.5, 1)


@pytest.mark.parametrize(("before", "steady"), [(1.0, True), (1.09, True), (1.11, False), (0.89, False)])
def test_pair_is_dropped_when_a_product_around_either_step_differs(before: float, steady: bool) -> None:
    assert Pair(turn(before=before), turn()).steady("wall") is steady
    assert Pair(turn(), turn(before=before)).steady("wall") is steady
    assert Pair(turn(before=before), turn()).steady("cpu")  # which may differ by 30 %


def test_contender_with_other_weights_is_not_timed() -> None:
    ours = MlmTrainee("mlm", SPEC, torch.device("cpu"))
    other = MlmTrainee("mlm", dataclasses.replace(SPEC, seed=5), torch.device("cpu"))
    with pytest.raises(UserError, match="does not compute the same"):
        other.check(ours.reference())


def test_transformers_agrees_with_mlm() -> None:
    pytest.importorskip("transformers")
    from bench.contenders import TransformersTrainee

    ours = MlmTrainee("mlm", SPEC, torch.device("cpu"))
    theirs = TransformersTrainee("transformers", SPEC, torch.device("cpu"))
    assert gradient_error(theirs, ours) < 1e-5


@pytest.mark.parametrize("heads", [2, 3])
def test_transformers_llama_agrees_with_mlm(heads: int) -> None:
    """Untied, and with heads of keys and values that two or three queries share."""
    pytest.importorskip("transformers")
    shape = LlamaShape.of(dataclasses.replace(SPEC.shape, num_heads=heads, hidden_size=24))
    assert shape.num_kv_heads == 1
    spec = dataclasses.replace(SPEC, shape=shape)
    ours = MlmTrainee("mlm", spec, torch.device("cpu"))
    theirs = TransformersLlama("transformers", spec, torch.device("cpu"))
    assert gradient_error(theirs, ours) < 1e-5


def test_transformers_mixtral_agrees_with_mlm() -> None:
    """Loss, and the gradients of router and experts."""
    pytest.importorskip("transformers")
    shape = MixtralShape.of(dataclasses.replace(SPEC.shape, num_heads=2, hidden_size=24))
    spec = dataclasses.replace(SPEC, shape=shape)
    ours = MlmTrainee("mlm", spec, torch.device("cpu"))
    theirs = TransformersMixtral("transformers", spec, torch.device("cpu"))
    assert gradient_error(theirs, ours) < 1e-5


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
        (["--shape", "custom", "2,30,4,8,64,2"], "H=30 must be a multiple of N=4"),
        (["--contenders", "deepspeed"], "--contenders 'deepspeed' is unknown"),
        (["--contenders", "mlm", "nanogpt"], "needs --peers nanogpt=PATH"),
        (["--contenders", "mlm-compiled"], "needs a compiler for torch.compile"),
        (["--contenders", "nanogpt-mkl"], "nanogpt has no variant 'mkl'"),
        (["--peers", "nanogpt=/nowhere"], "no such folder"),
        (["--peers", "nanogpt=."], "it has no model.py"),
        (
            ["--family", "llama", "--contenders", "mlm", "nanogpt"],
            "--family llama: nanogpt is compared as GPT",
        ),
        (["--pairs", "0"], "0 must be at least 1"),
        (["--contenders", "tq=2"], "give key=value"),
        (["--out", "/nowhere/x.json"], "its folder does not exist"),
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
