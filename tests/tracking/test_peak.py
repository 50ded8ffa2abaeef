"""Peaks of known devices, and memory in use."""

import mmap

import pytest
import torch

from mlm.tracking import peak
from mlm.tracking.peak import memory_bytes, peak_flops, table_peak

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "name, unit, tflops",
    [
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "fp16", 756),
        ("NVIDIA GB200", "bf16", 2500),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("Tesla V100-SXM2-32GB", "bf16", None),  # emulates it
        ("NVIDIA A10G", "bf16", None),  # not an A10
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
    ],
)
def test_peak_of_a_known_gpu_is_in_the_table_and_no_other_is_guessed(
    name: str, unit: str, tflops: float | None
) -> None:
    found = table_peak(name, unit)
    assert (found and found.flops) == (tflops and pytest.approx(tflops * 1e12))


@pytest.mark.parametrize("precision, tflops", [("highest", 66.9), ("high", 494.7)])
def test_fp32_on_a_gpu_follows_what_torch_would_run(
    monkeypatch: pytest.MonkeyPatch, precision: str, tflops: float
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        found = peak_flops(torch.device("cuda", 0), "fp32")
    finally:
        torch.set_float32_matmul_precision(before)
    assert found is not None
    assert found.flops == pytest.approx(tflops * 1e12)


def test_the_users_peak_wins() -> None:
    found = peak_flops(CPU, "fp32", 12.5)
    assert found is not None
    assert (found.flops, found.label) == (12.5e12, "dist.peak_tflops=12.5")


def test_a_cpu_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "MEASURE_S", 0.01)
    peak.measure_matmul.cache_clear()
    first, second = peak_flops(CPU, "fp32"), peak_flops(CPU, "fp32")
    assert first is not None
    assert first.label.startswith("measured fp32 matmul")
    assert 1e8 < first.flops < 1e15
    assert first == second
    assert peak.measure_matmul.cache_info().misses == 1
    peak.measure_matmul.cache_clear()  # a hundredth of a second is no peak for others


def test_memory_on_cpu_grows_with_what_is_touched() -> None:
    page, before = b"x" * (1 << 20), memory_bytes(CPU)
    with mmap.mmap(-1, 64 << 20) as held:  # new memory: a heap may have as much that is free
        for _ in range(64):
            held.write(page)
        assert memory_bytes(CPU) - before > 32 << 20
