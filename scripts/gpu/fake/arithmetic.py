"""Compute the operators of CUDA tensors on the host memory that stands in for the device's.

Every operator that PyTorch registers for CUDA is replaced by its CPU kernel on tensors over the same memory;
what only CUDA has is in `OPERATORS`, and attention is PyTorch's composite one: fused kernels of attention and
of 8 bits are not there. What happens around them stays PyTorch's CUDA code: dispatch, autograd's threads,
streams, the allocator, process groups.
"""

import ctypes
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

MIXED = {"copy_", "_copy_from", "index", "index_put_", "_index_put_impl_"}
"""Operators that take tensors of the host and the device."""
KEPT = {
    *("set_", "resize_", "record_stream", "is_pinned", "_pin_memory", "empty", "empty_strided", "as_strided"),
    *("view", "_reshape_alias", "unfold", "_fused_sdp_choice", "_cudnn_init_dropout_state", "is_set_to"),
}
"""Operators that compute nothing: PyTorch's own are right."""


def mm_wide(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """aten::mm.dtype."""
    return x.to(dtype) @ y.to(dtype)


def addmm_wide(
    total: Tensor, x: Tensor, y: Tensor, dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """aten::addmm.dtype."""
    return beta * total.to(dtype) + alpha * (x.to(dtype) @ y.to(dtype))


def into(out: Tensor, found: Tensor) -> Tensor:
    return out.copy_(found)


def rms_norm_backward(
    dy: Tensor, x: Tensor, shape: list[int], scale: Tensor, weight: Tensor | None, wanted: list[bool]
) -> tuple[Tensor, Tensor | None]:
    """aten::_fused_rms_norm_backward, over the last dimension."""
    wide = torch.promote_types(x.dtype, torch.float32)
    normed, dy = x.to(wide) * scale, dy.to(wide)
    g = dy if weight is None else dy * weight.to(wide)
    dx = scale * (g - normed * (g * normed).mean(-1, keepdim=True))
    dw = (dy * normed).flatten(0, -2).sum(0) if weight is not None and wanted[1] else None
    return dx.to(x.dtype), None if dw is None or weight is None else dw.to(weight.dtype)


def norms(tensors: list[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    """aten::_foreach_norm."""
    return [torch.linalg.vector_norm(x, order, dtype=dtype) for x in tensors]


OPERATORS: dict[str, Callable[..., Any]] = {
    "mm.dtype": mm_wide,
    "mm.dtype_out": lambda x, y, dtype, *, out: into(out, mm_wide(x, y, dtype)),
    "addmm.dtype": addmm_wide,
    "addmm.dtype_out": lambda *args, out, **rest: into(out, addmm_wide(*args, **rest)),
    "_fused_rms_norm_backward.default": rms_norm_backward,
    "_foreach_norm.Scalar": norms,
    "_local_scalar_dense.default": lambda x: x.item(),
}

library = torch.library.Library("aten", "IMPL")


@cache
def runtime() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def on_host(x: Tensor) -> Tensor:
    storage = x.untyped_storage()
    if storage.nbytes() == 0 or x.numel() == 0:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    raw = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    out = torch.empty(0, dtype=x.dtype, device="cpu")
    return out.set_(raw, x.storage_offset(), x.shape, x.stride())


def on_device(x: Tensor, device: torch.device) -> Tensor:
    dense = x.is_contiguous() or torch._debug_has_internal_overlap(x) == 0
    stride = x.stride() if dense else x.contiguous().stride()
    out = torch.empty_strided(x.shape, stride, dtype=x.dtype, device=device)
    on_host(out).copy_(x)
    return out


def check_one_device(operator: Any, values: list[Any]) -> None:
    """Raise RuntimeError for tensors of several devices, as CUDA does; the host's numbers may be mixed in."""
    tensors = [x for x in values if isinstance(x, Tensor)]
    devices = {x.device for x in tensors if x.is_cuda}
    if len(devices) > 1 or (devices and any(not x.is_cuda and x.dim() for x in tensors)):
        places = ", ".join(f"{x.device} {tuple(x.shape)}" for x in tensors)
        raise RuntimeError(f"{operator}: expected all tensors on one device, found {places}")


def computed(operator: Any, *args: Any, **kwargs: Any) -> Any:
    values = tree_flatten((args, kwargs))[0]
    there = (x.device for x in values if isinstance(x, Tensor) and x.is_cuda)
    device = next(there, torch.device("cuda", torch.cuda.current_device()))
    runtime().fake_settle(ctypes.c_void_p(torch._C._cuda_getCurrentRawStream(device.index)))
    if operator.overloadpacket.__name__ not in MIXED:
        check_one_device(operator, values)
    given: dict[int, tuple[Tensor, Tensor]] = {}

    def enter(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        if not (isinstance(x, Tensor) and x.is_cuda):
            return x
        mine = on_host(x)
        given[id(mine)] = (mine, x)
        return mine

    def leave(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return given[id(x)][1] if id(x) in given else on_device(x, device)

    host_args, host_kwargs = tree_map(enter, (args, kwargs))
    host_args = [
        torch.tensor(x) if isinstance(x, (bool, int, float)) and str(about.type) == "Tensor" else x
        for x, about in zip(host_args, operator._schema.arguments, strict=False)
    ]
    if host_kwargs.get("pin_memory"):
        del host_kwargs["pin_memory"]
    name = str(operator).removeprefix("aten.")
    found = OPERATORS.get(name, operator)(*host_args, **host_kwargs)
    for mine, theirs in given.values():
        if mine.shape != theirs.shape:  # an out= that the operator resized
            on_host(theirs.resize_(mine.shape)).copy_(mine)
    return tree_map(leave, found)


def computing(key: str = "CUDA") -> Iterator[tuple[str, Any]]:
    """Computing operators of a dispatch key: not those that make views or allocate."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    for name in ["aten::copy_", *names]:
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if not name.startswith("aten::") or packet in KEPT:
            continue
        try:
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
        except (AttributeError, RuntimeError):
            continue
        aliases = [about.alias_info for about in (*operator._schema.arguments, *operator._schema.returns)]
        writes = any(alias is not None and alias.is_write for alias in aliases)
        if writes or all(alias is None for alias in aliases):
            yield name.removeprefix("aten::"), operator


def install() -> int:
    """Replace the operators of CUDA for this process; return their number."""
    count = 0
    for fused in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{fused}_sdp")(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of each replacement
        for name, operator in computing():
            library.impl(name, partial(computed, operator), "CUDA")
            count += 1
    return count
