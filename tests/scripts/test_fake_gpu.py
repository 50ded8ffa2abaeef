"""Fake GPUs: their arithmetic against PyTorch's own, their record, and one layout."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import fake_gpu
import pytest
import torch
import torch.nn.functional as F
from gpu.fake import arithmetic
from gpu.fake.build import UnavailableError, installed

from tests.slow import slow

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


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "name a command"),
        (["--gpus", "0", "--", "-c", "1"], "--gpus 0"),
        (["--capability", "9", "--", "-c", "1"], "--capability 9"),
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


@pytest.mark.parametrize("name", ["SIGTERM", slow("SIGINT")])
def test_a_command_that_is_asked_to_end_may_save_first(name: str, tmp_path: Path) -> None:
    said = (
        "import signal, sys, time\ndef save(*_):\n    time.sleep(0.2)\n    print('saved')\n    sys.exit(7)\n"
    )
    said += f"signal.signal(signal.{name}, save)\nprint('begun', flush=True)\ntime.sleep(60)"
    outer = f"import sys, fake_gpu; sys.exit(fake_gpu.wait_for([sys.executable, '-c', {said!r}], None))"
    process = subprocess.Popen(
        [sys.executable, "-c", outer],
        cwd=SCRIPT.parent,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "begun\n"
    if name == "SIGINT":  # a terminal sends it to all
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.Signals[name])
    assert process.communicate(timeout=30)[0] == "saved\n"
    assert process.returncode == 7


LAYOUTS = (
    (2, "tp=2 sequence_parallel=true tp_overlap=2"),
    (2, "pp=2 vp=2 model.num_layers=4"),
    (4, "dp=2 tp=2 zero=3"),
    (8, "tp=2 pp=2 dp=2 sequence_parallel=true pipeline=zb_h1"),
    (4, "cp=2 tp=2 model=llama_tiny"),
)


@needs_cuda_build
@pytest.mark.slow
@pytest.mark.parametrize("gpus, words", LAYOUTS)
def test_a_layout_over_nccl_equals_one_process(gpus: int, words: str, tmp_path: Path) -> None:
    """Sends complete when they are received, and messages are late: what does not wait trains differently."""
    model = [] if "model=" in words else ["model=gpt2_tiny"]
    command = [sys.executable, str(SCRIPT), "--gpus", str(gpus), "--rendezvous", "--late", "5", "--"]
    command += ["-m", "mlm", "parity", "precision=fp64", *model, *words.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
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
