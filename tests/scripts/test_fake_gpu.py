"""Fake GPUs: their arithmetic against PyTorch's own, their record, and one layout."""

import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fake_gpu
import pytest
import torch
import torch.nn.functional as F
from gpu.fake import arithmetic, rehearsal
from gpu.fake.build import UnavailableError, installed
from gpu.runner import Ended
from torch import Tensor

from tests.slow import slow_but

SCRIPT = Path(fake_gpu.__file__)


def can_fake() -> bool:
    try:
        installed()
    except UnavailableError:
        return False
    return not torch.cuda.is_available()


needs_cuda_build = pytest.mark.skipif(
    not can_fake(), reason="needs a PyTorch built for CUDA, its headers, and no GPU"
)


def test_operators_that_only_cuda_has() -> None:
    x, y = torch.randn(3, 4).bfloat16(), torch.randn(4, 5).bfloat16()
    total = torch.randn(3, 5)
    wide = x.float() @ y.float()
    assert torch.equal(arithmetic.OPERATORS["mm.dtype"](x, y, torch.float32), wide)
    out = torch.empty(3, 5)
    assert arithmetic.OPERATORS["addmm.dtype_out"](total, x, y, torch.float32, out=out) is out
    torch.testing.assert_close(out, total + wide)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_gradients_of_rms_norm_are_pytorch_s(dtype: torch.dtype, tolerance: float) -> None:
    x, weight = (torch.randn(size, dtype=dtype, requires_grad=True) for size in ((2, 3, 8), (8,)))
    expected = F.rms_norm(x, (8,), weight, 1e-5)
    dy = torch.randn_like(expected)
    scale = (x.detach().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    found = arithmetic.rms_norm_backward(dy, x.detach(), [8], scale, weight.detach(), [True, True])
    for mine, theirs in zip(found, torch.autograd.grad(expected, [x, weight], dy), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


def test_asking_where_torch_is_does_not_end_the_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mlm` asks before its ranks, which load it, start."""
    site = runpy.run_path(str(SCRIPT.parent / "gpu/fake/site/sitecustomize.py"))
    hook = site["AfterTorch"]()
    monkeypatch.setattr(sys, "meta_path", [hook, *sys.meta_path])
    assert hook.find_spec("torch").loader is hook
    assert hook in sys.meta_path


def test_host_and_device_are_not_mixed() -> None:
    class OnDevice(Tensor):
        is_cuda = True  # type: ignore[assignment]
        device = torch.device("cuda", 0)  # type: ignore[assignment]

    class OnAnother(OnDevice):
        device = torch.device("cuda", 1)  # type: ignore[assignment]

    there = torch.randn(3).as_subclass(OnDevice)
    arithmetic.check_one_device("add", [there, torch.tensor(1.0), 2])
    with pytest.raises(RuntimeError, match=r"add: expected all tensors on one device, found .*\(3,\)"):
        arithmetic.check_one_device("add", [there, torch.randn(3)])
    with pytest.raises(RuntimeError, match=r"add: .* one device, found cuda:0.*cuda:1"):
        arithmetic.check_one_device("add", [there, torch.randn(3).as_subclass(OnAnother)])


def test_views_and_allocations_stay_pytorch_s() -> None:
    computing = {operator.overloadpacket.__name__ for _, operator in arithmetic.computing("CPU")}
    assert {"copy_", "mm", "addmm", "native_layer_norm", "_local_scalar_dense"} <= computing
    assert not {"view", "as_strided", "empty_strided", "record_stream"} & computing


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "name a command"),
        (["--gpus", "0", "--", "-c", "1"], "--gpus 0"),
        (["--late", "-1", "--", "-c", "1"], "--late -1"),
        (["--capability", "9", "--", "-c", "1"], "--capability 9"),
        (["--kernels", "nowhere/at/all", "--", "-c", "1"], "--kernels nowhere/at/all"),
        (["--rehearse", "out", "--", "-c", "1"], "--rehearse FOLDER"),
    ],
)
def test_mistake_is_one_line_and_exit_2(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_gpu, "library", lambda _: pytest.fail("built"))
    assert fake_gpu.main(words) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1


def test_a_host_where_the_stub_cannot_be_built_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def library(cache: Path) -> Path:
        raise UnavailableError("gcc is not installed")

    monkeypatch.setattr(fake_gpu, "library", library)
    assert fake_gpu.main(["--", "-c", "print(1)"]) == 2
    assert capsys.readouterr().err == "fake_gpu.py: gcc is not installed\n"


@pytest.mark.parametrize("name", slow_but({1}, ["SIGINT", "SIGTERM", "SIGHUP"]))
def test_a_command_that_is_asked_to_end_may_save_first(name: str, tmp_path: Path) -> None:
    said = "import signal, sys, time\ndef save(*_):\n    time.sleep(1)\n    print('saved')\n    sys.exit(7)\n"
    said += f"signal.signal(signal.{name}, save)\nprint('begun', flush=True)\ntime.sleep(60)"
    outer = f"import sys, fake_gpu; sys.exit(fake_gpu.wait_for([sys.executable, '-c', {said!r}], None))"
    process = subprocess.Popen(
        [sys.executable, "-c", outer],
        cwd=SCRIPT.parent,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    if name == "SIGINT":  # a terminal sends it to all
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.Signals[name])
    assert process.communicate(timeout=30)[0] == "saved\n"
    assert process.returncode == 7


def test_rehearsal_records_each_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endings = iter([(0, "noise\nEQUAL: ['a'] [b] | <c>\n"), (0, "nothing to say"), (1, "EQUAL\nTraceback")])

    def run_limited(
        command: Sequence[str], _: Any, limit_s: float, say: Any, log: Path, folder: Path
    ) -> Ended:
        assert folder == log.parent  # what a command writes goes with it
        code, output = next(endings)
        log.write_text(output)
        return Ended(code, 1.0, ())

    monkeypatch.setattr(rehearsal, "run_limited", run_limited)
    assert rehearsal.rehearse(tmp_path, rehearsal.LAYOUTS[:3]) == 1
    rows = [line for line in (tmp_path / rehearsal.TABLE).read_text().splitlines() if line.startswith("| ")]
    assert [row.split(" | ")[3] for row in rows[2:]] == ["well", "**badly**, 0", "**badly**, 1"]
    assert rows[2].endswith(r"EQUAL: \['a'] \[b] \| &lt;c> |")


@needs_cuda_build
@pytest.mark.slow
def test_a_layout_over_nccl_equals_one_process(tmp_path: Path) -> None:
    words = ["-m", "mlm", "parity", "model=gpt2_tiny", "precision=fp64", "tp=2", "pp=2"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--gpus", "4", "--", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "EQUAL" in done.stdout


@needs_cuda_build
@pytest.mark.slow
def test_a_mixture_waits_once_a_layer_for_experts_elsewhere_and_never_for_its_own(tmp_path: Path) -> None:
    words = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        str(SCRIPT.parent / "gpu/fake/expert_waits.py"),
    ]
    check = [str(SCRIPT.parent / "gpu_check.py"), "--quick", "--only", "waits", "--out", "check"]
    for options, command in ((["--gpus", "2"], words), (["--no-arithmetic"], check)):
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *options, "--", *command],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    assert "mlm/parallel" not in done.stdout
    assert "mlm/models" not in done.stdout
    for kind in ("mixtral", "deepseek"):
        assert f"waits in a steady step: model={kind}" in done.stdout
