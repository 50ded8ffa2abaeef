"""The loss scale of float16, and `precision=auto` by processor, GPU and width."""

from typing import Any

import pytest
import torch

from mlm.optim.auto_precision import MIN_HIDDEN, Gpu, choose_precision, settle_precision
from mlm.optim.config import PrecisionConfig
from mlm.optim.precision import LossScaler

INTEL, AMD = "vendor_id : GenuineIntel\nflags : fpu {}\n", "vendor_id : AuthenticAMD\nflags : fpu {}\n"


def no_gpu(device: str) -> None:
    pytest.fail(f"asked for the GPU of {device}")


@pytest.mark.parametrize(
    ("gpu", "cpuinfo", "hidden_size", "dtype"),
    [
        (None, AMD.format("avx512_bf16"), 384, "bf16"),
        (None, AMD.format("avx512_bf16"), None, "bf16"),
        (None, AMD.format("avx512_bf16"), MIN_HIDDEN - 1, "fp32"),
        (None, AMD.format("avx2"), 384, "fp32"),
        (None, INTEL.format("avx512_bf16"), 384, "fp32"),
        (None, INTEL.format("avx512_bf16 amx_tile amx_bf16"), 384, "bf16"),
        (None, "", 384, "fp32"),
        *((Gpu("GPU", version), "", 64, dtype) for version, dtype in (((7, 0), "fp16"), ((8, 0), "bf16"))),
        (Gpu("GPU", (9, 0)), "", 64, "bf16"),
    ],
)
def test_a_processor_gets_the_faster_format_and_a_gpu_the_half_format_it_multiplies(
    gpu: Gpu | None, cpuinfo: str, hidden_size: int | None, dtype: str
) -> None:
    assert choose_precision(hidden_size, gpu, cpuinfo)[0] == dtype


@pytest.mark.parametrize(
    ("gpu", "dtype", "line"),
    [
        (None, "fp32", None),
        (Gpu("H200", (9, 0)), "bf16", "precision=default: bf16, as H200 multiplies it"),
        (Gpu("V100", (7, 0)), "fp16", "precision=default: fp16, as V100 multiplies no bfloat16"),
    ],
)
def test_the_default_is_half_precision_on_a_gpu_alone(gpu: Gpu | None, dtype: str, line: str | None) -> None:
    values: dict[str, Any] = {"precision": {"dtype": "default"}, "model": {"hidden_size": 4096}}
    assert settle_precision(values, lambda _: gpu) == line
    assert values["precision"] == {"dtype": dtype}


def test_a_plan_takes_the_format_of_its_hardware() -> None:
    for peaks, dtype in (({"bf16": 1, "fp16": 1}, "bf16"), ({"fp16": 1}, "fp16")):
        values: dict[str, Any] = {
            "precision": {"dtype": "auto"},
            "hardware": {"device": "gpu", "name": "x", "peak_tflops": peaks},
        }
        assert settle_precision(values, no_gpu) == f"precision=auto: {dtype}, as x multiplies it"
        assert values["precision"]["dtype"] == dtype


def scaler(**settings: Any) -> LossScaler:
    config = PrecisionConfig(dtype="fp16", initial_loss_scale=8.0, loss_scale_window=2, **settings)
    return LossScaler(config, torch.device("cpu"))


def test_the_scale_never_falls_below_its_minimum() -> None:
    loss_scale = scaler(min_loss_scale=3.0)
    scales = []
    for _ in range(3):
        loss_scale.update(torch.tensor(1.0))
        scales.append(loss_scale.scale.item())
    assert scales == [4.0, 3.0, 3.0]


def test_a_restored_scale_doubles_when_the_saved_one_would_have() -> None:
    saved, restored = scaler(), scaler()
    saved.update(torch.tensor(0.0))
    restored.load_state(saved.state())
    restored.update(torch.tensor(0.0))
    assert restored.scale.item() == 16.0


def test_without_a_scale_an_overflow_skips_its_step_and_float16_begins_with_its_own_scale() -> None:
    """The scale 1 of another precision is none; the counts are those of the run."""
    fixed, continued = LossScaler(PrecisionConfig(dtype="bf16"), torch.device("cpu")), scaler()
    fixed.update(torch.tensor(0.0))
    assert fixed.skipped.item() == 0
    fixed.update(torch.tensor(1.0))
    assert (fixed.scale.item(), fixed.skipped.item()) == (1.0, 1)
    continued.load_state(fixed.state())
    assert (continued.scale.item(), continued.skipped.item()) == (8.0, 1)
