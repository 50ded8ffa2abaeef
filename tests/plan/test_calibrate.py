"""`mlm plan calibrate`: constants are those of the measured times; its YAML is hardware that plans take."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mlm.cli import main
from mlm.cli.plan import check_plan_calibrate
from mlm.models.config import ModelConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.plan.calibrate import fit, fit_link, measure, of_kind, on_rank
from mlm.plan.calibrate_measure import Measurements, Timing, Workload
from mlm.plan.config import CalibrationJob, PlanCalibrateConfig
from mlm.plan.cost import CostModel
from mlm.plan.hardware import EfficiencyConfig, HardwareConfig, PeakConfig, calibration_file, cpu_name
from mlm.plan.layer_counts import counts_of
from mlm.plan.layout import PlannedLayout
from mlm.plan.trace import Product
from mlm.util.errors import UserError
from tests.plan.planned import planned_run
from tests.ranks import run_on_ranks

TRUE = HardwareConfig(
    name="known",
    device="cpu",
    devices_per_node=4,
    memory_gib=8,
    reserved_gib=0.3,
    memory_gbps=20,
    node_gbps=3,
    node_latency_us=50,
    network_gbps=1,
    network_latency_us=200,
    peak_tflops=PeakConfig(fp32=0.1),
    kernel_us=20,
    efficiency=EfficiencyConfig(matmul=0.8, matmul_half=32, attention=0.3, memory=0.4, network=1),
)
TINY = Workload(
    products=((16, 16, 16), (32, 16, 64)),
    copy=1 << 12,
    attention=((2, 8, 4),),
    messages=(1 << 8, 1 << 12),
    hidden=64,
    seq=8,
    micro_batches=(1, 2),
    least_s=0.0,
)
PLAN = ["plan", "layouts", "model=gpt2_tiny", "gpus=1", "precision=fp32", "train.global_batch_size=8"]


MODEL = ModelConfig(
    num_layers=1, hidden_size=512, num_heads=8, vocab_size=1024, hidden_dropout=0.0, attention_dropout=0.0
)
LAYER = counts_of(planned_run(MODEL, 256, dtype="fp32"), "cpu")


def times_of(hardware: HardwareConfig) -> list[Timing]:
    """The times that the model predicts of this hardware."""
    model = CostModel(LAYER, hardware, 1)
    layers = {size: model.homes(PlannedLayout(micro_batch=size))["0"] for size in (1, 4)}
    attention = 7 * 16 * 256**2 * 64 / (model.peak * hardware.efficiency.attention)
    shapes = ((256, 128, 512), (512, 512, 512), (1024, 256, 2048), (128, 2048, 512))
    return [
        *(Timing("product", "fp32", each, 3 * model.product(Product(1, *each, 0, 4))) for each in shapes),
        Timing("product", "bf16", (512, 512, 512), 6 * 512**3 / 2e11),
        Timing("copy", "", (1 << 20,), 2 * (1 << 20) / (hardware.memory_gbps * 1e9)),
        Timing("fused", "", (16, 256, 64), attention),
        *(
            Timing("layer", "", (size,), sum(layer.forward) + sum(layer.backward))
            for size, layer in layers.items()
        ),
        *(
            time_of(Timing("within", operation, (4, size), 0.0), hardware)
            for operation in ("all_reduce", "all_gather", "send")
            for size in (1 << 12, 1 << 16, 1 << 22)
        ),
    ]


def time_of(message: Timing, hardware: HardwareConfig) -> Timing:
    """A message with the time that the model gives it within a node."""
    latencies, size = message.passes
    seconds = latencies * hardware.node_latency_us * 1e-6 + size / (hardware.node_gbps * 1e9)
    return message._replace(seconds=seconds)


def test_constants_of_predicted_times_are_found_again() -> None:
    blank = replace(TRUE, efficiency=EfficiencyConfig(), memory_gbps=1, node_gbps=1, peak_tflops=PeakConfig())
    found = fit(times_of(TRUE), LAYER, blank, "fp32")
    true, its = TRUE.efficiency, found.efficiency
    assert its.matmul_half == true.matmul_half
    assert (its.matmul_least, its.matmul_most) == (128, 2048)
    peak = TRUE.peak_tflops.fp32 or 0
    for name in ("matmul", "attention"):  # shares of a peak that no product reached
        rate = getattr(its, name) * (found.peak_tflops.fp32 or 0)
        assert rate == pytest.approx(getattr(true, name) * peak, rel=0.02), name
    assert its.memory == pytest.approx(true.memory, rel=0.05)
    assert found.kernel_us == pytest.approx(20, rel=0.2)
    assert found.memory_gbps == pytest.approx(20)
    assert (found.node_gbps, found.node_latency_us) == pytest.approx((3, 50), rel=0.01)
    assert found.peak_tflops.bf16 == pytest.approx(0.2)


def test_a_datasheets_peak_stays_and_the_share_of_it_is_measured() -> None:
    blank = replace(TRUE, efficiency=EfficiencyConfig(), peak_tflops=PeakConfig(fp32=0.2))
    found = fit(times_of(TRUE), LAYER, blank, "fp32")
    assert found.peak_tflops.fp32 == 0.2
    assert found.efficiency.matmul == pytest.approx(0.4, rel=0.02)


def test_a_link_that_no_message_filled_has_the_best_rate_seen() -> None:
    times = ((1 << 10, 2e-3), (1 << 20, 1e-3))
    falling = [Timing("within", "send", (2, size), seconds) for size, seconds in times]
    latency, rate = fit_link(falling)
    assert latency == 0
    assert rate == pytest.approx((1 << 20) / 1e-3)


@pytest.mark.slow
def test_a_calibration_is_hardware_of_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its file, replaced by the next, and as hardware=this; before it hardware=this is a mistake."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main([*PLAN, "hardware=this"]) == 2
    assert "hardware=this: this machine was not calibrated; run `mlm plan cal" in capsys.readouterr().err
    job = CalibrationJob(out=str(tmp_path / "mine.yaml"), parallel=ParallelConfig(), max_waiting=1.0)
    for _ in range(2):
        on_rank(job, ParallelContext(), TINY)
    printed = capsys.readouterr().out
    assert f"name: {cpu_name()}" in printed
    assert f"kept for hardware=this in {calibration_file()}" in printed
    assert calibration_file().read_bytes() == (tmp_path / "mine.yaml").read_bytes()
    for hardware in (tmp_path / "mine.yaml", "this"):
        assert main([*PLAN, f"hardware={hardware}"]) == 0
        assert cpu_name() in capsys.readouterr().out


def test_a_users_yaml_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text("a: 1\n")
    assert main(["plan", "calibrate", f"out={tmp_path / 'mine.yaml'}"]) == 2
    assert "exists and was not written by mlm" in capsys.readouterr().err
    assert main(["plan", "calibrate", f"out={tmp_path / 'mine.json'}"]) == 2
    assert "must end in .yaml or .yml" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_measure_their_links() -> None:
    run_on_ranks(check_links, tp=2)


def check_links(ctx: ParallelContext) -> None:
    """Every operation and size, on both ranks; steps are as many as were announced."""
    measurements = Measurements(ctx, TINY)
    advanced: list[int] = []
    timings, _ = measurements.run(advanced.append)
    assert sum(advanced) == len(measurements.tasks)
    assert len(of_kind(timings, "within")) == 4 * len(TINY.messages)
    assert not of_kind(timings, "across")
    assert all(timing.seconds > 0 for timing in timings)


def test_interrupting_a_calibration_ends_with_130_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Measurements, "measure", interrupted)
    assert main(["plan", "calibrate", "ranks=1", f"out={tmp_path / 'mine.yaml'}"]) == 130
    assert not list(tmp_path.iterdir())


def test_more_ranks_than_a_host_is_started_with_are_rejected() -> None:
    (problem,) = check_plan_calibrate(PlanCalibrateConfig(ranks=9_999_999))
    assert problem.keys == ("ranks",)
    assert problem == "ranks=9999999 must be at most 64"
    assert not check_plan_calibrate(PlanCalibrateConfig(ranks=64))


def test_a_measurement_that_waited_for_processors_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, ctx = [0.05, 0.3], ParallelContext()
    monkeypatch.setattr(Measurements, "run", lambda *_: (times_of(TRUE), waits.pop(0)))
    measurements = Measurements(ctx, TINY)
    assert measure(ctx, measurements, 0.1) == times_of(TRUE)
    with pytest.raises(UserError, match=r"max_waiting=0.1: other programs had the processors for 30%"):
        measure(ctx, measurements, 0.1)


@pytest.mark.slow
def test_waiting_for_a_processor_is_counted() -> None:
    """Two busy threads on one processor: each waits while the other runs."""
    program = (
        "import os, time; from threading import Thread\n"
        "from mlm.plan.calibrate_measure import processor_wait\n"
        "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "end, before = time.monotonic() + 0.3, processor_wait()\n"
        "def work():\n    while time.monotonic() < end: pass\n"
        "if os.fork() == 0:\n    work(); os._exit(0)\n"
        "work(); os.wait(); print(processor_wait() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel does not count waits")
    assert float(done.stdout) > 0.05


def interrupted(*_: object) -> None:
    """Ctrl-C during the first measurement."""
    raise KeyboardInterrupt
