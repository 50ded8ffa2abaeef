"""Choices of kernels that only a GPU runs, as far as a CPU can tell."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend

from mlm.checkpoint.native.staging import StagedFile
from mlm.cli.compose import load_config
from mlm.errors import UserError
from mlm.parallel import matmul, mesh
from mlm.train.kernels import MISSING, choose_attention, compiles, missing_kernel_as_user_error
from tests.operators import Operators

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def switches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """PyTorch's switches of attention, noted instead of set."""
    found: dict[str, Any] = {}
    for name in ("cudnn", "flash", "mem_efficient", "math"):
        monkeypatch.setattr(
            torch.backends.cuda, f"enable_{name}_sdp", lambda on, name=name: found.__setitem__(name, on)
        )
    monkeypatch.setattr(torch._C, "_set_sdp_priority_order", lambda order: found.__setitem__("order", order))
    return found


def test_attention_on_hopper_tries_cudnn_first(switches: dict[str, Any]) -> None:
    choose_attention("auto", (9, 0))
    order = switches.pop("order")
    assert set(switches.values()) == {True}
    assert order[0] == SDPBackend.CUDNN_ATTENTION.value
    assert len(set(order)) == 4


def test_attention_before_hopper_keeps_pytorch_s_order(switches: dict[str, Any]) -> None:
    choose_attention("auto", (8, 0))
    assert switches == {"cudnn": True, "flash": True, "mem_efficient": True, "math": True}


def test_attention_by_name_allows_no_other(switches: dict[str, Any]) -> None:
    choose_attention("efficient", (9, 0))
    assert switches == {"cudnn": False, "flash": False, "mem_efficient": True, "math": False}


def test_the_order_is_one_that_pytorch_takes() -> None:
    before = torch._C._get_sdp_priority_order()
    try:
        choose_attention("auto", (9, 0))
        assert torch._C._get_sdp_priority_order()[0] == SDPBackend.CUDNN_ATTENTION.value
    finally:
        torch._C._set_sdp_priority_order(before)


def test_layers_compile_by_default_on_gpus_with_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (True, False):
        monkeypatch.setattr("torch.utils._triton.has_triton", lambda found=found: found)
        assert compiles(None, GPU) is found
    assert all(compiles(True, device) and not compiles(False, device) for device in (CPU, GPU))
    assert not compiles(None, CPU)


def test_a_gpu_writes_weight_gradients_in_float32_without_a_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake tensors: the product is of half precision, its result is not, and nothing converts it."""
    monkeypatch.setattr(matmul, "_WIDE_SUMS", {"cuda": True})
    with FakeTensorMode(), Operators() as seen:
        dy, x = (torch.empty(8, n, dtype=torch.bfloat16, device="cuda") for n in (4, 6))
        found = matmul.weight_gradient(dy, x, torch.float32)
    assert (found.dtype, found.shape) == (torch.float32, (4, 6))
    assert [name for name in seen.names if "mm" in name or "_to_copy" in name] == ["aten.mm.dtype"]


def test_a_gpu_adds_weight_gradients_where_their_sum_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake tensors: one product, which gets the sum, and nothing else."""
    products: list[tuple[torch.Tensor, ...]] = []
    monkeypatch.setattr(matmul, "_WIDE_ADDS", {"cuda": True})
    monkeypatch.setattr(matmul.torch, "addmm", lambda *args, out, out_dtype: products.append((args[0], out)))
    with FakeTensorMode(), Operators() as seen:
        dy, x = (torch.empty(8, n, dtype=torch.bfloat16, device="cuda") for n in (4, 6))
        total = torch.empty(4, 6, device="cuda")
        seen.names.clear()
        matmul.add_weight_gradient(total, dy, x)
    assert {name for name in seen.names if name.startswith("aten")} <= {"aten.t.default"}
    ((read, written),) = products
    assert read is written is total


@pytest.mark.parametrize("rounds", [False, True])
def test_sums_inside_products_need_a_device_that_keeps_their_bits(
    rounds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The questions to a GPU before the first step, with the product computed here."""

    def add(total: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
        sums = total + dy.float().t() @ x.float()
        total.copy_(sums.bfloat16() if rounds else sums)

    monkeypatch.setattr(matmul, "_add_wide", add)
    assert matmul._adds_in_float32(torch.ones(16, 16, dtype=torch.bfloat16)) is not rounds


@pytest.mark.parametrize("locks", [True, False])
def test_a_checkpoint_of_a_gpu_is_staged_in_page_locked_memory(
    locks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registered once for all saves of a size, and given back before it is mapped anew."""
    events: list[str] = []

    def register(address: int, size: int, flags: int) -> int:
        events.append(f"lock {size}")
        return 0 if locks else 801

    runtime = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda address: events.append("unlock")
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    staged = StagedFile()
    for size in (5000, 4000, 9000):
        staged._allocate(size, page_locked=True)
    assert events == (["lock 8192", "unlock", "lock 12288"] if locks else ["lock 8192", "lock 12288"])
    staged._allocate(20_000, page_locked=False)
    assert staged._locked is None


def test_sums_over_tp_go_first_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The builds of PyTorch for CPUs have no NCCL."""
    monkeypatch.setattr(mesh.dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(
        mesh.dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False
    )
    assert mesh._options("tp", GPU).is_high_priority_stream
    assert mesh._options("dp", GPU) is None
    assert mesh._options("tp", CPU) is None


@pytest.mark.parametrize("words", MISSING)
def test_a_kernel_that_pytorch_lacks_is_a_mistake_in_the_settings(words: str) -> None:
    config = load_config("pretrain", ["model=gpt2_tiny", "data=synthetic", "attention=flash"])
    wanted = r"^(attention=flash|deterministic=false)"
    with pytest.raises(UserError, match=wanted), missing_kernel_as_user_error(config):
        raise RuntimeError(f"{words}. Aborting.")


def test_other_errors_of_pytorch_stay_what_they_are() -> None:
    config = load_config("pretrain", ["model=gpt2_tiny", "data=synthetic"])
    with pytest.raises(RuntimeError, match="sizes differ"), missing_kernel_as_user_error(config):
        raise RuntimeError("sizes differ")


def test_the_words_are_pytorch_s_own() -> None:
    """An error that a CPU can raise: a scatter that has no kernel to repeat every bit."""
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError) as caught:
            torch.zeros(4).put_(torch.tensor([0]), torch.ones(1), accumulate=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert any(words in str(caught.value) for words in MISSING)
