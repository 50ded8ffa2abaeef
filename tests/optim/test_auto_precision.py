"""`precision=auto` by processor, GPU and width; what the commands make of it."""

from typing import Any

import pytest

from mlm.optim.auto_precision import AMPERE, MIN_HIDDEN, Gpu, choose_precision, settle_precision

INTEL, AMD = "vendor_id : GenuineIntel\nflags : fpu {}\n", "vendor_id : AuthenticAMD\nflags : fpu {}\n"


def no_gpu(device: str) -> None:
    pytest.fail(f"asked for the GPU of {device}")


@pytest.mark.parametrize(
    ("cpuinfo", "hidden_size", "dtype"),
    [
        (AMD.format("avx512_bf16"), 384, "bf16"),
        (AMD.format("avx512_bf16"), None, "bf16"),
        (AMD.format("avx512_bf16"), MIN_HIDDEN - 1, "fp32"),
        (AMD.format("avx2"), 384, "fp32"),
        (INTEL.format("avx512_bf16"), 384, "fp32"),
        (INTEL.format("avx512_bf16 amx_tile amx_bf16"), 384, "bf16"),
        ("", 384, "fp32"),
    ],
)
def test_a_processor_gets_the_faster_format(cpuinfo: str, hidden_size: int | None, dtype: str) -> None:
    assert choose_precision(hidden_size, None, cpuinfo)[0] == dtype


@pytest.mark.parametrize(("capability", "dtype"), [((7, 0), "fp16"), ((8, 0), "bf16"), ((9, 0), "bf16")])
def test_a_gpu_gets_the_half_format_it_multiplies(capability: tuple[int, int], dtype: str) -> None:
    assert choose_precision(64, Gpu("GPU", capability), "")[0] == dtype


def test_the_device_of_the_command_is_asked() -> None:
    values: dict[str, Any] = {"precision": {"dtype": "auto"}, "dist": {"device": "cuda"}, "model": {}}
    assert settle_precision(values, lambda device: Gpu(device, AMPERE)) == (
        "precision=auto: bf16, as cuda multiplies it"
    )


def test_a_plan_takes_the_format_of_its_hardware() -> None:
    for peaks, dtype in (({"bf16": 1, "fp16": 1}, "bf16"), ({"fp16": 1}, "fp16")):
        values: dict[str, Any] = {
            "precision": {"dtype": "auto"},
            "hardware": {"device": "gpu", "name": "x", "peak_tflops": peaks},
        }
        assert settle_precision(values, no_gpu) == f"precision=auto: {dtype}, as x multiplies it"
        assert values["precision"]["dtype"] == dtype


@pytest.mark.parametrize("values", [{}, {"precision": None}, {"precision": {"dtype": "fp64"}}])
def test_what_is_chosen_stays(values: dict[str, Any]) -> None:
    before = repr(values)
    assert settle_precision(values, no_gpu) is None
    assert repr(values) == before
