"""`mlm plan calibrate`: constants are rates that were measured; its YAML is hardware that plans take."""

from pathlib import Path

import pytest

from mlm.cli import main
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.plan import calibrate
from mlm.plan.calibrate import Workload, hardware_of_this, measure, on_rank
from mlm.plan.config import CalibrationJob
from mlm.plan.hardware import calibration_file, cpu_name
from tests.ranks import on_ranks

TINY = Workload(
    formats=("fp32", "bf16"),
    products=((16, 16, 16), (32, 16, 64)),
    copy=1 << 12,
    messages=(1 << 8, 1 << 12),
    least_s=0.0,
)
PLAN = ["plan", "layouts", "model=gpt2_tiny", "gpus=1", "precision=fp32", "train.global_batch_size=8"]


def test_hardware_has_the_measured_constants() -> None:
    measured = {
        "products": 4e10,
        "fp32": 5e10,
        "bf16": 2e11,
        "memory": 2e10,
        "node": 3e9,
        "node_latency": 5e-5,
    }
    hardware = hardware_of_this(ParallelContext(), TINY, measured, 0)
    assert (hardware.peak_tflops.fp32, hardware.peak_tflops.bf16) == (0.05, 0.2)
    efficiency = hardware.efficiency
    assert (efficiency.matmul, efficiency.matmul_half) == (0.8, 0)
    assert (hardware.memory_gbps, efficiency.memory) == (20, 1)
    assert (hardware.node_gbps, hardware.node_latency_us) == (3, 50)
    assert (hardware.network_gbps, hardware.network_latency_us, hardware.network_is_assumed) == (3, 50, True)
    two_nodes = measured | {"network": 1e9, "network_latency": 2e-4}
    hardware = hardware_of_this(ParallelContext(), TINY, two_nodes, 0)
    network = hardware.network_gbps, hardware.network_latency_us, hardware.network_is_assumed
    assert network == (1, 200, False)


@pytest.mark.slow
def test_a_calibration_is_hardware_of_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its file, replaced by the next, and as hardware=this; before it hardware=this is a mistake."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main([*PLAN, "hardware=this"]) == 2
    assert "hardware=this: this machine was not calibrated; run `mlm plan cal" in capsys.readouterr().err
    job = CalibrationJob(out=str(tmp_path / "mine.yaml"), parallel=ParallelConfig())
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
@on_ranks(tp=2)
def test_ranks_measure_their_links(ctx: ParallelContext) -> None:
    """Both ranks have the same numbers, of the one axis that has several ranks."""
    measured = measure(ctx, TINY)
    assert measured.keys() == {"products", "fp32", "bf16", "memory", "node", "node_latency"}
    assert all(value > 0 for value in measured.values())


def test_interrupting_a_calibration_ends_with_130_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "best_time", interrupted)
    assert main(["plan", "calibrate", "ranks=1", f"out={tmp_path / 'mine.yaml'}"]) == 130
    assert not list(tmp_path.iterdir())
