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
from gpu.fake import arithmetic, attention, rehearsal
from gpu.fake.build import UnavailableError, installed
from gpu.runner import Ended
from torch import Tensor

from tests.slow import slow_but

SCRIPT = Path(fake_gpu.__file__)
CLOSE: Any = {"rtol": 1e-5, "atol": 1e-6}
"""Sums of a softmax are float32, as those of the kernels."""


def can_fake() -> bool:
    try:
        installed()
    except UnavailableError:
        return False
    return not torch.cuda.is_available()


needs_cuda_build = pytest.mark.skipif(
    not can_fake(), reason="needs a PyTorch built for CUDA, its headers, and no GPU"
)


def heads(groups: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(1)
    shapes = (2, 4, 5, 8), (2, groups, 5, 8), (2, groups, 5, 8)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("causal, biased", [(True, False), (False, False), (False, True)])
def test_attention_and_its_gradients_are_pytorch_s(groups: int, causal: bool, biased: bool) -> None:
    q, k, v = heads(groups)
    bias = torch.randn(2, 1, 5, 5, dtype=q.dtype, requires_grad=True) if biased else None
    expected = F.scaled_dot_product_attention(q, k, v, bias, is_causal=causal, enable_gqa=groups < 4)
    dy = torch.randn_like(expected)
    inputs = [q, k, v] if bias is None else [q, k, v, bias]
    wanted = torch.autograd.grad(expected, inputs, dy)
    with torch.no_grad():
        out, sums, *_ = attention.efficient(q, k, v, bias, True, 0.0, causal)
        found = attention.efficient_backward(
            dy, q, k, v, bias, out, sums, *attention.NONE.state, 0.0, [True, True, True, biased], causal
        )
    torch.testing.assert_close(out, expected)
    assert out.stride() == out.transpose(1, 2).contiguous().transpose(1, 2).stride()
    for mine, theirs in zip(found, wanted, strict=False):
        torch.testing.assert_close(mine, theirs, **CLOSE)


def test_kernels_of_one_kind_of_attention_agree() -> None:
    q, k, v = heads(4)
    dy = torch.randn(2, 4, 5, 8, dtype=q.dtype)
    with torch.no_grad():
        out, sums = attention.forward(q, k, v, None, True, None)
        wanted = attention.backward(dy, q, k, v, out, sums, None, True, None)[:3]
        rest = (None, None, 5, 5, 0.0, True)
        state = torch.tensor(0)
        found = (
            attention.flash_backward(dy, q, k, v, out, sums, *rest, state, state),
            attention.cudnn_backward(dy, q, k, v, out, sums, state, state, None, *rest),
        )
        outs = attention.flash(q, k, v, 0.0, True)[0], attention.cudnn(q, k, v, None, True, 0.0, True)[0]
    assert torch.equal(*outs)
    for heads_found in found:
        assert all(map(torch.equal, heads_found, wanted))


def test_packed_attention_is_that_of_each_sequence() -> None:
    q, k, v = (x.detach()[0].transpose(0, 1).contiguous() for x in heads(4))
    ends = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    dy = torch.randn_like(q)
    out, sums, *_ = attention.varlen(q, k, v, ends, ends, 3, 3, 0.0, True, False)
    found = attention.varlen_backward(dy, q, k, v, out, sums, ends, ends, 3, 3, 0.0, True, out, out)
    for first, end in ((0, 2), (2, 5)):
        parts = [x[first:end].transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
        expected = F.scaled_dot_product_attention(*parts, is_causal=True)
        wanted = torch.autograd.grad(expected, parts, dy[first:end].transpose(0, 1)[None])
        torch.testing.assert_close(out[first:end], expected[0].transpose(0, 1))
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine[first:end], theirs[0].transpose(0, 1), **CLOSE)


def test_blocks_of_keys_have_the_gradients_of_all_of_them() -> None:
    """Backward passes get the output and the sums of more keys than theirs: context parallelism."""
    q, k, v = heads(4)
    expected = F.scaled_dot_product_attention(q, k, v)
    dy = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [q, k, v], dy)
    with torch.no_grad():
        out, sums = attention.forward(q, k, v, None, False, None)
        blocks = [
            attention.backward(dy, q, k[:, :, part], v[:, :, part], out, sums, None, False, None)[:3]
            for part in (slice(0, 2), slice(2, 5))
        ]
    torch.testing.assert_close(blocks[0][0] + blocks[1][0], wanted[0], **CLOSE)
    for n in (1, 2):
        joined = torch.cat([block[n] for block in blocks], 2)
        torch.testing.assert_close(joined, wanted[n], **CLOSE)


class Generator:
    """A GPU's, as far as attention asks."""

    offset = 0

    def initial_seed(self) -> int:
        return 7

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


@pytest.mark.parametrize("packed", [False, True])
def test_masks_of_dropout_follow_the_generator_and_return_in_backward(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "default_generators", (Generator(),))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    q, k, v = heads(4)
    if packed:
        ends = torch.tensor([0, 5], dtype=torch.int32)
        rows = [x.detach()[0].transpose(0, 1) for x in (q, k, v)]
        calls = [attention.varlen(*rows, ends, ends, 5, 5, 0.5, True, False) for _ in range(2)]
        dy = torch.ones_like(rows[0])
        found = attention.varlen_backward(
            dy, *rows, *calls[1][:2], ends, ends, 5, 5, 0.5, True, *calls[1][2:4]
        )
        found = tuple(x.transpose(0, 1)[None] for x in found)
        q, k, v = (x.detach()[:1].requires_grad_() for x in (q, k, v))
    else:
        with torch.no_grad():
            calls = [attention.flash(q, k, v, 0.5, True) for _ in range(2)]
            dy = torch.ones_like(calls[1][0])
            state = calls[1][6:8]
            found = attention.flash_backward(dy, q, k, v, *calls[1][:2], None, None, 5, 5, 0.5, True, *state)
    assert not torch.equal(calls[0][0], calls[1][0])
    weights = ((q @ k.mT / 8**0.5).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)).softmax(-1)
    factors = attention.Dropout(0.5, 7, attention.TAKEN).factors(weights)
    wanted = torch.autograd.grad((weights * factors @ v).sum(), [q, k, v])
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


def test_operators_that_only_cuda_has() -> None:
    x, y = torch.randn(3, 4).bfloat16(), torch.randn(4, 5).bfloat16()
    total = torch.randn(3, 5)
    wide = x.float() @ y.float()
    assert torch.equal(arithmetic.OPERATORS["mm.dtype"](x, y, torch.float32), wide)
    out = torch.empty(3, 5)
    assert arithmetic.OPERATORS["addmm.dtype_out"](total, x, y, torch.float32, out=out) is out
    torch.testing.assert_close(out, total + wide)
    scales = torch.tensor(2.0), torch.tensor(0.25)
    narrow = x.to(torch.float8_e4m3fn), y.to(torch.float8_e4m3fn)
    found = arithmetic.scaled_mm(*narrow, *scales, out_dtype=torch.float32)
    torch.testing.assert_close(found, 0.5 * (narrow[0].float() @ narrow[1].float()))


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
